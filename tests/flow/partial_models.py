"""Partial layers for the flow tests: what may cross a break, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphcap import EAGER, GRAPHED, PartialLayer, nested
from graphcap.partial_layer import Part
from tests.flow.twins import (
    WIDTH,
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
