"""Backends: what records and replays. `choose` maps the user's word and tensors to one of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from graphcap.backends.base import Backend, Event, Graph, Pool
from graphcap.errors import DeviceError, PlanError

__all__ = ["Backend", "Event", "Graph", "Pool", "choose"]

_warned_tape = False


def choose(name: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> Backend:
    """The backend for a capture whose parameters, buffers and samples are `tensors` (name and tensor).

    name: "auto" (cuda if all are on one CUDA device, tape if all are on the CPU), "tape" or "cuda". Raises DeviceError
    when the tensors are on several devices, on a device no backend serves, or not where the named backend needs them.
    """
    if name not in ("auto", "tape", "cuda"):
        raise PlanError(f"backend={name!r}: expected 'auto', 'tape' or 'cuda'")
    device = common_device(name, tensors)
    if device.type == "cpu":
        from graphcap.backends.tape import TapeBackend

        if name == "cuda":
            raise DeviceError("backend='cuda', but the tensors are on the CPU: move the module and the samples to a GPU")
        if name == "auto":
            _warn_tape()
        return TapeBackend(device)
    if device.type == "cuda":
        from graphcap.backends.cuda import CudaBackend

        if name == "tape":
            raise DeviceError(f"backend='tape', but the tensors are on {device}: the tape runs on the CPU only")
        return CudaBackend(device)
    raise DeviceError(f"no backend for tensors on {device}: expected 'cpu' (tape) or 'cuda'")


def common_device(name: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> torch.device:
    """The one device of all tensors; DeviceError where there are two."""
    if not tensors:
        return torch.device("cuda" if name == "cuda" else "cpu")
    first_name, first = tensors[0]
    for other_name, other in tensors:
        if other.device != first.device:
            raise DeviceError(
                f"tensors on two devices: {first_name} on {first.device}, {other_name} on {other.device}. A graph lives "
                "on one device: move everything there, or capture each device's part on its own"
            )
    return first.device


def _warn_tape() -> None:
    global _warned_tape
    if not _warned_tape:
        _warned_tape = True
        warnings.warn(
            "all tensors are on the CPU, so graphcap records on its tape: this is for testing and saves no time "
            "(say backend='tape' to silence this)",
            stacklevel=5,  # the caller of capture() or make_graphed_callables()
        )
