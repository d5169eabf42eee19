"""An eager part at replay: ordinary Python, whose results must be what the next graph was captured with."""

from __future__ import annotations

from typing import Any

import torch

from graphcap._facts import PartFacts
from graphcap._parts import OutIndex, distinct_tensors
from graphcap._plan import PartPlan
from graphcap._tensors import flatten, same_constant
from graphcap.errors import InputMismatch
from graphcap.partial_layer import NOTHING, run_call


def run_eager(part: PartPlan, facts: PartFacts, env: dict[str, Any]) -> None:
    """Run an eager part as it is, and check that what it made is what the next graph expects."""
    scope = {NOTHING: None, **{name: env[name] for name in part.reads}}
    for call in part.calls:
        run_call(call, scope)
    makes = [scope[name] for name in part.makes]
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
