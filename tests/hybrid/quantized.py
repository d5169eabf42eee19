"""Quantised hybrid models, graphed and eager, on any device: built from one seed, stepped under an order, and everything
that a step makes and leaves compared bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from graphcap import Order, capture
from graphcap._demo_sides import EagerSteps, Side, Value, draw_batches, gradients_of, run_pass, state_of, update
from graphcap.hybrid import HybridConfig, HybridModel
from graphcap.testing import difference

INTERLEAVED, ONE = Order.interleaved(0, 2, 2, 4), Order.parse("0F0 0F1 0B0 0F2 0B1 0B2")


def model_of(config: HybridConfig, device: str = "cpu", seed: int = 5) -> HybridModel:
    torch.manual_seed(seed)
    with torch.device(device):
        return HybridModel(config)


def graphed_side(model: HybridModel, order: Order) -> Side:
    """The model's chunks in graphs under the order."""
    config, device = model.config, next(model.parameters()).device
    tokens, labels = draw_batches(1, config.max_sequence, "sample", device)[0]
    first: dict[str, Any] = {"is_first_microbatch": True} if config.cache_weights else {}
    options: dict[str, Any] = {"backend": "cuda" if tokens.is_cuda else "tape", "quantization": config.quant_spec}
    if order.chunks == 1:
        return side_of(model, capture(model, (tokens, labels), first, order=order, **options))
    hidden = torch.zeros(*tokens.shape, config.hidden, dtype=config.dtype, device=device, requires_grad=True)
    named = (first, first | ({"tokens": tokens} if model.mtp is not None else {}))
    graphed = capture(model.chunks(2), ((tokens,), (hidden, labels)), named, order=order, **options)
    return side_of(model, graphed)


def eager_side(model: HybridModel, order: Order) -> Side:
    chunks = (model,) if order.chunks == 1 else model.chunks(order.chunks)
    return side_of(model, EagerSteps(order, chunks))


def side_of(model: HybridModel, steps: Any) -> Side:
    return Side(model, steps, torch.optim.AdamW(model.parameters(), lr=3e-3))


def step(side: Side, order: Order, number: int) -> list[Value]:
    """One step with its update: copies of everything that it made and left."""
    device, tokens = next(side.model.parameters()).device, side.model.config.max_sequence
    side.optimizer.zero_grad(set_to_none=True)
    made = run_pass(side, order, draw_batches(order.microbatches, tokens, f"step {number}", device))[1]
    made += [replace(v, value=None if v.value is None else v.value.clone()) for v in gradients_of(side)]
    update(side)
    return made + [replace(v, value=None if v.value is None else v.value.clone()) for v in state_of(side)]


def assert_equal(number: int, ours: list[Value], theirs: list[Value]) -> None:
    """All values alike, and finite."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a.kind, a.name) == (b.kind, b.name)
        found = difference(a.value, b.value)
        assert found is None, f"step {number}, {a.kind} {a.name}: {found}"
        assert a.value is None or bool(a.value.isfinite().all()), f"step {number}, {a.kind} {a.name}"


def assert_alive(model: HybridModel, seen: list[list[Value]]) -> None:
    """Every weight had a gradient at some time; every scale of an input, a weight and a gradient moved."""
    received = {v.name for made in seen for v in made if v.kind == "gradient" and v.value is not None and v.value.any()}
    assert {name for name, _ in model.named_parameters()} <= received
    states = model.quantized_states()
    assert states
    for layer, state in states.items():
        # Of each product's tensors: input and weight (Transformer Engine has an output's, unused), and the gradient.
        width = state["scale_fwd"].numel() // state["scale_bwd"].numel() if len(state["scale_fwd"]) % 3 else 3
        products = state["scale_fwd"].view(-1, width)
        assert not (products[:, :2] == 1).any(), layer
        assert not (state["scale_bwd"].view(len(products), -1)[:, 0] == 1).any(), layer
        assert bool(state["hist_fwd"].any()), layer
