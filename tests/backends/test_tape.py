"""The tape against the conformance suite, and the table of refusals against its lines."""

from __future__ import annotations

import pytest
import torch

from graphcap.backends.tape import TapeBackend
from graphcap.backends.tape_refusals import REFUSALS
from tests.backends.conformance import Conformance
from tests.backends.refusal_rows import LINES


class TestTape(Conformance):
    @pytest.fixture
    def backend(self) -> TapeBackend:
        return TapeBackend(torch.device("cpu"))


def test_every_refusal_has_a_line() -> None:
    assert {line.row for line in LINES if line.row is not None} == {row.name for row in REFUSALS}


def test_refusals_say_why_and_what_to_do() -> None:
    for row in REFUSALS:
        assert row.reason
        assert row.cure
        assert row.operators or row.calls
    assert len({row.name for row in REFUSALS}) == len(REFUSALS)
