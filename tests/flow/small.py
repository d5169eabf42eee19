"""Small modules and helpers of the flow tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import graphcap
from graphcap import EAGER, GRAPHED, PartialLayer


class Mlp(nn.Module):
    """Linear, ReLU, Linear on width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Routed(PartialLayer):
    """Graph, break, graph: the break multiplies the rows that a data-dependent mask selects."""

    inputs = "hidden"
    outputs = "hidden"

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)
        self.back = nn.Linear(8, 8)
        self.fail = False
        self.width = 8

    def parts(self) -> Any:
        return (
            GRAPHED("route", "hidden -> tokens, residual"),
            EAGER("experts", "tokens -> routed", reason="the number of rows depends on the data"),
            GRAPHED("combine", "routed, residual -> hidden"),
        )

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.front(hidden)), hidden * 1.5

    def experts(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise RuntimeError("an expert failed")
        chosen = (tokens.sum(-1) > 0).nonzero().squeeze(-1)
        made = self.expert(tokens.index_select(0, chosen))
        return torch.zeros_like(tokens).index_add(0, chosen, made)[:, : self.width]

    def combine(self, routed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.back(routed) + residual


def rows(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(*(shape or (4, 8)), requires_grad=requires_grad)


def capture(module: Any, args: Any = None, kwargs: Any = None, **options: Any) -> graphcap.Graphed:
    """graphcap.capture on the tape; options that belong to CaptureConfig are put there."""
    names = ("warmup", "grads", "outputs", "on_mismatch", "retain_graph", "on_replay", "recompute")
    config = {name: options.pop(name) for name in names if name in options}
    args = (torch.ones(4, 8),) if args is None else args  # draws no random number
    return graphcap.capture(
        module, args, kwargs, backend="tape", config=graphcap.CaptureConfig(**config), **options
    )


def twin_of(module: Any) -> Any:
    return copy.deepcopy(module)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def same_gradients(a: nn.Module, b: nn.Module) -> None:
    """Equal bit for bit, and not for want of gradients."""
    ours, theirs = gradients(a), gradients(b)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        other = theirs[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            assert gradient.isfinite().all(), name
            assert torch.equal(gradient, other), name
    assert any(g is not None and bool(g.count_nonzero()) for g in ours.values())


def agrees(call: Callable[..., Any], twin: nn.Module, *args: Any, **kwargs: Any) -> None:
    """One forward and backward of both: outputs, input gradients and parameter gradients are equal."""
    owner = call.module if isinstance(call, graphcap.Graphed) else call
    sides = []
    for side, module in ((call, owner), (twin, twin)):
        module.zero_grad(set_to_none=True)  # type: ignore[union-attr]
        leaves = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
        value = side(*leaves, **kwargs)
        value.square().mean().backward()
        sides.append((value.detach().clone(), [a.grad for a in leaves if isinstance(a, torch.Tensor)]))
    assert torch.isfinite(sides[0][0]).all()
    assert torch.equal(sides[0][0], sides[1][0])
    for ours, theirs in zip(sides[0][1], sides[1][1], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    same_gradients(owner, twin)  # type: ignore[arg-type]
