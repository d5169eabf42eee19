"""Orders through the drop-in: any valid one, for long, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphcap
from graphcap import Order, _flight
from graphcap.testing import deterministic
from tests.drop_in.chains import assert_chain_equal, captured, valid_orders


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with deterministic("cpu"):
        yield


@settings(max_examples=60)
@given(valid_orders(), st.booleans())
def test_two_layers_two_chunks_four_microbatches(order: Order, reuse: bool) -> None:
    assert_chain_equal(order, [2, 2], _reuse_graph_input_output_buffers=reuse)


@pytest.mark.slow
@settings(max_examples=300)
@given(valid_orders(), st.booleans(), st.booleans())
def test_two_layers_two_chunks_four_microbatches_at_length(order: Order, reuse: bool, clone: bool) -> None:
    assert_chain_equal(order, [2, 2], steps=4, _reuse_graph_input_output_buffers=reuse)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    "signed",
    [
        [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1],
        [1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1],
        [1, 1, 2, -2, 2, -2, 1, -1, 1, -1, 2, -2, 2, -2, -1, -1],
    ],
    ids=str,
)
def test_interleaved_pipeline_parallelism(signed: list[int], reuse: bool) -> None:
    order = Order.from_signed(signed)
    options: dict[str, Any] = {"given": signed, "_reuse_graph_input_output_buffers": reuse, "allow_unused_input": True}
    assert_chain_equal(order, [1, 1], steps=20, **options)


def test_soak() -> None:
    """200 steps of an interleaved order; memory comes and goes between replays, so stale addresses would show."""
    rubbish: list[torch.Tensor] = []

    def between(number: int) -> None:
        rubbish.append(torch.full((number % 7 + 1, 4), float("nan")))
        if len(rubbish) > 5:
            del rubbish[: number % 5]

    order = Order.interleaved(0, 2, 2, 4)
    assert_chain_equal(order, [1, 1], steps=200, between=between, rate=0.01, _reuse_graph_input_output_buffers=True)


@pytest.mark.parametrize("layers", [[1, 1], [2, 1]], ids=str)
def test_static_bytes_do_not_grow_with_the_microbatches(layers: list[int]) -> None:
    def plan_of(microbatches: int, reuse: bool = True) -> graphcap.CapturePlan:
        order = Order.interleaved(0, 2, 2, microbatches)
        _, made = captured(order, layers, _reuse_graph_input_output_buffers=reuse)
        return made[0].plan

    plans = [plan_of(microbatches) for microbatches in (4, 16, 64)]
    assert len({plan.slots for plan in plans}) == 1
    assert len({plan.static_bytes for plan in plans}) == 1, [plan.static_bytes for plan in plans]
    separate = plan_of(4, reuse=False)
    assert separate.static_bytes > plans[0].static_bytes
    whole = {plan.static_bytes + plan.shared_bytes for plan in (plans[0], separate)}
    assert len(whole) == 1  # what it would be without any sharing


def test_layers_of_a_chunk_share_a_pool_and_run_in_their_sequence() -> None:
    """Scratch of an earlier layer may lie where a later one keeps what its backward needs."""
    options: dict[str, Any] = {"_reuse_graph_input_output_buffers": True}
    order = Order.parse("0F0 0F1 0B0 0B1")
    _, made = captured(order, [2], **options)
    plan = made[0].plan
    assert (plan.slots, len(set(plan.pools))) == (4, 2)
    x = torch.ones(3, 4)
    late = made[1](x)
    with pytest.raises(graphcap.ReplayOrderError, match="still waits for its backward"):
        made[0](x)
    late.sum().backward()
    first, second = made[0](x.requires_grad_()), made[1](x)
    with pytest.raises(graphcap.ReplayOrderError, match="Layers of a chunk run in their sequence"):
        first.sum().backward()
    second.sum().backward()
    made[2](x.detach())  # another microbatch has a pool of its own
    _, single = captured(Order.parse("0F0 0B0"), [2], retain_graph_in_backward=True)
    assert single[0].plan.pools == ()


def test_without_that_check_a_layer_out_of_sequence_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flight.Nest, "require_turn", lambda *_: None)
    layers, made = captured(Order.parse("0F0 0F1 0B0 0B1"), [2], _reuse_graph_input_output_buffers=True)
    x = torch.ones(3, 4)
    made[1](x).sum().backward()
    right = layers[1].linear.weight.grad.clone()  # type: ignore[union-attr, operator]
    layers[1].zero_grad()
    late = made[1](x)
    made[0](x)
    late.sum().backward()
    assert not torch.equal(layers[1].linear.weight.grad, right)  # type: ignore[arg-type, union-attr]


class _Once(torch.autograd.Function):
    """Two outputs, and a backward that gives up what the forward saved, as those of TE's modules do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.kept = [x, weight]
        return x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.kept
        ctx.kept = None
        return a * weight + b, (a * x + b).sum(0)


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Any:
        return _Once.apply(x, self.weight)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("ways", [(0, 1), (0,), (1,)], ids=str)
def test_a_backward_that_runs_once(ways: tuple[int, ...]) -> None:
    module, twin = Once(), Once()
    graphcap.make_graphed_callables(module, (torch.ones(3, 4, requires_grad=True),), backend="tape")
    for step in range(3):
        found = []
        for side in (module, twin):
            x = torch.full((3, 4), float(step + 2), requires_grad=True)
            out = side(x)
            torch.autograd.backward([out[n] for n in ways], [torch.full((3, 4), 2.0 + n) for n in ways])
            found.append((x.grad, side.weight.grad))
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(mine, theirs) and bool(mine.count_nonzero())
