"""The two sides of the demo: how each runs the steps of an order, what it gives, and the text both read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch

from graphcap._steps import Steps
from graphcap._tensors import flatten
from graphcap.hybrid import HybridModel
from graphcap.order import Order, Phase, Step

Kind = Literal["output", "input gradient", "gradient", "buffer", "scale", "weight"]
SCALES = ("scale_fwd", "hist_fwd", "scale_bwd", "hist_bwd")
Batch = tuple[torch.Tensor, torch.Tensor]


class StepWise(Protocol):
    """Runs the steps of an order; a Graphed does."""

    def forward(self, step: Step, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, step: Step, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]: ...


class EagerSteps:
    """The order's steps on plain chunks."""

    def __init__(self, order: Order, chunks: tuple[Callable[..., Any], ...]) -> None:
        self._steps = Steps(order, lambda step, args, kwargs: (chunks[step.chunk](*args, **kwargs), None))

    def forward(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        return self._steps.forward(step, args, kwargs)

    def backward(self, step: Step, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return self._steps.backward(step, gradients)


class PlainCalls:
    """Without a schedule: `output = model(tokens, labels)`, `output.loss.backward()`, microbatch after microbatch."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._loss: torch.Tensor | None = None

    def forward(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, **kwargs)
        self._loss = output.loss
        return output

    def backward(self, step: Step, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        assert self._loss is not None
        self._loss.backward()  # type: ignore[no-untyped-call]
        return ()


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: the whole model (its names, gradients, weights), how its steps run, its optimizer."""

    model: HybridModel
    steps: StepWise
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Value:
    """Something that is compared."""

    kind: Kind
    name: str
    value: torch.Tensor | None


def run_pass(side: Side, order: Order, batches: list[Batch]) -> tuple[float, list[Value]]:
    """One pass of the order, one batch (tokens, labels) per microbatch: the mean loss, and copies of what the steps
    gave. Gradients are left in `.grad`."""
    outputs: dict[tuple[int, int], Any] = {}
    arriving: dict[tuple[int, int], torch.Tensor | None] = {}
    made: list[Value] = []
    for place in order:
        key, last = (place.chunk, place.microbatch), place.chunk == order.chunks - 1
        if place.phase is Phase.F:
            tokens, labels = batches[place.microbatch]
            entry = tokens if place.chunk == 0 else outputs[place.chunk - 1, place.microbatch]
            ahead: dict[str, Any] = {"tokens": tokens} if last and place.chunk > 0 and side.model.mtp is not None else {}
            if side.model.config.cache_weights:
                ahead["is_first_microbatch"] = place.microbatch == 0
            with side.model.autocast():
                outputs[key] = side.steps.forward(place, entry, *((labels,) if last else ()), **ahead)
            names = ("loss", "logits") if last else ("hidden",)
            copies = [leaf.detach().clone() for leaf in flatten(outputs[key])[0]]
            made += [Value("output", f"{n} of {place}", v) for n, v in zip(names, copies, strict=True)]
        else:
            found = side.steps.backward(place, *(() if last else (arriving.pop(key),)))
            if place.chunk > 0:
                gradient = arriving[place.chunk - 1, place.microbatch] = found[0]
                made.append(Value("input gradient", f"of {place}", None if gradient is None else gradient.clone()))
    losses = [v.value for v in made if v.value is not None and v.name.startswith("loss")]
    return float(torch.stack(losses).mean()), made


def update(side: Side) -> None:
    """The optimizer's step, in place: graphs read weights by address."""
    side.optimizer.step()


def gradients_of(side: Side) -> Iterator[Value]:
    return (Value("gradient", name, p.grad) for name, p in side.model.named_parameters())


def state_of(side: Side) -> Iterator[Value]:
    yield from (Value("buffer", name, b) for name, b in side.model.named_buffers())
    for layer, state in side.model.quantized_states().items():
        yield from (Value("scale", f"{layer}.{name}", state[name]) for name in SCALES if name in state)
    yield from (Value("weight", name, p.detach()) for name, p in side.model.named_parameters())


@cache
def text() -> torch.Tensor:
    """uint8 [some 700 000]: Python's help topics, one after the other."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def draw_batches(count: int, tokens: int, seed: str, device: torch.device) -> list[Batch]:
    """`count` microbatches of a step: tokens and labels, int64 [1, tokens], the label of a byte being the next one."""
    draw, source = random.Random(seed), text()
    made = []
    for _ in range(count):
        start = draw.randrange(len(source) - tokens)
        piece = source[start : start + tokens + 1].long().to(device)
        made.append((piece[None, :-1], piece[None, 1:]))
    return made
