"""Hazards of the automatic cut: what crosses a break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.cut.cases import WIDTH, Base, Break, drawn, equal, refused

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
