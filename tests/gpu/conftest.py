"""GPU tests: one process, deterministic kernels. cuBLAS reads its workspace setting when its handle is made."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from graphcap.testing import deterministic

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with deterministic("cuda"):
        yield
