"""make_graphed_callables: capture time, memory and step time beside torch's and Transformer Engine's, in one process.

    python -m benchmarks.dropin --out benchmarks/results

A chunk of 24 layers (norm, up, GELU, down, residual) under 1F1B of rank 0 of 4 (W + 1 = 4 microbatches in flight), for 4,
16 and 64 microbatches (targets P7, P8). Every candidate first agrees with eager bit for bit, over several passes of the
order with weights updated in between; only then is anything timed.

capture: seconds of the call, the device idle before and after. "Recording alone" is the least that any such call takes: one
forward and one backward graph per layer and microbatch by torch.cuda.graph, no warm-up, no checks.
memory: MiB that the allocator holds after the capture and a pass, beyond the layers, their gradients and the inputs
(what private pools keep counts, free blocks elsewhere do not).
wall: milliseconds of one pass of the order. torch's function knows no order: its row is one microbatch. Replay overhead
(P1, P2) has a benchmark of its own: replay_overhead.py.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import graphcap
from benchmarks.hybrid_step import interval, surroundings, synchronise
from graphcap import Order, Phase
from graphcap.testing import deterministic

Calls = Sequence[Callable[[Tensor], Tensor]]
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Candidate:
    """`make(layers, samples, order)` gives one function per (microbatch, layer). microbatches: None, or all it can do."""

    name: str
    make: Callable[[tuple[nn.Module, ...], Tensor, Order], Calls]
    microbatches: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one candidate: capture in seconds; wall in ms per pass, with the 95 % interval; memory in MiB (0 on the CPU)."""

    capture: float
    wall: float
    wall_low: float
    wall_high: float
    memory: float


@dataclass(slots=True)
class Case:
    microbatches: int
    verdict: str = ""
    graphs: int = 0
    static_bytes: int = 0
    recording_alone: float = 0.0  # seconds; 0: not measured
    differs: dict[str, str] = field(default_factory=dict)  # a peer that was not timed, and why
    times: dict[str, Measured] = field(default_factory=dict)


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x)))) + x


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    cases = [run_case(options, microbatches, device) for microbatches in options.microbatches]
    result = {"about": surroundings(device), "layers": vars(options), "cases": [asdict(case) for case in cases]}
    show(result, cases)
    if options.out:
        path = Path(options.out) / f"dropin-{datetime.now(UTC):%Y-%m-%d}-{device.type}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
    return 0 if all(case.verdict.startswith("equal") for case in cases) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--apart", type=int, default=4, help="up to so many microbatches, also without shared buffers")
    parser.add_argument("--steps", type=int, default=5, help="passes that must agree with eager")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-round", type=int, default=3)
    parser.add_argument("--out", default="")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------- candidates


def eager(layers: tuple[nn.Module, ...], sample: Tensor, order: Order) -> Calls:
    return layers * order.microbatches


def through(function: Callable[..., Any], **more: Any) -> Callable[[tuple[nn.Module, ...], Tensor, Order], Calls]:
    """make_graphed_callables of whoever, under the order."""

    def make(layers: tuple[nn.Module, ...], sample: Tensor, order: Order) -> Calls:
        samples = tuple((sample.detach().clone().requires_grad_(),) for _ in range(len(layers) * order.microbatches))
        calls: Calls = function(
            layers, samples, _order=order.to_signed(), _num_layers_per_chunk=[len(layers)], **more
        )
        return calls

    return make


def torch_s(layers: tuple[nn.Module, ...], sample: Tensor, order: Order) -> Calls:
    samples = tuple((sample.detach().clone().requires_grad_(),) for _ in layers)
    calls: Calls = torch.cuda.make_graphed_callables(layers, samples)
    return calls


def candidates(options: argparse.Namespace, microbatches: int, device: torch.device) -> list[Candidate]:
    ours: dict[str, Any] = {"backend": "tape" if device.type == "cpu" else "cuda"}
    reuse = {"_reuse_graph_input_output_buffers": True}
    both = [("graphcap", graphcap.make_graphed_callables, ours)]
    if device.type == "cuda":
        try:
            te = importlib.import_module("transformer_engine.pytorch")
        except ImportError:
            print("Transformer Engine is not here: its rows are missing")
        else:
            both.append(("TE", te.make_graphed_callables, {}))
    found = [Candidate("eager", eager)]
    for name, function, more in both:
        found.append(Candidate(f"{name}, shared", through(function, **reuse, **more)))
        if microbatches <= options.apart:
            found.append(Candidate(f"{name}, apart", through(function, **more)))
    if device.type == "cuda" and microbatches <= options.apart:
        found.append(Candidate("torch (one microbatch)", torch_s, microbatches=1))
    return found


def recording_alone(layers: tuple[nn.Module, ...], sample: Tensor, order: Order) -> float:
    """Seconds for as many graphs as any candidate records: forwards and backwards of all layers and microbatches in flight.
    The second time, when kernels are loaded."""
    run_pass(Order.forward_backward(1), layers, len(layers), sample.unsqueeze(0), sample.unsqueeze(0))
    for _ in range(2):
        pool = torch.cuda.graph_pool_handle()
        graphs, ends = [], []
        free(sample.device)
        begin = time.perf_counter()
        for _ in range(order.microbatches):
            for layer in layers:
                x = sample.detach().requires_grad_()
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1], pool=pool):
                    y = layer(x)
                ends.append((layer, x, y))
        for layer, x, y in reversed(ends):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=pool):
                torch.autograd.grad(y, (x, *layer.parameters()), sample)
        synchronise(sample.device)
        seconds = time.perf_counter() - begin
        for graph in graphs:
            graph.reset()
    return seconds


# ------------------------------------------------------------------------------------------------------------ one case


def run_case(options: argparse.Namespace, microbatches: int, device: torch.device) -> Case:
    case = Case(microbatches)
    torch.manual_seed(microbatches)
    dtype = getattr(torch, options.dtype)
    origin = tuple(Layer(options.hidden).to(device, dtype) for _ in range(options.layers))
    inputs = torch.randn(microbatches, options.tokens, options.hidden, device=device, dtype=dtype)
    cotangents = torch.randn_like(inputs)
    with deterministic(device):
        if device.type == "cuda" and microbatches <= options.apart:
            order = Order.one_f_one_b(0, 4, microbatches)
            case.recording_alone = recording_alone(copy.deepcopy(origin), inputs[0], order)
            print(f"{microbatches} microbatches: recording alone takes {case.recording_alone:.2f} s", flush=True)
        for candidate in candidates(options, microbatches, device):
            run_candidate(options, candidate, case, origin, inputs, cotangents)
    case.verdict = f"equal over {options.steps} steps"
    return case


def run_candidate(
    options: argparse.Namespace,
    candidate: Candidate,
    case: Case,
    origin: tuple[nn.Module, ...],
    inputs: Tensor,
    cotangents: Tensor,
) -> None:
    count = candidate.microbatches or case.microbatches
    order = Order.forward_backward(1) if count == 1 else Order.one_f_one_b(0, 4, count)
    layers, twins = copy.deepcopy(origin), copy.deepcopy(origin)
    for p in (p for layer in (*layers, *twins) for p in layer.parameters()):
        p.grad = torch.zeros_like(p)
    free(inputs.device)
    held = reserved(inputs.device)
    begin = time.perf_counter()
    calls = candidate.make(layers, inputs[0], order)
    synchronise(inputs.device)
    capture = time.perf_counter() - begin
    free(inputs.device)  # what warm-up has left in the caches is nobody's
    run_pass(order, calls, len(layers), inputs, cotangents)
    memory = (reserved(inputs.device) - held) / MIB
    zero(layers)
    twin = (twins, eager(twins, inputs[0], order))
    differs = first_difference(options, order, (layers, calls), twin, inputs, cotangents)
    if differs is not None:
        print(f"{case.microbatches} microbatches, {candidate.name}: {differs}: not timed", flush=True)
        if not candidate.name.startswith("TE"):
            raise SystemExit(f"{candidate.name} {differs}")
        case.differs[candidate.name] = differs
        return
    walls = timed(options, order, calls, layers, inputs, cotangents)
    case.times[candidate.name] = Measured(capture, *interval(walls), memory)
    plan = getattr(calls[0], "plan", None)
    if isinstance(plan, graphcap.CapturePlan) and "shared" in candidate.name:
        case.graphs, case.static_bytes = plan.slot_map.graphs, plan.static_bytes
    for call in calls:
        if candidate.name != "eager" and hasattr(call, "reset"):
            call.reset()
    print(f"{case.microbatches} microbatches, {candidate.name}: capture {capture:.2f} s, {memory:.0f} MiB", flush=True)


def run_pass(order: Order, calls: Calls, layers: int, inputs: Tensor, cotangents: Tensor) -> list[Tensor]:
    """One pass of the order; the gradients of the inputs."""
    live: dict[int, tuple[Tensor, Tensor]] = {}
    found: list[Tensor] = []
    for step in order:
        m = step.microbatch
        if step.phase is Phase.F:
            x = h = inputs[m].detach().requires_grad_()
            for call in calls[m * layers : (m + 1) * layers]:
                h = call(h)
            live[m] = (x, h)
        else:
            x, h = live.pop(m)
            h.backward(cotangents[m])
            assert x.grad is not None
            found.append(x.grad)
            del x, h
    return found


def first_difference(
    options: argparse.Namespace,
    order: Order,
    mine: tuple[tuple[nn.Module, ...], Calls],
    twin: tuple[tuple[nn.Module, ...], Calls],
    inputs: Tensor,
    cotangents: Tensor,
) -> str | None:
    """Of input gradients, parameter gradients and updated weights, over several passes with changing inputs."""
    for step in range(options.steps):
        sides = []
        for layers, calls in (mine, twin):
            found = run_pass(order, calls, len(layers), inputs * (1 + step), cotangents)
            record = [*found, *(p.grad.clone() for layer in layers for p in layer.parameters())]
            with torch.no_grad():
                for p in (p for layer in layers for p in layer.parameters()):
                    p.sub_(1e-4 * p.grad)
            record += [p.detach().clone() for layer in layers for p in layer.parameters()]
            zero(layers)
            sides.append(record)
        equal = all(bool(b.isfinite().all()) and torch.equal(a, b) for a, b in zip(*sides, strict=True))
        if not equal or not any(bool(b.count_nonzero()) for b in sides[1]):
            return f"differs from eager in pass {step}"
    return None


def timed(
    options: argparse.Namespace,
    order: Order,
    calls: Calls,
    layers: tuple[nn.Module, ...],
    inputs: Tensor,
    cotangents: Tensor,
) -> list[float]:
    medians = []
    for round_number in range(options.rounds + 1):
        walls = []
        for _ in range(options.per_round):
            zero(layers)
            synchronise(inputs.device)
            begin = time.perf_counter()
            run_pass(order, calls, len(layers), inputs, cotangents)
            synchronise(inputs.device)
            walls.append((time.perf_counter() - begin) * 1e3)
        if round_number > 0:  # round 0 warms up
            medians.append(statistics.median(walls))
    return medians


def zero(layers: Sequence[nn.Module]) -> None:
    gradients = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
    torch._foreach_zero_(gradients)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def reserved(device: torch.device) -> int:
    """Bytes that the caching allocator holds, but for free blocks outside of private pools: anyone may have those. What is
    free inside a private pool is the graphs' own."""
    if device.type != "cuda":
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(s["active_size"] if tuple(s["segment_pool_id"]) == (0, 0) else s["total_size"] for s in segments)


def show(result: dict[str, Any], cases: list[Case]) -> None:
    about = result["about"]
    table = Table(title=f"make_graphed_callables, {about['device']}, torch {about['torch']}, {about['date']}")
    names = ("microbatches", "candidate", "capture s", "capture / TE", "memory MiB", "memory / eager", "pass ms (95 %)")
    for column in names:
        table.add_column(column)
    for case in cases:
        base = case.times["eager"]
        for name, row in case.times.items():
            peer = case.times.get(name.replace("graphcap", "TE")) if name.startswith("graphcap") else None
            table.add_row(
                str(case.microbatches),
                name,
                "" if name == "eager" else f"{row.capture:.2f}",
                f"{row.capture / peer.capture:.2f}" if peer else "",
                f"{row.memory:.0f}",
                f"{row.memory / base.memory:.2f}" if base.memory else "",
                f"{row.wall:.2f} ({row.wall_low:.2f}-{row.wall_high:.2f})",
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
