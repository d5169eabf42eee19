"""Orders through the drop-in: any valid one, for long, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphcap
from graphcap import Order
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
    assert separate.shared_bytes == 0
    assert plans[0].shared_bytes == separate.static_bytes - plans[0].static_bytes
