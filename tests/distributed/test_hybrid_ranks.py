"""Expert parallelism and pipelines of the hybrid model: two gloo ranks, all cases of a test in one spawn."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from graphcap.errors import PlanError, StateError
from graphcap.hybrid import ExpertParallel, HybridConfig, HybridModel, MoELayer, delayed_wgrad, shard_experts
from graphcap.hybrid.expert_parallel import agree, send, send_back
from graphcap.hybrid.overlap import OverlapSchedule
from graphcap.hybrid.overlap_pipeline import PipelineOverlap
from graphcap.testing import compare, deterministic
from tests.hybrid.overlap_twin import COVERING, OTHERS, PATTERNS, Case, average, batches_of, model_of, run_beside_twin


def join(rank: int, port: int, ranks: int, backend: str, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        work(*arguments)
    finally:
        dist.destroy_process_group()


def on_ranks(work: Callable[..., None], *arguments: object, backend: str = "gloo", ranks: int = 2) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(join, args=(port, ranks, backend, work, arguments), nprocs=ranks)


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


def all_rows_to_one_rank(model: torch.nn.Module) -> None:
    """The router says nothing, and of equals the first `top_k` experts are chosen: those of one rank."""
    for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
        layer.router_weight.data.zero_()


def train_experts_alone(model: torch.nn.Module, *numbers: int) -> None:
    for name, parameter in model.named_parameters():
        wanted = [f".expert_mlps.{number}." for number in numbers] or [".expert_mlps."]
        parameter.requires_grad_(any(part in name for part in wanted))


def experts_alone_are_trained_and_one_rank_has_no_rows() -> None:
    """Nothing in front of the experts wants a gradient, so that a rank's results want one only where its experts had rows:
    yet all ranks run the same exchanges backwards, or they would wait for each other forever. Eager, delayed, captured;
    the gradients are those of one rank with all experts."""
    for pattern, delayed, recompute in (("E-", False, "none"), ("E[*E]", True, "none"), ("E-", False, "norm")):
        config = HybridConfig(pattern=pattern, vocab=64, experts=4, recompute=recompute)  # type: ignore[arg-type]
        torch.manual_seed(3)
        whole = HybridModel(config)
        all_rows_to_one_rank(whole)
        model = shard_experts(copy.deepcopy(whole))
        for one in (whole, model):
            train_experts_alone(one)
            with delayed_wgrad(one, delayed):
                for step in range(2):  # the same batch on both ranks
                    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
                    one(tokens, tokens).loss.backward()
                    if delayed:
                        for layer in reversed(list(one.decoder.layers)):  # type: ignore[union-attr,arg-type]
                            layer.backward_dw()
        theirs = dict(whole.named_parameters())
        mine = {name: p.grad for name, p in model.named_parameters() if ".expert_mlps." in name}
        assert any(grad is not None for grad in mine.values()) == (parallel_rank_of(model) == hot_rank(whole))
        for name, grad in mine.items():
            other = theirs[name].grad
            assert (grad is None) == (other is None)
            if grad is not None and other is not None:
                torch.testing.assert_close(grad, 2 * other, rtol=1e-5, atol=1e-8)

    def build() -> HybridModel:
        made = HybridModel(HybridConfig(pattern="E[*E]", vocab=64))
        all_rows_to_one_rank(made)
        shard_experts(made)
        train_experts_alone(made)
        return made

    report = compare(build, lambda step: (batches_of(step)[0], {}), steps=3, backend="tape")
    assert report or str(report) == "no parameter ever got a gradient"


def parallel_rank_of(model: torch.nn.Module) -> int:
    return next(module.parallel.rank for module in model.modules() if isinstance(module, MoELayer))


def hot_rank(whole: torch.nn.Module) -> int:
    """The rank whose experts had the rows; of two ranks with two experts each."""
    numbers = {int(name.split(".expert_mlps.")[1][0]) for name, p in whole.named_parameters() if p.grad is not None}
    (rank,) = {number // 2 for number in numbers}
    return rank


def ranks_that_train_differently_are_refused() -> None:
    """On both, instead of a backward that waits forever."""
    rank = dist.get_rank()
    model = shard_experts(model_of(Case("E", False, False, False)))
    with pytest.raises(StateError, match="rank 0: trains, rank 1: under no_grad"), torch.set_grad_enabled(rank == 0):
        model(*batches_of(0)[0])
    train_experts_alone(model, 0)
    with pytest.raises(StateError, match="rank 0: trains, rank 1: no gradient wanted"):
        model(*batches_of(0)[0])
    with torch.no_grad():  # all of them
        model(*batches_of(0)[0])


def stacked_experts_stay_frozen() -> None:
    layer = MoELayer(HybridConfig(expert_gemm="grouped", dtype=torch.bfloat16))
    layer.grouped.down.requires_grad_(False)
    shard_experts(layer)
    assert [p.requires_grad for p in layer.grouped.parameters()] == [True, False]


def a_rank_without_rows_of_stacked_experts() -> None:
    """Grouped products of no rows, forwards and backwards, delayed and not; and without grad, and in eval mode."""
    config = HybridConfig(expert_gemm="grouped", dtype=torch.bfloat16, shared_ffn=16)
    layer = MoELayer(config)
    all_rows_to_one_rank(layer)
    shard_experts(layer)
    twin = copy.deepcopy(layer)
    hidden = torch.randn(1, 6, 32, dtype=torch.bfloat16, requires_grad=True)
    grads = []
    for one, delayed in ((layer, True), (twin, False)):
        with delayed_wgrad(one, delayed):
            one(hidden).float().square().sum().backward()
            one.backward_dw()
        with torch.no_grad():
            one(hidden)
        one.eval()(hidden)
        grads.append([p.grad for p in one.parameters()])
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    assert layer.shared_mlp is not None
    assert bool(layer.shared_mlp.down.weight.grad.any())


def captured_with_experts_elsewhere() -> None:
    def build() -> HybridModel:
        model = model_of(Case("[*E]M", True, False, False))
        shard_experts(model)
        return model

    def inputs(index: int) -> tuple[tuple[Tensor, ...], dict[str, object]]:
        return batches_of(index)[0], {}

    assert compare(build, inputs, steps=20, backend="tape")


def a_rank_without_rows_under_autocast() -> None:
    """Rows come back in the dtype of autocast from every rank, also from one whose experts made none: they were float32
    there, twice the bytes that the others waited for. The same tokens on both ranks: outputs are those of one rank."""
    for delayed in (False, True):
        torch.manual_seed(2)
        whole = HybridModel(HybridConfig(pattern="*E-", vocab=64))
        all_rows_to_one_rank(whole)
        model = shard_experts(copy.deepcopy(whole))
        tokens = torch.arange(16).view(2, 8)
        losses = []
        for one in (model, whole):
            with delayed_wgrad(one, delayed):
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(one(tokens, tokens).loss)
                losses[-1].backward()
                one.backward_dw()
        assert torch.equal(*losses)
        theirs = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            if ".expert_mlps." not in name:
                assert torch.equal(parameter.grad, theirs[name].grad)


def second_derivatives_are_refused() -> None:
    """What comes from the other ranks has no history: its part went missing silently."""
    layer = shard_experts(MoELayer(HybridConfig()))
    hidden = torch.randn(1, 6, 32, requires_grad=True)
    with pytest.raises(StateError, match=r"create_graph=True through experts on several ranks"):
        torch.autograd.grad(layer(hidden).square().sum(), hidden, create_graph=True)
    layer(hidden).square().sum().backward()


def exchanges(cases: list[Case]) -> None:
    exchange_is_what_it_should_be()
    shared_out_experts_compute_what_all_compute()
    experts_that_do_not_divide_are_refused()
    a_rank_without_rows_takes_part()
    a_rank_without_rows_of_stacked_experts()
    a_rank_without_rows_under_autocast()
    second_derivatives_are_refused()
    experts_alone_are_trained_and_one_rank_has_no_rows()
    ranks_that_train_differently_are_refused()
    stacked_experts_stay_frozen()
    captured_with_experts_elsewhere()
    for case in cases:
        run_beside_twin(case, 5, sharded=True, regroup=case.delay)
    run_beside_twin(COVERING[6], 5, sharded=True, graphs=True)


def long_runs(covering: list[Case], others: list[Case], device: str = "cpu") -> None:
    with deterministic(device):
        for graphs in (False, True):
            for case in covering:
                run_beside_twin(case, 100, sharded=True, graphs=graphs, device=device)
            for case in others:
                early = case.shared
                run_beside_twin(case, 5, sharded=True, graphs=graphs, early_release=early, delayed_twin=True, device=device)


@dataclass(frozen=True)
class Pipeline:
    """A model over `stages` pipeline ranks, `chunks` chunks a rank; with `experts` each of these is two ranks that share
    the experts. by_order: messages without tags, as on NCCL."""

    case: Case
    chunks: int
    graphs: bool = False
    experts: bool = False
    by_order: bool = False
    steps: int = 5
    device: str = "cpu"
    batch: int = 2
    tokens: int = 8
    stages: int = 2

    def __str__(self) -> str:
        words = [word for word in ("graphs", "experts", "by_order") if getattr(self, word)]
        return "-".join([str(self.case), f"{self.chunks} chunks", *words])

    def batches(self, step: int, expert_rank: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(2 * step + expert_rank)
        ids = torch.randint(0, 64, (4, self.batch, self.tokens + 1), generator=generator).to(self.device)
        return [(one[:, :-1], one[:, 1:]) for one in ids]


class InPieces:
    """The twin of a pipeline: its chunks one after the other, in this process. With MTP the last one has an embedding of
    its own, as the last rank has; their gradients are added up after each step."""

    def __init__(self, twin: HybridModel, chunks: int) -> None:
        self.twin = twin
        self.pieces = twin.chunks(chunks)
        self.copy = None
        if twin.mtp is not None:
            self.copy = self.pieces[-1].embedding = copy.deepcopy(twin.embedding)

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        losses = []
        for tokens, labels in batches:
            hidden = tokens
            for piece in self.pieces[:-1]:
                hidden = piece(hidden)
            named = {} if self.copy is None else {"tokens": tokens}
            loss = self.pieces[-1](hidden, labels, **named).loss
            (loss * (1 / len(batches))).backward()
            losses.append(loss.detach())
        if self.copy is not None:
            weight = self.twin.embedding.weight
            weight.grad += self.copy.weight.grad
            self.copy.weight.grad = None
        return losses

    def updated(self) -> None:
        if self.copy is not None:
            with torch.no_grad():
                self.copy.weight.copy_(self.twin.embedding.weight)


def pipelines(cases: list[Pipeline]) -> None:
    for case in cases:
        with deterministic(case.device):
            run_pipeline(case)


def run_pipeline(case: Pipeline) -> None:
    """Losses and every rank's gradients are those of the whole model, microbatch after microbatch."""
    rank, expert_rank, group = dist.get_rank(), 0, None
    ranks = list(range(case.stages))
    if case.experts:  # ranks 0 and 1 share the experts of the first stage, 2 and 3 those of the next
        groups = [dist.new_group([2 * stage, 2 * stage + 1]) for stage in ranks]
        rank, expert_rank = divmod(dist.get_rank(), 2)
        group, ranks = groups[rank], [2 * stage + expert_rank for stage in ranks]
    model = model_of(case.case, case.device)
    if case.experts:
        shard_experts(model, group)
    twin = copy.deepcopy(model)
    pieces = model.chunks(case.stages * case.chunks)[rank :: case.stages]
    eager = InPieces(twin, case.stages * case.chunks)
    schedule = OverlapSchedule(pieces, delay_wgrad=case.case.delay)
    pipeline = PipelineOverlap(schedule, rank, case.stages, ranks, by_order=case.by_order or None)
    if case.graphs:
        tokens = case.batches(0, expert_rank)[0][0]
        pipeline.capture_graphs(tokens, 4, backend="tape" if case.device == "cpu" else "cuda")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, twin)]
    got = set()
    for step in range(case.steps):
        batches = case.batches(step, expert_rank)
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = pipeline.step(batches)
        expected = eager.step(batches)
        last = rank == case.stages - 1
        assert len(losses) == 4 * last
        if last:
            assert all(map(torch.equal, losses, expected))
        if case.experts:
            average(model, group)
            average(twin, group)
        mine = {id(p) for piece in pieces for p in piece.parameters()}
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            where = f"{case}, step {step}: {name}"
            assert (id(parameter) in mine) == (parameter.grad is not None) or other.grad is None, where
            if id(parameter) in mine:
                assert (parameter.grad is None) == (other.grad is None), where
                assert parameter.grad is None or torch.equal(parameter.grad, other.grad), where
                if parameter.grad is not None and bool(parameter.grad.isfinite().all() and parameter.grad.any()):
                    got.add(id(parameter))
        for optimizer in optimizers:
            optimizer.step()
        eager.updated()
        with torch.no_grad():  # what lives on the other rank
            for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                if id(parameter) not in mine:
                    parameter.copy_(other)
                assert torch.equal(parameter, other)
    assert got == mine
    alone = sum(f is not None and b is None for f, b in pipeline.pairs)  # one more than the warm-up of the base order
    if case.chunks == 1:
        assert alone == case.stages - rank
    elif case.stages == 2:
        assert alone == {0: 5, 1: 3}[rank]
    assert (schedule.graphs is not None) == (case.graphs and any(u.pre for units in schedule.units for u in units))
    if schedule.graphs is not None:
        stats = schedule.graphs.graphed.stats
        units = sum(unit.pre is not None for of_chunk in schedule.units for unit in of_chunk)
        assert (stats.replays, dict(stats.eager)) == (case.steps * 4 * units, {})


def gradients_add_up_over_steps() -> None:
    """Two steps without zero_grad between them: the shared embedding's gradient too is counted once a step."""
    rank = dist.get_rank()
    case = Pipeline(Case("[*E]|[*E]", False, False, False, mtp=True), 1)
    model = model_of(case.case)
    pipeline = PipelineOverlap(OverlapSchedule(model.chunks(2)[rank]), rank, 2)
    weight = model.embedding.weight
    alone = []
    for step in range(2):
        weight.grad = None
        pipeline.step(case.batches(step, 0))
        alone.append(weight.grad)
    weight.grad = None
    for step in range(2):
        pipeline.step(case.batches(step, 0))
    assert torch.equal(weight.grad, alone[0] + alone[1])


def pipeline_cases(device: str = "cpu", steps: int = 5) -> list[Pipeline]:
    """Every pair of (1F1B or interleaved, delayed, graphs, MTP, norm recomputed, by order) occurs."""
    rows = (
        ("[*E]|M[*-]", 1, 1, 0, 0, 0, 0),
        ("[*E]|M[*E]", 1, 0, 1, 1, 1, 0),
        ("[*E]|-", 1, 0, 1, 0, 0, 1),
        ("[*E][*E]", 1, 1, 0, 1, 1, 1),
        ("[*E]|E|*-|[M*E]", 2, 1, 1, 1, 0, 1),
        ("[*E]|-|[*-]|*E", 2, 1, 1, 0, 1, 0),
        ("[*E][*E][*E][*E]", 2, 0, 0, 0, 1, 1),
        ("[*-]|[*E]|M|E", 2, 0, 0, 1, 0, 0),
    )
    return [
        Pipeline(
            Case(pattern, True, bool(delay), bool(norm), bool(mtp)),
            chunks,
            graphs=bool(graphs),
            by_order=bool(by_order),
            steps=steps,
            device=device,
        )
        for pattern, chunks, delay, graphs, mtp, norm, by_order in rows
    ]


DEEP = "[*-][*-]|[*-][*-]|[*E][*E]|[*E][*E]"
FOUR_RANKS = (
    Pipeline(Case(DEEP, True, True, True), 2, experts=True, steps=100),
    Pipeline(Case(DEEP, True, True, True), 2, graphs=True, experts=True, steps=100),
    Pipeline(Case("[*E]|[M*E]", False, True, False, mtp=True), 1, experts=True),
    Pipeline(Case("[*E]|[M*E]", True, False, True, mtp=True), 1, graphs=True, experts=True, by_order=True),
)
"""PP 2 x EP 2: two chunks a rank as in the acceptance list of the design this follows, and 1F1B with MTP."""


FOUR_STAGES = (
    Pipeline(Case("[*E]|M|[*E]|-", True, True, True, mtp=True), 1, stages=4),
    Pipeline(Case("[*E]|M|-|E|[*-]|*|[*E]|E", True, True, False), 2, graphs=True, by_order=True, stages=4),
)
"""Ranks between the first and the last, which send and receive both ways."""


EMPTY_STAGE = Pipeline(Case("[*E]||-|", True, True, False), 2, graphs=True, by_order=True)
"""Rank 1 has nothing but the head: its first chunk is empty, and hands on what it gets."""


# --------------------------------------------------------------------------------------------------------------- tests


def everything(cases: list[Case]) -> None:
    exchanges(cases)
    pipelines([pipeline_cases(steps=3)[i] for i in (1, 4)])
    gradients_add_up_over_steps()


@pytest.mark.distributed
def test_experts_and_pipelines_on_two_ranks() -> None:
    on_ranks(everything, [COVERING[1], COVERING[2], COVERING[5]])


def test_the_pipelines_are_a_pairwise_covering_set() -> None:
    cases = pipeline_cases()
    rows = [(c.chunks == 2, c.case.delay, c.graphs, c.case.mtp, c.case.norm, c.by_order) for c in cases]
    for i, j in combinations(range(6), 2):
        assert len({(row[i], row[j]) for row in rows}) == 4, (i, j)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("case", [*pipeline_cases(), EMPTY_STAGE], ids=str)
def test_pipelines_on_two_ranks(case: Pipeline) -> None:
    on_ranks(pipelines, [case])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", FOUR_STAGES, ids=str)
def test_pipelines_on_four_ranks(case: Pipeline) -> None:
    on_ranks(pipelines, [case], ranks=4)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)  # four processes on what may be two cores
@pytest.mark.parametrize("case", FOUR_RANKS, ids=str)
def test_pipelines_with_shared_out_experts_on_four_ranks(case: Pipeline) -> None:
    on_ranks(pipelines, [case], ranks=4)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_overlap_on_two_ranks_100_iterations(case: Case) -> None:
    on_ranks(long_runs, [case], [])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_overlap_on_two_ranks_other_combinations(pattern: str) -> None:
    on_ranks(long_runs, [], [case for case in OTHERS if case.pattern == pattern])
