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
