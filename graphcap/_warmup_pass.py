"""One forward and backward through all parts of a unit, and what was seen of each part: the unit of warm-up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from graphcap import _attributes, _delayed, _guards
from graphcap._crossings import Crossings
from graphcap._facts import Leaf
from graphcap._facts import PartFacts as PartFacts
from graphcap._facts import Pattern as Pattern
from graphcap._facts import UnitFacts as UnitFacts
from graphcap._facts import WarmupFacts as WarmupFacts
from graphcap._part_refusals import (
    refuse_sparse,
)
from graphcap._parts import (
    Running,
    close_part,
    differentiate,
    entry_values,
    in_place_words,
    loss_of,
    open_part,
    proxy_of,
    run_calls,
    sample_copies,
)
from graphcap._plan import PartPlan, Sample, UnitPlan
from graphcap._recompute import EagerWatch
from graphcap._tensors import TensorSpec, flatten, static_copy, tensors_of
from graphcap.errors import CutError, GraphcapError, SampleError
from graphcap.partial_layer import GRAPHED, Opened


class SetsAttributes(BaseException):
    """A graphed part sets tensor attributes that its plan does not name: plan again with them. No Exception, so that the
    user's `except Exception` lets it through."""

    def __init__(self, part: PartPlan, found: tuple[tuple[torch.nn.Module, str], ...]) -> None:
        super().__init__(part.name)
        self.part, self.found = part, found
        self.unit = 0  # the number of the unit, for whoever plans again


class Pass:
    """One forward and backward through all parts of a unit."""

    def __init__(
        self,
        unit: UnitPlan,
        sample: Sample,
        parameters: _guards.Parameters,
        grad: bool,
        modules: Sequence[torch.nn.Module],
        reentrant: bool,
        trial: _delayed.Trial,
        on_replay: bool = False,
        once: bool = False,
    ) -> None:
        self.once = once
        self.unit, self.parameters, self.grad, self.modules = unit, parameters, grad, modules
        self.reentrant, self.trial, self.on_replay = reentrant, trial, on_replay
        self.visited: list[set[int]] = []  # per part; only where weight gradients are delayed
        self.args, self.kwargs = sample_copies(sample)
        self.env = entry_values(unit, self.args, self.kwargs)
        self.sources: dict[int, tuple[int, int]] = {}
        self.running: list[Running] = []
        self.graphed_modules: set[int] = set()
        self.eager_modules: set[int] = set()
        self.used_parameters: set[int] = set()
        self.changed_by_eager: set[tuple[int, str]] = set()
        self.crossings: Crossings | None = None
        self.sets_tensors = False
        self.declared: set[tuple[int, str]] = set()  # plain attributes that graphed parts have changed
        self.recompute = False
        self._alive: list[Any] = []

    def forward(self, *, watch: bool) -> None:
        trace = self.unit.program.trace
        with torch.set_grad_enabled(self.grad):
            if trace is not None:
                opened = partial(self._running, watch=watch)
                self.graphed_modules |= trace.follow(self.args, self.kwargs, self.unit.parts, opened)
                return
            for part in self.unit.parts:
                with _guards.visited_modules() as visited, self._running(part, watch) as opened_part:
                    run_calls(part, opened_part.scope)
                if part.kind is GRAPHED:
                    self.graphed_modules |= visited

    @contextmanager
    def _running(self, part: PartPlan, watch: bool) -> Iterator[Opened]:
        """One part; its calls run inside."""
        eager = part.kind is not GRAPHED
        before = _guards.plain_attributes(self.modules) if watch or eager else None
        held = {} if eager or self.unit.program.trace is not None else _attributes.snapshot(self.modules)
        versions = _guards.state_versions(self.modules) if eager else None
        running, scope = open_part(part, self.env, self._proxy)
        with in_place_words(part), self._looked_at(part, running), ExitStack() as stack:
            visited = stack.enter_context(_guards.visited_modules()) if eager or self.trial.owners else set()
            watch_eager = stack.enter_context(EagerWatch()) if eager and self.recompute else None
            yield Opened(scope)
        close_part(running, scope, self.env)
        if self.trial.owners:  # a module whose forward is called is not called itself
            called = _guards.modules_of([getattr(call.run, "run", call.run) for call in part.calls])
            visited |= {id(module) for module in called}
        self.visited.append(visited)
        if eager:
            self.eager_modules |= visited
        if before is not None and eager:
            changed = _guards.changed_attributes(before, _guards.plain_attributes(self.modules))
            self.changed_by_eager |= changed
            running.leaves_attributes = bool(changed)
            running.changes_state = bool(changed) or versions != _guards.state_versions(self.modules)
            if watch_eager is not None:
                running.changes_state |= watch_eager.draws
                running.buffers = watch_eager.of(b for module in self.modules for b in module.buffers())
        elif before is None:
            self.sets_tensors = self.sets_tensors or bool(_attributes.changes(held, _attributes.snapshot(self.modules)))
        else:
            self._refuse_host_effects(part, before, held)
        if self.crossings is not None:
            self.crossings.made(part.name, part.kind, running.proxies, running.made)
        for place, tensor in enumerate(running.made):
            if running.returned[place] is None:
                self.sources[id(tensor)] = (part.index, place)
        self._alive.append(running)  # ids are only names while their objects live
        self.running.append(running)

    def _refuse_host_effects(
        self, part: PartPlan, before: _guards.Attributes, held: _attributes.Snapshot
    ) -> None:
        known = {attribute.place for attribute in self.unit.program.attributes}
        if self.unit.program.trace is None:
            found = _attributes.changes(held, _attributes.snapshot(self.modules))
            here = {a.place for a in self.unit.program.attributes if a.by == part.calls[-1].name}
            fresh = {place: module for place, (module, _) in found.items() if place not in here}
            if fresh:
                raise SetsAttributes(part, tuple((module, key) for (_, key), module in fresh.items()))
        after = _guards.plain_attributes(self.modules)
        if self.on_replay:
            plain = _guards.declarable(self.modules)
            self.declared |= (_guards.changed_attributes(before, after) & plain) - known
            known |= plain
        _guards.refuse_host_effects(before, after, part.name, known)

    @contextmanager
    def _looked_at(self, part: PartPlan, running: Running) -> Iterator[None]:
        """Under detector D2, if this pass has it. A cast that autocast made in one part is not for another."""
        if self.crossings is None:
            yield
            return
        with _guards.kept_autocast(), self.crossings.part(part.name, part.kind, running.proxies):
            yield

    def _proxy(self, tensor: torch.Tensor) -> torch.Tensor:
        return proxy_of(tensor, tensor.requires_grad and self.grad)

    def backward(self, *, keep_values: bool) -> tuple[list[PartFacts], bool]:
        """Differentiate the way in which a caller usually starts; in the last pass, with `keep_values`, every way."""
        shapes = [_Shape(running, self) for running in self.running]
        if self.grad:
            usual, *others = self._seeds(all_ways=keep_values and not self.trial.owners and not self.once)
            self._one_backward(shapes, usual)
            for seeds in others:
                before = [len(shape.patterns) for shape in shapes]
                try:
                    self._one_backward(shapes, seeds)
                except GraphcapError:
                    raise
                except Exception:
                    # A backward that frees what its forward saved (TE's modules) runs once. Then the graph for all outputs
                    # serves the other ways too, on zeros, as in torch's and TE's function.
                    for shape, count in zip(shapes, before, strict=True):
                        del shape.patterns[count:]
                    break
        return [shape.facts(keep_values) for shape in shapes], self.reentrant

    def _seeds(self, all_ways: bool) -> list[set[tuple[int, int]]]:
        """Sets of (part, place) from which a backward may start, the usual one first: the loss if there is one, else every
        output. Of up to three outputs, any subset; of more, each alone."""
        value = self.unit.program.result(self.env)
        held = [self.env[a.value] for a in self.unit.program.attributes if a.value is not None]
        every = {
            self.sources[id(t)]
            for t in tensors_of(flatten((value, held))[0])
            if t.requires_grad and id(t) in self.sources
        }
        loss = loss_of(value)
        usual = {self.sources[id(loss)]} if loss is not None and id(loss) in self.sources else every
        if not all_ways:
            return [usual]
        sizes = range(len(every), 0, -1) if len(every) <= 3 else (len(every), 1)
        ways = [set(subset) for size in sizes for subset in itertools.combinations(sorted(every), size)]
        return [usual, *(way for way in ways if way != usual)]

    def _one_backward(self, shapes: list[_Shape], seeds: set[tuple[int, int]]) -> None:
        arrived: dict[tuple[int, int], torch.Tensor] = {
            (part, place): torch.ones_like(self.running[part].made[place]) for part, place in seeds
        }
        for shape in reversed(shapes):
            running = shape.running
            places = [i for i, tensor in enumerate(running.made) if tensor.requires_grad]
            pattern = tuple((running.part.index, place) in arrived for place in places)
            shape.patterns.append(pattern)
            for place in places:
                if (running.part.index, place) in arrived:
                    shape.grad_strides.setdefault(place, dense_strides(arrived[running.part.index, place]))
            if not any(pattern):
                continue
            outputs = [running.made[p] for p in places if (running.part.index, p) in arrived]
            gradients = [arrived[running.part.index, p] for p in places if (running.part.index, p) in arrived]
            wanted = [p for p in running.proxies if p.requires_grad]
            trainable = [p for p in self.parameters.alias if p.requires_grad]
            results, self.reentrant = differentiate(outputs, [*wanted, *trainable], gradients, self.reentrant)
            self.trial.after_backward(running.part.index, self.visited[running.part.index], self.parameters)
            if running.part.kind is GRAPHED:
                refuse_sparse(results, running.part)
            for proxy, gradient in zip(wanted, results[: len(wanted)], strict=True):
                if gradient is not None:
                    number = next(i for i, p in enumerate(running.proxies) if p is proxy)
                    shape.grad_inputs.add(number)
                    source = self.sources.get(id(running.inputs[number]))
                    if source is not None:
                        arrived[source] = arrived[source] + gradient if source in arrived else gradient
            for parameter, gradient in zip(trainable, results[len(wanted) :], strict=True):
                if gradient is not None:
                    index = self.parameters.index_of(parameter)
                    assert index is not None
                    shape.parameters.add(index)
                    if running.part.kind is GRAPHED:
                        self.used_parameters.add(id(self.parameters.real[index]))


class _Shape:
    """Collects the facts of one part."""

    def __init__(self, running: Running, run_pass: Pass) -> None:
        self.running, self._pass = running, run_pass
        self.patterns: list[Pattern] = []
        self.grad_strides: dict[int, tuple[int, ...]] = {}
        self.grad_inputs: set[int] = set()
        self.parameters: set[int] = set()
        self.repeated: set[int] = set()
        self.cast: set[int] = set()
        if run_pass.grad:
            self._note_casts()
            if running.part.kind is GRAPHED:
                self._note_leaves()

    def _note_casts(self) -> None:
        for node, leaf in _guards.leaf_edges(t for t in self.running.made if t.requires_grad):
            index = self._pass.parameters.index_of(leaf)
            if index is not None and type(node).__name__ == "ToCopyBackward0":
                self.cast.add(index)

    def _note_leaves(self) -> None:
        """What a graphed part's outputs lead to gets gradients, whether or not one came in this run: an eager part may
        send none back for just these samples. Detector D1: every leaf is one of the proxies or a parameter."""
        running = self.running
        for leaf, count in _guards.leaves_of(t for t in running.made if t.requires_grad):
            index = self._pass.parameters.index_of(leaf)
            number = next((i for i, proxy in enumerate(running.proxies) if proxy is leaf), None)
            if index is not None:
                self._refuse_bypass(leaf, index)
                self.parameters.add(index)
                self._pass.used_parameters.add(id(self._pass.parameters.real[index]))
                if count > 1:
                    self.repeated.add(index)
            elif number is not None:
                self.grad_inputs.add(number)
            else:
                self._refuse_lost(leaf)

    def _refuse_lost(self, leaf: torch.Tensor) -> None:
        raise CutError(
            f"part {self.running.part.name} uses a tensor of shape {list(leaf.shape)} that requires grad but is neither an "
            "argument nor a parameter of the captured modules, so its gradient would be lost: register it as a parameter, "
            "or pass it as an argument"
        )

    def _refuse_bypass(self, leaf: torch.Tensor, index: int) -> None:
        parameters = self._pass.parameters
        if leaf is not parameters.alias[index]:
            raise CutError(
                f"part {self.running.part.name} reaches the parameter {parameters.names[index]} otherwise than as an "
                "attribute of its module (in a plain list, a closure?), so its gradient would be lost: read it from the "
                "module, or keep it in an nn.ParameterList"
            )

    def _reach(self, results: Sequence[torch.Tensor]) -> tuple[frozenset[int], ...]:
        """Per differentiable output the results that it leads to. What no edge shows (the parameters of a reentrant
        checkpoint), any output may lead to."""
        reach = [_reached(tensor, results) for tensor in self.running.made if tensor.requires_grad]
        every = frozenset(range(len(results)))
        hidden = every if self._pass.reentrant else every.difference(*reach)
        return tuple(reached | hidden for reached in reach)

    def facts(self, keep_values: bool) -> PartFacts:
        running, run_pass = self.running, self._pass
        parameters = tuple(sorted(self.parameters))
        grad_inputs = tuple(sorted(self.grad_inputs))
        results = [running.proxies[i] for i in grad_inputs] + [run_pass.parameters.alias[i] for i in parameters]
        differentiable = [tensor for tensor in running.made if tensor.requires_grad]
        patterns = tuple(dict.fromkeys(self.patterns))
        every = (True,) * len(differentiable)
        if differentiable and running.part.kind is GRAPHED and run_pass.once:
            patterns = (every,)
        elif differentiable and running.part.kind is GRAPHED and every not in patterns:
            patterns = (*patterns, every)
        leaves = tuple(
            Leaf(TensorSpec.of(t), run_pass.sources.get(id(t)))
            for t in running.inputs
        )
        values = _kept_values(running) if keep_values and running.part.kind is not GRAPHED else ()
        assert running.structure is not None
        assert running.make_structure is not None
        return PartFacts(
            running.part,
            running.structure,
            tuple(leaf for leaf in running.leaves if not isinstance(leaf, torch.Tensor)),
            tuple(running.read_index),
            leaves,
            running.make_structure,
            tuple(running.make_leaves),
            tuple(TensorSpec.of(t) for t in running.made),
            tuple(p for p in patterns if any(p)),
            tuple(
                self.grad_strides.get(place, dense_strides(tensor))
                for place, tensor in enumerate(running.made)
                if tensor.requires_grad
            ),
            grad_inputs,
            parameters,
            self._reach(results),
            tuple(sorted(self.repeated)),
            tuple(sorted(self.cast)),
            tuple(running.returned),
            values,
            run_pass.trial.work(running.part.index),
            running.changes_state,
            running.leaves_attributes,
            running.buffers,
        )


def _reached(output: torch.Tensor, results: Sequence[torch.Tensor]) -> frozenset[int]:
    leaves = [leaf for leaf, _ in _guards.leaves_of([output])]
    return frozenset(i for i, result in enumerate(results) if any(leaf is result for leaf in leaves))


def _kept_values(running: Running) -> tuple[torch.Tensor, ...]:
    try:
        return tuple(static_copy(tensor) for tensor in running.made)
    except SampleError as error:
        raise CutError(
            f"eager part {running.part.name} makes a tensor with elements that share memory (unfold, as_strided), which has "
            "no static copy: return .contiguous()"
        ) from error


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides for memory in which every element of a tensor of this layout has a place of its own."""
    return torch.empty_like(tensor, device="meta").stride()


# ------------------------------------------------------------------------------------------------------------ refusals
