"""Functions that torch.compile made, inside a graphed part: they run as warm-up has compiled them.

Dynamo does not compile under a TorchDispatchMode, and it does not reuse what it has compiled under other function modes:
it runs the plain function, and goes on doing so in every later run of the process. Warm-up and recording use modes, so
recorded kernels would be others than those of an eager run. So around such a function

- while a graph is recorded, our modes are taken off, and Dynamo may not compile anew: it times kernels, which a stream that
  records can't do;
- where one of our dispatch modes looks on before that (a trace, a detector), the plain function runs, unknown to Dynamo, and
  the mode sees every operator of it;
- where only function modes are there, they are taken off, and Dynamo compiles what the recording will use.

That needs the function to be known before (`as_warmed_up`). As to any other, `plain_or_refused` sees to it that capturing
leaves no trace in Dynamo, and that none is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

from graphcap import _torch_private as private
from graphcap.backends.refusal_modes import CallGate, OperatorGate
from graphcap.errors import CutError, StateError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_warmed_up(function: _Function, name: str) -> _Function:
    """`function`, compiled by torch, such that a run under graphcap's modes is the run that eager code makes.

    Raises StateError where nothing that has been compiled so far fits the call. Under a dispatch mode of the user's, where
    eager code runs it uncompiled too, it is called as it is.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        modes = private.modes()
        if not modes or not all(type(mode).__module__.startswith("graphcap.") for mode in modes):
            return function(*args, **kwargs)
        if any(isinstance(mode, CallGate | OperatorGate) for mode in modes):
            return _recorded(function, name, args, kwargs)
        if any(isinstance(mode, TorchDispatchMode) for mode in modes):
            with private.compiler_stance("force_eager"):
                return function(*args, **kwargs)
        with private.without_modes():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _recorded(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with private.without_modes(), private.compiler_stance("fail_on_recompile"):
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if not private.is_refused_compilation(error):
                raise
            raise StateError(
                f"{name} is compiled by torch.compile, and nothing compiled before fits the call that is being recorded, "
                "which can't compile. Have at least one warm-up run (CaptureConfig(warmup=...), num_warmup_iters), or "
                f"switch the compilation off for eager runs and graphs alike. {error}"
            ) from error


@contextmanager
def plain_or_refused() -> Iterator[None]:
    """While a capture is made: what torch.compile has made runs uncompiled where one of our modes looks on, without Dynamo
    knowing; where a graph is recorded, it raises CutError."""
    with private.before_compiled(_may_compile):
        yield


def _may_compile(name: str, is_plain: bool) -> bool:
    ours = [mode for mode in private.modes() if type(mode).__module__.startswith("graphcap.")]
    if not ours or is_plain:
        return True
    if any(isinstance(mode, CallGate | OperatorGate) for mode in ours):
        raise CutError(
            f"a graphed part calls {name}, which torch.compile has made. It can't be compiled while a graph is recorded, "
            "and uncompiled it may round otherwise than eager code does: call it in an EAGER part (or name the module that "
            "calls it in break_at), or use the plain function, in eager runs and graphs alike"
        )
    return False
