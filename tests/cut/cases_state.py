"""Hazards of the automatic cut: state, views, checkpoints, functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cut.cases import HOLDER, WIDTH, Base, Break, drawn, equal, refused
from tests.cut.cases_crossing import _Residual, _View


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
        with torch.autocast(x.device.type, torch.bfloat16):
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
