"""What warm-up refuses once it has facts: runs that differ, and parameters whose gradients parts would add in another order,
or in another precision, than eager does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphcap._facts import PartFacts, WarmupFacts
from graphcap._parts import OutIndex
from graphcap._plan import PartPlan
from graphcap._tensors import TensorSpec, same_constant
from graphcap.errors import CutError
from graphcap.partial_layer import GRAPHED


def refuse_change(before: Sequence[PartFacts], after: Sequence[PartFacts]) -> None:
    """Warm-up runs on equal arguments must agree: what changes between them can't be in a graph."""
    for old, new in zip(before, after, strict=True):
        if old.make_structure != new.make_structure or len(old.made) != len(new.made):
            raise CutError(f"part {old.part.name}: its outputs have another structure at every run")
        for a, b in zip(old.made, new.made, strict=True):
            if a != b:
                raise CutError(
                    f"part {old.part.name}: an output was {a} in one run and {b} in the next{_rest(a, b)}. What crosses a "
                    "break must have a static shape: let the eager part contain whatever reads the dynamic tensor"
                )
        if old.returned != new.returned or old.read_index != new.read_index:
            raise CutError(
                f"part {old.part.name}: it returned the very tensor it was given in one run and another one in the next. "
                "Return a new tensor always (x.view_as(x) is one), or never"
            )
        for x, y in zip(old.make_leaves, new.make_leaves, strict=True):
            if not (isinstance(x, OutIndex) and isinstance(y, OutIndex)) and not same_constant(x, y):
                raise CutError(
                    f"part {old.part.name}: it returned {x!r} in one run and {y!r} in the next; a graph would freeze it"
                )


def _rest(a: TensorSpec, b: TensorSpec) -> str:
    """What the short text of two specs does not show."""
    if str(a) != str(b):
        return ""
    return f" (strides {list(a.stride)} and {list(b.stride)}, requires_grad {a.requires_grad} and {b.requires_grad})"


def refuse_ambiguous_sums(facts: WarmupFacts) -> None:
    """A parameter used in several parts, and more than once in one that is not the last of them."""
    # Eager adds the gradients of single uses, the latest use first: (late + early_b) + early_a. A node adds its own
    # first: late + (early_b + early_a). The bits differ.
    for unit in (sets[0] for sets in facts.units):
        for number, part in enumerate(unit.parts):
            later = {index for other in unit.parts[number + 1 :] for index in other.parameters}
            for index in part.repeated:
                if index in later:
                    raise CutError(
                        f"parameter {facts.parameters.names[index]} is used more than once in part {part.part.name} and "
                        "again in a later part: its gradients would be added in another order than eager's. Use it once "
                        "per part, or let the part be EAGER"
                    )


def refuse_shared_casts(facts: WarmupFacts) -> None:
    """An autocast region casts a parameter once and adds the gradients of all its uses in the low precision; parts cast by
    themselves, and their gradients are added in the parameter's own. The region may surround the call, or be opened
    inside the callable and still be open at a break."""
    for unit in (sets[0] for sets in facts.units):
        seen: dict[tuple[int, int], str] = {}  # parameter, region -> the last part
        region = 0
        for part in unit.parts:
            closed = part.part.kind is not GRAPHED and not _inside_region(part.part)
            region += closed
            for index in part.cast:
                device = facts.parameters.real[index].device.type
                around = torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()
                key = (index, -1 if around else region)
                if key in seen:
                    raise CutError(
                        f"parameter {facts.parameters.names[index]} is cast by autocast in part {seen[key]} and again in "
                        f"part {part.part.name}: eager casts it once and adds its gradients in the low precision, graphs "
                        "can't. Use it in one part, or let every such region be torch.autocast(..., cache_enabled=False)"
                    )
                seen[key] = part.part.name
            region += closed


def _inside_region(part: PartPlan) -> bool:
    return any(getattr(call.run, "in_caching_autocast", False) for call in part.calls)
