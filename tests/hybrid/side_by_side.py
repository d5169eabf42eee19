"""A model with graphs beside its eager twin, whole or in chunks under an order, compared bit for bit after every step."""

from __future__ import annotations

import copy
from typing import Any

import torch

from graphcap import Order, capture, testing
from graphcap._demo_sides import EagerSteps, PlainCalls, Side, Value, draw_batches, gradients_of, run_pass, state_of, update
from graphcap.hybrid import HybridConfig, HybridModel


def train(config: HybridConfig, *, chunks: int = 1, steps: int = 20, device: str = "cpu") -> HybridModel:
    """`steps` steps of AdamW on both sides; the graphed model. With several chunks: interleaved, four microbatches."""
    order = Order.interleaved(0, 2, chunks, 4) if chunks > 1 else Order.forward_backward(2)
    tokens, place = config.max_sequence, torch.device(device)
    with testing.deterministic(device):
        torch.manual_seed(5)
        with place:
            model = HybridModel(config)
        twin = copy.deepcopy(model)
        graphed = _capture(model, order, draw_batches(1, tokens, "sample", place)[0])
        eager: Any = PlainCalls(twin) if chunks == 1 else EagerSteps(order, twin.chunks(chunks))
        sides = [_side(model, PlainCalls(graphed) if chunks == 1 else graphed), _side(twin, eager)]
        received: set[str] = set()
        for step in range(steps):
            batches = draw_batches(order.microbatches, tokens, f"step {step}", place)
            found: list[list[Value]] = []
            for side in sides:
                side.optimizer.zero_grad(set_to_none=True)
                made = run_pass(side, order, batches)[1] + list(gradients_of(side))
                update(side)
                found.append([*made, *state_of(side)])
            _assert_equal(step, *found)
            received |= {v.name for v in found[0] if v.kind == "gradient" and v.value is not None and v.value.any()}
        silent = {name for name, _ in model.named_parameters() if ".expert_mlps." not in name} - received
        assert not silent, f"no gradient in any step: {silent}"
    return model


def _capture(model: HybridModel, order: Order, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    tokens, labels = batch
    backend = "cuda" if tokens.is_cuda else "tape"
    if order.chunks == 1:
        return capture(model, (tokens, labels), backend=backend)
    shape = (*tokens.shape, model.config.hidden)
    hidden = torch.zeros(shape, dtype=model.config.dtype, device=tokens.device, requires_grad=True)
    samples = [(tokens,), *[(hidden,)] * (order.chunks - 2), (hidden, labels)]
    named = [{} for _ in samples[1:]] + [{} if model.mtp is None else {"tokens": tokens}]
    return capture(model.chunks(order.chunks), tuple(samples), tuple(named), order=order, backend=backend)


def _side(model: HybridModel, steps: Any) -> Side:
    return Side(model, steps, torch.optim.AdamW(model.parameters(), lr=3e-3))


def _assert_equal(step: int, graphed: list[Value], eager: list[Value]) -> None:
    for a, b in zip(graphed, eager, strict=True):
        found = testing.difference(a.value, b.value)
        assert found is None, f"step {step}, {a.kind} {a.name}: {found}"
        assert a.value is None or bool(a.value.isfinite().all())
