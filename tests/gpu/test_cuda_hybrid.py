"""MTP, router losses and the tracker on a GPU: 20 steps with graphs beside 20 without, bit for bit; a checkpoint loaded
under captured graphs. Run by hand: pytest -m gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphcap import capture
from graphcap.fp8_reference import RefRecipe
from graphcap.hybrid import HybridConfig, HybridModel, load, save
from graphcap.testing import deterministic
from tests.hybrid.quantized import INTERLEAVED, assert_alive, assert_equal, eager_side, graphed_side, model_of, step
from tests.hybrid.side_by_side import train
from tests.hybrid.test_grad_modes import train_under_autocast
from tests.hybrid.test_moe_training import delayed_with_slices

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pattern", "chunks", "more"),
    [
        ("[M*E][M*E]/*E", 1, {"aux_loss": 0.02, "z_loss": 0.01, "router_statistics": True}),
        ("[*E]|[*-]/*E/*E", 2, {"aux_loss": 0.02, "z_loss": 0.01}),
        ("*-|/*E", 2, {"tie_embeddings": True, "z_loss": 0.01}),
    ],
)
def test_graphs_on_equals_graphs_off(pattern: str, chunks: int, more: dict[str, Any], dtype: torch.dtype) -> None:
    model = train(HybridConfig(pattern=pattern, max_sequence=64, dtype=dtype, **more), chunks=chunks, device="cuda")
    assert model.tracker.report().mtp_loss.records == 20 * (4 if chunks > 1 else 2) * model.config.layers.mtp_depth


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_quantised_by_the_reference(kind: Any) -> None:
    """CUDA graphs of the reference's FP8 layers beside eager ones: cached weights, an interleaved order, scales too."""
    config = HybridConfig(
        pattern="[M*E]|[*-]",
        max_sequence=64,
        dtype=torch.bfloat16,
        shared_ffn=32,
        quantization="reference",
        recipe=RefRecipe(kind=kind, history_len=4),
        cache_weights=True,
    )
    with deterministic("cuda"):
        ours = graphed_side(model_of(config, "cuda"), INTERLEAVED)
        theirs = eager_side(model_of(config, "cuda"), INTERLEAVED)
        seen = []
        for number in range(5):
            seen.append(step(ours, INTERLEAVED, number))
            assert_equal(number, seen[-1], step(theirs, INTERLEAVED, number))
    if kind == "delayed":
        assert_alive(ours.model, seen)


def test_a_captured_model_goes_on_with_what_was_loaded(tmp_path: Path) -> None:
    ids = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(7)).cuda()
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            models.append(HybridModel(HybridConfig(pattern="[M*E]-/*-")))
    save(models[1], tmp_path)
    graphed = capture(models[0], (tokens, labels))
    load(graphed, tmp_path)
    assert torch.equal(graphed(tokens, labels).loss, models[1](tokens, labels).loss)


@pytest.mark.parametrize("recompute", ["none", "norm", "layer"])
def test_graphs_on_equals_graphs_off_under_autocast(recompute: str) -> None:
    with deterministic("cuda"):
        train_under_autocast(recompute, "cuda")


@pytest.mark.parametrize("tokens", [1, 13, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_delayed_with_inputs_that_are_not_contiguous(dtype: torch.dtype, tokens: int) -> None:
    with deterministic("cuda"):
        delayed_with_slices(dtype, tokens, "cuda")
