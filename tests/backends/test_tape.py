"""The tape against the conformance suite and the table of refusals."""

from __future__ import annotations

import pytest
import torch

from graphcap.backends.tape import TapeBackend
from tests.backends.conformance import Conformance


class TestTape(Conformance):
    @pytest.fixture
    def backend(self) -> TapeBackend:
        return TapeBackend(torch.device("cpu"))
