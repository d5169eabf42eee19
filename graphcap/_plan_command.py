"""`graphcap plan MODULE:FACTORY`: a table of what capture would do with a model."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from graphcap._planned import LIKE_INPUT, Crossing, ModelPlan, PlannedPart, plan
from graphcap.errors import GraphcapError, PlanError

_KEYS = ("module", "sample_args", "sample_kwargs", "break_at", "order", "config", "stand_ins")


def planned(place: str, break_at: Sequence[str], order: str | None, like_input: Sequence[str]) -> ModelPlan:
    """Call the factory and plan what it gives. The command line adds to what the factory says, or replaces its order."""
    request = _request(place, _factory(place)())
    if break_at:
        own = request.get("break_at", ())
        own = tuple(own) if isinstance(own, tuple | list) else (own,)
        request["break_at"] = (*own, *break_at)
    if order is not None:
        request["order"] = order
    stand_ins = {**(request.get("stand_ins") or {}), **dict.fromkeys(like_input, LIKE_INPUT)}
    if stand_ins:
        request["stand_ins"] = stand_ins
    return plan(request.pop("module"), request.pop("sample_args"), request.pop("sample_kwargs", None), **request)


def _factory(place: str) -> Any:
    name, colon, attribute = place.partition(":")
    if not colon or not name or not attribute:
        raise PlanError(f"{place!r}: expected MODULE:FACTORY, such as mypackage.models:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found: Any = importlib.import_module(name)
    except Exception as error:
        raise PlanError(f"{place}: importing {name} failed: {type(error).__name__}: {error}") from error
    for step in attribute.split("."):
        if not hasattr(found, step):
            raise PlanError(f"{place}: {name} has no {attribute}")
        found = getattr(found, step)
    if not callable(found):
        raise PlanError(f"{place} is a {type(found).__name__}, not a function that builds a model")

    def build() -> Any:
        try:
            return found()
        except GraphcapError:
            raise
        except Exception as error:
            raise PlanError(f"{place}() failed: {type(error).__name__}: {error}") from error

    return build


def _request(place: str, given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        wrong = [str(key) for key in given if key not in _KEYS]
        missing = [key for key in _KEYS[:2] if key not in given]
        if wrong or missing:
            raise PlanError(f"{place}() returned a dict with {', '.join(map(str, given))}: it takes {', '.join(_KEYS)}")
        return dict(given)
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        size = f" of {len(given)}" if isinstance(given, tuple) else ""
        raise PlanError(
            f"{place}() returned a {type(given).__name__}{size}: expected (model, sample_args), (model, sample_args, "
            "sample_kwargs) or a dict of graphcap.plan's arguments"
        )
    return dict(zip(_KEYS, given, strict=False))


def render(found: ModelPlan) -> tuple[str, Table, str]:
    """Head, table and foot."""
    forward, backward = found.recorded
    head = (
        f"{_counted(found.graphs, 'graph')} and {_counted(len(found.breaks), 'break')} in a forward, on {found.device}; "
        f"{_counted(found.slots, 'set')} of static buffers; capture records {forward} forward and {backward} "
        "backward graphs"
    )
    table = Table(show_lines=False, pad_edge=False)
    for title in ("#", "", "part", "makes", "bytes", "parameters", "bytes"):
        table.add_column(title, justify="right" if title in ("bytes", "parameters") else "left", overflow="fold")
    several = len(found.cut.units) > 1
    for part in found.parts:
        number = f"{part.unit}.{part.index}" if several else str(part.index)
        made = "\n".join(map(_tensor, part.makes)) or "-"
        size = sum(crossing.bytes for crossing in part.makes)
        cells = (number, part.kind, _name(part), made, amount(size), f"{part.parameters:,}", amount(part.parameter_bytes))
        table.add_row(*(_escaped(cell) for cell in cells))
    return head, table, _foot(found)


def _name(part: PlannedPart) -> str:
    return part.name + (" *" if part.stood_in else "")


def _foot(found: ModelPlan) -> str:
    lines = []
    for part in (part for part in found.parts if part.kind in ("eager", "first")):
        place = f"\n      at {part.place}" if part.place else ""
        lines.append(f"break {part.index}: {part.name}\n      {part.reason or 'declared EAGER'}{place}")
        if part.stood_in:
            lines.append("    * did not run: its result is what was declared")
    lines += [
        f"static inputs   {', '.join(map(_tensor, found.inputs)) or 'none'}",
        f"outputs         {', '.join(map(_tensor, found.outputs)) or 'none'}",
        f"parameters      {found.parameters:,}, {amount(found.parameter_bytes)}",
        f"static tensors  {amount(found.static_bytes)} per set of buffers, gradients not counted",
    ]
    return "\n".join(lines)


def _tensor(crossing: Crossing) -> str:
    return f"{crossing.dtype}{list(crossing.shape)}{' grad' * crossing.differentiable}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")


def amount(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def as_json(found: ModelPlan) -> str:
    forward, backward = found.recorded
    content = {
        "device": found.device,
        "order": str(found.cut.order),
        "graphs": found.graphs,
        "breaks": len(found.breaks),
        "slots": found.slots,
        "recorded": {"forward": forward, "backward": backward},
        "parameters": found.parameters,
        "parameter_bytes": found.parameter_bytes,
        "static_bytes": found.static_bytes,
        "inputs": [asdict(crossing) for crossing in found.inputs],
        "outputs": [asdict(crossing) for crossing in found.outputs],
        "parts": [asdict(part) for part in found.parts],
    }
    return json.dumps(content, indent=1) + "\n"
