"""Process state that both backends change for a while and put back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from graphcap.errors import CaptureError

_thread = threading.local()


def is_capturing() -> bool:
    """Whether this thread is inside a capture of either backend."""
    return bool(getattr(_thread, "capturing", False))


@contextmanager
def exclusive_capture() -> Iterator[None]:
    """Marks this thread as capturing; refused where it already is."""
    if is_capturing():
        raise CaptureError("a capture inside a capture: close the outer one first")
    _thread.capturing = True
    try:
        yield
    finally:
        _thread.capturing = False


@contextmanager
def frozen_gc() -> Iterator[None]:
    """No garbage collection inside: a collected tensor would free memory in the middle of a capture."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    if not was_frozen:  # unfreeze() would also thaw what somebody else froze
        gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
