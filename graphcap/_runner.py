"""Checks and runs calls: what the public object and the drop-in have in common."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from graphcap import _delayed, _guards
from graphcap import _torch_private as private
from graphcap._capture_set import CaptureSet
from graphcap._flight import Flight, Nest, Side, Slot
from graphcap._plan import UnitPlan
from graphcap._quantization import FIRST_MICROBATCH, Replaying
from graphcap._replay import BoundSet
from graphcap._step_guard import StepGuard, read_by_eager_alone
from graphcap._steps import run_plain
from graphcap._tensors import flatten, tensors_of
from graphcap.backends.base import Backend
from graphcap.errors import ClosedError, InputMismatch, ReplayError, ReplayOrderError, StateError
from graphcap.order import Phase, Step

_disabled: ContextVar[bool] = ContextVar("graphcap_disabled", default=False)


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, every graphed object of this thread runs its own module, eagerly."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


@dataclass(slots=True)
class Stats:
    """What happened so far. replays: calls served by graphs; eager: calls served by the module, by reason; operations:
    recorded operations over all graphs."""

    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    operations: int = 0


@dataclass(frozen=True, slots=True)
class Ambient:
    """The modes under which a capture was made and must be replayed."""

    autocast: bool
    autocast_dtype: torch.dtype | None
    thread: int

    @staticmethod
    def now(device: torch.device) -> Ambient:
        enabled = torch.is_autocast_enabled(device.type)
        return Ambient(enabled, torch.get_autocast_dtype(device.type) if enabled else None, threading.get_ident())


class Runner:
    """Checks and runs calls: the part of the public object that make_graphed_callables uses as well."""

    def __init__(
        self,
        capture: CaptureSet,
        backend: Backend,
        ambient: Ambient,
        lazy: set[tuple[int, str]],
        quantized: Replaying | None = None,
    ) -> None:
        self.capture, self.plan, self.backend, self.ambient = capture, capture.plan, backend, ambient
        self.slots = [Slot(number) for number in range(self.plan.slots)]
        for pool in set(self.plan.pools):
            shared = [slot for slot in self.slots if self.plan.pool_of(slot.number) == pool]
            for slot in shared if len(shared) > 1 else ():
                slot.nest = Nest(shared)
        self.sets = [[BoundSet(s, self.slots[s.slot], capture) for s in sets] for sets in capture.sets]
        self.quantized = quantized
        self._name_quantized_parts()
        self.stats = Stats(operations=capture.operations)
        self.anchor = torch.zeros((), device=backend.device, requires_grad=True)
        self._guards = [self._guard(index, unit, lazy) for index, unit in enumerate(self.plan.units)]
        self._training = [[m.training for m in _guards.modules_of(unit.layers)] for unit in self.plan.units]
        self._modules = [_guards.modules_of(unit.layers) for unit in self.plan.units]
        self._check_due = [True] * len(self.plan.units)
        self._stream = backend.stream_key()
        self._device_type = backend.device.type
        self.closed = False
        self.eager_depth = 0
        self._closed_calls: set[tuple[int, int]] = set()  # (unit, microbatch)
        # (unit, microbatch) -> backwards whose delayed weight gradients have not run, the oldest first
        self._put_off: dict[tuple[int, int], deque[Flight | _delayed.EagerWork]] = {}

    def _guard(self, index: int, unit: UnitPlan, lazy: set[tuple[int, str]]) -> StepGuard:
        modules = _guards.modules_of(unit.layers)
        facts = [bound.facts for bound in self.sets[index]]
        own = {id(layer) for layer in unit.program.partial_layers}
        graphed = own.union(*(f.graphed_modules for f in facts))
        return StepGuard(
            modules,
            _guards.eager_only(modules, graphed, set().union(*(f.eager_modules for f in facts))),
            set().union(*(f.used_parameters for f in facts)),
            set().union(*(f.read_addresses for f in facts)),
            lazy.union(
                {attribute.place for attribute in unit.program.attributes},
                read_by_eager_alone(unit.program.calls),
                *(f.changed_by_eager for f in facts),
            ),
        )

    def _name_quantized_parts(self) -> None:
        if self.quantized is None:
            return
        for number, sets in enumerate(self.sets):
            for bound in sets:
                for part in bound.parts:
                    if part is not None:
                        part.quantized = self.quantized.part(number, part.index)

    # ------------------------------------------------------------------------------------------------------- a call

    def require_open(self, number: int, microbatch: int) -> None:
        """Raises ClosedError after close(), and after close_call() of this callable."""
        if self.closed or (self._closed_calls and (number, microbatch) in self._closed_calls):
            raise ClosedError(
                f"{self.plan.units[number].title}: this graphed object was closed (close() or reset()); capture again"
            )

    def call(
        self,
        number: int,
        microbatch: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        side: Side | None = None,
        first: bool | None = None,
    ) -> tuple[Any, Flight | None]:
        """One forward of unit `number`. Raises before anything has run if the call can't be served. first: whether it is
        the first microbatch of a step, for quantised modules that cache their weights."""
        unit = self.plan.units[number]
        self.require_open(number, microbatch)
        if self.is_disabled():
            return self.run_own(number, microbatch, args, kwargs, "disabled"), None
        bound = self.sets[number][unit.set_of[microbatch]]
        grad = torch.is_grad_enabled() and bound.facts.grad
        compared = given = kwargs
        if self.quantized is not None and self.quantized.caches(number):
            first, compared, given = self._first(number, bound, kwargs, first)
        problem = self._mismatch(number, bound, args, compared)
        if problem is not None:
            if self.plan.config.on_mismatch == "eager":
                return self.run_own(number, microbatch, args, kwargs, problem), None
            raise InputMismatch(
                f"{unit.title}: {problem}. Call it as it was captured, run it without graphs (`with graphcap.disabled():`, "
                "for validation too), capture again with such arguments, or use CaptureConfig(on_mismatch='eager')"
            )
        if threading.get_ident() != self.ambient.thread:
            raise ReplayError(
                f"{unit.title}: called from another thread than the one that captured it; static buffers are not locked. "
                "Capture in the thread that runs"
            )
        if bound.slot.flight is not None:
            if bound.slot.in_flight():
                bound.placed.let_go()
            bound.slot.require_free(bound.title, microbatch)
            if bound.slot.was_dropped():  # a forward whose backward never ran: its step has ended all the same
                self._check_due[number] = True
        if bound.slot.nest is not None:
            bound.slot.nest.require_turn(number, unit.title, (unit.chunk, microbatch))
        if self._check_due[number]:
            state = self._check_state(number, grad)
            if state is not None:
                return self.run_own(number, microbatch, args, kwargs, state), None
        self._follow_stream()
        if self.quantized is not None:
            bound.slot.first = first
            self._settle_all()
        return self._run(number, bound, microbatch, args, given, grad, side)

    def _run(
        self,
        number: int,
        bound: BoundSet,
        microbatch: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad: bool,
        side: Side | None,
    ) -> tuple[Any, Flight | None]:
        slot = bound.slot
        slot.generation += 1
        flight = None
        if grad and bound.has_backward:
            hold = partial(self._hold, (number, microbatch)) if bound.facts.delayed else None
            flight = slot.take((bound.title, microbatch), lambda: self._finished(number), hold, side)
            slot.unit, slot.owner = number, (bound.unit.chunk, microbatch)
        try:
            value = bound.run(args, kwargs, flight, self.anchor, side)
            if self.plan.config.on_replay is not None:
                self.plan.config.on_replay(Step(Phase.F, self.plan.units[number].chunk, microbatch))
        except BaseException:
            self._abandon(bound, flight)
            slot.release()
            self._check_due[number] = True
            raise
        self.stats.replays += 1
        return value, flight

    def _first(
        self, number: int, bound: BoundSet, kwargs: dict[str, Any], first: bool | None
    ) -> tuple[bool, dict[str, Any], dict[str, Any]]:
        """Whether this is the first microbatch; the keywords to compare with the captured ones: what it selects in graphs
        is read from the device, so it may differ; and the keywords to run with: eager parts get what was given."""
        given = kwargs.get(FIRST_MICROBATCH, first)
        if not isinstance(given, bool):
            raise InputMismatch(
                f"{self.plan.units[number].title}: captured with cached quantised weights, so every call says "
                f"{FIRST_MICROBATCH}=True or False; got {given!r}"
            )
        if FIRST_MICROBATCH not in kwargs:
            return given, kwargs, kwargs
        sample = next(s for s in self.plan.units[number].samples if s.spec is bound.spec)
        if FIRST_MICROBATCH in sample.kwargs:
            return given, {**kwargs, FIRST_MICROBATCH: sample.kwargs[FIRST_MICROBATCH]}, kwargs
        without = {name: value for name, value in kwargs.items() if name != FIRST_MICROBATCH}
        return given, without, without

    def _settle_all(self) -> None:
        """What runs beside this stream may still read the flag by which weights are cast, and the scales."""
        for slot in self.slots:
            if slot.tail is not None:
                slot.settle()

    def _abandon(self, bound: BoundSet, flight: Flight | None) -> None:
        for index, ticket in () if flight is None else flight.tickets.items():
            part = bound.parts[index]
            if part is not None and part.quantized is not None:
                part.quantized.abandon(ticket)

    def _hold(self, key: tuple[int, int], flight: Flight) -> None:
        waiting = self._put_off.setdefault(key, deque())
        if flight not in waiting:  # once for all of its parts
            waiting.append(flight)

    def is_delayed(self, number: int) -> bool:
        """Whether weight gradients of this unit are left to `backward_dw()`."""
        return bool(self.sets) and any(bound.facts.delayed for bound in self.sets[number])

    def weight_grad(self, number: int, microbatch: int) -> None:
        """`backward_dw()` of the unit's modules, for its last backward; nothing where no module delays any."""
        self.require_open(number, microbatch)
        if not self.is_delayed(number):
            return
        waiting = self._put_off.get((number, microbatch))
        if not waiting:
            raise ReplayOrderError(
                f"{self.plan.units[number].title}, microbatch {microbatch}: backward_dw() has nothing to do: its backward "
                "has not run since the last one"
            )
        flight = waiting.popleft()
        if isinstance(flight, _delayed.EagerWork):
            flight.run()
            return
        self._follow_stream()
        self.sets[number][self.plan.units[number].set_of[microbatch]].weight_grad(flight)
        flight.finish()

    def _finished(self, number: int) -> None:
        self._check_due[number] = True

    def _mismatch(self, number: int, bound: BoundSet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        grad_mode = torch.is_grad_enabled()
        found = bound.spec.difference(args, kwargs, strict=self.plan.strict, grad_mode=grad_mode and bound.facts.grad)
        if found is not None:
            return found
        if torch.is_autocast_enabled(self._device_type) != self.ambient.autocast or (
            self.ambient.autocast and torch.get_autocast_dtype(self._device_type) != self.ambient.autocast_dtype
        ):
            return f"captured {_autocast(self.ambient)}, called {_autocast(Ambient.now(self.backend.device))}"
        captured, now = self._training[number], [module.training for module in self._modules[number]]
        if now != captured:
            first = next(place for place, training in enumerate(captured) if now[place] != training)
            return f"captured with training={captured[first]}, called with training={now[first]}"
        if self.quantized is not None:
            quantisation = self.quantized.problem(number)
            if quantisation is not None:
                return quantisation
        if grad_mode and not bound.facts.grad and self._differentiable(number, args, kwargs):
            return "captured without gradients, called in grad mode with something to differentiate"
        return None

    def _differentiable(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = tensors_of(flatten((args, kwargs))[0])
        return any(t.requires_grad for t in tensors) or any(
            p.requires_grad for module in self._modules[number] for p in module.parameters()
        )

    def _check_state(self, number: int, grad: bool) -> str | None:
        """Once per step: parameters, buffers and modules are those of the capture, and nobody waits for what autograd
        does not do."""
        if grad and self.capture.buffers and private.inside_ddp():
            raise StateError(
                f"{self.plan.units[number].title}: DistributedDataParallel around a capture with grads='accumulate': it "
                "reduces when autograd accumulates a gradient, which the graph does by itself, so nothing would be "
                "reduced. Capture with grads='return'"
            )
        try:
            self._guards[number].check()
        except StateError as error:
            if self.plan.config.on_mismatch == "eager":
                return str(error)
            raise
        self._check_due[number] = not grad
        return None

    def run_own(self, number: int, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        """The unit's own code, counted by reason."""
        unit = self.plan.units[number]
        self.stats.eager[reason] += 1
        if not torch.is_grad_enabled():
            return run_plain(unit.calls, args, kwargs)
        self._bind_for_eager()
        if not self.is_delayed(number):
            return run_plain(unit.calls, args, kwargs)
        with _guards.visited_modules() as visited:
            for module in self._modules[number]:
                visited.add(id(module))  # its forward is called, not itself
            value = run_plain(unit.calls, args, kwargs)
        owners = tuple(o for o in _delayed.owners_of(self._modules[number]) if id(o) in visited)
        waiting = self._put_off.setdefault((number, microbatch), deque())
        _delayed.watch_backward(tensors_of(flatten(value)[0]), lambda: waiting.append(_delayed.EagerWork(owners)))
        return value

    def _bind_for_eager(self) -> None:
        """grads="accumulate": an eager call adds into the same buffers, so that the next graphed one finds them."""
        for index, buffer in self.capture.buffers.items():
            real = self.capture.parameters.real[index]
            if real.grad is None and getattr(real, "main_grad", None) is not buffer:
                buffer.zero_()
                real.grad = buffer

    def is_disabled(self) -> bool:
        return _disabled.get() or self.eager_depth > 0

    def _follow_stream(self) -> None:
        stream = self.backend.stream_key()
        if stream != self._stream:
            self.backend.wait_stream(self._stream)
            self._stream = stream

    def reset(self) -> None:
        for slot in self.slots:
            slot.release()
        self._put_off.clear()
        self._check_due = [True] * len(self.plan.units)

    def close_call(self, number: int, microbatch: int) -> None:
        """Free the graphs of one callable, once no other microbatch shares them; closing twice is fine."""
        self._closed_calls.add((number, microbatch))
        self._put_off.pop((number, microbatch), None)
        unit = self.plan.units[number]
        if self.closed:
            return
        if len(self._closed_calls) == len(self.plan.units) * self.plan.order.microbatches:
            self.close()
            return
        index = unit.set_of[microbatch]
        if all((number, m) in self._closed_calls for m, other in enumerate(unit.set_of) if other == index):
            bound, sets = self.sets[number][index], self.capture.sets
            if bound.slot.holder[0] == bound.title:
                bound.slot.release()
            sets[number][index].reset()
            emptied = tuple(replace(s, parts=()) if s is sets[number][index] else s for s in sets[number])
            self.capture = replace(self.capture, sets=(*sets[:number], emptied, *sets[number + 1 :]))
            bound.parts = []

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.reset()
        for graph_set in (s for sets in self.capture.sets for s in sets):
            graph_set.reset()
        self.sets = []
        if self.quantized is not None:
            self.quantized.state.release(self.quantized.plan)
            self.quantized = None
        self.capture = replace(self.capture, sets=(), buffers={}, pools=(), kept=())


def _autocast(ambient: Ambient) -> str:
    return f"under autocast to {ambient.autocast_dtype}" if ambient.autocast else "without autocast"
