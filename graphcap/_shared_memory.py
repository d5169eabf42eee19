"""Static memory that several graph sets use in turn: weak references to it, and what it takes.

A slot is under way for one graph set at a time, so what a complete set has in the slot's pool (outputs, gradients) may be
given to the next set that is recorded there. For that nothing may own it any more: the set keeps aliases that know the
address, with the strides and the dtype of the original, whatever they are. The memory stays as long as the pool does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from graphcap import _torch_private as private
from graphcap._capture_set import BackwardGraph, GraphSet, PartGraphs
from graphcap._facts import PartFacts
from graphcap._plan import CapturePlan, Sample
from graphcap._tensors import flatten, unflatten
from graphcap.order import Phase


def weak_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory that does not keep it: same shape, strides, offset, dtype, conjugate bits."""
    storage = tensor.untyped_storage()
    borrowed = private.storage_on_address(storage.data_ptr(), storage.nbytes(), storage.device)
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())
    private.set_conjugate_and_negative(alias, tensor.is_conj(), tensor.is_neg())
    return alias


def loosened(graph_set: GraphSet, stays: Callable[[int], bool], *, outputs: bool) -> GraphSet:
    """The set with weak aliases of the gradients that lie in the pool, and, with `outputs`, of the outputs. What was there
    before stays: the caller's inputs, arriving gradients; and so do gradients of parameters that `stays(index)` says are
    handed out as they are."""
    parts = [part for part in graph_set.parts if part is not None]
    fixed = {_place(t) for part in parts for n, t in enumerate(part.inputs) if not part.linked[n]}
    fixed |= {_place(t) for part in parts for t in part.grad_outputs if not _is_result(t, parts)}
    fixed |= {_place(t) for part in parts for t in _handed_out(part, stays)}
    if not outputs:
        fixed |= {_place(t) for part in parts for t in part.outputs}
    made: dict[int, torch.Tensor] = {}

    def weak(tensor: torch.Tensor) -> torch.Tensor:
        if _place(tensor) in fixed or not tensor.numel() or not tensor.untyped_storage().resizable():
            return tensor
        return made.setdefault(id(tensor), weak_alias(tensor))

    return replace(graph_set, parts=tuple(None if p is None else _loose_part(p, weak) for p in graph_set.parts))


def _loose_part(part: PartGraphs, weak: Callable[[torch.Tensor], torch.Tensor]) -> PartGraphs:
    return replace(
        part,
        inputs=tuple(weak(t) for t in part.inputs),
        outputs=tuple(weak(t) for t in part.outputs),
        grad_outputs=tuple(weak(t) for t in part.grad_outputs),
        backward={phase: tuple(_loose_backward(g, weak) for g in graphs) for phase, graphs in part.backward.items()},
    )


def _loose_backward(graph: BackwardGraph, weak: Callable[[torch.Tensor], torch.Tensor]) -> BackwardGraph:
    arena = graph.arena
    if arena is not None:
        arena = replace(arena, flat=weak(arena.flat), like=tuple(weak(t) for t in arena.like))
    return replace(graph, results=tuple(None if r is None else weak(r) for r in graph.results), arena=arena)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_result(tensor: torch.Tensor, parts: Sequence[PartGraphs]) -> bool:
    """Whether a later part's backward leaves its gradient there."""
    return any(tensor is r for part in parts for graphs in part.backward.values() for g in graphs for r in g.results)


def _handed_out(part: PartGraphs, stays: Callable[[int], bool]) -> Iterable[torch.Tensor]:
    facts = part.facts
    for phase, graphs in part.backward.items():
        delayed = phase is Phase.W and facts.delayed is not None
        indices = [d.index for d in facts.delayed.deliveries] if delayed and facts.delayed else list(facts.parameters)
        for graph in graphs:
            begin = len(graph.results) - len(indices)
            for n, index in enumerate(indices if phase is not Phase.I else ()):
                result = graph.results[begin + n]
                if result is not None and stays(index):
                    yield result


def idle_parts(sets: Sequence[Sequence[GraphSet]]) -> frozenset[tuple[int, int]]:
    """(unit, part) of the graphed parts whose forward holds no operation, whatever the graph set."""
    return frozenset(
        (number, index)
        for number, unit in enumerate(sets)
        for index, part in enumerate(unit[0].parts if unit else ())
        if part is not None and part.forward.empty
    )


# ------------------------------------------------------------------------------------------------------------- release


def released(
    plan: CapturePlan, sets: Sequence[Sequence[GraphSet]]
) -> tuple[CapturePlan, tuple[tuple[GraphSet, ...], ...]]:
    """The same without what recording alone has read, which would stay in memory as long as the graphs do: the tensors of
    the samples (on the meta device instead) and what eager parts made in warm-up."""
    units = {id(unit): replace(unit, samples=tuple(map(_without_tensors, unit.samples))) for unit in plan.units}
    facts: dict[int, PartFacts] = {}

    def of_part(seen: PartFacts) -> PartFacts:
        return facts.setdefault(id(seen), replace(seen, values=()))

    def of_set(graph_set: GraphSet) -> GraphSet:
        unit = units[id(graph_set.unit)]
        return replace(
            graph_set,
            unit=unit,
            facts=replace(graph_set.facts, unit=unit, parts=tuple(map(of_part, graph_set.facts.parts))),
            parts=tuple(part and replace(part, facts=of_part(part.facts)) for part in graph_set.parts),
        )

    plan = replace(plan, units=tuple(units[id(unit)] for unit in plan.units))
    return plan, tuple(tuple(map(of_set, unit_sets)) for unit_sets in sets)


def _without_tensors(sample: Sample) -> Sample:
    leaves, structure = flatten((sample.args, sample.kwargs))
    args, kwargs = unflatten(
        structure,
        [torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
    )
    return replace(sample, args=args, kwargs=kwargs)


# --------------------------------------------------------------------------------------------------------------- bytes


def static_bytes(
    plan: CapturePlan, sets: Iterable[GraphSet], buffers: Iterable[torch.Tensor]
) -> tuple[int, int]:
    """Bytes of the static surfaces (inputs, crossing values, outputs and gradients, each memory once; of what graph sets
    only borrow, outputs in a slot and gradients in a pool, what the largest needs), and how many more they were if every
    graph set owned what it has, and every microbatch had one."""
    whole: dict[int, int] = {}  # address -> bytes, of what is owned
    turns: dict[tuple[str, int], int] = {}  # the largest of what is borrowed there
    apart = 0
    for graph_set in sets:
        owned: dict[int, int] = {}
        borrowed: dict[int, int] = {}
        for tensor in _surface(graph_set):
            storage = tensor.untyped_storage()
            side = owned if storage.resizable() else borrowed
            side[storage.data_ptr()] = max(side.get(storage.data_ptr(), 0), storage.nbytes())
        whole |= owned
        loose = sum(borrowed.values())
        outputs = sum(borrowed.get(place, 0) for place in {_place(t) for p in graph_set.parts if p for t in p.outputs})
        for where, size in (
            (("outputs", graph_set.slot), outputs),
            (("gradients", plan.pool_of(graph_set.slot)), loose - outputs),
        ):
            turns[where] = max(turns.get(where, 0), size)
        served = next(s.microbatches for s in graph_set.unit.samples if s.slot == graph_set.slot)
        apart += (sum(owned.values()) + loose) * len(served)
    static = sum(whole.values()) + sum(turns.values())
    added = {_place(tensor): tensor.untyped_storage().nbytes() for tensor in buffers}
    return static + sum(added.values()), apart - static


def _surface(graph_set: GraphSet) -> Iterable[torch.Tensor]:
    for part in (part for part in graph_set.parts if part is not None):
        yield from (*part.inputs, *part.outputs, *part.grad_outputs)
        for graph in (g for graphs in part.backward.values() for g in graphs):
            yield from (result for result in graph.results if result is not None)
