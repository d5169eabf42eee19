"""A layer with graphs around experts that run eagerly in FP8, in one autocast region with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap.fp8_meta import QuantSpec
from graphcap.fp8_reference import RefFp8Linear, RefManager, RefRecipe
from graphcap.order import Order
from graphcap.partial_layer import EAGER, GRAPHED, Part, PartialLayer

WIDTH, EXPERTS, TOKENS = 32, 4, 24


class MoE(PartialLayer):
    """Attention-like projection, router and shared expert in graphs; experts on as many rows as they get."""

    inputs, outputs = "x, is_first_microbatch=None", "y"

    def __init__(self, manager: RefManager) -> None:
        super().__init__()
        self.project = RefFp8Linear(WIDTH, WIDTH, manager, history_len=4)
        self.shared = RefFp8Linear(WIDTH, WIDTH, manager, history_len=4)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(RefFp8Linear(WIDTH, WIDTH, manager, history_len=4) for _ in range(EXPERTS))

    def parts(self) -> tuple[Part, ...]:
        return (
            GRAPHED("route", "x, is_first_microbatch -> h, shared, chosen, weight"),
            EAGER("experts_on_rows", "h, chosen, is_first_microbatch -> routed", reason="rows per expert"),
            GRAPHED("combine", "routed, weight, shared -> y"),
        )

    def route(self, x: Tensor, is_first_microbatch: bool | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = torch.tanh(self.project(x, is_first_microbatch))
        probs = torch.softmax(self.router(h), dim=-1)
        weight, chosen = probs.max(dim=-1)
        return h, self.shared(h, is_first_microbatch), chosen, weight.unsqueeze(-1)

    def experts_on_rows(self, h: Tensor, chosen: Tensor, is_first_microbatch: bool | None) -> Tensor:
        routed = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                routed = routed.index_copy(0, rows, expert(h[rows], is_first_microbatch))
        return routed

    def combine(self, routed: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
        return torch.tanh(routed * weight + shared)


def built(manager: RefManager) -> list[MoE]:
    torch.manual_seed(3)
    return [MoE(manager) for _ in range(2)]


def quantised(layers: list[MoE]) -> list[RefFp8Linear]:
    return [m for layer in layers for m in layer.modules() if isinstance(m, RefFp8Linear)]


class Eager:
    """The step-wise interface on plain modules."""

    def __init__(self, layers: list[MoE]) -> None:
        self.layers, self.live = layers, {}

    def forward(self, step: str, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        chunk, micro = step.split("F")
        leaf = x.detach().requires_grad_()
        self.live[chunk, micro] = (leaf, out := self.layers[int(chunk)](leaf, is_first_microbatch))
        return out.detach()

    def backward(self, step: str, gradient: Tensor) -> tuple[Tensor]:
        leaf, out = self.live.pop(tuple(step.split("B")))
        out.backward(gradient)
        return (leaf.grad,)


def run(manager: RefManager, spec: QuantSpec, order: Order, number: int, side: Any) -> list[Tensor]:
    hidden: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    for step in order:
        m = step.microbatch
        draw = torch.Generator().manual_seed(100 * number + m)
        fresh = torch.randn(TOKENS, WIDTH, generator=draw) * (1 + number % 3)
        if str(step.phase) == "F":
            with manager.autocast(spec):
                x = fresh.requires_grad_() if step.chunk == 0 else hidden[m].requires_grad_()
                first = m == 0 if spec.cache_weights else None
                hidden[m] = side.forward(str(step), x, is_first_microbatch=first).detach().clone()
        else:
            (gradients[m],) = side.backward(str(step), gradients[m] if step.chunk == 0 else fresh)
    return [*hidden.values(), *gradients.values()]


@pytest.mark.parametrize("cache", [False, True], ids=["recast", "cached"])
@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_equal_to_eager(cache: bool, kind: Any) -> None:
    spec = QuantSpec(recipe=RefRecipe(kind=kind, history_len=4), cache_weights=cache)
    managers = [RefManager(), RefManager()]
    eager, layers = built(managers[0]), built(managers[1])
    order = Order.interleaved(0, 2, 2, 4)
    sample, keywords = (torch.randn(TOKENS, WIDTH, requires_grad=True),), {"is_first_microbatch": True if cache else None}
    graphed = graphcap.capture(
        tuple(layers), (sample,) * 2, (keywords,) * 2, order=order, backend="tape", quantization=spec
    )
    assert [part.name for part in graphed.plan.breaks] == ["0.experts_on_rows"] * 2
    assert not any(managers[1].is_registered(e) for layer in layers for e in layer.experts)
    optimizers = [torch.optim.SGD([p for layer in side for p in layer.parameters()], lr=0.05) for side in (eager, layers)]
    first = [p.detach().clone() for layer in layers for p in layer.parameters()]
    for number in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        theirs = run(managers[0], spec, order, number, Eager(eager))
        ours = run(managers[1], spec, order, number, graphed)
        assert all(torch.equal(a, b) and torch.isfinite(a).all() for a, b in zip(ours, theirs, strict=True)), number
        for a, b in zip(quantised(layers), quantised(eager), strict=True):
            for name in ("scale_fwd", "hist_fwd", "scale_bwd", "hist_bwd"):
                assert torch.equal(getattr(a, name), getattr(b, name)), (number, name)
        for mine, twin in zip(layers, eager, strict=True):
            for p, q in zip(mine.parameters(), twin.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                assert p.grad is None or torch.equal(p.grad, q.grad), number
        for optimizer in optimizers:
            optimizer.step()
    moved = [p for layer in layers for p in layer.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(first, moved, strict=True))
