"""Expert parallelism and pipelines of the hybrid model: two gloo ranks, all cases of a test in one spawn."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from graphcap.errors import PlanError
from graphcap.hybrid import ExpertParallel, HybridConfig, HybridModel, MoELayer, delayed_wgrad, shard_experts
from graphcap.hybrid.expert_parallel import agree, send, send_back
from graphcap.hybrid.overlap import OverlapSchedule
from graphcap.hybrid.overlap_pipeline import PipelineOverlap
from graphcap.testing import compare, deterministic
from tests.hybrid.overlap_twin import COVERING, OTHERS, Case, batches_of, model_of, plain_step, run_beside_twin


def join(rank: int, port: int, backend: str, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        work(*arguments)
    finally:
        dist.destroy_process_group()


def on_two_ranks(work: Callable[..., None], *arguments: object, backend: str = "gloo") -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(join, args=(port, backend, work, arguments), nprocs=2)


# ---------------------------------------------------------------------------------------------------- one spawn's cases


def exchange_is_what_it_should_be() -> None:
    """Uneven, with nothing for somebody, there and back, and the gradient of it."""
    parallel = ExpertParallel.of()
    rank = parallel.rank
    counts = torch.tensor([[2, 0, 3, 1], [0, 0, 4, 0]][rank])
    rows = (torch.arange(int(counts.sum()), dtype=torch.float64) + 100 * rank).unsqueeze(1).requires_grad_()
    layout = agree(counts, parallel)
    received = send(rows, layout)
    expected = [[0.0, 1.0], [2.0, 3.0, 4.0, 5.0, 100.0, 101.0, 102.0, 103.0]][rank]
    assert received.flatten().tolist() == expected
    assert layout.per_expert == [(2, 0), (7, 1)][rank]
    back = send_back(received * (rank + 2), layout)
    factor = torch.repeat_interleave(torch.tensor([2.0, 2, 3, 3], dtype=torch.float64), counts)
    assert torch.equal(back.flatten(), rows.detach().flatten() * factor)
    (grad,) = torch.autograd.grad(back.sum(), rows)
    assert torch.equal(grad.flatten(), factor)


def shared_out_experts_compute_what_all_compute() -> None:
    """The same tokens on both ranks: each expert's gradient is the sum over ranks, outputs are those of one rank."""
    for experts, top_k, gemm in ((4, 2, "loop"), (2, 1, "loop"), (8, 3, "loop"), (4, 2, "grouped")):
        dtype = torch.bfloat16 if gemm == "grouped" else torch.float64
        config = HybridConfig(experts=experts, top_k=top_k, shared_ffn=24, dtype=dtype, expert_gemm=gemm)  # type: ignore[arg-type]
        torch.manual_seed(2)
        whole = MoELayer(config)
        torch.manual_seed(2)
        part = MoELayer(config)
        shard_experts(part)
        hidden = torch.randn(2, 9, 32, dtype=dtype, generator=torch.Generator().manual_seed(3))
        leaves = [hidden.clone().requires_grad_() for _ in range(2)]
        found, expected = part(leaves[0]), whole(leaves[1])
        tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-3}
        torch.testing.assert_close(found, expected, **tolerance)
        found.float().square().sum().backward()
        expected.float().square().sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad, **tolerance)
        if gemm == "loop":
            theirs = dict(whole.named_parameters())
            assert {n for n, _ in part.named_parameters()} <= set(theirs)
            for name, parameter in part.named_parameters():
                times = 2 if "expert_mlps" in name else 1
                grad = theirs[name].grad
                assert (parameter.grad is None) == (grad is None)
                if parameter.grad is not None and grad is not None:
                    torch.testing.assert_close(parameter.grad, times * grad, rtol=1e-6, atol=1e-9)


def experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match="3 experts can't be shared out evenly over 2 ranks"):
        shard_experts(MoELayer(HybridConfig(experts=3)))
    layer = MoELayer(HybridConfig())
    shard_experts(layer)
    with pytest.raises(PlanError, match="shared out already"):
        shard_experts(layer)


def a_rank_without_rows_takes_part() -> None:
    """All tokens go to the experts of rank 0; the other's backward still joins the exchanges."""
    layer = MoELayer(HybridConfig(experts=4, top_k=2))
    shard_experts(layer)
    with torch.no_grad():
        layer.router_weight.zero_()
        layer.router_weight[:2] = 5.0
    hidden = torch.rand(1, 5, 32) + 1
    hidden.requires_grad_()
    with delayed_wgrad(layer):
        layer(hidden).sum().backward()
        layer.backward_dw()
    grads = [p.grad for n, p in layer.named_parameters() if "expert_mlps" in n]
    assert [grad is None for grad in grads] == [dist.get_rank() == 1] * len(grads)


def captured_with_experts_elsewhere() -> None:
    def build() -> HybridModel:
        model = model_of(Case("[*E]M", True, False, False))
        shard_experts(model)
        return model

    def inputs(index: int) -> tuple[tuple[Tensor, ...], dict[str, object]]:
        return batches_of(index)[0], {}

    assert compare(build, inputs, steps=20, backend="tape")


def exchanges(cases: list[Case]) -> None:
    exchange_is_what_it_should_be()
    shared_out_experts_compute_what_all_compute()
    experts_that_do_not_divide_are_refused()
    a_rank_without_rows_takes_part()
    captured_with_experts_elsewhere()
    for case in cases:
        run_beside_twin(case, 5, sharded=True, regroup=case.delay)
    run_beside_twin(COVERING[6], 5, sharded=True, graphs=True)


def long_runs(covering: list[Case], others: list[Case], device: str = "cpu") -> None:
    with deterministic(device):
        for case in covering:
            run_beside_twin(case, 100, sharded=True, device=device)
            if not case.norm:
                run_beside_twin(case, 100, sharded=True, graphs=True, device=device)
        for case in others:
            run_beside_twin(case, 5, sharded=True, early_release=case.shared, delayed_twin=True, device=device)


def pipelines(cases: list[tuple[str, int, bool]]) -> None:
    """Losses and every rank's gradients are those of the whole model, microbatch after microbatch."""
    rank = dist.get_rank()
    for pattern, chunks, delay in cases:
        case = Case(pattern, shared=True, delay=delay, norm=False)
        model, twin = model_of(case), model_of(case)
        pieces = model.chunks(2 * chunks)[rank::2]
        pipeline = PipelineOverlap(OverlapSchedule(pieces, delay_wgrad=delay), rank, 2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, twin)]
        for step in range(5):
            batches = [same for part in range(2) for same in both_ranks_batches(2 * step + part)][:4]
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = pipeline.step(batches)
            expected = plain_step(twin, batches, False)
            if rank == 1:
                assert all(map(torch.equal, losses, expected))
            assert len(losses) == 4 * rank
            mine = {id(p) for piece in pieces for p in piece.parameters()}
            for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert (id(parameter) in mine) == (parameter.grad is not None) or other.grad is None, name
                if id(parameter) in mine:
                    assert (parameter.grad is None) == (other.grad is None), name
                    assert parameter.grad is None or torch.equal(parameter.grad, other.grad), (pattern, step, name)
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():  # what lives on the other rank
                for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                    if id(parameter) not in mine:
                        parameter.copy_(other)
                    assert torch.equal(parameter, other)
        assert sum(f is not None and b is None for f, b in pipeline.pairs) == {
            (1, 0): 2,
            (1, 1): 1,
            (2, 0): 5,
            (2, 1): 3,
        }[chunks, rank]


def both_ranks_batches(step: int) -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(0, 64, (3, 2, 9), generator=torch.Generator().manual_seed(step))
    return [(one[:, :-1], one[:, 1:]) for one in ids]


# --------------------------------------------------------------------------------------------------------------- tests


PIPELINES = [("[*E]|M[*-]", 1, True), ("[*E]|E|*-|[M*E]", 2, True), ("[*E][*E][*E][*E]", 2, False)]


def everything(cases: list[Case], patterns: list[tuple[str, int, bool]]) -> None:
    exchanges(cases)
    pipelines(patterns)


@pytest.mark.distributed
def test_experts_and_pipelines_on_two_ranks() -> None:
    on_two_ranks(everything, [COVERING[1], COVERING[2], COVERING[5]], PIPELINES)


@pytest.mark.slow
@pytest.mark.distributed
def test_overlap_on_two_ranks_100_iterations() -> None:
    on_two_ranks(long_runs, list(COVERING), list(OTHERS))
