"""What must not change after a capture: compared once per step with what was captured."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from types import CodeType
from typing import Any

import torch
from torch import nn

from graphcap._guards import LARGEST, MODULE_TABLES, contents, is_plain_object
from graphcap._tensors import same_constant
from graphcap.errors import StateError
from graphcap.partial_layer import GRAPHED, Call


@dataclass(slots=True)
class _Watched:
    table: dict[Any, Any]
    key: Any
    name: str
    tensor: torch.Tensor
    address: int
    requires_grad: bool


@dataclass(slots=True)
class _Table:
    """The parameters, buffers, children or attributes of one module, of which there may be more later."""

    table: dict[str, Any]
    count: int
    known: set[str]
    module: nn.Module
    path: str


@dataclass(frozen=True, slots=True)
class _Glance:
    """What is watched, side by side: values in tables, tensors, sizes, children, hooks."""

    tables: list[dict[Any, Any]]
    keys: list[Any]
    values: list[Any]
    tensors: list[torch.Tensor]
    addresses: list[int]
    flags: list[bool]
    sized: list[Any]
    lengths: list[int]
    owners: list[nn.Module]
    children_keys: list[str]
    children: list[nn.Module]
    hooked: list[nn.Module]
    hooks: list[int]


class StepGuard:
    """Compares identity and address of parameters and buffers, host state and the structure of modules with the capture.

    One pass per step over lists made here. A graph reads memory where it was; a weight that has moved would be read
    stale. What Python decided by (numbers, flags, functions, lists and dicts one level deep, plain config objects) is
    frozen in the graph, so it is compared too. Exempt: `theirs` (ids of modules that only EAGER parts call; but not their
    tensors with an id in `used` or an address in `read`), and attributes in `changing`: (id of the module, name) of what
    the first run fills and what EAGER parts change.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        theirs: set[int],
        used: set[int],
        read: set[int],
        changing: set[tuple[int, str]],
    ) -> None:
        self._watched: list[_Watched] = []
        self._constants: list[tuple[dict[Any, Any], Any, str, Any]] = []
        self._lists: list[tuple[Any, tuple[Any, ...], str]] = []
        self._sizes: list[tuple[Any, int, str]] = []
        self._sets: list[tuple[set[Any], frozenset[Any], str]] = []
        self._tables: list[_Table] = []
        self._names: list[_Table] = []
        self._children: list[tuple[nn.Module, str, str, nn.Module]] = []
        self._hooked: dict[int, tuple[str, nn.Module, int]] = {}
        self._seen: set[int] = set()
        for top in modules:
            for path, module in top.named_modules():
                inside = id(module) not in theirs
                for table in (module._parameters, module._buffers):
                    for key, tensor in table.items():
                        if tensor is not None and (inside or id(tensor) in used or tensor.data_ptr() in read):
                            self._watch_tensor(table, key, _join(path, key), tensor)
                if inside:
                    self._watch_structure(module, path, theirs, changing)
                    self._watch_attributes(module, path, changing)
                    if module is not top:
                        self._hooked[id(module)] = (path, module, _hook_count(module))
        self._glance = self._glance_now()

    def _watch_tensor(self, table: dict[Any, Any], key: Any, name: str, tensor: torch.Tensor) -> None:
        self._watched.append(_Watched(table, key, name, tensor, tensor.data_ptr(), tensor.requires_grad))

    def _watch_structure(
        self, module: nn.Module, path: str, theirs: set[int], changing: set[tuple[int, str]]
    ) -> None:
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
        for table in tables:
            known = {*table, *(key for owner, key in changing if owner == id(module))}
            self._tables.append(_Table(table, len(table), known, module, path))
            self._constants += [
                (table, key, _join(path, key), None)
                for key, value in table.items()
                if value is None and (id(module), key) not in changing
            ]
        for key, child in module._modules.items():
            if child is not None and id(child) not in theirs:
                self._children.append((module, key, _join(path, key), child))

    def _watch_attributes(self, module: nn.Module, path: str, changing: set[tuple[int, str]]) -> None:
        table = vars(module)
        known = {*table, *(key for owner, key in changing if owner == id(module))}
        self._names.append(_Table(table, len(table), known, module, path))
        for key, value in table.items():
            if key not in MODULE_TABLES and (id(module), key) not in changing and not _is_ours(key, value):
                self._watch_value(table, key, _join(path, key), value)

    def _watch_value(self, table: dict[Any, Any], key: Any, name: str, value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            self._watch_tensor(table, key, name, value)
            return
        if not callable(value) and not is_plain_object(value) and type(value).__module__.partition(".")[0] in _VOLATILE:
            return
        self._constants.append((table, key, name, value))
        if depth < 3 and id(value) not in self._seen:
            self._watch_contents(name, value, depth)

    def _watch_contents(self, name: str, value: Any, depth: int) -> None:
        """What can change inside of a value that is the same object as before."""
        parts = contents(value)
        if isinstance(value, list | dict | set):
            self._sizes.append((value, len(value), name))
        if isinstance(value, set):
            self._sets.append((value, frozenset(value), name))
        if not parts or isinstance(value, set):
            return
        self._seen.add(id(value))
        if isinstance(value, list):
            self._lists.append((value, tuple(value), name))
        for key, part in parts:
            if isinstance(value, dict):
                self._watch_value(value, key, f"{name}[{key!r}]", part, depth + 1)
            elif not isinstance(value, list | tuple):
                self._constants.append((vars(value), key, f"{name}.{key}", part))
            elif isinstance(part, torch.Tensor):  # which tensor it is, `_lists` compares; here: where it lies
                self._watch_tensor({key: part}, key, f"{name}[{key}]", part)
            elif isinstance(part, list | dict | tuple) and depth < 3:
                self._watch_contents(f"{name}[{key}]", part, depth + 1)

    # ---------------------------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Raises StateError naming the first difference."""
        if not self._unchanged():
            self._check_each()
            self._glance = self._glance_now()

    def _glance_now(self) -> _Glance:
        tensors = [entry.tensor for entry in self._watched]
        sized = [container for container, _, _ in self._sizes]
        sized += [entry.table for entry in (*self._tables, *self._names)]
        hooked = [module for _, module, _ in self._hooked.values()]
        return _Glance(
            tables=[table for table, _, _, _ in self._constants] + [entry.table for entry in self._watched],
            keys=[key for _, key, _, _ in self._constants] + [entry.key for entry in self._watched],
            values=[value for _, _, _, value in self._constants] + tensors,
            tensors=tensors,
            addresses=[entry.address for entry in self._watched],
            flags=[entry.requires_grad for entry in self._watched],
            sized=sized,
            lengths=list(map(len, sized)),
            owners=[owner for owner, _, _, _ in self._children],
            children_keys=[key for _, key, _, _ in self._children],
            children=[child for _, _, _, child in self._children],
            hooked=hooked,
            hooks=list(map(len, chain.from_iterable(map(_HOOKS, hooked)))),
        )

    def _unchanged(self) -> bool:
        """Whether everything is the very object it was: a handful of comparisons in C for what is looked at one by one
        where something differs. False says nothing yet."""
        seen = self._glance
        return (
            all(map(is_, map(dict.get, seen.tables, seen.keys), seen.values))
            and list(map(torch.Tensor.data_ptr, seen.tensors)) == seen.addresses
            and list(map(_REQUIRES_GRAD, seen.tensors)) == seen.flags
            and list(map(len, seen.sized)) == seen.lengths
            and all(all(map(is_, items, before)) for items, before, _ in self._lists)
            and all(members == frozen for members, frozen, _ in self._sets)
            and all(map(is_, map(dict.get, map(_MODULES, seen.owners), seen.children_keys), seen.children))
            and list(map(len, chain.from_iterable(map(_HOOKS, seen.hooked)))) == seen.hooks
        )

    def _check_each(self) -> None:
        for table, key, name, value in self._constants:
            now = table.get(key)
            if now is not value and not _same(now, value) and not _is_ours(key, now):
                raise _changed(name, f"was {_short(value)} at capture and is {_short(now)} now")
        for container, size, name in self._sizes:
            if len(container) != size:
                raise _changed(name, f"had {size} entries at capture and has {len(container)} now")
        for members, frozen, name in self._sets:
            if members != frozen:
                raise _changed(name, f"was {_short(set(frozen))} at capture and is {_short(members)} now")
        for items, before, name in self._lists:
            for index, value in enumerate(before):
                if items[index] is not value and not _same(items[index], value):
                    what = f"was {_short(value)} at capture and is {_short(items[index])} now"
                    raise _changed(f"{name}[{index}]", what)
        for entry in self._watched:
            now = entry.table.get(entry.key)
            if now is not entry.tensor:
                raise _moved(entry.name, "was replaced by another tensor (load_state_dict(assign=True)? a swap?)")
            if entry.tensor.data_ptr() != entry.address:
                raise _moved(entry.name, "has moved to other memory (module.to()? an optimizer that rebinds .data?)")
            if entry.tensor.requires_grad != entry.requires_grad:
                raise _moved(entry.name, f"has requires_grad={entry.tensor.requires_grad} now")
        for owner, key, name, child in self._children:
            if owner._modules.get(key) is not child:
                raise _moved(name, "is another module now")
        for entries in self._tables:
            if len(entries.table) > entries.count:
                for key in entries.table:
                    if key not in entries.known:
                        raise _moved(_join(entries.path, key), "was added after capture")
                entries.count = len(entries.table)
        for names in self._names:
            if len(names.table) != names.count:
                self._look_at_new_names(names)
        self._warn_of_hooks()

    def _look_at_new_names(self, names: _Table) -> None:
        """Attributes of the user's own bookkeeping are fine; one that hides an attribute of the class is not."""
        for key, value in names.table.items():
            if key in names.known:
                continue
            if not hasattr(type(names.module), key):
                names.known.add(key)
            elif not _is_ours(key, value):
                what = f"was set on the instance ({_short(value)}) and hides {type(names.module).__name__}.{key} now"
                raise _changed(_join(names.path, key), what)
        names.count = len(names.table)

    def _warn_of_hooks(self) -> None:
        for key, (path, module, count) in self._hooked.items():
            now = _hook_count(module)
            if now > count:
                self._hooked[key] = (path, module, now)
                warnings.warn(
                    f"{path} got a hook after capture, but lies inside a graphed part: the hook will not run. Register "
                    "it before capture, or put it on the captured module or on an eager part",
                    stacklevel=5,
                )


_HOOKS = attrgetter("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULES, _REQUIRES_GRAD = attrgetter("_modules"), attrgetter("requires_grad")
_VALUES = {"builtins", "collections", "enum", "types", "argparse", "decimal", "fractions", "datetime", "pathlib"}
_VOLATILE = frozenset(sys.stdlib_module_names) - _VALUES  # loggers, locks, generators: they decide nothing


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _same(now: Any, value: Any) -> bool:
    """Whether Python would have decided alike. Mutable things are the same only if they are one object."""
    if now is value:
        return True
    if isinstance(now, tuple) and isinstance(value, tuple):
        return type(now) is type(value) and len(now) == len(value) and all(map(_same, now, value))
    if isinstance(value, torch.Tensor | nn.Module | list | dict | set) or is_plain_object(value):
        return False
    return same_constant(now, value)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_ours(key: Any, value: Any) -> bool:
    """A `forward` that graphcap put there, around the graph for hooks, or what the drop-in puts there."""
    put_there = key in ("forward", "backward_dw", "reset")
    return put_there and str(getattr(value, "__module__", "")).startswith("graphcap.")


def _hook_count(module: nn.Module) -> int:
    return (
        len(module._forward_pre_hooks)
        + len(module._forward_hooks)
        + len(module._backward_hooks)
        + len(module._backward_pre_hooks)
    )


def _changed(name: str, what: str) -> StateError:
    return StateError(
        f"{name} {what}, but Python does not run at replay, so the graph would go on with the old value. Undo that, keep "
        "the value in a buffer that is changed in place, or capture again: close() and graphcap.capture()"
    )


def _moved(name: str, what: str) -> StateError:
    return StateError(
        f"{name} {what}, but the graph reads the memory it was captured with. Undo that, change values in place "
        "(copy_), or capture again: close() and graphcap.capture()"
    )


# ------------------------------------------------------------------------------ attributes that only EAGER parts look at


def read_by_eager_alone(calls: Iterable[Call]) -> set[tuple[int, str]]:
    """Attributes of PartialLayers (id, name) that the code of EAGER parts names and the code of graphed parts does not."""
    eager: dict[int, set[str]] = {}
    graphed: dict[int, set[str]] = {}
    anybody: set[str] = set()
    for call in calls:
        owner = getattr(call.run, "__self__", None)
        names = _names_in(call.run, type(owner))
        if call.kind is GRAPHED:
            graphed.setdefault(id(owner), set()).update(names)
            if owner is None:
                anybody |= names
        elif owner is not None:
            eager.setdefault(id(owner), set()).update(names)
    found: set[tuple[int, str]] = set()
    for key, names in eager.items():
        seen_by_graphs = graphed.get(key, set()) | anybody
        if not seen_by_graphs & {"getattr", "vars", "__dict__"}:  # they may name anything
            found |= {(key, name) for name in names - seen_by_graphs}
    return found


def _names_in(function: Callable[..., Any], owner: type) -> set[str]:
    """Every name and text in the code of a function, of what it calls on its class, and of its helpers."""
    names: set[str] = set()
    seen: set[int] = set()
    todo: list[Any] = [function]
    while todo and len(seen) < LARGEST:
        item = todo.pop()
        if id(item) in seen or str(getattr(item, "__module__", "")).partition(".")[0] in ("torch", "builtins"):
            continue
        seen.add(id(item))
        if isinstance(item, property):
            todo += [item.fget]
        item = getattr(item, "__func__", item)
        todo += [getattr(item, "__wrapped__", None)]
        code = getattr(item, "__code__", None)
        if not isinstance(code, CodeType):
            continue
        here = _names_of_code(code)
        names |= here
        todo += [getattr(owner, name, None) for name in here if name.isidentifier()]
        todo += [item.__globals__.get(name) for name in here]
        todo += [cell.cell_contents for cell in item.__closure__ or () if _is_filled(cell)]
    return names


def _names_of_code(code: CodeType) -> set[str]:
    found = {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))}
    for value in code.co_consts:
        if isinstance(value, CodeType):
            found |= _names_of_code(value)
    return found


def _is_filled(cell: Any) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False
