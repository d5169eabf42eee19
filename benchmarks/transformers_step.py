"""Step times of unmodified models of Hugging Face transformers, cut at their experts: graphed against eager in one run.

    python -m benchmarks.transformers_step --out benchmarks/results

Mixtral, Qwen3-MoE and GraniteMoeHybrid as CausalLM with labels, random weights, the dimensions of the published models
(Mixtral-8x7B, Qwen3-30B-A3B, granite-4.0-h-tiny) with fewer layers, BF16, `grouped_mm` experts, `break_at=("*.experts",
"auto")`. The eager twin must agree bit for bit under graphcap.testing.deterministic before anything is timed. A step is
forward and backward of one microbatch, gradients set to None before; no optimizer. Medians with a 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import graphcap
from benchmarks.hybrid_step import Measured, free, surroundings
from benchmarks.moe_stack import Candidate, kernel_time, measure
from graphcap.testing import compare, deterministic

BREAKS = ("*.experts", "auto")


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    tokens: int
    parameters: int
    verdict: str
    graphs: int
    breaks: tuple[str, ...]
    static_bytes: int
    kernels_ms: float
    kernel_launches: int
    times: dict[str, Measured]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--small", action="store_true", help="toy dimensions, to try the runner out")
    parser.add_argument("--steps", type=int, default=20, help="of the comparison with eager")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--per-round", type=int, default=5)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    device = torch.device(options.device)
    cases = [run_case(options, name, tokens, device) for name in options.models for tokens in options.tokens]
    about = surroundings(device) | {"transformers": transformers.__version__}
    result = {"about": about, "options": vars(options), "cases": [asdict(case) for case in cases]}
    show(about, cases)
    if options.out:
        path = Path(options.out) / f"transformers_step-{datetime.now(UTC):%Y-%m-%d}-{device.type}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
    return 0 if all(case.verdict.startswith("equal") for case in cases) else 1


def mixtral(small: bool) -> tuple[Any, Any]:
    size = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if small:
        size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM, transformers.MixtralConfig(
        **size, vocab_size=1024, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2, use_cache=False
    )


def qwen3_moe(small: bool) -> tuple[Any, Any]:
    size = {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    if small:
        size = {
            "hidden_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        }  # fmt: skip
    return transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
        **size, vocab_size=1024, num_hidden_layers=4, norm_topk_prob=True, use_cache=False
    )


def granite(small: bool) -> tuple[Any, Any]:
    size = {
        "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_attention_heads": 12,
        "num_key_value_heads": 4, "num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 256,
    }  # fmt: skip
    if small:
        size = {
            "hidden_size": 32, "intermediate_size": 32, "shared_intermediate_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 8,
            "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8,
        }  # fmt: skip
    return transformers.GraniteMoeHybridForCausalLM, transformers.GraniteMoeHybridConfig(
        **size, vocab_size=1024, num_hidden_layers=4, layer_types=["mamba", "mamba", "mamba", "attention"],
        mamba_n_groups=1, use_cache=False,
    )  # fmt: skip


MODELS: dict[str, Callable[[bool], tuple[Any, Any]]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "granite_moe_hybrid": granite,
}


def built(name: str, small: bool, device: torch.device) -> nn.Module:
    kind, config = MODELS[name](small)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm" if device.type == "cuda" else "eager"
    torch.manual_seed(7)
    with device:
        model: nn.Module = kind(config).to(torch.bfloat16)
    return model.train()


def inputs(index: int, tokens: int, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    drawn = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(index)).to(device)
    return (), {"input_ids": drawn, "labels": drawn}


def run_case(options: argparse.Namespace, name: str, tokens: int, device: torch.device) -> Case:
    with deterministic(device):
        verdict = compare(
            lambda: built(name, options.small, device),
            lambda index: inputs(index, tokens, device),
            steps=options.steps,
            break_at=BREAKS,
        )
    print(f"{name}, {tokens} tokens: {verdict}", flush=True)
    free(device)
    model = built(name, options.small, device)
    batches: list[Any] = [inputs(index, tokens, device)[1] for index in range(8)]
    times: dict[str, Measured] = {}
    eager = Candidate("eager", partial(train, module=model))
    for grads in ("return", "accumulate"):
        config = graphcap.CaptureConfig(grads=grads)  # type: ignore[arg-type]
        graphed = graphcap.capture(model, (), batches[0], config=config, break_at=BREAKS)
        plan = graphed.plan
        label = f"graphcap {grads}"
        both = measure([eager, Candidate(label, partial(train, module=graphed))], model, batches, options, device)
        times |= {label: both[label], f"eager, beside {grads}": both["eager"]}
        graphed.close()
        del graphed
        model.zero_grad(set_to_none=True)
        free(device)
    kernels, launches = kernel_time(eager.step, model, batches, device)  # type: ignore[arg-type]
    count = sum(parameter.numel() for parameter in model.parameters())
    names = tuple(part.name for part in plan.breaks)
    return Case(name, tokens, count, str(verdict), plan.graphs, names, plan.static_bytes, kernels, launches, times)


def train(batch: Any, module: Callable[..., Any]) -> Tensor:
    loss: Tensor = module(**batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def show(about: dict[str, str], cases: list[Case]) -> None:
    table = Table(title=f"one step, {about['device']}, torch {about['torch']}, {about['date']}")
    for column in ("model", "tokens", "graphs", "eager ms", "graphed ms (95 %)", "CPU ms", "graphed / eager", "/ kernels"):
        table.add_column(column)
    for case in cases:
        for grads in ("return", "accumulate"):
            eager, mine = case.times[f"eager, beside {grads}"], case.times[f"graphcap {grads}"]
            table.add_row(
                f"{case.model}, {grads}",
                str(case.tokens),
                f"{case.graphs}, {len(case.breaks)} breaks",
                f"{eager.wall:.2f} ({eager.wall_low:.2f}-{eager.wall_high:.2f})",
                f"{mine.wall:.2f} ({mine.wall_low:.2f}-{mine.wall_high:.2f})",
                f"{eager.cpu:.2f} -> {mine.cpu:.2f}",
                f"{mine.wall / eager.wall:.3f}",
                f"{mine.wall / case.kernels_ms:.3f}" if case.kernels_ms else "",
            )
    console = Console(width=150)
    console.print(table)
    for case in cases:
        console.print(f"{case.model}, {case.tokens} tokens, {case.parameters / 1e9:.2f}e9 parameters: {case.verdict}")


if __name__ == "__main__":
    sys.exit(main())
