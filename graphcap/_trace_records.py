"""What a trace writes down: values, calls, breaks, and the script of a whole forward; and how arguments are taken apart."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphcap import _torch_private as private
from graphcap._attributes import Attribute
from graphcap._breaks import Target
from graphcap._tensors import Structure, compact, flatten, tensors_of
from graphcap.backends.refusal_modes import line_text

Place = tuple[str, int] | None
OUTSIDE = -1  # the "stretch" of callable inputs and of what breaks make


@dataclass(slots=True)
class Value:
    """made: the stretch that made it (OUTSIDE for inputs and results of breaks). homes: what stands for it in later
    stretches. place: the user's line that made it. root, born: the storage that it was made on,
    and when (analysis alone)."""

    name: str
    made: int
    origin: weakref.ref[torch.Tensor]
    place: Place
    root: int = 0
    born: int = 0
    homes: dict[int, torch.Tensor] = field(default_factory=dict)

    def now(self) -> torch.Tensor:
        """The tensor that holds what the value is at the moment."""
        found = self.homes[max(self.homes)] if self.homes else self.origin()
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class Entry:
    """One call: its name, what its arguments were (tensors as specs, with the value's name where one crosses), and the
    user's line."""

    name: str
    arguments: tuple[Any, ...]
    place: Place

    def same(self, other: Entry) -> bool:
        return self.name == other.name and self.arguments == other.arguments

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.arguments))})\n    at {line_text(self.place)}"


@dataclass(frozen=True, slots=True)
class StateRef:
    """A parameter, buffer or tensor attribute, found by its place: its tensor is another one while it is captured."""

    owner: nn.Module
    table: str  # "_parameters", "_buffers" or "__dict__"
    key: str

    def get(self) -> Any:
        return getattr(self.owner, self.table).get(self.key)


def state_of(modules: list[nn.Module]) -> dict[int, StateRef]:
    """All tensors that modules hold directly, by id."""
    found: dict[int, StateRef] = {}
    for module in (m for top in modules for m in top.modules()):
        for table in ("_parameters", "_buffers", "__dict__"):
            for key, tensor in getattr(module, table).items():
                if isinstance(tensor, torch.Tensor):
                    found.setdefault(id(tensor), StateRef(module, table, key))
    return found


@dataclass(frozen=True, slots=True)
class Ref:
    """A leaf of a break's arguments or results, or of the outputs, that is a value."""

    name: str


@dataclass(frozen=True, slots=True)
class SetRecord:
    """An attribute that a stretch has set: to a value, to a parameter or buffer, to None, or it was deleted (ABSENT)."""

    owner: nn.Module
    key: str
    leaf: Any

    @property
    def place(self) -> tuple[int, str]:
        return id(self.owner), self.key

    @property
    def title(self) -> str:
        return f"{type(self.owner).__name__}.{self.key}"

    def attribute(self) -> Attribute:
        if isinstance(self.leaf, Ref):
            return Attribute(self.owner, self.key, self.leaf.name)
        other = self.leaf.get if isinstance(self.leaf, StateRef) else _Constant(self.leaf)
        return Attribute(self.owner, self.key, None, other)


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any

    def __call__(self) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class BreakRecord:
    """A call of a break as it was seen. Leaves are Refs, StateRefs or constants; `new`: the values that it made.
    grad: whether it ran in grad mode; autocast: (enabled, dtype); in_region: it was called inside an autocast region, which
    caches casts of parameters until its end. Arguments of a hoisted break may also be computed again, or stood for
    (_trace_hoist.py); reads: the values that it takes."""

    target: Target
    arguments: Structure
    argument_leaves: tuple[Any, ...]
    results: Structure
    result_leaves: tuple[Any, ...]
    result_specs: tuple[Any, ...]
    new: tuple[str, ...]
    grad: bool
    autocast: tuple[bool, torch.dtype]
    in_region: bool
    place: Place
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """What the analysis found, and every later run must repeat. reads: per stretch the names of the values that cross
    into it, in order of use; cloned: (name, stretch) where a value is cloned at its first use since it is changed in
    place there; hoisted: breaks that run before everything; unseen: values that no call was seen to make.
    sets: per stretch the attributes that it has set; kept: those of all, as they are in the end."""

    entries: tuple[Entry, ...]
    results: tuple[tuple[Any, ...], ...]
    hoisted: tuple[BreakRecord, ...]
    breaks: tuple[BreakRecord, ...]
    reads: tuple[tuple[str, ...], ...]
    filled: frozenset[int]
    cloned: frozenset[tuple[str, int]]
    unseen: frozenset[str]
    inputs: tuple[str, ...]
    sets: tuple[tuple[SetRecord, ...], ...]
    kept: tuple[SetRecord, ...]
    output: Structure
    output_leaves: tuple[Any, ...]

    @property
    def wanted(self) -> frozenset[str]:
        """The values that somebody needs in another stretch."""
        names = {name for reads in self.reads for name in reads}
        names.update(name for record in (*self.hoisted, *self.breaks) for name in record.reads)
        held = [record.leaf for records in (*self.sets, self.kept) for record in records]
        names.update(leaf.name for leaf in held if isinstance(leaf, Ref))
        return frozenset(names.union(leaf.name for leaf in self.output_leaves if isinstance(leaf, Ref)))


def swapped(
    args: tuple[Any, ...], kwargs: dict[str, Any], swap: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(mapped(arg, swap) for arg in args), {key: mapped(value, swap) for key, value in kwargs.items()}


def spec(tensor: torch.Tensor) -> tuple[Any, ...]:
    if private.is_transformed(tensor):
        return ("transformed",)
    return (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.requires_grad)


def constant(value: Any) -> Any:
    """What must be equal in every run of a value that is no tensor."""
    if isinstance(value, float | complex):
        return repr(value)
    if isinstance(value, bool | int | str | bytes | None | torch.dtype | torch.device | torch.Size):
        return value
    if isinstance(value, slice):
        return ("slice", constant(value.start), constant(value.stop), constant(value.step))
    return type(value).__name__


def strided_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A differentiable copy with the same strides: an element that stands in several places stays one, as it must when the
    copy is changed in place."""
    core = compact(tensor)
    made = torch.empty_strided(core.shape, core.stride(), dtype=core.dtype, device=core.device)
    made.copy_(core)
    return made.expand(tensor.shape) if core.shape != tensor.shape else made


def taken_apart(value: Any) -> tuple[list[Any], Structure]:
    """As `flatten`, but a dataclass without tensors (a configuration) stays whole: its type may not like to be rebuilt."""
    leaves, structure = flatten(mapped(value, _whole))
    return [leaf.value if isinstance(leaf, _Whole) else leaf for leaf in leaves], structure


class _Whole:
    """Hides a value from `flatten`."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _whole(leaf: Any) -> Any:
    is_record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    return _Whole(leaf) if is_record and not tensors_of(flatten(leaf)[0]) else leaf


def mapped(value: Any, swap: Callable[[Any], Any]) -> Any:
    """The argument with every leaf replaced by `swap(leaf)`; containers stay the same objects where nothing changed."""
    kind = type(value)
    if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        items = [mapped(item, swap) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if kind is dict:
        entries = {key: mapped(item, swap) for key, item in value.items()}
        return value if all(entries[key] is value[key] for key in entries) else entries
    return swap(value)
