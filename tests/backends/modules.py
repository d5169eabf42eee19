"""Small modules that the conformance suite trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Tensor = torch.Tensor


class Squared(nn.Module):
    """A user's autograd.Function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Square.apply(self.a(x)))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.b = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return self.b(checkpoint(self.a, x, use_reentrant=False, preserve_rng_state=False))


class Autocast(nn.Module):
    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.a, self.b, self.device_type = nn.Linear(8, 8), nn.Linear(8, 4), device_type

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device_type, torch.bfloat16, cache_enabled=False):
            return self.b(self.a(x).relu()).float()


class Drawing(nn.Module):
    """`draw` makes the whole output; no parameters."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)
