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
