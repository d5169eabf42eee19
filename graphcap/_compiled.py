"""Functions that torch.compile made, inside a graphed part: they run as warm-up has compiled them.

Dynamo does not compile under a TorchDispatchMode, and it does not reuse what it has compiled under other function modes:
it runs the plain function, and goes on doing so in every later run of the process. Warm-up and recording use modes, so
recorded kernels would be others than those of an eager run. Around such a function our modes are taken off, and Dynamo may
not compile anew: a stream that records can't be benchmarked on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from graphcap import _torch_private as private
from graphcap.errors import StateError

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
        with private.without_modes(), private.no_new_compilation():
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if not private.is_refused_compilation(error):
                    raise
                raise StateError(
                    f"{name} is compiled by torch.compile, and nothing compiled before fits the call that is being "
                    "recorded, which can't compile. Have at least one warm-up run (num_warmup_iters), or switch the "
                    f"compilation off for eager runs and graphs alike. {error}"
                ) from error

    return call  # type: ignore[return-value]
