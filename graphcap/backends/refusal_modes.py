"""The gate that both backends put in front of a capture: it asks the table and words the error.

A refusal is remembered, so that a `try/except` of the user's around it doesn't make a wrong graph: closing the capture
raises it again.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap import _torch_private as private
from graphcap.backends.tape_refusals import DeviceView, Refusal, refused_call, refused_operator, tensors_in
from graphcap.errors import ForbiddenOpError

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def user_line() -> str:
    """`file:line: source` of the innermost frame that is neither torch's nor ours."""
    return line_text(user_place())


def user_place() -> tuple[str, int] | None:
    """File and line of the innermost frame that is neither torch's nor ours."""
    frame = user_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_text(place: tuple[str, int] | None) -> str:
    if place is None:
        return "a line that is not on this thread's stack (a backward pass)"
    return f"{place[0]}:{place[1]}: {linecache.getline(*place).strip()}"


def _is_library(file: str) -> bool:
    is_stdlib = file.startswith(_STDLIB) and "site-packages" not in file
    return is_stdlib or file.startswith((_OWN, _TORCH, "<frozen"))


class Gate:
    """Asks the table before anything runs, and remembers the first refusal of one capture."""

    def __init__(self, view: DeviceView, generators: tuple[torch.Generator, ...]) -> None:
        self.view = view
        self.generators = generators
        self.refused: ForbiddenOpError | None = None

    def operator(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        row = refused_operator(func, args, kwargs, self.view)
        if row is not None:
            self._refuse_row(str(func), row)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self._generator(str(func), value)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        row = refused_call(func, args, kwargs, self.view)
        if row is not None:
            self._refuse_row(getattr(func, "__qualname__", repr(func)), row)

    def refuse(self, operator: str, reason: str, cure: str) -> None:
        """Raise, and see to it that the capture fails even if somebody catches it."""
        error = ForbiddenOpError(f"{operator} can't be captured: {reason}.\n  at {user_line()}\n  Way out: {cure}.")
        if self.refused is None:
            self.refused = error
        try:
            raise error
        finally:
            del error  # the error holds this frame and all above it: no cycle may keep their tensors

    def higher_order(self, func: Any) -> None:
        self.refuse(
            f"torch.ops.higher_order.{func.name()}",
            "operators that take functions (cond, while_loop) decide on the host, or are recorded by no mode",
            "move it into an EAGER part (break_at=...), or use torch.where",
        )

    def _refuse_row(self, operator: str, row: Refusal) -> None:
        self.refuse(f"{operator} ({row.name})", row.reason, row.cure)

    def _generator(self, operator: str, generator: torch.Generator) -> None:
        known = (*self.generators, default_generator(generator.device))
        if private.generator_key(generator) not in map(private.generator_key, known):
            self.refuse(
                operator,
                "it draws from a generator that the capture doesn't know, so replays would repeat its numbers",
                "pass the generator to the capture (generators=[...]), or draw from the default one",
            )


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


class CallGate(TorchFunctionMode):
    """Host reads that never become an operator (tolist, numpy, repr, torch.tensor, on the CPU also .cpu())."""

    def __init__(self, gate: Gate, replacements: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.gate = gate
        # Calls that must be recorded as other calls, by name; a replacement that returns NotImplemented steps aside.
        self.replacements = dict(replacements or {})

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.gate.call(func, args, kwargs)
        name = getattr(func, "__name__", "")
        replacement = self.replacements.get(name)
        if replacement is not None:
            result = replacement(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in _RUNS_BACKWARD:
            return self._backward(func, args, kwargs)
        return func(*args, **kwargs)

    def _backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch takes this mode off for the whole backward pass; put it back for each node that runs a user's Python.
        # The engine restores the thread's state after each node, so nothing has to be popped.
        nodes = private.python_nodes(list(tensors_in(args, kwargs)))
        handles = [node.register_prehook(self._enter_for_node) for node in nodes]
        try:
            return func(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def _enter_for_node(self, grad_outputs: Any) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]


_RUNS_BACKWARD = frozenset(("grad", "backward"))
_DECIDES_ON_HOST = frozenset(("cond", "while_loop"))


class OperatorGate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks the table about every dispatched operator (cuda; the tape's recorder asks by itself)."""

    supports_higher_order_operators = True

    def __init__(self, gate: Gate) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate = gate

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            if func.name() in _DECIDES_ON_HOST:
                self.gate.higher_order(func)
            return func(*args, **kwargs)
        if private.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.gate.operator(func, args, kwargs)
        return func(*args, **kwargs)
