"""Host effects that are declared: `CaptureConfig(on_replay=)` does what the Python of graphed parts would have done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap import EAGER, GRAPHED, CaptureConfig, CutError, PartialLayer
from graphcap.order import Step
from graphcap.partial_layer import Part
from graphcap.testing import deterministic
from tests.flow.twins import assert_same, gradients

WIDTH = 8


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(-1) > 0).nonzero().squeeze(-1)
        return torch.tanh(x).index_add(0, chosen, self.linear(x[chosen]))


class Counting(nn.Module):
    """A number and a list that the forward changes in its first stretch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.brk = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Expert()
        self.calls, self.sizes, self.last = 0, [0], "none"

    def note(self, *_: Any) -> None:
        self.calls += 1
        self.sizes.append(self.calls * 2)
        self.last = f"call {self.calls}"

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return self.b(self.brk(self.a(x)))

    @property
    def state(self) -> Any:
        return self.calls, list(self.sizes), self.last


class Declared(PartialLayer, Counting):
    inputs = outputs = "x"

    def __init__(self) -> None:
        Counting.__init__(self)

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("first", "x -> h"), EAGER("middle", "h -> e"), GRAPHED("second", "e -> x")

    forward = PartialLayer.forward

    def first(self, x: Tensor) -> Tensor:
        self.note()
        return self.a(x)

    def middle(self, h: Tensor) -> Tensor:
        return self.brk(h)

    def second(self, e: Tensor) -> Tensor:
        return self.b(e)


class Whole(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return self.b(torch.tanh(self.a(x))) + self.brk.linear(x)


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "automatic": (Counting, {"break_at": "brk"}),
    "declared": (Declared, {}),
    "whole": (Whole, {}),
}


def rows(seed: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed + 3)).requires_grad_()


def captured(kind: str, on_replay: Any = None, **options: Any) -> tuple[Any, graphcap.Graphed]:
    build, more = KINDS[kind]
    torch.manual_seed(1)
    module = build()
    twin = copy.deepcopy(module)
    config = CaptureConfig(on_replay=module.note if on_replay is None else on_replay, **options.pop("config", {}))
    return twin, graphcap.capture(module, (rows(0),), backend="tape", config=config, **more, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_refused_without(kind: str) -> None:
    build, more = KINDS[kind]
    with pytest.raises(CutError, match="on_replay"):
        graphcap.capture(build(), (rows(0),), backend="tape", **more)


@pytest.mark.parametrize("config", [{}, {"warmup": 1}, {"grads": "accumulate"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_with_the_counter(kind: str, config: dict[str, Any]) -> None:
    with deterministic("cpu"):
        twin, graphed = captured(kind, config=config)
        module = graphed.module
        assert module.state == (0, [0], "none"), "neither warm-up nor recording counts"
        for step in range(20):
            found = []
            for call, owner in ((graphed, module), (twin, twin)):
                owner.zero_grad(set_to_none=True)
                x = rows(step)
                out = call(x)
                out.square().mean().backward()
                found.append((out.detach().clone(), x.grad, gradients(owner), owner.state))
                with torch.no_grad():
                    for parameter in owner.parameters():
                        parameter -= 0.05 * parameter.grad
            assert torch.equal(found[0][0], found[1][0])
            assert torch.equal(found[0][1], found[1][1])
            assert_same(found[0][2], found[1][2])
            assert found[0][3] == found[1][3] == (step + 1, [0, *range(2, 2 * step + 3, 2)], f"call {step + 1}")
        assert graphed.stats.replays == 20


@pytest.mark.parametrize("kind", KINDS)
def test_where_python_runs_it_is_not_called(kind: str) -> None:
    twin, graphed = captured(kind, config={"on_mismatch": "eager"})
    for x in (rows(1), torch.ones(3, WIDTH)):
        for side in (graphed, twin):
            with torch.no_grad(), graphcap.disabled():
                side(x)
        assert graphed.module.state == twin.state
    graphed(torch.ones(3, WIDTH))  # a mismatch, so eager
    twin(torch.ones(3, WIDTH))
    assert graphed.module.state == twin.state
    with torch.no_grad():
        graphed(rows(2))  # a replay
        twin(rows(2))
    assert graphed.module.state == twin.state
    assert sum(graphed.stats.eager.values()) == 3


def test_it_gets_the_step() -> None:
    seen: list[Any] = []
    _, graphed = captured("automatic", seen.append, order="0F0 0F1 0B0 0B1")
    for _ in range(2):
        for microbatch in range(2):
            graphed.forward(f"0F{microbatch}", rows(microbatch))
        for microbatch in range(2):
            graphed.backward(f"0B{microbatch}", torch.ones(6, WIDTH))
    assert [str(step) for step in seen] == ["0F0", "0F1"] * 2
    assert all(isinstance(step, Step) for step in seen)


def test_an_error_leaves_the_slot_free() -> None:
    fail: list[bool] = [True]

    def effect(step: Step) -> None:
        if fail.pop():
            raise RuntimeError("the log is full")

    twin, graphed = captured("automatic", effect)
    with pytest.raises(RuntimeError, match="log is full"):
        graphed(rows(1))
    assert graphed.stats.replays == 0
    fail += [False]
    x, z = rows(2), rows(2)
    graphed(x).sum().backward()
    twin(z).sum().backward()
    assert torch.equal(x.grad, z.grad)  # type: ignore[arg-type]
    assert_same(gradients(graphed.module), gradients(twin))


def _scaled(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.b(torch.tanh(self.a(x))) * self.calls + self.brk.linear(x)


def _kept(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    self.sizes.append(h.mean())
    return self.b(torch.tanh(h))


def _drawn(self: Any, x: Tensor) -> Tensor:
    import random

    return self.b(torch.tanh(self.a(x))) * random.random()


@pytest.mark.parametrize(
    ("forward", "words"),
    [(_scaled, "depend on what they change"), (_kept, "sizes at every call"), (_drawn, "generator random")],
)
def test_what_is_refused_all_the_same(forward: Any, words: str) -> None:
    module = type("Other", (Whole,), {"forward": forward})()
    with pytest.raises(CutError, match=words):
        graphcap.capture(module, (rows(0),), backend="tape", config=CaptureConfig(on_replay=lambda step: None))


@pytest.mark.parametrize("kind", ["automatic", "declared"])
def test_an_eager_part_that_reads_it(kind: str) -> None:
    """It would see the number of the call before."""
    build, more = KINDS[kind]

    class Reading(Expert):
        def __init__(self, owner: Any) -> None:
            super().__init__()
            self.owner = (owner,)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + self.owner[0].calls)

    module = build()
    if kind == "automatic":
        module.brk = Reading(module)
    else:
        module = type("Reads", (Declared,), {"middle": lambda self, h: self.brk(h) * self.calls})()
    with pytest.raises(CutError, match=r"calls is changed in a graphed part and named by the EAGER part"):
        graphcap.capture(module, (rows(0),), backend="tape", config=CaptureConfig(on_replay=lambda step: None), **more)


def test_it_must_be_callable() -> None:
    with pytest.raises(graphcap.errors.PlanError, match="on_replay"):
        CaptureConfig(on_replay=3)  # type: ignore[arg-type]
