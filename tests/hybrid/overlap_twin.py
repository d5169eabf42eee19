"""A model under an overlapped schedule beside its twin, whose microbatches run one after the other: bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphcap.hybrid import HybridConfig, HybridModel, delayed_wgrad, shard_experts
from graphcap.hybrid.overlap import OverlapSchedule

MICROBATCHES = 3
PATTERNS = ("[*E][*E]", "[M*E]", "*E", "[*-][*E]", "E")


@dataclass(frozen=True)
class Case:
    pattern: str
    shared: bool
    delay: bool
    norm: bool
    mtp: bool = False

    def __str__(self) -> str:
        words = [word for word in ("shared", "delay", "norm", "mtp") if getattr(self, word)]
        return "-".join([self.pattern, *words])


# Every pair of two columns' values occurs in one of these.
COVERING = tuple(
    Case(pattern, *map(bool, flags))
    for pattern, *flags in (
        ("[*E][*E]", 0, 0, 0, 0),
        ("[*E][*E]", 1, 1, 1, 1),
        ("[M*E]", 0, 1, 1, 0),
        ("[M*E]", 1, 0, 0, 1),
        ("*E", 0, 0, 1, 1),
        ("*E", 1, 1, 0, 0),
        ("[*-][*E]", 0, 1, 0, 1),
        ("[*-][*E]", 1, 0, 1, 0),
        ("E", 0, 0, 1, 0),
        ("E", 1, 1, 0, 1),
    )
)
OTHERS = tuple(
    case for case in (Case(p, *flags) for p, *flags in product(PATTERNS, *[(False, True)] * 4)) if case not in COVERING
)


def model_of(case: Case, device: str = "cpu", **values: object) -> HybridModel:
    torch.manual_seed(11)
    config = HybridConfig(
        pattern=case.pattern + ("/*E" if case.mtp else ""),
        vocab=64,
        hidden=16,
        head_dim=4,
        ffn=24,
        expert_ffn=12,
        mamba_heads=4,
        mamba_state=8,
        shared_ffn=12 if case.shared else 0,
        recompute="norm" if case.norm else "none",
        init_std=0.1,
        **values,  # type: ignore[arg-type]
    )
    with torch.device(device):
        return HybridModel(config)


def batches_of(step: int, vocab: int = 64, device: str = "cpu", tokens: int = 8) -> list[tuple[Tensor, Tensor]]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, vocab, (MICROBATCHES, 2, tokens + 1), generator=generator).to(device)
    return [(one[:, :-1], one[:, 1:]) for one in ids]


def plain_step(model: HybridModel, batches: Sequence[tuple[Tensor, Tensor]], delay: bool) -> list[Tensor]:
    losses = []
    with delayed_wgrad(model, delay):
        for tokens, labels in batches:
            loss = model(tokens, labels).loss
            (loss * (1 / len(batches))).backward()
            if delay:
                depths = 0 if model.mtp is None else len(list(model.mtp.depths()))
                model.output_layer.backward_dw(1 + depths)  # type: ignore[union-attr,operator]
                for depth in model.mtp.depths() if model.mtp is not None else ():
                    depth.eh_proj.backward_dw()
                    for layer in depth.physical_layers():
                        layer.backward_dw()
                for layer in reversed(list(model.decoder.layers)):
                    layer.backward_dw()
            losses.append(loss.detach())
    return losses


def average(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Over the ranks that share the experts: what every rank has. The experts' gradients are whole already, of all ranks'
    losses."""
    if not dist.is_initialized():
        return
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            if ".expert_mlps." not in name and ".grouped." not in name:
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def run_beside_twin(
    case: Case,
    iterations: int,
    *,
    graphs: bool = False,
    early_release: bool = False,
    regroup: bool = False,
    device: str = "cpu",
    sharded: bool = False,
    delayed_twin: bool = False,
    tokens: int = 8,
    **values: object,
) -> OverlapSchedule:
    """Losses, gradients and weights of `iterations` optimizer steps agree bit for bit; everything trains."""
    model = model_of(case, device, **values)
    if sharded:
        shard_experts(model)
    twin = copy.deepcopy(model)
    schedule = OverlapSchedule(model, delay_wgrad=case.delay, early_release=early_release, regroup=regroup)
    if graphs:
        backend = "tape" if device == "cpu" else "cuda"
        schedule.capture_graphs(batches_of(0, device=device, tokens=tokens)[0][0], MICROBATCHES, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.5) for m in (model, twin)]
    got: set[str] = set()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(iterations):
        batches = batches_of(step, device=device, tokens=tokens)
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = schedule.step(batches)
        expected = plain_step(twin, batches, delayed_twin and case.delay)
        for mine, theirs in zip(losses, expected, strict=True):
            assert torch.equal(mine, theirs), f"{case}, step {step}: loss {mine} and {theirs}"
            assert bool(mine.isfinite())
        average(model)
        average(twin)
        for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            where = f"{case}, step {step}: {name}"
            assert (mine.grad is None) == (theirs.grad is None), where
            if mine.grad is not None and theirs.grad is not None:
                assert torch.equal(mine.grad, theirs.grad), where
                assert bool(mine.grad.isfinite().all()), where
                if bool(mine.grad.count_nonzero()):
                    got.add(name)
        for optimizer in optimizers:
            optimizer.step()
        for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, theirs), f"{case}, step {step}: weight {name}"
        for (name, mine), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, theirs), f"{case}, step {step}: buffer {name}"
    assert got == set(start)
    still = {name for name, p in model.named_parameters() if torch.equal(p, start[name])}
    # In bfloat16 a small step from 1 is rounded away.
    assert all("norm" in name for name in still) if model.config.dtype is torch.bfloat16 else not still
    return schedule
