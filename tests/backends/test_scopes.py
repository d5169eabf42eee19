"""Process state that captures change and put back."""

from __future__ import annotations

import gc
import threading

import pytest

from graphcap.backends.scopes import exclusive_capture, frozen_gc, is_capturing
from graphcap.errors import CaptureError


def test_frozen_gc_thaws_what_it_froze() -> None:
    gc.unfreeze()
    with frozen_gc():
        assert gc.get_freeze_count() > 0
        assert not gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_frozen_gc_leaves_what_was_frozen_before() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with frozen_gc():
            pass
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()


def test_exclusive_capture_is_per_thread() -> None:
    seen = []
    with exclusive_capture():
        assert is_capturing()
        thread = threading.Thread(target=lambda: seen.append(is_capturing()))
        thread.start()
        thread.join()
        with pytest.raises(CaptureError, match="inside a capture"), exclusive_capture():
            pass
        assert is_capturing(), "a refused capture must not end the outer one"
    assert not is_capturing()
    assert seen == [False]
