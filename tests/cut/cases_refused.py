"""Hazards of the automatic cut: what is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cut.cases import HOLDER, WIDTH, Base, Break, drawn, equal, refused
from tests.cut.cases_crossing import _Residual
from tests.cut.cases_state import _KeepsArgument


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


@equal("an attribute tensor set in a stretch and used behind the break", breaks=1)
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


@refused("an autocast region that spans breaks, and a weight cast in two parts of it", "cast by autocast")
class _SharedCast(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.a(self.brk(self.a(x)))
        return self.b(y.float())


@refused("a region that is off at the break, but not over", "cast by autocast")
class _SharedCastOff(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.a(x)
            with torch.autocast(x.device.type, enabled=False):
                y = self.brk(y.float())
            y = self.a(y)
        return self.b(y.float())


@equal("a weight cast in two autocast regions")
class _TwoCasts(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.a(x).float()
        y = self.brk(y)
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.a(y).float()
        return self.b(self.brk2(y))


@refused("a tensor from before a break changed through .data", "through .data")
class _DataChanged(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = self.brk(h * h)  # keeps h for its gradient
        h.data.mul_(0.5)
        return self.b(y) + h


@equal("a tensor of its own stretch changed through .data")
class _DataOfStretch(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.brk(self.a(x))
        h = self.b(y) * 1
        z = h * h
        h.data.mul_(0.5)
        return self.c(z) + h


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


@refused("a raw C++ autograd function fed with a crossing tensor", "did not see being made|of another part")
class _Raw(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.brk(h)
        return self.b(y) + torch._C._functions.UndefinedGrad()(h)
