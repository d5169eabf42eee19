"""Declared partial layers: whatever crosses a break, and however often, the bits are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap import EAGER, GRAPHED, CutError, PartialLayer, nested
from graphcap.partial_layer import Part
from graphcap.testing import deterministic
from tests.flow.partial_models import (
    LAYERS,
    Dropouts,
    EagerFirstAndLast,
    Layer,
    ManyUses,
    NormCrosses,
    OnlyEager,
    OnlyGraphed,
    ReturnsItsArgument,
    SharedParameter,
    Tied,
)
from tests.flow.twins import (
    WIDTH,
    assert_equal,
    assert_same,
    batches,
    drawn,
    gradients,
    linear,
)


@pytest.mark.parametrize("needs_grad", [True, False], ids=["input-grad", "no-input-grad"])
@pytest.mark.parametrize("build", LAYERS, ids=lambda build: build.__name__)
def test_equal(build: Callable[[], nn.Module], needs_grad: bool) -> None:
    assert_equal(build, batches(6, WIDTH, grad=needs_grad), steps=5)


@pytest.mark.parametrize("build", LAYERS, ids=lambda build: build.__name__)
def test_equal_with_several_in_flight(build: Callable[[], nn.Module]) -> None:
    order = "0F0 0F1 0B0 0F2 0I2 0B1 0W2"
    assert_equal(build, batches(6, WIDTH), steps=3, order=order)


@pytest.mark.parametrize("grads", ["accumulate", "alias"])
@pytest.mark.parametrize("build", [ManyUses, SharedParameter, Tied, Dropouts], ids=lambda build: build.__name__)
def test_equal_for_other_owners_of_gradients(build: Callable[[], nn.Module], grads: Any) -> None:
    config = graphcap.CaptureConfig(grads=grads)
    assert_equal(build, batches(6, WIDTH), steps=3, order="0F0 0F1 0B1 0B0", config=config)


@pytest.mark.parametrize("build", LAYERS, ids=lambda build: build.__name__)
def test_equal_under_no_grad(build: Callable[[], nn.Module]) -> None:
    assert_equal(build, batches(6, WIDTH, grad=False), steps=3, grad_mode=False)


# --------------------------------------------------------------------------------------------------------- parameters


class TwiceInAnEarlierPart(SharedParameter):
    def a(self, x: Tensor) -> Tensor:
        return self.one(self.one(x))


class TwiceBeforeAnEagerUse(SharedParameter):
    def c(self, e: Tensor) -> Tensor:
        return self.two(self.two(e))

    def last(self, f: Tensor, h: Tensor) -> Tensor:
        return f + h


@pytest.mark.parametrize("build", [TwiceInAnEarlierPart, TwiceBeforeAnEagerUse])
def test_a_parameter_used_twice_before_a_later_part_is_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(CutError, match="used more than once"):
        graphcap.capture(build(), (drawn(0),), backend="tape")


class SometimesTheSame(ReturnsItsArgument):
    """The eager part hands its argument on, or a new tensor, as the data want it."""

    def b(self, h: Tensor) -> Tensor:
        return h * 2 if h.detach().sum().item() > 0 else h


def test_an_eager_part_that_hands_on_its_argument_only_sometimes_is_refused() -> None:
    graphed = graphcap.capture(SometimesTheSame(), (drawn(0),), backend="tape")
    with pytest.raises(graphcap.InputMismatch, match="at capture"):
        for index in range(20):
            graphed(drawn(index)).sum().backward()


class Frozen(Layer):
    """A frozen weight on the way, a parameter nobody uses, and one that only an unused output reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.two.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(WIDTH))
        self.aside = nn.Parameter(torch.ones(WIDTH))

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h, lost"), EAGER("b", "h -> e"), GRAPHED("c", "e, h -> y, also_lost")

    def a(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.two(self.one(x))
        return h, h * self.aside

    def b(self, h: Tensor) -> Tensor:
        return self.two(h)

    def c(self, e: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.three(e) + h, e * self.aside


@pytest.mark.parametrize("grads", ["return", "accumulate", "alias"])
def test_parameters_without_a_gradient_keep_none(grads: Any) -> None:
    layer = Frozen()
    twin = copy.deepcopy(layer)
    config = graphcap.CaptureConfig(grads=grads)
    graphed = graphcap.capture(layer, (drawn(0, 6, WIDTH),), backend="tape", config=config)
    for step in range(3):
        layer.zero_grad()
        twin.zero_grad()
        graphed(drawn(step, 6, WIDTH)).sum().backward()
        twin(drawn(step, 6, WIDTH)).sum().backward()
        assert layer.unused.grad is layer.aside.grad is layer.two.weight.grad is None
        assert_same(gradients(layer), gradients(twin))


class Losses(Layer):
    """Several outputs, of which the caller may use any."""

    outputs = "y, extra, early"

    def __init__(self) -> None:
        super().__init__()
        self.aside = linear()

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h, early"), EAGER("b", "h -> e"), GRAPHED("c", "e, h -> y, extra")

    def a(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.one(x)
        return h, torch.sin(h)

    def b(self, h: Tensor) -> Tensor:
        return self.two(h)

    def c(self, e: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.three(e) + h, self.aside(h)


@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_gradients_for_some_of_the_outputs(grads: Any) -> None:
    """Each subset in turn, so that gradients of an earlier step would show as stale ones."""
    layer = Losses()
    twin = copy.deepcopy(layer)
    config = graphcap.CaptureConfig(grads=grads)
    graphed = graphcap.capture(layer, (drawn(0, 6, WIDTH),), backend="tape", config=config)
    subsets = [(0, 1, 2), (0,), (1,), (2,), (0, 2), (1, 2), (0, 1), (2,), (0, 1, 2)]
    for step, subset in enumerate(subsets):
        found: list[dict[str, Tensor | None]] = []
        for module, called in ((layer, graphed), (twin, twin)):
            x = drawn(step, 6, WIDTH)
            module.zero_grad()
            outputs = called(x)
            torch.autograd.backward([outputs[i] for i in subset], [drawn(90 + i, 6, WIDTH, grad=False) for i in subset])
            found.append({**gradients(module), "x": x.grad})
        if grads == "accumulate":
            assert_close_to_none(*found)
        else:
            assert_same(*found)


def assert_close_to_none(graphed: dict[str, Tensor | None], eager: dict[str, Tensor | None]) -> None:
    """The graph adds to buffers it owns: where eager leaves None it may leave zeros, and nothing else."""
    for name, value in eager.items():
        mine = graphed[name]
        if value is None:
            assert mine is None or not bool(mine.count_nonzero()), name
        else:
            assert mine is not None and torch.equal(mine, value), name


class WithLoss(PartialLayer):
    inputs = "x, target"
    outputs = "out"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aside = ManyUses(), linear(), linear()

    def parts(self) -> tuple[Part, ...]:
        return nested("body", "x -> h"), EAGER("look", "h -> k"), GRAPHED("end", "k, h, target -> out")

    def look(self, h: Tensor) -> Tensor:
        return h * h.detach().mean().item()

    def end(self, k: Tensor, h: Tensor, target: Tensor) -> dict[str, Any]:
        logits = self.head(k) + h + self.aside(h)
        return {"loss": nn.functional.cross_entropy(logits, target), "logits": logits, "seen": 3, "extra": None}


@pytest.mark.parametrize("order", [None, "0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W1 0W0"])
def test_loss_outputs(order: str | None) -> None:
    def inputs(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        target = torch.randint(0, WIDTH, (6,), generator=torch.Generator().manual_seed(index))
        return (drawn(index, 6, WIDTH),), {"target": target}

    assert_equal(WithLoss, inputs, steps=6, order=order)


# ----------------------------------------------------------------------------------------------- merging, modes, states


def test_parts_merge_across_layers() -> None:
    for count in (1, 2, 4):
        layers = tuple(NormCrosses() for _ in range(count))
        plan = graphcap.capture(layers, (drawn(0),), backend="tape").plan
        assert len(plan.breaks) == count
        assert plan.graphs == count + 1
    assert_equal(lambda: (NormCrosses(), nn.Tanh(), ManyUses(), linear(), ReturnsItsArgument()), batches(6, WIDTH))
    assert_equal(lambda: (linear(), OnlyEager(), EagerFirstAndLast(), OnlyGraphed()), batches(6, WIDTH))


AMBIENT = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no-cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "disabled": lambda: torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("build", [ManyUses, NormCrosses, Losses, SharedParameter], ids=lambda build: build.__name__)
@pytest.mark.parametrize("ambient", AMBIENT)
def test_autocast(build: Callable[[], nn.Module], ambient: str) -> None:
    """Captured and called under the caller's autocast; the backward runs outside of it, as usual. Weights change, so a
    cast that is cached would be stale."""
    torch.manual_seed(0)
    layer = build()
    twin = copy.deepcopy(layer)
    if build is SharedParameter and ambient == "autocast":
        with AMBIENT[ambient](), pytest.raises(CutError, match="cast by autocast in part"):
            graphcap.capture(layer, (drawn(0, 6, WIDTH),), backend="tape")
        return
    with AMBIENT[ambient]():
        graphed = graphcap.capture(layer, (drawn(0, 6, WIDTH),), backend="tape")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (layer, twin)]
    for step in range(5):
        found = []
        for module, called, optimizer in ((layer, graphed, optimizers[0]), (twin, twin, optimizers[1])):
            x = drawn(step, 6, WIDTH)
            optimizer.zero_grad()
            with AMBIENT[ambient]():
                out = called(x)
            outputs = out if isinstance(out, tuple) else (out,)
            torch.autograd.backward(outputs, [drawn(7, *o.shape, grad=False).to(o.dtype) for o in outputs])
            optimizer.step()
            values = {f"out {i}": o.detach() for i, o in enumerate(outputs)}
            found.append({**values, **gradients(module), "x": x.grad, **dict(module.state_dict())})
        assert_same(*found)


class OwnAutocast(Layer):
    """Autocast that the parts enter themselves."""

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e, h -> y")

    def a(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.one(x)

    def b(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.two(h)

    def c(self, e: Tensor, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.three(e) + h.float()


def test_autocast_inside_the_parts() -> None:
    assert_equal(OwnAutocast, batches(6, WIDTH), steps=6)


def test_the_random_sequence_is_eagers() -> None:
    layer = Dropouts()
    twin = copy.deepcopy(layer)
    before = torch.get_rng_state()
    graphed = graphcap.capture(layer, (drawn(0),), backend="tape")
    assert torch.equal(torch.get_rng_state(), before)
    with deterministic("cpu"):
        torch.manual_seed(3)
        mine = [graphed(drawn(i)).detach() for i in range(4)] + [torch.rand(5)]
        torch.manual_seed(3)
        theirs = [twin(drawn(i)).detach() for i in range(4)] + [torch.rand(5)]
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not torch.equal(mine[0], mine[1])
