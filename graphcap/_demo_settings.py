"""What the demo runs: the settings of its command line, and what follows from them."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch

from graphcap._demo_sides import text
from graphcap.errors import DeviceError, PlanError
from graphcap.fp8_reference import RefRecipe
from graphcap.hybrid import HybridConfig
from graphcap.order import Order

Schedule = Literal["none", "1f1b", "interleaved"]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HISTORY: Final = 4  # rows of an amax history, with fp8
PIPELINE_RANKS: Final = 2  # the schedules are those of rank 0 of two; the chain of chunks runs in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What to run. None: device is cuda where there is one; microbatches 1 without a schedule, else 4; chunks 1, or 2
    for interleaved; schedule none, or interleaved with fp8; dtype float32, or bfloat16 with Transformer Engine. tokens:
    bytes per microbatch. fp8: the layers' products in FP8 with delayed scaling and cached weights, by Transformer Engine
    where it is installed and the device is a GPU, else by the reference in plain torch."""

    steps: int = 20
    pattern: str = "[M*E][M*E]"
    backend: str = "auto"
    device: str | None = None
    dtype: str | None = None
    schedule: Schedule | None = None
    microbatches: int | None = None
    chunks: int | None = None
    hidden: int = 32
    experts: int = 4
    top_k: int = 2
    tokens: int = 128
    seed: int = 0
    fp8: bool = False

    def resolved(self) -> ResolvedSettings:
        """The settings with nothing left open. PlanError, DeviceError for what can't be."""
        if self.backend == "cuda" and self.device is None and not torch.cuda.is_available():
            raise DeviceError("this machine has no GPU: use --backend tape")
        on_gpu = torch.cuda.is_available() and self.backend != "tape"  # the tape runs on the CPU
        device = self.device or ("cuda" if on_gpu else "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise DeviceError("device cuda: torch sees no GPU here. Use --device cpu; `graphcap doctor` says more")
        if not 1 <= self.tokens < len(text()):
            raise PlanError(f"tokens is {self.tokens}: expected 1 to {len(text()) - 1}, the length of the text")
        if self.steps < 1:
            raise PlanError(f"steps is {self.steps}: expected at least 1")
        te = self.fp8 and device == "cuda" and importlib.util.find_spec("transformer_engine") is not None
        schedule = self.schedule or ("interleaved" if self.fp8 else "none")
        dtype = self.dtype or ("bfloat16" if te else "float32")
        several = schedule == "interleaved"
        chunks = self.chunks if self.chunks is not None else 2 if several else 1
        if chunks != 1 and not several:
            raise PlanError(f"chunks is {chunks} with schedule {schedule!r}: only interleaved has several chunks")
        microbatches = self.microbatches if self.microbatches is not None else 1 if schedule == "none" else 4
        settings = replace(self, schedule=schedule, dtype=dtype)
        order = settings._order(chunks, microbatches)
        backend = self.backend if self.backend != "auto" else "cuda" if device == "cuda" else "tape"
        quantization = None if not self.fp8 else "te" if te else "reference"
        return ResolvedSettings(settings, torch.device(device), backend, order, settings._config(quantization))

    def _order(self, chunks: int, microbatches: int) -> Order:
        if self.schedule == "none":
            return Order.forward_backward(microbatches)
        if self.schedule == "1f1b":
            return Order.one_f_one_b(0, PIPELINE_RANKS, microbatches)
        return Order.interleaved(0, PIPELINE_RANKS, chunks, microbatches)

    def _config(self, quantization: Any) -> HybridConfig:
        assert self.dtype is not None
        quantised: dict[str, Any] = {}
        if quantization is not None:  # twice the heads of Mamba, half as wide: FP8 products take widths in multiples of 16
            quantised = {"quantization": quantization, "recipe": _recipe(quantization), "cache_weights": True}
            quantised |= {"mamba_heads": 16, "mamba_head_dim": max(1, self.hidden // 8)}
        return HybridConfig(
            pattern=self.pattern,
            hidden=self.hidden,
            head_dim=max(2, self.hidden // 8 * 2),
            ffn=2 * self.hidden,
            experts=self.experts,
            top_k=self.top_k,
            expert_ffn=self.hidden,
            max_sequence=self.tokens,
            dtype=DTYPES[self.dtype],
            **({"mamba_head_dim": max(1, self.hidden // 4)} | quantised),
        )


def _recipe(quantization: str) -> Any:
    """Delayed scaling with a history that turns round within a few steps."""
    if quantization == "reference":
        return RefRecipe(history_len=HISTORY)
    # TE has to load its cuDNN before torch loads one, which is before anything runs.
    importlib.import_module("transformer_engine.pytorch")
    return importlib.import_module("transformer_engine.common.recipe").DelayedScaling(amax_history_len=HISTORY)


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings, and the device, backend, order and model sizes that follow from them."""

    settings: DemoSettings
    device: torch.device
    backend: str
    order: Order
    config: HybridConfig
