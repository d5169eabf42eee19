"""The seam to the device: what a backend must do, and nothing about how.

A backend records the operations that run inside `capture()` into a graph and replays them on the same memory. There are
two: `cuda` (CUDA graphs) and `tape` (the same semantics on the CPU, slow, for tests). One conformance suite
(tests/backends) runs on both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch


class Graph(ABC):
    """A recorded piece of work on fixed memory."""

    @abstractmethod
    def replay(self) -> None:
        """Run what was recorded, on the current stream. Python does not run; the default generator advances as in
        eager; memory is read and written where it was at capture."""

    @abstractmethod
    def reset(self) -> None:
        """Free the graph. Safe to call twice."""

    @property
    @abstractmethod
    def operations(self) -> int:
        """How many operations the graph holds (tape: operators; cuda: nodes, 0 where the driver can't tell)."""


    @property
    def empty(self) -> bool:
        """Whether the graph is known to hold nothing (only views were made): its replay can be left out."""
        return False


class NoGraph(Graph):
    """Stands for a graph that would hold nothing: a stretch of views alone, whose results lie where it reads."""

    empty = True
    operations = 0

    def replay(self) -> None:
        return None

    def reset(self) -> None:
        return None


def unless_empty(graph: Graph) -> Graph:
    """The graph, or `NoGraph` in its place; a replay of nothing costs a launch all the same."""
    if not graph.empty:
        return graph
    graph.reset()
    return NoGraph()


class Pool(ABC):
    """Memory from which the tensors born in captures come. Captures into one pool may reuse each other's dead memory:
    whatever must survive the next capture is held by a reference until all captures are done."""

    @property
    @abstractmethod
    def handle(self) -> object:
        """torch's pool handle (two ints) on cuda; an opaque object on the tape."""

    @abstractmethod
    def poison(self) -> None:
        """End of all captures: no value born in them may be taken for a result (the tape writes NaN and 0; on cuda
        recording computed nothing, so nothing is done)."""


class Event(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def wait(self) -> None:
        """Let the current stream wait for it (no host wait)."""


class Backend(ABC):
    """What records and replays. One object serves one capture set on one device."""

    name: str

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def new_pool(self, handle: object | None = None) -> Pool:
        """A memory pool; with `handle` (cuda) one that exists already."""

    @abstractmethod
    def session(self) -> AbstractContextManager[None]:
        """Everything of one capture set, warm-up and recording, happens in here: on one side stream that waits for the
        current one (and the other way round at the end), with garbage collection frozen and caches emptied once.
        The current stream, generator states and GC setting are as before afterwards, whatever happened inside."""

    @abstractmethod
    def capture(self, pool: Pool, generators: Iterable[torch.Generator] = ()) -> AbstractContextManager[Graph]:
        """Record what runs inside. Raises ForbiddenOpError (or CaptureError) for what a graph can't hold and is usable
        again afterwards; refused inside another capture. `generators`: those besides the default one that operations
        inside draw from."""

    @abstractmethod
    def allocated(self, pool: Pool) -> int:
        """Bytes that tensors born in captures into the pool hold now; only differences mean something (cuda counts whatever
        else is on the device as well)."""

    @abstractmethod
    def generator_states(self) -> object:
        """A copy of the state of the default generators that operations on this device can draw from."""

    @abstractmethod
    def restore_generator_states(self, states: object) -> None:
        """Put back what `generator_states` gave."""

    @abstractmethod
    def stream_key(self) -> object:
        """Identifies the current stream; equal keys mean the same stream."""

    @abstractmethod
    def wait_stream(self, key: object) -> None:
        """Let the current stream wait for the work so far of the stream that `stream_key` named."""

    @abstractmethod
    def on_stream(self, stream: object) -> AbstractContextManager[None]:
        """What runs inside is issued on this stream of the caller's, after the work so far of the current one, which does
        not wait for it. Raises DeviceError where there are no streams (the tape)."""

    @abstractmethod
    def wait_event(self, event: object) -> None:
        """Let the current stream wait for an event of the caller's (on cuda a torch.cuda.Event)."""

    @abstractmethod
    def record_event(self) -> Event:
        """An event at the end of the current stream's work."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle."""
