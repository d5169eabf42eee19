"""One training step of a stack of attention + MoE layers, graphed around its experts, against the peers (target P6).

    python -m benchmarks.moe_stack --out benchmarks/results

The stack is a HybridModel of `[*E]` groups with the dimensions of Qwen3-30B-A3B's layers, BF16, all experts in two
`grouped_mm`. Experts run eagerly between the graphs. Side by side in one run, rounds alternating:

    eager                     nothing captured
    graphcap return           graphcap.capture(model, ...), parameter gradients returned
    graphcap accumulate       the graphs add into `.grad`
    torch, the same pieces    torch.cuda.make_graphed_callables on exactly the static pieces that graphcap captures
    TE, the same pieces       Transformer Engine's function on them, where it is installed
    whole step, one graph     the practical limit (grouped_mm needs no host read, so this one stack allows it)
    forward: ...              under no_grad; breakable-cuda-graphs, where it is installed, has no backward and is here

Every candidate first agrees with eager bit for bit. `copies` counts what a graphcap step copies outside its graphs: the
inputs, one for each result of a break, and in the backward one for each gradient that a break hands back.
Wall and CPU time in ms, medians with a 95 % interval; `kernels`: the sum of eager's kernel times by torch.profiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphcap
from benchmarks.hybrid_step import Measured, free, interval, surroundings, synchronise
from graphcap._parts import entry_values
from graphcap._plan import PartPlan
from graphcap._tensors import flatten, tensors_of, unflatten
from graphcap.hybrid import HybridConfig, HybridModel
from graphcap.partial_layer import GRAPHED, run_call
from graphcap.testing import compare, deterministic

Batch = tuple[Tensor, Tensor]
Run = Callable[[Batch], Tensor]  # a forward; gives the loss, or for a whole step the loss after its backward


@dataclass(frozen=True, slots=True)
class Case:
    tokens: int
    verdict: str
    graphs: int
    breaks: int
    copies: dict[str, int]
    kernels_ms: float
    kernel_launches: int
    times: dict[str, Measured]


@dataclass(frozen=True, slots=True)
class Candidate:
    """`step(batch)` runs one step (or one forward) and leaves gradients, if any, in `.grad`."""

    name: str
    step: Callable[[Batch], Tensor]
    close: Callable[[], None] = lambda: None


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    if device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        importlib.import_module("transformer_engine.pytorch")  # first: it must load its cuDNN before torch loads another
    torch.set_default_device(device)
    cases = [run_case(options, tokens, device) for tokens in options.tokens]
    result = {"about": surroundings(device), "model": vars(options), "cases": [asdict(case) for case in cases]}
    show(result, cases)
    if options.out:
        path = Path(options.out) / f"moe_stack-{datetime.now(UTC):%Y-%m-%d}-{device.type}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
    return 0 if all(case.verdict.startswith("equal") for case in cases) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4, help="groups of attention and MoE")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--attention", default="sdpa", choices=("math", "sdpa"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--steps", type=int, default=20, help="of the comparison with eager")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--per-round", type=int, default=5)
    parser.add_argument("--out", default="")
    return parser.parse_args()


def build(options: argparse.Namespace, tokens: int, device: torch.device) -> HybridModel:
    size: dict[str, Any] = {}
    if options.hidden >= 1024:
        size = {"heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128, "top_k": 8, "expert_ffn": 768, "vocab": 1024}
    torch.manual_seed(7)
    return HybridModel(
        HybridConfig(
            pattern="[*E]" * options.layers,
            hidden=options.hidden,
            max_sequence=tokens,
            attention=options.attention,
            expert_gemm="grouped",
            dtype=torch.bfloat16,
            **size,
        )
    ).to(device)


def batch_of(index: int, tokens: int, device: torch.device) -> Batch:
    generator = torch.Generator(device="cpu").manual_seed(index)
    text = torch.randint(0, 256, (1, tokens + 1), generator=generator, device="cpu").to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def run_case(options: argparse.Namespace, tokens: int, device: torch.device) -> Case:
    with deterministic(device):
        verdict = compare(
            lambda: build(options, tokens, device), lambda i: (batch_of(i, tokens, device), {}), steps=options.steps
        )
    print(f"{tokens} tokens: {verdict}", flush=True)
    free(device)
    model = build(options, tokens, device)
    batches = [batch_of(i, tokens, device) for i in range(8)]
    times: dict[str, Measured] = {}
    graphs = breaks = 0
    copies: dict[str, int] = {}
    # A pair at a time: all of them at once would not fit, and each is compared with an eager of its own minutes.
    for number, make in enumerate(makers(device)):
        free(device)
        candidate = attempt(make, model, batches[0], device)
        if candidate is None:
            continue
        agree(candidate, model, batches[1], device)
        if "graphcap return" in candidate.name:
            graphed = candidate.step.keywords["module"]  # type: ignore[attr-defined]
            graphs, breaks = graphed.plan.graphs, len(graphed.plan.breaks)
            copies = count_copies(candidate, model, batches[2])
        eager = Candidate("eager", partial(train, module=model))
        if candidate.name.startswith("forward"):
            eager = Candidate("forward: eager", partial(infer, module=model))
        both = measure([eager, candidate], model, batches, options, device)
        times.setdefault(eager.name, both[eager.name])
        times[f"{eager.name}, beside {candidate.name.removeprefix('forward: ')}"] = both[eager.name]
        times[candidate.name] = both[candidate.name]
        candidate.close()
        del candidate, both
        print(f"  {number + 1} measured", flush=True)
    kernels, launches = kernel_time(partial(train, module=model), model, batches, device)
    return Case(tokens, str(verdict), graphs, breaks, copies, kernels, launches, times)


# ----------------------------------------------------------------------------------------------------------- candidates


def train(batch: Batch, module: Callable[..., Any]) -> Tensor:
    loss: Tensor = module(*batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def infer(batch: Batch, module: Callable[..., Any]) -> Tensor:
    loss: Tensor = module(*batch).loss
    return loss


def makers(device: torch.device) -> list[Callable[..., Candidate]]:
    made: list[Callable[..., Candidate]] = [
        partial(graphed, grads="return"),
        partial(graphed, grads="accumulate"),
        forward_graphed,
    ]
    if device.type == "cuda":
        made += [torch_pieces, te_pieces, whole_step, breakable]
    return made


def attempt(
    make: Callable[..., Candidate], model: HybridModel, batch: Batch, device: torch.device
) -> Candidate | None:
    """A peer may be absent; what it can't do is printed, and its row is missing."""
    try:
        return make(model, batch)
    except ImportError as error:
        print(f"  not here, its row is missing: {error}", flush=True)
        return None
    finally:
        model.zero_grad(set_to_none=True)
        synchronise(device)


def graphed(model: HybridModel, batch: Batch, grads: str) -> Candidate:
    config = graphcap.CaptureConfig(grads=grads)  # type: ignore[arg-type]
    module = graphcap.capture(model, batch, config=config)
    return Candidate(f"graphcap {grads}", partial(train, module=module), module.close)


def forward_graphed(model: HybridModel, batch: Batch) -> Candidate:
    with torch.no_grad():
        module = graphcap.capture(model, batch)
    return Candidate("forward: graphcap", partial(infer, module=module), module.close)


class Piece(nn.Module):
    """A static piece as torch's function wants it: tensors in, a flat tuple of tensors out, its parameters alone. What it
    reads besides tensors is the same at every call, and is kept."""

    def __init__(self, part: PartPlan, used: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.part = part
        self.used = nn.ParameterList(used)
        self.constants: dict[str, Any] = {}
        self.shape: Any = None
        self.leaves: list[Any] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        arrived = iter(tensors)
        scope: dict[str, Any] = {
            name: self.constants[name] if name in self.constants else next(arrived) for name in self.part.reads
        }
        for call in self.part.calls:
            run_call(call, scope)
        self.leaves, self.shape = flatten([scope[name] for name in self.part.makes])
        return tuple(tensors_of(self.leaves))

    def put(self, made: Sequence[Tensor], env: dict[str, Any]) -> None:
        """Results into `env`, by name, with what is no tensor in its place."""
        tensors = iter(made)
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        env.update(zip(self.part.makes, unflatten(self.shape, leaves), strict=True))


class Pieces:
    """The plan's parts one after the other; `graphed[index]` in the place of a static piece."""

    def __init__(self, unit: Any, pieces: dict[int, Piece], graphed: dict[int, Any]) -> None:
        self.unit, self.pieces, self.graphed = unit, pieces, graphed

    def __call__(self, *args: Any) -> Any:
        env = entry_values(self.unit, args, {})
        for part in self.unit.parts:
            if part.index in self.graphed:
                piece = self.pieces[part.index]
                reads = (env[name] for name in part.reads if name not in piece.constants)
                piece.put(self.graphed[part.index](*reads), env)
            else:
                for call in part.calls:
                    run_call(call, env)
        return self.unit.program.result(env)


def pieces_of(model: HybridModel, batch: Batch) -> tuple[Any, dict[int, Piece], list[tuple[Tensor, ...]]]:
    """The static pieces that graphcap captures, and what goes into each."""
    with closing(graphcap.capture(model, batch)) as module:
        unit = module.plan.units[0]
        bound = module._runner.sets[0][0]
        used = {part.graphs.facts.part.index: part.returned for part in bound.parts if part is not None}
    pieces = {part.index: Piece(part, used[part.index]) for part in unit.parts if part.kind is GRAPHED}
    samples = []
    env = entry_values(unit, batch, {})
    for part in unit.parts:
        if part.kind is GRAPHED:
            values = {name: env[name] for name in part.reads}
            pieces[part.index].constants = {name: v for name, v in values.items() if not isinstance(v, Tensor)}
            tensors = [value for value in values.values() if isinstance(value, Tensor)]
            samples.append(tuple(value.detach().requires_grad_(value.requires_grad) for value in tensors))
        for call in part.calls:
            run_call(call, env)
    return unit, pieces, samples


def torch_pieces(model: HybridModel, batch: Batch) -> Candidate:
    return _by_pieces("torch, the same pieces", torch.cuda.make_graphed_callables, model, batch)


def te_pieces(model: HybridModel, batch: Batch) -> Candidate:
    from transformer_engine.pytorch import make_graphed_callables

    return _by_pieces("TE, the same pieces", make_graphed_callables, model, batch)


def _by_pieces(name: str, make: Callable[..., Any], model: HybridModel, batch: Batch) -> Candidate:
    unit, pieces, samples = pieces_of(model, batch)
    made = make(tuple(pieces.values()), tuple(samples), allow_unused_input=True)
    run = Pieces(unit, pieces, dict(zip(pieces, made, strict=True)))
    return Candidate(name, partial(train, module=run))


def whole_step(model: HybridModel, batch: Batch) -> Candidate:
    tokens, labels = (tensor.clone() for tensor in batch)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            train((tokens, labels), model)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train((tokens, labels), model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    def step(batch: Batch) -> Tensor:
        tokens.copy_(batch[0])
        labels.copy_(batch[1])
        graph.replay()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return loss

    return Candidate("whole step, one graph", step, graph.reset)


def breakable(model: HybridModel, batch: Batch) -> Candidate:
    """breakable-cuda-graphs: forward only, and a break writes its result into a buffer that was there before."""
    from breakable_cuda_graphs import BreakableCUDAGraph, breakable_graph, no_graph

    tokens, labels = (tensor.clone() for tensor in batch)
    unit, _, _ = pieces_of(model, batch)
    buffers: dict[int, list[Tensor]] = {}

    @no_graph
    def into(index: int, *reads: Tensor) -> None:
        scope = dict(zip(unit.parts[index].reads, reads, strict=True))
        for call in unit.parts[index].calls:
            run_call(call, scope)
        for buffer, name in zip(buffers[index], unit.parts[index].makes, strict=True):
            buffer.copy_(scope[name])

    def forward(first: bool) -> Any:
        env = entry_values(unit, (tokens, labels), {})
        for part in unit.parts:
            if part.kind is GRAPHED or first:
                for call in part.calls:
                    run_call(call, env)
                if first and part.kind is not GRAPHED:
                    buffers[part.index] = [torch.empty_like(env[name]) for name in part.makes]  # tensors, in this model
            else:
                into(part.index, *(env[name] for name in part.reads))
                env.update(zip(part.makes, buffers[part.index], strict=True))
        return unit.program.result(env)

    with torch.no_grad():
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for n in range(3):
                forward(n == 0)
        torch.cuda.current_stream().wait_stream(side)
        graph = BreakableCUDAGraph()
        with breakable_graph(graph):
            loss = forward(False).loss

    @torch.no_grad()
    def step(batch: Batch) -> Tensor:
        tokens.copy_(batch[0])
        labels.copy_(batch[1])
        graph.replay()
        return loss

    return Candidate("forward: breakable-cuda-graphs", step, graph.reset)


# ---------------------------------------------------------------------------------------------------------- measurement


def agree(candidate: Candidate, model: HybridModel, batch: Batch, device: torch.device) -> None:
    """Loss and gradients equal eager's, which must equal itself first (attention kernels may not repeat themselves)."""
    forward = candidate.name.startswith("forward")
    sides = []
    for step in (partial(infer if forward else train, module=model),) * 2 + (candidate.step,):
        model.zero_grad(set_to_none=True)
        loss = step(batch).detach().clone()
        sides.append((loss, [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
    model.zero_grad(set_to_none=True)

    def same(a: int, b: int) -> bool:
        return torch.equal(sides[a][0], sides[b][0]) and all(
            (p is None and q is None) or (p is not None and q is not None and torch.equal(p, q))
            for p, q in zip(sides[a][1], sides[b][1], strict=True)
        )

    if not same(0, 1):
        print(f"  {candidate.name}: eager differs from itself outside deterministic mode; loss compared alone", flush=True)
        if not torch.allclose(sides[0][0], sides[2][0], rtol=1e-3):
            raise SystemExit(f"{candidate.name} does not agree with eager: nothing is timed")
    elif not same(0, 2):
        raise SystemExit(f"{candidate.name} does not agree with eager: nothing is timed")


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies that run outside graphs, by operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("copy_", "clone"):
            self.found[name] += 1
        elif name in ("_foreach_copy_", "_foreach_mul"):
            self.found[name] += len(args[0])
        return func(*args, **(kwargs or {}))


def count_copies(candidate: Candidate, model: HybridModel, batch: Batch) -> dict[str, int]:
    """Tensors that one step copies outside the graphs (the breaks' own work included): forward, and forward+backward."""
    counted: dict[str, int] = {}
    module = candidate.step.keywords["module"]  # type: ignore[attr-defined]
    for name, mode in (("forward", torch.no_grad()), ("step", torch.enable_grad())):
        with _Count() as count, mode:
            loss = module(*batch).loss
            if name == "step":
                loss.backward()
        counted |= {f"{name}: {key}": value for key, value in sorted(count.found.items())}
    model.zero_grad(set_to_none=True)
    return counted


def measure(
    candidates: Sequence[Candidate],
    model: HybridModel,
    batches: Sequence[Batch],
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Measured]:
    walls: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    cpus: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    parameters = list(model.parameters())
    for round_number in range(options.rounds + 1):
        for candidate in candidates:
            for n in range(options.per_round):
                for parameter in parameters:
                    parameter.grad = None
                batch = batches[(round_number * options.per_round + n) % len(batches)]
                synchronise(device)
                wall, cpu = time.perf_counter(), time.process_time()
                candidate.step(batch)
                cpu = time.process_time() - cpu
                synchronise(device)
                wall = time.perf_counter() - wall
                if round_number > 0:  # round 0 warms up
                    walls[candidate.name].append(wall * 1e3)
                    cpus[candidate.name].append(cpu * 1e3)
    return {c.name: Measured(*interval(walls[c.name]), *interval(cpus[c.name])) for c in candidates}


def kernel_time(
    step: Run, model: HybridModel, batches: Sequence[Batch], device: torch.device
) -> tuple[float, int]:
    """Sum of the kernel times of one eager step, ms, and how many there were: the physical limit."""
    if device.type != "cuda":
        return 0.0, 0
    from torch.profiler import ProfilerActivity, profile

    steps = 5
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for n in range(steps):
            model.zero_grad(set_to_none=True)
            step(batches[n])
        synchronise(device)
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.device_time for event in events) / 1e3 / steps, len(events) // steps


def show(result: dict[str, Any], cases: list[Case]) -> None:
    about = result["about"]
    table = Table(title=f"MoE stack, one step, {about['device']}, torch {about['torch']}, {about['date']}")
    for column in ("tokens", "candidate", "wall ms (95 %)", "CPU ms (95 %)", "wall / kernels", "wall / eager beside it"):
        table.add_column(column)
    for case in cases:
        for name, m in case.times.items():
            if ", beside " in name:
                continue
            eager = "forward: eager" if name.startswith("forward") else "eager"
            beside = case.times.get(f"{eager}, beside {name.removeprefix('forward: ')}", case.times[eager])
            forward = name.startswith("forward") or not case.kernels_ms
            table.add_row(
                str(case.tokens),
                name,
                f"{m.wall:.2f} ({m.wall_low:.2f}-{m.wall_high:.2f})",
                f"{m.cpu:.2f} ({m.cpu_low:.2f}-{m.cpu_high:.2f})",
                "" if forward else f"{m.wall / case.kernels_ms:.3f}",
                f"{m.wall / beside.wall:.3f}",
            )
    console = Console(width=150)
    console.print(table)
    for case in cases:
        console.print(
            f"{case.tokens} tokens: {case.verdict}; {case.graphs} forward graphs for {case.breaks} breaks; kernels "
            f"{case.kernels_ms:.2f} ms ({case.kernel_launches}); copies outside graphs {case.copies}"
        )


if __name__ == "__main__":
    sys.exit(main())
