"""Every benchmark runs to its end at toy size, agrees with eager first, and writes what it measured."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TOY = {
    "hybrid_step": "--hidden 32 --experts 4 --top-k 2 --dtype float32 --tokens 16",
    "moe_stack": "--hidden 32 --layers 2 --tokens 16 --attention math",
    "transformers_step": "--small --models qwen3_moe --tokens 16",
    "replay_overhead": "--parameters 2",
    "dropin": "--hidden 16 --layers 3 --tokens 4 --dtype float32 --microbatches 4 6",
    "ep_overlap": "--hidden 32 --experts 4 --top-k 2 --dtype float32 --tokens 16 --microbatches 2",
}


@pytest.fixture(autouse=True)
def _default_device() -> Iterator[None]:
    """Benchmarks set it; other tests must not find it set."""
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("name", TOY)
@pytest.mark.filterwarnings("ignore:all tensors are on the CPU")
def test_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    steps = [] if name == "replay_overhead" else ["--steps", "3"]
    rest = ["--device", "cpu", "--rounds", "1", "--per-round", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [name, *TOY[name].split(), *steps, *rest])
    assert module.main() == 0
    (written,) = tmp_path.glob(f"{name}*.json")
    result = json.loads(written.read_text())
    assert result["about"]["torch"]
    for case in result.get("cases", []):
        assert case["verdict"] == "equal over 3 steps"
        assert all(measured["wall"] > 0 for measured in case["times"].values())
        assert case["graphs"] >= 2
    assert all(row["cpu_us"][0] > 0 for row in result.get("rows", []))


@pytest.mark.slow
@pytest.mark.distributed
def test_overlap_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = ["--device", "cpu", "--ranks", "2", "--steps", "3", "--rounds", "1", "--per-round", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ep_overlap", *TOY["ep_overlap"].split(), *rest])
    assert importlib.import_module("benchmarks.ep_overlap").main() == 0
    (written,) = tmp_path.glob("ep_overlap-ep2*.json")
    result = json.loads(written.read_text())
    assert (result["about"]["ranks"], result["about"]["backend"]) == (2, "gloo")
    (case,) = result["cases"]
    assert case["verdict"] == "equal over 3 steps"
    assert list(case["times"]) == ["plain", "plain, graphs", "overlap", "overlap, graphs"]
    assert all(measured["exposed"] == pytest.approx(measured["comm"]) for measured in case["times"].values())
    assert all(measured["comm"] > 0 for measured in case["times"].values())


def test_exposed_is_what_nothing_runs_beside() -> None:
    module = importlib.import_module("benchmarks.ep_overlap")
    comm, other = [(0.0, 4.0), (3.0, 6.0), (10.0, 11.0)], [(1.0, 2.0), (5.0, 8.0), (5.5, 7.0)]
    assert module.length(comm) == 7.0
    assert module.exposed(comm, other) == 5.0
    assert module.exposed([], other) == 0.0
    assert module.exposed(comm, []) == 7.0
