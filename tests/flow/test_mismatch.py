"""A call, a mode or a module that is not what was captured: an error that names it, or a counted eager call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import InputMismatch, PlanError, StateError
from tests.flow.small import Mlp, Routed, agrees, capture, rows, twin_of

# -------------------------------------------------------------------------------------------------------- the arguments


class Options(nn.Module):
    """One of each: a tensor, an optional tensor, a number, a nested dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, *, bias: torch.Tensor | None = None, scale: float = 1.0, extra: Any = None
    ) -> torch.Tensor:
        y = self.linear(x) * (1 + scale)
        if bias is not None:
            y = y + bias
        return y + extra["a"] * extra["b"]["c"] if extra else y


def extra() -> dict[str, Any]:
    return {"a": rows(8), "b": {"c": rows(8)}}


def captured(**kwargs: Any) -> graphcap.Graphed:
    return capture(Options(), (rows(),), kwargs)


WRONG: list[tuple[str, dict[str, Any], Any, str]] = [
    ("broadcast rows", {}, lambda g: g(rows(1, 8)), r"argument 0: expected shape \[4, 8\], got \[1, 8\]"),
    ("broadcast dims", {}, lambda g: g(rows(8)), r"argument 0: expected shape \[4, 8\], got \[8\]"),
    ("fewer rows", {}, lambda g: g(rows(3, 8)), r"argument 0: expected shape \[4, 8\], got \[3, 8\]"),
    ("dtype", {}, lambda g: g(rows().double()), r"argument 0: expected dtype torch.float32, got torch.float64"),
    ("strides", {}, lambda g: g(rows(8, 4).t()), r"argument 0: expected strides \[8, 1\], got \[1, 4\]"),
    ("expanded", {}, lambda g: g(rows(1, 8).expand(4, 8)), r"argument 0: expected strides"),
    ("requires_grad", {}, lambda g: g(rows(requires_grad=True)), r"argument 0: expected requires_grad=False, got True"),
    ("no argument", {}, lambda g: g(), r"expected 1 positional arguments, got 0"),
    ("two arguments", {}, lambda g: g(rows(), rows()), r"expected 1 positional arguments, got 2"),
    ("by keyword", {}, lambda g: g(x=rows()), r"expected 1 positional arguments, got 0"),
    ("extra keyword", {}, lambda g: g(rows(), bias=rows(8)), "keyword 'bias' was not captured"),
    ("missing keyword", {"scale": 2.0}, lambda g: g(rows()), "keyword 'scale' is missing"),
    ("constant", {"scale": 2.0}, lambda g: g(rows(), scale=3.0), "keyword 'scale': expected 2.0.*got 3.0"),
    ("constant's type", {"scale": 2.0}, lambda g: g(rows(), scale=2), "keyword 'scale': expected 2.0.*got 2"),
    ("constant's sign", {"scale": 0.0}, lambda g: g(rows(), scale=-0.0), "keyword 'scale': expected 0.0.*got -0.0"),
    ("constant to tensor", {"scale": 2.0}, lambda g: g(rows(), scale=rows(8)), "keyword 'scale': expected 2.0.*tensor"),
    ("None to tensor", {"bias": None}, lambda g: g(rows(), bias=rows(8)), "keyword 'bias': expected None.*tensor"),
    ("tensor to None", {"bias": rows(8)}, lambda g: g(rows(), bias=None), r"keyword 'bias': expected a tensor.*None"),
    ("tensor to number", {"bias": rows(8)}, lambda g: g(rows(), bias=1.0), r"keyword 'bias': expected a tensor"),
    ("nested keys", {"extra": extra()}, lambda g: g(rows(), extra={"a": rows(8)}), "keyword 'extra': .*'b'"),
    (
        "nested shape",
        {"extra": extra()},
        lambda g: g(rows(), extra={"a": rows(8), "b": {"c": rows(1)}}),
        r"keyword 'extra'\['b'\]\['c'\]: expected shape \[8\], got \[1\]",
    ),
    ("a list for a tensor", {}, lambda g: g([rows()]), "argument 0: expected a single value, got a list of 1"),
    ("an array for a tensor", {}, lambda g: g(rows().numpy()), "argument 0: expected a tensor"),
]


@pytest.mark.parametrize(("kwargs", "call", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_argument_is_named(kwargs: dict[str, Any], call: Any, message: str) -> None:
    graphed = captured(**kwargs)
    with pytest.raises(InputMismatch, match=message) as caught:
        call(graphed)
    assert isinstance(caught.value, TypeError | ValueError)
    assert graphed.stats.replays == 0
    agrees(graphed, twin_of(graphed), rows(), **kwargs)


def test_keywords_and_keys_may_come_in_any_order() -> None:
    graphed = captured(scale=2.0, bias=rows(8), extra=extra())
    twin = twin_of(graphed)
    nested = {"b": {"c": rows(8)}, "a": rows(8)}
    agrees(graphed, twin, rows(), extra=nested, bias=rows(8), scale=2.0)


def test_a_nan_constant_equals_itself() -> None:
    graphed = capture(lambda x, bound: x * 2 if bound != bound else x, (rows(), float("nan")))
    x = rows()
    assert torch.equal(graphed(x, float("nan")), x * 2)


def test_a_mismatch_may_run_eagerly_and_is_counted() -> None:
    module = Options()
    twin = twin_of(module)
    graphed = capture(module, (rows(),), {"scale": 2.0}, on_mismatch="eager")
    agrees(graphed, twin, rows(), scale=2.0)
    for _ in range(2):
        agrees(graphed, twin, rows(5, 8), scale=2.0)
    agrees(graphed, twin, rows(), scale=3.0)
    with pytest.raises(TypeError, match="unexpected keyword"):
        graphed(rows(), typo=1)
    agrees(graphed, twin, rows(), scale=2.0)
    assert graphed.stats.replays == 2
    assert graphed.stats.eager["argument 0: expected shape [4, 8], got [5, 8]"] == 2
    assert sum(graphed.stats.eager.values()) == 4


def test_a_dict_output_keeps_the_order_of_its_keys() -> None:
    """Not sorted: `tuple(out.values())` means something to the caller."""

    def call(x: torch.Tensor) -> dict[str, Any]:
        return {"z": x * 2, "a": {"y": x * 3, "b": x * 4}}

    out = capture(call)(rows())
    assert list(out) == ["z", "a"]
    assert list(out["a"]) == ["y", "b"]


def test_a_dict_argument_keeps_the_order_of_its_keys() -> None:
    def call(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts.values()))

    x, y = rows(), rows()
    assert torch.equal(capture(call, ({"z": rows(), "a": rows()},))({"z": x, "a": y}), torch.cat([x, y]))


# ------------------------------------------------------------------------------------------------------------- the modes


def test_training_toggled() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    graphed = capture(module)
    twin = twin_of(module)
    agrees(graphed, twin, rows())
    graphed.eval()
    with pytest.raises(InputMismatch, match=r"training=True, called with training=False.*graphcap\.disabled"):
        graphed(rows())
    with graphcap.disabled(), torch.no_grad():  # what the error offers; any batch size
        assert graphed(rows(3, 8)).shape == (3, 8)
    graphed.train()
    agrees(graphed, twin, rows())
    assert torch.equal(module[1].running_mean, twin[1].running_mean)


def test_training_of_a_submodule_toggled() -> None:
    """The usual way to freeze a BatchNorm; the module's own flag does not show it."""
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    graphed = capture(module)
    graphed(rows()).sum().backward()
    module[1].eval()
    with pytest.raises(StateError, match=r"1\.training"):
        graphed(rows())
    module[1].train()
    agrees(graphed, twin_of(module), rows())


def test_training_toggled_may_run_eagerly() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    twin, graphed = twin_of(module), capture(module, on_mismatch="eager")
    graphed.eval()
    twin.eval()
    agrees(graphed, twin, rows())
    assert graphed.stats.eager == {"captured with training=True, called with training=False": 1}


def test_captured_with_gradients_called_without() -> None:
    module = Mlp()
    twin, graphed = twin_of(module), capture(module)
    x = rows()
    with torch.no_grad():
        kept = [graphed(x), graphed(rows())]  # nothing is in flight
    assert not kept[0].requires_grad
    assert torch.equal(kept[0], twin(x))
    agrees(graphed, twin, rows())
    assert graphed.stats.replays == 3


def test_captured_without_gradients_called_with() -> None:
    module = Mlp()
    with torch.no_grad():
        graphed = capture(module)
    with pytest.raises(InputMismatch, match="captured without gradients"):
        graphed(rows())
    with torch.no_grad():
        assert torch.equal(graphed(x := rows()), module(x))
    module.requires_grad_(False)
    with torch.no_grad():
        again = capture(module)
    assert torch.equal(again(x), module(x))
    with pytest.raises(InputMismatch, match="captured without gradients"):
        again(rows(requires_grad=True))


def test_autocast_differs() -> None:
    module = Mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graphed = capture(module)
    with pytest.raises(InputMismatch, match=r"captured under autocast to torch.bfloat16, called without autocast"):
        graphed(rows())
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(InputMismatch, match=r"called under .*float16"):
        graphed(rows())
    twin = twin_of(module)
    for _ in range(2):
        x = rows()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, expected = graphed(x), twin(x)
        assert out.dtype is torch.bfloat16
        assert torch.equal(out, expected)
        out.float().sum().backward()
        expected.float().sum().backward()
        assert torch.equal(module.up.weight.grad, twin.up.weight.grad)
        for side in (module, twin):
            torch.optim.SGD(side.parameters(), lr=0.1).step()
            side.zero_grad()
    plain = capture(Mlp())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputMismatch, match="captured without autocast"):
        plain(rows())


def test_deterministic_fill_and_default_dtype_do_not_matter() -> None:
    """A replay runs no Python, so the default dtype of the moment is not asked."""
    module = Mlp()
    graphed = capture(module)
    x = rows()
    expected = module(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(graphed(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# ----------------------------------------------------------------------------------------------- the module has changed


class Maybe(graphcap.PartialLayer):
    """An eager part that may return None where it returned a tensor."""

    inputs = "hidden"
    outputs = "hidden, extra"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.gives = True

    def parts(self) -> Any:
        return graphcap.GRAPHED("work", "hidden -> hidden"), graphcap.EAGER("maybe", "hidden -> extra")

    def work(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def maybe(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return hidden * 2 if self.gives else None


@pytest.mark.parametrize("at_capture", [True, False])
def test_an_output_that_changes_between_none_and_tensor(at_capture: bool) -> None:
    layer = Maybe()
    layer.gives = at_capture
    graphed = capture(layer)
    layer.gives = not at_capture
    with pytest.raises(InputMismatch, match=r"maybe, output 0: expected"):
        graphed(rows())
    layer.gives = at_capture
    assert (graphed(rows())[1] is None) is not at_capture


CHANGES: list[tuple[str, Any, str]] = [
    ("assign", lambda m: m.load_state_dict(twin_of(m).state_dict(), assign=True), "was replaced"),
    ("dtype", lambda m: m.double(), "has moved|was replaced"),
    ("rebound data", lambda m: setattr(m.down.weight, "data", m.down.weight.data * 2), "down.weight has moved"),
    ("requires_grad off", lambda m: m.up.weight.requires_grad_(False), "up.weight has requires_grad=False"),
    ("requires_grad all off", lambda m: m.requires_grad_(False), "requires_grad=False"),
    ("a replaced module", lambda m: setattr(m, "up", nn.Linear(8, 8)), "up.*another|up.weight was replaced"),
    ("a deleted parameter", lambda m: m.up.register_parameter("bias", None), "up.bias was replaced"),
    ("buffer", lambda m: m.register_buffer("offset", torch.ones(8)), "offset was replaced"),
    ("plain tensor", lambda m: setattr(m, "mask", torch.zeros(8)), "mask was replaced"),
    ("a number", lambda m: setattr(m, "scale", 3.0), r"scale was 2.0 .*3.0"),
    ("a flag", lambda m: setattr(m, "first", False), r"first was True .*False"),
    ("a dropout rate", lambda m: setattr(m.drop, "p", 0.5), r"drop.p was 0.0 .*0.5"),
    ("a new activation", lambda m: setattr(m, "act", nn.Tanh()), "act is another module"),
]


class Stateful(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(8))
        self.mask = torch.ones(8)
        self.scale = 2.0
        self.first = True
        self.drop = nn.Dropout(0.0)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.act(self.up(x))) * self.mask * self.scale + self.offset
        return self.drop(y) if self.first else y


@pytest.mark.parametrize(("change", "message"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_changed_module_is_found(change: Any, message: str) -> None:
    module = Stateful()
    graphed = capture(module)
    agrees(graphed, twin_of(module), rows())
    change(module)
    with pytest.raises(StateError, match=message):
        graphed(rows())


@pytest.mark.parametrize("change", [c[1] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_changed_module_may_run_eagerly(change: Any) -> None:
    module = Stateful()
    graphed = capture(module, on_mismatch="eager")
    change(module)
    x = rows().to(module.up.weight.dtype)
    torch.manual_seed(1)
    out = graphed(x)
    torch.manual_seed(1)
    assert torch.equal(out, module(x))
    assert sum(graphed.stats.eager.values()) == 1


def test_a_change_after_a_dropped_forward_is_found() -> None:
    """The check is due again although the backward never ran."""
    module = Mlp()
    graphed = capture(module)
    graphed(rows())
    module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()}, assign=True)
    with pytest.raises(StateError, match=r"up.weight was replaced"):
        graphed(rows())


def test_values_changed_in_place_are_seen() -> None:
    module = Stateful()
    twin, graphed = twin_of(module), capture(module)
    for side in (module, twin):
        with torch.no_grad():
            side.load_state_dict({k: v * 0.5 + 1 for k, v in side.state_dict().items()})
            side.mask.fill_(0.5)
            side.offset.add_(1)
    agrees(graphed, twin, rows())


def test_an_optimizer_step_is_seen() -> None:
    module = Mlp()
    twin, graphed = twin_of(module), capture(module)
    for foreach in (True, False):
        for side in (module, twin):
            torch.optim.AdamW(side.parameters(), lr=0.1, foreach=foreach)
        for _ in range(3):
            agrees(graphed, twin, rows())
            for side in (module, twin):
                torch.optim.AdamW(side.parameters(), lr=0.1, foreach=foreach).step()


class LowRank(nn.Module):
    """LoRA: the old linear plus a product of two thin ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def test_a_module_of_an_eager_part_may_be_replaced() -> None:
    module = Routed()
    graphed = capture(module)
    agrees(graphed, twin_of(module), rows())
    module.expert = LowRank(module.expert)
    agrees(graphed, twin_of(module), rows())
    assert module.expert.a.weight.grad is not None
    assert graphed.stats.replays == 2


def test_a_module_of_a_graphed_part_may_not() -> None:
    module = Routed()
    graphed = capture(module)
    agrees(graphed, twin_of(module), rows())
    module.front = LowRank(module.front)
    with pytest.raises(StateError, match="front is another module now"):
        graphed(rows())


def test_an_attribute_that_an_eager_part_changes_is_its_own_business() -> None:
    module = Routed()
    module.width = 8
    plain = module.experts

    def experts(tokens: torch.Tensor) -> torch.Tensor:
        module.seen = getattr(module, "seen", 0) + 1
        return plain(tokens)

    module.experts = experts
    graphed = capture(module)
    for _ in range(3):
        graphed(rows()).sum().backward()
    assert module.seen == 3


@pytest.mark.parametrize(
    "options", [{"on_mismatch": "ignore"}, {"grads": "add"}, {"outputs": "view"}, {"warmup": 0}, {"retain_graph": 1}]
)
def test_options_that_do_not_exist_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"CaptureConfig.{next(iter(options))}="):
        graphcap.CaptureConfig(**options)
