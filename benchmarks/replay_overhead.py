"""CPU and wall time of one graphed forward+backward, against the peers, side by side in one run (targets P1, P2).

    python -m benchmarks.replay_overhead --out benchmarks/results

A block of n linear layers without bias (n parameters of 256x256, input 64x256). Every candidate first agrees with eager
bit for bit. CPU time: the host's time from the call to the return of backward() with the device kept idle (it is
synchronised before each measurement and the kernels are far shorter than the calls); wall: until the device is done.
The once-per-step identity check has a row of its own ("without the step check" leaves it out).
"""

from __future__ import annotations

import argparse
import copy
import json
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
from torch import nn

import graphcap
from benchmarks.hybrid_step import interval, surroundings

Step = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Row:
    parameters: int
    candidate: str
    cpu_us: tuple[float, float, float]
    wall_us: tuple[float, float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--per-round", type=int, default=200)
    parser.add_argument("--parameters", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[Row] = []
    for count in options.parameters:
        rows += measure(candidates(count, device), count, options, device)
    result = {"about": surroundings(device), "rows": [asdict(row) for row in rows]}
    show(rows, result["about"])
    if options.out:
        path = Path(options.out) / f"replay_overhead-{datetime.now(UTC):%Y-%m-%d}-{device.type}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
    return 0


def block(count: int, device: torch.device) -> nn.Module:
    torch.manual_seed(count)
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(count))).to(device)


def candidates(count: int, device: torch.device) -> dict[str, Step]:
    """Name -> one forward+backward on (input, output gradient). Checked against eager here."""
    eager = block(count, device)
    x = torch.randn(64, 256, device=device, requires_grad=True)
    made: dict[str, nn.Module] = {"eager": eager}
    for grads in ("accumulate", "return"):
        config = graphcap.CaptureConfig(grads=grads, outputs="alias")
        made[f"graphcap {grads}"] = graphcap.capture(copy.deepcopy(eager), (x,), config=config)
    config = graphcap.CaptureConfig(grads="accumulate", outputs="alias")
    unchecked = graphcap.capture(copy.deepcopy(eager), (x,), config=config)
    for guard in unchecked._runner._guards:
        guard.check = lambda: None
    made["graphcap accumulate, without the step check"] = unchecked
    if device.type == "cuda":
        made["torch"] = torch.cuda.make_graphed_callables(copy.deepcopy(eager), (x.detach().clone().requires_grad_(),))
        try:
            from transformer_engine.pytorch import make_graphed_callables
        except ImportError:
            print("Transformer Engine is not here: its row is missing")
        else:
            made["TE"] = make_graphed_callables(copy.deepcopy(eager), (x.detach().clone().requires_grad_(),))
    for name, module in made.items():
        agree(name, module, copy.deepcopy(eager), device)
    steps: dict[str, Step] = {name: module_step(module) for name, module in made.items()}
    steps["a node that does nothing (autograd's floor)"] = floor_step()
    steps["a node that returns ready gradients (floor of return)"] = returning_step(list(eager.parameters()))
    if device.type == "cuda":
        steps["one raw graph (limit)"] = raw_step(copy.deepcopy(eager), device)
    return steps


def agree(name: str, module: nn.Module, twin: nn.Module, device: torch.device) -> None:
    for _ in range(3):
        x = torch.randn(64, 256, device=device)
        c = torch.randn(64, 256, device=device)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        for run, leaf in ((module, a), (twin, b)):
            for parameter in run.parameters():
                parameter.grad = None
            run(leaf).backward(c)
        pairs = [(a.grad, b.grad), *((p.grad, q.grad) for p, q in zip(module.parameters(), twin.parameters(), strict=True))]
        if not all(torch.equal(p, q) for p, q in pairs):
            raise SystemExit(f"{name} does not agree with eager: nothing is timed")


def module_step(module: nn.Module) -> Step:
    parameters = list(module.parameters())

    def step(x: torch.Tensor, c: torch.Tensor) -> None:
        module(x).backward(c)

    step.clear = lambda: [setattr(p, "grad", None) for p in parameters]  # type: ignore[attr-defined]
    return step


class _Nothing(torch.autograd.Function):
    """What autograd itself costs around a graph: one node, no copy, no kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def floor_step() -> Step:
    def step(x: torch.Tensor, c: torch.Tensor) -> None:
        _Nothing.apply(x).backward(c)

    step.clear = lambda: None  # type: ignore[attr-defined]
    return step


class _Ready(torch.autograd.Function):
    """What autograd itself costs around a graph that returns gradients of parameters: no copy, no kernel."""

    @staticmethod
    def forward(ctx: Any, ready: list[torch.Tensor], x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.ready = ready
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, gradient, *[one.detach() for one in ctx.ready])


def returning_step(parameters: list[nn.Parameter]) -> Step:
    parameters = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    ready = [torch.randn_like(parameter) for parameter in parameters]

    def step(x: torch.Tensor, c: torch.Tensor) -> None:
        _Ready.apply(ready, x, *parameters).backward(c)

    step.clear = lambda: [setattr(p, "grad", None) for p in parameters]  # type: ignore[attr-defined]
    return step


def raw_step(module: nn.Module, device: torch.device) -> Step:
    """Forward and backward in one graph, inputs copied in: what a hand-written whole-step graph costs."""
    x = torch.randn(64, 256, device=device, requires_grad=True)
    c = torch.randn(64, 256, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            module(x).backward(c)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module(x).backward(c)
    static_x, static_c = x.detach(), c

    def step(value: torch.Tensor, gradient: torch.Tensor) -> None:
        static_x.copy_(value.detach())
        static_c.copy_(gradient)
        graph.replay()

    step.clear = lambda: None  # type: ignore[attr-defined]
    return step


def measure(steps: dict[str, Step], count: int, options: argparse.Namespace, device: torch.device) -> list[Row]:
    inputs = [torch.randn(64, 256, device=device, requires_grad=True) for _ in range(4)]
    gradients = [torch.randn(64, 256, device=device) for _ in range(4)]
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    wall: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(options.rounds + 1):
        for name, step in steps.items():
            cpus, walls = [], []
            for i in range(options.per_round):
                x = inputs[i % 4]
                x.grad = None
                step.clear()  # type: ignore[attr-defined]
                wait(device)
                begin = time.perf_counter()
                step(x, gradients[i % 4])
                issued = time.perf_counter()
                wait(device)
                cpus.append((issued - begin) * 1e6)
                walls.append((time.perf_counter() - begin) * 1e6)
            if round_number > 0:  # round 0 warms up
                cpu[name].append(statistics.median(cpus))
                wall[name].append(statistics.median(walls))
    return [Row(count, name, interval(cpu[name]), interval(wall[name])) for name in steps]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(rows: list[Row], about: dict[str, Any]) -> None:
    table = Table(title=f"one forward+backward, {about['device']}, torch {about['torch']}, {about['date']}")
    for column in ("parameters", "candidate", "CPU us (95 %)", "wall us (95 %)", "CPU / torch", "wall / raw graph"):
        table.add_column(column)
    for row in rows:
        same = {r.candidate: r for r in rows if r.parameters == row.parameters}
        torch_row, raw = same.get("torch"), same.get("one raw graph (limit)")
        table.add_row(
            str(row.parameters),
            row.candidate,
            "{:.0f} ({:.0f}-{:.0f})".format(*row.cpu_us),
            "{:.0f} ({:.0f}-{:.0f})".format(*row.wall_us),
            f"{row.cpu_us[0] / torch_row.cpu_us[0]:.2f}" if torch_row else "",
            f"{row.wall_us[0] / raw.wall_us[0]:.2f}" if raw else "",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
