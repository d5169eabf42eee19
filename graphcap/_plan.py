"""Stage 1: what will be captured. Touches no device; the records are frozen and can be printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphcap._attributes import ABSENT, Attribute, WithAttributes
from graphcap._delayed import owners_of
from graphcap._guards import modules_of
from graphcap._tensors import CallSpec
from graphcap._time_hooks import NO_HOOKS, TimeHooks
from graphcap.config import CaptureConfig
from graphcap.errors import CutError, PlanError
from graphcap.order import Order, SlotMap, assign_slots
from graphcap.partial_layer import EAGER, GRAPHED, NOTHING, Call, PartialLayer, PartKind, Program, flatten

Layers = tuple[Callable[..., Any], ...]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """A maximal run of calls of one kind. `reads` are the values it takes; `makes` those that somebody needs later,
    values that only pass through a graphed part included; `finals` those of them that nobody but the caller needs."""

    index: int
    kind: PartKind
    calls: tuple[Call, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    finals: tuple[str, ...]

    @property
    def name(self) -> str:
        first, last = self.calls[0].name, self.calls[-1].name
        return first if len(self.calls) == 1 else f"{first} .. {last}"

    @property
    def hoisted(self) -> bool:
        """Whether it was moved in front of all graphs."""
        return self.calls[0].hoisted

    @property
    def reason(self) -> str | None:
        return next((call.reason for call in self.calls if call.reason), None)


@dataclass(frozen=True, slots=True)
class Sample:
    """The sample arguments from which one graph set is captured, and the microbatches that it serves."""

    slot: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: CallSpec
    microbatches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """One callable that is captured as a whole: a chunk (`capture`), or one layer of it (`make_graphed_callables`).

    `layers` are the user's callables; `calls` what an eager run of the unit calls: for a single module its `forward`,
    since hooks on the captured module itself run around the unit, whoever serves it. `samples` has one entry per graph
    set; `set_of[microbatch]` is its index.
    """

    chunk: int
    layer: int
    layers: Layers
    calls: Layers
    program: Program
    parts: tuple[PartPlan, ...]
    samples: tuple[Sample, ...]
    set_of: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"chunk {self.chunk}" if self.layer < 0 else f"chunk {self.chunk}, layer {self.layer}"


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """The plan of a capture: print it to see parts, breaks with their reasons, slots and bytes.

    parts: every part of every chunk, in order. breaks: the EAGER ones, but for those that are hoisted: functions of the
    arguments alone (a mask), which run before all graphs and cost none. slots: how many sets of static buffers.
    graphs: the number of forward graphs of one pass over all chunks (N breaks give N + 1, less the idle parts).
    idle: (unit, part) of graphed parts that make views alone and have no graph, known once recorded. static_bytes: memory
    that the static buffers take, known once recording is done (0 before); shared_bytes: what it would be more if every
    microbatch had buffers of its own; recompute_saves: bytes of activations that recompute="part" does not keep between
    forward and backward. hooks: what runs around warm-up and recording. alias_parameters: ids of parameters whose gradient
    is handed out as the static buffer itself. pools: of every slot, the number of its memory pool (empty: each has its
    own).
    """

    units: tuple[UnitPlan, ...]
    order: Order
    given_order: bool
    slot_map: SlotMap
    config: CaptureConfig
    strict: bool
    static_bytes: int = 0
    idle: frozenset[tuple[int, int]] = frozenset()
    shared_bytes: int = 0
    recompute_saves: int = 0
    hooks: TimeHooks = NO_HOOKS
    alias_parameters: frozenset[int] = frozenset()
    pools: tuple[int, ...] = ()

    def pool_of(self, slot: int) -> int:
        return self.pools[slot] if self.pools else slot

    @property
    def parts(self) -> tuple[PartPlan, ...]:
        return tuple(part for unit in self.units for part in unit.parts)

    @property
    def breaks(self) -> tuple[PartPlan, ...]:
        return tuple(part for part in self.parts if part.kind is not GRAPHED and not part.hoisted)

    @property
    def hoisted(self) -> tuple[PartPlan, ...]:
        return tuple(part for part in self.parts if part.hoisted)

    @property
    def slots(self) -> int:
        return self.slot_map.count

    @property
    def graphs(self) -> int:
        return sum(part.kind is GRAPHED for part in self.parts) - len(self.idle)

    @property
    def outputs_alias(self) -> bool:
        choice = self.config.outputs
        return choice == "alias" or (choice is None and (self.given_order or not self.strict))

    def __str__(self) -> str:
        from graphcap.report import plan_text  # the report reads plans; a plan that prints itself reads the report

        return plan_text(self)


def cut(program: Program) -> tuple[PartPlan, ...]:
    """Group the calls of a program into parts, and find what crosses between them.

    A value that a graphed part reads and somebody needs later leaves that part again (it passes through), so that its
    gradients are added in eager's order (design: partial-layer.md, "Pass-through").
    """
    runs: list[list[Call]] = []
    for call in program.calls:
        if runs and (runs[-1][0].kind, runs[-1][0].hoisted) == (call.kind, call.hoisted):
            runs[-1].append(call)
        else:
            runs.append([call])
    parts: list[PartPlan] = []
    needed_later = set(program.ends)
    read_later: set[str] = set()
    for index in range(len(runs) - 1, -1, -1):
        calls = tuple(runs[index])
        made: set[str] = set()
        reads: list[str] = []
        for call in calls:
            reads += [name for name in call.reads if name not in made and name not in reads and name != NOTHING]
            made.update(call.makes)
        names = [name for call in calls for name in call.makes]
        if calls[0].kind is GRAPHED:
            names = reads + names
        makes = tuple(name for name in dict.fromkeys(names) if name in needed_later)
        finals = tuple(name for name in makes if name not in read_later)
        parts.append(PartPlan(index, calls[0].kind, calls, tuple(reads), makes, finals))
        needed_later |= set(reads)
        read_later |= set(reads)
    return tuple(reversed(parts))


def build(
    chunks: Sequence[Layers],
    samples: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    order: Order | None,
    config: CaptureConfig,
) -> CapturePlan:
    """The plan of `capture`: one unit per chunk, one sample per chunk, slots shared by live range."""
    given = order is not None
    order = Order.forward_backward(1) if order is None else order.check()
    if order.chunks != len(chunks):
        raise PlanError(
            f"the order has {order.chunks} chunks, but {len(chunks)} were given: under an order `module` is a tuple "
            "with one entry (a module, or a tuple of layers) per chunk"
        )
    if len(samples) != len(chunks):
        raise PlanError(f"{len(chunks)} chunks, but sample arguments for {len(samples)}: give one entry per chunk")
    specs = [CallSpec.of(args, kwargs) for args, kwargs in samples]
    keys = signature_keys(specs)
    whole = Order(tuple(order), chunks=order.chunks, microbatches=order.microbatches, training=order.training)
    slot_map = assign_slots(whole, lambda chunk, microbatch, layer: keys[chunk])
    units = []
    for chunk, layers in enumerate(chunks):
        args, kwargs = samples[chunk]
        slots = [slot_map.slot_of(chunk, m) for m in range(order.microbatches)]
        distinct = tuple(dict.fromkeys(slots))
        served = {slot: tuple(m for m, s in enumerate(slots) if s == slot) for slot in distinct}
        made = tuple(Sample(slot, args, kwargs, specs[chunk], served[slot]) for slot in distinct)
        calls, program = _program(layers)
        set_of = tuple(distinct.index(slot) for slot in slots)
        units.append(UnitPlan(chunk, -1, layers, calls, program, cut(program), made, set_of))
    return CapturePlan(tuple(units), order, given, slot_map, config, strict=True)


def build_callables(
    callables: Sequence[Callable[..., Any]],
    samples: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    order: Order,
    config: CaptureConfig,
    *,
    given_order: bool,
    share_slots: bool,
    hooks: TimeHooks = NO_HOOKS,
    alias_parameters: frozenset[int] = frozenset(),
) -> CapturePlan:
    """The plan of `make_graphed_callables`: one unit per callable; `samples[order.flat_index(chunk, microbatch, layer)]`.

    Without `share_slots` every microbatch has its own buffers, as in torch and TE.
    """
    specs = [CallSpec.of(args, kwargs) for args, kwargs in samples]
    keys = signature_keys(specs)

    def signature(chunk: int, microbatch: int, layer: int) -> object:
        if not share_slots:
            return order.flat_index(chunk, microbatch, layer)
        # Slots of a chunk's layers are taken together (see `_pools`), so chunks share where all of their layers agree.
        layers = range(order.layers_per_chunk[chunk])
        return tuple(keys[order.flat_index(chunk, microbatch, other)] for other in layers), layer

    slot_map = assign_slots(order, signature)
    units = []
    index = 0
    for chunk, count in enumerate(order.layers_per_chunk):
        for layer in range(count):
            units.append(_callable_unit(callables[index], chunk, layer, samples, specs, order, slot_map))
            index += 1
    nested = given_order and not config.retain_graph and all(_is_one_graph(unit) for unit in units)
    return CapturePlan(
        tuple(units),
        order,
        given_order,
        slot_map,
        config,
        strict=False,
        hooks=hooks,
        alias_parameters=alias_parameters,
        pools=_pools(order, slot_map) if nested else (),
    )


def _is_one_graph(unit: UnitPlan) -> bool:
    """Whether a unit is one graphed part whose backward is done when autograd's is."""
    return len(unit.parts) == 1 and unit.parts[0].kind is GRAPHED and not owners_of(modules_of(unit.layers))


def _pools(order: Order, slot_map: SlotMap) -> tuple[int, ...]:
    """One pool for the layers of a chunk: they run one inside the other (forwards up, backwards down), so that the scratch
    memory and the gradients of one serve all. Only where slots are always taken together; else each has its own."""
    group_of: dict[int, tuple[int, ...]] = {}
    for chunk, count in enumerate(order.layers_per_chunk):
        for microbatch in range(order.microbatches):
            group = tuple(sorted(slot_map.slot_of(chunk, microbatch, layer) for layer in range(count)))
            if any(group_of.setdefault(slot, group) != group for slot in group):
                return ()
    numbers = {group: number for number, group in enumerate(dict.fromkeys(group_of[slot] for slot in sorted(group_of)))}
    return tuple(numbers[group_of[slot]] for slot in range(slot_map.count))


def _callable_unit(
    layer_callable: Callable[..., Any],
    chunk: int,
    layer: int,
    samples: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    specs: Sequence[CallSpec],
    order: Order,
    slot_map: SlotMap,
) -> UnitPlan:
    sets: list[Sample] = []
    set_of: list[int] = []
    for microbatch in range(order.microbatches):
        slot = slot_map.slot_of(chunk, microbatch, layer)
        known = next((i for i, s in enumerate(sets) if s.slot == slot), None)
        if known is None:
            flat = order.flat_index(chunk, microbatch, layer)
            sets.append(Sample(slot, *samples[flat], specs[flat], (microbatch,)))
            set_of.append(len(sets) - 1)
        else:
            old = sets[known]
            sets[known] = Sample(slot, old.args, old.kwargs, old.spec, (*old.microbatches, microbatch))
            set_of.append(known)
    calls, program = _program((layer_callable,))
    return UnitPlan(chunk, layer, (layer_callable,), calls, program, cut(program), tuple(sets), tuple(set_of))


def _program(layers: Layers) -> tuple[Layers, Program]:
    """What an eager run calls, and the program to capture."""
    if len(layers) > 1 or not isinstance(layers[0], torch.nn.Module):
        return layers, flatten(layers)
    # Bound now: the drop-in replaces the attribute later. It may have done so already: then what it replaced.
    forward = getattr(layers[0].forward, "graphcap_own", layers[0].forward)
    return (forward,), flatten(layers if isinstance(layers[0], PartialLayer) else (forward,))


def with_attributes(unit: UnitPlan, part: PartPlan, found: Sequence[tuple[torch.nn.Module, str]]) -> UnitPlan:
    """A declared unit whose graphed part `part` sets these attributes: its last call makes their values as well."""
    program, last = unit.program, part.calls[-1]
    places = _state_places(unit)
    sets = []
    for number, (owner, key) in enumerate(found):
        held = owner.__dict__.get(key, ABSENT)
        other = places.get(id(held))
        name = f"{last.name}.{key}#set{len(program.attributes) + number}"
        sets.append(Attribute(owner, key, None if other is not None else name, other, last.name))
    makes = tuple(attribute for attribute in sets if attribute.value is not None)
    names = tuple(str(attribute.value) for attribute in makes)
    run = WithAttributes(last.run, len(last.makes), makes) if makes else last.run
    numbers = {call.name: number for number, call in enumerate(program.calls)}
    calls = [replace(call, run=run, makes=(*call.makes, *names)) if call is last else call for call in program.calls]
    following = next((n for n in range(numbers[last.name], len(calls)) if calls[n].kind is EAGER), None)
    if following is not None:
        calls[following] = replace(calls[following], sets=(*calls[following].sets, *sets))
    # Of several calls that set an attribute the last one leaves it as it is.
    final = {a.place: a for a in sorted((*program.sets, *sets), key=lambda attribute: numbers[attribute.by])}
    program = replace(program, calls=tuple(calls), sets=tuple(final.values()))
    return replace(unit, program=program, parts=cut(program))


def _state_places(unit: UnitPlan) -> dict[int, Callable[[], Any]]:
    """Parameters and buffers, by id: an attribute that is one of them stays one."""
    modules = [layer if isinstance(layer, torch.nn.Module) else getattr(layer, "__self__", None) for layer in unit.layers]
    found: dict[int, Callable[[], Any]] = {}
    for module in (m for top in modules if isinstance(top, torch.nn.Module) for m in top.modules()):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                found.setdefault(id(tensor), partial(table.get, key))
    found.pop(id(None), None)
    return found


def signature_keys(specs: Sequence[CallSpec]) -> list[int]:
    """Equal numbers for specs that can share static buffers (constants need not be hashable)."""
    kinds: list[CallSpec] = []
    keys = []
    for spec in specs:
        found = next((i for i, kind in enumerate(kinds) if kind.same_signature(spec)), None)
        if found is None:
            kinds.append(spec)
            found = len(kinds) - 1
        keys.append(found)
    return keys


def refuse_hidden_parts(module: torch.nn.Module) -> None:
    """A PartialLayer with eager parts inside a plain module: its parts would be recorded whole."""
    if isinstance(module, PartialLayer):
        return
    for name, child in module.named_modules():
        if isinstance(child, PartialLayer) and any(part.kind is EAGER for part in child.parts()):
            raise CutError(
                f"{name} ({type(child).__name__}) declares EAGER parts, but stands in a {type(module).__name__}, which "
                "is one graphed part: list it with nested(...) in a PartialLayer at every level above, pass the layers as "
                "a tuple, or name it in break_at="
            )
