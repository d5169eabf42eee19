"""The overlapped schedule on a device: two streams, freed inputs, recomputation, graphs of slot 1, pipelines over NCCL."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from graphcap.hybrid import HybridConfig, HybridModel, OverlapSchedule
from tests.distributed.test_hybrid_ranks import (
    FOUR_RANKS,
    FOUR_STAGES,
    Pipeline,
    long_runs,
    on_ranks,
    pipeline_cases,
    pipelines,
)
from tests.hybrid.overlap_twin import COVERING, OTHERS, Case, run_beside_twin

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs")
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="four ranks need four GPUs")


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_overlap_on_two_streams(case: Case) -> None:
    run_beside_twin(case, 20, device="cuda", early_release=case.shared, regroup=case.delay)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_graphs_under_overlap_on_two_streams(case: Case) -> None:
    schedule = run_beside_twin(case, 20, device="cuda", graphs=True)
    assert schedule.graphs is not None
    assert schedule.graphs.graphed.stats.replays > 0
    assert not schedule.graphs.graphed.stats.eager


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_overlap_with_kernels_that_take_time(recompute: bool, graphs: bool) -> None:
    """Long enough that the streams really run beside each other: memory that one gives back too early would show."""
    case = Case("[M*E][*E]", shared=True, delay=True, norm=recompute)
    run_beside_twin(case, 20, device="cuda", tokens=200, graphs=graphs, mamba_chunk=32)


def test_norm_recomputation_in_graphs_leaves_nothing_behind() -> None:
    """Every unit has pools of its own, one per microbatch in flight, which must hold its backward's temporaries anyway: the
    norm's output was never their peak, so nothing is saved (measured). Nothing may be held beside them either."""
    taken = {}
    for recompute in ("none", "norm"):
        torch.manual_seed(0)
        config = HybridConfig(
            pattern="E", vocab=64, hidden=1024, experts=2, top_k=1, expert_ffn=64, shared_ffn=64, max_sequence=2048,
            recompute=recompute,  # type: ignore[arg-type]
        )  # fmt: skip
        with torch.device("cuda"):
            schedule = OverlapSchedule(HybridModel(config))
            tokens = torch.zeros(4, 2048, dtype=torch.int64)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        schedule.capture_graphs(tokens, 3)
        gc.collect()
        torch.cuda.empty_cache()
        taken[recompute] = torch.cuda.memory_reserved() - before
        del schedule
    assert 0 < taken["norm"] <= 1.05 * taken["none"], taken


@two_gpus
@pytest.mark.timeout(900)
def test_overlap_on_two_gpus() -> None:
    on_ranks(long_runs, list(COVERING), list(OTHERS), "cuda", backend="nccl")


@two_gpus
@pytest.mark.timeout(900)
def test_pipelines_on_two_gpus() -> None:
    """Messages by order, on a communicator per edge: on one for all, these would wait forever."""
    on_ranks(pipelines, pipeline_cases("cuda", steps=20), backend="nccl")


@two_gpus
def test_a_message_that_fills_no_buffer_of_nccl_s() -> None:
    """NCCL lets small messages go before anybody asks for them; these, 8 MiB each, are too large for that."""
    case = Case("[*E]|[*E]|[*E]|[*E]", shared=True, delay=True, norm=False, mtp=True)
    wide = Pipeline(case, 2, graphs=True, device="cuda", batch=512, tokens=256)
    on_ranks(pipelines, [wide, replace(wide, graphs=False)], backend="nccl")


@four_gpus
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [*FOUR_STAGES, *FOUR_RANKS], ids=str)
def test_pipelines_on_four_gpus(case: Pipeline) -> None:
    on_ranks(pipelines, [replace(case, device="cuda")], backend="nccl", ranks=4)
