"""Texts about a plan: parts, breaks with reasons, slots, bytes. Reads records and changes nothing."""

from __future__ import annotations

from graphcap._plan import CapturePlan, UnitPlan
from graphcap.partial_layer import GRAPHED


def plan_text(plan: CapturePlan) -> str:
    """The plan as lines: a head with counts and bytes, one per part, then the slots that several microbatches share."""
    lines = [
        f"{_counted(plan.graphs, 'graphed part')}, {_counted(len(plan.breaks), 'break')}, {_counted(plan.slots, 'slot')}, "
        f"{_static(plan)}"
    ]
    if plan.config.recompute is not None and plan.static_bytes:
        lines[0] += f", {_bytes(plan.recompute_saves)} of activations recomputed instead of kept"
    for number, unit in enumerate(plan.units):
        if len(plan.units) > 1:
            lines.append(f"{unit.title}:")
        lines += _unit_lines(unit, {part for owner, part in plan.idle if owner == number})
    lines += _slot_lines(plan)
    return "\n".join(lines)


def _unit_lines(unit: UnitPlan, idle: set[int]) -> list[str]:
    lines = []
    for part in unit.parts:
        kind = "graph" if part.kind is GRAPHED else "first" if part.hoisted else "eager"
        kind = "views" if part.index in idle else kind
        reason = ", ".join(filter(None, ("hoisted" if part.hoisted else None, part.reason)))
        why = f"  ({reason})" if reason else ""
        makes = ", ".join(_short(name) for name in part.makes)
        lines.append(f"  {kind}  {part.name}  -> {makes}{why}")
    return lines


def _slot_lines(plan: CapturePlan) -> list[str]:
    lines = []
    for slot in range(plan.slots):
        users = [f"{use.chunk}F{use.microbatch}" for use in plan.slot_map.sharers(slot)]
        if len(users) > 1:
            lines.append(f"  slot {slot}: {', '.join(users)}")
    return ["shared slots:", *lines] if lines else []


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1].split("#")[0]


def _static(plan: CapturePlan) -> str:
    if not plan.static_bytes:
        return "not recorded yet"
    saved = f" ({_bytes(plan.shared_bytes)} saved by sharing)" if plan.shared_bytes > 0 else ""
    return f"{_bytes(plan.static_bytes)} static{saved}"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
