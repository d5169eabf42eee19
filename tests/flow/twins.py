"""What the flow tests share: comparisons on the tape, and inputs that change with every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphcap.testing import Comparison, Inputs, compare, deterministic

WIDTH = 4
Values = dict[str, Tensor | None]


def drawn(seed: int, *shape: int, grad: bool = True) -> Tensor:
    """Random values that depend on the seed alone."""
    made = torch.randn(shape or (3, WIDTH), generator=torch.Generator().manual_seed(seed + 17))
    return made.requires_grad_(grad)


def batches(*shape: int, grad: bool = True) -> Inputs:
    """Inputs for `compare`: one tensor, another one at every index."""
    return lambda index: ((drawn(index, *shape, grad=grad),), {})


def judged(build: Callable[[], Any], inputs: Inputs | None = None, **options: Any) -> Comparison:
    """The verdict of the eager twin, on the tape."""
    torch.manual_seed(1)
    options.setdefault("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    with deterministic("cpu"):
        return compare(build, inputs or batches(), **{"steps": 4, "backend": "tape", **options})


def assert_equal(build: Callable[[], Any], inputs: Inputs | None = None, **options: Any) -> None:
    verdict = judged(build, inputs, **options)
    assert verdict, str(verdict)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def twin_of(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def gradients(module: nn.Module) -> Values:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def assert_same(graphed: Values, eager: Values) -> None:
    """Equal bit for bit, and something was there to be equal."""
    assert list(graphed) == list(eager)
    for name, value in eager.items():
        mine = graphed[name]
        if value is None or mine is None:
            assert value is mine, f"{name}: graphed {mine}, eager {value}"
        else:
            assert bool(value.isfinite().all()), name
            assert torch.equal(mine, value), name
    assert any(value is not None and bool(value.count_nonzero()) for value in eager.values())
