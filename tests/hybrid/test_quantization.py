"""The hybrid model in FP8 by the reference: graphs equal their eager twin bit for bit, scales and histories too, over the
layer kinds, orders and weight caches; what a context is; checkpoints; what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcap import Order, PlanError, StateError, capture
from graphcap._demo_sides import EagerSteps, PlainCalls, Side, Value, draw_batches, gradients_of, run_pass, state_of, update
from graphcap.errors import ReplayError
from graphcap.fp8_reference import RefFp8Linear, RefManager, RefRecipe
from graphcap.hybrid import GPTModel, HybridConfig, HybridModel, MLPLayer, MoELayer, OverlapSchedule, delayed_wgrad, load, save
from graphcap.hybrid.checkpoint import read, read_config, read_metadata, write
from graphcap.testing import difference

TOKENS = 24
SIZES: dict[str, Any] = {"hidden": 16, "head_dim": 4, "mamba_head_dim": 4, "mamba_state": 8, "ffn": 24, "expert_ffn": 16}
SCALES = ("scale_fwd", "hist_fwd", "scale_bwd", "hist_bwd")


def config_of(pattern: str, **values: Any) -> HybridConfig:
    made = {"quantization": "reference", "recipe": RefRecipe(history_len=4), "cache_weights": True, "init_std": 0.1}
    return HybridConfig(pattern=pattern, max_sequence=TOKENS, **(SIZES | made | values))


def model_of(config: HybridConfig, seed: int = 5) -> HybridModel:
    torch.manual_seed(seed)
    return HybridModel(config)


def graphs(model: HybridModel, order: Order) -> Any:
    """The model's chunks under the order, on the tape."""
    config = model.config
    tokens, labels = draw_batches(1, TOKENS, "sample", torch.device("cpu"))[0]
    first: dict[str, Any] = {"is_first_microbatch": True} if config.cache_weights else {}
    if order.chunks == 1:
        return capture(model, (tokens, labels), first, order=order, backend="tape", quantization=config.quant_spec)
    hidden = torch.zeros(*tokens.shape, config.hidden, dtype=config.dtype, requires_grad=True)
    named = [first, first | ({"tokens": tokens} if model.mtp is not None else {})]
    samples = ((tokens,), (hidden, labels))
    return capture(
        model.chunks(2), samples, tuple(named), order=order, backend="tape", quantization=config.quant_spec
    )


def side_of(model: HybridModel, steps: Any, rate: float = 3e-3) -> Side:
    return Side(model, steps, torch.optim.AdamW(model.parameters(), lr=rate))


def eager_of(model: HybridModel, order: Order) -> Side:
    return side_of(model, EagerSteps(order, (model,) if order.chunks == 1 else model.chunks(order.chunks)))


def step(side: Side, order: Order, number: int) -> list[Value]:
    """One step with its update; everything that it made and left."""
    side.optimizer.zero_grad(set_to_none=True)
    made = run_pass(side, order, draw_batches(order.microbatches, TOKENS, f"step {number}", torch.device("cpu")))[1]
    made += [replace(v, value=None if v.value is None else v.value.clone()) for v in gradients_of(side)]
    update(side)
    return made + [replace(v, value=v.value.clone()) for v in state_of(side) if v.value is not None]


def assert_equal(number: int, ours: list[Value], theirs: list[Value]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.kind, a.name) == (b.kind, b.name)
        found = difference(a.value, b.value)
        assert found is None, f"step {number}, {a.kind} {a.name}: {found}"
        assert a.value is None or bool(a.value.isfinite().all()), f"step {number}, {a.kind} {a.name}"


def assert_alive(model: HybridModel, seen: list[list[Value]]) -> None:
    """Every weight had a gradient at some time, every scale moved, and every history was turned."""
    received = {v.name for step in seen for v in step if v.kind == "gradient" and v.value is not None and v.value.any()}
    assert {name for name, _ in model.named_parameters()} <= received
    for layer, state in model.quantized_states().items():
        assert not (state["scale_fwd"] == 1).any(), layer
        assert not (state["scale_bwd"] == 1).any(), layer
        assert bool(state["hist_fwd"].any()), layer


INTERLEAVED, ONE = Order.interleaved(0, 2, 2, 4), Order.parse("0F0 0F1 0B0 0F2 0B1 0B2")

CASES = {
    "all kinds, interleaved": ("[M*E]M|[*-]-", INTERLEAVED, {"shared_ffn": 16}, 20),
    "flat, one chunk": ("M*-E", ONE, {}, 4),
    "MTP": ("*E|-/ME", INTERLEAVED, {}, 3),
    "no cache": ("[*E]|[M-]", INTERLEAVED, {"cache_weights": False, "shared_ffn": 16}, 3),
    "current scaling": ("[*E]|[M-]", INTERLEAVED, {"recipe": RefRecipe(kind="current", history_len=4)}, 3),
    "bfloat16, a layer in high precision": ("[*E]|[M-]", INTERLEAVED, {"dtype": torch.bfloat16, "high_precision_layers": (3,)}, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_graphs_equal_eager(name: str) -> None:
    pattern, order, values, steps = CASES[name]
    config = config_of(pattern, **values)
    model, twin = model_of(config), model_of(config)
    graphed = graphs(model, order)
    assert [part.name.rpartition(".")[2] for part in graphed.plan.breaks] == ["exchange"] * (
        pattern.count("E")
    )
    ours, theirs = side_of(model, graphed), eager_of(twin, order)
    seen = []
    for number in range(steps):
        seen.append(step(ours, order, number))
        assert_equal(number, seen[-1], step(theirs, order, number))
    assert graphed.stats.replays == steps * len([s for s in order if str(s.phase) == "F"])
    if config.recipe.kind == "delayed" and steps >= 4:
        assert_alive(model, seen)
