"""Stage 3: record. Every graphed part of every graph set becomes a forward graph and its backward graphs.

Graphs that share a pool may reuse each other's dead memory, so they are right only when they are replayed in the order
in which they were captured. Graph sets of two slots are not: microbatch 2 may run its forward in slot 0 while slot 1 waits
for its backward, and what the one used as scratch may be what the other saved. So every slot has a pool of its own (or
the layers of a chunk have one together, since they run one inside the other: `_plan._pools`, `_flight.Nest`). Inside it
capture order is replay order: forwards, then backwards in reverse (with I and W: all I, then all W); and of several graph
sets of one slot (chunks that take turns in it) only one is under way at a time, so that they may use each other's memory:
see `_shared_memory.loosened`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphcap import _delayed, _guards
from graphcap._arena import Arena, pack, same_arena
from graphcap._capture_set import BackwardGraph as BackwardGraph
from graphcap._capture_set import CaptureSet as CaptureSet
from graphcap._capture_set import GraphSet as GraphSet
from graphcap._capture_set import PartGraphs as PartGraphs
from graphcap._facts import PartFacts, Pattern, UnitFacts, WarmupFacts
from graphcap._parts import (
    NoRandom,
    OutIndex,
    Running,
    close_part,
    differentiate,
    distinct_tensors,
    entry_values,
    in_place_words,
    open_part,
    proxy_of,
    run_calls,
    run_inputs,
    sample_copies,
)
from graphcap._plan import PartPlan, Sample, UnitPlan
from graphcap._quantization import Session
from graphcap._recompute import Again
from graphcap._record_again import SecondForward
from graphcap._shared_memory import idle_parts, loosened, released, static_bytes
from graphcap._tensors import TensorSpec, compact, empty_static, flatten, same_constant, unflatten
from graphcap.backends.base import Backend, Graph, Pool, unless_empty
from graphcap.errors import CaptureError, GraphcapError
from graphcap.order import Phase
from graphcap.partial_layer import GRAPHED, Opened


@dataclass(slots=True)
class _Work:
    """A graph set while it is recorded. number: of its unit."""

    number: int
    pool: Pool
    unit: UnitPlan
    facts: UnitFacts
    sample: Sample
    places: dict[int, int]  # id of a sample tensor -> its number among the leaves of the call
    running: list[Running | None]
    env: dict[str, Any]
    statics: list[_PartWork | None]
    scopes: list[dict[str, Any]]  # per part what it read (graphed), or all values after it (eager)


@dataclass(slots=True)
class _PartWork:
    facts: PartFacts
    inputs: list[torch.Tensor]
    linked: list[bool]
    forward: Graph
    outputs: list[torch.Tensor]
    made: list[torch.Tensor]
    proxies: list[torch.Tensor]
    grad_outputs: list[torch.Tensor]
    backward: dict[Phase, tuple[BackwardGraph, ...]]
    again: Again | None = None


Finished = tuple[list[torch.Tensor | None], Arena | None]  # the results of a backward, and where those that leave lie


class Recorder:
    """Records all graph sets of a plan on one backend, each into a pool of its own."""

    def __init__(
        self,
        facts: WarmupFacts,
        backend: Backend,
        pool: object | None,
        generators: Sequence[torch.Generator] = (),
        session: Session | None = None,
    ) -> None:
        self.session = session or Session()
        self.facts, self.plan, self.backend, self.pool = facts, facts.plan, backend, pool
        self.generators = tuple(generators)
        self.inputs: dict[tuple[int, TensorSpec, int], torch.Tensor] = {}  # slot, spec, number -> shared static input
        self.arrivals: dict[tuple[Any, ...], torch.Tensor] = {}  # slot, place, form -> shared static gradient of an output
        self.pools: dict[int, Pool] = {}  # by the plan's number
        self.complete: dict[tuple[int, int], GraphSet] = {}
        self._sets_in = [sample.slot for unit in self.plan.units for sample in unit.samples]  # one entry per graph set
        self.buffers: dict[int, torch.Tensor] = {}
        self.hold = self.plan.config.retain_graph
        self.operations = 0
        self.recompute = self.plan.config.recompute is not None
        self.saved = 0

    def run(self, kept: list[Any]) -> CaptureSet:
        """Record in the order of the plan: a graph set's forward at its first F, its backward at its first B (or I)."""
        plan = self.plan
        works: dict[tuple[int, int], _Work] = {}
        done: set[tuple[int, int]] = set()
        for step in plan.order:
            units = [(number, unit) for number, unit in enumerate(plan.units) if unit.chunk == step.chunk]
            for number, unit in units if step.phase is Phase.F else reversed(units):
                key = (number, unit.set_of[step.microbatch])
                if step.phase is Phase.F and key not in works:
                    works[key] = self._forward(number, key[1])
                elif step.phase in (Phase.B, Phase.I) and key not in done:
                    done.add(key)
                    with plan.hooks.backward(number, unit.layers[0]):
                        self._backward(works[key], self._phases(step.chunk, works[key].facts.delayed))
                    self._settle(key, works[key])
            if step.phase is not Phase.F:
                for number, unit in units:
                    self._lend((number, unit.set_of[step.microbatch]))
        for key, work in works.items():
            if key not in self.complete:  # forwards alone
                self.complete[key] = _frozen(work)
        sets = tuple(
            tuple(self.complete[number, index] for index in range(len(unit.samples)))
            for number, unit in enumerate(plan.units)
        )
        pools = tuple(self.pools.values())
        works.clear()  # every autograd graph of the recording goes: nothing with a grad_fn stays
        for pool in pools:
            pool.poison()
        static, saved = static_bytes(plan, [s for unit_sets in sets for s in unit_sets], self.buffers.values())
        plan = replace(plan, static_bytes=static, shared_bytes=saved, recompute_saves=self.saved, idle=idle_parts(sets))
        plan, sets = released(plan, sets)
        return CaptureSet(plan, self.facts.parameters, sets, self.buffers, pools, tuple(kept), self.operations)

    def _settle(self, key: tuple[int, int], work: _Work) -> None:
        """A graph set is complete. Its gradients leave at once, so whoever comes next in its pool may have their memory."""
        graph_set = _frozen(work)
        work.running, work.env, work.statics, work.scopes = [], {}, [], []  # what was held for the backward alone
        pool = self.plan.pool_of(work.sample.slot)
        alone = sum(self.plan.pool_of(slot) == pool for slot in self._sets_in) == 1
        self.complete[key] = graph_set if alone else loosened(graph_set, self._aliased, outputs=False)

    def _lend(self, key: tuple[int, int]) -> None:
        """Where other graph sets take turns in the slot, they may also have the memory of the outputs, once all layers of
        the chunk are through: an output is valid until the next forward there."""
        graph_set = self.complete[key]
        if self._sets_in.count(graph_set.slot) > 1:
            self.complete[key] = loosened(graph_set, self._aliased, outputs=True)

    def _phases(self, chunk: int, delayed: bool) -> tuple[Phase, ...]:
        """The backward phases that the order asks of a chunk, in an order of recording that any replay respects. Where
        `backward_dw()` does the W, and in the drop-in, whose caller runs whole backwards, autograd is not split."""
        if delayed or not self.plan.strict:
            return (Phase.B,)
        asked = {step.phase for step in self.plan.order if step.chunk == chunk}
        if Phase.I in asked:  # a part without input gradients has no I; its W is a whole backward, after other Ws
            asked |= {Phase.B}
        return tuple(phase for phase in (Phase.I, Phase.W, Phase.B) if phase in asked)

    # ---------------------------------------------------------------------------------------------------- forward

    def _forward(self, number: int, index: int) -> _Work:
        unit = self.plan.units[number]
        facts, sample = self.facts.units[number][index], unit.samples[index]
        args, kwargs = sample_copies(sample)  # one object per argument, also where the user passed one tensor twice
        places = {id(leaf): place for place, leaf in enumerate(flatten((args, kwargs))[0])}
        number_of_pool = self.plan.pool_of(sample.slot)
        if number_of_pool not in self.pools:
            # The caller's is for one of ours: two of them in one may be replayed in another sequence than recorded.
            self.pools[number_of_pool], self.pool = self.backend.new_pool(self.pool), None
        pool = self.pools[number_of_pool]
        work = _Work(number, pool, unit, facts, sample, places, [], entry_values(unit, args, kwargs), [], [])
        trace = unit.program.trace
        hooks = self.plan.hooks.forward(number, unit.layers[0])
        with torch.set_grad_enabled(facts.grad), hooks, self.session.run(number):
            if trace is not None:
                trace.follow(args, kwargs, unit.parts, partial(self._opened, work))
            else:
                for part in facts.parts:
                    with self._opened(work, part.part) as opened:
                        if not opened.stands:
                            run_calls(part.part, opened.scope)
        if self.recompute and trace is not None:
            self._drop_saved(work)
        return work

    def _drop_saved(self, work: _Work, *held: Any) -> None:
        """recompute: nothing that autograd saved stays, so that later captures may use its memory. held: lists and dicts
        that lead to it. Of parts that were declared, one by one; where a whole callable was followed, at its end."""
        before = self.backend.allocated(work.pool)
        for part in work.statics:
            if part is not None:
                part.made, part.proxies = [], []
        work.running = [None] * len(work.running)
        for container in held:
            container.clear()
        self.saved += before - self.backend.allocated(work.pool)

    @contextmanager
    def _opened(self, work: _Work, part: PartPlan) -> Iterator[Opened]:
        facts = work.facts.parts[part.index]
        if part.kind is GRAPHED:
            yield from self._recording(work, facts)
        else:
            self._stand_in(work, facts)
            yield Opened(dict(work.env), stands=True)

    def _stand_in(self, work: _Work, part: PartFacts) -> None:
        """An eager part does not run while recording: what it made in warm-up stands for its outputs."""
        came = distinct_tensors([work.env[name] for name in part.part.reads])
        made = [
            came[number] if number is not None else value.detach().requires_grad_(spec.requires_grad)
            for value, spec, number in zip(part.values, part.made, part.returned, strict=True)
        ]
        leaves = [made[leaf.place] if isinstance(leaf, OutIndex) else leaf for leaf in part.make_leaves]
        work.env.update(zip(part.part.makes, _rebuild(part, leaves), strict=True))
        work.running.append(None)
        work.statics.append(None)
        work.scopes.append(dict(work.env))

    def _recording(self, work: _Work, part: PartFacts) -> Iterator[Opened]:
        """Record the forward of one graphed part; at the single `yield` its calls run."""
        statics: list[torch.Tensor] = []
        linked: list[bool] = []
        grad = work.facts.grad

        def proxy(tensor: torch.Tensor) -> torch.Tensor:
            leaf = part.reads[len(statics)]
            static, is_linked = self._static_input(work, tensor, leaf.source)
            statics.append(static)
            linked.append(is_linked)
            return proxy_of(static, leaf.spec.requires_grad and grad)

        # The values must lie in the static inputs before recording begins: the tape's kernels run on them.
        env_before, env = dict(work.env), dict(work.env)
        prepared = run_inputs(part.part, env, proxy)
        modules = _guards.modules_of(work.unit.layers)
        before = _guards.plain_attributes(modules)
        with _guards.kept_autocast(), in_place_words(part.part):
            with self.backend.capture(work.pool, self.generators) as graph:
                running, scope = open_part(part.part, env, lambda tensor: prepared[id(tensor)])
                with self.session.part(work.number, part.part.index):
                    yield Opened(scope)
                close_part(running, scope, env)
        _guards.refuse_host_effects(before, _guards.plain_attributes(modules), part.part.name, self._allowed(work))
        self.operations += graph.operations
        self._agree(part, running)
        outputs = [t.detach() for t in running.made]
        graph.replay()  # so that the next part is recorded on values
        made = [o.detach().requires_grad_(s.requires_grad) for o, s in zip(outputs, part.made, strict=True)]
        leaves = [made[leaf.place] if isinstance(leaf, OutIndex) else leaf for leaf in part.make_leaves]
        work.env.update(zip(part.part.makes, _rebuild(part, leaves), strict=True))
        work.running.append(running)
        work.scopes.append({name: env_before[name] for name in part.part.reads})
        work.statics.append(
            _PartWork(part, statics, linked, graph, outputs, running.made, running.proxies, [], {})
        )
        if self.recompute and work.unit.program.trace is None:
            self._drop_saved(work, running.made, running.proxies, running.leaves, running.values, scope, env, prepared)

    def _static_input(
        self, work: _Work, tensor: torch.Tensor, source: tuple[int, int] | None
    ) -> tuple[torch.Tensor, bool]:
        if source is not None:
            producer = work.statics[source[0]]
            if producer is not None:
                return producer.outputs[source[1]], True
        if source is None:  # the caller's: one buffer per slot, shared by all chunks that use the slot
            key = (work.sample.slot, TensorSpec.of(tensor), work.places[id(tensor)])
            static = self.inputs.get(key)
            if static is None:
                static = self.inputs[key] = empty_static(tensor)
        else:
            static = empty_static(tensor)
        with torch.no_grad():
            compact(static).copy_(compact(tensor.detach()))
        return static, False

    def _allowed(self, work: _Work) -> set[tuple[int, str]]:
        known = {attribute.place for attribute in work.unit.program.attributes}
        if self.plan.config.on_replay is not None:
            known |= _guards.declarable(_guards.modules_of(work.unit.layers))
        return known

    def _agree(self, part: PartFacts, running: Running) -> None:
        specs = tuple(TensorSpec.of(t) for t in running.made)
        if running.make_structure != part.make_structure or specs != part.made:
            raise CaptureError(
                f"part {part.part.name} made {[str(s) for s in specs]} while recording but "
                f"{[str(s) for s in part.made]} in warm-up: it takes another branch while it is captured"
            )
        for leaf, expected in zip(running.make_leaves, part.make_leaves, strict=True):
            if not same_constant(leaf, expected):
                raise CaptureError(
                    f"part {part.part.name} returned {leaf!r} while recording but {expected!r} in warm-up; a graph would "
                    "freeze it"
                )

    # --------------------------------------------------------------------------------------------------- backward

    def _backward(self, work: _Work, phases: tuple[Phase, ...]) -> None:
        for phase in phases:
            for index in range(len(work.statics) - 1, -1, -1):
                part = work.statics[index]
                if part is None or not part.facts.differentiable:
                    continue
                if phase is phases[0]:
                    part.grad_outputs = [self._grad_output(work, index, p, phases) for p in part.facts.grad_outputs]
                part.backward[phase] = tuple(self._record_backwards(work, part, phase, phase is phases[-1]))

    def _grad_output(
        self, work: _Work, index: int, place: int, phases: tuple[Phase, ...]
    ) -> torch.Tensor:
        """Where the gradient of an output is expected: where the next part's backward leaves it, if one reads it."""
        made = work.statics[index]
        assert made is not None
        output, strides = made.outputs[place], made.facts.grad_strides[made.facts.grad_outputs.index(place)]
        slot = work.sample.slot
        # A W step reads the arrived gradients again, long after others have written theirs.
        put_off = Phase.W in phases or work.facts.delayed
        # Callables that share a pool run one inside the other, so what arrives at one is used up before the next.
        where = (-1 - self.plan.pool_of(slot), 0, place) if self.plan.pools and not put_off else (slot, index, place)
        own = partial(self._arrival, where, output, strides)
        if put_off:
            return own()
        for later in work.statics[index + 1 :]:
            if later is None:
                continue
            for number, leaf in enumerate(later.facts.reads):
                if leaf.source == (index, place) and number in later.facts.grad_inputs:
                    results = _usual(later.backward).results
                    result = results[later.facts.grad_inputs.index(number)]
                    if result is not None and result.stride() == strides and _is_alone(result, results):
                        return result
            break  # anything further away adds to that gradient, so it arrives in other memory
        return own()

    def _arrival(
        self, where: tuple[int, int, int], output: torch.Tensor, strides: tuple[int, ...]
    ) -> torch.Tensor:
        """Memory for an arriving gradient: one for all graph sets that take turns in a slot, or a pool. where: (slot, or
        -1 - pool, part, output)."""
        key = (*where, output.shape, strides, output.dtype, output.device)
        if key not in self.arrivals:
            made = torch.empty_strided(output.shape, strides, dtype=output.dtype, device=output.device)
            self.arrivals[key] = made.fill_(0)
        return self.arrivals[key]

    def _record_backwards(
        self, work: _Work, part: _PartWork, phase: Phase, last_phase: bool
    ) -> list[BackwardGraph]:
        recorded: list[BackwardGraph] = []
        places = part.facts.grad_inputs if phase is not Phase.W else ()
        indices = part.facts.parameters if phase is not Phase.I else ()
        parameters = [self.facts.parameters.alias[i] for i in indices]
        adding = [i for i in indices if i in self.buffers]
        if not places and not parameters:
            return recorded
        for number, pattern in enumerate(part.facts.patterns):
            keep = self.hold or not last_phase or number < len(part.facts.patterns) - 1
            arriving = [g for g, there in zip(part.grad_outputs, pattern, strict=True) if there]

            def finish(
                made: Sequence[torch.Tensor],
                proxies: Sequence[torch.Tensor],
                pattern: Pattern = pattern,
                arriving: Sequence[torch.Tensor] = arriving,
                keep: bool = keep and not self.recompute,
            ) -> Finished:
                outputs = [made[p] for p, there in zip(part.facts.grad_outputs, pattern, strict=True) if there]
                wanted = [*(proxies[i] for i in places), *parameters]
                with torch.autocast(self.backend.device.type, enabled=False), NoRandom(part.facts.part.name):
                    found, _ = differentiate(outputs, wanted, arriving, work.facts.reentrant, retain_graph=keep)
                    results = list(found)
                    self._add(results, len(places), indices)
                    aliased = [self._aliased(index) for index in indices]
                    results[len(places) :] = _apart(results[len(places) :], aliased)
                    if recorded:
                        results = _share_results(results, recorded[0].results)
                        return results, same_arena(recorded[0].arena, results, recorded[0].results)
                    mine = enumerate(zip(indices, aliased, strict=True), start=len(places))
                    return pack(results, [n for n, (index, alias) in mine if index not in self.buffers and not alias])

            with self._marked(indices) as marks:
                if self.recompute:
                    again = self._again(work)
                    graph, (results, arena), part.again = again.record(part.facts, part.inputs, finish, part.again)
                else:
                    with self.backend.capture(work.pool, self.generators) as graph:
                        results, arena = finish(part.made, part.proxies)
            self.operations += graph.operations
            held = [None if r is None else r.detach() for r in results]
            if adding:
                held[len(places) :] = [
                    None if index in self.buffers else r for index, r in zip(indices, held[len(places) :], strict=True)
                ]
            recorded.append(BackwardGraph(graph, pattern, tuple(held), arena, tuple(marks)))
            if part.facts.delayed is not None:
                self._record_delayed(work, part, part.facts.delayed, pattern)
        return recorded

    def _again(self, work: _Work) -> SecondForward[Finished]:
        return SecondForward(
            partial(self.backend.capture, work.pool, self.generators),
            self.backend,
            work.unit,
            work.sample,
            work.facts.grad,
            tuple(work.scopes),
            tuple(self.facts.parameters.real),
            self._agree,
        )

    def _record_delayed(
        self, work: _Work, part: _PartWork, delayed: _delayed.DelayedWork, pattern: Pattern
    ) -> None:
        """The graph of `backward_dw()`, for what the backward that was recorded last has put off."""
        name, known = part.facts.part.name, self.facts.parameters
        theirs = {known.index_of(parameter) for owner in delayed.owners for parameter in owner.parameters()}
        with (
            torch.autocast(self.backend.device.type, enabled=False),
            torch.no_grad(),
            self._marked([index for index in theirs if index is not None]) as marks,
        ):
            with self.backend.capture(work.pool, self.generators) as graph, NoRandom(name):
                found = _delayed.collect(delayed.owners, known, {})
        _delayed.require_same(delayed, found, name)
        self.operations += graph.operations
        results = tuple(found[delivery.index].detach() for delivery in delayed.deliveries)
        part.backward[Phase.W] = (
            *part.backward.get(Phase.W, ()),
            BackwardGraph(graph, pattern, results, None, tuple(marks)),
        )

    @contextmanager
    def _marked(self, indices: Sequence[int]) -> Iterator[list[tuple[int, str, Any]]]:
        """Notes which plain attributes of parameters the Python inside sets: a replay, which runs none, sets them too."""
        real, alias = self.facts.parameters.real, self.facts.parameters.alias
        marks: list[tuple[int, str, Any]] = []
        for index in indices:
            if alias[index] is not real[index]:
                alias[index].__dict__.update(real[index].__dict__)
                if _ADDED in real[index].__dict__:  # set to what it may have been already
                    alias[index].__dict__[_ADDED] = False
        before = {index: dict(alias[index].__dict__) for index in indices}
        yield marks
        for index in indices:
            marks += [
                (index, name, value)
                for name, value in alias[index].__dict__.items()
                if isinstance(value, bool | int | float | str) and before[index].get(name, marks) != value
            ]

    def _aliased(self, index: int) -> bool:
        """Whether the gradient of this parameter is handed out as the static buffer."""
        return self.plan.config.grads == "alias" or id(self.facts.parameters.real[index]) in self.plan.alias_parameters

    def _add(self, results: list[torch.Tensor | None], offset: int, indices: Sequence[int]) -> None:
        """grads="accumulate": the graph adds into the buffers, one foreach for all."""
        pairs = [
            (self.buffers[index], result)
            for index, result in zip(indices, results[offset:], strict=True)
            if index in self.buffers and result is not None
        ]
        if pairs:
            with torch.no_grad():
                torch._foreach_add_([b for b, _ in pairs], [r for _, r in pairs])


_ADDED = "grad_added_to_main_grad"  # set by kernels that add into main_grad, for Megatron-LM's and TE's hooks


def accumulate_buffers(facts: WarmupFacts) -> dict[int, torch.Tensor]:
    """The gradient buffers of grads="accumulate": `main_grad`, else the `.grad` that exists, else a new one.

    A parameter used in more than one part goes the "return" way: (G + a) + b is not G + (a + b).
    """
    uses: dict[int, int] = {}
    for unit in (sets[0] for sets in facts.units):
        for part in unit.parts:
            for owner in () if part.delayed is None else part.delayed.owners:  # these see to their gradients themselves
                for index in map(facts.parameters.index_of, owner.parameters()):
                    uses[-1 if index is None else index] = 2
            for index in part.parameters:
                uses[index] = uses.get(index, 0) + (1 if part.part.kind is GRAPHED else 2)
    buffers = {}
    for index, count in sorted(uses.items()):
        if count == 1 and index >= 0:
            real = facts.parameters.real[index]
            main = getattr(real, "main_grad", None)
            if isinstance(main, torch.Tensor):
                buffers[index] = main
            else:
                buffers[index] = real.grad if real.grad is not None else torch.zeros_like(real)
    return buffers


def record(
    facts: WarmupFacts,
    backend: Backend,
    pool: object | None,
    kept: list[Any],
    generators: Sequence[torch.Generator] = (),
    session: Session | None = None,
) -> CaptureSet:
    """Record everything; the caller keeps and restores state, and has set up aliases and the backend's session."""
    recorder = Recorder(facts, backend, pool, generators, session)
    if facts.plan.config.grads == "accumulate":
        recorder.buffers = accumulate_buffers(facts)
    try:
        return recorder.run(kept)
    except GraphcapError:
        raise
    except torch.OutOfMemoryError as error:
        raise CaptureError(f"out of memory while recording: {error}") from error
    except Exception as error:
        raise CaptureError(f"recording failed: {type(error).__name__}: {error}") from error


def _apart(
    results: Sequence[torch.Tensor | None], aliased: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Gradients that become `.grad` as they are: no two of them on one memory (the gradients of a and b in a + b are)."""
    seen: set[int] = set()
    apart: list[torch.Tensor | None] = []
    for result, as_it_is in zip(results, aliased, strict=True):
        place = 0 if result is None else result.untyped_storage().data_ptr()
        apart.append(result.clone() if result is not None and as_it_is and place in seen else result)
        seen.add(place)
    return apart


def _is_alone(result: torch.Tensor, results: Sequence[torch.Tensor | None]) -> bool:
    """Whether no other gradient lies there (those of a and b in a + b do). What an eager part adds to one of them is copied
    in, and must not change the other."""
    place = result.untyped_storage().data_ptr()
    return sum(other is not None and other.untyped_storage().data_ptr() == place for other in results) == 1


def _share_results(
    results: Sequence[torch.Tensor | None], first: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Let a second pattern leave its gradients where the first one does, so that both need the memory once."""
    shared: list[torch.Tensor | None] = list(results)
    for i, (result, home) in enumerate(zip(results, first, strict=True)):
        if result is not None and home is not None and TensorSpec.of(result.detach()) == TensorSpec.of(home):
            home.copy_(result)
            shared[i] = home
    return shared


def _usual(backward: dict[Phase, tuple[BackwardGraph, ...]]) -> BackwardGraph:
    return next(graphs[0] for phase, graphs in backward.items() if phase is not Phase.W and graphs)


def _rebuild(part: PartFacts, leaves: Sequence[Any]) -> list[Any]:
    made: list[Any] = unflatten(part.make_structure, leaves)
    return made


def _frozen(work: _Work) -> GraphSet:
    parts = tuple(
        None
        if part is None
        else PartGraphs(
            part.facts,
            tuple(part.inputs),
            tuple(part.linked),
            unless_empty(part.forward),
            tuple(part.outputs),
            tuple(part.grad_outputs),
            {p: tuple(replace(g, graph=unless_empty(g.graph)) for g in graphs) for p, graphs in part.backward.items()},
            part.again,
        )
        for part in work.statics
    )
    return GraphSet(work.unit, work.facts, work.sample.slot, parts)
