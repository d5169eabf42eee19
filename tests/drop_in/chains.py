"""A chain of chunks under an order through make_graphed_callables, beside its eager twin: on the tape and on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from graphcap import Order, Phase, Step, make_graphed_callables
from graphcap.order import flat_index
from tests.flow.twins import assert_same


@st.composite
def valid_orders(draw: st.DrawFn, chunks: int = 2, microbatches: int = 4) -> Order:
    """Any order of a chain that the check allows: whole backwards and half steps, W anywhere after its I."""
    split = {(c, m): draw(st.booleans()) for c in range(chunks) for m in range(microbatches)}
    done: set[tuple[str, int, int]] = set()

    def is_next(phase: str, c: int, m: int) -> bool:
        if (phase, c, m) in done:
            return False
        if phase == "F":
            return c == 0 or ("F", c - 1, m) in done
        if phase == "W":
            return ("I", c, m) in done
        above = c == chunks - 1 or any((p, c + 1, m) in done for p in "BI")
        return ("F", c, m) in done and above and phase == ("I" if split[c, m] else "B")

    steps: list[Step] = []
    while True:
        ready = [(p, c, m) for p in "FBIW" for c in range(chunks) for m in range(microbatches) if is_next(p, c, m)]
        if not ready:
            return Order(steps)
        chosen = ready[draw(st.integers(0, len(ready) - 1))]
        done.add(chosen)
        steps.append(Step(*chosen))


class Layer(nn.Module):
    """All weights of one shape, so that no shape check can catch a gradient in the wrong place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


def chain_layers(count: int, width: int, device: str) -> tuple[nn.Module, ...]:
    torch.manual_seed(11)
    return tuple(Layer(width).to(device) for _ in range(count))


def drawn_on(device: str, seed: int, width: int, grad: bool = True) -> Tensor:
    made = torch.randn(3, width, generator=torch.Generator().manual_seed(seed + 17)).to(device)
    return made.requires_grad_(grad)


def captured(
    order: Order, layers_per_chunk: Sequence[int], *, device: str = "cpu", width: int = 4, given: Any = None, **options: Any
) -> tuple[tuple[nn.Module, ...], Any]:
    """The layers, and the functions that make_graphed_callables gives for them."""
    count = sum(layers_per_chunk)
    layers = chain_layers(count, width, device)
    samples = ((drawn_on(device, 0, width),),) * (count * order.microbatches)
    made = make_graphed_callables(
        layers,
        samples,
        _order=order if given is None else given,
        _num_layers_per_chunk=list(layers_per_chunk),
        backend="tape" if device == "cpu" else "cuda",
        **options,
    )
    return layers, made


def assert_chain_equal(
    order: Order,
    layers_per_chunk: Sequence[int],
    *,
    steps: int = 2,
    device: str = "cpu",
    width: int = 4,
    between: Callable[[int], None] = lambda step: None,
    rate: float = 0.05,
    **options: Any,
) -> None:
    """Outputs, input gradients, parameter gradients and updated weights are eager's at every step."""
    layers, made = captured(order, layers_per_chunk, device=device, width=width, **options)
    twins = copy.deepcopy(layers)
    counts = Order(
        tuple(order), chunks=order.chunks, microbatches=order.microbatches, layers_per_chunk=tuple(layers_per_chunk)
    )
    first = [sum(layers_per_chunk[:c]) for c in range(order.chunks)]
    for step in range(steps):
        found = []
        for mine in (True, False):
            modules = layers if mine else twins
            for p in (p for module in modules for p in module.parameters()):
                p.grad = None
            record: dict[str, Tensor | None] = {}
            outputs: dict[tuple[int, int], Tensor] = {}
            starts: dict[tuple[int, int], Tensor] = {}
            for number, place in enumerate(order):
                between(step * len(order) + number)
                c, m = place.chunk, place.microbatch
                calls: list[Any] = [
                    made[flat_index(counts, c, m, layer)] if mine else twins[first[c] + layer]
                    for layer in range(layers_per_chunk[c])
                ]
                if place.phase is Phase.F:
                    seed = 1000 * step + m
                    start = drawn_on(device, seed, width) if c == 0 else outputs[c - 1, m].detach().requires_grad_()
                    h = starts[c, m] = start
                    for call in calls:
                        h = call(h)
                    outputs[c, m] = h
                    record[str(place)] = h.detach().clone()
                elif place.phase is not Phase.W:
                    above = starts.get((c + 1, m))
                    outputs[c, m].backward(drawn_on(device, 7 + m, width, grad=False) if above is None else above.grad)
                    record[str(place)] = starts[c, m].grad
                elif mine:
                    for call in reversed(calls):
                        call.backward_dw()
            for number, module in enumerate(modules):
                for name, p in module.named_parameters():
                    record[f"gradient of {number}.{name}"] = p.grad
                    with torch.no_grad():
                        p.sub_(rate * p.grad)  # type: ignore[operator]
                    record[f"{number}.{name} after"] = p.detach().clone()
            found.append(record)
        assert_same(*found)
