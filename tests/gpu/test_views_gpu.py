"""A stretch of views alone on the GPU: no graph, no warning of torch's, eager's bits; and the plan says so beforehand."""

from __future__ import annotations

import warnings

import pytest
import torch

import graphcap
from graphcap.testing import bisect, compare, deterministic
from tests.cut.test_plan import Views

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("grads", ["return", "accumulate"])
@pytest.mark.parametrize("kind", ["view", "expand", "slice"])
def test_a_stretch_of_views(kind: str, grads: str) -> None:
    config = graphcap.CaptureConfig(grads=grads)  # type: ignore[arg-type]

    def inputs(index: int) -> tuple[tuple[torch.Tensor], dict[str, torch.Tensor]]:
        return (torch.randn(3, 4, generator=torch.Generator().manual_seed(index)).cuda(),), {}

    with deterministic("cuda"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="The CUDA Graph is empty")
        verdict = compare(lambda: Views(kind).cuda(), inputs, break_at=("a", "b"), config=config)
        found = bisect(lambda: Views(kind).cuda(), inputs, break_at=("a", "b"), config=config, steps=3)
        graphed = graphcap.capture(Views(kind).cuda(), *inputs(0), break_at=("a", "b"), config=config)
    assert verdict, str(verdict)
    assert found, str(found)
    planned = graphcap.plan(Views(kind).cuda(), *inputs(0), break_at=("a", "b"), config=config)
    assert planned.graphs == 2
    pytest.importorskip("cuda.bindings", reason="without it the nodes of a graph can't be counted, and it is kept")
    assert graphed.plan.graphs == 2
