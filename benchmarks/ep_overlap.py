"""Expert-parallel overlap: step time and exposed communication, overlap off and on x graphs off and on, in one run.

    python benchmarks/ep_overlap.py --device cuda --out benchmarks/results          # two ranks if there are two GPUs

Each rank is a process with its share of the experts and microbatches of its own; rows travel by NCCL (gloo on a CPU). For
each token count: first losses, gradients and weights of all four must agree with the plain loop's bit for bit over some
optimizer steps with changing inputs (under graphcap.testing.deterministic); only then is anything timed. Rounds of the
four alternate; medians with a 95 % interval (bootstrap), of rank 0. A step is forward and backward of all microbatches.

Communication: of one profiled step per round, the time in which a NCCL kernel ran, and the part of it in which no other
kernel did ("exposed"). A NCCL kernel that waits for the other rank counts. On a CPU there are no streams: all of gloo's
time is exposed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import graphcap
from graphcap.hybrid import HybridConfig, HybridModel, OverlapSchedule, shard_experts
from graphcap.testing import deterministic

Batch = tuple[Tensor, Tensor]
Span = tuple[float, float]
RUNS = tuple((overlap, graphs) for overlap in (False, True) for graphs in (False, True))


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds per step: median and 95 % interval. comm, exposed: medians of the profiled steps."""

    wall: float
    wall_low: float
    wall_high: float
    cpu: float
    cpu_low: float
    cpu_high: float
    comm: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Case:
    """graphs: forward graphs of the overlapped schedule."""

    tokens: int
    verdict: str
    graphs: int
    times: dict[str, Measured]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a step on a model of its own. `run(batches)` gives the microbatches' losses."""

    name: str
    model: HybridModel
    run: Callable[[Sequence[Batch]], list[Tensor]]
    graphs: int = 0


def main() -> int:
    options = parse()
    cuda = options.device == "cuda"
    if cuda:
        # With one hardware queue the two streams would take turns. Read when the device is first used.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if not options.ranks:
        options.ranks = min(2, torch.cuda.device_count()) if cuda else 1
    if options.ranks == 1:
        return work(0, options, 0)
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    mp.spawn(rank_main, args=(options, port), nprocs=options.ranks)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=0, help="0: two if there are two GPUs, else one")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--pattern", default="[*E][*E]")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--shared-ffn", type=int, default=0)
    parser.add_argument("--expert-gemm", default="loop", choices=("loop", "grouped"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="of the comparison")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--per-round", type=int, default=3)
    parser.add_argument("--out", default="")
    return parser.parse_args()


def rank_main(rank: int, options: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=300))
    try:
        if work(rank, options, options.ranks):
            raise SystemExit(1)
    finally:
        dist.destroy_process_group()


def work(rank: int, options: argparse.Namespace, world: int) -> int:
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    cases = [run_case(options, tokens, device, rank) for tokens in options.tokens]
    about = surroundings(device, world)
    if rank == 0:
        show(about, cases)
    if rank == 0 and options.out:
        result = {"about": about, "model": vars(options), "cases": [asdict(case) for case in cases]}
        ranks = max(1, world)
        name = f"ep_overlap-ep{ranks}-{options.expert_gemm}-{datetime.now(UTC):%Y-%m-%d}-{device.type}.json"
        path = Path(options.out) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
    return 0 if all(case.verdict.startswith("equal") for case in cases) else 1


# ---------------------------------------------------------------------------------------------------------- candidates


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
        shared_ffn=options.shared_ffn,
        max_sequence=tokens,
        expert_gemm=options.expert_gemm,
        dtype=getattr(torch, options.dtype),
        **size,
    )


def build(options: argparse.Namespace, tokens: int, device: torch.device) -> list[Candidate]:
    """The four, with equal weights; the experts are shared out over the ranks."""
    torch.manual_seed(7)
    with device:
        model = HybridModel(config_of(options, tokens))
    shard_experts(model)
    models = [model, *(copy.deepcopy(model) for _ in RUNS[1:])]
    sample = batches_of(options, tokens, 0, device)[0]
    return [
        candidate(one, overlap, graphs, sample, options.microbatches)
        for one, (overlap, graphs) in zip(models, RUNS, strict=True)
    ]


def candidate(model: HybridModel, overlap: bool, graphs: bool, sample: Batch, microbatches: int) -> Candidate:
    name = ("overlap" if overlap else "plain") + (", graphs" if graphs else "")
    if not overlap:
        runs = graphcap.capture(model, sample) if graphs else model
        return Candidate(name, model, functools.partial(plain_step, runs))
    schedule = OverlapSchedule(model, delay_wgrad=True)
    if not graphs:
        return Candidate(name, model, functools.partial(overlapped_step, schedule))
    schedule.capture_graphs(sample[0], microbatches)
    assert schedule.graphs is not None
    return Candidate(name, model, functools.partial(overlapped_step, schedule), graphs=schedule.graphs.graphed.plan.graphs)


def plain_step(model: Callable[..., Any], batches: Sequence[Batch]) -> list[Tensor]:
    losses = []
    for tokens, labels in batches:
        loss = model(tokens, labels).loss
        (loss * (1 / len(batches))).backward()
        losses.append(loss.detach())
    return losses


def overlapped_step(schedule: OverlapSchedule, batches: Sequence[Batch]) -> list[Tensor]:
    schedule.clear_trace()
    return schedule.step(batches)


def batches_of(options: argparse.Namespace, tokens: int, step: int, device: torch.device) -> list[Batch]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * step + rank)
    text = torch.randint(0, 256, (options.microbatches, 1, tokens + 1), generator=generator).to(device)
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in text]


# ------------------------------------------------------------------------------------------------------------ equality


def verdict_of(options: argparse.Namespace, tokens: int, device: torch.device) -> str:
    """ "equal over N steps", or the first difference: with the plain loop, after SGD steps with changing inputs."""
    with deterministic(device):
        plain, *others = build(options, tokens, device)
        start = [p.detach().clone() for p in plain.model.parameters()]
        optimizers = [torch.optim.SGD(one.model.parameters(), lr=0.05) for one in (plain, *others)]
        for step in range(options.steps):
            batches = batches_of(options, tokens, step, device)
            found = []
            for optimizer, one in zip(optimizers, (plain, *others), strict=True):
                optimizer.zero_grad()
                found.append(one.run(batches))
            for one, losses in zip(others, found[1:], strict=True):
                different = difference(plain, one, found[0], losses)
                if different:
                    return f"{one.name} differs in step {step}: {different}"
            for optimizer in optimizers:
                optimizer.step()
        moved = any(not torch.equal(p, q) for p, q in zip(plain.model.parameters(), start, strict=True))
    return f"equal over {options.steps} steps" if moved else "no weight moved: nothing was compared"


def difference(plain: Candidate, other: Candidate, expected: list[Tensor], found: list[Tensor]) -> str:
    """What differs bit for bit, or is not finite; "" if nothing does."""
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(mine, theirs) or not bool(theirs.isfinite()):
            return f"loss {place}: {float(mine)!r} and {float(theirs)!r}"
    for (name, mine), theirs in zip(other.model.named_parameters(), plain.model.parameters(), strict=True):
        if not torch.equal(mine, theirs):
            return f"weight {name}"
        if (mine.grad is None) != (theirs.grad is None):
            return f"gradient of {name}: one is None"
        if mine.grad is not None and theirs.grad is not None and not torch.equal(mine.grad, theirs.grad):
            return f"gradient of {name}"
    return ""


# --------------------------------------------------------------------------------------------------------------- times


def run_case(options: argparse.Namespace, tokens: int, device: torch.device, rank: int) -> Case:
    verdict = verdict_of(options, tokens, device)
    if rank == 0:
        print(f"{tokens} tokens: {verdict}", flush=True)
    free(device)
    candidates = build(options, tokens, device)
    times = measure(candidates, options, tokens, device)
    graphs = max(one.graphs for one in candidates)
    del candidates
    free(device)
    return Case(tokens, verdict, graphs, times)


def measure(
    candidates: Sequence[Candidate], options: argparse.Namespace, tokens: int, device: torch.device
) -> dict[str, Measured]:
    """Alternate rounds of every candidate; wall and CPU time (all threads of the process) per step."""
    walls: dict[str, list[float]] = {one.name: [] for one in candidates}
    cpus: dict[str, list[float]] = {one.name: [] for one in candidates}
    comms: dict[str, list[Span]] = {one.name: [] for one in candidates}
    samples = [batches_of(options, tokens, step, device) for step in range(4)]
    for round_number in range(options.rounds + 1):
        for one in candidates:
            for step in range(options.per_round):
                batches = samples[(round_number + step) % len(samples)]
                wall, cpu = timed(one, batches, device)
                if round_number > 0:  # round 0 warms up
                    walls[one.name].append(wall * 1e3)
                    cpus[one.name].append(cpu * 1e3)
            if round_number > 0:
                comms[one.name].append(communication(one, samples[round_number % len(samples)], device))
    return {
        one.name: Measured(
            *interval(walls[one.name]),
            *interval(cpus[one.name]),
            statistics.median(comm for comm, _ in comms[one.name]),
            statistics.median(exposed for _, exposed in comms[one.name]),
        )
        for one in candidates
    }


def timed(one: Candidate, batches: Sequence[Batch], device: torch.device) -> tuple[float, float]:
    one.model.zero_grad(set_to_none=True)
    together(device)
    wall, cpu = time.perf_counter(), time.process_time()
    one.run(batches)
    cpu = time.process_time() - cpu
    synchronise(device)
    return time.perf_counter() - wall, cpu


def communication(one: Candidate, batches: Sequence[Batch], device: torch.device) -> tuple[float, float]:
    """Milliseconds of communication in one step, and of communication that nothing ran beside."""
    cuda = device.type == "cuda"
    one.model.zero_grad(set_to_none=True)
    together(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        one.run(batches)
        synchronise(device)
    comm: list[Span] = []
    other: list[Span] = []
    for event in profiler.events() or ():
        span = (event.time_range.start, event.time_range.end)
        if not cuda:
            if event.name.startswith("gloo:"):
                comm.append(span)
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            if event.name.startswith("nccl") and "Kernel" in event.name:
                comm.append(span)
            elif not event.name.startswith(("Memcpy", "Memset")):
                other.append(span)
    return length(comm) / 1e3, exposed(comm, other) / 1e3


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, as spans that don't meet, in order."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in merged(spans))


def exposed(comm: Sequence[Span], other: Sequence[Span]) -> float:
    """How long something of `comm` runs and nothing of `other`."""
    return length([*comm, *other]) - length(other)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median and the bootstrap's 95 % interval of it."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return statistics.median(values), medians[25], medians[974]


def together(device: torch.device) -> None:
    """All ranks start a step at one time: what one waits for the other is then of the step's own making."""
    synchronise(device)
    if dist.is_initialized():
        dist.barrier()
        synchronise(device)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -------------------------------------------------------------------------------------------------------------- report


def surroundings(device: torch.device, world: int) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (tape: times mean nothing)"
    note = "rank 0's times; every rank has its own microbatches"
    if world < 2:
        note = "one rank: nothing travels, so that overlap has nothing to hide; only what graphs save can be seen here"
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "device": name,
        "ranks": max(1, world),
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "note": note,
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
        "graphcap": graphcap.__version__,
    }


def show(about: dict[str, Any], cases: list[Case]) -> None:
    title = f"EP overlap, {about['ranks']} x {about['device']}, torch {about['torch']}, {about['date']}"
    table = Table(title=title, caption=about["note"])
    for column in ("tokens", "verdict", "run", "wall ms (95 %)", "CPU ms (95 %)", "comm ms", "exposed ms", "wall / plain"):
        table.add_column(column)
    for case in cases:
        plain = case.times["plain"]
        for name, m in case.times.items():
            table.add_row(
                str(case.tokens),
                case.verdict,
                name,
                f"{m.wall:.2f} ({m.wall_low:.2f}-{m.wall_high:.2f})",
                f"{m.cpu:.2f} ({m.cpu_low:.2f}-{m.cpu_high:.2f})",
                f"{m.comm:.2f}",
                f"{m.exposed:.2f}",
                f"{m.wall / plain.wall:.3f}",
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
