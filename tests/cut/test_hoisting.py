"""Function breaks of the arguments alone: they run in front of all graphs, and only where that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap.testing import compare, deterministic
from tests.cut.cases import WIDTH, Base, drawn


def mask_of(rows: Tensor) -> Tensor:
    """Reads the host: other rows, other branch."""
    return rows.float() * (2 if bool((rows.sum() > 0).item()) else 3)


def maybe_mask(rows: Tensor) -> Tensor | None:
    return None if bool((rows == 1).all()) else rows.float()


def shaped(hidden: Tensor, rows: Tensor) -> Tensor:
    return mask_of(rows)[:, None] * torch.ones(hidden.shape, dtype=hidden.dtype, device=hidden.device)


def sometimes_values(hidden: Tensor, rows: Tensor) -> Tensor:
    """Uses the values of `hidden` for rare rows alone, which capture does not meet."""
    if bool((rows > 100).any().item()):
        return hidden.detach() * 2
    return shaped(hidden, rows)


def of_weights(rows: Tensor, weight: Tensor) -> Tensor:
    return mask_of(rows)[:, None] * weight.detach().sum()


def drawing(rows: Tensor) -> Tensor:
    return mask_of(rows) * torch.rand(rows.shape)


def training(x: Tensor) -> Tensor:
    return x * 2 if bool((x.sum() > 0).item()) else x * 3


class _Model(Base):
    def __init__(self, use: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.register_buffer("state", torch.ones(4))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h = self.use(self, x, h, rows)
        return self.b(self.brk(self.c(h))) + h


def _given(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rows = torch.randint(-3, 4, (4,), generator=torch.Generator().manual_seed(index))
    return (drawn(index), rows), {}


def _after_a_break(m: Any, x: Tensor, h: Tensor, rows: Tensor) -> Tensor:
    return m.brk2(h) * mask_of(rows)[:, None]


def _buffer_changed(m: Any, x: Tensor, h: Tensor, rows: Tensor) -> Tensor:
    m.state.mul_(0.9)
    return h * of_weights(rows, m.state)


def _changed_in_place(m: Any, x: Tensor, h: Tensor, rows: Tensor) -> Tensor:
    own = rows * 2
    own.add_(1)
    return h * mask_of(own)[:, None]


def _drawn_rows(m: Any, x: Tensor, h: Tensor, rows: Tensor) -> Tensor:
    own = rows + torch.randint(0, 3, rows.shape)
    return h * mask_of(own)[:, None]


HOISTED: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "an argument": lambda m, x, h, rows: h * mask_of(rows)[:, None],
    "an argument changed on the way": lambda m, x, h, rows: h * mask_of((rows + 1).clamp(-2, 2) * 2)[:, None],
    "a constant made on the way": lambda m, x, h, rows: h * mask_of(torch.arange(4) - rows)[:, None],
    "the second of two results": lambda m, x, h, rows: h * mask_of(rows.sort().indices + 1)[:, None],
    "the shape of what is not made yet": lambda m, x, h, rows: h * shaped(h, rows),
    "values that no run asked for": lambda m, x, h, rows: h * sometimes_values(h, rows),
    "a weight": lambda m, x, h, rows: h * of_weights(rows, m.a.weight),
    "two functions": lambda m, x, h, rows: h * mask_of(rows)[:, None] * shaped(h, rows),
    "one used again behind the break": lambda m, x, h, rows: m.brk2(h * (k := shaped(h, rows))) * k,
}
STAYS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "a tensor of a stretch": lambda m, x, h, rows: h * mask_of(h.detach().sum(-1))[:, None],
    "random numbers": lambda m, x, h, rows: h * drawing(rows)[:, None],
    "an argument made of random numbers": _drawn_rows,
    "an argument that requires grad": lambda m, x, h, rows: h * training(x),
    "a break before it": _after_a_break,
    "a buffer that a stretch changed before": _buffer_changed,
    "a tensor that was changed in place": _changed_in_place,
}


def _break_at(name: str) -> Any:
    functions = (mask_of, shaped, sometimes_values, of_weights, drawing, training)
    code = (HOISTED | STAYS)[name].__code__
    named = [f for f in functions if f.__name__ in code.co_names]
    return (*named, "brk*") if "brk2" in code.co_names else (*named, "brk")


def _agree(name: str, use: Callable[..., Tensor]) -> graphcap.CapturePlan:
    torch.manual_seed(1)
    with deterministic("cpu"):
        verdict = compare(
            lambda: _Model(use),
            _given,
            steps=20,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            backend="tape",
            break_at=_break_at(name),
        )
    assert verdict, str(verdict)
    args, kwargs = _given(0)
    return graphcap.capture(_Model(use), args, kwargs, backend="tape", break_at=_break_at(name)).plan


@pytest.mark.parametrize("name", HOISTED)
def test_hoisted(name: str) -> None:
    plan = _agree(name, HOISTED[name])
    assert len(plan.hoisted) == 1, str(plan)  # one part, also of two functions
    assert plan.graphs == len(plan.breaks) + 1 == 2 + ("brk2" in HOISTED[name].__code__.co_names)
    assert "hoisted" in str(plan)


@pytest.mark.parametrize("name", STAYS)
def test_stays_where_it_is(name: str) -> None:
    plan = _agree(name, STAYS[name])
    assert not plan.hoisted, str(plan)


def test_under_an_order() -> None:
    use = HOISTED["the shape of what is not made yet"]
    with deterministic("cpu"):
        verdict = compare(
            lambda: _Model(use),
            _given,
            steps=20,
            order="0F0 0F1 0B0 0F2 0B1 0B2",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            backend="tape",
            break_at=(shaped, "brk"),
        )
    assert verdict, str(verdict)


def test_values_that_are_not_made_yet_are_an_error() -> None:
    use = HOISTED["values that no run asked for"]
    torch.manual_seed(1)
    args, _ = _given(0)
    graphed = graphcap.capture(_Model(use), args, backend="tape", break_at=(sometimes_values, "brk"))
    rare = torch.tensor([101, 0, 0, 0])
    with pytest.raises(graphcap.InputMismatch, match="sometimes_values uses the values of an argument"):
        graphed(drawn(1), rare)
    again = _given(3)[0]
    assert torch.equal(graphed(*again), graphed.module(*again))


class _Maybe(Base):
    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        h = self.a(x)
        mask = maybe_mask(rows)
        h = h if mask is None else h * mask[:, None]
        return self.b(self.brk(h))


@pytest.mark.parametrize("sample", [torch.ones(4).long(), torch.tensor([1, 2, 1, 1])], ids=["none", "a tensor"])
def test_none_or_a_tensor(sample: Tensor) -> None:
    module = _Maybe()
    graphed = graphcap.capture(module, (drawn(0), sample), backend="tape", break_at=(maybe_mask, "brk"))
    assert len(graphed.plan.hoisted) == 1
    assert torch.equal(graphed(drawn(1), sample), module(drawn(1), sample))
    other = torch.tensor([2, 1, 1, 1]) if bool((sample == 1).all()) else torch.ones(4).long()
    with pytest.raises(graphcap.InputMismatch, match="maybe_mask"):
        graphed(drawn(2), other)
    assert torch.equal(graphed(drawn(3), sample), module(drawn(3), sample))
    eager = graphcap.capture(
        module, (drawn(0), sample), backend="tape", break_at=("auto", "brk"), config=graphcap.CaptureConfig(outputs="alias")
    )
    assert len(eager.plan.hoisted) == 1, "found by auto as well"


def test_nn_modules_are_not_hoisted() -> None:
    class Mask(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return mask_of(rows)

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Mask()

        def forward(self, x: Tensor, rows: Tensor) -> Tensor:
            return self.b(self.a(x) * self.mask(rows)[:, None])

    args, _ = _given(0)
    plan = graphcap.capture(Model(), args, backend="tape", break_at="mask").plan
    assert (len(plan.breaks), len(plan.hoisted), WIDTH) == (1, 0, 8)
