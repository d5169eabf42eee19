"""Step time and CPU time of the hybrid MoE model, graphed against eager, side by side in one run.

    python benchmarks/hybrid_step.py --device cuda --out benchmarks/results

For each token count: first the eager twin must agree bit for bit over 20 steps (under graphcap.testing.deterministic);
only then is anything timed. Rounds of eager and graphed steps alternate; medians with a 95 % interval (bootstrap).
A step is forward and backward of one microbatch, gradients set to None before; no optimizer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import graphcap
from graphcap.hybrid import HybridConfig, HybridModel
from graphcap.testing import compare, deterministic


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds per step: median and 95 % interval."""

    wall: float
    wall_low: float
    wall_high: float
    cpu: float
    cpu_low: float
    cpu_high: float


@dataclass(frozen=True, slots=True)
class Case:
    tokens: int
    verdict: str
    losses: tuple[float, float]
    graphs: int
    breaks: int
    operations: int
    static_bytes: int
    times: dict[str, Measured]


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    torch.set_default_device(device)
    cases = [run_case(options, tokens, device) for tokens in options.tokens]
    result = {"about": surroundings(device), "model": vars(options), "cases": [asdict(case) for case in cases]}
    show(result, cases)
    if options.out:
        name = f"hybrid_step-{options.expert_gemm}-{datetime.now(UTC):%Y-%m-%d}-{device.type}.json"
        path = Path(options.out) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
    return 0 if all(case.verdict.startswith("equal") for case in cases) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--pattern", default="[*E][ME]")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--expert-gemm", default="loop", choices=("loop", "grouped"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--per-round", type=int, default=5)
    parser.add_argument("--out", default="")
    return parser.parse_args()


def config_of(options: argparse.Namespace, tokens: int) -> HybridConfig:
    size: dict[str, Any] = {}
    if options.hidden >= 1024:  # the dimensions of Qwen3-30B-A3B's layers; Mamba-2 with 64-wide heads
        size = {
            "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 6144, "expert_ffn": 768,
            "mamba_heads": 64, "mamba_head_dim": 64, "mamba_state": 128, "mamba_chunk": 128,
        }  # fmt: skip
    return HybridConfig(
        pattern=options.pattern,
        hidden=options.hidden,
        experts=options.experts,
        top_k=options.top_k,
        max_sequence=tokens,
        expert_gemm=options.expert_gemm,
        dtype=getattr(torch, options.dtype),
        **size,
    )


def run_case(options: argparse.Namespace, tokens: int, device: torch.device) -> Case:
    def build() -> HybridModel:
        torch.manual_seed(7)
        return HybridModel(config_of(options, tokens)).to(device)

    def inputs(index: int) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(0, 256, (1, tokens + 1), generator=generator, device="cpu").to(device)
        return (text[:, :-1], text[:, 1:].contiguous()), {}

    with deterministic(device):
        verdict = compare(build, inputs, steps=options.steps)
    print(f"{tokens} tokens: {verdict}", flush=True)
    free(device)
    model = build()
    samples = [inputs(i)[0] for i in range(8)]
    returned = graphcap.capture(model, samples[0])
    times = {"eager": model, "graphed (return)": returned}
    measured = measure(times, samples, options, device)
    plan = returned.plan
    operations = returned.stats.operations
    returned.close()
    del returned
    free(device)
    model.zero_grad(set_to_none=True)
    added = graphcap.capture(model, samples[0], config=graphcap.CaptureConfig(grads="accumulate"))
    more = measure({"eager": model, "graphed (accumulate)": added}, samples, options, device)
    measured["graphed (accumulate)"] = more["graphed (accumulate)"]
    measured["eager, again"] = more["eager"]
    added.close()
    losses = (verdict.losses[0], verdict.losses[-1]) if verdict.losses else (float("nan"), float("nan"))
    return Case(tokens, str(verdict), losses, plan.graphs, len(plan.breaks), operations, plan.static_bytes, measured)


def measure(
    runs: dict[str, Callable[..., Any]], samples: list[Any], options: argparse.Namespace, device: torch.device
) -> dict[str, Measured]:
    """Alternate rounds of every candidate; wall and CPU time (all threads of the process) per step."""
    walls: dict[str, list[float]] = {name: [] for name in runs}
    cpus: dict[str, list[float]] = {name: [] for name in runs}
    parameters = list(next(iter(runs.values())).parameters())  # type: ignore[attr-defined]
    for round_number in range(options.rounds + 1):
        for name, run in runs.items():
            for step in range(options.per_round):
                for parameter in parameters:
                    parameter.grad = None
                sample = samples[(round_number * options.per_round + step) % len(samples)]
                synchronise(device)
                wall, cpu = time.perf_counter(), time.process_time()
                run(*sample).loss.backward()
                cpu = time.process_time() - cpu
                synchronise(device)
                wall = time.perf_counter() - wall
                if round_number > 0:  # round 0 warms up
                    walls[name].append(wall * 1e3)
                    cpus[name].append(cpu * 1e3)
    return {name: Measured(*interval(walls[name]), *interval(cpus[name])) for name in runs}


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median and the bootstrap's 95 % interval of it."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return statistics.median(values), medians[25], medians[974]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def surroundings(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (tape: times mean nothing)"
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "device": name,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
        "graphcap": graphcap.__version__,
    }


def show(result: dict[str, Any], cases: list[Case]) -> None:
    about = result["about"]
    table = Table(title=f"hybrid step, {about['device']}, torch {about['torch']}, {about['date']}")
    for column in ("tokens", "verdict", "run", "wall ms (95 %)", "CPU ms (95 %)", "wall / eager", "CPU / eager"):
        table.add_column(column)
    for case in cases:
        eager = case.times["eager"]
        for name, m in case.times.items():
            table.add_row(
                str(case.tokens),
                case.verdict,
                name,
                f"{m.wall:.2f} ({m.wall_low:.2f}-{m.wall_high:.2f})",
                f"{m.cpu:.2f} ({m.cpu_low:.2f}-{m.cpu_high:.2f})",
                f"{m.wall / eager.wall:.3f}",
                f"{m.cpu / eager.cpu:.3f}",
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
