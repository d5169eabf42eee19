"""Stage 4: run the graphs in place of the parts, inside the caller's autograd.

A graphed part is one autograd node: its forward copies what is not in place yet and replays, its backward copies the
arriving gradients, replays and hands out gradients that nobody else owns. Eager parts run as ordinary Python between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphcap import _delayed
from graphcap._capture import BackwardGraph, CaptureSet, GraphSet, PartGraphs
from graphcap._eager_part import run_eager as run_eager
from graphcap._flight import Flight as Flight
from graphcap._flight import Side as Side
from graphcap._flight import Slot as Slot
from graphcap._guards import Parameters
from graphcap._parts import OutIndex, entry_values
from graphcap._tensors import (
    Getter,
    Structure,
    compact,
    flatten,
    getters,
    overlaps,
    static_copy,
    unflatten,
)
from graphcap._warmup import PartFacts, Pattern, dense_strides
from graphcap.errors import InputMismatch, ReplayError, StateError
from graphcap.order import Phase


class _PartNode(torch.autograd.Function):
    """The autograd node of one graphed part."""

    @staticmethod
    def forward(ctx: Any, bound: BoundPart, flight: Flight, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = bound.run(tensors, flight.side)
        ctx.bound, ctx.flight = bound, flight
        ctx.set_materialize_grads(False)
        if bound.undifferentiable:
            ctx.mark_non_differentiable(*(outputs[place] for place in bound.undifferentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ReplayError(
                "create_graph=True through a graphed part: a recorded backward has no history, so second derivatives "
                "would silently be zero. Run this step with graphcap.disabled()"
            )
        return (None, None, *ctx.bound.backward(ctx.flight, gradients))


@dataclass(slots=True)
class _Memory:
    """A static tensor to copy into: its compact view, where it lies, and whether copies may be left out."""

    place: int
    static: torch.Tensor
    address: int
    storage: int
    expanded: bool


@dataclass(frozen=True, slots=True)
class _Added:
    """A parameter into whose gradient buffer the graph adds; `home`: the attribute that holds the buffer; `result`: its
    number among the part's results."""

    parameter: torch.nn.Parameter
    buffer: torch.Tensor
    name: str
    home: str
    result: int
    address: int


class BoundPart:
    """One graphed part of one graph set, ready to run."""

    def __init__(self, graphs: PartGraphs, index: int, slot: Slot, capture: CaptureSet, alias_outputs: bool) -> None:
        self.graphs, self.facts, self.index, self.slot = graphs, graphs.facts, index, slot
        self.retain = capture.plan.config.retain_graph
        self.incoming = [
            _memory(place, static)
            for place, static in enumerate(graphs.inputs)
            if not graphs.linked[place]
        ]
        self.arriving = [_memory(p, g) for p, g in zip(self.facts.grad_outputs, graphs.grad_outputs, strict=False)]
        self.leaving = frozenset() if alias_outputs else _leaving(self.facts)
        real = self._real = capture.parameters.real
        self.aliased = frozenset(
            i
            for i in (*self.facts.parameters, *(d.index for d in self._deliveries()))
            if capture.plan.config.grads == "alias" or id(real[i]) in capture.plan.alias_parameters
        )
        self._main_grads = [
            (real[i], grad, grad.data_ptr(), capture.parameters.names[i])
            for i in self._touched(capture.parameters)
            if isinstance(grad := getattr(real[i], "main_grad", None), torch.Tensor) and i not in capture.buffers
        ]
        self.returned = [real[i] for i in self.facts.parameters if i not in capture.buffers]
        self.added = [
            _Added(
                real[i],
                capture.buffers[i],
                capture.parameters.names[i],
                "main_grad" if getattr(real[i], "main_grad", None) is capture.buffers[i] else "grad",
                len(self.facts.grad_inputs) + n,
                capture.buffers[i].data_ptr(),
            )
            for n, i in enumerate(self.facts.parameters)
            if i in capture.buffers
        ]
        # clone keeps the strides of dense outputs alone; elements that share memory can't be written one by one
        self._gaps = [
            static.stride() != dense_strides(static) and not overlaps(compact(static)) for static in graphs.outputs
        ]
        self.undifferentiable = [n for n, spec in enumerate(self.facts.made) if not spec.requires_grad]
        self._returned_at = [n for n, i in enumerate(self.facts.parameters) if i not in capture.buffers]
        self.fresh_inputs = {
            n: not graphs.linked[n] for n in self.facts.grad_inputs
        }
        self.is_last = False  # whether nothing of the unit comes after it
        self._reach: list[tuple[int, str, tuple[Getter, ...]]] | None = None
        self._made_names = _bare_makes(self.facts)
        self._choices: dict[tuple[Phase, Pattern], tuple[BackwardGraph | None, frozenset[int]]] = {}

    # ------------------------------------------------------------------------------------------------------ forward

    def run(self, tensors: Sequence[torch.Tensor], side: Side | None) -> tuple[torch.Tensor, ...]:
        """Copy in, replay, and give the static outputs as new tensor objects (copies where they leave as copies)."""
        if self.slot.tail is not None:
            self.slot.tail.wait()
            self.slot.tail = None
        _copy([(memory, tensors[memory.place]) for memory in self.incoming])
        if side is None:
            self.graphs.forward.replay()
        else:
            self.slot.tail = side.replay(self.graphs.forward, whole=not self.is_last)
        return tuple(
            (static_copy(static) if self._gaps[place] else static.clone()) if place in self.leaving else static.detach()
            for place, static in enumerate(self.graphs.outputs)
        )

    def call(self, env: dict[str, Any], flight: Flight | None, anchor: torch.Tensor, side: Side | None) -> None:
        tensors = self._gather(env)
        if flight is None:
            with torch.no_grad():
                outputs = self.run(tensors, side)
        else:
            extra = self.returned if not self.added else [*self.returned, anchor]
            outputs = _PartNode.apply(self, flight, *tensors, *extra)  # type: ignore[no-untyped-call]
        if self._made_names is not None:
            for name, place in self._made_names:
                env[name] = outputs[place]
            return
        leaves = [outputs[leaf.place] if isinstance(leaf, OutIndex) else leaf for leaf in self.facts.make_leaves]
        env.update(zip(self.facts.part.makes, unflatten(self.facts.make_structure, leaves), strict=True))

    def _gather(self, env: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that the part reads, each once. Structures were checked where the values came from (the call, an
        eager part), so after a first look the tensors are picked where they lay then."""
        if self._reach is None:
            return self._look(env)
        found: list[Any] = [None] * len(self.facts.reads)
        for place, name, steps in self._reach:
            leaf = env[name]
            for step in steps:
                leaf = step(leaf)
            if found[place] is None:
                found[place] = leaf
            elif found[place] is not leaf:
                raise self._two_tensors()
        return found

    def _two_tensors(self) -> InputMismatch:
        return InputMismatch(
            f"part {self.facts.part.name}: two of its inputs were one tensor at capture and are two tensors now"
        )

    def _look(self, env: dict[str, Any]) -> list[torch.Tensor]:
        part, facts = self.facts.part, self.facts
        leaves, structure = flatten([env[name] for name in part.reads])
        found: list[torch.Tensor | None] = [None] * len(facts.reads)
        index = iter(facts.read_index)
        if structure != facts.read_structure:
            raise InputMismatch(f"part {part.name}: what it reads has another structure than at capture")
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                place = next(index)
                if found[place] is not None and found[place] is not leaf:
                    raise self._two_tensors()
                found[place] = leaf
        self._remember(leaves)
        return found  # type: ignore[return-value]  # every place is some leaf's, or the structure would differ

    def _remember(self, leaves: Sequence[Any]) -> None:
        """Note where the tensors lie among the values, if plain indexing reaches them."""
        index = iter(self.facts.read_index)
        reach: list[tuple[int, str, tuple[Getter, ...]]] = []
        at = 0
        for name, child in zip(self.facts.part.reads, self.facts.read_structure.children, strict=True):
            ways = getters(child)
            if ways is None:
                return
            for steps, leaf in zip(ways, leaves[at : at + len(ways)], strict=True):
                if isinstance(leaf, torch.Tensor):
                    reach.append((next(index), name, steps))
            at += len(ways)
        self._reach = reach

    # ----------------------------------------------------------------------------------------------------- backward

    def backward(self, flight: Flight, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward for the gradients that arrived; one result per input of the node."""
        phase = self._phase(flight)
        nothing: list[torch.Tensor | None] = [None] * (len(self.facts.reads) + len(self.returned) + bool(self.added))
        arrived = [gradients[memory.place] for memory in self.arriving]
        if all(gradient is None for gradient in arrived):
            return nothing
        self._require_valid(flight, phase)
        graph, reached = self._choose(phase, arrived)
        if graph is None and phase is not Phase.W:
            return nothing
        self._require_main_grads()
        if phase is not Phase.W:
            self._copy_gradients(arrived)
        if phase is not Phase.I:
            self._bind_buffers(reached)
            if flight.hold is None:
                flight.finish_after_backward()
        if graph is not None:  # a part without parameters has nothing to do in a W step but to hand on
            self._replay_backward(graph, flight)
            flight.chosen[self.index] = graph.pattern
        results = self._results(flight, phase, graph, reached)
        flight.done.add((self.index, phase))
        if flight.hold is not None:
            flight.hold(flight)
        if phase is not Phase.I:
            self._fire_hooks(reached)
        return results

    def _replay_backward(self, graph: BackwardGraph, flight: Flight) -> None:
        """Replay, and what the Python of the backward did to parameters. The results are read at once: all of it."""
        if self.slot.tail is not None:
            self.slot.tail.wait()
            self.slot.tail = None
        if flight.side is None:
            graph.graph.replay()
        else:
            flight.side.replay(graph.graph, whole=True)
        for index, name, value in graph.marks:
            setattr(self._real[index], name, value)

    def _phase(self, flight: Flight) -> Phase:
        if flight.hold is not None:
            return Phase.B  # what is put off is no business of autograd's
        if flight.phase is Phase.W and (self.index, Phase.I) not in flight.done:
            return Phase.B  # no input gradient was asked of this part, so nothing is there to build on
        return flight.phase

    def _require_valid(self, flight: Flight, phase: Phase) -> None:
        if flight.generation != self.slot.generation:
            raise ReplayError(
                f"part {self.facts.part.name}: its buffers hold a later forward already (slot {self.slot.number} was used "
                "again after this forward), so this backward would be wrong. Run the backward before the next forward of "
                "the slot"
            )
        if (self.index, phase) in flight.done and not self.retain:
            raise ReplayError(
                f"part {self.facts.part.name}: a second backward through one forward. Capture with "
                "CaptureConfig(retain_graph=True) to allow it"
            )

    def _choose(
        self, phase: Phase, arrived: Sequence[torch.Tensor | None]
    ) -> tuple[BackwardGraph | None, frozenset[int]]:
        """The backward graph for the gradients that arrived, and which results they lead to. Where none was recorded for
        just these, the one for all outputs runs on zeros, and what only the missing ones lead to stays None."""
        pattern = tuple(gradient is not None for gradient in arrived)
        choice = self._choices.get((phase, pattern))
        if choice is None:
            graphs = self.graphs.backward.get(phase, ())
            exact = next((graph for graph in graphs if graph.pattern == pattern), None)
            every = next((graph for graph in graphs if all(graph.pattern)), None)
            arriving = [results for results, there in zip(self.facts.reach, pattern, strict=True) if there]
            choice = self._choices[phase, pattern] = (exact or every, frozenset().union(*arriving))
        return choice

    def _copy_gradients(self, arrived: Sequence[torch.Tensor | None]) -> None:
        pairs = []
        for memory, gradient in zip(self.arriving, arrived, strict=True):
            if gradient is None:
                memory.static.zero_()
            elif gradient.layout is not torch.strided:
                raise InputMismatch(
                    f"part {self.facts.part.name}: a gradient with the layout {gradient.layout} arrived; only dense "
                    "gradients can be copied into a static buffer (embedding(sparse=True) in an eager part?)"
                )
            else:
                pairs.append((memory, gradient))
        _copy(pairs)

    def _results(
        self, flight: Flight, phase: Phase, graph: BackwardGraph | None, reached: frozenset[int]
    ) -> list[torch.Tensor | None]:
        held: tuple[torch.Tensor | None, ...] = () if graph is None else graph.results
        inputs = len(self.facts.grad_inputs)
        offset = 0 if phase is not Phase.W else -inputs  # where the parameters begin in the graph's results
        results: list[torch.Tensor | None] = [None] * len(self.facts.reads)
        to_copy: list[tuple[int, torch.Tensor]] = []
        if phase is Phase.W:
            results = list(flight.input_results.pop(self.index))
        else:
            for number, place in enumerate(self.facts.grad_inputs):
                gradient = held[number]
                if gradient is not None and number in reached:
                    results[place] = gradient
                    if self.fresh_inputs[place]:
                        to_copy.append((place, gradient))
        for n, at in enumerate(self._returned_at):
            gradient = None
            if phase is not Phase.I and inputs + at in reached:
                gradient = held[inputs + offset + at]
            if gradient is not None and self.facts.parameters[at] not in self.aliased:
                to_copy.append((len(self.facts.reads) + n, gradient))
            elif gradient is not None:
                gradient = gradient.detach()  # autograd keeps a gradient as `.grad` that nobody else refers to
            results.append(gradient)
        if self.added:
            results.append(None)
        for (place, _), copy in zip(to_copy, fresh([gradient for _, gradient in to_copy]), strict=True):
            results[place] = copy
        if phase is Phase.I:
            flight.input_results[self.index] = results[: len(self.facts.reads)]
        return results

    # -------------------------------------------------------------------------------------- delayed weight gradients

    def _deliveries(self) -> tuple[_delayed.Delivery, ...]:
        return () if self.facts.delayed is None else self.facts.delayed.deliveries

    def _touched(self, parameters: Parameters) -> set[int]:
        """The parameters whose main_grad this part's backward, or backward_dw(), may add into."""
        owners = () if self.facts.delayed is None else self.facts.delayed.owners
        indices = {parameters.index_of(parameter) for owner in owners for parameter in owner.parameters()}
        return {*self.facts.parameters, *(index for index in indices if index is not None)}

    def weight_grad(self, flight: Flight) -> None:
        """Replay `backward_dw()`, leave the gradients where it leaves them, and tell who waits for them."""
        delayed = self.facts.delayed
        if delayed is None or (self.index, Phase.B) not in flight.done:
            return
        self._require_valid(flight, Phase.W)
        self._require_main_grads()
        pattern = flight.chosen[self.index]
        graph = next(graph for graph in self.graphs.backward[Phase.W] if graph.pattern == pattern)
        self._replay_backward(graph, flight)
        for delivery, gradient in zip(delayed.deliveries, graph.results, strict=True):
            assert gradient is not None
            self._deliver(delivery, gradient)
        flight.done.add((self.index, Phase.W))
        for owner in delayed.owners:
            _delayed.fire(owner)

    def _deliver(self, delivery: _delayed.Delivery, gradient: torch.Tensor) -> None:
        real = self._real[delivery.index]
        if real.grad is not None and delivery.mode == "keep":
            return
        if real.grad is not None and delivery.mode == "add":
            with torch.no_grad():
                real.grad.add_(gradient)
            return
        real.grad = gradient.detach() if delivery.index in self.aliased else gradient.clone()

    def _require_main_grads(self) -> None:
        for parameter, grad, address, name in self._main_grads:
            now = getattr(parameter, "main_grad", None)
            if now is not grad or grad.data_ptr() != address:
                raise StateError(
                    f"{name}.main_grad is another tensor, or lies elsewhere, than at capture, and the graph may add into "
                    "the old one: keep the buffer and zero it in place, or capture again"
                )

    # ------------------------------------------------------------------------------------------- grads="accumulate"

    def _bind_buffers(self, reached: frozenset[int]) -> None:
        """grads="accumulate": `.grad` is the buffer that the graph adds into, or becomes it again, zeroed; where no
        gradient leads to, it stays None as in eager."""
        emptied = []
        for entry in self.added:
            if entry.result not in reached:
                continue
            if getattr(entry.parameter, "_backward_hooks", None):
                raise StateError(
                    f"{entry.name} got a tensor hook (register_hook) after capture, which never sees a gradient that the "
                    "graph adds itself: remove it, or capture with grads='return'"
                )
            if not entry.parameter.requires_grad:
                raise StateError(
                    f"{entry.name} was frozen (requires_grad_(False)) between forward and backward, but the graph adds its "
                    "gradient: freeze it before the forward, and capture again"
                )
            bound = getattr(entry.parameter, entry.home, None)
            if bound is entry.buffer and bound.data_ptr() == entry.address:
                continue
            if bound is entry.buffer:
                raise StateError(
                    f"{entry.name}.{entry.home} has moved to other memory (.data was rebound), but the graph adds into the "
                    "old one: change values in place, or capture again"
                )
            if bound is not None or entry.home == "main_grad":
                raise StateError(
                    f"{entry.name}.{entry.home} is another tensor than the buffer that the graph adds into: put that one "
                    "back (or set .grad to None, as zero_grad(set_to_none=True) does), zero the buffer in place, or "
                    "capture with grads='return'"
                )
            entry.parameter.grad = entry.buffer
            emptied.append(entry.buffer)
        if emptied:
            torch._foreach_zero_(emptied)

    def _fire_hooks(self, reached: frozenset[int]) -> None:
        for entry in self.added:
            hooks = getattr(entry.parameter, "_post_accumulate_grad_hooks", None)
            for hook in list(hooks.values()) if hooks and entry.result in reached else ():
                hook(entry.parameter)


def _memory(place: int, static: torch.Tensor) -> _Memory:
    core = compact(static)
    return _Memory(place, core, static.data_ptr(), static.untyped_storage().data_ptr(), core.shape != static.shape)


def _copy(pairs: Sequence[tuple[_Memory, torch.Tensor]]) -> None:
    """Copy what does not lie in its place already, all in one foreach."""
    targets, sources = [], []
    for memory, tensor in pairs:
        if tensor.data_ptr() == memory.address and (memory.expanded or tensor.stride() == memory.static.stride()):
            continue
        targets.append(memory.static)
        sources.append(_like(tensor, memory.static) if memory.expanded else tensor)
    written = {memory.storage for memory, _ in pairs}
    for n, source in enumerate(sources):  # an aliased output that comes back may lie in what is written here
        if source.untyped_storage().data_ptr() in written and source.numel():
            sources[n] = source.clone()
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)


def _like(tensor: torch.Tensor, core: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that `core` (size 1 where expanded) holds."""
    for dim, size in enumerate(core.shape):
        if tensor.shape[dim] != size:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def fresh(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on memory of their own. On a GPU one kernel copies many: x * 1 has the bits of x."""
    if len(tensors) > 1 and tensors[0].is_cuda and all(t.is_floating_point() for t in tensors):
        return list(torch._foreach_mul(list(tensors), 1))
    return [tensor.clone() for tensor in tensors]


def _bare_makes(facts: PartFacts) -> list[tuple[str, int]] | None:
    """(name, place) where every value that a part makes is one tensor; else None."""
    if any(child.kind is not None for child in facts.make_structure.children):
        return None
    if not all(isinstance(leaf, OutIndex) for leaf in facts.make_leaves):
        return None
    return [(name, leaf.place) for name, leaf in zip(facts.part.makes, facts.make_leaves, strict=True)]


def _leaving(facts: PartFacts) -> frozenset[int]:
    """The outputs that only the caller gets: they are copied as they leave."""
    names: dict[int, set[bool]] = {}
    at = 0
    for name, child in zip(facts.part.makes, facts.make_structure.children, strict=True):
        for leaf in facts.make_leaves[at : at + _count(child)]:
            if isinstance(leaf, OutIndex):
                names.setdefault(leaf.place, set()).add(name in facts.part.finals)
        at += _count(child)
    return frozenset(place for place, kinds in names.items() if kinds == {True})


def _count(structure: Structure) -> int:
    return 1 if structure.kind is None else sum(_count(child) for child in structure.children)


class BoundSet:
    """One graph set, ready to run one microbatch."""

    def __init__(self, graph_set: GraphSet, slot: Slot, capture: CaptureSet) -> None:
        self.unit, self.facts, self.slot = graph_set.unit, graph_set.facts, slot
        self.title = graph_set.unit.title
        self.spec = next(sample.spec for sample in graph_set.unit.samples if sample.slot == graph_set.slot)
        alias = capture.plan.outputs_alias
        self.alias = alias
        self.parts = [
            None if graphs is None else BoundPart(graphs, index, slot, capture, alias)
            for index, graphs in enumerate(graph_set.parts)
        ]
        graphed = [part for part in self.parts if part is not None]
        for part in graphed[-1:]:
            part.is_last = part.index == len(self.parts) - 1
        self.has_backward = any(part.facts.differentiable for part in graphed)
        self._static = {
            tensor.untyped_storage().data_ptr()
            for part in self.parts
            if part is not None
            for tensor in (*part.graphs.inputs, *part.graphs.outputs)
        }

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flight: Flight | None,
        anchor: torch.Tensor,
        side: Side | None = None,
    ) -> Any:
        """The outputs of the unit for checked arguments. Raises InputMismatch if an eager part's results differ."""
        env = entry_values(self.unit, args, kwargs)
        for part, bound, facts in zip(self.unit.parts, self.parts, self.facts.parts, strict=True):
            if bound is None:
                run_eager(part, facts, env)
            else:
                bound.call(env, flight if bound.facts.differentiable else None, anchor, side)
        value = self.unit.program.result(env)
        return value if self.alias else self._owned(value)

    def weight_grad(self, flight: Flight) -> None:
        """What `backward_dw()` of the unit's modules would do after this flight's backward, the last part first. Where a
        call of an eager part reached a module, its own Python did not run in a graph, and runs now."""
        for facts, bound in zip(reversed(self.facts.parts), reversed(self.parts), strict=True):
            if bound is not None:
                bound.weight_grad(flight)
            elif facts.delayed is not None:
                for owner in facts.delayed.owners:
                    _delayed.run(owner)

    def _owned(self, value: Any) -> Any:
        """Copies of what still lies in static memory (values that are also read inside, or pass through)."""
        if isinstance(value, torch.Tensor):
            return value.clone() if self._is_static(value) else value
        leaves, structure = flatten(value)
        changed = False
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and self._is_static(leaf):
                leaves[place] = leaf.clone()
                changed = True
        return unflatten(structure, leaves) if changed else value

    def _is_static(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._static
