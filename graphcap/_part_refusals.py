"""What warm-up refuses of single parts, and of what they leave behind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from graphcap._plan import PartPlan, UnitPlan
from graphcap._step_guard import names_used
from graphcap.errors import CutError
from graphcap.partial_layer import EAGER


def refuse_read_by_eager(
    unit: UnitPlan, modules: Sequence[torch.nn.Module], declared: set[tuple[int, str]]
) -> None:
    """on_replay runs when the forward is over: what runs before that would see the value of the call before."""
    titles = {id(m): type(m).__name__ for top in modules for m in top.modules()}
    for call in unit.program.calls:
        names = names_used(call) if call.kind is EAGER and declared else set()
        for owner, key in declared:
            if key in names:
                raise CutError(
                    f"{titles[owner]}.{key} is changed in a graphed part and named by the EAGER part {call.name}: "
                    "on_replay changes it when the forward is over, so that part would see the value of the call before. "
                    "Change it where it is read, or pass it in a tensor"
                )


def refuse_other_calls(unit: UnitPlan, first: list[str], second: list[str]) -> None:
    """What graphed parts may change themselves must not decide what they compute."""
    for a, b in itertools.zip_longest(first, second, fillvalue="the end"):
        if a != b:
            raise CutError(
                f"{unit.title}: graphed parts call {a} in one run and {b} in the next on equal arguments, so they depend on "
                "what they change (a counter?): a graph would freeze it. Keep it in a buffer that is changed in place"
            )


def refuse_shared_attributes(unit: UnitPlan, changed: set[tuple[int, str]]) -> None:
    """One writer per attribute: a replay sets those of graphed parts, an EAGER part its own."""
    for attribute in unit.program.attributes:
        if attribute.place in changed:
            raise CutError(
                f"{attribute.title} is set in a graphed part and in an EAGER part of {unit.title}: set it in one of them, "
                "or return it as an output"
            )


def refuse_sparse(results: Sequence[torch.Tensor | None], part: PartPlan) -> None:
    for gradient in results:
        if gradient is not None and gradient.layout is not torch.strided:
            raise CutError(
                f"part {part.name} makes a gradient of shape {list(gradient.shape)} with the layout {gradient.layout} "
                "(sparse embedding?): its size depends on the data. Use sparse=False, or let the part be EAGER"
            )
