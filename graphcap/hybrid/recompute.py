"""Activation recomputation: whole layers by torch's checkpoint, an output that is discarded after its last use, and, inside
a graph, an output that no backward keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from graphcap.errors import StateError
from graphcap.hybrid.first_order import refuse_create_graph


def checkpointed(run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """`run(hidden)`, whose intermediate values are computed again in the backward. The layers draw no random numbers, so
    that no generator state has to be kept."""
    out: Tensor = checkpoint(
        run, hidden, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (nullcontext(), _Again())
    )
    return out


_recomputing = ContextVar("recomputing", default=False)


def is_recomputing() -> bool:
    """Whether what runs now has run before, in the forward: statistics must not count it twice."""
    return _recomputing.get()


class _Again:
    """While inside, `is_recomputing()`. Entered once per backward, so more than once where a graph is retained."""

    def __enter__(self) -> None:
        _recomputing.set(True)

    def __exit__(self, *_: object) -> None:
        _recomputing.set(False)


_NORM: Final = "a norm that is computed again (recompute='norm')"


class DiscardedOutput:
    """One value whose memory is freed once its consumers have run, and computed again before the first of them needs it
    in the backward.

    `value = discarded(x)`; then the consumers; then `discarded.discard(trigger)`, once: it frees the value and computes
    it again when the gradient of `trigger` arrives. The trigger must be a tensor whose backward precedes that of every
    consumer of the value, on the consumers' stream. For the norm in front of a mixture of experts that is the experts'
    output: the combined output's gradient arrives on the communication stream, and memory of the recomputed value would
    be taken from that stream's share, which may hand it on before its readers on the other stream are done (Megatron-LM
    saw the gradients of attention corrupted by it). So a second trigger is an error.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]) -> None:
        self._run, self._parameters = run, tuple(parameters)
        self._source: Tensor | None = None
        self._shape: torch.Size = torch.Size()
        self._dtype = torch.float32
        self._storage: torch.UntypedStorage | None = None
        self._bytes = 0
        self._again: tuple[Tensor, Tensor] | None = None
        self._fired = False
        self._trained = False  # whether the value has a backward of its own
        self._triggers = 0

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _Discarded.apply(x, self, *self._parameters)  # type: ignore[no-untyped-call]
        return out

    def discard(self, trigger: Tensor) -> None:
        """Free the value; compute it again when the gradient of `trigger` arrives. Without grad nothing is freed."""
        if not trigger.requires_grad or self._storage is None:
            return
        trigger.register_hook(self.recompute)  # type: ignore[no-untyped-call]
        if self._triggers == 0:
            self._bytes = self._storage.nbytes()
            self._storage.resize_(0)
        self._triggers += 1

    def recompute(self, _: Tensor) -> None:
        """The hook: the value is there again, and with it the graph that its own backward goes through."""
        if self._fired or self._source is None or (not self._trained and self._triggers > 1):
            raise StateError(
                "a discarded norm output was asked to be computed a second time: exactly one hook belongs to it, on the "
                "experts' output. A hook on the combined output runs on the communication stream, from which it would take "
                "the value's memory, though its readers run on the other: gradients of the layers in front may be wrong"
            )
        assert self._storage is not None
        with torch.set_grad_enabled(self._trained):
            leaf = self._source.detach().requires_grad_(self._trained)
            out = self._run(leaf)
        if self._trained:  # else no backward comes that would make room for the next one, through a retained graph
            self._fired, self._again = True, (leaf, out)
        self._storage.resize_(self._bytes)
        value = torch.empty(0, dtype=self._dtype, device=out.device)
        value.set_(self._storage, 0, self._shape, out.stride()).copy_(out.detach())

    def _computed(self, x: Tensor) -> Tensor:
        out = self._run(x)
        # The storage and not the tensor: out -> its graph node -> this object -> out would never be freed.
        self._source, self._storage = x.detach(), out.untyped_storage()
        self._shape, self._dtype = out.shape, out.dtype
        return out

    def _gradients(self, grad: Tensor) -> list[Tensor | None]:
        if self._triggers == 0:  # never discarded
            self.recompute(grad)
        if self._again is None:
            raise StateError(
                "the backward of a discarded norm output began before it was computed again: the trigger's gradient must "
                "arrive first. Expected the hook on the experts' output"
            )
        leaf, out = self._again
        wanted = [t for t in (leaf, *self._parameters) if t.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad))
        results = [next(found) if t.requires_grad else None for t in (leaf, *self._parameters)]
        self._again, self._fired = None, False  # a second backward through a retained graph computes it once more
        return results


class _Discarded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keeper: DiscardedOutput, *parameters: Tensor) -> Tensor:
        ctx.keeper = keeper
        keeper._trained = any(ctx.needs_input_grad)
        return keeper._computed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph(_NORM)
        first, *rest = ctx.keeper._gradients(grads[0])
        return (first, None, *rest)


@contextmanager
def not_kept(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """`with not_kept(run, x, weight) as value:` and the consumers of `value = run(x, weight)` inside.

    What autograd saves of the value in there is how to compute it again, which every backward that asks for it does. In a
    graph this is what `DiscardedOutput` is elsewhere: a replay can free no memory, but memory that nothing holds when the
    forward has been recorded serves what is recorded later, and the backward's graph begins with the computation.
    """
    value: Tensor = _NotKept.apply(x, weight, run)  # type: ignore[no-untyped-call]
    place = value.untyped_storage().data_ptr()
    source, scale = x.detach(), weight.detach()

    def pack(saved: Tensor) -> Tensor | tuple[Sequence[int], Sequence[int], int]:
        if saved.numel() == 0 or saved.untyped_storage().data_ptr() != place:
            return saved.detach()  # a node that saved its own output would keep itself alive; torch restores the rest
        return saved.size(), saved.stride(), int(saved.storage_offset())

    def unpack(kept: Tensor | tuple[Sequence[int], Sequence[int], int]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return run(source, scale).as_strided(*kept)

    with saved_tensors_hooks(pack, unpack):
        yield value


class _NotKept(torch.autograd.Function):
    """`run(x, weight)`, whose own intermediate values are computed again too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.run = run
        return run(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph(_NORM)
        needed = ctx.needs_input_grad[:2]
        leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.run(*leaves)
        found = iter(torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], grads[0]))
        return (*(next(found) if wanted else None for wanted in needed), None)
