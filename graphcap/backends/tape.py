"""A CUDA graph on the CPU: records operators, replays them on the same memory, and is as merciless as the real one.

After a capture there is poison (NaN, 0) where a real capture leaves garbage; memory that a real pool gives to a later
capture is poisoned when that capture's graph is replayed; Python does not run at a replay. It is for tests: a wrong
order, a stale read or a lifetime that is too short becomes a NaN on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch

from graphcap import _torch_private as private
from graphcap.backends.base import Backend, Event, Graph, Pool
from graphcap.backends.refusal_modes import CallGate, Gate
from graphcap.backends.scopes import exclusive_capture, frozen_gc, is_capturing
from graphcap.backends.tape_memory import Memory, Registry, moved_message
from graphcap.backends.tape_record import Program, Record, Recorder, TapeView
from graphcap.errors import CaptureError, DeviceError, ReplayError


class TapeGraph(Graph):
    """What one capture recorded, and the memory it works on."""

    def __init__(self, reuses: Iterable[Memory]) -> None:
        self._records: list[Record] = []
        self._program: Program | None = None
        self._born: list[Memory] = []
        self._outside: list[Memory] = []
        self._temporaries: list[Memory] = []
        # Memory of earlier captures that was dead when this one began: a real pool may have put ours into it.
        self._reuses: list[ReferenceType[Memory]] = [ref(memory) for memory in reuses]
        # Later graphs whose memory may be in ours (empty unless reuse goes both ways).
        self._lent_to: list[ReferenceType[TapeGraph]] = []
        self._state = "recording"

    def close(self, recorder: Recorder) -> None:
        """The capture is over and went well."""
        self._records, self._born, self._outside = recorder.records, recorder.born, recorder.outside
        with private.neutral_dispatch():
            lone = private.lone_storage_holders()
            self._temporaries = [memory for memory in self._born if memory.is_dead(lone)]
        self._state = "ready"

    def replay(self) -> None:
        if self._state != "ready":
            raise ReplayError(f"this graph is {self._state}: it can be replayed after its capture and before reset()")
        if is_capturing():
            raise CaptureError("a graph can't be replayed inside a capture: replay it before or after")
        with private.neutral_dispatch():
            self._check_memory()
            if self._program is None:
                self._program = Program(self._records)
            for reference in self._reuses:
                memory = reference()
                if memory is not None:
                    memory.poison()
            reads_poison = any(memory.holds_poison for memory in self._outside)
            self._program.run()
            for memory in self._born:
                memory.poisoned = reads_poison
            for memory in self._temporaries:
                memory.poison()
            for borrower in self._lent_to:
                for memory in getattr(borrower(), "born", ()):
                    memory.poison()

    def lend_to(self, later: TapeGraph) -> None:
        """Replaying this graph also overwrites what `later` left, if `later` may live in memory that was ours."""
        mine = {id(memory) for memory in self._born}
        if any(id(reference()) in mine for reference in later._reuses):
            self._lent_to.append(ref(later))

    def _check_memory(self) -> None:
        for memory in (*self._outside, *self._born):
            if memory.moved():
                raise ReplayError(moved_message(memory))

    def reset(self) -> None:
        self._records, self._program = [], None
        self._born, self._outside, self._temporaries, self._reuses, self._lent_to = [], [], [], [], []
        self._state = "reset"

    @property
    def operations(self) -> int:
        return len(self._records)

    @property
    def empty(self) -> bool:
        return self._state == "ready" and not self._records

    @property
    def born(self) -> tuple[Memory, ...]:
        return tuple(self._born)


class TapePool(Pool):
    """Knows its captures in order, as long as their graphs live."""

    def __init__(self, reuse_both_ways: bool) -> None:
        self._graphs: list[ReferenceType[TapeGraph]] = []
        self._reuse_both_ways = reuse_both_ways

    @property
    def handle(self) -> object:
        return self

    def poison(self) -> None:
        with private.neutral_dispatch():
            for memory in self._born():
                memory.poison()

    def allocated(self) -> int:
        with private.neutral_dispatch():
            lone = private.lone_storage_holders()
            return sum(memory.bytes.numel() for memory in self._born() if not memory.is_dead(lone))

    def dead(self) -> list[Memory]:
        """Memory of earlier captures that nobody but the tape refers to now."""
        with private.neutral_dispatch():
            lone = private.lone_storage_holders()
            return [memory for memory in self._born() if memory.is_dead(lone)]

    def add(self, graph: TapeGraph) -> None:
        if self._reuse_both_ways:
            for earlier in self._alive():
                earlier.lend_to(graph)
        self._graphs = [ref(alive) for alive in (*self._alive(), graph)]

    def _alive(self) -> list[TapeGraph]:
        return [graph for reference in self._graphs if (graph := reference()) is not None]

    def _born(self) -> Iterator[Memory]:
        for graph in self._alive():
            yield from graph.born


class TapeEvent(Event):
    """There is one stream, and it is in order."""

    def wait(self) -> None:
        return None


class TapeBackend(Backend):
    """Records on the CPU.

    Reuse in a real pool goes both ways: a capture B that began when memory of an earlier capture A was dead (A's
    temporaries are) may live in that memory. Replaying B then overwrites what was A's, and replaying A again
    overwrites what B left: wrong where results of a later capture of the pool are still needed. With
    `reuse_both_ways=False` only the first is imitated, to tell the two apart.
    """

    name = "tape"

    def __init__(self, device: torch.device, reuse_both_ways: bool = True) -> None:
        super().__init__(device)
        self._registry = Registry()
        self._reuse_both_ways = reuse_both_ways

    def new_pool(self, handle: object | None = None) -> TapePool:
        return handle if isinstance(handle, TapePool) else TapePool(self._reuse_both_ways)

    @contextmanager
    def session(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(frozen_gc())
            stack.callback(self.restore_generator_states, self.generator_states())
            yield

    @contextmanager
    def capture(self, pool: Pool, generators: Iterable[torch.Generator] = ()) -> Iterator[Graph]:
        assert isinstance(pool, TapePool)
        if private.in_functorch_transform():
            raise CaptureError("a capture inside a functorch transform (vmap, grad): capture the transformed function")
        with exclusive_capture():
            yield from self._record(pool, tuple(generators))

    def _record(self, pool: TapePool, generators: tuple[torch.Generator, ...]) -> Iterator[Graph]:
        """One capture; at the single `yield` the user's code runs."""
        gate = Gate(TapeView(self._registry), generators)
        recorder = Recorder(self._registry, gate)
        states = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
        graph = TapeGraph(pool.dead())
        failure: BaseException | None = None
        try:
            with CallGate(gate, {"one_hot": scatter_one_hot}), recorder:
                yield graph
        except BaseException as error:
            failure = error
            raise
        finally:
            with private.neutral_dispatch():
                recorder.restore()
                recorder.poison()
                for generator, state in states:
                    generator.set_state(state)
            try:
                # Also where the user's code caught the refusal, or turned it into another error.
                if gate.refused is not None and failure is not gate.refused:
                    raise gate.refused from failure
            finally:
                # An error holds its frames, and they hold the tensors: no cycle may keep them.
                gate.refused = failure = None
        graph.close(recorder)
        pool.add(graph)

    def allocated(self, pool: Pool) -> int:
        assert isinstance(pool, TapePool)
        return pool.allocated()

    def generator_states(self) -> object:
        return torch.default_generator.get_state()

    def restore_generator_states(self, states: object) -> None:
        assert isinstance(states, torch.Tensor)
        with private.neutral_dispatch():
            torch.default_generator.set_state(states)

    def stream_key(self) -> object:
        return "cpu"

    def wait_stream(self, key: object) -> None:
        return None

    @contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        raise DeviceError(f"cuda_graph_stream={stream!r}: the tape runs on the CPU, which has no streams. Leave it out here")
        yield

    def wait_event(self, event: object) -> None:
        raise DeviceError(f"cuda_graph_event={event!r}: the tape runs on the CPU, which has no events. Leave it out here")

    def record_event(self) -> TapeEvent:
        return TapeEvent()

    def synchronize(self) -> None:
        return None


def scatter_one_hot(tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """one_hot as it runs on CUDA. On the CPU its range check reads values; there the result is the same."""
    if num_classes <= 0:
        return NotImplemented
    zeros = torch.zeros(*tensor.size(), num_classes, dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)
