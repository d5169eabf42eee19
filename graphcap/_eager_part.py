"""An eager part at replay: ordinary Python, whose results must be what the next graph was captured with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from graphcap._facts import PartFacts, UnitFacts
from graphcap._parts import OutIndex, distinct_tensors
from graphcap._plan import PartPlan, UnitPlan
from graphcap._recompute import run_checkpointed
from graphcap._tensors import flatten, same_constant
from graphcap.errors import InputMismatch
from graphcap.partial_layer import NOTHING, Call, run_call


def state_of(unit: UnitPlan, facts: UnitFacts) -> tuple[torch.Tensor, ...]:
    """The parameters that eager parts alone may read. (What graphs read, their own backward looks at.)"""
    modules = [layer for layer in unit.layers if isinstance(layer, torch.nn.Module)]
    own = [p for m in modules for p in m.parameters() if id(p) not in facts.used_parameters]
    return tuple({id(parameter): parameter for parameter in own}.values())


def _made(part: PartPlan, before: Callable[[Call], None] | None, *values: Any) -> list[Any]:
    scope = {NOTHING: None, **dict(zip(part.reads, values, strict=True))}
    for call in part.calls:
        if before is not None:
            before(call)
        run_call(call, scope)
    return [scope[name] for name in part.makes]


def run_eager(
    part: PartPlan,
    facts: PartFacts,
    env: dict[str, Any],
    before: Callable[[Call], None],
    state: Sequence[torch.Tensor] | None = None,
) -> None:
    """Run an eager part as it is, and check that what it made is what the next graph expects. `before`: each call. With
    `state` (what it may read besides) it runs under torch's checkpoint, where no attributes are to be set."""
    values = [env[name] for name in part.reads]
    if state is not None and torch.is_grad_enabled():
        # Autograd keeps what is run again: `before` knows all values of the call, and would keep its last results alive.
        makes = run_checkpointed(part.name, partial(_made, part, None), values, (*state, *facts.buffers))
    else:
        makes = _made(part, before, *values)
    leaves, structure = flatten(makes)
    if structure != facts.make_structure:
        raise InputMismatch(f"eager part {part.name} returned another structure than at capture")
    for number, (leaf, expected) in enumerate(zip(leaves, facts.make_leaves, strict=True)):
        problem = _output_problem(leaf, expected, facts)
        if problem:
            raise InputMismatch(
                f"eager part {part.name}, output {number}: {problem}. What crosses a break must have a static shape and "
                "value: let the eager part contain whatever changes"
            )
    _require_identity(part, facts, distinct_tensors([env[name] for name in part.reads]), leaves)
    env.update(zip(part.makes, makes, strict=True))


def _run(part: PartPlan, before: Callable[[Call], None], *values: Any) -> list[Any]:
    scope = {NOTHING: None, **dict(zip(part.reads, values, strict=True))}
    for call in part.calls:
        before(call)
        run_call(call, scope)
    return [scope[name] for name in part.makes]


def _nothing(_: Call) -> None:
    """In place of what has been done already."""


def _require_identity(part: PartPlan, facts: PartFacts, came: list[torch.Tensor], leaves: list[Any]) -> None:
    """A tensor under two names gets the sum of both gradients in another order than two tensors do."""
    numbers = {id(tensor): number for number, tensor in enumerate(came)}
    for leaf, expected in zip(leaves, facts.make_leaves, strict=True):
        if isinstance(expected, OutIndex) and leaf.requires_grad:
            now, then = numbers.get(id(leaf)), facts.returned[expected.place]
            if now != then:
                what = ("the very tensor that it read", "a new tensor")
                raise InputMismatch(
                    f"eager part {part.name} returned {what[now is None]}, but {what[then is None]} at capture: gradients "
                    "would be added in another order than eager's. Return a new tensor always (x.view_as(x) is one)"
                )


def _output_problem(leaf: Any, expected: Any, facts: PartFacts) -> str | None:
    if isinstance(expected, OutIndex):
        if not isinstance(leaf, torch.Tensor):
            return f"expected a tensor ({facts.made[expected.place]}), got {leaf!r}"
        spec = facts.made[expected.place]
        return spec.difference(leaf, strict=False, grad_mode=torch.is_grad_enabled())
    if isinstance(leaf, torch.Tensor):
        return f"expected {expected!r}, got a tensor"
    return None if same_constant(expected, leaf) else f"expected {expected!r}, got {leaf!r}"
