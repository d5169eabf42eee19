"""Delayed weight gradients: the backward of a linear layer computes the gradient of its input and puts (input, output
gradient) into a queue; `backward_dw` takes them out and computes the gradient of the weight.

A schedule uses the time in between: an all-to-all that waits for input gradients alone starts earlier, and the weight
gradients run while it is under way. The arithmetic is that of autograd (the same products of the same matrices, and
each microbatch is added in the same order), so gradients agree bit for bit with those of an undelayed backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.errors import PlanError, StateError
from graphcap.hybrid.first_order import refuse_create_graph

_DELAYED: Final = "delayed weight gradients (delayed_wgrad)"


class WgradQueue:
    """First in, first out: what a backward left behind for `backward_dw`. One entry per use in the forward.

    owner: named in the error. `len(queue)` is how many weight gradients are outstanding.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._entries: deque[Callable[[], Any]] = deque()

    def push(self, compute: Callable[[], Any]) -> None:
        self._entries.append(compute)

    def run_next(self) -> Any:
        """Compute the oldest outstanding weight gradient, and what its computation returns; StateError if there is none."""
        if not self._entries:
            raise StateError(
                f"backward_dw of {self.owner}: its queue is empty. Expected a backward with delayed weight gradients "
                "before it: run backward_dw once per backward, after the slot whose backward computes the layer's input "
                "gradient"
            )
        return self._entries.popleft()()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget what is outstanding."""
        self._entries.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> WgradQueue:
        """A copied model has nothing outstanding of its own."""
        return WgradQueue(self.owner)


def accumulate(weight: Tensor, grad: Tensor) -> None:
    """Add into `weight.grad` as a backward does, hooks of the parameter included (its own graph is the leaf alone)."""
    torch.autograd.backward((weight,), (grad,))


class DelayedLinear(nn.Linear):
    """nn.Linear without bias whose weight gradient may be delayed (`delayed = True`, see `delayed_wgrad`)."""

    def __init__(self, inputs: int, outputs: int, weight: nn.Parameter) -> None:
        # On meta first: nn.Linear's own initialisation would draw random numbers only to be overwritten.
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.weight = weight
        self.delayed = False
        self.outstanding = WgradQueue(f"a linear layer ({inputs} -> {outputs})")

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """x: [..., inputs]. is_first_microbatch: of quantised layers, which are called alike; it changes nothing here."""
        if not (self.delayed and torch.is_grad_enabled() and self.weight.requires_grad):
            return F.linear(x, self.weight)
        alias, dtype = _alias(self.weight, x), autocast_dtype(x)
        if dtype is not None and alias.dtype != torch.float64:
            # Here as autocast does it, so that the backward, which may run outside, finds all of one dtype.
            x, alias = x.to(dtype), _alias(self.weight.to(dtype), x)
        out: Tensor = _Linear.apply(x, alias, (self.weight,), self.outstanding)  # type: ignore[no-untyped-call]
        return out

    def need_backward_dw(self) -> bool:
        """Whether a backward leaves work of this module's own to `backward_dw`; asked by `graphcap.capture`."""
        return self.delayed

    def backward_dw(self, uses: int = 1) -> None:
        """Compute and add the weight gradient of the oldest backward. Nothing to do where weight gradients are not
        delayed; StateError where they are and none is outstanding.

        uses: how often one forward ran the layer, such as 1 + the MTP depths for an output layer. Their gradients are
        added up first, as autograd does: added to `.grad` one by one they would be rounded differently."""
        if self.delayed and self.weight.requires_grad:
            grad = self.outstanding.run_next()
            for _ in range(uses - 1):
                grad = grad + self.outstanding.run_next()
            accumulate(self.weight, grad.to(self.weight.dtype))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """In which a linear layer multiplies `x` inside of torch.autocast, and gives its result; None: in its own."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _alias(weight: Tensor, x: Tensor) -> Tensor:
    """The weight's memory, without the weight: it would be told that its gradient is None, and its hooks would run a first
    time; inside a tuple autograd does not see it. A leaf that makes the output differentiable, if `x` does not. (A capture
    refuses leaves that are no parameters, whose gradient it would lose.)"""
    return weight.detach().requires_grad_(not x.requires_grad)


class _Linear(torch.autograd.Function):
    """x [..., in] times weight [out, in] transposed; rows flattened, as `linear` does where the weight wants a gradient.
    (Of an alias that wants none it makes one product per sequence if `x` is not contiguous, whose last bits differ.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alias: Tensor, weight: tuple[Tensor], queue: WgradQueue) -> Tensor:
        ctx.save_for_backward(x, alias)
        ctx.weight, ctx.queue = weight, queue
        return F.linear(x.reshape(-1, x.shape[-1]), alias).view(*x.shape[:-1], alias.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        refuse_create_graph(_DELAYED)
        x, alias = ctx.saved_tensors
        (weight,) = ctx.weight
        rows = grads[0].reshape(-1, weight.shape[0])

        def compute() -> Tensor:
            return rows.t().mm(x.reshape(-1, weight.shape[1]))

        ctx.queue.push(compute)
        return (rows.mm(alias).view_as(x) if ctx.needs_input_grad[0] else None), None, None, None


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, queue: WgradQueue | None) -> Tensor:
    """Rows of x [rows, in], expert by expert up to `ends` (int32 [experts]), times weight [experts, in, out]; with a
    queue the weight gradient is delayed."""
    if queue is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return F.grouped_mm(x, weight, offs=ends)
    out: Tensor = _Grouped.apply(x, _alias(weight, x), (weight,), ends, queue)  # type: ignore[no-untyped-call]
    return out


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alias: Tensor, weight: tuple[Tensor], ends: Tensor, queue: WgradQueue) -> Tensor:
        ctx.save_for_backward(x, alias, ends)
        ctx.weight, ctx.queue = weight, queue
        return F.grouped_mm(x, alias, offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        refuse_create_graph(_DELAYED)
        x, alias, ends = ctx.saved_tensors
        (weight,), rows = ctx.weight, grads[0]

        def compute() -> None:
            # As autograd's own formula: the transposed product for a column-major weight gradient.
            accumulate(weight, F.grouped_mm(x.t(), rows, offs=ends))

        ctx.queue.push(compute)
        given = F.grouped_mm(rows, alias.transpose(-2, -1), offs=ends) if ctx.needs_input_grad[0] else None
        return given, None, None, None, None


def set_delayed(module: nn.Module, delayed: bool) -> None:
    """Delay the weight gradients of every layer in `module`, or don't. StateError while some are outstanding; PlanError,
    before anything is set, for layers that can't delay theirs."""
    for name, child in module.named_modules():
        refused = getattr(child, "delay_refused", None)
        if refused is not None and delayed:
            raise PlanError(f"{name or type(module).__name__}: {refused}")
    for name, child in module.named_modules():
        outstanding = len(getattr(child, "outstanding", ()))
        if outstanding and not delayed:
            raise StateError(
                f"{name or type(module).__name__}: {outstanding} weight gradients are outstanding: run backward_dw "
                "before weight gradients are no longer delayed"
            )
        if hasattr(child, "delayed"):
            child.delayed = delayed


@contextmanager
def delayed_wgrad(module: nn.Module, delayed: bool = True) -> Iterator[None]:
    """Inside, backwards leave the weight gradients of linear layers, attention, Mamba's in_proj and out_proj, MLPs,
    experts and shared experts to `backward_dw`, once per backward. Everything else (norms, router, convolution, scan)
    gets its gradient from the backward. StateError at the end if one was not asked for."""
    set_delayed(module, delayed)
    try:
        yield
    except BaseException:
        discard_outstanding(module)
        raise
    finally:
        set_delayed(module, False)


def discard_outstanding(module: nn.Module) -> None:
    """Forget the outstanding weight gradients: after a step that failed."""
    for child in module.modules():
        outstanding = getattr(child, "outstanding", None)
        if outstanding is not None:
            outstanding.clear()
