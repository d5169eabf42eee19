"""What warm-up found, as frozen records: facts per part, per unit and per graph set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphcap import _guards
from graphcap._delayed import DelayedWork
from graphcap._plan import CapturePlan, PartPlan, UnitPlan
from graphcap._tensors import Structure, TensorSpec

Pattern = tuple[bool, ...]  # per differentiable output of a part: does a gradient arrive


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor that comes into a part: its spec, and where it was made (part and output number), if by a part."""

    spec: TensorSpec
    source: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What was seen of one part.

    reads: the tensors that come in, each object once; read_index: for every tensor leaf of the part's values, its place
    in `reads`. made: TensorSpecs (each tensor object once) that go out; make_leaves: for every leaf of `makes`, its place
    in `made`, or the constant. patterns: which outputs get gradients, one entry per way in which the caller may start a
    backward, the usual one first. grad_strides: those with which the gradient of each differentiable output arrives,
    since kernels, and so bits, depend on them. grad_inputs, parameters: which of `reads`, and which parameters (indices
    into Parameters), get a gradient here. reach[i]: which results (inputs, then parameters) output i leads to.
    repeated, cast: parameters that are used more than once here, that are converted to another dtype here. returned[i]:
    the place in `reads` of the tensor that an eager part hands on as it came, where output i is one.
    values: copies of what an eager part made, so that recording runs on real values. delayed: what its modules put off
    in `backward` and do in `backward_dw()`. changes_state: an eager part changed a buffer or an attribute, so it must not
    run twice; leaves_attributes: the latter; buffers: those that it read (all for recompute).
    """

    part: PartPlan
    read_structure: Structure
    read_constants: tuple[Any, ...]
    read_index: tuple[int, ...]
    reads: tuple[Leaf, ...]
    make_structure: Structure
    make_leaves: tuple[Any, ...]
    made: tuple[TensorSpec, ...]
    patterns: tuple[Pattern, ...]
    grad_strides: tuple[tuple[int, ...], ...]
    grad_inputs: tuple[int, ...]
    parameters: tuple[int, ...]
    reach: tuple[frozenset[int], ...]
    repeated: tuple[int, ...]
    cast: tuple[int, ...]
    returned: tuple[int | None, ...]
    values: tuple[torch.Tensor, ...] = ()
    delayed: DelayedWork | None = None
    changes_state: bool = False
    leaves_attributes: bool = False
    buffers: tuple[torch.Tensor, ...] = ()

    @property
    def differentiable(self) -> bool:
        return bool(self.grad_inputs or self.parameters)

    @property
    def grad_outputs(self) -> tuple[int, ...]:
        """The places in `made` of the outputs that require grad."""
        return tuple(i for i, spec in enumerate(self.made) if spec.requires_grad)


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What was seen of one unit with one signature of arguments.

    graphed_modules, eager_modules: ids of the modules that parts of each kind called. read_addresses: of the tensors that
    graphed parts of a declared cut read. changed_by_eager: attributes (id of the module, name) that EAGER parts changed.
    """

    unit: UnitPlan
    parts: tuple[PartFacts, ...]
    grad: bool
    reentrant: bool
    graphed_modules: frozenset[int]
    eager_modules: frozenset[int]
    used_parameters: frozenset[int]
    read_addresses: frozenset[int]
    changed_by_eager: frozenset[tuple[int, str]]

    @property
    def delayed(self) -> bool:
        """Whether weight gradients are left to `backward_dw()`."""
        return self.grad and any(part.delayed is not None for part in self.parts)


@dataclass(frozen=True, slots=True)
class WarmupFacts:
    """What warm-up found: facts per unit and graph set."""

    plan: CapturePlan
    parameters: _guards.Parameters
    units: tuple[tuple[UnitFacts, ...], ...]  # [unit][graph set]
