"""Ranks that capture together: where eager parts run collectives, a capture that fails on one rank fails on all.

Else the others would go on to train, and wait in their next collective for a rank that has none of these graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap import _torch_private as private
from graphcap.errors import CaptureError


class Ranks:
    """The process groups whose collectives were seen while warming up, and the agreement of their ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: list[dist.ProcessGroup] = []
        self._active = dist.is_available() and dist.is_initialized()

    @contextmanager
    def stage(self, name: str, *, watch: bool = False) -> Iterator[None]:
        """Run one stage; at its end the ranks of every group agree by one all-reduce. With `watch`, note the groups."""
        try:
            if watch and self._active:
                with _Watch(self._groups):
                    yield
            else:
                yield
        except BaseException:
            self._all_succeeded(False)
            raise
        if not self._all_succeeded(True):
            raise CaptureError(
                f"{name} failed on another rank of a process group that the eager parts use, so it is given up here as "
                "well; that rank's error says why. Nothing is left behind: all ranks can capture again"
            )

    def _all_succeeded(self, here: bool) -> bool:
        everywhere = here
        for group in self._groups:
            flag = torch.tensor(1 if here else 0, device=self._device)
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
            everywhere = everywhere and bool(flag.item())
        return everywhere


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the process group of every collective (they are operators of the namespace c10d)."""

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._groups = groups

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            for value in args:
                if private.is_process_group(value):
                    group = private.process_group(value)
                    if not any(group is known for known in self._groups):
                        self._groups.append(group)
        return func(*args, **(kwargs or {}))
