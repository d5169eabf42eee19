"""From `break_at=` to the final plan: the analysis of every unit, and "auto".

Called inside the state that capture keeps and restores, with parameters replaced by their aliases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphcap import _guards
from graphcap._breaks import Breaks, Planning, Target, find
from graphcap._parts import differentiate, sample_copies
from graphcap._plan import CapturePlan, UnitPlan, cut
from graphcap._tensors import flatten, same_constant, tensors_of, unflatten
from graphcap._trace_analysis import Analysis
from graphcap._trace_auto import discover
from graphcap._trace_follow import different, program_of
from graphcap._trace_hoist import Recomputed, StandIn
from graphcap._trace_owners import NeedsClone, constants_of
from graphcap._trace_records import Ref, Script
from graphcap.backends.refusal_modes import line_text
from graphcap.errors import CutError, GraphcapError, WarmupError
from graphcap.partial_layer import PartialLayer, run_plain

_PROBES = 2  # by chance one may draw a shape that the samples have
_RESTARTS = 1000  # one per value and stretch in which it is changed in place


def _no_scope(unit: int) -> AbstractContextManager[None]:
    return nullcontext()


def cut_at(
    plan: CapturePlan,
    break_at: Any,
    device: torch.device,
    planning: Planning | None = None,
    scope: Callable[[int], AbstractContextManager[None]] = _no_scope,
) -> CapturePlan:
    """The plan with every unit cut at its breaks. scope: around everything that runs unit i."""
    roots = [root for unit in plan.units for root in _roots(unit, len(plan.units) > 1)]
    breaks = find(break_at, roots, planning)
    called: set[int] = set()
    units = []
    for number, unit in enumerate(plan.units):
        with scope(number):
            units.append(_cut_unit(plan, unit, breaks, device, called))
    for entry, ids in breaks.entries:
        if not ids & called:
            raise CutError(
                f"break_at: {entry} is never called in the forward (called under another name, or a container "
                "whose children "
                "are called?): name what is called"
            )
    return replace(plan, units=tuple(units))


def _roots(unit: UnitPlan, several: bool) -> list[tuple[str, nn.Module]]:
    modules = _guards.modules_of(unit.layers)
    for module in modules:
        if any(isinstance(child, PartialLayer) for child in module.modules()):
            raise CutError("break_at together with a PartialLayer: its parts say already where to break. Use one of the two")
    prefix = [str(unit.chunk)] if several else []
    if len(unit.layers) == 1:
        return [(".".join(prefix), module) for module in modules]
    return [(".".join([*prefix, str(number)]), module) for number, module in enumerate(modules)]


def _cut_unit(
    plan: CapturePlan, unit: UnitPlan, breaks: Breaks, device: torch.device, called: set[int]
) -> UnitPlan:
    grad = plan.order.training and torch.is_grad_enabled()
    modules = _guards.modules_of(unit.layers)
    constants = constants_of(modules)
    layers = unit.calls
    if breaks.planning is None or not (breaks.planning.meta or breaks.planning.stand_ins):
        _run_once(unit, grad)  # lazy state settles, and what fails in eager fails here, in the user's own words

    def analysis(hoists: bool, cloned: frozenset[tuple[str, int]]) -> Analysis:
        return Analysis(modules, breaks, grad, device, cloned, constants, hoists)

    def run(*args: Any, **kwargs: Any) -> Any:
        return run_plain(layers, args, kwargs)

    if breaks.auto:
        samples = [partial(sample_copies, unit.samples[0]), *(partial(_others, unit, seed) for seed in range(_PROBES))]
        discover(modules, breaks, grad, device, constants, run, samples)
    callers: dict[int, nn.Module | None] = {}
    while True:
        try:
            script = _steady_script(analysis, run, unit, called, callers)
            break
        except _Unsteady as error:
            _climb(breaks, error, callers, modules, called)
    program = program_of(layers, script, breaks, grad, device.type)
    return replace(unit, program=program, parts=cut(program))


def _steady_script(
    analysis: Callable[[bool, frozenset[tuple[str, int]]], Analysis],
    run: Callable[..., Any],
    unit: UnitPlan,
    called: set[int],
    callers: dict[int, nn.Module | None],
) -> Script:
    """The script, which other numbers do not change."""
    for hoists in (True, False):
        script, cloned = _analyse(partial(analysis, hoists), run, unit, called, callers)
        probes = [_probe(analysis(hoists, cloned), run, unit, seed) for seed in range(_PROBES)]
        others = [probe for probe in probes if probe is not None]
        if all(_hoist_alike(script, other) for other in others):
            break
    for other in others:
        _refuse_difference(script, other)
    return script


class _Unsteady(CutError):
    """A break gives something of another kind for other data."""

    def __init__(self, message: str, target: Target) -> None:
        super().__init__(message)
        self.target = target


def _climb(
    breaks: Breaks, error: _Unsteady, callers: dict[int, nn.Module | None], modules: list[nn.Module], called: set[int]
) -> None:
    """Where "auto" has chosen the break, the module that calls it is one instead; the error is raised if there is none."""
    parent = callers.get(id(error.target.what))
    if id(error.target.what) not in breaks.found or parent is None or any(parent is top for top in modules):
        raise CutError(str(error)) from None
    names = {id(module): name for top in modules for name, module in top.named_modules()}
    breaks.climb(error.target, parent, names.get(id(parent), type(parent).__name__))
    called.update(id(module) for module in parent.modules())  # what was named in there runs eagerly with it


def _run_once(unit: UnitPlan, grad: bool) -> None:
    args, kwargs = sample_copies(unit.samples[0])
    try:
        with torch.set_grad_enabled(grad):
            result = run_plain(unit.calls, args, kwargs)
        outputs = [t for t in tensors_of(flatten(result)[0]) if t.requires_grad]
        parameters = [p for m in _guards.modules_of(unit.layers) for p in m.parameters()]
        leaves = [t for t in (*parameters, *tensors_of(flatten((args, kwargs))[0])) if t.requires_grad]
        if outputs and leaves and grad:
            differentiate(outputs, leaves, [torch.ones_like(t) for t in outputs], False)
    except GraphcapError:
        raise
    except Exception as error:
        raise WarmupError(f"the eager run of {unit.title} failed: {type(error).__name__}: {error}") from error


def _analyse(
    analysis: Callable[[frozenset[tuple[str, int]]], Analysis], run: Callable[..., Any], unit: UnitPlan, called: set[int],
    callers: dict[int, nn.Module | None],
) -> tuple[Script, frozenset[tuple[str, int]]]:
    cloned: frozenset[tuple[str, int]] = frozenset()
    for _ in range(_RESTARTS):
        trace = analysis(cloned)
        args, kwargs = sample_copies(unit.samples[0])
        try:
            script = trace.run(run, args, kwargs)
        except NeedsClone as need:
            cloned |= {(need.name, need.stretch)}
            continue
        called |= trace.called_targets
        callers.update(trace.callers)
        del args, kwargs
        _refuse_escapes(trace)
        _refuse_keepers(trace)
        return script, cloned
    raise CutError(f"{unit.title}: more than {_RESTARTS} values are changed in place behind a break")


def _refuse_escapes(trace: Analysis) -> None:
    for value in trace.escaped():
        raise CutError(
            "a tensor made in a graphed stretch is kept by something that outlives the call (a global list, a "
            "cache)\n  made at "
            f"{line_text(value.place)}\n  Way out: return it as an output, or break at the module that keeps it"
        )


def _refuse_keepers(trace: Analysis) -> None:
    for title in trace.keepers():
        raise CutError(
            f"the break {title} (or a hook on it) keeps its argument after the call, but that memory holds the values "
            "of the next step then\n  Way out: keep a clone"
        )


def _probe(trace: Analysis, run: Callable[..., Any], unit: UnitPlan, seed: int) -> Script | None:
    """The same analysis on other numbers: what differs depends on the data. None where the callable does not like them."""
    args, kwargs = _others(unit, seed)
    try:
        return trace.run(run, args, kwargs)
    except CutError:
        raise
    except (NeedsClone, Exception):
        return None


def _others(unit: UnitPlan, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The samples with other numbers."""
    leaves, structure = flatten(sample_copies(unit.samples[0]))
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = unflatten(structure, [_other(x, generator) if isinstance(x, torch.Tensor) else x for x in leaves])
    return args, kwargs


def _other(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values of the same kind: signs drawn anew, integers in another order."""
    with torch.no_grad():
        if tensor.is_floating_point():
            signs = torch.randint(0, 2, tensor.shape, generator=generator).mul(2).sub(1)
            tensor.data.mul_(signs.to(tensor.device, tensor.dtype)) if tensor.is_contiguous() else tensor.data.neg_()
        elif tensor.numel() > 1 and tensor.is_contiguous():
            order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
            tensor.data.copy_(tensor.flatten()[order].view_as(tensor))
    return tensor


def _hoist_alike(first: Script, second: Script) -> bool:
    """Whether the same breaks are hoisted with the same arguments: what depends on the data must stay where it is."""
    if len(first.hoisted) != len(second.hoisted):
        return False
    return all(
        len(a.argument_leaves) == len(b.argument_leaves)
        and all(type(x) is type(y) for x, y in zip(a.argument_leaves, b.argument_leaves, strict=True))
        for a, b in zip(first.hoisted, second.hoisted, strict=True)
    )


def _refuse_difference(first: Script, second: Script) -> None:
    """What two runs on different numbers must have in common."""
    both = zip((*first.hoisted, *first.breaks), (*second.hoisted, *second.breaks), strict=False)
    for a, b in both:
        if [x[:2] for x in a.result_specs] != [x[:2] for x in b.result_specs] or a.results != b.results:
            raise _Unsteady(
                f"the break {a.target.title} returned {_specs(a.result_specs)} for one input and "
                f"{_specs(b.result_specs)} for another. What "
                f"crosses a break must have a static shape\n  called at {line_text(a.place)}\n  Way out: break at "
                "the module that "
                "contains this one and whatever uses its result",
                a.target,
            )
        if not _same_leaves(a.result_leaves, b.result_leaves):
            raise _Unsteady(
                f"the break {a.target.title} returned {_constants(a.result_leaves)} for one input and "
                f"{_constants(b.result_leaves)} "
                f"for another; a graph would freeze it\n  called at {line_text(a.place)}\n  Way out: return it as "
                "a tensor, or break "
                "at the module that contains this one and whatever uses its result",
                a.target,
            )
        if not _same_leaves(a.argument_leaves, b.argument_leaves):
            raise CutError(
                f"the break {a.target.title} is called with {_constants(a.argument_leaves)} for one input and "
                f"{_constants(b.argument_leaves)} for another; a graph would freeze it\n  called at {line_text(a.place)}"
            )
    for mine, other in zip(first.entries, second.entries, strict=False):
        if not mine.same(other):
            raise different(other, mine)
    if len(first.entries) != len(second.entries):
        longer = max(first.entries, second.entries, key=len)
        raise different(longer[min(len(first.entries), len(second.entries))], None)
    if not _same_leaves(first.output_leaves, second.output_leaves) or first.output != second.output:
        raise CutError(
            "the callable returns other Python values, or another structure, for other inputs; a graph would freeze "
            "them"
        )


def _same_leaves(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        x == y if isinstance(x, Ref | Recomputed | StandIn) else same_constant(x, y) for x, y in zip(a, b, strict=True)
    )


def _specs(specs: Sequence[Any]) -> str:
    return ", ".join(f"{spec[0]}{list(spec[1])}" for spec in specs) or "nothing"


def _constants(leaves: Sequence[Any]) -> str:
    return ", ".join("a tensor" if isinstance(leaf, Ref) else repr(leaf) for leaf in leaves) or "nothing"
