"""Module attributes that hold tensors and are set by the forward (`self.aux_loss = ...`): a replay sets them again.

Such an attribute is one more output of the stretch that sets it, so that a loss which the caller makes of it is
differentiated. What is set before an eager part is there when that part runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Key = tuple[int, str]  # id of the module, name


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()  # the attribute was deleted


@dataclass(frozen=True, slots=True)
class Attribute:
    """`owner.key` is set to the value of that name; to what `other()` gives where it is None (a parameter, None, ABSENT).
    by: of a declared cut, the name of the graphed call that does it."""

    owner: nn.Module
    key: str
    value: str | None
    other: Callable[[], Any] | None = None
    by: str = ""

    @property
    def place(self) -> Key:
        return id(self.owner), self.key

    @property
    def title(self) -> str:
        return f"{type(self.owner).__name__}.{self.key}"

    def get(self) -> Any:
        return self.owner.__dict__.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        if value is ABSENT:
            self.owner.__dict__.pop(self.key, None)
        else:
            self.owner.__dict__[self.key] = value


Snapshot = dict[Key, tuple[nn.Module, Any]]


def snapshot(modules: Iterable[nn.Module]) -> Snapshot:
    """The attributes that hold a tensor or None."""
    found: Snapshot = {}
    for module in (m for top in modules for m in top.modules()):
        for key, value in module.__dict__.items():
            if value is None or isinstance(value, torch.Tensor):
                found[id(module), key] = (module, value)
    return found


def changes(before: Snapshot, after: Snapshot) -> dict[Key, tuple[nn.Module, Any]]:
    """The attributes that hold another tensor now, or none any more (None, ABSENT)."""
    found: dict[Key, tuple[nn.Module, Any]] = {}
    for place, (module, value) in after.items():
        old = before[place][1] if place in before else ABSENT
        if old is not value and (isinstance(value, torch.Tensor) or isinstance(old, torch.Tensor)):
            found[place] = (module, value)
    for place, (module, old) in before.items():
        if place not in after and isinstance(old, torch.Tensor) and place[1] not in module.__dict__:
            found[place] = (module, ABSENT)
    return found


def put_back(before: Snapshot, modules: Iterable[nn.Module], places: Container[Key]) -> None:
    """What `changes` would find at these places is undone."""
    for (number, key), (module, _) in changes(before, snapshot(modules)).items():
        if (number, key) not in places:
            continue
        old = before.get((id(module), key))
        if old is None:
            module.__dict__.pop(key, None)
        else:
            module.__dict__[key] = old[1]


@dataclass(frozen=True, slots=True)
class WithAttributes:
    """The run of a declared graphed call that makes the values of attributes as well: what they hold after it."""

    run: Callable[..., Any]
    makes: int
    attributes: tuple[Attribute, ...]

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        made = self.run(*values)
        own = (made,) if self.makes == 1 else tuple(made) if isinstance(made, tuple | list) else (made,)
        return (*own, *(attribute.get() for attribute in self.attributes))

    @property
    def __self__(self) -> Any:
        return getattr(self.run, "__self__", None)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.run


class Placed:
    """The attributes that one graph set sets, and which tensors it has put there."""

    def __init__(self) -> None:
        self._tensors: dict[Key, tuple[Attribute, weakref.ref[torch.Tensor]]] = {}

    def put(
        self, attributes: Sequence[Attribute], env: Mapping[str, Any], owned: Callable[[Any], Any]
    ) -> None:
        for attribute in attributes:
            if attribute.value is None:
                assert attribute.other is not None
                attribute.put(attribute.other())
                continue
            value = owned(env[attribute.value])
            attribute.put(value)
            if isinstance(value, torch.Tensor):
                self._tensors[attribute.place] = (attribute, weakref.ref(value))

    def let_go(self) -> None:
        """An attribute may be all that holds the last forward. The next one sets it anew: its history is dropped, if nobody
        else holds the tensor."""
        for attribute, reference in self._tensors.values():
            tensor = reference()
            if tensor is None or attribute.get() is not tensor or tensor.grad_fn is None:
                continue
            attribute.put(tensor.detach())
            del tensor
            tensor = reference()
            if tensor is not None:
                attribute.put(tensor)
