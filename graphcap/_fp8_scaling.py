"""The arithmetic of the FP8 reference: recipes, casts, and how histories become scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from graphcap.errors import PlanError, StateError
from graphcap.fp8_meta import QuantSpec

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FORWARD, BACKWARD = "forward", "backward"
INPUT, WEIGHT, GRADIENT = 0, 1, 0  # columns of the histories: two forward, one backward


@dataclass(frozen=True, slots=True)
class RefRecipe:
    """How tensors are quantised.

    kind: "delayed" or "current" scaling. margin: scales are made smaller by 2 ** margin. history_len: rows of an amax
    history, at least 1. algo: the amax of a history is its "max" or the "most_recent" one. reduce_amax: over the group.
    forward, backward: torch.float8_e4m3fn or torch.float8_e5m2.
    """

    kind: Literal["delayed", "current"] = "delayed"
    margin: int = 0
    history_len: int = 16
    algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True
    forward: torch.dtype = torch.float8_e4m3fn
    backward: torch.dtype = torch.float8_e5m2

    def __post_init__(self) -> None:
        if self.kind not in ("delayed", "current"):
            raise PlanError(f"RefRecipe(kind={self.kind!r}): expected 'delayed' or 'current'")
        if self.algo not in ("max", "most_recent"):
            raise PlanError(f"RefRecipe(algo={self.algo!r}): expected 'max' or 'most_recent'")
        if type(self.history_len) is not int or self.history_len < 1:
            raise PlanError(f"RefRecipe(history_len={self.history_len!r}): expected a whole number of at least 1")
        for name, dtype in (("forward", self.forward), ("backward", self.backward)):
            if dtype not in LARGEST:
                raise PlanError(f"RefRecipe({name}={dtype}): expected torch.float8_e4m3fn or torch.float8_e5m2")

    @property
    def recorded(self) -> tuple[Any, ...]:
        """What recorded kernels depend on; the rest acts in the reduction on the host."""
        return (self.kind, self.history_len, self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is reduced together: one direction, all fields of the recipe, one group (by identity, and kept alive)."""

    direction: str
    recipe: RefRecipe
    group: Any = field(hash=False, compare=False)
    group_id: int


def cast(
    tensor: Tensor,
    recipe: RefRecipe,
    dtype: torch.dtype,
    scales: Tensor,
    history: Tensor,
    column: int,
    *,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(values in `dtype`, 1 / scale). Values are clamped: torch's cast turns what is too large into NaN or infinity, where
    hardware saturates. `keep`: a bool on the device; where it is true the amax is not noted."""
    largest = LARGEST[dtype]
    exact = tensor.float()
    if recipe.kind == "current":
        amax = exact.abs().max() if tensor.numel() else exact.new_zeros(())
        scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax)).clamp(max=torch.finfo(torch.float32).max)
    else:
        note(history, column, tensor, keep)
        scale = scales[column]
    return (exact * scale).clamp(-largest, largest).to(dtype), 1.0 / scale


def note(history: Tensor, column: int, tensor: Tensor, keep: Tensor | None = None) -> None:
    if tensor.numel() == 0:
        return
    amax = tensor.float().abs().max()
    if keep is not None:
        amax = torch.where(keep, torch.zeros_like(amax), amax)
    row = history[0]
    with torch.no_grad():
        row[column].copy_(torch.maximum(row[column], amax))


def update(bucket: Bucket, history: Tensor, scale: Tensor, last: Tensor) -> None:
    """Turn the history by one and make the scale anew, for every column whose amax is not 0: an input that was not cast,
    or a weight that was taken from the cache, ages nothing."""
    seen, rows = last != 0, history.shape[0]
    turned = torch.zeros_like(history)
    if rows > 1:
        turned[1:-1].copy_(history[2:])
        turned[-1].copy_(last)
    amax = last
    if bucket.recipe.algo == "max" and rows > 1:
        amax = torch.maximum(history[1:].amax(0), last)
    dtype = bucket.recipe.forward if bucket.direction == FORWARD else bucket.recipe.backward
    wanted = LARGEST[dtype] * 2.0**-bucket.recipe.margin / amax
    wanted = wanted.clamp(max=torch.finfo(torch.float32).max)
    usable = seen & torch.isfinite(amax) & (amax > 0)
    scale.copy_(torch.where(usable, wanted, scale))
    history.copy_(torch.where(seen, turned, history))


def largest_over(rows: Tensor, group: Any) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(rows, op=torch.distributed.ReduceOp.MAX, group=group)


def with_rows(history: Tensor, rows: int) -> Tensor:
    made = history.new_zeros(rows, *history.shape[1:]) if history.dim() > 1 else history.clone()
    if history.dim() > 1:
        kept = min(rows, history.shape[0])
        made[:kept].copy_(history[:kept])
    return made


def recipe_of(spec: QuantSpec) -> RefRecipe:
    if not spec.active and spec.recipe is None:
        return RefRecipe()
    recipe = RefRecipe() if spec.recipe is None else spec.recipe
    if not isinstance(recipe, RefRecipe):
        raise StateError(f"recipe is a {type(recipe).__name__}: RefFp8Linear takes a graphcap.fp8_reference.RefRecipe")
    return recipe
