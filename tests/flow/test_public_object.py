"""The graphed object looks like the module that it holds: names, attributes, modes; alone and inside a parent."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import ClosedError, PlanError
from tests.flow.small import Mlp, Routed, agrees, capture, rows, twin_of

GOLDEN = Path(__file__).parent / "golden"


class Net(nn.Module):
    """Names that could clash with the wrapper's own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.module.weight
        self.register_buffer("offset", torch.zeros(8))
        self.config = {"width": 8}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.module(x))) + self.offset

    def widths(self) -> int:
        return 8


class Parent(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.module = nn.Linear(8, 8)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(self.body(x))


def names(module: nn.Module) -> list[Any]:
    return [
        list(module.state_dict()),
        [n for n, _ in module.named_parameters()],
        [n for n, _ in module.named_buffers()],
        [n for n, _ in module.named_modules()],
        [n for n, _ in module.named_parameters(remove_duplicate=False)],
        [n for n, _ in module.named_modules(remove_duplicate=False, prefix="p")],
        list(module.state_dict(prefix="x.", keep_vars=True)),
        module.state_dict()._metadata,
    ]


@pytest.mark.parametrize("kind", [Net, Mlp, Routed])
def test_names_are_the_modules_own(kind: Any) -> None:
    module = kind()
    graphed = capture(module)
    assert names(graphed) == names(module)
    assert graphed.module is module
    assert [id(p) for p in graphed.parameters()] == [id(p) for p in module.parameters()]


@pytest.mark.parametrize("kind", [Net, Mlp])
def test_names_through_a_parent(kind: Any) -> None:
    module = kind()
    plain, held = Parent(twin_of(module)), Parent(capture(module))
    assert names(held) == names(plain)
    state = {key: value * 0 + 3 for key, value in plain.state_dict().items()}
    assert str(held.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    for key, value in held.state_dict().items():
        assert torch.equal(value, state[key]), key
    agrees(held.body, twin_of(module), rows())


@pytest.mark.parametrize("kind", [Net, Mlp])
def test_what_loading_through_a_parent_reports(kind: Any) -> None:
    plain, held = Parent(kind()), Parent(capture(kind()))
    state = plain.state_dict()
    for key in ("module.bias", "body.offset", "body.up.bias", "body.module.bias"):
        state.pop(key, None)
    state["body.extra"] = state["body.module.extra"] = state["module.extra"] = torch.zeros(1)
    ours, theirs = held.load_state_dict(state, strict=False), plain.load_state_dict(state, strict=False)
    assert sorted(ours.missing_keys) == sorted(theirs.missing_keys)
    assert sorted(ours.unexpected_keys) == sorted(theirs.unexpected_keys)
    wrong = next(key for key in state if key.startswith("body."))
    with pytest.raises(RuntimeError, match=r"body\.extra"):
        held.load_state_dict(state, strict=True)
    with pytest.raises(RuntimeError, match=f"size mismatch for {wrong}"):
        held.load_state_dict({**state, wrong: torch.zeros(1)}, strict=False)


def test_loading_directly() -> None:
    module = Net()
    twin, graphed = twin_of(module), capture(module)
    state = {key: value * 0 + 2 for key, value in twin.state_dict().items()}
    graphed.load_state_dict(state)
    twin.load_state_dict(state)
    agrees(graphed, twin, rows())
    found = graphed.load_state_dict({}, strict=False)
    assert found.missing_keys == twin.load_state_dict({}, strict=False).missing_keys


def test_a_tuple_is_named_by_number() -> None:
    layers = (Mlp(), nn.Linear(8, 8))
    graphed = capture(layers)
    assert [n for n, _ in graphed.named_parameters()] == [n for n, _ in nn.ModuleList(layers).named_parameters()]
    assert list(graphed.state_dict())[:2] == ["0.up.weight", "0.up.bias"]
    assert isinstance(graphed.module, nn.ModuleList)
    x = rows()
    assert torch.equal(graphed(x), layers[1](layers[0](x)))


def test_attributes_go_through() -> None:
    module = Net()
    graphed = capture(module)
    assert graphed.config is module.config
    assert graphed.widths() == 8
    assert graphed.offset is module.offset
    assert graphed.get_parameter("norm.weight") is module.norm.weight
    assert graphed.get_submodule("head") is module.head
    with pytest.raises(AttributeError, match="nothing_like_it"):
        graphed.nothing_like_it
    assert not hasattr(graphed, "nothing_like_it")
    assert getattr(graphed, "nothing_like_it", 3) == 3


def test_modes_and_conversions_go_through() -> None:
    module = Net()
    held = Parent(capture(module))
    held.eval()
    assert not any(m.training for m in (module, module.norm, held.body))
    held.train()
    assert all(m.training for m in (module, module.norm, held.body))
    assert held.body.train(False) is held.body
    assert not module.norm.training
    held.requires_grad_(False)
    assert not module.module.weight.requires_grad
    held.double()
    assert module.offset.dtype is torch.float64
    held.apply(lambda m: setattr(m, "touched", True))
    assert module.norm.touched


def test_a_deep_copy_is_not_graphed() -> None:
    module = Net()
    graphed = capture(module)
    twin = copy.deepcopy(graphed)
    assert type(twin) is Net
    assert twin.module.weight is not module.module.weight
    agrees(graphed, twin, rows())
    assert graphed.stats.replays == 1
    parent = copy.deepcopy(Parent(graphed))
    assert type(parent.body) is Net
    again = capture(twin)
    agrees(again, twin_of(twin), rows())


def test_a_deep_copy_of_a_drop_in_module_uses_its_own_weights() -> None:
    module = Mlp()
    x = rows()
    graphcap.make_graphed_callables(module, (x,), backend="tape")
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.up.weight.zero_()
        twin.up.bias.zero_()
        assert torch.equal(twin(x), twin.down(torch.zeros(4, 8)))
    twin(x).sum().backward()
    assert module.up.weight.grad is None


def test_pickling_is_refused() -> None:
    graphed = capture(Mlp())
    for attempt in (lambda: pickle.dumps(graphed), lambda: copy.copy(graphed), lambda: pickle.dumps(Parent(graphed))):
        with pytest.raises(TypeError, match="can't be pickled"):
            attempt()
    pickle.loads(pickle.dumps(graphed.state_dict()))


def test_disabled_and_eager() -> None:
    module = Routed()
    graphed, other = capture(module), capture(Mlp())
    x = rows()
    expected = module(x)
    with graphcap.disabled():
        assert torch.equal(graphed(x), expected)
        assert graphed(rows(6, 8)).shape == (6, 8)
        other(x)
    with graphed.eager():
        with graphed.eager():
            graphed(x)
        graphed(x)
        other(x)
    assert (graphed.stats.replays, other.stats.replays) == (0, 1)
    assert graphed.stats.eager == {"disabled": 4}
    with pytest.raises(ZeroDivisionError), graphcap.disabled(), graphed.eager():
        1 / 0
    assert torch.equal(graphed(x), expected)
    assert graphed.stats.replays == 1


def test_second_derivatives_with_disabled() -> None:
    """The way out that the error of create_graph names."""
    graphed = capture(Mlp(), (rows(requires_grad=True),))
    x = rows(requires_grad=True)
    with graphcap.disabled():
        (slope,) = torch.autograd.grad(graphed(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert x.grad is not None


def test_reset_forgets_flights_and_the_position() -> None:
    module = Mlp()
    graphed = capture((module,), ((rows(),),), order="0F0 0F1 0B0 0B1")
    graphed.forward("0F0", rows())
    graphed.reset()
    out = graphed.forward("0F0", x := rows())
    assert torch.equal(out, module(x))
    graphed.forward("0F1", rows())
    graphed.backward("0B0", torch.ones(4, 8))
    graphed.backward("0B1", torch.ones(4, 8))
    with pytest.raises(PlanError, match="order"):
        graphed(rows())


def test_closing_frees_and_ends() -> None:
    graphed = capture((Mlp(),), ((rows(),),), order="0F0 0F1 0B0 0B1")
    graphed.forward("0F0", rows())
    graphed.close()
    graphed.close()
    for call in (
        lambda: graphed.forward("0F1", rows()),
        lambda: graphed.backward("0B0", rows()),
        lambda: graphed.input_grad("0I0", rows()),
        lambda: graphed.weight_grad("0W0"),
    ):
        with pytest.raises(ClosedError):
            call()


def test_stats() -> None:
    graphed = capture(Routed(), on_mismatch="eager")
    assert graphed.stats.operations > 0
    graphed(rows()).sum().backward()
    graphed(rows(2, 8))
    assert graphed.stats.replays == 1
    assert sum(graphed.stats.eager.values()) == 1


def test_plan_facts() -> None:
    plan = capture((Routed(), Mlp(), Routed())).plan
    assert plan.graphs == 3
    assert len(plan.breaks) == 2
    assert [part.kind is graphcap.GRAPHED for part in plan.parts] == [True, False, True, False, True]
    assert plan.slots == 1
    assert plan.static_bytes > 0
    assert plan.breaks[0].reason == "the number of rows depends on the data"


def test_static_bytes_follow_what_is_in_flight() -> None:
    def size(microbatches: int, order: str) -> int:
        return capture((Mlp(),), ((rows(),),), order=order).plan.static_bytes // 1

    two = size(2, "0F0 0B0 0F1 0B1")
    assert two == size(8, " ".join(f"0F{m} 0B{m}" for m in range(8)))
    assert size(2, "0F0 0F1 0B0 0B1") > two


PLANS = {
    "one_module": lambda: capture(Mlp()),
    "breaks": lambda: capture((Routed(), Mlp(), Routed())),
    "order": lambda: capture(
        (Routed(), Mlp()), ((rows(),), (rows(requires_grad=True),)), order="0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1"
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_text_of_a_plan(name: str) -> None:
    """Golden text: a diff a person can read. Write a changed one by hand, after looking at it."""
    assert str(PLANS[name]().plan) + "\n" == (GOLDEN / f"plan_{name}.txt").read_text()


@pytest.mark.parametrize("verb", [graphcap.capture, graphcap.make_graphed_callables])
def test_the_warning_about_the_tape_points_at_the_caller(verb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphcap.backends, "_warned_tape", False)
    with pytest.warns(UserWarning, match="all tensors are on the CPU") as caught:
        verb(Mlp(), (rows(),))
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
