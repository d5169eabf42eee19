"""recompute="part": no activation of a part is kept, and everything is what eager (and torch's checkpoint) computes."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import graphcap
from graphcap import EAGER, GRAPHED, CaptureConfig, CutError, PlanError, ReplayError
from graphcap._capture import Recorder
from graphcap._recompute import Again
from graphcap.fp8_meta import QuantSpec
from graphcap.fp8_reference import RefFp8Linear, RefManager, RefRecipe
from graphcap.testing import Comparison, compare, deterministic
from tests.drop_in.delayed import DelayedLinear
from tests.flow.small import Routed, rows, same_gradients

ORDERS = [
    None,
    "0F0 0F1 0B0 0B1",
    "0F0 0F1 0B1 0B0",
    "0F0 0F1 0B0 0F2 0B1 0B2",
    "0F0 0I0 0W0 0F1 0I1 0W1",
    "0F0 0F1 0I0 0I1 0W0 0W1",
]


class Dropped(Routed):
    """Random numbers in every part."""

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens, residual = super().route(F.dropout(hidden, 0.2))
        return F.dropout(torch.tanh(tokens), 0.3), residual * torch.rand_like(residual)

    def experts(self, tokens: Tensor) -> Tensor:
        return F.dropout(super().experts(tokens), 0.4)

    def combine(self, routed: Tensor, residual: Tensor) -> Tensor:
        return super().combine(F.dropout(torch.sin(routed), 0.1), residual)


class Plain(nn.Module):
    """The same kind of model as a plain module, to be cut by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.first(x)))
        y = self.experts(h) + self.drop(h)
        h = self.experts(torch.sin(self.drop(self.last(y)))) * h
        return self.last(F.dropout(torch.tanh(h), 0.2)) + y


def inputs(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(index + 3)).requires_grad_(),), {}


def judged(build: Any, steps: int = 20, config: dict[str, Any] | None = None, **options: Any) -> Comparison:
    torch.manual_seed(2)
    with deterministic("cpu"):
        return compare(
            build,
            inputs,
            steps=steps,
            backend="tape",
            config=CaptureConfig(recompute="part", **(config or {})),
            **options,
        )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_declared_parts(order: str | None, grads: Any) -> None:
    verdict = judged(Dropped, order=order, config={"grads": grads})
    assert verdict, str(verdict)


@pytest.mark.parametrize("order", ORDERS)
def test_an_automatic_cut(order: str | None) -> None:
    verdict = judged(Plain, order=order, break_at="experts")
    assert verdict, str(verdict)


@pytest.mark.parametrize("config", [{"grads": "alias"}, {"outputs": "alias"}, {"retain_graph": True}, {"warmup": 1}])
def test_with_other_options(config: dict[str, Any]) -> None:
    verdict = judged(Plain, config=config, break_at="experts")
    assert verdict, str(verdict)


def test_two_chunks() -> None:
    verdict = judged(lambda: (Dropped(), (Dropped(), nn.Linear(8, 8))), order="0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1")
    assert verdict, str(verdict)


def test_under_autocast() -> None:
    module = Plain()
    twin = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        graphed = graphcap.capture(
            module, *inputs(0), backend="tape", break_at="experts", config=CaptureConfig(recompute="part")
        )
        for index in range(3):
            sides = []
            for side in (graphed, twin):
                torch.manual_seed(index)
                (x,), _ = inputs(index)
                side(x).float().square().mean().backward()
                sides.append(x.grad)
            assert torch.equal(sides[0], sides[1])
    same_gradients(module, twin)


class Checkpointed(nn.Module):
    """What a user would write with torch's checkpoint: each part in one."""

    def __init__(self, layer: Dropped) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        tokens, residual = checkpoint(self.layer.route, hidden, use_reentrant=False)
        routed = checkpoint(self.layer.experts, tokens, use_reentrant=False)
        made: Tensor = checkpoint(self.layer.combine, routed, residual, use_reentrant=False)
        return made


def test_equal_to_torch_checkpoint() -> None:
    layer = Dropped()
    twin = Checkpointed(copy.deepcopy(layer))
    graphed = graphcap.capture(layer, *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))
    for index in range(20):
        sides = []
        for side, parameters in ((graphed, layer.parameters()), (twin, twin.parameters())):
            torch.manual_seed(index)
            optimizer = torch.optim.SGD(parameters, lr=0.05)
            optimizer.zero_grad()
            (x,), _ = inputs(index)
            value = side(x)
            value.square().mean().backward()
            assert x.grad is not None and x.grad.count_nonzero()
            sides.append((value.detach(), x.grad, torch.get_rng_state()))
            if index < 19:
                optimizer.step()
        for ours, theirs in zip(*sides, strict=True):
            assert torch.equal(ours, theirs)
    same_gradients(layer, twin.layer)


class Deep(nn.Module):
    """Much is saved between two values that cross."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.experts = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for _ in range(6):
                x = torch.tanh(torch.sin(x) * 1.5)
            x = self.experts(block(x))
        return x


def test_fewer_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives in the pool when all forwards are recorded and no backward is; and what the plan says about it."""
    held: dict[Any, int] = {}
    plans: dict[Any, Any] = {}
    record = Recorder._backward

    def noted(self: Recorder, work: Any, phases: Any) -> None:
        held[self.plan.config.recompute] = self.backend.allocated(work.pool)
        record(self, work, phases)

    monkeypatch.setattr(Recorder, "_backward", noted)
    for recompute in (None, "part"):
        config = CaptureConfig(recompute=recompute)  # type: ignore[arg-type]
        plans[recompute] = graphcap.capture(Deep(), *inputs(0), backend="tape", break_at="experts", config=config).plan
    saved = plans["part"].recompute_saves
    assert saved >= 4 * 6 * (4 * 8 * 4)  # 4 stretches of 6 rounds, and every tanh keeps its result
    assert held[None] - held["part"] == saved
    assert held["part"] <= plans["part"].static_bytes
    assert f"{saved / 1024:.1f} KiB of activations recomputed" in str(plans["part"])
    assert plans[None].recompute_saves == 0 and "recomputed" not in str(plans[None])


def test_slots_remember_their_own_random_numbers() -> None:
    """Two microbatches in flight, the second one's backward first."""
    layer = Dropped()
    twin = copy.deepcopy(layer)
    graphed = graphcap.capture(
        layer, *inputs(0), backend="tape", order="0F0 0F1 0B1 0B0", config=CaptureConfig(recompute="part")
    )
    for call in (lambda step, x: graphed.forward(step, x), lambda step, x: twin(x)):
        torch.manual_seed(9)
        values = [call(f"0F{m}", inputs(m)[0][0]) for m in range(2)]
        for m in (1, 0):
            if call.__code__.co_freevars == ("graphed",):
                graphed.backward(f"0B{m}", torch.ones(4, 8))
            else:
                values[m].backward(torch.ones(4, 8))
    same_gradients(layer, twin)


def test_a_recomputation_with_other_random_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without the forward's random state the gradients differ."""

    def careless(self: Again, launch: Any, then: Any) -> None:
        launch()

    monkeypatch.setattr(Again, "replay", careless)
    assert "differ" in str(judged(Dropped, steps=2))


# --------------------------------------------------------------------------------------------------- what does not repeat


def test_a_part_that_changes_a_buffer_is_refused() -> None:
    class Norm(Routed):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return super().route(self.norm(hidden))

    with pytest.raises(CutError, match=r"BatchNorm.*change it twice"):
        graphcap.capture(Norm(), *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))
    assert judged(lambda: Norm().eval(), steps=3)


def test_running_statistics_without_a_counter_are_refused() -> None:
    class Norm(Routed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("var", torch.ones(8))

        def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return super().route(F.batch_norm(hidden, self.mean, self.var, training=True))

    with pytest.raises(CutError, match="change it twice"):
        graphcap.capture(Norm(), *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))


OWN = torch.Generator().manual_seed(5)


class OwnGenerator(Routed):
    place = "route"

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().route(self.noisy(hidden, "route"))

    def experts(self, tokens: Tensor) -> Tensor:
        return super().experts(self.noisy(tokens, "experts")).sin()

    def noisy(self, x: Tensor, place: str) -> Tensor:
        return x * torch.rand(x.shape, generator=OWN) if place == self.place else x


def test_an_own_generator_in_a_graphed_part_is_refused() -> None:
    with pytest.raises((CutError, graphcap.ForbiddenOpError), match="generator"):
        graphcap.capture(OwnGenerator(), *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))


def test_an_eager_part_with_an_own_generator_keeps_its_activations() -> None:
    layer = OwnGenerator()
    layer.place = "experts"
    twin = copy.deepcopy(layer)
    graphed = graphcap.capture(layer, *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))
    for side in (graphed, twin):
        OWN.manual_seed(11)
        side(inputs(1)[0][0]).square().mean().backward()
    same_gradients(layer, twin)


class CountingExperts(Routed):
    """The eager part changes buffers and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.calls = 0

    def experts(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().experts(self.norm(tokens))


def test_an_eager_part_that_changes_state_runs_once() -> None:
    verdict = judged(CountingExperts, steps=5)
    assert verdict, str(verdict)
    layer = CountingExperts()
    graphed = graphcap.capture(layer, *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))
    before = layer.calls
    graphed(inputs(1)[0][0]).sum().backward()
    assert layer.calls == before + 1


def test_an_eager_part_without_state_runs_again_in_the_backward() -> None:
    seen: list[int] = []

    class Watched(Routed):
        def experts(self, tokens: Tensor) -> Tensor:
            seen.append(1)
            return super().experts(tokens).sin()

    graphed = graphcap.capture(Watched(), *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))
    seen.clear()
    value = graphed(inputs(1)[0][0])
    assert len(seen) == 1
    value.sum().backward()
    assert len(seen) == 2
    with torch.no_grad():
        graphed(inputs(1)[0][0])
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["front.weight", "expert.weight"])
def test_a_weight_changed_before_its_backward(name: str) -> None:
    """In a graphed part, and in an eager one: the recomputation would see another weight."""
    layer = Dropped()
    graphed = graphcap.capture(layer, *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))
    value = graphed(inputs(1)[0][0])
    with torch.no_grad():
        layer.get_parameter(name).mul_(2)
    with pytest.raises(ReplayError, match="changed between its forward and its backward"):
        value.sum().backward()
    del value
    graphed(inputs(1)[0][0]).sum().backward()


def test_a_dropped_result_frees_its_slot() -> None:
    """Without the garbage collector: what a checkpoint keeps must not refer to the call's results."""
    gc.collect()
    gc.disable()
    try:
        graphed = graphcap.capture(Dropped(), *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))
        for index in range(3):
            graphed(inputs(index)[0][0])
    finally:
        gc.enable()


class Remembering(nn.Module):
    """Attributes that other parts read: set in a stretch, set in a break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.sets, self.reads = Sets(), Reads(self)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.scale = h.detach().mean()
        y = self.reads(torch.sin(self.sets(h)))
        return self.last(torch.sin(y)) + h


class Sets(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.rows = int((x.sum(-1) > 0).sum())
        return torch.sin(x) * 0.5


class Reads(nn.Module):
    def __init__(self, top: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.top = [top]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x) * (1 + self.top[0].sets.rows))


def test_what_eager_parts_tell_each_other_by_attributes_is_that_of_their_microbatch() -> None:
    """A recomputation in the backward would see the attributes of a later microbatch."""
    verdict = judged(Remembering, steps=5, order="0F0 0F1 0B0 0B1", break_at=("sets", "reads"))
    assert verdict, str(verdict)


def test_a_buffer_changed_before_its_backward() -> None:
    class Scaled(Routed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def combine(self, routed: Tensor, residual: Tensor) -> Tensor:
            return super().combine(torch.sin(routed + self.scale), residual)

    layer = Scaled()
    graphed = graphcap.capture(layer, *inputs(0), backend="tape", config=CaptureConfig(recompute="part"))
    value = graphed(inputs(1)[0][0])
    layer.scale.mul_(2)
    with pytest.raises(ReplayError, match="changed between"):
        value.sum().backward()


def test_without_gradients_nothing_changes() -> None:
    with torch.no_grad():
        graphed = graphcap.capture(Routed(), (rows(),), backend="tape", config=CaptureConfig(recompute="part"))
        x = rows()
        assert torch.equal(graphed(x), graphed.module(x))
    assert graphed.plan.recompute_saves == 0


def test_modules_that_keep_books_of_their_forwards_are_refused() -> None:
    """Quantised modules that collect amaxes, and modules that put weight gradients off."""
    x = (torch.ones(8, 16, requires_grad=True),)
    manager = RefManager()
    layer = RefFp8Linear(16, 16, manager, history_len=4)
    with manager.autocast(QuantSpec(recipe=RefRecipe(history_len=4))):
        with pytest.raises(PlanError, match="collect amaxes"):
            graphcap.capture(layer, x, backend="tape", config=CaptureConfig(recompute="part"))
        graphcap.capture(layer, x, backend="tape")
    graphcap.capture(layer, x, backend="tape", config=CaptureConfig(recompute="part"))  # outside of the region it is plain
    with pytest.raises(PlanError, match="put weight gradients off"):
        graphcap.capture(DelayedLinear(16), x, backend="tape", config=CaptureConfig(recompute="part"))


def test_a_wrong_choice() -> None:
    with pytest.raises(PlanError, match="recompute='all'"):
        CaptureConfig(recompute="all")  # type: ignore[arg-type]


def test_graphed_and_eager_kinds_are_what_the_tests_say() -> None:
    assert [part.kind for part in Dropped().parts()] == [GRAPHED, EAGER, GRAPHED]
