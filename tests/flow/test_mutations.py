"""Mutation tests: a fault planted in the library must make the eager twin's comparison fail, or raise.

Each test runs its comparison without the fault first, so that it is the fault that is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap import (
    EAGER,
    GRAPHED,
    InFlightError,
    InputMismatch,
    Order,
    ReplayError,
    _arena,
    _capture,
    _copies,
    _plan,
    _replay,
)
from graphcap.backends.tape import TapeBackend
from graphcap.order import SlotMap
from graphcap.partial_layer import Part
from tests.flow.partial_models import Detours, DirectLayouts, Layer, ManyUses
from tests.flow.twins import WIDTH, assert_equal, batches, drawn, judged, linear

Monkeypatch = pytest.MonkeyPatch


def found(build: Callable[[], Any], inputs: Any = None, *, says: str, **options: Any) -> None:
    """The comparison fails, and the text says what differed."""
    verdict = judged(build, inputs, **options)
    assert not verdict, "the fault was not found"
    assert says in str(verdict)


def two_alike() -> nn.Module:
    return nn.Sequential(linear(bias=False), nn.Tanh(), linear(bias=False), nn.Tanh())


# --------------------------------------------------------------------------------------- parameters and their gradients


def test_parameters_in_another_order(monkeypatch: Monkeypatch) -> None:
    """Same shapes, so no check of shapes can see it."""
    order = Order.interleaved(0, 2, 2, 4)
    assert_equal(lambda: (two_alike(), two_alike()), order=order)
    bind = _replay.BoundPart.__init__

    def swapped(self: Any, *args: Any) -> None:
        bind(self, *args)
        self.returned = self.returned[::-1]

    monkeypatch.setattr(_replay.BoundPart, "__init__", swapped)
    found(lambda: (two_alike(), two_alike()), order=order, says="gradient of ")
    found(two_alike, says="gradient of 0.weight")


def rotated_arena(arena: Any) -> Any:
    if arena is None:
        return None
    numbers, places = zip(*arena.places, strict=True)
    return dataclasses.replace(arena, places=tuple(zip(numbers, (*places[1:], *places[:1]), strict=True)))


@pytest.mark.parametrize("order", ["0F0 0B0", "0F0 0F1 0I0 0W0 0I1 0W1"])
def test_results_of_the_backward_rotated(monkeypatch: Monkeypatch, order: str) -> None:
    assert_equal(two_alike, order=order)
    record = _capture.Recorder._record_backwards

    def rotated(self: Any, work: Any, part: Any, *args: Any) -> Any:
        made = []
        for graph in record(self, work, part, *args):
            first = len(graph.results) - len(part.facts.parameters) if len(graph.results) > 1 else 0
            inputs, parameters = graph.results[:first], graph.results[first:]
            turned = (*inputs, *parameters[1:], *parameters[:1])
            made.append(dataclasses.replace(graph, results=turned, arena=rotated_arena(graph.arena)))
        return made

    monkeypatch.setattr(_capture.Recorder, "_record_backwards", rotated)
    found(two_alike, order=order, says="gradient of 0.weight")


def test_a_static_gradient_returned_without_a_copy(monkeypatch: Monkeypatch) -> None:
    """AccumulateGrad takes it as `.grad`, and the next microbatch overwrites what it should be added to."""
    order = "0F0 0B0 0F1 0B1"
    assert_equal(two_alike, order=order)
    monkeypatch.setattr(_replay, "fresh", lambda tensors: [tensor.detach() for tensor in tensors])
    monkeypatch.setattr(_arena.Arena, "fresh", lambda self: {n: self.like[place].detach() for n, place in self.places})
    found(two_alike, order=order, says="gradient of 0.weight")


def test_a_missing_gradient_that_is_not_zeroed(monkeypatch: Monkeypatch) -> None:
    """The eager part sends no gradient back for one of two values in some steps; last step's must not be used again."""
    options: dict[str, Any] = {"inputs": batches(2, WIDTH), "steps": 12}
    assert_equal(Detours, **options)
    fill = _copies.Copies.fill

    def without_zero(self: Any, tensors: Any) -> None:
        stale = {memory.place: memory.static for memory in self.memories}
        fill(self, [stale.get(place) if tensor is None else tensor for place, tensor in enumerate(tensors)])

    monkeypatch.setattr(_copies.Copies, "fill", without_zero)
    found(lambda: Branching(), batches(2, WIDTH), steps=12, says="gradient")


class Branching(Layer):
    """Both values lead to one weight, and the eager part uses one of them in some steps, both in others."""

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h, k"), EAGER("b", "h, k -> e"), GRAPHED("c", "e -> y")

    def a(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.one(x)
        return h, self.two(h)

    def b(self, h: Tensor, k: Tensor) -> Tensor:
        return h + k if h.detach().sum().item() > 0 else h * 2

    def c(self, e: Tensor) -> Tensor:
        return self.three(e)


# ------------------------------------------------------------------------------------------------ samples, slots, pools


class Scale(nn.Module):
    """Takes inputs of any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def run_drop_in() -> None:
    """Two callables, two microbatches of different shapes; raises or fails where a sample of another index was taken."""
    layers = (Scale(), Scale())
    twins = tuple(Scale() for _ in layers)
    for twin, layer in zip(twins, layers, strict=True):
        twin.load_state_dict(layer.state_dict())
    shapes = [(2, WIDTH), (5, WIDTH)]
    samples = tuple((drawn(m, *shapes[m]),) for m in range(2) for _ in layers)
    graphed = graphcap.make_graphed_callables(
        layers, samples, _order=[1, 1, -1, -1], _num_layers_per_chunk=[2], backend="tape"
    )
    for step in range(2):
        for mine, callables in ((True, graphed), (False, twins)):
            outputs = []
            for m in range(2):
                x = drawn(10 * step + m, *shapes[m])
                for layer in range(2):
                    x = callables[m * 2 + layer if mine else layer](x)
                outputs.append(x)
            for out in outputs:
                out.sum().backward()
    for twin, layer in zip(twins, layers, strict=True):
        assert torch.equal(twin.linear.weight.grad, layer.linear.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_specs", [True, False])
def test_samples_of_another_index(monkeypatch: Monkeypatch, with_specs: bool) -> None:
    """Callable k warmed up and captured with sample k: what TE once did."""
    run_drop_in()
    plan = _plan._callable_unit

    def wrong(layer_callable: Any, chunk: int, layer: int, samples: Any, specs: Any, *rest: Any) -> Any:
        index = layer
        wrong_specs = [specs[index]] * len(specs) if with_specs else specs
        return plan(layer_callable, chunk, layer, [samples[index]] * len(samples), wrong_specs, *rest)

    monkeypatch.setattr(_plan, "_callable_unit", wrong)
    with pytest.raises((InputMismatch, RuntimeError)):
        run_drop_in()


def one_slot(order: Order, signatures: Any = None) -> SlotMap:
    slots = graphcap.order.assign_slots(order, signatures)
    return SlotMap(order, tuple(dataclasses.replace(use, slot=0) for use in slots.uses), 1)


FFBB = "0F0 0F1 0B0 0B1"


def test_two_lives_on_one_slot(monkeypatch: Monkeypatch) -> None:
    """Three lines of defence, each alone: in flight, the generation, and last the values."""
    assert_equal(two_alike, order=FFBB)
    monkeypatch.setattr(_plan, "assign_slots", one_slot)
    with pytest.raises(InFlightError):
        judged(two_alike, order=FFBB)
    monkeypatch.setattr(_replay.Slot, "require_free", lambda self, title, microbatch: None)
    with pytest.raises(ReplayError, match="later forward"):
        judged(two_alike, order=FFBB)
    monkeypatch.setattr(_replay.BoundPart, "_require_valid", lambda self, flight, phase: None)
    found(two_alike, order=FFBB, says="step 0: ")


def test_one_pool_for_all_slots(monkeypatch: Monkeypatch) -> None:
    """Slots are not replayed in the order of their capture, so what one slot saved lies in another one's scratch."""
    order = Order.one_f_one_b(0, 2, 6)
    config = {"order": order, "steps": 3}
    assert_equal(two_alike, **config)
    new_pool, pools = TapeBackend.new_pool, []

    def same(self: Any, handle: Any = None) -> Any:
        if not pools or pools[0][0] is not self:
            pools[:] = [(self, new_pool(self, handle))]
        return pools[0][1]

    monkeypatch.setattr(TapeBackend, "new_pool", same)
    found(two_alike, **config, says="step 0: ")


# --------------------------------------------------------------------------------------------- values and state


class Residual(Layer):
    """x is used twice in the first part and once in the last: (late + early_b) + early_a needs x to pass through."""

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e, x -> y")

    def a(self, x: Tensor) -> Tensor:
        return self.one(x) * torch.sin(x)

    def b(self, h: Tensor) -> Tensor:
        return self.two(h)

    def c(self, e: Tensor, x: Tensor) -> Tensor:
        return self.three(e) * x


@pytest.mark.parametrize("build", [ManyUses, Residual])
def test_values_that_do_not_pass_through(monkeypatch: Monkeypatch, build: Callable[[], Any]) -> None:
    assert_equal(build, batches(8, WIDTH))
    cut = _plan.cut

    def without(program: Any) -> Any:
        parts = []
        for part in cut(program):
            own = tuple(name for name in part.makes if name not in part.reads)
            parts.append(dataclasses.replace(part, makes=own, finals=tuple(n for n in part.finals if n in own)))
        return tuple(parts)

    monkeypatch.setattr(_plan, "cut", without)
    if build is Residual:  # two parts would fill one static input, and autograd sees it
        with pytest.raises(graphcap.CaptureError, match="modified by an inplace operation"):
            judged(build, batches(8, WIDTH))
    else:
        found(build, batches(8, WIDTH), says="gradient")


def noisy() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))


def test_buffers_that_are_not_restored(monkeypatch: Monkeypatch) -> None:
    @contextmanager
    def nothing(modules: Any) -> Iterator[list[Tensor]]:
        yield []

    assert_equal(noisy)
    monkeypatch.setattr(graphcap._guards, "kept_state", nothing)
    found(noisy, says="step 0: buffer 1.running_mean")


def test_a_random_state_that_is_not_restored(monkeypatch: Monkeypatch) -> None:
    assert_equal(noisy)
    monkeypatch.setattr(TapeBackend, "restore_generator_states", lambda self, states: None)
    found(noisy, says="capture: the random state")


def test_random_numbers_that_are_not_drawn(monkeypatch: Monkeypatch) -> None:
    """A replay that leaves the generator where it was: the step is equal, and the next one would not be."""
    assert_equal(noisy)
    run = _replay.BoundPart.run

    def rewinds(self: Any, *given: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return run(self, *given)
        finally:
            torch.set_rng_state(state)

    monkeypatch.setattr(_replay.BoundPart, "run", rewinds)
    found(noisy, says="step 0: the random state")


def test_an_input_that_is_not_copied(monkeypatch: Monkeypatch) -> None:
    assert_equal(two_alike)
    monkeypatch.setattr(_copies.Copies, "fill", lambda self, tensors: None)
    found(two_alike, says="step 0: gradient 0 of the inputs")  # the first input is the sample itself
    found(two_alike, batches(grad=False), grad_mode=False, says="step 1: output of 0F0")


def test_weights_that_are_read_stale(monkeypatch: Monkeypatch) -> None:
    """Recording on copies of the weights: right at the first step, and stale from the second on."""
    alias = graphcap._guards._alias

    def copied(real: nn.Parameter) -> Tensor:
        return alias(nn.Parameter(real.detach().clone()))

    assert_equal(two_alike)
    monkeypatch.setattr(graphcap._guards, "_alias", copied)
    found(two_alike, says="step 1: output of 0F0")


# ------------------------------------------------------------------------------------------- the judge is strict itself


def test_compare_refuses_values_that_are_not_finite() -> None:
    found(two_alike, lambda i: ((drawn(i, grad=False) * float("nan"),), {}), says="not finite")
    found(two_alike, lambda i: ((drawn(i, grad=False) * float("inf"),), {}), says="step 0: output")


class Silent(nn.Module):
    """Its second weight gets gradients, and all of them are zero."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.one, self.two, self.factor = linear(), linear(), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x) * self.factor


def test_compare_refuses_gradients_that_are_always_zero() -> None:
    assert_equal(lambda: Silent(1.0))
    found(lambda: Silent(0.0), says="the gradients of two.weight, two.bias were zero")


def test_compare_refuses_weights_that_never_move() -> None:
    still = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    found(two_alike, **still, says="the weights never moved")


def test_compare_refuses_a_run_that_trains_nothing() -> None:
    def frozen() -> nn.Module:
        return two_alike().requires_grad_(False)

    found(frozen, says="nothing was trained")
    assert_equal(frozen, expect_no_grads=True)
    with pytest.raises(graphcap.PlanError):
        judged(two_alike, steps=0)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("output", "step 2: output of 0F1: 1 of 12 values differ"),
        ("input gradient", "step 2: gradient 0 of the inputs of 0B1: 1 of 12 values differ"),
        ("gradient", "step 2: gradient of 2.weight: 1 of 16 values differ"),
        ("no gradient", "step 2: gradient of 2.weight: graphed None, eager a tensor [4, 4]"),
        ("weight", "step 2: weight 0.weight: 1 of 16 values differ"),
        ("buffer", "step 2: buffer 1.running_mean: 1 of 4 values differ"),
    ],
)
def test_compare_names_the_first_difference(monkeypatch: Monkeypatch, damage: str, says: str) -> None:
    """By step, by kind and by name; one value in one of them is changed on the graphed side, by the last bit."""

    def build() -> nn.Module:
        return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())

    one_step = graphcap.testing._Twins._one_step

    def damaged(self: Any, side: Any, step: int) -> Any:
        record = one_step(self, side, step)
        if side is self.sides[0] and step == 2:
            kind = says.split(": ")[1]
            place = next(i for i, (name, _) in enumerate(record) if name == kind)
            name, value = record[place]
            if damage == "no gradient":
                record[place] = (name, None)
            else:
                value = value.clone()
                value.view(-1)[0] = torch.nextafter(value.view(-1)[0], torch.tensor(9.0))
                record[place] = (name, value)
        return record

    assert_equal(build, order=FFBB)
    monkeypatch.setattr(graphcap.testing._Twins, "_one_step", damaged)
    found(build, order=FFBB, says=says)


def test_gradients_that_arrive_with_other_strides(monkeypatch: Monkeypatch) -> None:
    """Kernels sum a transposed gradient in another order, so the static one has the strides that eager's has."""
    assert_equal(DirectLayouts, batches(301, 32))
    monkeypatch.setattr(graphcap._warmup_pass, "dense_strides", lambda t: torch.empty(t.shape, device="meta").stride())
    found(DirectLayouts, batches(301, 32), says="gradient of one.bias")
