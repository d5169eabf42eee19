"""What the demo runs: the settings of its command line, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from graphcap._demo_sides import text
from graphcap.errors import DeviceError, PlanError
from graphcap.hybrid import HybridConfig
from graphcap.order import Order

Schedule = Literal["none", "1f1b", "interleaved"]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PIPELINE_RANKS: Final = 2  # the schedules are those of rank 0 of two; the chain of chunks runs in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What to run. None: device is cuda where there is one; microbatches 1 without a schedule, else 4; chunks 1, or 2
    for interleaved. tokens: bytes per microbatch."""

    steps: int = 20
    pattern: str = "[M*E][M*E]"
    backend: str = "auto"
    device: str | None = None
    dtype: str = "float32"
    schedule: Schedule = "none"
    microbatches: int | None = None
    chunks: int | None = None
    hidden: int = 32
    experts: int = 4
    top_k: int = 2
    tokens: int = 128
    seed: int = 0

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
        several = self.schedule == "interleaved"
        chunks = self.chunks if self.chunks is not None else 2 if several else 1
        if chunks != 1 and not several:
            raise PlanError(f"chunks is {chunks} with schedule {self.schedule!r}: only interleaved has several chunks")
        microbatches = self.microbatches if self.microbatches is not None else 1 if self.schedule == "none" else 4
        order = self._order(chunks, microbatches)
        backend = self.backend if self.backend != "auto" else "cuda" if device == "cuda" else "tape"
        return ResolvedSettings(self, torch.device(device), backend, order, self._config())

    def _order(self, chunks: int, microbatches: int) -> Order:
        if self.schedule == "none":
            return Order.forward_backward(microbatches)
        if self.schedule == "1f1b":
            return Order.one_f_one_b(0, PIPELINE_RANKS, microbatches)
        return Order.interleaved(0, PIPELINE_RANKS, chunks, microbatches)

    def _config(self) -> HybridConfig:
        return HybridConfig(
            pattern=self.pattern,
            hidden=self.hidden,
            head_dim=max(2, self.hidden // 8 * 2),
            mamba_head_dim=max(1, self.hidden // 4),
            ffn=2 * self.hidden,
            experts=self.experts,
            top_k=self.top_k,
            expert_ffn=self.hidden,
            max_sequence=self.tokens,
            dtype=DTYPES[self.dtype],
        )


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings, and the device, backend, order and model sizes that follow from them."""

    settings: DemoSettings
    device: torch.device
    backend: str
    order: Order
    config: HybridConfig
