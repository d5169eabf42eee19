"""T10: amaxes are reduced over the group that the capture was given, in replays as in eager steps; two gloo ranks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import graphcap
from graphcap.fp8_meta import QuantSpec
from graphcap.fp8_reference import RefFp8Linear, RefManager, RefRecipe
from graphcap.hybrid import HybridConfig, HybridModel, shard_experts
from graphcap.order import Order
from tests.fp8.test_breaking_layer import TOKENS, WIDTH, Eager, built, quantised, run
from tests.hybrid import quantized as side_by_side
from tests.hybrid.quantized import INTERLEAVED, eager_side, graphed_side, model_of

RECIPE = RefRecipe(history_len=4, algo="most_recent")


def scales(spec: QuantSpec, rank: int, graphed: bool) -> tuple[float, float]:
    torch.manual_seed(0)
    manager = RefManager()
    layer: Any = RefFp8Linear(64, 64, manager, history_len=4)
    call = layer
    if graphed:
        sample = torch.full((32, 64), 100.0, requires_grad=True)
        call = graphcap.capture(layer, (sample,), backend="tape", quantization=spec)
    x = torch.full((32, 64), 2.0 + 2.0 * rank, requires_grad=True)
    with manager.autocast(spec):
        out = call(x)
    out.backward(torch.full_like(out, 0.5 + 0.5 * rank))
    return float(layer.scale_fwd[0]), float(layer.scale_bwd[0])


def on_rank(rank: int, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        alone = [dist.new_group([other]) for other in range(2)][rank]
        for graphed in (False, True):
            results[f"world {rank} {graphed}"] = scales(QuantSpec(recipe=RECIPE), rank, graphed)
            results[f"alone {rank} {graphed}"] = scales(QuantSpec(recipe=RECIPE, group=alone), rank, graphed)
            no_reduction = RefRecipe(history_len=4, algo="most_recent", reduce_amax=False)
            results[f"off {rank} {graphed}"] = scales(QuantSpec(recipe=no_reduction), rank, graphed)
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_t10_the_group_reaches_the_reduction() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(on_rank, args=(port, results), nprocs=2)
        seen = dict(results)
    own = {0: (224.0, 114688.0), 1: (112.0, 57344.0)}
    for rank in range(2):
        for graphed in (False, True):
            assert seen[f"world {rank} {graphed}"] == (112.0, 57344.0)
            assert seen[f"alone {rank} {graphed}"] == own[rank]
            assert seen[f"off {rank} {graphed}"] == own[rank]


def trained_with_experts(rank: int, group: Any, graphed: bool) -> dict[str, Any]:
    """Three steps of two layers with eager experts, two microbatches, cached weights; each rank has data of its own."""
    spec = QuantSpec(recipe=RefRecipe(history_len=4), group=group, cache_weights=True)
    manager = RefManager()
    layers = built(manager)
    order = Order.parse("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1")
    side: Any = Eager(layers)
    if graphed:
        sample, keywords = (torch.randn(TOKENS, WIDTH, requires_grad=True),), {"is_first_microbatch": True}
        side = graphcap.capture(
            tuple(layers), (sample,) * 2, (keywords,) * 2, order=order, backend="tape", quantization=spec
        )
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.05)
    found: dict[str, Any] = {}
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        found[f"values {step}"] = run(manager, spec, order, 2 * step + rank, side)
        found[f"grads {step}"] = [p.grad for layer in layers for p in layer.parameters()]
        for number, owner in enumerate(quantised(layers)):
            found |= {f"{name} {number} {step}": value.clone() for name, value in manager.read(owner).items()
                      if not name.startswith("weight")}
        optimizer.step()
    return found


def experts_on_rank(rank: int, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        group = dist.new_group([0, 1])
        eager, ours = (trained_with_experts(rank, group, graphed) for graphed in (False, True))
        for name, value in eager.items():
            pairs = zip(value, ours[name], strict=True) if isinstance(value, list) else ((value, ours[name]),)
            for a, b in pairs:
                assert (a is None) == (b is None), name
                assert a is None or torch.equal(a, b), (rank, name)
        results[rank] = {name: value.tolist() for name, value in ours.items() if name.startswith("scale")}
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(240)
def test_breaking_layers_reduce_over_their_group() -> None:
    """Graphs and eager experts of one region, two ranks, an amax group: eager's bits, and one scale for both ranks."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(experts_on_rank, args=(port, results), nprocs=2)
        seen = dict(results)
    assert seen[0] == seen[1]
    assert any(scale != 1.0 for value in seen[0].values() for scale in value)


def hybrid_on_rank(rank: int, port: int, results: Any) -> None:
    """Four tokens for four experts, other ones on each rank: some expert has no rows on one rank and some on the other."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        config = HybridConfig(
            pattern="[*E]|-", hidden=16, head_dim=4, expert_ffn=16, ffn=16, top_k=1, max_sequence=4, init_std=0.1,
            quantization="reference", recipe=RefRecipe(history_len=4), amax_group=dist.new_group([0, 1]), cache_weights=True,
        )  # fmt: skip
        for sharded in (False, True):
            models = [model_of(config) for _ in range(2)]
            if sharded:
                models = [shard_experts(model) for model in models]  # type: ignore[misc]
            ours, theirs = graphed_side(models[0], INTERLEAVED), eager_side(models[1], INTERLEAVED)
            for number in range(2):
                made = [side_by_side.step(side, INTERLEAVED, 100 * rank + number) for side in (ours, theirs)]
                side_by_side.assert_equal(number, *made)
            results[f"{rank} {sharded}"] = scales_by_name(models[0])
    finally:
        dist.destroy_process_group()


def scales_by_name(model: HybridModel) -> dict[str, list[float]]:
    states = model.quantized_states()
    return {name: [*state["scale_fwd"].tolist(), *state["scale_bwd"].tolist()] for name, state in states.items()}


@pytest.mark.timeout(240)
def test_the_hybrid_model_reduces_over_its_group() -> None:
    """Experts that had no rows on one rank take part in its reductions: data-parallel ranks, ranks that share experts."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(hybrid_on_rank, args=(port, results), nprocs=2)
        seen = dict(results)
    assert seen["0 False"] == seen["1 False"]
    assert any(".expert_mlps." in name and 1.0 not in scales for name, scales in seen["0 False"].items())
    for name, values in seen["0 True"].items():
        assert ".expert_mlps." in name or seen["1 True"][name] == values != [1.0, 1.0, 1.0]
    assert {name.split(".")[3] for rank in "01" for name in seen[f"{rank} True"] if ".expert_mlps." in name} == {*"0123"}
