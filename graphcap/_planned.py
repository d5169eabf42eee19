"""`graphcap.plan`: the cut of a model without a recording, on the CPU, on a GPU or on meta tensors.

The analysis of capture runs, and one warm-up pass (forward and backward), in which every operator is looked at: which
parameters a part reads, and whether it holds a kernel at all. Nothing is recorded, and nothing is left behind.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap import _compiled, _delayed, _guards, _plan, _trace_plan, _warmup, _warmup_pass
from graphcap import _torch_private as private
from graphcap._breaks import Planning
from graphcap._facts import PartFacts, WarmupFacts
from graphcap._plan import CapturePlan, PartPlan
from graphcap._tensors import TensorSpec, flatten, planning, tensors_of
from graphcap._trace_follow import BreakCall
from graphcap._trace_owners import has_storage
from graphcap.backends import common_device
from graphcap.backends.refusal_modes import line_text
from graphcap.backends.scopes import frozen_gc
from graphcap.backends.tape import TapeBackend
from graphcap.backends.tape_record import needs_replay
from graphcap.config import CaptureConfig
from graphcap.errors import CutError, GraphcapError, PlanError, WarmupError
from graphcap.make_graphed import as_order, asks_for_breaks, normalise, refuse
from graphcap.order import Order, Phase
from graphcap.partial_layer import GRAPHED, Opened

LIKE_INPUT = "input"


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that a part reads or makes. source: "input" (the caller's) or the number of the part that made it.
    differentiable: a gradient comes back for it. bytes: of its elements."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    source: str
    differentiable: bool


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """One part. kind: "graph", "views" (a stretch that holds no kernel: no graph), "eager", or "first"
    (a break that is a function of the arguments alone and runs before everything). reason, place: why a break
    is one, and the line that calls it. parameters: how many elements of parameters it uses (once each), trainable or not;
    backward_graphs: how many are recorded per graph set (one for each set of outputs from which a backward may start).
    stood_in: the break did not run; something declared stood for its result."""

    unit: int
    index: int
    kind: str
    name: str
    reason: str | None
    place: str | None
    reads: tuple[Crossing, ...]
    makes: tuple[Crossing, ...]
    parameters: int
    parameter_bytes: int
    parameter_names: tuple[str, ...]
    backward_graphs: int
    stood_in: bool


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What `capture` would do. parts: in order; cut: the plan of capture itself; static_bytes: of the tensors that parts
    read and make, each once (gradients, which capture adds, are not counted). inputs, outputs: of the first unit's
    callable and the last one's."""

    cut: CapturePlan
    parts: tuple[PlannedPart, ...]
    inputs: tuple[Crossing, ...]
    outputs: tuple[Crossing, ...]
    parameters: int
    parameter_bytes: int
    static_bytes: int
    device: str

    @property
    def breaks(self) -> tuple[PlannedPart, ...]:
        return tuple(part for part in self.parts if part.kind == "eager")

    @property
    def slots(self) -> int:
        return self.cut.slots

    @property
    def graphs(self) -> int:
        """Forward graphs of one pass over all chunks."""
        return sum(part.kind == "graph" for part in self.parts)

    @property
    def recorded(self) -> tuple[int, int]:
        """(forward, backward) graphs that capture records in all, over every set of static buffers."""
        sets = [len(unit.samples) for unit in self.cut.units]
        forward = sum(sets[part.unit] for part in self.parts if part.kind == "graph")
        return forward, sum(sets[part.unit] * part.backward_graphs for part in self.parts)

    def __str__(self) -> str:
        lines = [
            f"{self.graphs} graphs, {len(self.breaks)} breaks, {self.slots} slots, on {self.device}; capture records "
            f"{self.recorded[0]} forward and {self.recorded[1]} backward graphs"
        ]
        for part in self.parts:
            why = f"  ({part.reason})" if part.reason else ""
            lines.append(f"  {part.kind:5}  {part.name}{why}")
        return "\n".join(lines)


def plan(
    module: Any,
    sample_args: Any,
    sample_kwargs: Any = None,
    *,
    break_at: Any = (),
    order: Order | str | None = None,
    config: CaptureConfig | None = None,
    stand_ins: Mapping[str, Callable[..., Any] | str] | None = None,
) -> ModelPlan:
    """How `capture` would cut a module, without recording anything: parts, breaks and why, what crosses, parameters.

    module, sample_args, sample_kwargs, break_at, order, config: as for `capture`; the tensors may all be on the meta
        device (`with torch.device("meta"):`), so that a model of any size can be planned.
    stand_ins: what a break returns that can't run (on meta tensors nothing that reads values can): a pattern of titles
        (as the plan prints them) -> a function of the break's arguments, or "input": like its first tensor argument.
        It is taken at its word: shapes and dtypes of a plan with stand-ins are what you declared.
    The forward and the backward run once or a few times; on meta they cost no memory. Other errors are those of capture:
    PlanError, CutError, WarmupError, DeviceError. Without break_at, and inside declared
    parts, host reads are refused at recording alone, so a plan does not find them.
    """
    with planning():
        return _planned(module, sample_args, sample_kwargs, break_at, order, config, stand_ins)


def _planned(
    module: Any,
    sample_args: Any,
    sample_kwargs: Any,
    break_at: Any,
    order: Order | str | None,
    config: CaptureConfig | None,
    stand_ins: Mapping[str, Callable[..., Any] | str] | None,
) -> ModelPlan:
    parsed = as_order(order)
    chunks, samples, _ = normalise(module, sample_args, sample_kwargs, parsed)
    made = _plan.build(chunks, samples, parsed, replace(config or CaptureConfig(), warmup=1))
    modules = _guards.modules_of(tuple(layer for unit in made.units for layer in unit.layers))
    refuse(made, modules, False)
    if not asks_for_breaks(break_at):
        if stand_ins:
            raise PlanError("stand_ins without break_at=: they stand for breaks of an automatic cut")
        for top in modules:
            _plan.refuse_hidden_parts(top)
    given = [leaf for unit in made.units for s in unit.samples for leaf in tensors_of(flatten((s.args, s.kwargs))[0])]
    tensors = [(n, t) for n, t in _guards.named_state(modules) if isinstance(t, torch.Tensor)]
    tensors += [(f"sample tensor {number}", tensor) for number, tensor in enumerate(given)]
    device = common_device("auto", tensors) if tensors else torch.device("cpu")
    watch = Planning(device.type == "meta", _stand_ins(stand_ins or {}))
    # Meta tensors have no values: every device's rules but the tape's would look at where they lie.
    watched = torch.device("cpu") if watch.meta else device
    with (
        _compiled.plain_or_refused(),
        frozen_gc(),
        _kept_random_state(device),
        _guards.kept_state(modules),
        _guards.leaf_aliases(modules) as parameters,
        _delayed.quiet(_delayed.owners_of(modules)),
        _guards.kept_autocast(),
    ):
        if asks_for_breaks(break_at):
            made = _cut(made, break_at, watched, watch)
        facts = _warm(made, parameters, watch.meta)
        seen = [_look(facts, number, watch.meta) for number in range(len(facts.plan.units))]
        return _record(facts.plan, seen, parameters, str(device))


def _cut(made: CapturePlan, break_at: Any, device: torch.device, watch: Planning) -> CapturePlan:
    try:
        made = _trace_plan.cut_at(made, break_at, device, watch)
    except GraphcapError:
        raise
    except Exception as error:
        raise _failed("the analysis", error, watch.meta) from error
    unused = [pattern for pattern, _ in watch.stand_ins if pattern not in watch.used]
    if unused:
        titles = ", ".join(dict.fromkeys(part.name for part in made.breaks)) or "none"
        raise PlanError(f"stand_ins: {', '.join(unused)} fits no break. Breaks here: {titles}")
    return made


def _stand_ins(given: Mapping[str, Callable[..., Any] | str]) -> tuple[tuple[str, Callable[..., Any]], ...]:
    found: list[tuple[str, Callable[..., Any]]] = []
    for pattern, run in given.items():
        if run == LIKE_INPUT:
            found.append((pattern, _like_input))
        elif callable(run):
            found.append((pattern, run))
        else:
            raise PlanError(f"stand_ins[{pattern!r}] = {run!r}: expected a function of the break's arguments, or 'input'")
    return tuple(found)


def _like_input(*args: Any, **kwargs: Any) -> torch.Tensor:
    tensors = tensors_of(flatten((args, kwargs))[0])
    if not tensors:
        raise CutError("a stand-in like the input of a break that has no tensor argument: give a function instead")
    return torch.zeros_like(tensors[0], requires_grad=False)


@contextmanager
def _kept_random_state(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


_META_CURE = (
    ". Meta tensors have no values: break at what reads them (break_at='auto' finds it) and say with stand_ins "
    "(--like-input) what it returns, or plan a small configuration of the model on the CPU"
)


def _failed(what: str, error: Exception, meta: bool) -> WarmupError:
    return WarmupError(f"{what} failed: {type(error).__name__}: {error}{_META_CURE if meta else ''}")


# ------------------------------------------------------------------------------------------------------- what a part uses


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The parameters that operators read, and whether there is a kernel among them."""

    def __init__(self, known: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.parameters: set[int] = set()
        self.kernels = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_of(flatten((args, kwargs or {}))[0]):
            index = self.known.get(private.storage_key(tensor)) if has_storage(tensor) else None
            if index is not None:
                self.parameters.add(index)
        self.kernels += not isinstance(func, torch._ops.OpOverload) or needs_replay(func)
        return func(*args, **(kwargs or {}))


class _Looking(_warmup_pass.Pass):
    """A warm-up pass that notes what every part uses."""

    uses: dict[int, _Uses]
    known: dict[int, int]

    @contextmanager
    def _running(self, part: PartPlan, watch: bool) -> Iterator[Opened]:
        with super()._running(part, watch) as opened:
            mode = self.uses[part.index] = _Uses(self.known)
            with mode:
                yield opened


@dataclass(frozen=True, slots=True)
class _Seen:
    facts: tuple[PartFacts, ...]
    uses: dict[int, _Uses]
    outputs: tuple[Crossing, ...]


def _warm(made: CapturePlan, parameters: _guards.Parameters, meta: bool) -> WarmupFacts:
    try:
        return _warmup.run(made, TapeBackend(torch.device("cpu")), parameters)
    except WarmupError as error:
        if not meta:
            raise
        raise WarmupError(f"{error}{_META_CURE}") from error


def _look(facts: WarmupFacts, number: int, meta: bool) -> _Seen:
    unit, unit_facts = facts.plan.units[number], facts.units[number][0]
    modules = _guards.modules_of(unit.layers)
    known = {private.storage_key(p): n for n, p in reversed(list(enumerate(facts.parameters.alias))) if has_storage(p)}
    try:
        run = _Looking(
            unit, unit.samples[0], facts.parameters, unit_facts.grad, modules, unit_facts.reentrant, _delayed.Trial(())
        )
        run.uses, run.known = {}, known
        run.forward(watch=False)
    except GraphcapError:
        raise
    except Exception as error:
        raise _failed(f"the run of {unit.title}", error, meta) from error
    result = tensors_of(flatten(unit.program.result(run.env))[0])
    outputs = tuple(_crossing(TensorSpec.of(t), _source(run.sources.get(id(t))), t.requires_grad) for t in result)
    return _Seen(unit_facts.parts, run.uses, outputs)


def _source(place: tuple[int, int] | None) -> str:
    return LIKE_INPUT if place is None else f"part {place[0]}"


# --------------------------------------------------------------------------------------------------------- the record


def _record(
    made: CapturePlan, seen: list[_Seen], parameters: _guards.Parameters, device: str
) -> ModelPlan:
    parts = tuple(
        _part(made, number, facts, unit_seen, parameters)
        for number, unit_seen in enumerate(seen)
        for facts in unit_seen.facts
    )
    idle = frozenset((part.unit, part.index) for part in parts if part.kind == "views")
    made_here = [spec for unit_seen in seen for facts in unit_seen.facts for spec in facts.made]
    sample = made.units[0].samples[0]
    given = tensors_of(flatten((sample.args, sample.kwargs))[0])
    return ModelPlan(
        replace(made, idle=idle),
        parts,
        tuple(_crossing(TensorSpec.of(t), LIKE_INPUT, t.requires_grad) for t in given),
        seen[-1].outputs,
        *_size(parameters.real),
        sum(map(_bytes, made_here)) + sum(_bytes(TensorSpec.of(t)) for t in given),
        device,
    )


def _part(
    made: CapturePlan, number: int, facts: PartFacts, seen: _Seen, parameters: _guards.Parameters
) -> PlannedPart:
    part, uses = facts.part, seen.uses[facts.part.index]
    run = part.calls[0].run
    stood_in = isinstance(run, BreakCall) and run.record.target.stand_in is not None
    used = uses.parameters | set(facts.parameters)
    if stood_in and isinstance(run, BreakCall) and isinstance(run.record.target.what, nn.Module):
        used |= {n for p in run.record.target.what.parameters() if (n := parameters.index_of(p)) is not None}
    graphed = part.kind is GRAPHED
    return PlannedPart(
        number,
        part.index,
        _kind(part, uses),
        part.name,
        part.reason,
        None if graphed else _place(run),
        tuple(
            _crossing(leaf.spec, _source(leaf.source), place in facts.grad_inputs) for place, leaf in enumerate(facts.reads)
        ),
        tuple(_crossing(spec, f"part {part.index}", spec.requires_grad) for spec in facts.made),
        *_size([parameters.real[n] for n in sorted(used)]),
        tuple(parameters.names[n] for n in sorted(used)),
        _backward_graphs(made, number, facts) if graphed else 0,
        stood_in,
    )


def _kind(part: PartPlan, uses: _Uses) -> str:
    if part.kind is GRAPHED:
        return "graph" if uses.kernels else "views"
    return "first" if part.hoisted else "eager"


def _backward_graphs(made: CapturePlan, number: int, facts: PartFacts) -> int:
    """As the recorder: one per phase that the order asks for and has something to do, and per pattern of gradients."""
    if not facts.differentiable:
        return 0
    if facts.delayed is not None:  # a graph of its own for backward_dw()
        return 2 * len(facts.patterns)
    asked = {step.phase for step in made.order if step.chunk == made.units[number].chunk}
    phases = {Phase.I, Phase.W, Phase.B} & (asked | ({Phase.B} if Phase.I in asked else set()))
    has_work = {Phase.I: bool(facts.grad_inputs), Phase.W: bool(facts.parameters), Phase.B: True}
    return sum(has_work[phase] for phase in phases) * len(facts.patterns)


def _place(run: Any) -> str | None:
    """Where a break is called; of a declared part, where it is written."""
    if isinstance(run, BreakCall):
        return line_text(run.record.place)
    code = getattr(inspect.unwrap(run), "__code__", None)
    return None if code is None else line_text((code.co_filename, code.co_firstlineno))


def _crossing(spec: TensorSpec, source: str, differentiable: bool) -> Crossing:
    return Crossing(tuple(spec.shape), str(spec.dtype).removeprefix("torch."), _bytes(spec), source, differentiable)


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _size(parameters: list[nn.Parameter]) -> tuple[int, int]:
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
