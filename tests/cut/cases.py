"""Small hazards for the automatic cut: each a module and its inputs. `EQUAL` must agree with eager bit for bit, `REFUSED`
must raise CutError and say the words given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
Module = Callable[[], nn.Module]
HOLDER: dict[str, Any] = {}


def drawn(seed: int, *shape: int, grad: bool = True) -> Tensor:
    made = torch.randn(shape or (4, WIDTH), generator=torch.Generator().manual_seed(seed + 5))
    return made.requires_grad_(grad)


def one_tensor(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (drawn(index),), {}


@dataclass(frozen=True)
class Case:
    """break_at and inputs as for `compare`; options are passed to capture."""

    build: Module
    break_at: Any = "*brk*"
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]] = one_tensor
    breaks: int | None = None
    words: str = ""
    options: dict[str, Any] = field(default_factory=dict)


EQUAL: dict[str, Case] = {}
REFUSED: dict[str, Case] = {}


def equal(name: str, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def note(build: type[nn.Module]) -> type[nn.Module]:
        EQUAL[name] = Case(build, **options)
        return build

    return note


def refused(name: str, words: str, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def note(build: type[nn.Module]) -> type[nn.Module]:
        REFUSED[name] = Case(build, words=words, **options)
        return build

    return note


class Break(nn.Module):
    """Multiplies the rows that the data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        chosen = (x.sum(-1) > 0).nonzero().squeeze(-1)
        made = self.linear(x.index_select(0, chosen)).to(x.dtype)
        return torch.tanh(x) + torch.zeros_like(x).index_add(0, chosen, made)


class Base(nn.Module):
    """Three linears and two breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.brk, self.brk2 = Break(), Break()


# ------------------------------------------------------------------------------------------------------------- crossings


@equal("residual across two breaks")
class _Residual(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.brk(self.b(x))
        z = self.brk2(self.c(y) + h)
        return z + h + x


@equal("many uses over two breaks")
class _ManyUses(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = h * 2 + h.sin()
        y = self.brk(y + h) + h * h
        z = y * h + y.cos() * h
        z = self.brk2(torch.tanh(z)) * h + h.exp() * y
        return torch.tanh(z * h) + x * x + x


@equal("h and norm(h) both crossing")
class _Norm(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        n = nn.functional.layer_norm(h, (WIDTH,))
        y = self.brk(n)
        return self.b(y * n + h) + self.brk2(h)


@equal("only the input crosses")
class _InputOnly(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)) + x) * x


class _TwoResults(Break):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x), torch.tanh(y)


@equal("one gradient for two values, and a break adds to one of them")
class _SharedGradient(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _TwoResults()

    def forward(self, x: Tensor) -> Tensor:
        d = self.a(x) * 0.5
        y, t = self.brk(d * 0.5, x)
        return self.b(y + t + (x + d))


@equal("x and x.detach() crossing")
class _Detached(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.brk(h.detach())) + h + h.detach() * 2


@equal("a view of a parameter crosses")
class _ParameterView(Base):
    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight.t()
        y = self.brk(x @ w)
        return y @ w + self.b(y)


@equal("expanded, transposed and strided crossings")
class _Strides(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        e = h[:1].expand(4, WIDTH)
        t = h.t()
        s = h[:, ::2]
        y = self.brk(h)
        return y * e + (t @ y).sum() + s.sum() * self.b(y)


@equal("mixed dtypes")
class _Dtypes(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        low, whole, mask = h.to(torch.bfloat16), h.argmax(-1), h > 0
        y = self.brk(h)
        return y * mask + low.float() + nn.functional.one_hot(whole, WIDTH).to(y.dtype) * self.b(y)


def _keywords(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position = (drawn(index + 1, grad=False), drawn(index + 2, grad=False))
    return (drawn(index),), {"mask": drawn(index + 3, grad=False) > 0, "position": position, "scale": 2.0, "none": None}


@equal("keyword tensors, masks, tuples of position embeddings", inputs=_keywords)
class _Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.brk = _KeywordBreak()

    def forward(self, x: Tensor, *, mask: Tensor, position: Any, scale: float, none: Any) -> Tensor:
        cos, sin = position
        h = self.a(x * cos + sin)
        y = self.brk(h, mask=mask, position=(cos * 2, sin), extra={"s": scale, "n": [none, h.sin()]})
        return self.b(y).masked_fill(mask, 0.5) + cos


class _KeywordBreak(Break):
    def forward(self, x: Tensor, *, mask: Tensor, position: Any, extra: Any) -> Tensor:
        y = super().forward(x) * position[0] + position[1]
        y[mask] = 1.0
        return y * extra["s"] + extra["n"][1]


@dataclass
class Record:
    value: Tensor
    text: str
    number: int


class _NestedBreak(Break):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "more": [None, "text", (y * 2, 3)], "record": Record(y.sin(), "name", 7), "again": y}


@equal("None, str, nested dict, dataclass outputs of a break")
class _NestedResults(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _NestedBreak()

    def forward(self, x: Tensor) -> Any:
        made = self.brk(self.a(x))
        assert made["more"][0] is None and made["more"][1] == "text" and made["record"].text == "name"
        assert made["again"] is made["y"]
        y = made["y"] * made["more"][2][1] + made["more"][2][0] * made["record"].number + made["record"].value
        return Record(self.b(y), made["more"][1], 1)


@equal("nested outputs: None, text, a dict, the input, tensors of every part")
class _Outputs(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        y = self.brk(h)
        z = self.b(y)
        return {"h": h, "y": y, "list": [z, None, "text"], "x": x, "n": 3}


@equal("an output that is a parameter")
class _ParameterOut(Base):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.brk(self.a(x))), self.a.weight


# -------------------------------------------------------------------------------------------------------------- in place


@equal("add_ on a crossing tensor")
class _AddInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = self.brk(h * 2)
        h.add_(y)
        return self.b(h) + self.brk2(h)


@equal("+= on a crossing tensor, in two stretches")
class _PlusEquals(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        h += self.brk(h * 2)
        y = self.brk2(h * 3)
        h += y
        return self.b(h) * y


@equal("index assignment on a crossing tensor")
class _Assignment(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = self.brk(h * 2)
        h[1:3] = y[1:3]
        h[:, 0] += 1
        return self.b(h) + y * 2


@equal("ReLU(inplace) on a crossing tensor")
class _ReluInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = self.brk(h * 2)
        nn.functional.relu(h, inplace=True)
        return self.b(h) + y


@equal("in place on a break's output")
class _BreakOutputInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.brk(self.a(x))
        y.mul_(2)
        y[0] = 1
        return self.b(y) + self.brk2(y)


@equal("in place through a view taken behind the break")
class _ViewBehind(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = self.brk(h * 2)
        h.view(-1)[::2].add_(1)
        return self.b(h) + y


@equal("in place under no_grad on a crossing tensor")
class _NoGradInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = self.brk(h.detach())
        with torch.no_grad():
            h.clamp_(-1, 1)
        return self.b(h + y) + h


@refused("a view that is changed itself before the break, used behind it", "is a view that was changed")
class _FreshView(Base):
    def forward(self, x: Tensor) -> Tensor:
        m = self.a(x) * 1
        v = m.view(-1)
        v += 0.5
        v[:3] = 1
        y = self.brk(self.b(m))
        return (m - y) * v.view(4, WIDTH) + m


@equal("an expanded tensor without gradient, changed in place through a view behind the break")
class _ExpandedInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            e = (self.a(x) * 1)[:1].expand(4, WIDTH)
        y = self.brk(self.b(x))
        e[:1][..., ::2].add_(0.5)
        return self.c(y) * e


class _Expands(Break):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.detach()[:1].cos().expand(4, WIDTH)


@equal("an expanded result of a break, changed in place")
class _ExpandedResult(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Expands()

    def forward(self, x: Tensor) -> Tensor:
        y, e = self.brk(self.a(x))
        e[:1].mul_(0.5)
        return self.b(y) * e + self.c(self.brk2(y * e))


@equal("a view taken before a break, used after, nothing changed")
class _ViewUnchanged(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        v = h.view(-1)[:WIDTH]
        y = self.brk(h)
        return self.b(y) + v + h


# ------------------------------------------------------------------------------------------------------ autograd functions


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * 2, grad * x * 2


bound_at_import = Twice.apply


@equal("a custom autograd.Function on a crossing tensor, called directly")
class _Custom(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.brk(h)
        return self.b(Twice.apply(h, y))


@equal("a custom autograd.Function through a reference bound at import")
class _CustomBound(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.brk(bound_at_import(h, x))
        return self.b(bound_at_import(y, h))


# ---------------------------------------------------------------------------------------------------- where breaks stand


@equal("a break called twice", breaks=2)
class _Twice(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.brk(self.a(x)).sin()))


@equal("two breaks back to back", breaks=1)
class _BackToBack(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk2(self.brk(self.a(x) + 2)))


@equal("a break in a loop", breaks=3)
class _Loop(Base):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.brk(torch.tanh(x @ self.b.weight)) + x
        return self.a(x)


@equal("a break nested in another break", breaks=1)
class _NestedBreaks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = nn.Sequential(Break(), nn.Linear(WIDTH, WIDTH), Break())
        self.brk[0].brk3 = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)))


class _Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.inner = _Deep(depth - 1) if depth else None
        if not depth:
            self.brk = Break()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) + (self.brk(x) if self.inner is None else self.inner(self.a(x)))


@equal("a break four levels deep", breaks=1)
class _FourLevels(_Deep):
    def __init__(self) -> None:
        super().__init__(4)


@equal("a break as the first and the last operation", breaks=2)
class _Ends(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.brk2(self.a(self.brk(x)))


@equal("nothing but a break", breaks=1)
class _OnlyBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.brk = Break()

    def forward(self, x: Tensor) -> Tensor:
        return self.brk(x)


@equal("a break by class, and auto", break_at=(Break, "auto"), breaks=2)
class _ByClass(_Residual):
    pass


class _Same(Break):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x


@equal("a break that returns its argument")
class _ReturnsArgument(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Same()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.brk(h)
        assert y is h
        return self.b(y) * h + self.c(self.brk2(y))


class _View(Break):
    def forward(self, x: Tensor) -> Any:
        return x.view(-1), super().forward(x)


@equal("a break that returns a view of its argument")
class _ReturnsView(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _View()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        v, y = self.brk(h)
        return self.b(y) * h + v.view(4, WIDTH)


class _Parameter(Break):
    def forward(self, x: Tensor) -> Any:
        return self.linear.weight, super().forward(x)


@equal("a break that returns its parameter, used in a stretch")
class _ReturnsParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Parameter()

    def forward(self, x: Tensor) -> Tensor:
        w, y = self.brk(self.a(x))
        return self.b(y) @ w


class _Weighted(Break):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x @ weight)


@equal("a parameter used by a graphed stretch and given to a break")
class _ParameterGiven(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Weighted()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x), self.a.weight)) @ self.a.weight


@equal("tied weights in two stretches")
class _Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.brk(self.a(x)))


@equal("one Linear in a stretch and in a break")
class _SharedModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk.linear = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)))


# ------------------------------------------------------------------------------------------------------- state and modes


@equal("dropout in every part")
class _Dropout(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)
        self.brk = nn.Sequential(Break(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.brk(self.drop(self.a(x)))
        return self.drop(self.b(y)) + self.drop(self.brk2(y))


@equal("BatchNorm buffers in stretches and breaks")
class _BatchNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        self.brk = nn.Sequential(Break(), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.n2(self.b(self.brk(self.n1(self.a(x)))))


@equal("no_grad regions, one with a break inside")
class _NoGrad(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            t = self.c(h)
            t = self.brk2(t) * 2
        y = self.brk(h)
        with torch.no_grad():
            s = y.abs().mean()
        return self.b(y) * s + t


@equal("autocast opened inside, with a break in it")
class _Autocast(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(h)
            z = self.brk(y)
            w = self.c(z)
        return w.float() + self.brk2(h)


@equal("frozen parameters")
class _Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.brk.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)))


@equal("inputs without grad", inputs=lambda i: ((drawn(i, grad=False),), {}))
class _NoInputGrad(_Residual):
    pass


@equal("a tensor attribute that was there before capture")
class _Attribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.arange(WIDTH, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x) + self.constant)) * self.constant


@equal("a buffer that a stretch changes in place")
class _Counter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        y = self.brk(self.a(x) * self.steps)
        return self.b(y) + self.steps


@equal("hooks on the break module")
class _Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk.register_forward_hook(_double)
        self.brk.register_forward_pre_hook(_halve)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)))


def _double(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 2 if bool((result.sum() > 0).item()) else result * 3


def _halve(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5,)


@equal("checkpoint wholly inside one stretch")
class _CheckpointStretch(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self._inner, x, use_reentrant=False)
        y = self.brk(h)
        return checkpoint(self._behind, y, h, use_reentrant=False)

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)).sin()

    def _behind(self, y: Tensor, h: Tensor) -> Tensor:
        return self.b(torch.tanh(y * h)) * y


@equal("checkpoint over a closure on a crossing tensor")
class _CheckpointClosure(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.brk(h)
        return checkpoint(lambda t: self.b(torch.tanh(t * y * h)) * y, y, use_reentrant=False)


@refused("reentrant checkpoint in a stretch", "use_reentrant=False")
class _ReentrantStretch(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.brk(self.a(x))
        return checkpoint(self._behind, y, use_reentrant=True)

    def _behind(self, y: Tensor) -> Tensor:
        return self.b(torch.tanh(y)) * y


@refused("what a checkpoint uses is changed later", "recomputation would see")
class _CheckpointChanged(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = self.brk(self.b(x))
        z = checkpoint(lambda t: torch.sin(t * 0.5) * h, y, use_reentrant=False)
        with torch.no_grad():
            h.mul_(2)
        return self.c(z) + h


@refused("what a checkpoint uses is changed behind a break", "recomputation would see")
class _CheckpointChangedBehind(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x) * 1
        z = checkpoint(lambda t: torch.sin(t * 0.5) * h, x, use_reentrant=False)
        y = self.brk(self.b(x))
        h.mul_(2)
        return self.c(z) + h + y


@equal("checkpoint inside the break")
class _CheckpointBreak(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Checkpointed()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)))


class _Checkpointed(Break):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def plain_glue(x: Tensor) -> Tensor:
    return x * 2 if bool((x.sum() > 0).item()) else x * 3


@equal("a function break, found by auto", break_at="auto")
class _Function(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(plain_glue(self.a(x))) + self.brk(x)


@equal("a function break, given", break_at=(plain_glue, "brk"), breaks=2)
class _FunctionGiven(_Function):
    pass


@refused("vmap over a tensor of another part", "of another part")
class _Vmap(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.brk(h)
        return self.b(torch.vmap(lambda r, s: r * s + h.sum())(y, h))


# ------------------------------------------------------------------------------------------------------------------ refused


@refused("a view taken before a break, changed after, and its base not used", "view taken before")
class _ChangedView(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        v = h.view(-1)[:WIDTH]
        y = self.brk(h * 2)
        v *= 0.5
        return self.b(y) + v


@refused("a view taken before a break and changed after", "shares memory")
class _StaleView(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        v = h.view(-1)
        y = self.brk(h * 2)
        h.add_(1)
        return self.b(y) + v.view(4, WIDTH)


@refused("a view changed after the break, the base used", "view taken before")
class _StaleBase(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        v = h.view(-1)
        y = self.brk(h * 2)
        v.add_(1)
        return self.b(y) + h


class _BufferView(Break):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.state[0]


@refused("a view of a buffer from a break, and the buffer changed after", "shares memory")
class _StaleBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _BufferView()

    def forward(self, x: Tensor) -> Tensor:
        y, v = self.brk(self.a(x))
        self.brk.state.add_(1)
        return self.b(y) + v


@refused("a view taken before its base changes, both before the break, used behind it", "is a view that was changed")
class _LateHistory(Base):
    def forward(self, x: Tensor) -> Tensor:
        m = self.a(x) * 1
        v = m.t().t()
        m[..., ::2].add_(0.1)
        y = self.brk(self.b(m))
        return (m - y) * v + m


@refused("a view of a buffer, changed behind a break", "view of a buffer")
class _BufferViewChanged(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        v = self.state[:]
        y = self.brk(self.a(x) + v)
        v.add_(1)
        return self.b(y) + v


class _KeepsBase(Break):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x).detach()
        HOLDER["base"] = y
        return y.view(-1)


@refused("a stretch that changes a view of what a break keeps", "kept by")
class _KeptBase(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _KeepsBase()

    def forward(self, x: Tensor) -> Tensor:
        v = self.brk(self.a(x))
        v.mul_(2)
        return self.b(v.view(4, WIDTH))


class _KeepsArgument(Break):
    def forward(self, x: Tensor) -> Any:
        last, self.last = getattr(self, "last", None), x.detach().view(-1)
        return super().forward(x) if last is None else super().forward(x) + last.view(4, WIDTH)


@refused("a break that keeps its argument for the next step", "keeps its argument")
class _KeptArgument(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _KeepsArgument()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)))


class _KeepsClone(_KeepsArgument):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.clone())


@equal("a break that keeps a clone of its argument for the next step")
class _KeptClone(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _KeepsClone()
        self.brk.last = None

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)))


class _Cache(Break):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if HOLDER.get("cache") is None:
            HOLDER["cache"] = y.detach().clone()
        HOLDER["cache"].add_(1)
        return y, HOLDER["cache"].view(-1)


@refused("a break that changes what it returned before", "shares memory")
class _StaleCache(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Cache()

    def forward(self, x: Tensor) -> Tensor:
        try:
            y, v = self.brk(self.a(x))
            z, _ = self.brk(self.b(y))
            return self.c(z) + v.view(4, WIDTH)
        finally:
            HOLDER.clear()


class _KeepsResult(Break):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x).detach() + HOLDER.get("last", 0)
        HOLDER["last"] = y
        return y


@refused("a stretch that changes what a break keeps", "shares memory|kept by")
class _KeptResult(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _KeepsResult()

    def forward(self, x: Tensor) -> Tensor:
        y = self.brk(self.a(x))
        y.mul_(2)
        return self.b(self.brk(self.c(y)))


@refused("a stale view that only the output shows", "shares memory")
class _StaleOutput(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x) * 1
        v = h.view(-1)
        y = self.brk(h * 2)
        h.add_(1)
        return self.b(y) + h, v


@refused("a callable input changed in place", "in place", inputs=lambda i: ((drawn(i, grad=False),), {}))
class _InputInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.brk(self.a(x * 2))
        x.add_(1)
        return self.b(y) + x


@refused("a view of a callable input changed in place", "in place", inputs=lambda i: ((drawn(i, grad=False),), {}))
class _InputViewInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.view(-1)[:2].add_(1)
        return self.b(self.brk(self.a(x)))


class _Shape(Break):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0]


@refused("a break whose result changes its shape", "static shape")
class _Dynamic(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Shape()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x))).sum() + x


class _Gather(Break):
    def forward(self, x: Tensor) -> Any:
        chosen = (x.sum(-1) > 0).nonzero().squeeze(-1)
        return x[chosen], chosen


class _Scatter(Break):
    def forward(self, rows: Tensor, chosen: Tensor, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, chosen, rows)


@refused("dynamic-shaped glue between two breaks", "contains this one")
class _Glue(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk, self.brk2 = _Gather(), _Scatter()

    def forward(self, x: Tensor) -> Tensor:
        rows, chosen = self.brk(self.a(x))
        return self.c(self.brk2(self.b(rows), chosen, x))


class _Count(Break):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), int((x > 0).sum())


@refused("a break that returns a changing number", "freeze")
class _Number(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Count()

    def forward(self, x: Tensor) -> Tensor:
        y, n = self.brk(self.a(x))
        return self.b(y) * n


class _Remember(Break):
    def forward(self, x: Tensor) -> Tensor:
        self.count = int((x > 0).sum())
        return super().forward(x)


@refused("a number that a break leaves behind for a stretch", "other torch calls")
class _LeftBehind(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Remember()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)) * self.brk.count)


@refused("a checkpoint around a break", "checkpoint")
class _CheckpointAround(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda t: self.brk(self.a(t)), x, use_reentrant=False))


@refused("a reentrant checkpoint around a break", "heckpoint")
class _ReentrantAround(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda t: self.brk(self.a(t)), x, use_reentrant=True))


@refused("dropout inside a checkpoint in a stretch", "checkpoint")
class _CheckpointDropout(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.brk(self.a(x))
        return checkpoint(lambda t: nn.functional.dropout(self.b(t), 0.5), y, use_reentrant=False)


@refused("a counter changed in a stretch", "counter|every call|other torch calls")
class _HostCounter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.brk(self.a(x)))


@refused("a counter that scales", "other torch calls")
class _HostScale(_HostCounter):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.brk(self.a(x)) * self.calls)


@refused("a list attribute changed in a stretch", "every call")
class _HostList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return self.b(self.brk(self.a(x)))


@refused("an attribute tensor set in a stretch", "every call|kept")
class _AttributeSet(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.a(x)
        return self.b(self.brk(self.aux)) + self.aux


ESCAPED: list[Tensor] = []


@refused("a tensor that escapes into a global list", "kept|unknown origin")
class _Escape(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        ESCAPED.append(h)
        return self.b(self.brk(h))


class _SideChannel(Break):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + HOLDER["h"]


@refused("a break that reads a tensor by a side channel", "not its argument")
class _Side(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _SideChannel()

    def forward(self, x: Tensor) -> Tensor:
        HOLDER["h"] = self.a(x)
        try:
            return self.b(self.brk(x))
        finally:
            HOLDER.clear()


class _Leaves(Break):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        HOLDER["y"] = y * 2
        return y


@refused("a stretch that reads what a break left in a global", "unknown origin|did not see|of another part")
class _SideBack(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Leaves()

    def forward(self, x: Tensor) -> Tensor:
        y = self.brk(self.a(x))
        try:
            return self.b(y) + HOLDER["y"]
        finally:
            HOLDER.clear()


class _Mutates(Break):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.mul_(2)
        return y


@refused("a break that changes its argument", "in place")
class _ArgumentChanged(Base):
    def __init__(self) -> None:
        super().__init__()
        self.brk = _Mutates()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        return self.b(self.brk(h)) + h


@refused("a host read in a stretch", "scalar read")
class _HostRead(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.brk(h)) * (2 if h.sum().item() > 0 else 3)


@refused("a dynamic shape in a stretch", "nonzero")
class _DynamicShape(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.brk(h)) + h[(h.sum(-1) > 0).nonzero().squeeze(-1)].sum()


@refused("a stale cached tensor", "unknown origin|made and keeps|other torch calls")
class _Stale(Base):
    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.cache is None:
            self.cache = h.detach() * 2
        return self.b(self.brk(h)) + self.cache


@refused("a global tensor", "unknown origin")
class _Global(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x))) + GLOBAL


GLOBAL = torch.ones(WIDTH)


@refused("a name that matches nothing", "no submodule", break_at="exprts")
class _Unmatched(_Residual):
    pass


@refused("a name that is never called", "never called", break_at=("brk", "c"))
class _NeverCalled(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk(self.a(x)))


@refused("forward of a break called directly", "directly")
class _Direct(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.brk.forward(self.a(x)))


@refused("a tensor hook in a stretch", "register_hook")
class _TensorHook(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.brk(h)
        y.register_hook(lambda g: g * 2)
        return self.b(y)


@refused("x.data assigned in a stretch", "data")
class _DataSet(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.brk(h)
        y.data = h.data
        return self.b(y)


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@refused("a break's argument hides a tensor", "holds a tensor")
class _Hidden(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.brk(h, extra=Box(h)))


@refused("a break at the captured module", "itself", break_at=nn.Module)
class _Itself(_Residual):
    pass
