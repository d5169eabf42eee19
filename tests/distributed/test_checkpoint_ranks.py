"""Checkpoints over ranks of experts and pipeline stages, and the tracker's sums: two gloo ranks, all in one spawn."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from graphcap import StateError
from graphcap.hybrid import HybridConfig, HybridModel, load, save, shard_experts
from graphcap.hybrid.keys import pieces_of

SIZES: dict[str, Any] = {"vocab": 64, "hidden": 16, "head_dim": 4, "mamba_head_dim": 4, "ffn": 24, "expert_ffn": 16}
PATTERN = "[*E]|[*E]/*E"


def model_of(seed: int, **values: Any) -> HybridModel:
    torch.manual_seed(seed)
    sizes = SIZES | values
    return HybridModel(HybridConfig(pattern=PATTERN, max_sequence=32, init_std=0.2, **sizes))


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(7))
    return ids[:, :-1], ids[:, 1:]


def adam(model: HybridModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: HybridModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(*batch()).loss.backward()
    optimizer.step()


def weights(model: HybridModel) -> dict[str, Tensor]:
    return {key: piece.published() for key, piece in pieces_of(model).items()}


def on_two_ranks(rank: int, port: int, folder: str, results: dict[str, Any]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    root = Path(folder)
    try:
        torch.set_num_threads(1)
        # experts on two ranks: the one rank's checkpoint in, a step, the two ranks' checkpoint out
        model = shard_experts(model_of(10))
        assert isinstance(model, HybridModel)
        optimizer = adam(model)
        load(model, root / "one", optimizer)
        results[f"loaded {rank}"] = {key: value.numpy() for key, value in weights(model).items()}
        step(model, optimizer)
        save(model, root / "two", optimizer)
        results[f"stepped {rank}"] = {key: value.numpy() for key, value in weights(model).items()}
        # a stage on each rank
        stage = model_of(11).chunks()[rank]
        load(stage, root / "one")
        save(stage, root / "stages")
        # both ranks see what one of them would miss
        try:
            load(model_of(12, ffn=32, expert_ffn=8).chunks()[rank], root / "one")
        except StateError as error:
            results[f"refused {rank}"] = str(error)
        # what only one rank can't save, all do not, instead of waiting for it; and what they do not hold together
        optimizer = adam(model)
        if rank == 1:
            optimizer.state[torch.nn.Parameter(torch.ones(3))]["exp_avg"] = torch.ones(3)
        refused = []
        for folder_, what, with_ in (("lost", model, optimizer), ("half", model_of(14).chunks()[0], None)):
            try:
                save(what, root / folder_, with_)
            except StateError as error:
                refused.append(str(error))
        results[f"not saved {rank}"] = (refused, [(root / name).exists() for name in ("lost", "half")])
        # each rank fills its own slots and the sum of both is the model's
        tracker = model_of(13).tracker
        tracker.record("z_loss", rank, torch.tensor(1.0 + rank))
        tracker.record_rows(rank, torch.tensor([rank, 1, 2, 3]))
        assert dist.group.WORLD is not None
        report = tracker.report([dist.group.WORLD])
        results[f"report {rank}"] = (report.z_loss.per_slot, report.z_loss.mean, report.rows)
        results[f"own {rank}"] = tracker.report().z_loss.records
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = adam(model)
    step(model, optimizer)
    save(model, tmp_path / "one", optimizer)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(on_two_ranks, args=(port, str(tmp_path), results), nprocs=2)
        found = dict(results)

    before = weights(model)
    for rank in range(2):
        loaded = found[f"loaded {rank}"]
        assert all(torch.equal(torch.from_numpy(value), before[key]) for key, value in loaded.items())
        experts = {key.split(".experts.experts.")[1][0] for key in loaded if ".experts.experts." in key}
        assert experts == ({"0", "1"}, {"2", "3"})[rank]
    assert found["loaded 0"].keys() | found["loaded 1"].keys() == before.keys()

    # Two ranks' checkpoint on one: their weights, and the state that makes the next step.
    other = model_of(2)
    theirs = adam(other)
    load(other, tmp_path / "two", theirs)
    after = weights(other)
    for rank in range(2):
        assert all(torch.equal(torch.from_numpy(value), after[key]) for key, value in found[f"stepped {rank}"].items())
    assert any(not torch.equal(after[key], before[key]) for key in after if ".experts.experts." in key)
    steps = {int(state["step"]) for state in theirs.state.values()}
    assert steps == {2}
    assert len(theirs.state) == len(list(other.parameters()))
    step(other, theirs)

    stages = model_of(3)
    load(stages, tmp_path / "stages")
    assert all(torch.equal(value, before[key]) for key, value in weights(stages).items())

    assert found["refused 0"] == found["refused 1"]
    assert (
        "decoder.layers.0.mlp.experts.experts.3.linear_fc1.weight: shape [32, 16] in the checkpoint, [16, 16]"
        in (found["refused 0"])
    )
    (lost, half), written = found["not saved 0"]
    assert "not all ranks can save: rank 1: AdamW has state of 1 parameters that are not among those to be saved" in lost
    assert "are held by no rank that saves (decoder.final_layernorm.weight" in half
    (own, same), also = found["not saved 1"]
    assert own.startswith("AdamW has state of 1 parameters")
    assert same == half
    assert not any(written + also)
    assert found["report 0"] == found["report 1"]
    slots, mean, rows = found["report 0"]
    assert slots[:2] == (1.0, 2.0)
    assert mean == 1.5
    assert rows[:2] == ((0, 1, 2, 3), (1, 1, 2, 3))
    assert found["own 0"] == 1


KINDS: dict[str, dict[str, Any]] = {
    "loop": {"experts": 8},
    "grouped": {"experts": 8, "expert_gemm": "grouped", "dtype": torch.bfloat16},
}


def pass_on(rank: int, port: int, ranks: int, source: str, target: str, values: dict[str, Any]) -> None:
    """Load, and save as so many ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        model = shard_experts(model_of(10 + ranks, **values))
        assert isinstance(model, HybridModel)
        optimizer = adam(model)
        load(model, source, optimizer)
        save(model, target, optimizer)
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_over_numbers_of_expert_ranks(kind: str, tmp_path: Path) -> None:
    """One rank, four, two, one: weights and the optimizer's state are those of the start, bit for bit."""
    values = KINDS[kind]
    model, other = model_of(1, **values), model_of(2, **values)
    optimizer, theirs = adam(model), adam(other)
    for _ in range(2):
        step(model, optimizer)
    save(model, tmp_path / "1", optimizer)
    for ranks, source, target in ((4, "1", "4"), (2, "4", "2")):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folders = str(tmp_path / source), str(tmp_path / target)
        mp.spawn(pass_on, args=(port, ranks, *folders, values), nprocs=ranks)
    load(other, tmp_path / "2", theirs)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert optimizer.state[mine].keys() == theirs.state[its].keys()
        assert all(torch.equal(value, theirs.state[its][name]) for name, value in optimizer.state[mine].items())
    assert len(theirs.state) > 20
