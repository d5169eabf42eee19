"""Input and weight gradients as steps of their own (I and W): graphs of the hybrid model beside its eager chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcap import Order, capture
from graphcap._steps import Steps
from graphcap.hybrid import HybridConfig, HybridModel
from graphcap.order import Phase

ORDER = Order.parse("0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 1W0 0W0 1W1 0W1")
SIZES: dict[str, Any] = {"vocab": 64, "hidden": 16, "head_dim": 4, "mamba_head_dim": 4, "ffn": 24, "expert_ffn": 16}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def run_order(model: HybridModel, side: Any, first_seed: int) -> list[Tensor]:
    """The losses; gradients are left in `.grad`."""
    made: dict[tuple[int, int], Any] = {}
    grads: dict[int, Tensor | None] = {}
    for step in ORDER:
        tokens, labels = batch(first_seed + step.microbatch)
        if step.phase is Phase.W:
            side.weight_grad(step)
        elif step.phase is Phase.F and step.chunk == 0:
            made[0, step.microbatch] = side.forward(step, tokens)
        elif step.phase is Phase.F:
            ahead = {} if model.mtp is None else {"tokens": tokens}
            made[1, step.microbatch] = side.forward(step, made[0, step.microbatch], labels, **ahead)
        elif step.chunk == 1:
            (grads[step.microbatch], *_) = side.input_grad(step)
        else:
            side.input_grad(step, grads[step.microbatch])
    return [made[1, microbatch].loss.detach() for microbatch in (0, 1)]


class EagerHalves:
    """The same steps on plain chunks."""

    def __init__(self, chunks: tuple[Any, ...]) -> None:
        self._steps = Steps(ORDER, lambda step, args, kwargs: (chunks[step.chunk](*args, **kwargs), None))

    def forward(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        return self._steps.forward(step, args, kwargs)

    def input_grad(self, step: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return self._steps.input_grad(step, gradients)

    def weight_grad(self, step: Any) -> None:
        self._steps.weight_grad(step)


@pytest.mark.parametrize("pattern", ["[M*E]|[M-]", "M[*E]|E-/*E"])
@pytest.mark.parametrize(
    "values",
    [
        {"shared_ffn": 8, "aux_loss": 0.02, "z_loss": 0.01, "router_statistics": True},
        {"recompute": "norm", "shared_ffn": 8},
        {"recompute": "layer", "aux_loss": 0.02},
        {"expert_gemm": "grouped", "dtype": torch.bfloat16},
    ],
    ids=["losses", "norm", "layer", "grouped"],
)
def test_input_and_weight_gradients_apart(pattern: str, values: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = HybridModel(HybridConfig(pattern=pattern, max_sequence=32, init_std=0.2, **(SIZES | values)))
    twin = copy.deepcopy(model)
    hidden = torch.zeros(2, 12, 16, dtype=model.config.dtype, requires_grad=True)
    tokens, labels = batch(0)
    named: tuple[dict[str, Any], ...] = ({}, {} if model.mtp is None else {"tokens": tokens})
    graphed = capture(model.chunks(), ((tokens,), (hidden, labels)), named, order=ORDER, backend="tape")
    eager = EagerHalves(twin.chunks())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=3e-3) for one in (model, twin)]
    received: set[str] = set()
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses, expected = run_order(model, graphed, 10 * step), run_order(twin, eager, 10 * step)
        assert all(map(torch.equal, losses, expected))
        for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name  # type: ignore[arg-type]
            if mine.grad is not None and bool(mine.grad.isfinite().all() and mine.grad.any()):
                received.add(name)
        for optimizer in optimizers:
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
        assert model.tracker.report() == twin.tracker.report()
    assert received == {name for name, _ in model.named_parameters()}
    assert dict(graphed.stats.eager) == {}
