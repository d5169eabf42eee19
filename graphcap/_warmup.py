"""Stage 2: run the callables as they will be captured, without recording, and note what was seen.

Every part runs on leaf proxies of what crosses into it, forward in order and backward in reverse, as recording will run
it. So lazy state settles, and shapes, structures and the flow of gradients are known before anything is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from graphcap import _delayed, _guards
from graphcap._crossings import Crossings
from graphcap._facts import PartFacts as PartFacts
from graphcap._facts import Pattern as Pattern
from graphcap._facts import UnitFacts as UnitFacts
from graphcap._facts import WarmupFacts as WarmupFacts
from graphcap._part_refusals import (
    refuse_other_calls,
    refuse_read_by_eager,
    refuse_shared_attributes,
)
from graphcap._parts import (
    OutIndex,
)
from graphcap._plan import CapturePlan, PartPlan, Sample, UnitPlan, signature_keys, with_attributes
from graphcap._quantization import Session
from graphcap._tensors import TensorSpec, flatten, same_constant, tensors_of
from graphcap._warmup_pass import Pass, SetsAttributes
from graphcap.backends.base import Backend
from graphcap.errors import CutError, GraphcapError, WarmupError
from graphcap.order import Phase
from graphcap.partial_layer import EAGER, GRAPHED, PartialLayer, PartKind


def run(
    plan: CapturePlan, backend: Backend, parameters: _guards.Parameters, session: Session | None = None
) -> WarmupFacts:
    """Warm up every unit with every signature it will be captured with; the caller keeps and restores state."""
    with plan.hooks.warmup():
        while True:
            try:
                units = _run_all(plan, parameters, session or Session())
                break
            except SetsAttributes as need:
                unit = with_attributes(plan.units[need.unit], need.part, need.found)
                plan = replace(plan, units=(*plan.units[: need.unit], unit, *plan.units[need.unit + 1 :]))
    facts = WarmupFacts(plan, parameters, units)
    _refuse_ambiguous_sums(facts)
    _refuse_shared_casts(facts)
    return facts


def _run_all(
    plan: CapturePlan, parameters: _guards.Parameters, session: Session
) -> tuple[tuple[UnitFacts, ...], ...]:
    units: list[list[_UnitRuns]] = []
    for number, unit in enumerate(plan.units):
        keys = signature_keys([sample.spec for sample in unit.samples])
        known: dict[int, _UnitRuns] = {}
        for key, sample in zip(keys, unit.samples, strict=True):
            known.setdefault(key, _UnitRuns(plan, number, sample, parameters, session))
        units.append([known[key] for key in keys])
    if plan.hooks.watches_runs:
        _along_the_order(plan, units, parameters)
    for runs in (runs for sets in units for runs in dict.fromkeys(sets)):
        while runs.is_due:
            runs.forward()
            runs.backward()
    return tuple(tuple(runs.facts() for runs in sets) for sets in units)


def _along_the_order(
    plan: CapturePlan, units: Sequence[Sequence[_UnitRuns]], parameters: _guards.Parameters
) -> None:
    """Every microbatch of every unit in the sequence of the order, as often as warm-up runs: what hooks can see of TE's
    warm-up. Those that `units` has nothing of are run for the hooks alone."""
    runs: dict[tuple[int, int], _UnitRuns] = {}
    for number, unit in enumerate(plan.units):
        for microbatch in range(plan.order.microbatches):
            own = units[number][unit.set_of[microbatch]]
            sample = unit.samples[unit.set_of[microbatch]]
            taken = any(own is known for known in runs.values())
            runs[number, microbatch] = _UnitRuns(plan, number, sample, parameters, own.session) if taken else own
    for _ in range(max(run.count for run in runs.values())):
        for step in plan.order:
            numbers = [number for number, unit in enumerate(plan.units) if unit.chunk == step.chunk]
            if step.phase is Phase.F:
                for number in numbers:
                    runs[number, step.microbatch].forward()
            elif step.phase is not Phase.W:
                for number in reversed(numbers):
                    runs[number, step.microbatch].backward()
        if not plan.order.training:
            for run in runs.values():
                run.backward()


class _UnitRuns:
    """The warm-up runs of one unit with one signature of arguments."""

    def __init__(
        self, plan: CapturePlan, number: int, sample: Sample, parameters: _guards.Parameters, session: Session
    ) -> None:
        self.session = session
        self.plan, self.number, self.unit, self.sample = plan, number, plan.units[number], sample
        self.parameters = parameters
        self.modules = _guards.modules_of(self.unit.layers)
        self.grad = plan.order.training and torch.is_grad_enabled()
        self.trial = _delayed.Trial(_delayed.owners_of(self.modules) if self.grad else ())
        self.count = max(plan.config.warmup, 2) if self.trial.owners else plan.config.warmup
        self._done = self._waiting = 0
        self._reentrant = False
        self._seen: Pass | None = None
        self._facts: list[PartFacts] | None = None
        self._changed: set[tuple[int, str]] = set()
        self._declared: set[tuple[int, str]] = set()

    @property
    def is_due(self) -> bool:
        """Whether another run is to come."""
        return self._done < self.count

    def forward(self) -> None:
        top = self.unit.layers[0]
        with self._told(), self.plan.hooks.forward(self.number, top), self.session.run(self.number):
            self._seen = Pass(
                self.unit,
                self.sample,
                self.parameters,
                self.grad,
                self.modules,
                self._reentrant,
                self.trial,
                self.plan.config.on_replay is not None,
                self.session.once,
            )
            self._seen.recompute = self.plan.config.recompute is not None
            self._waiting = _delayed.pending(self.trial.owners)
            self._seen.forward(watch=self._done > 0)

    def backward(self) -> None:
        """The backward of the last forward (without gradients: only what was seen of it)."""
        assert self._seen is not None
        self.trial.probing = self._done == self.count - 1
        with self._told():
            with self.plan.hooks.backward(self.number, self.unit.layers[0]) if self.grad else nullcontext():
                facts, self._reentrant = self._seen.backward(keep_values=self.trial.probing)
            self._changed |= self._seen.changed_by_eager
            self._declared |= self._seen.declared
        if _delayed.pending(self.trial.owners) > self._waiting:
            raise CutError(
                f"{self.unit.title}: a module put a weight gradient off that its backward_dw() has not run: it was called "
                "otherwise than as a module (module.forward(x)?), or more than once. Call it once, as module(x)"
            )
        if self._facts is not None:
            _refuse_change(self._facts, facts)
        self._facts = facts
        self._done += 1
        if self.count == 1 and self._seen.sets_tensors:  # lazily, or at every call? Only a second run tells
            self.count = 2

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except SetsAttributes as need:
            need.unit = self.number
            raise
        except GraphcapError:
            raise
        except Exception as error:
            what = "ran out of memory" if isinstance(error, torch.OutOfMemoryError) else "failed"
            raise WarmupError(
                f"warm-up run {self._done + 1} of {self.count} of {self.unit.title} {what}: {type(error).__name__}: {error}"
            ) from error

    def facts(self) -> UnitFacts:
        seen, unit = self._seen, self.unit
        assert seen is not None
        assert self._facts is not None
        refuse_shared_attributes(unit, self._changed)
        refuse_read_by_eager(unit, self.modules, self._declared)
        eager, read = seen.eager_modules, set[int]()
        has_eager = any(part.kind is not GRAPHED for part in unit.parts)
        told = self.plan.config.on_replay is not None
        if unit.program.trace is None and (has_eager or unit.program.attributes or told):
            reads, log = self._look()
            read = reads[GRAPHED]
            if told:
                refuse_other_calls(unit, log, self._look()[1])
            eager = eager | _holders(self.modules, reads[EAGER] - read)
        return UnitFacts(
            unit,
            tuple(self._facts),
            self.grad,
            self._reentrant,
            frozenset(seen.graphed_modules),
            frozenset(eager),
            frozenset(seen.used_parameters),
            frozenset(read),
            frozenset(self._changed),
        )

    def _look(self) -> tuple[dict[PartKind, set[int]], list[str]]:
        with self.session.run(self.number):
            return _observed(self.unit, self.sample, self.parameters, self.grad, self.modules)


def _observed(
    unit: UnitPlan, sample: Sample, parameters: _guards.Parameters, grad: bool, modules: Sequence[torch.nn.Module]
) -> tuple[dict[PartKind, set[int]], list[str]]:
    """One more forward, for detector D2; which addresses each kind of part reads, and the operators of graphed parts."""
    run = Pass(unit, sample, parameters, grad, modules, False, _delayed.Trial(()))
    run.crossings = Crossings(modules, tensors_of(flatten((run.args, run.kwargs))[0]), unit.program.attributes)
    try:
        with run.crossings:
            run.forward(watch=False)
    except GraphcapError:
        raise
    except Exception as error:
        raise WarmupError(
            f"the warm-up run of {unit.title} that looks at every operator (in a TorchDispatchMode) failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    return run.crossings.reads, run.crossings.log


def _holders(modules: Sequence[torch.nn.Module], addresses: set[int]) -> set[int]:
    """The ids of the modules (none of them a PartialLayer) that hold a tensor at one of these addresses."""
    found: set[int] = set()
    for module in (m for top in modules for m in top.modules()):
        held = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if not isinstance(module, PartialLayer) and any(t.data_ptr() in addresses for t in held):
            found.add(id(module))
    return found


def _refuse_change(before: Sequence[PartFacts], after: Sequence[PartFacts]) -> None:
    """Warm-up runs on equal arguments must agree: what changes between them can't be in a graph."""
    for old, new in zip(before, after, strict=True):
        if old.make_structure != new.make_structure or len(old.made) != len(new.made):
            raise CutError(f"part {old.part.name}: its outputs have another structure at every run")
        for a, b in zip(old.made, new.made, strict=True):
            if a != b:
                raise CutError(
                    f"part {old.part.name}: an output was {a} in one run and {b} in the next{_rest(a, b)}. What crosses a "
                    "break must have a static shape: let the eager part contain whatever reads the dynamic tensor"
                )
        if old.returned != new.returned or old.read_index != new.read_index:
            raise CutError(
                f"part {old.part.name}: it returned the very tensor it was given in one run and another one in the next. "
                "Return a new tensor always (x.view_as(x) is one), or never"
            )
        for x, y in zip(old.make_leaves, new.make_leaves, strict=True):
            if not (isinstance(x, OutIndex) and isinstance(y, OutIndex)) and not same_constant(x, y):
                raise CutError(
                    f"part {old.part.name}: it returned {x!r} in one run and {y!r} in the next; a graph would freeze it"
                )


def _rest(a: TensorSpec, b: TensorSpec) -> str:
    """What the short text of two specs does not show."""
    if str(a) != str(b):
        return ""
    return f" (strides {list(a.stride)} and {list(b.stride)}, requires_grad {a.requires_grad} and {b.requires_grad})"


def _refuse_ambiguous_sums(facts: WarmupFacts) -> None:
    """A parameter used in several parts, and more than once in one that is not the last of them."""
    # Eager adds the gradients of single uses, the latest use first: (late + early_b) + early_a. A node adds its own
    # first: late + (early_b + early_a). The bits differ.
    for unit in (sets[0] for sets in facts.units):
        for number, part in enumerate(unit.parts):
            later = {index for other in unit.parts[number + 1 :] for index in other.parameters}
            for index in part.repeated:
                if index in later:
                    raise CutError(
                        f"parameter {facts.parameters.names[index]} is used more than once in part {part.part.name} and "
                        "again in a later part: its gradients would be added in another order than eager's. Use it once "
                        "per part, or let the part be EAGER"
                    )


def _refuse_shared_casts(facts: WarmupFacts) -> None:
    """An autocast region casts a parameter once and adds the gradients of all its uses in the low precision; parts cast by
    themselves, and their gradients are added in the parameter's own. The region may surround the call, or be opened
    inside the callable and still be open at a break."""
    for unit in (sets[0] for sets in facts.units):
        seen: dict[tuple[int, int], str] = {}  # parameter, region -> the last part
        region = 0
        for part in unit.parts:
            closed = part.part.kind is not GRAPHED and not _inside_region(part.part)
            region += closed
            for index in part.cast:
                device = facts.parameters.real[index].device.type
                around = torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()
                key = (index, -1 if around else region)
                if key in seen:
                    raise CutError(
                        f"parameter {facts.parameters.names[index]} is cast by autocast in part {seen[key]} and again in "
                        f"part {part.part.name}: eager casts it once and adds its gradients in the low precision, graphs "
                        "can't. Use it in one part, or let every such region be torch.autocast(..., cache_enabled=False)"
                    )
                seen[key] = part.part.name
            region += closed


def _inside_region(part: PartPlan) -> bool:
    return any(getattr(call.run, "in_caching_autocast", False) for call in part.calls)
