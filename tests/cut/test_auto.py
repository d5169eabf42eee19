""""auto": which module or function is the break, and what is taken instead where dynamic shapes lie between two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap.errors import CutError
from graphcap.testing import compare, deterministic
from tests.cut.cases import WIDTH, drawn, one_tensor


class Gather(nn.Module):
    def forward(self, x: Tensor) -> Any:
        chosen = (x.sum(-1) > 0).nonzero().squeeze(-1)
        return x[chosen], chosen


class Scatter(nn.Module):
    def forward(self, rows: Tensor, chosen: Tensor, x: Tensor) -> Tensor:
        if chosen.numel() and bool((chosen < 0).any().item()):  # reads the host as well
            raise ValueError("a negative row")
        return torch.zeros_like(x).index_add(0, chosen, rows)


class Dispatch(nn.Module):
    """Dynamic-shaped glue: `linear` runs on the rows that the data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.gather, self.linear, self.scatter = Gather(), nn.Linear(WIDTH, WIDTH), Scatter()

    def forward(self, x: Tensor) -> Tensor:
        rows, chosen = self.gather(x)
        return torch.tanh(self.scatter(self.linear(rows), chosen, x) + x)


class Moe(nn.Module):
    """The glue is two levels up: what `permute` returns is used here."""

    def __init__(self) -> None:
        super().__init__()
        self.permute = nn.Module()
        self.permute.gather = Gather()
        self.permute.forward = lambda x: self.permute.gather(x * 1)
        self.linear, self.scatter = nn.Linear(WIDTH, WIDTH), Scatter()

    def forward(self, x: Tensor) -> Tensor:
        rows, chosen = self.permute(x)
        return torch.tanh(self.scatter(self.linear(rows), chosen, x) + x)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.inner(torch.tanh(self.a(x))))


class Whole(Dispatch):
    """Captured itself, so that there is no module above the glue."""


@pytest.mark.parametrize("break_at", ["auto", ("*.linear", "auto")], ids=str)
@pytest.mark.parametrize("kind", [Dispatch, Moe])
def test_the_parent_is_taken_where_shapes_between_two_breaks_are_dynamic(kind: type[nn.Module], break_at: Any) -> None:
    torch.manual_seed(1)
    plan = graphcap.capture(Model(kind), (drawn(0),), backend="tape", break_at=break_at).plan
    assert [part.name for part in plan.breaks] == ["inner"], str(plan)
    assert plan.graphs == 2
    assert "auto: it contains inner." in str(plan.breaks[0].reason)
    with deterministic("cpu"):
        verdict = compare(
            lambda: Model(kind),
            one_tensor,
            steps=20,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            backend="tape",
            break_at=break_at,
        )
    assert verdict, str(verdict)


def test_named_breaks_are_not_moved() -> None:
    with pytest.raises(CutError, match=r"(?s)inner\.gather returned.*break at the module that contains this one"):
        graphcap.capture(Model(Dispatch), (drawn(0),), backend="tape", break_at=("*.gather", "*.scatter"))


def test_there_may_be_no_parent() -> None:
    torch.manual_seed(1)
    with pytest.raises(CutError, match=r"(?s)gather returned.*static shape.*Way out"):
        graphcap.capture(Whole(), (drawn(0),), backend="tape", break_at="auto")


def test_a_static_break_stays_small() -> None:
    class Static(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dispatch, self.norm = Dispatch(), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.dispatch(x)) + x

    torch.manual_seed(1)
    plan = graphcap.capture(Model(Static), (drawn(0),), backend="tape", break_at="auto").plan
    assert [part.name for part in plan.breaks] == ["inner.dispatch"], str(plan)
