"""The overlapped schedule on a device: two streams, freed inputs, recomputation, and graphs of slot 1."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_hybrid_ranks import long_runs, on_ranks
from tests.hybrid.overlap_twin import COVERING, OTHERS, Case, run_beside_twin

pytestmark = pytest.mark.gpu


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs")
def test_overlap_on_two_gpus() -> None:
    on_ranks(long_runs, list(COVERING), list(OTHERS), "cuda", backend="nccl")
