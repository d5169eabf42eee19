"""Graphs under an overlapped schedule: slot 1 of every unit, recorded by `graphcap.capture` under the order in which the
schedule issues it. Each unit of each of the rank's chunks is one chunk of that order; with delayed weight gradients its
backward is an `I` and a `W` step, which are two graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphcap import CaptureConfig, Order, Phase, Step, capture
from graphcap.hybrid.schedule_nodes import Slot, Streams, Value
from graphcap.hybrid.schedule_units import Unit


class PreDispatchGraphs:
    """The graphs of slot 1. graphed: the captured object, whose plan and stats say what happened."""

    def __init__(
        self,
        units: Sequence[Sequence[Unit]],
        issued: Sequence[tuple[str, int, int, int]],
        sample: Tensor,
        delayed: bool,
        backend: str,
        options: dict[str, Any],
    ) -> None:
        """units: of each chunk. issued: (phase, chunk, unit, microbatch) of slot 1, in order."""
        recorded = {
            (chunk, place): unit
            for chunk, of_chunk in enumerate(units)
            for place, unit in enumerate(of_chunk)
            if unit.pre is not None
        }
        self._number = {where: number for number, where in enumerate(recorded)}
        steps = [Step(phase, self._number[chunk, place], microbatch) for phase, chunk, place, microbatch in issued]
        self.delayed = delayed
        options = {"config": CaptureConfig(), **options}
        self.graphed = capture(
            tuple(unit.pre for unit in recorded.values()),
            tuple(tuple(sample.clone().requires_grad_() for _ in _reads(unit)) for unit in recorded.values()),
            order=Order(steps),
            backend=backend,
            **options,
        )

    def node(
        self, slot: Slot, chunk: int, place: int, microbatch: int, streams: Streams, event: torch.cuda.Event | None
    ) -> GraphNode:
        return GraphNode(slot, self, self._number[chunk, place], microbatch, streams, event)

    def reset(self) -> None:
        """Forget what is in flight: after a step that failed."""
        self.graphed.reset()


def _reads(unit: Unit) -> tuple[str, ...]:
    assert unit.pre is not None
    return unit.pre.reads


@dataclass(slots=True)
class GraphNode:
    """Slot 1 of one microbatch, by graphs; as `Node` otherwise. Its outputs lie in the graphs' memory."""

    slot: Slot
    graphs: PreDispatchGraphs
    chunk: int
    microbatch: int
    streams: Streams
    event: torch.cuda.Event | None
    _inputs: tuple[Value, ...] = ()
    _outputs: tuple[Value, ...] = ()

    def _step(self, phase: Phase) -> Step:
        return Step(phase, self.chunk, self.microbatch)

    def forward(self, inputs: Sequence[Value]) -> tuple[Value, ...]:
        self._inputs = tuple(inputs)
        with self.streams.on("compute", self.event):
            for value in inputs:
                self.streams.used_here(value.content, value.stream, "compute")
            leaves = [value.content.detach().requires_grad_() for value in inputs]
            made = self.graphs.graphed.forward(self._step(Phase.F), *leaves)
        contents = (made,) if len(self.slot.makes) == 1 else made
        self._outputs = tuple(Value(content, "compute", static=True) for content in contents)
        return self._outputs

    def backward(self) -> None:
        graphed = self.graphs.graphed
        with self.streams.on("compute", self.event):
            grads = []
            for value in self._outputs:
                if value.differentiable:
                    self.streams.used_here(value.grad, value.grad_stream, "compute")
                    grads.append(value.grad)
            if self.graphs.delayed:
                found = graphed.input_grad(self._step(Phase.I), *grads)
            else:
                found = graphed.backward(self._step(Phase.B), *grads)
            for value, grad in zip(self._inputs, found, strict=True):
                value.add_grad(grad, "compute", self.streams)
        self._inputs, self._outputs = (), ()

    def backward_dw(self) -> bool:
        """The W step; False where the backward has computed weight gradients already."""
        if not self.graphs.delayed:
            return False
        with self.streams.on("compute", self.event):
            self.graphs.graphed.weight_grad(self._step(Phase.W))
        return True
