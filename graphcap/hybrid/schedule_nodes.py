"""What an overlapped schedule is made of: values between slots, nodes that run one slot, two streams, and the trace.

A node cuts autograd: it runs its slot on detached inputs, so that the schedule decides when its backward runs. Gradients
go from the node that read a value to the node that made it, by way of the value.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from graphcap.errors import StateError

StreamName = Literal["compute", "comm"]
Action = Literal["fwd", "bwd", "dw", "send", "recv"]


@dataclass(frozen=True, slots=True)
class Issued:
    """One thing that the host issued. unit: place in the chunk, from 0; None for what belongs to the whole chunk."""

    action: Action
    chunk: int
    microbatch: int
    unit: int | None
    slot: str
    stream: StreamName

    def __str__(self) -> str:
        place = f"{self.slot}" if self.unit is None else f"{self.unit}.{self.slot}"
        return f"{self.action} {self.chunk}:{self.microbatch} {place} ({self.stream})"


# ------------------------------------------------------------------------------------------------------------- streams


@functools.cache
def _comm_stream(device: torch.device) -> torch.cuda.Stream:
    """One per process and device, of high priority: its kernels are short, and others wait for them."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class Streams:
    """The compute stream (the one that is current when the first slot runs) and the communication stream; on a CPU
    everything runs at once where it is issued. One event per plan orders the slots of one microbatch; different
    microbatches are ordered by their streams alone, which is where the overlap comes from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[StreamName, torch.cuda.Stream] | None = None

    def event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def on(self, name: StreamName, event: torch.cuda.Event | None) -> Iterator[None]:
        """Inside, `name` is current and has waited for the slot before; afterwards the event stands behind it."""
        if event is None:
            yield
            return
        with torch.cuda.stream(self.get(name)):
            event.wait()
            yield
            event.record()

    def get(self, name: StreamName) -> torch.cuda.Stream:
        if self._streams is None:
            compute = torch.cuda.current_stream(self.device)
            self._streams = {"compute": compute, "comm": _comm_stream(self.device)}
        return self._streams[name]

    def used_here(self, tensor: Any, made_on: StreamName, name: StreamName) -> None:
        """Memory of one stream that another one reads must not be reused before it has."""
        if isinstance(tensor, Tensor) and tensor.is_cuda and made_on != name:
            tensor.record_stream(self.get(name))

    def join(self) -> None:
        """The compute stream waits for the communication stream."""
        if self._streams is not None:
            self._streams["compute"].wait_stream(self._streams["comm"])


# -------------------------------------------------------------------------------------------------------------- values


@dataclass(slots=True, eq=False)
class Value:
    """What one slot makes and others read: a tensor, or an object of the host. `grad`: the sum of what its readers'
    backwards gave so far. static: it lies in a graph's memory, which is never freed. freed: its memory is gone."""

    content: Any
    stream: StreamName = "compute"
    static: bool = False
    freed: bool = False
    grad: Tensor | None = None
    grad_stream: StreamName = "compute"

    def add_grad(self, grad: Tensor | None, stream: StreamName, streams: Streams) -> None:
        if grad is None:
            return
        if self.grad is None:
            self.grad, self.grad_stream = grad, stream
        else:
            streams.used_here(self.grad, self.grad_stream, stream)
            self.grad, self.grad_stream = self.grad + grad, stream

    @property
    def differentiable(self) -> bool:
        return isinstance(self.content, Tensor) and self.content.requires_grad


class Watch:
    """Which tensors autograd saved. Freeing one of them would let a backward read freed memory: found on the first pass
    of a schedule, whose later passes free the same inputs of the same slots."""

    def __init__(self) -> None:
        self._saved: list[weakref.ref[Tensor]] = []

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._note, lambda kept: kept)

    def _note(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        self._saved.append(weakref.ref(kept))
        return kept

    def holds(self, tensor: Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        alive = (saved() for saved in self._saved)
        return any(t is not None and t.untyped_storage().data_ptr() == place for t in alive)


# --------------------------------------------------------------------------------------------------------------- nodes


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a unit: `run(*values)` reads `reads` and makes `makes`. frees: which of `reads` lose their memory after
    the forward, since no backward needs them. dw: computes the slot's delayed weight gradients."""

    name: str
    stream: StreamName
    run: Callable[..., Any]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    frees: tuple[str, ...] = ()
    dw: Callable[[], None] | None = None


@dataclass(slots=True)
class Node:
    """One slot of one microbatch: a forward, then a backward, then perhaps its weight gradients."""

    slot: Slot
    title: str
    streams: Streams
    event: torch.cuda.Event | None
    delayed: bool = False
    watch: Watch | None = None
    _inputs: tuple[Value, ...] = ()
    _leaves: list[Any] = field(default_factory=list)
    _outputs: tuple[Value, ...] = ()

    def forward(self, inputs: Sequence[Value]) -> tuple[Value, ...]:
        name = self.slot.stream
        for label, value in zip(self.slot.reads, inputs, strict=True):
            if value.freed:
                raise StateError(
                    f"{self.title} reads {label!r}, whose memory was freed after an earlier slot had read it. A slot may "
                    "free only what nothing reads later"
                )
        with self.streams.on(name, self.event):
            leaves = []
            for value in inputs:
                self.streams.used_here(value.content, value.stream, name)
                leaves.append(_leaf(value))
            with self.watch.hooks() if self.watch is not None else _nothing():
                made = self.slot.run(*leaves)
            outputs = tuple(Value(content, name) for content in _spread(made, self.slot.makes))
            self._inputs, self._leaves, self._outputs = tuple(inputs), leaves, outputs
            self._free()
        return outputs

    def backward(self) -> None:
        name = self.slot.stream
        with self.streams.on(name, self.event):
            roots, grads = [], []
            for value in self._outputs:
                if value.differentiable and value.grad is not None:
                    self.streams.used_here(value.grad, value.grad_stream, name)
                    roots.append(value.content)
                    grads.append(value.grad)
            if roots:
                torch.autograd.backward(roots, grads)
            for value, leaf in zip(self._inputs, self._leaves, strict=True):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    value.add_grad(leaf.grad, name, self.streams)
        self._inputs, self._leaves, self._outputs = (), [], ()

    def backward_dw(self) -> bool:
        """The slot's delayed weight gradients; False if it has none."""
        if not self.delayed or self.slot.dw is None:
            return False
        with self.streams.on(self.slot.stream, self.event):
            self.slot.dw()
        return True

    def _free(self) -> None:
        for label in self.slot.frees:
            value = self._inputs[self.slot.reads.index(label)]
            if value.static or not isinstance(value.content, Tensor) or value.content.numel() == 0:
                continue
            if self.watch is not None and self.watch.holds(value.content):
                raise StateError(
                    f"{self.title} is to free its input {label!r} after its forward, but a backward saved it and would "
                    "read freed memory. Take it out of the slot's `frees`"
                )
            value.content.untyped_storage().resize_(0)
            value.freed = True


def _leaf(value: Value) -> Any:
    content = value.content
    return content.detach().requires_grad_(content.requires_grad) if isinstance(content, Tensor) else content


def _spread(made: Any, makes: Sequence[str]) -> tuple[Any, ...]:
    return (made,) if len(makes) == 1 else tuple(made)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
