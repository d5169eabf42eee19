"""The result of recording, as frozen records: graphs and their static surfaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphcap import _guards
from graphcap._arena import Arena
from graphcap._facts import PartFacts, Pattern, UnitFacts
from graphcap._plan import CapturePlan, UnitPlan
from graphcap._recompute import Again
from graphcap.backends.base import Graph, Pool
from graphcap.order import Phase


@dataclass(frozen=True, slots=True)
class BackwardGraph:
    """A backward for one pattern of arriving gradients. results: one static tensor (or None) per wanted gradient; those
    that the arena holds lie in it. marks: attributes of parameters (index, name, value) that its Python sets, as
    Megatron's grad_added_to_main_grad."""

    graph: Graph
    pattern: Pattern
    results: tuple[torch.Tensor | None, ...]
    arena: Arena | None = None
    marks: tuple[tuple[int, str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PartGraphs:
    """The graphs and static surfaces of one graphed part in one graph set.

    inputs[i]: where read tensor i is expected. linked[i]: it is another part's static output (or passes through), so it
    is there already. outputs[i]: where made tensor i appears. grad_outputs: one per differentiable output.
    backward[phase]: one graph per pattern. Where weight gradients are delayed, those of W hold `backward_dw()`, and
    those of B come before them. again: with recompute, how those of the backward are replayed.
    """

    facts: PartFacts
    inputs: tuple[torch.Tensor, ...]
    linked: tuple[bool, ...]
    forward: Graph
    outputs: tuple[torch.Tensor, ...]
    grad_outputs: tuple[torch.Tensor, ...]
    backward: dict[Phase, tuple[BackwardGraph, ...]]
    again: Again | None = None


@dataclass(frozen=True, slots=True)
class GraphSet:
    """Everything recorded for one unit and one slot. parts[i] is None for an eager part."""

    unit: UnitPlan
    facts: UnitFacts
    slot: int
    parts: tuple[PartGraphs | None, ...]

    def reset(self) -> None:
        """Free every graph; twice is fine."""
        for part in (part for part in self.parts if part is not None):
            part.forward.reset()
            for graph in (g for graphs in part.backward.values() for g in graphs):
                graph.graph.reset()


@dataclass(frozen=True, slots=True)
class CaptureSet:
    """The result of recording: graph sets per unit, parameters, accumulate buffers, and what must stay alive."""

    plan: CapturePlan
    parameters: _guards.Parameters
    sets: tuple[tuple[GraphSet, ...], ...]
    buffers: dict[int, torch.Tensor]  # parameter index -> gradient buffer that graphs add into
    pools: tuple[Pool, ...]
    kept: tuple[Any, ...]
    operations: int
