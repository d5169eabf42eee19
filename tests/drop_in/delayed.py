"""Modules that put weight gradients off, in plain torch, as Transformer Engine's do with delay_wgrad_compute=True."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _DelayedProduct(torch.autograd.Function):
    """x @ w.T whose backward keeps (gradient, x) in a queue instead of computing the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, put_off: Callable[..., None] | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.put_off = put_off
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.put_off(gradient, x)
        return (gradient @ weight if ctx.needs_input_grad[0] else None), None, None


class Store:
    """As TE's WeightGradStore: an object that holds the queue."""

    def __init__(self) -> None:
        self.context: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue()


class DelayedLinear(nn.Module):
    """A linear layer without delay in its bias. `where`: what backward_dw() does with the gradient of the weight."""

    def __init__(self, width: int, where: str = "add") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        self.where, self.store = where, Store()
        self.hooks: list[Callable[[], None]] = []
        if where == "main_grad":
            self.weight.main_grad = torch.zeros(width, width)  # type: ignore[attr-defined]
            self.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedLinear:  # a queue can't be copied
        made = DelayedLinear(len(self.bias), self.where)
        made.load_state_dict(self.state_dict())
        memo[id(self)] = made
        return made

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _DelayedProduct.apply(x, self.weight, self._put_off)  # type: ignore[no-untyped-call]
        return product + self.bias

    def _put_off(self, gradient: Tensor, x: Tensor) -> None:
        if self.where == "main_grad":
            self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        self.store.context.put((gradient, x))

    def need_backward_dw(self) -> bool:
        return True

    def backward_dw(self) -> None:
        gradient, x = self.store.context.get_nowait()
        made = gradient.t() @ x
        weight = self.weight
        if self.where == "main_grad":
            weight.main_grad.add_(made)  # type: ignore[attr-defined]
        elif self.where == "assign" or weight.grad is None:
            weight.grad = made
        elif self.where == "add":
            weight.grad.add_(made)
        elif self.where == "replace":
            weight.grad = weight.grad + made
        elif self.where == "overwrite":
            weight.grad.copy_(made)
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self.hooks:
            hook()


WAYS = ("add", "replace", "assign", "keep", "main_grad")


class Block(nn.Module):
    """Two delayed layers, and a norm whose weights autograd sees to."""

    def __init__(self, width: int, where: str = "add") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = DelayedLinear(width, where), DelayedLinear(width, where)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.norm(x)))) + x


def run_put_off(module: nn.Module) -> None:
    """What an eager caller does after the backward."""
    for child in module.modules():
        if isinstance(child, DelayedLinear):
            child.backward_dw()
