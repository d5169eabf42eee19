"""Where to break: what the user wrote in `break_at=`, found in the modules; and how a call of it is intercepted.

Breaks are found by patching `torch.nn.Module.__call__` while a trace runs (as torch.fx does), so hooks on a break module
run eagerly at every call. Patches are filtered by thread and undone in `finally`.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from graphcap import _torch_private as private
from graphcap._tensors import flatten, tensors_of, unflatten
from graphcap.errors import CutError

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Target:
    """A module or function that runs eagerly: its name in errors and in the plan, and why it is a break."""

    what: Any
    title: str
    reason: str
    stand_in: Callable[..., Any] | None = None  # what runs in its place while planning

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.stand_in is not None:
            return self.stand_in(*args, **kwargs)
        # A module's class may have a __call__ of its own around nn.Module's, and that part of it is in the graph.
        if isinstance(self.what, nn.Module):
            return nn.Module.__call__(self.what, *args, **kwargs)
        return self.what(*args, **kwargs)


@dataclass(slots=True)
class Planning:
    """Of a run that only plans. meta: no tensor has values. stand_ins: (pattern of titles, what runs instead of a
    break, given the break's own arguments and its parameters); used: the patterns that fitted a break."""

    meta: bool
    stand_ins: tuple[tuple[str, Callable[..., Any]], ...] = ()
    used: set[str] = field(default_factory=set)

    def stand_in(self, what: Any, title: str) -> Callable[..., Any] | None:
        for pattern, run in self.stand_ins:
            if fnmatch.fnmatchcase(title, pattern):
                self.used.add(pattern)
                parameters = [p for p in what.parameters() if p.requires_grad] if isinstance(what, nn.Module) else []
                return functools.partial(_differentiable, run, parameters)
        return None


def _differentiable(run: Callable[..., Any], parameters: list[nn.Parameter], *args: Any, **kwargs: Any) -> Any:
    """The stand-in's result, which needs a gradient where the arguments or the parameters of the break do."""
    result = run(*args, **kwargs)
    given = [t for t in tensors_of(flatten((args, kwargs))[0]) if t.requires_grad]
    if not torch.is_grad_enabled() or not (given or parameters):
        return result
    leaves, structure = flatten(result)
    ties = [t.detach().sum() * 0 for t in parameters] + [t.sum() * 0 for t in given]
    needs = torch.zeros((), device=ties[0].device, requires_grad=True)
    tie = functools.reduce(torch.add, [tie.to(needs.dtype) for tie in ties], needs * 0)
    return unflatten(structure, [
        leaf + tie.to(leaf.dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves
    ])


@dataclass(slots=True)
class Breaks:
    """All targets by id, and what each entry of `break_at` stands for (to find entries that are never called)."""

    targets: dict[int, Target] = field(default_factory=dict)
    entries: list[tuple[str, set[int]]] = field(default_factory=list)
    auto: bool = False
    found: set[int] = field(default_factory=set)  # targets that "auto" has chosen
    planning: Planning | None = None

    def add(self, what: Any, title: str, reason: str) -> None:
        stand_in = None if self.planning is None else self.planning.stand_in(what, title)
        self.targets.setdefault(id(what), Target(what, title, reason, stand_in))

    def climb(self, target: Target, parent: nn.Module, title: str) -> None:
        """What "auto" has chosen returns what has no static shape: take the module that contains it and its users."""
        reason = f"auto: it contains {target.title}, whose result has another shape for other data"
        self.targets.pop(id(target.what))
        self.targets.setdefault(id(parent), Target(parent, title, reason))
        self.found.add(id(parent))

    def functions(self) -> list[Target]:
        return [target for target in self.targets.values() if not isinstance(target.what, nn.Module)]


def find(break_at: Any, roots: Sequence[tuple[str, nn.Module]], planning: Planning | None = None) -> Breaks:
    """The targets of `break_at` in the named modules: names and patterns ("*.experts"), modules, classes, functions,
    "auto", or several of these."""
    entries = [break_at] if isinstance(break_at, str | type | nn.Module) or callable(break_at) else list(break_at)
    names = _names(roots)
    breaks = Breaks(planning=planning)
    for entry in entries:
        if isinstance(entry, str) and entry == AUTO:
            breaks.auto = True
        elif isinstance(entry, str):
            _add_pattern(breaks, entry, names)
        elif isinstance(entry, nn.Module):
            title = next((name for name, module in names if module is entry), None)
            _add_found(breaks, f"the {type(entry).__name__}", [] if title is None else [(title, entry)], "it was given")
        elif isinstance(entry, type):
            found = [(name, module) for name, module in names if isinstance(module, entry)]
            _add_found(breaks, entry.__name__, found, f"it is a {entry.__name__}")
        elif isinstance(entry, FunctionType):
            breaks.add(entry, f"{entry.__module__}.{entry.__qualname__}", "it was given")
            breaks.entries.append((entry.__qualname__, {id(entry)}))
        else:
            raise CutError(
                f"break_at: {entry!r} is neither a submodule's name or pattern, nor a module, a module class, a "
                "function or 'auto'"
            )
    tops = {id(module) for _, module in roots}
    for key, target in breaks.targets.items():
        if key in tops:
            raise CutError(f"break_at names the captured module itself ({target.title}): nothing would be left for a graph")
    return breaks


def _names(roots: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    found = []
    for prefix, root in roots:
        for name, module in root.named_modules(remove_duplicate=False):
            found.append((".".join(piece for piece in (prefix, name) if piece), module))
    return found


def _add_pattern(breaks: Breaks, pattern: str, names: Sequence[tuple[str, nn.Module]]) -> None:
    found = [(name, module) for name, module in names if name and fnmatch.fnmatchcase(name, pattern)]
    if not found:
        close = difflib.get_close_matches(pattern, [name for name, _ in names if name], n=3, cutoff=0.4)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise CutError(f"break_at: no submodule is called {pattern!r}.{hint}")
    _add_found(breaks, repr(pattern), found, f"break_at={pattern!r}")


def _add_found(breaks: Breaks, entry: str, found: Sequence[tuple[str, nn.Module]], reason: str) -> None:
    if not found:
        raise CutError(f"break_at: {entry} is not among the captured modules")
    for title, module in found:
        breaks.add(module, title or type(module).__name__, reason)
    breaks.entries.append((entry, {id(module) for _, module in found}))


Run = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Watcher(Protocol):
    """What a trace does with intercepted calls; each calls `run` for what was meant."""

    def on_module(self, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any: ...
    def on_apply(self, kind: type, run: Run, args: Args, kwargs: Kwargs) -> Any: ...
    def on_function(self, target: Target, args: Args, kwargs: Kwargs) -> Any: ...
    def on_checkpoint(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]: ...
    def on_direct_forward(self, target: Target) -> None: ...


@contextmanager
def intercepted(watcher: Watcher, breaks: Breaks) -> Iterator[None]:
    """While inside, this thread's calls of modules, autograd Functions and function breaks go through `watcher`."""
    thread = threading.get_ident()
    call = nn.Module.__call__

    def checkpoint_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return watcher.on_checkpoint(args, kwargs) if threading.get_ident() == thread else (args, kwargs)

    def module_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(self, *args, **kwargs)
        return watcher.on_module(self, lambda *a, **k: call(self, *a, **k), args, kwargs)

    nn.Module.__call__ = module_call  # type: ignore[method-assign]
    try:
        with (
            private.patched_function_apply(_on_thread(thread, watcher.on_apply)),
            private.patched_checkpoint(checkpoint_arguments),
            private.not_capturing_for_users(thread),
            _guarded_forwards(watcher, breaks, thread),
            _replaced_functions(watcher, breaks, thread),
        ):
            yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


def _on_thread(thread: int, handle: Callable[..., Any]) -> Callable[..., Any]:
    def on_apply(kind: type, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread:
            return run(*args, **kwargs)
        return handle(kind, run, args, kwargs)

    return on_apply


@contextmanager
def _guarded_forwards(watcher: Watcher, breaks: Breaks, thread: int) -> Iterator[None]:
    """A direct call of a break's `.forward` goes past its hooks, and past us: the watcher is told."""
    undo: list[tuple[nn.Module, bool, Any]] = []
    try:
        for target in breaks.targets.values():
            if isinstance(target.what, nn.Module):
                module = target.what
                undo.append((module, "forward" in module.__dict__, module.__dict__.get("forward")))
                module.__dict__["forward"] = _guarded(watcher, target, module.forward, thread)
        yield
    finally:
        for module, had, before in undo:
            if had:
                module.__dict__["forward"] = before
            else:
                module.__dict__.pop("forward", None)


def _guarded(watcher: Watcher, target: Target, forward: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            watcher.on_direct_forward(target)
        return forward(*args, **kwargs)

    return guarded


@contextmanager
def _replaced_functions(watcher: Watcher, breaks: Breaks, thread: int) -> Iterator[None]:
    """Functions are bound at import: every module global that *is* the function is another one while inside."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for target in breaks.functions():
            replacement = _replacement(watcher, target, thread)
            for table in [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]:
                for name in [name for name, value in list(table.items()) if value is target.what]:
                    undo.append((table, name, target.what))
                    table[name] = replacement
        yield
    finally:
        for table, name, value in undo:
            table[name] = value


def _replacement(watcher: Watcher, target: Target, thread: int) -> Callable[..., Any]:
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return target.what(*args, **kwargs)
        return watcher.on_function(target, args, kwargs)

    return replaced


