"""Detector D2: a tensor that comes into a graphed part past its signature, from an EAGER part of the same step.

A replay would read it where it lay at capture. One forward of warm-up runs under a dispatch mode that looks at every
operator; it is a run of its own, since some kernels take another way under a mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap import _torch_private as private
from graphcap._attributes import Attribute
from graphcap._tensors import flatten, tensors_of
from graphcap.errors import CutError
from graphcap.partial_layer import GRAPHED, PartKind


class Crossings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes: which part made a storage, and which addresses each kind of part reads."""

    supports_higher_order_operators = True

    def __init__(
        self, modules: Sequence[nn.Module], arguments: Iterable[torch.Tensor], attributes: Sequence[Attribute] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules
        self.log: list[str] = []  # the operators of graphed parts, with their constants
        self.reads: dict[PartKind, set[int]] = {kind: set() for kind in PartKind}
        # Storages by key; the references keep the keys from being used again, though not the memory alive.
        self._fresh: dict[int, private.StorageKey] = {}  # arguments, and what graphed parts made
        self._theirs: dict[int, tuple[str, private.StorageKey]] = {}  # made by EAGER parts, or handed to them
        self._attributes = attributes  # that graphed parts set
        self._set: dict[int, tuple[str, private.StorageKey]] = {}  # what they hold now
        for attribute in attributes:
            held = attribute.get()
            if isinstance(held, torch.Tensor) and _has_storage(held) and attribute.value is not None:
                self._theirs[private.storage_key(held)] = ("the call before this one", private.StorageKey(held))
        self._part: tuple[str, PartKind] | None = None
        self._allowed: set[int] = set()
        for tensor in arguments:
            if _has_storage(tensor):
                self._fresh[private.storage_key(tensor)] = private.StorageKey(tensor)

    @contextmanager
    def part(self, name: str, kind: PartKind, given: Sequence[torch.Tensor]) -> Iterator[None]:
        """The calls of a part run inside, on the proxies `given`."""
        keys = {private.storage_key(tensor): tensor for tensor in given if _has_storage(tensor)}
        self._part, self._allowed = (name, kind), set(keys)
        before = {} if kind is GRAPHED else _attributes(self.modules)
        try:
            yield
        finally:
            self._part = None
        if kind is GRAPHED:
            self._note_set()
            return
        for key, tensor in keys.items():
            if key in self._fresh:
                self._note(name, tensor)
        for place, tensor in _attributes(self.modules).items():  # also of tensors that no operator made
            if before.get(place) is not tensor and _has_storage(tensor):
                self._note(name, tensor)

    def _note_set(self) -> None:
        for attribute in self._attributes:
            held = attribute.get()
            if isinstance(held, torch.Tensor) and _has_storage(held) and attribute.value is not None:
                key = private.storage_key(held)
                if key in self._fresh:
                    self._set[key] = (attribute.title, private.StorageKey(held))

    def made(self, name: str, kind: PartKind, given: Sequence[torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
        """What a part made: a graphed one may not hand on what it got past its signature."""
        self._allowed = {private.storage_key(tensor) for tensor in given if _has_storage(tensor)}
        for tensor in tensors:
            if kind is GRAPHED:
                self._check(name, "returns", tensor)
            elif _has_storage(tensor) and private.storage_key(tensor) not in self._allowed:
                self._note(name, tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._part is None or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        name, kind = self._part
        read = [tensor for tensor in _tensors((args, kwargs)) if _has_storage(tensor)]
        self.reads[kind].update(tensor.data_ptr() for tensor in read if tensor.numel())
        if kind is GRAPHED:
            self.log.append(f"{func}({', '.join(_constants((args, kwargs)))})")
        operator = func._schema.name.partition("::")[2]
        if kind is GRAPHED and not (operator.endswith("_like") or operator.startswith("new_")):  # those read a shape
            for tensor in read:
                self._check(name, f"reads in {operator}", tensor)
        if kind is not GRAPHED:
            for tensor in read:
                self._refuse_set(name, tensor)
        result = func(*args, **kwargs)
        known = {private.storage_key(tensor) for tensor in read}
        for tensor in _tensors(result):
            if _has_storage(tensor) and private.storage_key(tensor) not in known:
                if kind is GRAPHED:
                    self._fresh[private.storage_key(tensor)] = private.StorageKey(tensor)
                else:
                    self._note(name, tensor)
        return result

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        key = private.storage_key(tensor)
        self._theirs.setdefault(key, (f"the EAGER part {name}", private.StorageKey(tensor)))

    def _refuse_set(self, name: str, tensor: torch.Tensor) -> None:
        key = private.storage_key(tensor)
        if key in self._set and key not in self._allowed:
            raise CutError(
                f"EAGER part {name} reads {self._set[key][0]}, which a graphed part has set, but not through its signature: "
                "make it a value, an output of that part and an input of this one"
            )

    def _check(self, name: str, how: str, tensor: torch.Tensor) -> None:
        if not _has_storage(tensor):
            return
        key = private.storage_key(tensor)
        found = self._theirs.get(key)
        if found is None or key in self._allowed:
            return
        places = [place for place, held in _attributes(self.modules).items() if _has_storage(held)
                  and private.storage_key(held) == key]
        where = f" ({places[0]})" if places else ""
        raise CutError(
            f"part {name} {how} a tensor of shape {list(tensor.shape)}{where} that comes from {found[0]}, "
            "but not through its signature: a replay would read what it was at capture. Make it a value: an output of that "
            "one and an input of this; or a buffer that is changed in place"
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _constants(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _constants(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (f"{key}={text}" for text in _constants(item))
    elif isinstance(value, torch.Tensor):
        yield "a tensor"
    else:
        yield repr(value)


def _has_storage(tensor: torch.Tensor) -> bool:
    return not (
        private.is_transformed(tensor) or tensor.layout is not torch.strided or private.overrides_dispatch(tensor)
    )


def _attributes(modules: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The tensors that modules hold, but for parameters, by a readable name."""
    found: dict[str, torch.Tensor] = {}
    for index, top in enumerate(modules):
        for path, module in top.named_modules():
            title = f"{f'{index}.' if len(modules) > 1 else ''}{f'{path}.' if path else f'{type(module).__name__}.'}"
            for key, value in [*module._buffers.items(), *vars(module).items()]:
                if isinstance(value, torch.Tensor):
                    found[f"{title}{key}"] = value
                elif not key.startswith("_") and isinstance(value, list | tuple | dict):
                    for number, tensor in enumerate(tensors_of(flatten(value)[0])):
                        found[f"{title}{key}[{number}]"] = tensor
    return found
