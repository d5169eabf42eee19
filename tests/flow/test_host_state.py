"""Host state that a graph has frozen: what crosses a break past the signature, and what is changed after capture."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphcap
from graphcap import EAGER, GRAPHED, CutError, PartialLayer, StateError
from graphcap.partial_layer import Part
from tests.flow.small import Mlp, Routed, agrees, capture, rows, twin_of

# ---------------------------------------------------------------------------- what an EAGER part hands on by an attribute


class Crossing(PartialLayer):
    """`stash` is what EAGER `b` does beside its result; `read` what GRAPHED `c` multiplies with."""

    inputs, outputs = "x", "y"

    def __init__(self, stash: Callable[[Any, Tensor], None], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("held", torch.ones(4, 8))
        self.st = torch.ones(4, 8)
        self.box = [torch.ones(4, 8)]
        self._stash, self._read = stash, read

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e -> y")

    def a(self, x: Tensor) -> Tensor:
        return torch.tanh(self.front(x))

    def b(self, h: Tensor) -> Tensor:
        self._stash(self, h)
        return h * h.detach().abs().max().item()

    def c(self, e: Tensor) -> Tensor:
        return self.back(e) * self._read(self)


def _set(name: str, value: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], None]:
    return lambda m, h: setattr(m, name, value(h))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


_outside: list[Tensor] = [torch.ones(4, 8)]

STALE: dict[str, tuple[Callable[[Any, Tensor], None], Callable[[Any], Any], str]] = {
    "attribute": (_set("st", lambda h: h.detach() * 2), lambda m: m.st, r"part 0\.c reads in .*Crossing\.st.*0\.b"),
    "a view of it": (_set("st", lambda h: (h.detach() * 2)[:, :1]), lambda m: m.st.t().t(), r"Crossing\.st"),
    "what it was given": (_set("st", lambda h: h.detach()), lambda m: m.st, r"Crossing\.st"),
    "by numpy": (_set("st", lambda h: torch.from_numpy(h.detach().numpy() * 2)), lambda m: m.st, r"Crossing\.st"),
    "by a function": (_set("st", lambda h: Doubled.apply(h.detach())), lambda m: m.st, r"Crossing\.st"),
    "in a list": (lambda m, h: m.box.__setitem__(0, h.detach() * 2), lambda m: m.box[0], r"Crossing\.box\[0\]"),
    "a rebound buffer": (_set("held", lambda h: h.detach() * 2), lambda m: m.held, r"Crossing\.held"),
    "a global": (lambda m, h: _outside.__setitem__(0, h.detach() * 2), lambda m: _outside[0], r"part 0\.c reads in mul"),
    "in a checkpoint": (
        _set("st", lambda h: h.detach() * 2),
        lambda m: checkpoint(lambda: m.back.weight.sum() * m.st, use_reentrant=False),
        r"Crossing\.st",
    ),
}


@pytest.mark.parametrize("case", STALE)
@pytest.mark.parametrize("warmup", [1, 3])
def test_what_an_eager_part_hands_on_past_the_signature(case: str, warmup: int) -> None:
    stash, read, message = STALE[case]
    with pytest.raises(CutError, match=message):
        capture(Crossing(stash, read), warmup=warmup)


def test_a_tensor_that_is_only_handed_on() -> None:
    class Returned(Crossing):
        def c(self, e: Tensor) -> Any:
            return self.back(e), self.st

    with pytest.raises(CutError, match=r"part 0\.c returns .*Returned\.st"):
        capture(Returned(_set("st", lambda h: h.detach() * 2), lambda m: 1.0))


def _in_place(m: Any, h: Tensor) -> None:
    with torch.no_grad():
        m.held.copy_(h.detach() * 2)


def _fill_once(m: Any, h: Tensor) -> None:
    if not hasattr(m, "table"):
        m.table = torch.full((4, 8), 3.0)


def _freed(m: Any, h: Tensor) -> None:
    for _ in range(20):
        (h.detach() * 2).sum()


FINE: dict[str, tuple[Callable[[Any, Tensor], None], Callable[[Any], Any]]] = {
    "a buffer changed in place": (_in_place, lambda m: m.held),
    "only the shape": (_set("st", lambda h: h.detach() * 2), lambda m: torch.ones_like(m.st)),
    "storages that were freed": (_freed, lambda m: (torch.ones(4, 8) * 2).relu() + m.st),
    "nothing": (lambda m, h: None, lambda m: m.st),
}


@pytest.mark.parametrize("case", FINE)
def test_what_may_cross(case: str) -> None:
    module = Crossing(*FINE[case])
    twin, graphed = twin_of(module), capture(module)
    for _ in range(3):
        agrees(graphed, twin, rows())
    assert graphed.stats.replays == 3


def test_a_constant_that_the_first_run_makes_may_cross() -> None:
    with torch.no_grad():
        capture(Crossing(_fill_once, lambda m: m.table))


def test_a_cast_of_autocast_is_no_crossing() -> None:
    module = Crossing(lambda m, h: None, lambda m: 1.0)
    module._stash = lambda m, h: F.linear(h.detach(), m.back.weight).sum().item()  # casts what `c` casts again
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        graphed = capture(module)
        x = rows()
        assert torch.equal(graphed(x), module(x))


# ------------------------------------------------------------------------------------------- what is changed after capture


@dataclass
class Settings:
    scale: float = 2.0
    sizes: tuple[int, ...] = (1, 2)


class State(nn.Module):
    gain = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.seq = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.bare = nn.Linear(8, 8, bias=False)
        self.register_buffer("mask", None)
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        self.numbers, self.table, self.pair = [1.0, 2.0], {"k": 0.5}, (1, 2)
        self.tensors, self._private = [torch.ones(8), torch.ones(8)], [3.0]
        self.acts = [torch.tanh, nn.Tanh()]
        self.settings, self.space = Settings(), types.SimpleNamespace(power=1.0)
        self.nested, self.names = {"inner": [1.0]}, {"a", "b"}
        self.cache: dict[str, Any] = {}
        self.log = [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.cache.setdefault("ones", torch.ones(8))
        y = self.act(self.seq(self.l(x))) * self.numbers[0] * self.table["k"] * self.pair[0] * self.tensors[0]
        y = self.conv(y.unsqueeze(1)).squeeze(1) + self.acts[0](self.bare(x)) * self._private[0] * self.gain
        y = y * self.settings.scale * self.space.power * self.nested["inner"][0] * self.cache["ones"]
        return y if self.mask is None else y * self.mask


def _patched(m: Any) -> None:
    m.l.forward = lambda x: F.linear(x, m.l.weight) * 2


CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list rebound": (lambda m: setattr(m, "numbers", [3.0]), "numbers was"),
    "list element": (lambda m: m.numbers.__setitem__(0, 3.0), r"numbers\[0\] was 1\.0 .* 3\.0"),
    "list longer": (lambda m: m.numbers.append(3.0), "numbers had 2 entries"),
    "private list element": (lambda m: m._private.__setitem__(0, 1.0), r"_private\[0\]"),
    "dict element": (lambda m: m.table.__setitem__("k", 3.0), r"table\['k'\] was 0\.5"),
    "dict key": (lambda m: m.table.update(new=1), "table had 1 entries"),
    "tuple rebound": (lambda m: setattr(m, "pair", (2, 2)), r"pair was \(1, 2\)"),
    "tensor in a list": (lambda m: m.tensors.__setitem__(0, torch.ones(8)), r"tensors\[0\] was a tensor"),
    "tensor in a list moved": (lambda m: setattr(m.tensors[0], "data", torch.ones(8)), r"tensors\[0\] has moved"),
    "function": (lambda m: setattr(m, "act", torch.sigmoid), r"act was .*tanh .*sigmoid"),
    "function in a list": (lambda m: m.acts.__setitem__(0, torch.sigmoid), r"acts\[0\] was .*tanh"),
    "module in a list": (lambda m: m.acts.__setitem__(1, nn.ReLU()), r"acts\[1\] was a Tanh"),
    "set": (lambda m: (m.names.remove("a"), m.names.add("c")), "names was"),
    "list in a dict": (lambda m: m.nested["inner"].__setitem__(0, 2.0), r"nested\['inner'\]\[0\]"),
    "class attribute hidden": (lambda m: setattr(m, "gain", 2.5), r"gain was set on the instance .*State\.gain"),
    "forward patched": (_patched, r"l\.forward was set on the instance"),
    "forward of the top patched": (lambda m: setattr(m, "forward", lambda x: x), "forward was set on the instance"),
    "none buffer": (lambda m: setattr(m, "mask", torch.zeros(8)), "mask was None"),
    "none parameter": (lambda m: setattr(m.bare, "bias", nn.Parameter(torch.ones(8))), r"bare\.bias was None"),
    "child appended": (lambda m: m.seq.append(nn.ReLU()), r"seq\.2 was added"),
    "parameter added": (lambda m: setattr(m.l, "extra", nn.Parameter(torch.ones(1))), r"l\.extra was added"),
    "buffer added": (lambda m: m.l.register_buffer("extra", torch.ones(1)), r"l\.extra was added"),
    "padding": (lambda m: setattr(m.conv, "padding", (0,)), r"conv\.padding was \(1,\)"),
    "stride": (lambda m: setattr(m.conv, "stride", (2,)), r"conv\.stride"),
    "dataclass field": (lambda m: setattr(m.settings, "scale", 3.0), r"settings\.scale was 2\.0"),
    "dataclass tuple": (lambda m: setattr(m.settings, "sizes", (3,)), r"settings\.sizes"),
    "namespace field": (lambda m: setattr(m.space, "power", 3.0), r"space\.power was 1\.0"),
    "config replaced": (lambda m: setattr(m, "settings", Settings()), "settings was"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_changed_host_state_is_found(case: str) -> None:
    change, message = CHANGED[case]
    module = State()
    twin, graphed = twin_of(module), capture(module)
    agrees(graphed, twin, rows())
    change(module)
    with pytest.raises(StateError, match=f"{message}(.|\n)*capture again"):
        graphed(rows())


@pytest.mark.parametrize("case", [c for c in CHANGED if c not in ("forward of the top patched", "child appended")])
def test_changed_host_state_may_run_eagerly(case: str) -> None:
    module = State()
    graphed = capture(module, on_mismatch="eager")
    CHANGED[case][0](module)
    x = rows()
    try:
        expected = module(x)
    except RuntimeError:  # a padding or stride that does not fit: eager says so, and so do we
        with pytest.raises(RuntimeError):
            graphed(x)
    else:
        assert torch.equal(graphed(x), expected)
    assert sum(graphed.stats.eager.values()) == 1


def test_what_is_no_change() -> None:
    module = State()
    twin, graphed = twin_of(module), capture(module)
    for step in range(3):
        module.seen = step  # bookkeeping of the user
        module.l.notes = ["x"] * step
        module.cache[f"k{step}"] = step  # filled by the first run
        module.pair, module.conv.padding = (1, 2), (1,)  # equal, though other objects
        with torch.no_grad():
            module.tensors[0].add_(0.0)
        agrees(graphed, twin, rows())
        for side in (module, twin):
            torch.optim.AdamW(side.parameters(), lr=0.1).step()
    assert graphed.stats.replays == 3


def test_a_forward_that_graphcap_patched_is_no_change() -> None:
    module, twin = State(), State()
    twin.load_state_dict(module.state_dict())
    graphcap.make_graphed_callables(module, (torch.ones(4, 8),), backend="tape", allow_unused_input=True)
    hooked = State()
    other = twin_of(hooked)
    graphed = capture(hooked)
    calls: list[int] = []
    hooked.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        x = rows()
        assert torch.equal(module(x).detach(), twin(x))
        agrees(graphed, other, rows())
    assert len(calls) == 2


# ------------------------------------------------------------------------------------------------- PartialLayers and theirs


class Experts(PartialLayer):
    inputs, outputs = "x", "y"

    def __init__(self) -> None:
        super().__init__()
        self.bb, self.frozen, self.shared = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.bb.register_buffer("t", torch.ones(8))
        self.experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)}) for _ in range(3))
        self.bank = nn.Module()  # read, never called
        self.bank.w = nn.Parameter(torch.ones(8))
        self.scale, self.limit, self.count, self.sizes = 2.0, 1.0, 0, [1.0]
        self.route_by = torch.tanh

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e -> y")

    def a(self, x: Tensor) -> Tensor:
        return F.linear(self.route_by(self.bb(x)) * self.bb.t, self.frozen.weight) * self.scale

    def b(self, h: Tensor) -> Tensor:
        self.count += 1
        chosen = self.experts[0]
        return chosen["down"](chosen["up"](h)).clamp(max=self._limit()) * self.bank.w + self.shared(h)

    def _limit(self) -> float:
        return self.limit

    def c(self, e: Tensor) -> Tensor:
        return F.linear(e, self.shared.weight.detach()) * self.sizes[0] + e


OWN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (lambda m: setattr(m, "scale", 3.0), "scale was 2.0"),
    "list": (lambda m: m.sizes.__setitem__(0, 3.0), r"sizes\[0\]"),
    "function": (lambda m: setattr(m, "route_by", torch.sigmoid), "route_by was"),
    "method": (lambda m: setattr(m, "a", lambda x: x), "a was set on the instance"),
    "buffer that is only read": (lambda m: setattr(m.bb, "t", torch.zeros(8)), r"bb\.t was replaced"),
    "weight that is only read": (
        lambda m: setattr(m.frozen, "weight", nn.Parameter(torch.ones(8, 8), requires_grad=False)),
        r"frozen\.weight was replaced",
    ),
    "module that is only read": (lambda m: setattr(m, "frozen", nn.Linear(8, 8)), "frozen.* is another module"),
    "weight that both read": (
        lambda m: setattr(m.shared, "weight", nn.Parameter(torch.ones(8, 8))),
        r"shared\.weight was replaced",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_state_of_a_partial_layer_is_watched(case: str) -> None:
    change, message = OWN[case]
    module = Experts()
    graphed = capture(module)
    agrees(graphed, twin_of(module), rows())
    change(module)
    with pytest.raises(StateError, match=message):
        graphed(rows())


class Lora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.thin = base, nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.thin(x)


def _lora(m: Any) -> None:
    m.experts[0]["up"] = Lora(m.experts[0]["up"])
    m.experts[2]["down"] = Lora(m.experts[2]["down"])  # without tokens in warm-up


THEIRS: dict[str, Callable[[Any], Any]] = {
    "lora": _lora,
    "an expert more": lambda m: m.experts.append(nn.Linear(8, 8)),
    "experts in eval": lambda m: m.experts.eval(),
    "an expert's attribute": lambda m: setattr(m.experts[1]["up"], "in_features", 9),
    "an expert's weight": lambda m: setattr(m.experts[0]["up"], "weight", nn.Parameter(torch.ones(8, 8))),
    "an expert without tokens": lambda m: m.experts.__setitem__(1, nn.Linear(8, 8)),
    "a bank that is read": lambda m: setattr(m.bank, "w", nn.Parameter(torch.full((8,), 2.0))),
    "a bank replaced": lambda m: setattr(m, "bank", twin_of(m.bank)),
    "a number of its helper": lambda m: setattr(m, "limit", 0.5),
    "its counter": lambda m: setattr(m, "count", 7),
}


@pytest.mark.parametrize("case", THEIRS)
def test_what_belongs_to_eager_parts_may_change(case: str) -> None:
    module = Experts()
    graphed = capture(module)
    agrees(graphed, twin_of(module), rows())
    THEIRS[case](module)
    for _ in range(2):
        agrees(graphed, twin_of(module), rows())
    assert graphed.stats.replays == 3


def test_what_the_automatic_cut_leaves_to_breaks_may_change() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.back, self.brk = nn.Linear(8, 8), nn.Linear(8, 8), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.brk(self.front(x)), self.back.weight)

    module = Cut()
    graphed = capture(module, break_at="brk")
    agrees(graphed, twin_of(module), rows())
    module.brk.up = Lora(module.brk.up)
    module.brk.eval()
    agrees(graphed, twin_of(module), rows())
    module.back = nn.Linear(8, 8)  # read, never called
    with pytest.raises(StateError, match="back"):
        graphed(rows())


def test_an_attribute_of_eager_and_graphed_code() -> None:
    module = Routed()
    graphed = capture(module)
    module.width = 7  # only EAGER code names it
    with pytest.raises(graphcap.InputMismatch, match=r"experts, output 0"):
        graphed(rows())
