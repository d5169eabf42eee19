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
from tests.flow.twins import (
    WIDTH,
    assert_equal,
    assert_same,
    batches,
    drawn,
    gradients,
    judged,
    linear,
)


class Layer(PartialLayer):
    """Four weights of one shape, and the pieces from which the layers below are made."""

    inputs = "x"
    outputs = "y"

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = linear(), linear(), linear()

    def experts(self, h: Tensor) -> Tensor:
        """Data-dependent shapes inside: the rows are sorted into two groups, either of which may be empty."""
        out = torch.zeros_like(h)
        for number, layer in enumerate((self.two, self.three)):
            rows = torch.nonzero((h.detach().sum(1) > 0) == bool(number)).flatten()
            out = out.index_add(0, rows, layer(h[rows]))
        return out


class ResidualAcrossTwo(Layer):
    """The layer's input is read in three graphed parts and twice in the first."""

    def parts(self) -> tuple[Part, ...]:
        return (
            GRAPHED("a", "x -> h"),
            EAGER("experts", "h -> e"),
            GRAPHED("b", "e, x -> g"),
            EAGER("again", "g -> f"),
            GRAPHED("c", "f, x, h -> y"),
        )

    def a(self, x: Tensor) -> Tensor:
        return self.one(x) * x

    def b(self, e: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(e) + x * 1.7

    def again(self, g: Tensor) -> Tensor:
        return g * g.detach().abs().max().item()

    def c(self, f: Tensor, x: Tensor, h: Tensor) -> Tensor:
        return f * x + h * 0.3 + x.square()


class ManyUses(Layer):
    """h is used over and over: in the part that makes it, in eager parts and in later graphed ones."""

    def parts(self) -> tuple[Part, ...]:
        return (
            GRAPHED("a", "x -> h, k"),
            EAGER("b", "h, k -> e"),
            GRAPHED("c", "e, h, k -> g"),
            EAGER("d", "g, h, h -> f"),
            GRAPHED("last", "f, g, h, e -> y"),
        )

    def a(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.one(x)
        return h, torch.tanh(h) * h

    def b(self, h: Tensor, k: Tensor) -> Tensor:
        return self.two(h) * h + k * h

    def c(self, e: Tensor, h: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(self.three(e) * h + h * k + h)

    def d(self, g: Tensor, h: Tensor, same: Tensor) -> Tensor:
        return g * h + same.square()

    def last(self, f: Tensor, g: Tensor, h: Tensor, e: Tensor) -> Tensor:
        return torch.sin(f * h + g * 0.3 + h * h + e * h)


class NormCrosses(Layer):
    """h and norm(h) both cross the break, so a gradient must not be counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h, n"), EAGER("experts", "n -> e"), GRAPHED("c", "e, h, n -> y")

    def a(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.one(x)
        return h, self.norm(h)

    def c(self, e: Tensor, h: Tensor, n: Tensor) -> Tensor:
        return e + h + n * h


class ReadsTwice(Layer):
    """The eager part reads a graph output several times, also on the host."""

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e -> y")

    def a(self, x: Tensor) -> Tensor:
        return self.one(x)

    def b(self, h: Tensor) -> Tensor:
        scale = sum(value for row in h.tolist() for value in row)
        return self.two(h) * h + self.three(h) * scale + h

    def c(self, e: Tensor) -> Tensor:
        return torch.tanh(e)


class ReturnsItsArgument(Layer):
    """Two names, one tensor, each used several times: the order of the sums shows in the last bit."""

    def parts(self) -> tuple[Part, ...]:
        return (
            GRAPHED("a", "x -> h"),
            EAGER("b", "h -> e"),
            GRAPHED("c", "e, h -> g"),
            EAGER("d", "g -> f"),
            GRAPHED("last", "f, h, e -> y"),
        )

    def a(self, x: Tensor) -> Tensor:
        return self.one(x)

    def b(self, h: Tensor) -> Tensor:
        return h

    def c(self, e: Tensor, h: Tensor) -> Tensor:
        return self.two(h) * 0.7 + e.square() * h + torch.sin(h)

    def d(self, g: Tensor) -> Tensor:
        return self.three(g)

    def last(self, f: Tensor, h: Tensor, e: Tensor) -> Tensor:
        return f * h + e * 0.1 + h.cos()


class ReturnsAView(ReturnsItsArgument):
    def b(self, h: Tensor) -> Tensor:
        return h.view(-1).view_as(h)


class ReturnsATranspose(ReturnsItsArgument):
    def b(self, h: Tensor) -> Tensor:
        return h.t()

    def c(self, e: Tensor, h: Tensor) -> Tensor:
        return self.two(h) * 0.7 + e.t().square() * h

    def last(self, f: Tensor, h: Tensor, e: Tensor) -> Tensor:
        return f * h + e.t() * 0.1


class OtherValues(Layer):
    """None, text, numbers, containers and integer tensors cross the breaks."""

    def parts(self) -> tuple[Part, ...]:
        return (
            GRAPHED("a", "x -> h, index, kind"),
            EAGER("b", "h, index, kind -> e, nothing, count, pair"),
            GRAPHED("c", "e, nothing, count, pair, index, kind -> y"),
        )

    def a(self, x: Tensor) -> tuple[Tensor, Tensor, str]:
        h = self.one(x)
        return h, h.detach().argsort(dim=1), "sorted"

    def b(self, h: Tensor, index: Tensor, kind: str) -> tuple[Tensor, None, int, dict[str, Any]]:
        assert kind == "sorted"
        rows = torch.nonzero(index[:, 0] >= 0).flatten()
        return self.two(h.gather(1, index)), None, len(rows), {"mask": h > 0, "twice": [h * 2, h], "text": "t"}

    def c(self, e: Tensor, nothing: None, count: int, pair: dict[str, Any], index: Tensor, kind: str) -> Tensor:
        assert nothing is None and kind == "sorted"
        twice, once = pair["twice"]
        return self.three(e) * count + torch.where(pair["mask"], twice, once).gather(1, index)


class EagerFirstAndLast(Layer):
    def parts(self) -> tuple[Part, ...]:
        return EAGER("experts", "x -> e"), GRAPHED("b", "e, x -> h"), EAGER("c", "h -> y")

    def b(self, e: Tensor, x: Tensor) -> Tensor:
        return self.one(e) * x

    def c(self, h: Tensor) -> Tensor:
        return h * h.detach().norm().item()


class OnlyEager(Layer):
    def parts(self) -> tuple[Part, ...]:
        return EAGER("a", "x -> h"), EAGER("experts", "h -> y")

    def a(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(x))


class OnlyGraphed(Layer):
    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), GRAPHED("b", "h, x -> y")

    def a(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(x))

    def b(self, h: Tensor, x: Tensor) -> Tensor:
        return self.two(h) + self.three(x) * h


class EagerMadeTwoReaders(Layer):
    """What an eager part makes is read by two later graphed parts."""

    def parts(self) -> tuple[Part, ...]:
        return (
            GRAPHED("a", "x -> h"),
            EAGER("b", "h -> e, w"),
            GRAPHED("c", "e, w -> g"),
            EAGER("d", "g -> f"),
            GRAPHED("last", "f, e, w -> y"),
        )

    def a(self, x: Tensor) -> Tensor:
        return self.one(x)

    def b(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.two(h), torch.softmax(h, 1)

    def c(self, e: Tensor, w: Tensor) -> Tensor:
        return e * w + e

    def d(self, g: Tensor) -> Tensor:
        return self.three(g[torch.nonzero(g.sum(1) < 1e9).flatten()])

    def last(self, f: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return f * e + w * e + w


class Dropouts(Layer):
    """Random numbers in graphed and eager parts, one sequence."""

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e, h -> y")

    def a(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.one(x), 0.4) + torch.rand_like(x)

    def b(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(self.two(h), 0.3)

    def c(self, e: Tensor, h: Tensor) -> Tensor:
        return nn.functional.dropout(self.three(e), 0.5) + h


class Statistics(Layer):
    """Batch statistics in graphed and eager parts, one of them called in both."""

    def __init__(self) -> None:
        super().__init__()
        self.graphed_norm, self.eager_norm = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e, h -> y")

    def a(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.graphed_norm(self.one(x))

    def b(self, h: Tensor) -> Tensor:
        self.calls.mul_(2)
        return self.eager_norm(self.two(h))

    def c(self, e: Tensor, h: Tensor) -> Tensor:
        return self.graphed_norm(self.three(e)) + h * self.calls.clone()


class SharedParameter(Layer):
    """`one` in two graphed parts, `two` in a graphed and an eager part."""

    def parts(self) -> tuple[Part, ...]:
        return (
            GRAPHED("a", "x -> h"),
            EAGER("b", "h -> e"),
            GRAPHED("c", "e -> g"),
            EAGER("d", "g -> f"),
            GRAPHED("last", "f, h -> y"),
        )

    def a(self, x: Tensor) -> Tensor:
        return self.one(x)

    def b(self, h: Tensor) -> Tensor:
        return torch.tanh(self.two(h))

    def c(self, e: Tensor) -> Tensor:
        return self.one(e) + self.two(e)

    def d(self, g: Tensor) -> Tensor:
        return self.two(self.two(g))

    def last(self, f: Tensor, h: Tensor) -> Tensor:
        return self.three(f) + self.one(f) * h


class Tied(Layer):
    """Two names for one weight, in two graphed parts."""

    def __init__(self) -> None:
        super().__init__()
        self.three.weight = self.one.weight

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e -> y")

    def a(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(x))

    def b(self, h: Tensor) -> Tensor:
        return self.two(h)

    def c(self, e: Tensor) -> Tensor:
        return self.three(e)


class Outer(PartialLayer):
    """Partial layers and plain modules inside a partial layer."""

    inputs = "x, scale=None"
    outputs = "y, h"

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.plain, self.more = NormCrosses(), nn.Sequential(linear(), nn.Tanh()), ManyUses()

    def parts(self) -> tuple[Part, ...]:
        return (
            nested("inner", "x -> h"),
            nested("plain", "h -> k"),
            EAGER("glue", "k, scale -> g"),
            nested("more", "g -> m"),
            GRAPHED("end", "m, h, scale -> y"),
        )

    def glue(self, k: Tensor, scale: Tensor | None) -> Tensor:
        return k if scale is None else k * scale.sum().cos().item()

    def end(self, m: Tensor, h: Tensor, scale: Tensor | None) -> Tensor:
        return m + h if scale is None else (m + h) * scale


LAYERS: list[Callable[[], nn.Module]] = [
    ResidualAcrossTwo,
    ManyUses,
    NormCrosses,
    ReadsTwice,
    ReturnsItsArgument,
    ReturnsAView,
    ReturnsATranspose,
    OtherValues,
    EagerFirstAndLast,
    OnlyEager,
    OnlyGraphed,
    EagerMadeTwoReaders,
    Dropouts,
    Statistics,
    SharedParameter,
    Tied,
    Outer,
]


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


# -------------------------------------------------------------------------------------------------- values that cross


class Detours(Layer):
    """The eager part leaves a value without gradient in some steps, and runs on nothing in others."""

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h, k"), EAGER("b", "h, k -> e"), GRAPHED("c", "e -> y")

    def a(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)

    def b(self, h: Tensor, k: Tensor) -> Tensor:
        base = self.three.bias.expand_as(h)
        total = h.detach().sum().item()
        if total > 1:
            return base + h * k
        if total > 0:
            return base * k
        return base + h if total > -1 else base * 2

    def c(self, e: Tensor) -> Tensor:
        return torch.tanh(e) * self.three.weight.sum()


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


class GradientLayouts(PartialLayer):
    """The gradient of h arrives transposed: summed over rows, it has other bits than a contiguous one."""

    inputs, outputs = "x", "y"

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(301, 32)

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e, h -> y")

    def a(self, x: Tensor) -> Tensor:
        return self.one(x)

    def b(self, h: Tensor) -> Tensor:
        return h.t().contiguous().sin()

    def c(self, e: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.two(e)).sum() * h[:1].tanh()


class DirectLayouts(GradientLayouts):
    def c(self, e: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.two(e)) * h.t().contiguous().sin().mean(1, keepdim=True)


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
    with pytest.raises(graphcap.GraphcapError, match="in place|in-place"):
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
