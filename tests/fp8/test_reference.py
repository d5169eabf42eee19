"""The implementation in plain torch, on the tape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphcap.fp8_reference import RefFp8Linear, RefManager, RefRecipe
from tests.fp8.conformance import WIDTH, QuantizedConformance


class Reference:
    backend, device, dtype = "tape", "cpu", torch.float32

    def __init__(self) -> None:
        self.state = RefManager()

    def recipe(self, **fields: Any) -> RefRecipe:
        return RefRecipe(**fields)

    def linear(self, bias: bool = False) -> nn.Module:
        return RefFp8Linear(WIDTH, WIDTH, self.state, bias, history_len=4)

    def reset(self) -> None:
        """Its manager is as new as the test."""


class TestReference(QuantizedConformance):
    @pytest.fixture
    def impl(self) -> Reference:
        return Reference()
