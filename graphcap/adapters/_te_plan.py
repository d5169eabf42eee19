"""What the adapter knows of one capture of Transformer Engine modules: while it is open, and what remains of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphcap.adapters import _te_owner as own
from graphcap.adapters._te_attention import Choices
from graphcap.fp8_meta import QuantSpec

# Recipe fields that act in the host's amax reduction and scale update alone: no recorded kernel depends on them.
HOST_FIELDS = frozenset({"margin", "amax_compute_algo", "scaling_factor_compute_algo", "reduce_amax"})

Fields = tuple[Any, ...]


def recipe_fields(recipe: Any, leave_out: frozenset[str] = frozenset()) -> Fields:
    """The class of a recipe and the value of every field. (Its text, which TE's own keys are made of, leaves some out.)"""
    if recipe is None:
        return ()
    if not dataclasses.is_dataclass(recipe):
        return (type(recipe), recipe)
    values = ((f.name, getattr(recipe, f.name)) for f in dataclasses.fields(recipe) if f.name not in leave_out)
    return (type(recipe), *values)


def changed_fields(captured: Fields, now: Fields) -> list[str]:
    """In words, what differs between two results of `recipe_fields`."""
    if captured[:1] != now[:1]:
        return [f"the recipe was {_class_name(captured)} at capture and is {_class_name(now)} now"]
    pairs = zip(captured[1:], now[1:], strict=True)
    return [
        f"recipe.{name} was {old!r} at capture and is {new!r} now" for (name, old), (_, new) in pairs if old != new
    ]


def _class_name(fields: Fields) -> str:
    return fields[0].__name__ if fields else "none"


@dataclass(slots=True)
class OpenCapture:
    """One capture in progress. before: host state of every owner as it was. flag: by which recorded casts of weights decide
    whether to run, where weights are cached. visited: the owners that ran, by unit and part. choices: the watch on
    the choice of an attention backend. undo: everything process-wide, in the order in which it was changed."""

    specs: Sequence[Any]
    units: Sequence[nn.Module]
    owners: tuple[nn.Module, ...]
    before: dict[nn.Module, own.HostState]
    flag: torch.Tensor | None
    undo: ExitStack
    visited: dict[tuple[int, int], dict[nn.Module, None]] = field(default_factory=dict)
    choices: Choices | None = None
    kept: frozenset[nn.Module] = frozenset()  # at the end: the visited ones, if it went well
    closed: bool = False

    def note(self, unit: int, part: int, owner: nn.Module) -> None:
        self.visited.setdefault((unit, part), {})[owner] = None


@dataclass(slots=True)
class OwnerPrint:
    """Where one owner's state lay at capture, so that one look per call says whether it still does.

    metas: the dicts. states: (dict, key, state object). tensors: (state object, attribute, tensor, address). weights:
    primary quantised weights, with the plain tensors inside, by attribute, and whether a transposed copy was there.
    """

    owner: nn.Module
    metas: tuple[own.Meta, ...]
    states: tuple[tuple[own.Meta, str, Any], ...]
    tensors: tuple[tuple[Any, str, torch.Tensor, int], ...]
    weights: tuple[tuple[Any, dict[str, tuple[torch.Tensor, int]], bool], ...]

    def problem(self) -> str | None:
        now = own.metas(self.owner)
        if len(now) != len(self.metas) or any(a is not b for a, b in zip(now, self.metas, strict=True)):
            return f"{self._name()} has made its state anew since capture (it ran in high precision, as te.ops do?)"
        for meta, key, state in self.states:
            if meta.get(key) is not state:
                return f"{self._name()} has made its {key} anew since capture (another kind of recipe, a reset?)"
        for state, name, tensor, address in self.tensors:
            if getattr(state, name, None) is not tensor or tensor.data_ptr() != address:
                return f"{self._name()}: {name} lies in other memory than at capture (another amax_history_len?)"
        for weight, inside, _ in self.weights:
            for name, (tensor, address) in inside.items():
                if getattr(weight, name, None) is not tensor or tensor.data_ptr() != address:
                    return f"{self._name()}: a quantised weight's {name} lies in other memory than at capture"
        return None

    def _name(self) -> str:
        return f"{type(self.owner).__name__} {getattr(self.owner, 'name', None) or ''}".strip()

    def renew_transposes(self) -> None:
        """A weight that was written since has its transpose marked stale; eager code would make it again before its
        next use, and a replay reads it as it is."""
        for weight, _, transposed in self.weights:
            if transposed and not has_transpose(weight):
                weight.update_usage(columnwise_usage=True)


def has_transpose(weight: Any) -> bool:
    """Whether a quantised weight holds a valid copy for the input gradient."""
    if hasattr(weight, "get_usages"):
        return bool(weight.get_usages().get("columnwise", False))
    return getattr(weight, "_transpose", None) is not None and not getattr(weight, "_transpose_invalid", False)


def print_of(owner: nn.Module) -> OwnerPrint:
    """Note where an owner's state lies now."""
    metas = tuple(own.metas(owner))
    states = tuple(
        (meta, key, meta[key]) for meta in metas for key in ("scaling_fwd", "scaling_bwd") if key in meta
    )
    tensors = []
    for _, _, state in states:
        for name in ("scale", "amax_history"):
            value = getattr(state, name, None)
            if isinstance(value, torch.Tensor):
                tensors.append((state, name, value, value.data_ptr()))
    weights = [
        (weight, {k: (t, t.data_ptr()) for k, t in own.memory_of(weight).items()}, has_transpose(weight))
        for weight in owner._parameters.values()
        if own.is_quantized(weight)
    ]
    return OwnerPrint(owner, metas, states, tuple(tensors), tuple(weights))


@dataclass(frozen=True, slots=True)
class UnitState:
    """One unit of a finished capture. owners: whether it has any. fields: what recorded kernels depend on in the recipe."""

    spec: QuantSpec
    owners: bool
    fields: Fields


@dataclass(slots=True)
class PartState:
    """The owners that one recorded part runs, in the order of their calls. records, lists: where they were found registered
    the last time, and in which of TE's process-wide dicts (a reset makes new ones)."""

    visited: tuple[nn.Module, ...]
    prints: tuple[OwnerPrint, ...]
    records: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    lists: Any = None


class TransformerEnginePlan:
    """What remains of a capture: units, parts, what must stay alive. mark: by which the adapter knows whose cast of an
    owner's weights was the last.

    flag: 1 lets recorded casts of weights leave the cached ones; None where none are cached. flag_value: what it holds once
    the work queued so far has run.
    """

    def __init__(
        self,
        units: dict[int, UnitState],
        parts: dict[tuple[int, int], PartState],
        pins: list[Any],
        flag: torch.Tensor | None,
    ) -> None:
        self.units, self.parts, self.pins, self.mark = units, parts, pins, object()
        self.flag, self.flag_value = flag, False

    @property
    def visited(self) -> dict[tuple[int, int], tuple[nn.Module, ...]]:
        return {place: part.visited for place, part in self.parts.items()}


@dataclass(slots=True)
class TransformerEngineTicket:
    """One forward of one part. owns_backward: the reduction after its backward is this part's."""

    owns_backward: bool
    done: bool = False


def pins_of(owners: Sequence[nn.Module], caches: Mapping[nn.Module, dict[str, Any]]) -> list[Any]:
    """Everything that a recorded kernel may touch and that an owner could let go of."""
    found: list[Any] = []
    for owner in owners:
        found += [own.touched_memory(owner, caches.get(owner)), caches.get(owner), list(own.quantizers(owner))]
        found += [own.scaling_states(owner)]
    return found
