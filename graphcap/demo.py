"""The demo job: a byte-level language model on English text, trained graphed and eagerly side by side.

`run` trains two models from one seed on the same batches in the same order and compares them bit for bit after every
step. The text is the help that every Python carries (`pydoc_data.topics`). Printing is the command line's part.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from graphcap import testing
from graphcap._demo_settings import DTYPES, DemoSettings, ResolvedSettings
from graphcap._demo_sides import (
    Batch,
    EagerSteps,
    Kind,
    PlainCalls,
    Side,
    StepWise,
    Value,
    draw_batches,
    gradients_of,
    run_pass,
    state_of,
    update,
)
from graphcap.hybrid import HybridModel
from graphcap.make_graphed import capture

__all__ = ["DTYPES", "CaptureFacts", "DemoResult", "DemoSettings", "DemoStep", "Difference", "run"]

LEARNING_RATE: Final = 3e-3  # AdamW; the loss falls visibly within 20 steps


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value that was not the same on both sides."""

    step: int
    kind: Kind
    name: str
    detail: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind} {self.name}: {self.detail}"


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One step of both sides: mean losses over the microbatches, seconds of forward and backward."""

    step: int
    eager_loss: float
    graphed_loss: float
    eager_seconds: float
    graphed_seconds: float
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """What was captured: `quantization` says by whom, `plan` is the printed plan, operations those that all graphs hold."""

    backend: str
    device: str
    quantization: str | None
    plan: str
    graphs: int
    breaks: int
    slots: int
    static_bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class DemoResult:
    """equal: every step was, and the comparison could have failed. idle: parameters of experts that no token visited.
    replays and eager_calls: how often the graphed side's chunks ran as graphs, and as plain modules."""

    equal: bool
    verdict: str
    steps: tuple[DemoStep, ...]
    idle: tuple[str, ...]
    replays: int
    eager_calls: int

    @property
    def eager_seconds(self) -> float:
        """Median per step."""
        return statistics.median(step.eager_seconds for step in self.steps)

    @property
    def graphed_seconds(self) -> float:
        """Median per step."""
        return statistics.median(step.graphed_seconds for step in self.steps)


def run(
    settings: DemoSettings,
    on_capture: Callable[[CaptureFacts], None] = lambda facts: None,
    on_step: Callable[[DemoStep], None] = lambda step: None,
) -> DemoResult:
    """Capture, train side by side, compare; the callbacks hear of each stage. Stops at the first difference."""
    chosen = settings.resolved()
    with testing.deterministic(chosen.device), _one_thread():
        twins = _Twins(chosen)
        on_capture(twins.facts())
        unsteady = twins.eager_against_eager()
        if unsteady is not None:
            return twins.result(f"eager differs from eager, so nothing can be judged bit for bit: {unsteady}")
        for step in range(settings.steps):
            done = twins.step(step)
            on_step(done)
            if done.difference is not None:
                return twins.result(f"first difference: {done.difference}")
        return twins.result(twins.doubt())


class _Twins:
    """The graphed model and its eager twin, from one seed."""

    def __init__(self, chosen: ResolvedSettings) -> None:
        self.chosen, self.order = chosen, chosen.order
        model, twin = _build(chosen), _build(chosen)
        self.graphed = _capture(model, chosen)
        plain = chosen.settings.schedule == "none"
        self.graphed_side = _side(model, PlainCalls(self.graphed) if plain else self.graphed)
        self.eager_side = _eager_side(twin, chosen)
        self.started_as = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.arrived: set[str] = set()  # parameters that ever had a gradient,
        self.received: set[str] = set()  # and one that was not zero
        self.done: list[DemoStep] = []

    def facts(self) -> CaptureFacts:
        plan, device = self.graphed.plan, self.chosen.device
        return CaptureFacts(
            backend=self.chosen.backend,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            quantization=_quantization(self.chosen),
            plan=str(plan),
            graphs=plan.graphs,
            breaks=len(plan.breaks),
            slots=plan.slots,
            static_bytes=plan.static_bytes,
            operations=self.graphed.stats.operations,
        )

    def eager_against_eager(self) -> Difference | None:
        """One pass of two more copies: where eager does not repeat itself, equality of a graph means nothing."""
        first, second = (_eager_side(_build(self.chosen), self.chosen) for _ in range(2))
        batches = _batches(self.chosen, 0)
        values = [[*run_pass(side, self.order, batches)[1], *gradients_of(side)] for side in (first, second)]
        return _first_difference(0, *values)

    def step(self, step: int) -> DemoStep:
        """One step of both sides; everything is compared before the next one."""
        batches = _batches(self.chosen, step)
        eager_loss, eager_made, eager_seconds = self._timed_pass(self.eager_side, batches)
        graphed_loss, graphed_made, graphed_seconds = self._timed_pass(self.graphed_side, batches)
        gradients = list(gradients_of(self.graphed_side))
        self.arrived |= {v.name for v in gradients if v.value is not None}
        self.received |= {v.name for v in gradients if v.value is not None and bool(v.value.count_nonzero())}
        difference = _first_difference(
            step, [*graphed_made, *gradients], [*eager_made, *gradients_of(self.eager_side)]
        )
        update(self.graphed_side)
        update(self.eager_side)
        difference = difference or _first_difference(
            step, list(state_of(self.graphed_side)), list(state_of(self.eager_side))
        )
        self.done.append(DemoStep(step, eager_loss, graphed_loss, eager_seconds, graphed_seconds, difference))
        return self.done[-1]

    def _timed_pass(self, side: Side, batches: list[Batch]) -> tuple[float, list[Value], float]:
        side.optimizer.zero_grad(set_to_none=True)
        _synchronize(self.chosen.device)
        start = time.perf_counter()
        loss, made = run_pass(side, self.order, batches)
        _synchronize(self.chosen.device)
        return loss, made, time.perf_counter() - start

    def doubt(self) -> str | None:
        """Equal, but could it have failed? None if so."""
        silent = [name for name in self.started_as if name not in self.received and name not in self.idle()]
        if silent:
            names = ", ".join(silent)
            return f"equal, but that proves little: the gradients of {names} were zero or None in every step"
        weights = dict(self.graphed_side.model.named_parameters())
        if all(torch.equal(before, weights[name].detach()) for name, before in self.started_as.items()):
            return "equal, but that proves little: the weights never moved"
        return None

    def idle(self) -> tuple[str, ...]:
        """Parameters of experts that never had a gradient: no token went there."""
        return tuple(name for name in self.started_as if ".expert_mlps." in name and name not in self.arrived)

    def result(self, problem: str | None) -> DemoResult:
        """The end of a run; `problem` None means that all is well."""
        steps, stats = tuple(self.done), self.graphed.stats
        verdict = problem or f"equal on all {len(steps)} steps"
        return DemoResult(problem is None, verdict, steps, self.idle(), stats.replays, sum(stats.eager.values()))


def _build(chosen: ResolvedSettings) -> HybridModel:
    """Built from the seed, not copied: modules of Transformer Engine that have run can't be."""
    torch.manual_seed(chosen.settings.seed)
    with torch.device(chosen.device):
        return HybridModel(chosen.config)


def _quantization(chosen: ResolvedSettings) -> str | None:
    """By whom, and under what."""
    config = chosen.config
    if config.quantization is None:
        return None
    maker = "the reference in plain torch"
    if config.quantization == "te":
        maker = f"Transformer Engine {importlib.import_module('transformer_engine').__version__}"
    return f"{maker}, delayed scaling, weights cast once a step; attention: {config.attention}, which is torch's"


def _capture(model: HybridModel, chosen: ResolvedSettings) -> Any:
    """The model, or under a schedule its chunks: the first takes tokens, the last labels too."""
    tokens, labels = _batches(chosen, 0)[0]
    spec = chosen.config.quant_spec if model.quantization is not None else None
    first = {"is_first_microbatch": True} if chosen.config.cache_weights else {}
    if chosen.settings.schedule == "none":
        return capture(model, (tokens, labels), first, backend=chosen.backend, quantization=spec)
    chunks = model.chunks(chosen.order.chunks)
    shape = (*tokens.shape, chosen.config.hidden)
    entries = [tokens] + [
        torch.zeros(shape, dtype=chosen.config.dtype, device=chosen.device, requires_grad=True) for _ in chunks[1:]
    ]
    samples = [(entry,) for entry in entries[:-1]] + [(entries[-1], labels)]
    named: list[dict[str, Any]] = [dict(first) for _ in chunks]
    if model.mtp is not None and len(chunks) > 1:
        named[-1]["tokens"] = tokens  # the last chunk embeds the tokens that its MTP layers look ahead to
    return capture(chunks, tuple(samples), tuple(named), order=chosen.order, backend=chosen.backend, quantization=spec)


def _eager_side(model: HybridModel, chosen: ResolvedSettings) -> Side:
    if chosen.settings.schedule == "none":
        return _side(model, PlainCalls(model))
    return _side(model, EagerSteps(chosen.order, model.chunks(chosen.order.chunks)))


def _side(model: HybridModel, steps: StepWise) -> Side:
    return Side(model, steps, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


def _first_difference(step: int, graphed: list[Value], eager: list[Value]) -> Difference | None:
    for a, b in zip(graphed, eager, strict=True):
        found = testing.difference(a.value, b.value)
        if found is not None:
            return Difference(step, a.kind, a.name, found)
    return None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Operators this small take many times longer where several threads wait for each other on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _batches(chosen: ResolvedSettings, step: int) -> list[Batch]:
    """One (tokens, labels) per microbatch of the step: the text at other places every time."""
    settings = chosen.settings
    return draw_batches(chosen.order.microbatches, settings.tokens, f"{settings.seed}/{step}", chosen.device)
