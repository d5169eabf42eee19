"""What the caller runs around warm-up and recording, and never inside a graph (TE's capture_time_hooks)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from graphcap.errors import HookError

Hook = Callable[..., Any]
MOMENTS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@dataclass(frozen=True, slots=True)
class TimeHooks:
    """before_warmup, after_warmup: once each. per_callable[unit][moment]: hooks that take the module, in MOMENTS' order.

    They run at every forward and backward of warm-up and of recording, on the stream of the capture, outside of every
    graph; never at a replay.
    """

    before_warmup: Hook | None = None
    after_warmup: Hook | None = None
    per_callable: tuple[tuple[tuple[Hook, ...], ...], ...] = ()

    @property
    def watches_runs(self) -> bool:
        """Whether some hook could tell how often, and in which order, the callables run."""
        return any(hooks for entry in self.per_callable for hooks in entry)

    @contextmanager
    def warmup(self) -> Iterator[None]:
        if self.before_warmup is not None:
            self.before_warmup()
        yield
        if self.after_warmup is not None:
            self.after_warmup()

    @contextmanager
    def forward(self, unit: int, module: Any) -> Iterator[None]:
        self._run(unit, 0, module)
        yield
        self._run(unit, 1, module)

    @contextmanager
    def backward(self, unit: int, module: Any) -> Iterator[None]:
        self._run(unit, 2, module)
        yield
        self._run(unit, 3, module)

    def _run(self, unit: int, moment: int, module: Any) -> None:
        for hook in self.per_callable[unit][moment] if self.per_callable else ():
            if hook(module) is not None:
                raise HookError(
                    f"a hook of capture_time_hooks[{unit}][{MOMENTS[moment]!r}] returned a value: it runs beside the "
                    "capture, so there is nobody to take one. Let it return None"
                )


NO_HOOKS = TimeHooks()
