"""What is under way: forwards whose backward is still to come, and the static buffers that they occupy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphcap import _torch_private as private
from graphcap._facts import Pattern
from graphcap._recompute import Remembered
from graphcap.backends.base import Backend, Event, Graph
from graphcap.errors import InFlightError, InputMismatch, ReplayOrderError
from graphcap.fp8_meta import Ticket
from graphcap.order import Phase


@dataclass(frozen=True, slots=True)
class Side:
    """Where the graphs of a call run if not on the caller's stream; the caller's waits for `event`, which a graph records
    in its middle, or without one for the whole graph."""

    backend: Backend
    stream: object
    event: object | None

    @staticmethod
    def of(backend: Backend, stream: object | None, event: object | None) -> Side | None:
        if stream is None:
            if event is not None:
                raise InputMismatch("cuda_graph_event without cuda_graph_stream: there is no other stream to wait for")
            return None
        return Side(backend, stream, event)

    def replay(self, graph: Graph, whole: bool) -> Event | None:
        """Replay there. Returns what still runs when the caller's stream goes on."""
        with self.backend.on_stream(self.stream):
            graph.replay()
            tail = self.backend.record_event()
        if whole or self.event is None:
            tail.wait()
            return None
        self.backend.wait_event(self.event)
        return tail


class Flight:
    """One forward whose backward is still to come. The slot refers to it weakly: when the last autograd node that holds
    it is gone (the caller dropped the result), the slot is free.

    With `hold` weight gradients are delayed: the flight ends after them, and until then whoever runs them holds it.
    """

    __slots__ = (
        "__weakref__", "again", "chosen", "done", "ending", "finished", "generation", "hold", "input_results", "on_finish",
        "phase", "reached", "side", "tickets",
    )  # fmt: skip

    def __init__(
        self,
        generation: int,
        on_finish: Callable[[], None],
        hold: Callable[[Flight], None] | None = None,
        side: Side | None = None,
    ) -> None:
        self.generation, self.hold, self.side = generation, hold, side
        self.tickets: dict[int, Ticket] = {}  # part -> what it claimed on its forward, where it runs quantised modules
        self.chosen: dict[int, Pattern] = {}  # part -> the pattern of the backward graph that ran
        self.reached: dict[int, frozenset[int]] = {}  # part -> the results to which the gradients led that arrived
        self.again: dict[int, Remembered] = {}  # part -> of its forward, for recompute
        self.phase = Phase.B
        self.finished = self.ending = False
        self.done: set[tuple[int, Phase]] = set()
        self.input_results: dict[int, list[torch.Tensor | None]] = {}
        self.on_finish = on_finish

    def finish_after_backward(self) -> None:
        """The running backward pass is the last one, whichever parts it reaches."""
        if not self.ending:
            self.ending = True
            private.after_backward(self.finish)

    def finish(self) -> None:
        if not self.finished:
            self.finished = True
            self.on_finish()


@dataclass(slots=True)
class Nest:
    """Slots of one pool: those of a chunk's layers. What a later layer saves may lie where an earlier one has its scratch
    memory, so a layer runs, forward or backward, only while no later one waits for its backward."""

    slots: list[Slot]

    def require_turn(self, unit: int, title: str, holder: tuple[int, int] | None) -> None:
        """`holder`: chunk and microbatch of a forward; a layer of another one may not begin in between."""
        for slot in self.slots:
            if slot.waits() and (slot.unit > unit or (holder is not None and slot.owner != holder)):
                raise ReplayOrderError(
                    f"{title} runs while {slot.holder[0]}, microbatch {slot.holder[1]} still waits for its backward. Layers "
                    "of a chunk run in their sequence, backwards in reverse, and share memory accordingly: run that "
                    "backward first, or capture these as chunks of their own"
                )


@dataclass(slots=True)
class Slot:
    """The life of one set of static buffers."""

    number: int
    generation: int = 0
    flight: weakref.ref[Flight] | None = None
    holder: tuple[str, int] = ("", 0)  # title of the unit, microbatch: words only where an error needs them
    first: bool | None = None  # whether the call under way is the first microbatch of its step, where that matters
    tail: Event | None = None  # the end of a graph on another stream, which nobody has waited for
    unit: int = 0  # of the flight; owner: its chunk and microbatch
    owner: tuple[int, int] = (0, 0)
    nest: Nest | None = None  # if its pool is not its own

    def waits(self) -> bool:
        """Whether a backward that still has to run needs what the forward saved."""
        flight = None if self.flight is None else self.flight()
        return flight is not None and not flight.finished and not flight.done

    def in_flight(self) -> bool:
        flight = None if self.flight is None else self.flight()
        return flight is not None and not flight.finished

    def was_dropped(self) -> bool:
        return self.flight is not None and self.flight() is None

    def require_free(self, title: str, microbatch: int) -> None:
        if not self.in_flight():
            return
        flight = None if self.flight is None else self.flight()
        if flight is not None and flight.hold is not None and flight.done:
            why = "its delayed weight gradients have not run. Run them (backward_dw(), or the W step)"
        else:
            why = "its backward has not run and its result is alive. Run that backward, drop the result"
        raise InFlightError(
            f"{title}, microbatch {microbatch} needs slot {self.number}, but the forward of {self.holder[0]}, "
            f"microbatch {self.holder[1]} is still in flight there: {why}, call reset(), or capture with an order that has "
            "more microbatches in flight"
        )

    def take(
        self,
        holder: tuple[str, int],
        on_finish: Callable[[], None],
        hold: Callable[[Flight], None] | None = None,
        side: Side | None = None,
    ) -> Flight:
        flight = Flight(self.generation, on_finish, hold, side)
        self.flight, self.holder = weakref.ref(flight), holder
        return flight

    def settle(self) -> None:
        """Wait (on the device) for what still runs beside the caller's stream in these buffers."""
        assert self.tail is not None
        self.tail.wait()
        self.tail = None

    def release(self) -> None:
        self.flight = None
