"""What crosses a break, value by value: missing gradients, strides, in-place changes, one tensor under two names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap import EAGER, GRAPHED, CutError
from graphcap.partial_layer import Part
from tests.flow.partial_models import (
    Detours,
    DirectLayouts,
    GradientLayouts,
    Layer,
    Outer,
    ReadsTwice,
)
from tests.flow.twins import (
    WIDTH,
    assert_equal,
    assert_same,
    batches,
    drawn,
    gradients,
    judged,
)

# -------------------------------------------------------------------------------------------------- values that cross


def test_an_eager_part_without_a_gradient_in_some_steps() -> None:
    verdict = judged(Detours, batches(2, WIDTH), steps=40)
    assert verdict, str(verdict)


@pytest.mark.parametrize("order", ["0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"])
def test_no_gradient_in_some_steps_with_several_in_flight(order: str) -> None:
    assert_equal(Detours, batches(2, WIDTH), steps=30, order=order)


def test_a_result_that_is_held_does_not_block_the_slot_when_the_first_part_got_no_gradient() -> None:
    """The usual loop: `loss` of the last step is still bound when the next forward runs."""
    layer = Detours()
    twin = copy.deepcopy(layer)
    graphed = graphcap.capture(layer, (drawn(0, 2, WIDTH),), backend="tape")
    for step in range(12):
        loss = graphed(drawn(step, 2, WIDTH)).sum()
        loss.backward()
        twin(drawn(step, 2, WIDTH)).sum().backward()
        assert_same(gradients(layer), gradients(twin))


class _Doubled(torch.autograd.Function):
    """As most custom functions: torch makes zeros of a gradient that is missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class DeadEnd(Layer):
    """What the eager part makes is read by a graph without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def parts(self) -> list[Part]:
        return [GRAPHED("first", "x -> h, u"), EAGER("second", "u -> v"), GRAPHED("third", "h, v -> y")]

    def first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return h, self.b(h)

    def second(self, u: Tensor) -> Tensor:
        return _Doubled.apply(u)  # type: ignore[no-untyped-call, no-any-return]

    def third(self, h: Tensor, v: Tensor) -> Tensor:
        return self.c(h) + v.detach().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", [None, "0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"])
def test_what_a_graph_gives_no_gradient_has_no_backward(order: str | None) -> None:
    """None and not zeros, which weight decay and momentum would turn into changes of the weights."""
    if order is not None:
        assert_equal(DeadEnd, batches(2, WIDTH), steps=5, order=order)
        return
    layer = DeadEnd()
    twin = copy.deepcopy(layer)
    graphed = graphcap.capture(layer, (drawn(0, 2, WIDTH),), backend="tape")
    for step in range(3):
        graphed(drawn(step, 2, WIDTH)).sum().backward()
        twin(drawn(step, 2, WIDTH)).sum().backward()
        assert_same(gradients(layer), gradients(twin))
    assert layer.b.weight.grad is None
    assert layer.a.weight.grad is not None


class Expanded(Layer):
    """Outputs whose elements share memory: expanded, and overlapping windows. Their gradients do not."""

    outputs = "y, wide, windows"

    def parts(self) -> tuple[Part, ...]:
        return (
            GRAPHED("a", "x -> h, wide, windows"),
            EAGER("b", "h, wide, windows -> e"),
            GRAPHED("c", "e, wide, windows -> y"),
        )

    def a(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.one(x)
        return h, self.two(h).mean(0, keepdim=True).expand(6, WIDTH), self.three(h).unfold(1, 2, 1)

    def b(self, h: Tensor, wide: Tensor, windows: Tensor) -> Tensor:
        weights = torch.arange(6.0 * WIDTH).view(6, WIDTH)
        return h * wide.detach().sum().item() + wide * weights + windows.sum(2)[:, :1]

    def c(self, e: Tensor, wide: Tensor, windows: Tensor) -> Tensor:
        return torch.sin(e * 0.1) * wide + windows.sin().sum(2).sum(1, keepdim=True)


@pytest.mark.parametrize("order", [None, "0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"])
def test_outputs_whose_elements_share_memory(order: str | None) -> None:
    assert_equal(Expanded, batches(6, WIDTH), order=order)


class EagerMakesExpanded(Layer):
    """What an eager part makes keeps its strides on the way into a graph, and overlapping memory is refused."""

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e -> y")

    def a(self, x: Tensor) -> Tensor:
        return self.one(x)

    def b(self, h: Tensor) -> Tensor:
        return self.two(h).mean(0, keepdim=True).expand(6, WIDTH)

    def c(self, e: Tensor) -> Tensor:
        return self.three(e)


class EagerMakesTransposed(EagerMakesExpanded):
    def b(self, h: Tensor) -> Tensor:
        return self.two(h).t().contiguous().t()


class EagerMakesWindows(EagerMakesExpanded):
    def b(self, h: Tensor) -> Tensor:
        return h.reshape(-1).unfold(0, WIDTH, WIDTH - 1)


@pytest.mark.parametrize("build", [EagerMakesExpanded, EagerMakesTransposed])
def test_eager_results_of_other_strides(build: Callable[[], nn.Module]) -> None:
    assert_equal(build, batches(6, WIDTH))


def test_eager_results_that_overlap_are_refused() -> None:
    with pytest.raises(CutError, match="elements that share memory"):
        graphcap.capture(EagerMakesWindows(), (drawn(0, 6, WIDTH),), backend="tape")


@pytest.mark.parametrize("build", [GradientLayouts, DirectLayouts])
@pytest.mark.parametrize("order", [None, "0F0 0F1 0I0 0I1 0W0 0W1"])
def test_gradients_arrive_with_the_strides_that_eager_gives_them(build: Any, order: str | None) -> None:
    assert_equal(build, batches(301, 32), order=order)


class EmptyExperts(Layer):
    """All rows go to one expert, so the other one sees no rows at all."""

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("experts", "h -> e"), GRAPHED("c", "e, h -> y")

    def a(self, x: Tensor) -> Tensor:
        return self.one(x)

    def c(self, e: Tensor, h: Tensor) -> Tensor:
        return e + h


def test_experts_without_rows() -> None:
    def inputs(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sign = (1, -1, 0)[index % 3]
        return ((drawn(index, 6, WIDTH, grad=False) + 9 * sign).requires_grad_(),), {}

    assert_equal(EmptyExperts, inputs, steps=12)


class InPlaceInEager(Layer):
    """An eager part changes an integer tensor that crosses it."""

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h, index"), EAGER("b", "h, index -> e"), GRAPHED("c", "e, index -> y")

    def a(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.one(x)
        return h, h.detach().argsort(dim=1)

    def b(self, h: Tensor, index: Tensor) -> Tensor:
        index.add_(1).remainder_(WIDTH)
        return self.two(h)

    def c(self, e: Tensor, index: Tensor) -> Tensor:
        return self.three(e).gather(1, index)


def test_in_place_on_integers_that_cross() -> None:
    assert_equal(InPlaceInEager, batches(6, WIDTH))


class InPlaceOnGradient(ReadsTwice):
    def b(self, h: Tensor) -> Tensor:
        h.mul_(2)
        return self.two(h) + self.three(h)


class InPlaceOnSaved(ReadsTwice):
    """Eager refuses this too: tanh's backward needs the value that the eager part overwrites."""

    def a(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(x))

    def b(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            h.mul_(2)
        return self.two(h) + self.three(h)


@pytest.mark.parametrize("build", [InPlaceOnGradient, InPlaceOnSaved])
def test_in_place_on_a_differentiable_value_in_an_eager_part_is_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(CutError, match="in place"):
        graphcap.capture(build(), (drawn(0),), backend="tape")


class InPlaceOnInput(Layer):
    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e -> y")

    def a(self, x: Tensor) -> Tensor:
        return self.one(x)

    def b(self, h: Tensor) -> Tensor:
        return self.two(h)

    def c(self, e: Tensor) -> Tensor:
        e.mul_(2)
        return self.three(e)


def test_in_place_on_what_a_graphed_part_reads_is_refused() -> None:
    with pytest.raises(graphcap.GraphcapError, match=r"in place|in-place"):
        graphcap.capture(InPlaceOnInput(), (drawn(0),), backend="tape")


# ---------------------------------------------------------------------------------------------------------- arguments


def test_an_optional_input_left_out_or_given() -> None:
    assert_equal(Outer, lambda i: ((drawn(i, 6, WIDTH),), {"scale": None}))
    assert_equal(Outer, lambda i: ((drawn(i, 6, WIDTH),), {}))
    assert_equal(Outer, lambda i: ((drawn(i, 6, WIDTH), drawn(i + 50, WIDTH)), {}))
    assert_equal(Outer, lambda i: ((), {"scale": drawn(i + 50, WIDTH), "x": drawn(i, 6, WIDTH)}))


class TwoInputs(Layer):
    inputs = "x, z"

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x, z -> h"), EAGER("b", "h, z -> e"), GRAPHED("c", "e, x, z -> y")

    def a(self, x: Tensor, z: Tensor) -> Tensor:
        return self.one(x) * z + x

    def b(self, h: Tensor, z: Tensor) -> Tensor:
        return self.two(h) * z

    def c(self, e: Tensor, x: Tensor, z: Tensor) -> Tensor:
        return self.three(e) * x + z * x + z


def test_one_tensor_under_two_names() -> None:
    """At every call, at none (views of one memory), and only at replay: all legal in eager, so all equal."""

    def same(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = drawn(index, 6, WIDTH)
        return (x, x), {}

    def views(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = drawn(index, 6, WIDTH, grad=False)
        return (x.view(6, WIDTH).requires_grad_(), x.view(6, WIDTH).requires_grad_()), {}

    assert_equal(TwoInputs, same)
    assert_equal(TwoInputs, views)
    assert_equal(TwoInputs, lambda i: same(i) if i else ((drawn(1, 6, WIDTH), drawn(2, 6, WIDTH)), {}), steps=6)


@pytest.mark.parametrize("same", [True, False])
def test_one_leaf_twice_in_a_call(same: bool) -> None:
    """`compare` copies its inputs; here the very same leaf arrives twice. Its gradients would be added in the order of the
    arguments, eager adds them in the order of their uses, so this is refused; views of it are two tensors, and equal."""
    layer = TwoInputs()
    twin = copy.deepcopy(layer)
    sample = (drawn(0, 6, WIDTH), drawn(1, 6, WIDTH))
    graphed = graphcap.capture(layer, sample[:1] * 2 if same else sample, backend="tape")
    for step in range(3):
        x, other = drawn(step, 6, WIDTH), drawn(step, 6, WIDTH)
        with pytest.raises(graphcap.InputMismatch, match="argument 1: is the same tensor as argument 0"):
            graphed(x, x)
        layer.zero_grad()
        twin.zero_grad()
        graphed(x, x.view_as(x)).sum().backward()
        twin(other, other.view_as(other)).sum().backward()
        assert_same({**gradients(layer), "x": x.grad}, {**gradients(twin), "x": other.grad})
        with torch.no_grad():
            assert torch.equal(graphed(x, x), twin(x, x))
