"""break_at="auto": find what reads the host, and break around it.

The smallest module that contains a read is a break, if it calls no other modules; else the outermost Python function
below that module's forward, since a whole model must not become a break for the sake of a mask made in a helper. Where a
break that was found so returns what has another shape for other data, what uses it must run eagerly too: then the module
that calls it is taken (`Breaks.climb`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from graphcap import _torch_private as private
from graphcap._breaks import Breaks, Target
from graphcap._trace_analysis import Analysis
from graphcap.backends.refusal_modes import line_text, user_frame
from graphcap.backends.tape_refusals import Refusal
from graphcap.errors import CutError, GraphcapError

_ROUNDS = 20


class _Hit:
    def __init__(self, stack: list[nn.Module], functions: list[Any], what: str, line: str) -> None:
        self.stack, self.functions, self.what, self.line = stack, functions, what, line


class _Discovery(Analysis):
    """A run that notes host reads and goes on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.parents: set[int] = set()
        self.hits: list[_Hit] = []

    def on_module(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.active and self.stack:
            self.parents.add(id(self.stack[-1]))
        return super().on_module(module, run, args, kwargs)

    def forbidden(self, name: str, row: Refusal) -> None:
        frame = user_frame()
        line = line_text(None if frame is None else (frame.f_code.co_filename, frame.f_lineno))
        self.hits.append(_Hit(list(self.stack), _functions(frame), f"{name} ({row.name})", line))

    def refuse_read(self, tensor: torch.Tensor, func: Any) -> None:
        """Not asked yet: where the parts are is still open."""

    def refuse_write(self, tensor: torch.Tensor) -> None:
        """Nor is this."""


def _functions(frame: FrameType | None) -> list[Any]:
    """The module-level functions that are running below the innermost module's forward, outermost first."""
    found: list[Any] = []
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module):
            break
        named = frame.f_globals.get(frame.f_code.co_name)
        inner: Any = named
        while hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        if isinstance(named, FunctionType) and getattr(inner, "__code__", None) is frame.f_code:
            found.append(named)
        frame = frame.f_back
    return found[::-1]


def discover(
    modules: list[nn.Module],
    breaks: Breaks,
    grad: bool,
    device: torch.device,
    constants: Mapping[int, private.StorageKey],
    run: Callable[..., Any],
    samples: Sequence[Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]],
) -> None:
    """Add to `breaks` what "auto" stands for. samples: the user's first; the others may be such that the callable raises."""
    names = {id(module): name for top in modules for name, module in top.named_modules()}
    for _ in range(_ROUNDS):
        trace = _Discovery(modules, breaks, grad, device, frozenset(), constants)
        for number, sample in enumerate(samples):
            args, kwargs = sample()
            try:
                trace.run(run, args, kwargs)
            except GraphcapError:
                raise
            except Exception:
                # A host read of a meta tensor fails once it has been noted; the next round has a break there.
                meta = breaks.planning is not None and breaks.planning.meta
                if number == 0 and not (meta and trace.hits):
                    raise
            if trace.hits:
                break
            trace = _Discovery(modules, breaks, grad, device, frozenset(), constants)
        if not trace.hits:
            return
        known = len(breaks.targets)
        for hit in trace.hits:
            target = _choose(hit, trace, names, {id(module) for module in modules})
            breaks.add(target.what, target.title, target.reason)
            breaks.found.add(id(target.what))
        if len(breaks.targets) == known:
            break
    hit = trace.hits[0]
    raise CutError(f'"auto" found nothing to break at for {hit.what}\n  at {hit.line}\n  Way out: name a break')


def _choose(hit: _Hit, trace: _Discovery, names: dict[int, str], tops: set[int]) -> Target:
    reason = f"auto: {hit.what} at {hit.line}"
    inner = hit.stack[-1] if hit.stack and id(hit.stack[-1]) not in tops else None
    if inner is not None and id(inner) not in trace.parents:
        return Target(inner, names.get(id(inner), type(inner).__name__), reason)
    if hit.functions:
        function = hit.functions[0]
        return Target(function, f"{function.__module__}.{function.__qualname__}", reason)
    if inner is not None:
        return Target(inner, names.get(id(inner), type(inner).__name__), reason)
    raise CutError(
        f'"auto": {hit.what} stands in the forward of the captured module itself\n  at {hit.line}\n'
        "  Way out: move it into a submodule or a function"
    )
