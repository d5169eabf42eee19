"""Tests with Transformer Engine: loaded before torch loads a cuDNN of its own, clean process state after every test."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
# Functions that torch compiles are timed and tuned at their first run, which is not what these tests are about; as in TE's
# own test script. tests/gpu/te/compiled.py runs with them.
os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
if importlib.util.find_spec("transformer_engine") is not None:
    importlib.import_module("transformer_engine.pytorch")


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from tests.gpu.te.kit import choose_attention_again

    FP8GlobalStateManager.reset()
    choose_attention_again()
    yield
    FP8GlobalStateManager.reset()
    gc.collect()
