"""Every order computes what eager computes; slots follow live ranges; a step in the wrong place changes nothing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graphcap
from graphcap import InFlightError, Order, ReplayError, ReplayOrderError, Step
from tests.flow.twins import WIDTH, assert_equal, batches, drawn, judged, linear

FIFO_6 = "0F0 0F1 0F2 0B0 0B1 0B2"
LIFO_6 = "0F0 0F1 0F2 0B2 0B1 0B0"


def block() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh())


def one_chunk() -> nn.Module:
    return nn.Sequential(block(), nn.Dropout(0.25), block())


def two_chunks() -> tuple[Any, ...]:
    """Chunks of different length, every weight of the same shape."""
    return (block(), linear(), block()), (linear(), block())


def stateful_chunks(count: int) -> tuple[Any, ...]:
    """Two layers a chunk, all weights alike; dropout in the first, batch statistics in the second."""
    first = (nn.Sequential(linear(), nn.Dropout(0.5)), block())
    second = (block(), nn.Sequential(linear(), nn.BatchNorm1d(WIDTH)))
    return (first, second)[:count] if count == 2 else ((*first, *second),)


# ------------------------------------------------------------------------------------------------------- named orders


@pytest.mark.parametrize(
    "order",
    [
        Order.forward_backward(1),
        Order.forward_backward(4),
        "0F0 0B0 0F1 0B1",
        "0F0 0F1 0B0 0B1",
        "0F0 0F1 0B1 0B0",
        FIFO_6,
        LIFO_6,
        "0F2 0F0 0F1 0B1 0B2 0B0",
        Order.one_f_one_b(0, 4, 8),
        Order.one_f_one_b(1, 4, 8),
        Order.one_f_one_b(3, 4, 8),
        Order.gpipe(4),
        "0F0 0I0 0W0",
        "0F0 0F1 0I0 0W0 0I1 0W1",
        "0F0 0F1 0I1 0I0 0W0 0W1",
        "0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2",
        "0F0 0I0 0F1 0I1 0F2 0I2 0W1 0W0 0W2",
        "0F0 0F1 0B0 0I1 0F2 0W1 0B2",
    ],
    ids=str,
)
@pytest.mark.parametrize("needs_grad", [True, False], ids=["input-grad", "no-input-grad"])
def test_one_chunk(order: Order | str, needs_grad: bool) -> None:
    assert_equal(one_chunk, batches(grad=needs_grad), order=order, steps=5)


@pytest.mark.parametrize(
    "order",
    [
        Order.interleaved(0, 2, 2, 4),
        Order.interleaved(1, 2, 2, 4),
        Order.interleaved(0, 2, 2, 5, group_size=3),
        Order.local(2, 3),
        Order.gpipe(2, chunks=2),
        "0F0 1F0 1I0 0I0 1W0 0W0",
        "0F0 0F1 1F0 1I0 0I0 1F1 1I1 1W0 0W0 0I1 1W1 0W1",
        "0F0 1F0 0F1 1F1 1B1 0I1 1I0 0B0 1W0 0W1",
    ],
    ids=str,
)
def test_chain_of_two_chunks(order: Order | str) -> None:
    assert_equal(two_chunks, order=order, steps=5)


SPLIT = "0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2"


@pytest.mark.parametrize("order", [FIFO_6, SPLIT, Order.interleaved(0, 2, 2, 4), Order.one_f_one_b(0, 2, 4)], ids=str)
def test_accumulated_gradients(order: Any) -> None:
    build = two_chunks if isinstance(order, Order) and order.chunks == 2 else one_chunk
    assert_equal(build, order=order, steps=5, config=graphcap.CaptureConfig(grads="accumulate"))


@pytest.mark.parametrize("order", [FIFO_6, SPLIT])
def test_aliased_gradients(order: str) -> None:
    """Valid until the slot's next backward, so only where no slot is used twice before the update."""
    assert_equal(one_chunk, order=order, steps=5, config=graphcap.CaptureConfig(grads="alias"))


@pytest.mark.parametrize("chunks", [1, 2])
def test_forward_only(chunks: int) -> None:
    build = one_chunk if chunks == 1 else two_chunks
    order = Order.forward_only(3, chunks=chunks)
    assert_equal(build, batches(grad=False), order=order, grad_mode=False, steps=5)


def test_loss_of_the_last_chunk_begins_the_backward() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = linear()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.head(x)
            return {"loss": y.square().mean(), "logits": y}

    verdict = judged(lambda: (block(), Loss()), order=Order.interleaved(0, 2, 2, 4), steps=3)
    assert verdict, str(verdict)
    assert len(verdict.losses) == 12


# ----------------------------------------------------------------------------------------------------- any valid order


@st.composite
def any_order(draw: st.DrawFn) -> Order:
    """A random order of a chain: forwards up the chain, backwards down it, I and W anywhere after."""
    chunks, microbatches = draw(st.integers(1, 2)), draw(st.integers(1, 4))
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


@settings(max_examples=30)
@given(any_order())
def test_any_order(order: Order) -> None:
    assert_equal(lambda: stateful_chunks(order.chunks), order=order, steps=3)


@pytest.mark.slow
@settings(max_examples=300)
@given(any_order(), st.sampled_from(["return", "accumulate"]))
def test_any_order_at_length(order: Order, grads: Any) -> None:
    config = graphcap.CaptureConfig(grads=grads)
    assert_equal(lambda: stateful_chunks(order.chunks), order=order, steps=4, config=config)


def test_soak_with_allocations_between_steps() -> None:
    """200 steps of an interleaved order; memory is taken and freed in between, so stale addresses would show."""
    rubbish: list[torch.Tensor] = []

    def inputs(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rubbish.append(torch.full((index % 7 + 1, WIDTH), float("nan")))
        if len(rubbish) > 5:
            del rubbish[: index % 5]
        return (drawn(index),), {}

    order = Order.interleaved(0, 2, 2, 4)
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.5)

    assert_equal(two_chunks, inputs, order=order, steps=200, optimizer=optimizer)


# --------------------------------------------------------------------------------------------------------------- slots


def captured(module: Any, order: Order | str | None = None, **options: Any) -> graphcap.Graphed:
    order = Order.parse(order) if isinstance(order, str) else order
    chunks = 1 if order is None else order.chunks
    args: Any = (drawn(0),) if order is None else tuple((drawn(0),) for _ in range(chunks))
    return graphcap.capture(module, args, order=order, backend="tape", **options)


@pytest.mark.parametrize("chunks", [1, 2])
def test_static_bytes_do_not_grow_with_microbatches(chunks: int) -> None:
    def plan(microbatches: int) -> graphcap.CapturePlan:
        if chunks == 1:
            return captured(block(), Order.one_f_one_b(0, 4, microbatches)).plan
        return captured((block(), block()), Order.interleaved(0, 2, 2, microbatches)).plan

    small, middle, large = plan(4), plan(16), plan(64)
    assert small.slots == middle.slots == large.slots == (4 if chunks == 1 else 5)
    assert middle.static_bytes == large.static_bytes >= small.static_bytes > 0
    if chunks == 1:
        assert small.static_bytes == large.static_bytes


@pytest.mark.parametrize(
    ("order", "slots"),
    [
        (Order.forward_backward(4), 1),
        (Order.forward_only(4), 1),
        (FIFO_6, 3),
        (Order.interleaved(0, 2, 2, 4), 5),
        (Order.interleaved(1, 2, 2, 4), 3),
        (Order.one_f_one_b(0, 4, 8), 4),
        ("0F0 0I0 0F1 0W0 0I1 0W1", 2),
    ],
    ids=str,
)
def test_slot_counts(order: Order | str, slots: int) -> None:
    order = Order.parse(order) if isinstance(order, str) else order
    module: Any = tuple(block() for _ in range(order.chunks))
    assert captured(module, order).plan.slots == slots


# ---------------------------------------------------------------------------------------------- steps out of their place


def state_of(module: nn.Module) -> dict[str, Any]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {name: t.detach().clone() for name, t in tensors.items()}
    grads = {f"{name}.grad": None if t.grad is None else t.grad.clone() for name, t in tensors.items()}
    return {**values, **grads, "random": torch.get_rng_state()}


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in before.items():
        assert value is after[name] or torch.equal(value, after[name]), name


def test_replay_out_of_order_changes_nothing() -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    graphed = captured(module, "0F0 0F1 0I0 0W0 0B1")
    grad = drawn(5, grad=False)

    def refused(call: Any, *args: Any) -> None:
        before = state_of(module)
        with pytest.raises(ReplayOrderError):
            call(*args)
        assert_unchanged(before, state_of(module))

    refused(graphed.forward, "0F1", drawn(1))
    refused(graphed.backward, "0B1", grad)
    graphed.forward("0F0", drawn(1))
    refused(graphed.forward, "0F0", drawn(1))
    refused(graphed.input_grad, "0I0", grad)
    refused(graphed.weight_grad, "0W0")
    graphed.forward("0F1", drawn(2))
    refused(graphed.backward, "0B1", grad)
    refused(graphed.backward, "0B0", grad)
    refused(graphed.weight_grad, "0W0")
    refused(graphed.forward, "0F5", drawn(1))
    refused(graphed.input_grad, "0B0", grad)
    graphed.input_grad("0I0", grad)
    refused(graphed.backward, "0B1", grad)
    graphed.weight_grad("0W0")
    graphed.backward("0B1", grad)
    graphed.forward("0F0", drawn(1))  # the order begins anew


def test_after_a_refused_step_the_pass_is_still_equal() -> None:
    torch.manual_seed(0)
    module = block()
    twin = torch.nn.Sequential(linear(), nn.Tanh())
    twin.load_state_dict(module.state_dict())
    graphed = captured(module, "0F0 0F1 0B1 0B0")
    xs = [drawn(1), drawn(2)]
    grads = [drawn(3, grad=False), drawn(4, grad=False)]
    graphed.forward("0F0", xs[0])
    with pytest.raises(ReplayOrderError):
        graphed.backward("0B0", grads[0])
    graphed.forward("0F1", xs[1])
    with pytest.raises(ReplayOrderError):
        graphed.forward("0F0", drawn(9))
    found = {m: graphed.backward(f"0B{m}", grads[m])[0] for m in (1, 0)}
    for m in (1, 0):
        x = xs[m].detach().requires_grad_()
        twin(x).backward(grads[m])
        assert torch.equal(found[m], x.grad)  # type: ignore[arg-type]
    for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


def test_two_forwards_on_one_slot() -> None:
    module = block()
    graphed = captured(module)
    first = graphed(drawn(1))
    before = state_of(module)
    with pytest.raises(InFlightError, match="still in flight"):
        graphed(drawn(2))
    with torch.no_grad(), pytest.raises(InFlightError):
        graphed(drawn(2))
    assert_unchanged(before, state_of(module))
    x = drawn(1).detach().requires_grad_()
    assert torch.equal(first, nn.functional.tanh(module[0](x)))  # type: ignore[index]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_dropped_result_frees_its_slot_without_the_collector(parts: int) -> None:
    graphed = captured(block() if parts == 1 else Broken())
    gc.disable()
    try:
        held = graphed(drawn(1))
        with pytest.raises(InFlightError):
            graphed(drawn(2))
        del held
        held = graphed(drawn(2))
        held.sum().backward()
        graphed(drawn(3))  # the backward has run, so the result may live on
    finally:
        gc.enable()


def test_reset_frees_the_slot_and_forgets_the_position() -> None:
    graphed = captured(block())
    held = graphed(drawn(1))
    graphed.reset()
    again = graphed(drawn(2))
    with pytest.raises(ReplayError, match="later forward"):
        held.sum().backward()
    again.sum().backward()
    ordered = captured(block(), FIFO_6)
    kept = ordered.forward("0F0", drawn(1))
    ordered.reset()
    ordered.forward("0F0", drawn(1))
    assert kept is not None


def test_a_backward_after_its_slot_was_used_again_raises() -> None:
    module = Broken()
    graphed = captured(module)
    held = graphed(drawn(1))
    graphed.reset()
    with torch.no_grad():
        graphed(drawn(2))
    with pytest.raises(ReplayError, match="later forward"):
        held.sum().backward()
    assert all(p.grad is None for name, p in module.named_parameters() if name.startswith("first"))


class Broken(graphcap.PartialLayer):
    """Two graphed parts with an eager one between."""

    inputs = "x"
    outputs = "x"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()

    def parts(self) -> tuple[graphcap.partial_layer.Part, ...]:
        return graphcap.GRAPHED("a", "x -> h"), graphcap.EAGER("b", "h -> e"), graphcap.GRAPHED("c", "e, h -> x")

    def a(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def b(self, h: torch.Tensor) -> torch.Tensor:
        return h * h.sum().item()

    def c(self, e: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(e)) + h


@pytest.mark.parametrize(
    "order", [FIFO_6, LIFO_6, Order.one_f_one_b(0, 2, 4), "0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2"], ids=str
)
def test_orders_with_a_break(order: Order | str) -> None:
    assert_equal(lambda: (Broken(), Broken()) if str(order) == FIFO_6 else Broken(), order=order, steps=5)
