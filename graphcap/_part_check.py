"""One part at a time: the graph of every part against its own Python, on the same inputs. For testing.bisect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphcap import _compiled, _delayed, _guards, _warmup_pass
from graphcap._flight import Flight
from graphcap._parts import Running, differentiate, loss_of
from graphcap._plan import PartPlan, Sample, UnitPlan
from graphcap._replay import BoundPart, BoundSet
from graphcap._runner import Runner
from graphcap._tensors import CallSpec, flatten, tensors_of
from graphcap._trace_follow import TracedProgram
from graphcap.backends.refusal_modes import line_text
from graphcap.errors import GraphcapError
from graphcap.partial_layer import GRAPHED, Opened


class Judge(Protocol):
    """How a graphed value differs from the eager one, or None."""

    def __call__(self, a: Any, b: Any, /) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """The first difference. part: its number among all parts of its unit; name, before, after: the part's name and the
    breaks around it (None at an end); value: what differs; line: the user's line that made it, if known."""

    unit: str
    part: int
    name: str
    before: str | None
    after: str | None
    value: str
    difference: str
    line: str | None


class Found(Exception):
    """Ends a pass; nobody else sees it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class _Checked(_warmup_pass.Pass):
    """A pass through all parts, each run twice: as Python, then as its graph."""

    bound: BoundSet
    judge: Judge
    device: torch.device

    @contextmanager
    def _running(self, part: PartPlan, watch: bool) -> Iterator[Opened]:
        if part.kind is not GRAPHED:
            with super()._running(part, watch) as opened:
                yield opened
            return
        buffers = [(n, b) for m in self.modules for n, b in m.named_buffers()]
        before = [b.detach().clone() for _, b in buffers]
        random = _random(self.device)
        with super()._running(part, watch) as opened:
            yield opened
        self._replay(part, self.running[-1], buffers, before, random)

    def _replay(
        self,
        part: PartPlan,
        running: Running,
        buffers: list[tuple[str, torch.Tensor]],
        before: list[torch.Tensor],
        random: list[torch.Tensor],
    ) -> None:
        bound = self.bound.parts[part.index]
        assert bound is not None
        eager = [t.detach().clone() for t in running.made]
        after, end = [b.detach().clone() for _, b in buffers], _random(self.device)
        with torch.no_grad():
            for (_, buffer), value in zip(buffers, before, strict=True):
                buffer.data.copy_(value)  # the backward of the Python may have saved it: no new version
            _set_random(self.device, random)
            graphed = bound.run(running.inputs, None)
        names = {id(t): name for name in part.makes for t in tensors_of(flatten(self.env[name])[0])}
        for place, (a, b) in enumerate(zip(graphed, eager, strict=True)):
            name = names.get(id(running.made[place]), str(place))
            self.compare(part, f"output {place} ({_short(name)})", a, b, name)
        for (name, buffer), value in zip(buffers, after, strict=True):
            self.compare(part, f"buffer {name}", buffer.detach(), value)
        for a, b in zip(_random(self.device), end, strict=True):
            self.compare(part, "the random state", a, b)

    def compare(self, part: PartPlan, value: str, graphed: Any, eager: Any, made: str = "") -> None:
        difference = self.judge(graphed, eager)
        if difference is not None:
            raise Found(self.fault(part, value, difference, made))

    def fault(self, part: PartPlan, value: str, difference: str, made: str = "") -> Fault:
        parts = self.unit.parts
        before = parts[part.index - 1].name if part.index else None
        after = parts[part.index + 1].name if part.index + 1 < len(parts) else None
        return Fault(self.unit.title, part.index, part.name, before, after, value, difference, self._line(made))

    def _line(self, name: str) -> str | None:
        trace = self.unit.program.trace
        number = name.rpartition("#")[2].partition("@")[0].split(":")[1:2]
        if not isinstance(trace, TracedProgram) or not number or not number[0].isdigit():
            return None
        entries = trace.script.entries
        return line_text(entries[int(number[0])].place) if int(number[0]) < len(entries) else None

    # ----------------------------------------------------------------------------------------------------- backward

    def differentiated(self) -> None:
        """Both backwards of every part, last part first, on the gradients that eager gives."""
        value = self.unit.program.result(self.env)
        loss = loss_of(value)
        ends = [t for t in tensors_of(flatten(value)[0]) if t.requires_grad and id(t) in self.sources]
        seeds = [loss] if loss is not None and id(loss) in self.sources else ends
        arrived = {self.sources[id(t)]: _cotangent(t, n) for n, t in enumerate(seeds)}
        flight = Flight(self.bound.slot.generation, lambda: None)
        flight.ending = True  # no autograd pass runs here that could end it
        trainable = [(n, p) for n, p in enumerate(self.parameters.alias) if p.requires_grad]
        for running in reversed(self.running):
            index = running.part.index
            places = [n for n, t in enumerate(running.made) if t.requires_grad and (index, n) in arrived]
            if not places:
                continue
            wanted = [n for n, proxy in enumerate(running.proxies) if proxy.requires_grad]
            leaves = [*(running.proxies[n] for n in wanted), *(p for _, p in trainable)]
            gradients = [arrived[index, n] for n in places]
            bound = self.bound.parts[index]
            random = _random(self.device)
            found, self.reentrant = differentiate(
                [running.made[n] for n in places], leaves, [g.clone() for g in gradients], self.reentrant
            )
            inputs = dict(zip(wanted, found[: len(wanted)], strict=True))
            own = dict(zip((n for n, _ in trainable), found[len(wanted) :], strict=True))
            if bound is not None and bound.facts.differentiable:
                _set_random(self.device, random)
                given: list[torch.Tensor | None] = [arrived.get((index, n)) for n in range(len(running.made))]
                self._compare_gradients(bound, running, inputs, own, flight, given)
            for number, gradient in inputs.items():
                source = self.sources.get(id(running.inputs[number]))
                if source is not None and gradient is not None:
                    arrived[source] = arrived[source] + gradient if source in arrived else gradient

    def _compare_gradients(
        self,
        bound: BoundPart,
        running: Running,
        inputs: dict[int, torch.Tensor | None],
        own: dict[int, torch.Tensor | None],
        flight: Flight,
        given: Sequence[torch.Tensor | None],
    ) -> None:
        part, reads = running.part, len(bound.facts.reads)
        with torch.no_grad():
            for entry in bound.added:
                entry.buffer.zero_()
            results = bound.backward(flight, given)
        names = {id(t): n for n in part.reads for t in tensors_of(flatten(self.env.get(n))[0])}
        for number in bound.facts.grad_inputs:
            name = names.get(id(running.inputs[number]), str(number))
            self.compare(part, f"gradient of input {number} ({_short(name)})", results[number], inputs.get(number), name)
        returned = dict(zip(map(id, bound.returned), results[reads:], strict=False))
        added = {id(entry.parameter): entry.buffer for entry in bound.added}
        for number in bound.facts.parameters:
            real = self.parameters.real[number]
            result = added[id(real)] if id(real) in added else returned.get(id(real))
            eager = own.get(number)
            if id(real) in added and eager is None:
                continue  # a buffer to which nothing was added
            self.compare(part, f"gradient of {self.parameters.names[number]}", result, eager)


def unsplittable(runner: Runner) -> str | None:
    """Why the parts of a capture can't be run one by one, or None."""
    parts = [part for sets in runner.sets for bound in sets for part in bound.parts if part is not None]
    if runner.plan.config.recompute is not None:
        return "recompute='part' ties a backward to the forward before it"
    if any(part.quantized is not None for part in parts):
        return "it runs quantised modules, whose state moves along with the steps"
    if any(part.facts.delayed is not None for part in parts):
        return "it delays weight gradients"
    return None


def first_fault(
    runner: Runner, number: int, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], judge: Judge
) -> Fault | None:
    """The first part of unit `number` whose graph differs from its Python for this call. State and gradients of the
    modules are as before afterwards."""
    unit: UnitPlan = runner.plan.units[number]
    bound = runner.sets[number][unit.set_of[microbatch]]
    modules = _guards.modules_of(unit.layers)
    grad = bound.facts.grad and torch.is_grad_enabled()
    sample = Sample(bound.slot.number, args, kwargs, CallSpec.of(args, kwargs), (microbatch,))
    kept = [(p, p.grad) for p in (entry.parameter for part in bound.parts if part for entry in part.added)]
    with (
        _compiled.plain_or_refused(),
        _guards.kept_state(modules),
        _guards.leaf_aliases(modules) as aliases,
        _guards.kept_autocast(),
    ):
        parameters = _same_order(aliases, runner)
        run = _Checked(unit, sample, parameters, grad, modules, bound.facts.reentrant, _delayed.Trial(()))
        run.bound, run.judge, run.device = bound, judge, runner.backend.device
        bound.slot.generation += 1
        try:
            run.forward(watch=False)
            if grad:
                run.differentiated()
        except Found as found:
            return found.fault
        except GraphcapError as error:
            at = unit.parts[min(len(run.running), len(unit.parts) - 1)]
            return run.fault(at, "its Python", f"does not do what it did at capture: {error}")
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
    return None


def _same_order(aliases: _guards.Parameters, runner: Runner) -> _guards.Parameters:
    """The aliases of this pass under the numbers that the capture's parts know."""
    ordered = _guards.Parameters()
    captured = runner.capture.parameters
    for name, real in zip(captured.names, captured.real, strict=True):
        index = aliases.index_of(real)
        ordered.add(name, real, real if index is None else aliases.alias[index])
    return ordered


def _cotangent(tensor: torch.Tensor, number: int) -> torch.Tensor:
    if tensor.numel() == 1:
        return torch.ones_like(tensor)
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float32)
    return torch.empty_like(tensor).copy_(drawn).detach()


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1].split("#")[0]


def _random(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
