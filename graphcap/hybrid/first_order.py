"""Backwards that have no history of their own."""

from __future__ import annotations

import torch

from graphcap.errors import StateError


def refuse_create_graph(what: str) -> None:
    """At the start of a backward whose results do not lead on: StateError under create_graph=True (which is when autograd
    runs a backward with gradients enabled). torch's `once_differentiable` raises in the second backward only if that passes
    by; `torch.autograd.grad(..., inputs)` leaves it out, and a term is missing without a word."""
    if torch.is_grad_enabled():
        raise StateError(
            f"create_graph=True through {what}: its backward has no history, so a second derivative would lack what comes "
            "through it. Take second derivatives without it"
        )
