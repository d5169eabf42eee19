"""The automatic cut, hazard by hazard: bit for bit what eager computes, or a CutError that says why not."""

from __future__ import annotations

import pytest
import torch

import graphcap
from graphcap.errors import CutError
from graphcap.testing import compare, deterministic
from tests.cut import cases_crossing, cases_refused, cases_state  # noqa: F401  (they fill EQUAL and REFUSED)
from tests.cut.cases import EQUAL, HOLDER, REFUSED, drawn


@pytest.mark.parametrize("name", EQUAL)
def test_equal_to_eager(name: str) -> None:
    case = EQUAL[name]
    torch.manual_seed(1)
    with deterministic("cpu"):
        verdict = compare(
            case.build,
            case.inputs,
            steps=5,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            backend="tape",
            break_at=case.break_at,
            **case.options,
        )
    assert verdict, str(verdict)
    if case.breaks is not None:
        torch.manual_seed(1)
        args, kwargs = case.inputs(0)
        plan = graphcap.capture(case.build(), args, kwargs, backend="tape", break_at=case.break_at).plan
        assert len(plan.breaks) == case.breaks, str(plan)


# Their stretches change a buffer, which the recomputation would change a second time.
CHANGED_TWICE = ("BatchNorm buffers in stretches and breaks", "a buffer that a stretch changes in place")


@pytest.mark.parametrize("name", EQUAL)
def test_equal_to_eager_where_parts_are_recomputed(name: str) -> None:
    case = EQUAL[name]
    config = graphcap.CaptureConfig(recompute="part")
    torch.manual_seed(1)
    if name in CHANGED_TWICE:
        args, kwargs = case.inputs(0)
        with pytest.raises(CutError, match="change it twice"):
            graphcap.capture(case.build(), args, kwargs, backend="tape", break_at=case.break_at, config=config)
        return
    with deterministic("cpu"):
        verdict = compare(
            case.build,
            case.inputs,
            steps=3,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            backend="tape",
            break_at=case.break_at,
            **{**case.options, "config": config},
        )
    assert verdict, str(verdict)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    case = REFUSED[name]
    HOLDER.clear()
    torch.manual_seed(1)
    module = case.build()
    args, kwargs = case.inputs(0)
    call = torch.nn.Module.__call__
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(CutError, match=f"(?s){case.words}"):
        graphcap.capture(module, args, kwargs, backend="tape", break_at=case.break_at)
    assert torch.nn.Module.__call__ is call
    assert all("forward" not in vars(child) for child in module.modules())
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_change_of_kind_at_replay_is_a_mismatch() -> None:
    """What the samples could not show is found at the call."""

    class Sometimes(torch.nn.Module):
        flip = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:2] if self.flip else x * 2

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Sometimes(), torch.nn.Linear(8, 8))
    graphed = graphcap.capture(model, (drawn(0),), backend="tape", break_at="1")
    graphed(drawn(1))
    model[1].flip = True
    with pytest.raises(graphcap.InputMismatch):
        graphed(drawn(2))
    model[1].flip = False
    assert torch.equal(graphed(drawn(3)), model(drawn(3)))
