"""Random small programs, cut at random places, equal eager bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphcap
from graphcap import EAGER, GRAPHED, CutError, PartialLayer
from graphcap.partial_layer import Part
from tests.flow.twins import WIDTH, drawn, judged, linear

ROWS = 5
Run = Callable[["Drawn", Sequence[Tensor], int], Tensor]


def in_place_on_fresh(layer: Drawn, values: Sequence[Tensor], number: int) -> Tensor:
    fresh = values[0] * 1.5
    fresh.mul_(values[-1].detach().tanh())
    fresh[:, 0] = 0.5
    return fresh.add_(values[0])


def selected_rows(layer: Drawn, values: Sequence[Tensor], number: int) -> Tensor:
    """Data-dependent shapes inside: only for eager parts."""
    rows = torch.nonzero(values[0].detach().sum(1) > 0).flatten()
    return torch.zeros_like(values[0]).index_add(0, rows, values[-1][rows] * 2)


# name -> what it computes from one or more values of [ROWS, WIDTH]; `number` picks the weight
OPERATIONS: dict[str, Run] = {
    "linear": lambda layer, v, n: layer.weights[n % len(layer.weights)](v[0]),
    "tanh": lambda layer, v, n: torch.tanh(v[0]),
    "sin": lambda layer, v, n: torch.sin(v[0]),
    "add": lambda layer, v, n: v[0] + v[-1] * 0.7,
    "multiply": lambda layer, v, n: torch.tanh(v[0]) * v[-1],
    "scale": lambda layer, v, n: v[0] * layer.scales[n % 2],
    "view": lambda layer, v, n: v[0].reshape(WIDTH, ROWS).reshape(ROWS, WIDTH),
    "transpose": lambda layer, v, n: (v[0].t() * 0.9).t(),
    "alias": lambda layer, v, n: v[0].view(ROWS, WIDTH),
    "same": lambda layer, v, n: v[0],
    "reduce": lambda layer, v, n: v[0] - v[-1].mean(dim=0, keepdim=True),
    "softmax": lambda layer, v, n: torch.softmax(v[0], dim=n % 2),
    "norm": lambda layer, v, n: nn.functional.layer_norm(v[0], (WIDTH,)),
    "dropout": lambda layer, v, n: nn.functional.dropout(v[0], 0.2),
    "detach": lambda layer, v, n: v[0] + v[-1].detach().square(),
    "in_place": in_place_on_fresh,
    "expand": lambda layer, v, n: torch.tanh(v[0]).mean(dim=n % 2, keepdim=True).expand(ROWS, WIDTH),
    "overlap": lambda layer, v, n: torch.sin(v[0].reshape(-1).unfold(0, WIDTH, WIDTH - 1)[:ROWS]),
    "windows": lambda layer, v, n: v[0].reshape(-1).as_strided((ROWS, WIDTH), (WIDTH - 1, 1)),
    "transposed": lambda layer, v, n: (v[0].t() + v[-1].t()).contiguous().t(),
    "sort": lambda layer, v, n: v[0].gather(1, v[-1].detach().argsort(dim=1)),
    "thrice": lambda layer, v, n: v[0] * torch.sin(v[0]) + torch.cos(v[0]) * v[-1],
}
EAGER_ONLY: dict[str, Run] = {
    "rows": selected_rows,
    "item": lambda layer, v, n: v[0] * (1 + abs(v[-1].detach().mean().item())),
}


@dataclass(frozen=True)
class Op:
    """One value: `name` applied to earlier values (0 is the input)."""

    name: str
    reads: tuple[int, ...]
    number: int
    eager: bool


class Drawn(PartialLayer):
    """A program as a PartialLayer: one declared part per operation; neighbours of one kind merge."""

    def __init__(self, ops: Sequence[Op], outputs: Sequence[int]) -> None:
        super().__init__()
        self.ops = tuple(ops)
        self.inputs = "v0"
        self.outputs = ", ".join(f"v{place}" for place in outputs)
        self.weights = nn.ModuleList([linear(), linear(bias=False)])
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])

    def parts(self) -> tuple[Part, ...]:
        return tuple(
            (EAGER if op.eager else GRAPHED)(f"run_{i}", f"{', '.join(f'v{r}' for r in op.reads)} -> v{i + 1}")
            for i, op in enumerate(self.ops)
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("run_"):
            op = self.ops[int(name.removeprefix("run_"))]
            run = OPERATIONS.get(op.name) or EAGER_ONLY[op.name]
            return lambda *values: run(self, values, op.number)
        return super().__getattr__(name)


@st.composite
def programs(draw: st.DrawFn, longest: int) -> tuple[tuple[Op, ...], tuple[int, ...]]:
    """Operations that read earlier values, and the values that go out: the last one always, up to two others."""
    count = draw(st.integers(2, longest))
    ops = [Op("linear", (0,), 0, False)]  # so that something is trained
    for place in range(1, count):
        eager = draw(st.integers(0, 3)) == 0
        name = draw(st.sampled_from([*OPERATIONS, *EAGER_ONLY] if eager else [*OPERATIONS]))
        near = st.integers(max(0, place - 3), place)
        reads = (draw(near), *draw(st.lists(st.integers(0, place), max_size=1)))
        ops.append(Op(name, reads, draw(st.integers(0, 3)), eager))
    outputs = dict.fromkeys([count, *draw(st.lists(st.integers(1, count), max_size=2))])
    return tuple(ops), tuple(outputs)


def check(program: tuple[tuple[Op, ...], tuple[int, ...]], needs_grad: bool, **options: Any) -> None:
    """Equal, or refused with one of the two reasons that such programs can have."""
    def build() -> nn.Module:
        return Drawn(*program)

    def inputs(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (drawn(index, ROWS, WIDTH, grad=needs_grad),), {}

    outputs = build()(drawn(0, ROWS, WIDTH, grad=needs_grad))
    leads_to_weights = any(t.requires_grad for t in (outputs if isinstance(outputs, tuple) else (outputs,)))
    try:
        verdict = judged(build, inputs, steps=3, expect_no_grads=True, grad_mode=leads_to_weights, **options)
    except CutError as error:
        if "is used more than once in part" in str(error) or "elements that share memory" in str(error):
            return
        raise
    assert verdict, f"{verdict}\n{program}"


@settings(max_examples=80)
@given(programs(longest=10), st.booleans())
def test_any_program(program: Any, needs_grad: bool) -> None:
    check(program, needs_grad)


@settings(max_examples=20)
@given(programs(longest=8), st.sampled_from(["0F0 0F1 0B0 0B1", "0F0 0F1 0I1 0I0 0W0 0W1", "0F0 0I0 0F1 0B1 0W0"]))
def test_any_program_with_several_in_flight(program: Any, order: str) -> None:
    check(program, True, order=order)


@pytest.mark.slow
@settings(max_examples=500)
@given(
    programs(longest=16),
    st.booleans(),
    st.sampled_from(["return", "accumulate", "alias"]),
    st.sampled_from([None, "0F0 0F1 0B1 0B0", "0F0 0F1 0I1 0I0 0W0 0W1"]),
)
def test_any_program_at_length(program: Any, needs_grad: bool, grads: Any, order: str | None) -> None:
    check(program, needs_grad, order=order, config=graphcap.CaptureConfig(grads=grads))
