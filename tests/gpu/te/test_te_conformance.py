"""The rules of `QuantizedState` on Transformer Engine: the suite of tests/fp8, and captures of several layers and parts."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from tests.fp8 import conformance
from tests.fp8.conformance import WIDTH, QuantizedConformance

pytestmark = pytest.mark.gpu


class TransformerEngine:
    """What the suite asks of an implementation."""

    backend, device, dtype = "cuda", "cuda", torch.bfloat16

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        from graphcap.fp8_meta import find

        self._te = te
        state = find([self.linear()])
        assert state is not None
        self.state = state

    def recipe(self, **fields: Any) -> Any:
        from transformer_engine.common.recipe import DelayedScaling, Format

        if fields.pop("backward", None) is torch.float8_e4m3fn:
            fields["fp8_format"] = Format.E4M3
        renamed = {"history_len": "amax_history_len", "algo": "amax_compute_algo"}
        return DelayedScaling(**{renamed.get(name, name): value for name, value in fields.items()})

    def linear(self, bias: bool = False) -> nn.Module:
        made: nn.Module = self._te.Linear(WIDTH, WIDTH, bias=bias, params_dtype=self.dtype)
        return made

    def reset(self) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()


class TestTransformerEngine(QuantizedConformance):
    @pytest.fixture
    def impl(self, monkeypatch: pytest.MonkeyPatch) -> TransformerEngine:
        monkeypatch.setattr(conformance, "deepcopy", _copied)
        return TransformerEngine()


def _copied(module: nn.Module) -> nn.Module:
    """A copy that is not registered. (TE's deep copies believe that they are, and their scales never move again.)"""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    made = deepcopy(module)
    for owner in made.modules():
        vars(owner).get("fp8_meta", {}).pop(FP8GlobalStateManager.get_buffer_info(), None)
    return made
