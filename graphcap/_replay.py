"""Stage 4: run the graphs in place of the parts, inside the caller's autograd.

A graphed part is one autograd node: its forward copies what is not in place yet and replays, its backward copies the
arriving gradients, replays and hands out gradients that nobody else owns. Eager parts run as ordinary Python between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphcap import _delayed
from graphcap import _torch_private as private
from graphcap._attributes import Attribute, Placed
from graphcap._capture_set import BackwardGraph, CaptureSet, GraphSet, PartGraphs
from graphcap._copies import Copies, fresh, memory_of
from graphcap._eager_part import run_eager, state_of
from graphcap._facts import PartFacts, Pattern
from graphcap._flight import Flight, Side, Slot
from graphcap._guards import Parameters
from graphcap._parts import OutIndex, entry_values
from graphcap._quantization import FIRST_MICROBATCH, QuantizedPart
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
from graphcap._warmup_pass import dense_strides
from graphcap.errors import InputMismatch, ReplayError, StateError
from graphcap.order import Phase


class _PartNode(torch.autograd.Function):
    """The autograd node of one graphed part."""

    @staticmethod
    def forward(ctx: Any, bound: BoundPart, flight: Flight, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if bound.again is not None:
            flight.again[bound.index] = bound.again.remember()
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


_apply_node = private.node_apply(_PartNode)


def _launch(graph: BackwardGraph, flight: Flight) -> None:
    if flight.side is None:
        graph.graph.replay()
    else:
        flight.side.replay(graph.graph, whole=True)


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


@dataclass(frozen=True, slots=True)
class _Choice:
    """What runs for one set of arriving gradients: the graph, the results that they lead to, and how those leave."""

    graph: BackwardGraph | None
    reached: frozenset[int]
    kept: list[tuple[int, torch.Tensor]]
    copied: list[tuple[int, torch.Tensor]]
    packed: list[tuple[int, int]]


class BoundPart:
    """One graphed part of one graph set, ready to run."""

    def __init__(self, graphs: PartGraphs, index: int, slot: Slot, capture: CaptureSet, alias_outputs: bool) -> None:
        self.graphs, self.facts, self.index, self.slot = graphs, graphs.facts, index, slot
        self.again = graphs.again
        self.retain = capture.plan.config.retain_graph
        linked = graphs.linked
        self.incoming = Copies([memory_of(n, static) for n, static in enumerate(graphs.inputs) if not linked[n]])
        self.arriving = Copies([memory_of(n, g) for n, g in zip(self.facts.grad_outputs, graphs.grad_outputs, strict=False)])
        self.leaving = frozenset() if alias_outputs else _leaving(self.facts)
        real = self._real = capture.parameters.real
        deliveries = () if self.facts.delayed is None else self.facts.delayed.deliveries
        self.aliased = frozenset(
            i
            for i in (*self.facts.parameters, *(delivery.index for delivery in deliveries))
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
        self._width = len(self.facts.reads) + len(self.returned) + bool(self.added)
        self._returned_at = [n for n, i in enumerate(self.facts.parameters) if i not in capture.buffers]
        self._grad_places = self.facts.grad_outputs
        # Made by earlier parts and given no gradient here. An edge to them would run their backwards without a gradient, of
        # which a custom autograd function makes zeros, where eager runs nothing.
        self._untaken = [
            n
            for n, leaf in enumerate(self.facts.reads)
            if leaf.source is not None and leaf.spec.requires_grad and n not in self.facts.grad_inputs
        ]
        self.quantized: QuantizedPart | None = None  # set where the part runs quantised modules
        self.is_last = False  # whether nothing of the unit comes after it
        self._reach: list[tuple[int, str, tuple[Getter, ...]]] | None = None
        self._made_names = _bare_makes(self.facts)
        self._choices: dict[tuple[Phase, Pattern], _Choice] = {}

    # ------------------------------------------------------------------------------------------------------ forward

    def run(self, tensors: Sequence[torch.Tensor], side: Side | None) -> tuple[torch.Tensor, ...]:
        """Copy in, replay, and give the static outputs as new tensor objects (copies where they leave as copies)."""
        if self.slot.tail is not None:
            self.slot.settle()
        self.incoming.fill(tensors)
        if side is None:
            self.graphs.forward.replay()
        else:
            self.slot.tail = side.replay(self.graphs.forward, whole=not self.is_last)
        if not self.leaving:
            return tuple([static.detach() for static in self.graphs.outputs])
        return tuple(
            (static_copy(static) if self._gaps[place] else static.clone()) if place in self.leaving else static.detach()
            for place, static in enumerate(self.graphs.outputs)
        )

    def call(self, env: dict[str, Any], flight: Flight | None, anchor: torch.Tensor, side: Side | None) -> None:
        tensors = self._gather(env)
        for n in self._untaken:
            tensors[n] = tensors[n].detach()
        if self.quantized is not None:
            ticket = self.quantized.before(self.slot.first, flight is not None)
            if flight is not None:
                flight.tickets[self.index] = ticket
        if flight is None:
            with torch.no_grad():
                outputs = self.run(tensors, side)
        else:
            if self.added and not any(tensor.requires_grad for tensor in tensors):
                outputs = _apply_node(self, flight, *tensors, *self.returned, anchor)  # else there would be no node
            else:
                outputs = _apply_node(self, flight, *tensors, *self.returned)
        if self._made_names is not None:
            for name, place in self._made_names:
                env[name] = outputs[place]
            return
        leaves = [outputs[leaf.place] if isinstance(leaf, OutIndex) else leaf for leaf in self.facts.make_leaves]
        made = dict(zip(self.facts.part.makes, unflatten(self.facts.make_structure, leaves), strict=True))
        if not isinstance(made.get(FIRST_MICROBATCH), torch.Tensor):
            made.pop(FIRST_MICROBATCH, None)  # a host value that passes through: eager parts get this call's
        env.update(made)

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
        phase = flight.phase
        if flight.hold is not None:
            phase = Phase.B  # what is put off is no business of autograd's
        elif phase is Phase.W and (self.index, Phase.I) not in flight.done:
            phase = Phase.B  # no input gradient was asked of this part, so nothing is there to build on
        pattern = tuple([gradients[place] is not None for place in self._grad_places])
        if True not in pattern:
            return [None] * self._width
        self._require_valid(flight, phase)
        if self.slot.nest is not None:
            self.slot.nest.require_turn(self.slot.unit, f"the backward of part {self.facts.part.name}", None)
        choice = self._choices.get((phase, pattern)) or self._choose(phase, pattern)
        if phase is not Phase.W:
            if choice.graph is None:
                return [None] * self._width
            if self.slot.tail is not None:
                self.slot.settle()
            self.arriving.fill(gradients)
        if self._main_grads:
            self._require_main_grads()
        if phase is not Phase.I:
            if self.added:
                self._bind_buffers(choice.reached)
            if flight.hold is None:
                flight.finish_after_backward()
        if choice.graph is not None:  # a part without parameters has nothing to do in a W step but to hand on
            self._replay(choice.graph, flight)
            if self.quantized is not None:
                self.quantized.after(flight.tickets[self.index], None if all(pattern) else self._missed(choice.reached))
        results = self._results(flight, phase, choice)
        flight.done.add((self.index, phase))
        if flight.hold is not None and choice.graph is not None:
            flight.chosen[self.index], flight.reached[self.index] = choice.graph.pattern, choice.reached
            flight.hold(flight)
        if self.added and phase is not Phase.I:
            self._fire_hooks(choice.reached)
        return results

    def _replay(self, graph: BackwardGraph, flight: Flight) -> None:
        """Replay, and do what the Python of the backward does to parameters. The results are read at once: all of it."""
        if self.again is None:
            _launch(graph, flight)
        else:
            self.again.replay(partial(_launch, graph, flight), flight.again[self.index])
        for index, name, value in graph.marks:
            setattr(self._real[index], name, value)

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
        if flight.hold is not None and phase is Phase.B and self.facts.delayed is not None:
            _delayed.require_turn(self.index, flight.done, self.facts.part.name)

    def _choose(self, phase: Phase, pattern: Pattern) -> _Choice:
        """Where no graph was recorded for just the gradients that arrived, the one for all outputs runs on zeros, and what
        only the missing ones lead to stays None."""
        graphs = self.graphs.backward.get(phase, ())
        exact = next((graph for graph in graphs if graph.pattern == pattern), None)
        graph = exact or next((graph for graph in graphs if all(graph.pattern)), None)
        reached = frozenset().union(*(results for results, there in zip(self.facts.reach, pattern, strict=True) if there))
        choice = self._choices[phase, pattern] = _Choice(graph, reached, *self._ways_out(phase, graph, reached))
        return choice

    def _ways_out(
        self, phase: Phase, graph: BackwardGraph | None, reached: frozenset[int]
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]], list[tuple[int, int]]]:
        """(place among the node's inputs, static gradient) of what is handed on as it is, of what is copied; and (place,
        number of the result) of what the arena holds."""
        kept: list[tuple[int, torch.Tensor]] = []
        copied: list[tuple[int, torch.Tensor]] = []
        packed: list[tuple[int, int]] = []
        if graph is None:
            return kept, copied, packed
        inputs = len(self.facts.grad_inputs)
        if phase is not Phase.W:
            for number, place in enumerate(self.facts.grad_inputs):
                gradient = graph.results[number]
                if gradient is not None and number in reached:
                    (kept if self.graphs.linked[place] else copied).append((place, gradient))
        if phase is Phase.I:
            return kept, copied, packed
        begin = inputs if phase is not Phase.W else 0  # where the parameters begin in the graph's results
        held = frozenset() if graph.arena is None else graph.arena.numbers
        for n, at in enumerate(self._returned_at):
            gradient, place = graph.results[begin + at], len(self.facts.reads) + n
            if gradient is None or inputs + at not in reached:
                continue
            if begin + at in held:
                packed.append((place, begin + at))
            else:
                (kept if self.facts.parameters[at] in self.aliased else copied).append((place, gradient))
        return kept, copied, packed

    def _results(self, flight: Flight, phase: Phase, choice: _Choice) -> list[torch.Tensor | None]:
        results: list[torch.Tensor | None] = [None] * self._width
        reads = len(self.facts.reads)
        if phase is Phase.W:
            results[:reads] = flight.input_results.pop(self.index)
        for place, gradient in choice.kept:
            # autograd keeps a gradient as `.grad` that nobody else refers to: an alias that is new each time
            results[place] = gradient if place < reads else gradient.detach()
        if len(choice.copied) == 1:
            results[choice.copied[0][0]] = choice.copied[0][1].clone()
        elif choice.copied:
            copies = fresh([gradient for _, gradient in choice.copied])
            for (place, _), copy in zip(choice.copied, copies, strict=True):
                results[place] = copy
        if choice.packed:
            assert choice.graph is not None
            assert choice.graph.arena is not None
            views = choice.graph.arena.fresh()
            for place, number in choice.packed:
                results[place] = views[number]
        if phase is Phase.I:
            flight.input_results[self.index] = results[:reads]
        return results

    # -------------------------------------------------------------------------------------- delayed weight gradients

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
        self._replay(graph, flight)
        missed = self._missed(flight.reached[self.index])
        for delivery, gradient in zip(delayed.deliveries, graph.results, strict=True):
            assert gradient is not None
            real = self._real[delivery.index]
            if id(real) not in missed:
                _delayed.deliver(real, gradient, delivery.mode, aliased=delivery.index in self.aliased)
        flight.done.add((self.index, Phase.W))
        for owner in delayed.owners:
            own = {id(parameter) for parameter in owner.parameters()}
            if not own or not own <= missed:
                _delayed.fire(owner)

    def _missed(self, reached: frozenset[int]) -> set[int]:
        """The ids of the parameters to which no gradient that arrived leads."""
        first = len(self.facts.grad_inputs)
        return {id(self._real[i]) for n, i in enumerate(self.facts.parameters) if first + n not in reached}

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
            parameter, buffer = entry.parameter, entry.buffer
            bound = parameter.grad if entry.home == "grad" else getattr(parameter, "main_grad", None)
            if parameter._backward_hooks or not parameter.requires_grad:
                raise self._unfit(entry)
            if bound is buffer:
                if buffer.data_ptr() != entry.address:
                    raise self._unfit(entry)
            elif bound is None and entry.home == "grad":
                parameter.grad = buffer
                emptied.append(buffer)
            else:
                raise self._unfit(entry)
        if emptied:
            torch._foreach_zero_(emptied)

    @staticmethod
    def _unfit(entry: _Added) -> StateError:
        """Why the graph's own adding would not do what autograd does."""
        bound = getattr(entry.parameter, entry.home, None)
        if entry.parameter._backward_hooks:
            return StateError(
                f"{entry.name} got a tensor hook (register_hook) after capture, which never sees a gradient that the "
                "graph adds itself: remove it, or capture with grads='return'"
            )
        if not entry.parameter.requires_grad:
            return StateError(
                f"{entry.name} was frozen (requires_grad_(False)) between forward and backward, but the graph adds its "
                "gradient: freeze it before the forward, and capture again"
            )
        if bound is entry.buffer:
            return StateError(
                f"{entry.name}.{entry.home} has moved to other memory (.data was rebound), but the graph adds into the "
                "old one: change values in place, or capture again"
            )
        return StateError(
            f"{entry.name}.{entry.home} is another tensor than the buffer that the graph adds into: put that one "
            "back (or set .grad to None, as zero_grad(set_to_none=True) does), zero the buffer in place, or "
            "capture with grads='return'"
        )

    def _fire_hooks(self, reached: frozenset[int]) -> None:
        for entry in self.added:
            hooks = entry.parameter._post_accumulate_grad_hooks
            if hooks and entry.result in reached:
                for hook in list(hooks.values()):
                    hook(entry.parameter)


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


_Owned = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by id of a static tensor: it, and the copy that leaves


class BoundSet:
    """One graph set, ready to run one microbatch."""

    def __init__(self, graph_set: GraphSet, slot: Slot, capture: CaptureSet) -> None:
        self.unit, self.facts, self.slot = graph_set.unit, graph_set.facts, slot
        self.title = graph_set.unit.title
        self.spec = next(sample.spec for sample in graph_set.unit.samples if sample.slot == graph_set.slot)
        alias = capture.plan.outputs_alias
        self.alias = alias
        self.placed = Placed()
        self.recompute = capture.plan.config.recompute is not None and graph_set.facts.grad
        others = any(facts.leaves_attributes for facts in graph_set.facts.parts)
        self._attributes_change = others or bool(graph_set.unit.program.attributes)
        self.state = state_of(graph_set.unit, graph_set.facts) if self.recompute else ()
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
        owned: _Owned = {}
        for part, bound, facts in zip(self.unit.parts, self.parts, self.facts.parts, strict=True):
            if bound is None:
                state = self.state if self.recompute and self._may_run_twice(facts) else None
                run_eager(part, facts, env, lambda call: self._put(call.sets, env, owned), state)
            else:
                bound.call(env, flight if bound.facts.differentiable else None, anchor, side)
        value = self.unit.program.result(env)
        value = value if self.alias else self._owned(value, owned)
        self._put(self.unit.program.sets, env, owned)
        return value

    def weight_grad(self, flight: Flight) -> None:
        """What `backward_dw()` of the unit's modules would do after this flight's backward, the last part first. Modules
        of eager parts ran as Python, and so does their put-off work."""
        for facts, bound in zip(reversed(self.facts.parts), reversed(self.parts), strict=True):
            if bound is not None:
                bound.weight_grad(flight)
            elif facts.delayed is not None:
                for owner in facts.delayed.owners:
                    _delayed.run(owner)

    def _may_run_twice(self, facts: PartFacts) -> bool:
        """recompute of an eager part: it changes nothing, and reads no attribute that may be another call's by then."""
        return not (facts.changes_state or self._attributes_change)

    def _put(self, attributes: tuple[Attribute, ...], env: dict[str, Any], owned: _Owned) -> None:
        if attributes:
            self.placed.put(attributes, env, lambda value: value if self.alias else self._owned(value, owned))

    def _owned(self, value: Any, copies: _Owned) -> Any:
        """Copies of what still lies in static memory (values that are also read inside, or pass through): one of each."""
        if isinstance(value, torch.Tensor):
            if not self._is_static(value):
                return value
            if id(value) not in copies:
                copies[id(value)] = (value, value.clone())
            return copies[id(value)][1]
        leaves, structure = flatten(value)
        changed = False
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and self._is_static(leaf):
                leaves[place] = self._owned(leaf, copies)
                changed = True
        return unflatten(structure, leaves) if changed else value

    def _is_static(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._static
