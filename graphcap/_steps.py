"""Step-wise calls `(F | B | I | W, chunk, microbatch)`: one driver for graphed and for eager chunks.

The driver keeps what lies between a forward and its backward: leaf copies of the inputs, and the outputs. The outputs
that the caller gets can be read and differentiated up to (`torch.autograd.grad(loss, output)`), but a `.backward()`
through them would bypass the order, so it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphcap._parts import loss_of
from graphcap._tensors import flatten, unflatten
from graphcap.errors import ReplayError, ReplayOrderError
from graphcap.order import Order, Phase, Step
from graphcap.partial_layer import run_plain as run_plain


class HasPhase(Protocol):
    """What a chunk's call hands back for its backward: the phase that is about to run, and the end."""

    phase: Phase

    def finish(self) -> None: ...


CallChunk = Callable[[Step, tuple[Any, ...], dict[str, Any]], tuple[Any, HasPhase | None]]
WeightWork = Callable[[int], Callable[[Step], None] | None]  # of a chunk: what does its delayed weight gradients, if any


class _Outgoing(torch.autograd.Function):
    """Marks an output of a step: its gradient must come through `backward(step, ...)`."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, step: str) -> torch.Tensor:
        ctx.step = step
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        raise ReplayError(
            f".backward() through an output of step {ctx.step}: the order decides when a backward runs. Take the "
            "gradient with torch.autograd.grad(loss, output) and pass it to backward(step, gradient)"
        )


def _outgoing(output: torch.Tensor, step: Step) -> torch.Tensor:
    marked: torch.Tensor = _Outgoing.apply(output, str(step))  # type: ignore[no-untyped-call]
    return marked


@dataclass(slots=True)
class _Live:
    """A forward whose last step is still to come."""

    inputs: list[torch.Tensor | None]  # per tensor argument: its leaf copy, None where it needs no gradient
    outputs: list[torch.Tensor]
    loss: torch.Tensor | None
    flight: HasPhase | None
    gradients: list[torch.Tensor | None] | None = None


class Steps:
    """Runs steps in the order's sequence; `call` runs one chunk's forward.

    Where modules of a chunk delay weight gradients (`weight_work`), its I step is the whole backward, in which they put
    work off, and its W step does that work; else I and W are autograd's backward in halves.
    """

    def __init__(self, order: Order, call: CallChunk, weight_work: WeightWork = lambda chunk: None) -> None:
        self.order, self._call, self._weight_work = order, call, weight_work
        self.cursor = 0
        self._live: dict[tuple[int, int], _Live] = {}

    def reset(self) -> None:
        """Forget the position and every forward that waits for its backward."""
        for live in self._live.values():
            if live.flight is not None:
                live.flight.finish()
        self._live.clear()
        self.cursor = 0

    def forward(self, step: Step | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an F step; returns the chunk's outputs. Under no_grad an order that trains does not move."""
        step = self._as(step, Phase.F)
        moves = torch.is_grad_enabled() or not self.order.training
        if moves:
            self._require_next(step)
        leaves, structure = flatten((args, kwargs))
        inputs: list[torch.Tensor | None] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                needs = leaf.requires_grad and torch.is_grad_enabled()
                leaves[place] = leaf.detach().requires_grad_(needs)
                inputs.append(leaves[place] if needs else None)
        own_args, own_kwargs = unflatten(structure, leaves)
        value, flight = self._call(step, own_args, own_kwargs)
        if moves:
            self._advance()
        if not torch.is_grad_enabled() or not self.order.training:
            return value
        made, made_structure = flatten(value)
        outputs = [t for t in made if isinstance(t, torch.Tensor) and t.requires_grad]
        self._live[step.chunk, step.microbatch] = _Live(inputs, outputs, loss_of(value), flight)
        shown = [
            _outgoing(t, step) if isinstance(t, torch.Tensor) and t.requires_grad else t for t in made
        ]
        return unflatten(made_structure, shown)

    def backward(self, step: Step | str, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """Run a B step; returns one gradient per tensor argument of the forward (None where none is needed)."""
        step = self._as(step, Phase.B)
        live = self._waiting(step)
        outputs, arrived = self._starts(step, live, gradients)
        self._set_phase(live, Phase.B)
        if outputs:
            torch.autograd.backward(outputs, arrived)
            work = self._weight_work(step.chunk)
            if work is not None:
                work(step)
        self._close(step, live)
        return tuple(None if leaf is None else leaf.grad for leaf in live.inputs)

    def input_grad(
        self, step: Step | str, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Run an I step: the gradients of the inputs alone; what W needs is kept."""
        step = self._as(step, Phase.I)
        live = self._waiting(step)
        outputs, arrived = self._starts(step, live, gradients)
        live.gradients = list(gradients)
        if self._weight_work(step.chunk) is not None:
            if outputs:
                torch.autograd.backward(outputs, arrived)
            self._advance()
            return tuple(None if leaf is None else leaf.grad for leaf in live.inputs)
        wanted = [leaf for leaf in live.inputs if leaf is not None]
        self._set_phase(live, Phase.I)
        found: list[torch.Tensor | None] = []
        if outputs and wanted:
            found = list(torch.autograd.grad(outputs, wanted, arrived, retain_graph=True, allow_unused=True))
        self._advance()
        results = iter(found)
        return tuple(None if leaf is None else next(results, None) for leaf in live.inputs)

    def weight_grad(self, step: Step | str) -> None:
        """Run a W step: the gradients of the parameters, from what the I step kept."""
        step = self._as(step, Phase.W)
        live = self._waiting(step)
        outputs, arrived = self._starts(step, live, tuple(live.gradients or ()))
        self._set_phase(live, Phase.W)
        work = self._weight_work(step.chunk)
        if work is not None and outputs:
            work(step)
        elif outputs:
            torch.autograd.backward(outputs, arrived)
        self._close(step, live)

    # ------------------------------------------------------------------------------------------------------- inside

    def _as(self, step: Step | str, phase: Phase) -> Step:
        step = Step.of(step)
        if step.phase is not phase:
            raise ReplayOrderError(f"step {step} has phase {step.phase}, but this call runs a step of phase {phase}")
        return step

    def _require_next(self, step: Step) -> None:
        expected = self.order[self.cursor]
        if step != expected:
            raise ReplayOrderError(
                f"step {step} is out of order: expected {expected} (position {self.cursor} of {len(self.order)} in "
                f"{self.order}). Run the steps in that order, or call reset() to begin anew"
            )

    def _waiting(self, step: Step) -> _Live:
        self._require_next(step)
        live = self._live.get((step.chunk, step.microbatch))
        if live is None:
            raise ReplayOrderError(
                f"step {step}: its forward {step.chunk}F{step.microbatch} did not run with gradients in this pass"
            )
        return live

    def _starts(
        self, step: Step, live: _Live, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs to begin from, and their gradients: given ones, or one for the loss."""
        if not gradients and not live.outputs:  # nothing to differentiate: the step is there for the order alone
            return [], []
        if not gradients:
            start = live.loss
            if start is None and len(live.outputs) == 1:
                start = live.outputs[0]
            if start is None or start.numel() != 1:
                raise ReplayError(
                    f"step {step}: pass one gradient per differentiable output ({len(live.outputs)}); only a single "
                    "scalar, or an output with a `loss`, can begin without"
                )
            return [start], [torch.ones_like(start)]
        if len(gradients) != len(live.outputs):
            raise ReplayError(
                f"step {step}: {len(gradients)} gradients for {len(live.outputs)} differentiable outputs (None for an "
                "output without one)"
            )
        pairs = [(out, g) for out, g in zip(live.outputs, gradients, strict=True) if g is not None]
        return [out for out, _ in pairs], [g for _, g in pairs]

    @staticmethod
    def _set_phase(live: _Live, phase: Phase) -> None:
        if live.flight is not None:
            live.flight.phase = phase

    def _close(self, step: Step, live: _Live) -> None:
        if live.flight is not None:
            live.flight.finish()
        del self._live[step.chunk, step.microbatch]
        self._advance()

    def _advance(self) -> None:
        self.cursor = (self.cursor + 1) % len(self.order)
