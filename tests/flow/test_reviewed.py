"""Silent faults that a hostile review found, each as its kind: the right value, or a refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphcap
from graphcap import (
    EAGER,
    GRAPHED,
    CaptureConfig,
    CutError,
    ForbiddenOpError,
    OrderError,
    PartialLayer,
    SampleError,
    StateError,
)
from graphcap.testing import compare


def rows(index: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(index)).requires_grad_(),), {}


def twins(module: nn.Module, *sample: torch.Tensor, **config: Any) -> tuple[nn.Module, graphcap.Graphed]:
    eager = copy.deepcopy(module)
    return eager, graphcap.capture(module, sample, backend="tape", config=CaptureConfig(**config))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_with_dropout_is_refused(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return out

    with pytest.raises(CutError, match="draws random numbers"):
        compare(lambda: Checkpointed(0.5), rows, backend="tape")

    class Plain(Checkpointed):
        def __init__(self) -> None:
            super().__init__(0.5)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    result = compare(Plain, rows, steps=3, backend="tape")
    assert result, str(result)


class Roots(nn.Module):
    """The derivative of the second output is infinite at 0: run on a zero gradient it gives NaN."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.first, self.second, self.outputs = nn.Linear(8, 8), nn.Linear(8, 8), outputs

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        root = (self.second(x) * z).abs().sqrt()
        return (self.first(x), root, *(self.first(x) * n for n in range(1, self.outputs - 1)))


@pytest.mark.parametrize("outputs", [2, 3, 5])
@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_an_output_without_gradient_poisons_nothing(outputs: int, grads: str) -> None:
    torch.manual_seed(0)
    x, ones, zeros = torch.randn(4, 8), torch.ones(4, 8), torch.zeros(4, 8)
    eager, graphed = twins(Roots(outputs), x, ones, grads=grads)
    for run in (eager, graphed):
        run(x, ones)[1].sum().backward()
        run(x, zeros)[0].sum().backward()
    for a, b in zip(eager.parameters(), graphed.parameters(), strict=True):
        assert a.grad is not None
        assert torch.equal(a.grad, b.grad)
        assert bool(b.grad.isfinite().all())


def test_aliased_outputs_that_come_back_in_other_places() -> None:
    class Swap(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return y, x, x - y

    eager, graphed = Swap(), Swap()
    graphcap.make_graphed_callables(graphed, (torch.zeros(2), torch.zeros(2)), backend="tape")
    a = b = (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    for _ in range(3):
        *a, wanted = eager(*a)
        *b, found = graphed(*b)
        assert torch.equal(wanted, found)


def test_the_random_state_set_inside_a_part_is_refused() -> None:
    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                noise = torch.randn(8)
            return self.linear(x) * noise

    with pytest.raises(ForbiddenOpError, match="random state was set"):
        compare(Seeded, rows, backend="tape")


def test_a_gradient_buffer_that_moves_is_found() -> None:
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    graphed = graphcap.capture(module, (x,), backend="tape", config=CaptureConfig(grads="accumulate"))
    graphed(x).sum().backward()
    module.weight.main_grad.data = torch.zeros(8, 8)
    with pytest.raises(StateError, match="moved to other memory"):
        graphed(x).sum().backward()


def test_a_parameter_frozen_between_forward_and_backward_is_found() -> None:
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    graphed = graphcap.capture(module, (x,), backend="tape", config=CaptureConfig(grads="accumulate"))
    out = graphed(x)
    module.weight.requires_grad_(False)
    with pytest.raises(StateError, match="frozen"):
        out.sum().backward()


@pytest.mark.parametrize("cut", [lambda y: y[:, :128], lambda y: y[:, ::2], lambda y: y.t()])
def test_copied_outputs_keep_their_strides(cut: Any) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = cut(self.linear(x))
            return out

    x = torch.randn(32, 64)
    eager, graphed = twins(Wide(), x)
    assert graphed(x).stride() == eager(x).stride()
    assert torch.equal(graphed(x).sum(), eager(x).sum())


def test_an_eager_call_before_a_graphed_one_in_a_step() -> None:
    module = nn.Linear(8, 8)
    eager, graphed = twins(module, torch.randn(4, 8), grads="accumulate", on_mismatch="eager")
    torch.manual_seed(1)
    short, full = torch.randn(2, 8), torch.randn(4, 8)
    for run in (eager, graphed):
        run(short).sum().backward()
        run(full).sum().backward()
    assert torch.equal(eager.weight.grad, module.weight.grad)  # type: ignore[union-attr, arg-type]


def test_close_frees_the_static_tensors() -> None:
    import weakref

    graphed = graphcap.capture(nn.Linear(8, 8), (torch.randn(4, 8),), backend="tape")
    static = weakref.ref(graphed._runner.capture.sets[0][0].parts[0].inputs[0])
    graphed.close()
    assert static() is None


class Layer(PartialLayer):
    inputs = outputs = "x"

    def parts(self) -> tuple[graphcap.partial_layer.Part, ...]:
        return (GRAPHED("double", "x -> x"), EAGER("add", "x -> x"))

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_declared_parts_inside_a_plain_module_are_not_recorded_whole() -> None:
    with pytest.raises(CutError, match=r"1 \(Layer\) declares EAGER parts, but stands in a Sequential"):
        graphcap.capture(nn.Sequential(nn.Linear(8, 8), Layer()), (torch.randn(4, 8),), backend="tape")
    graphed = graphcap.capture((nn.Linear(8, 8), Layer()), (torch.randn(4, 8),), backend="tape")
    assert len(graphed.plan.breaks) == 1


def test_torch_s_way_of_calling_the_drop_in() -> None:
    x = torch.randn(2, 4)
    graphcap.make_graphed_callables(callables=nn.Linear(4, 4), sample_args=(x,), backend="tape")
    graphcap.make_graphed_callables(nn.Linear(4, 4), (x,), 3, False, (0, 1), backend="tape")
    with pytest.raises(SampleError, match="callables="):
        graphcap.make_graphed_callables(sample_args=(x,))


def test_an_order_of_another_type_is_named() -> None:
    with pytest.raises(OrderError, match="from_signed"):
        graphcap.capture(nn.Linear(4, 4), (torch.randn(2, 4),), order=[1, -1], backend="tape")  # type: ignore[arg-type]


def test_compare_says_that_no_graph_ran() -> None:
    with graphcap.disabled():
        result = compare(lambda: nn.Linear(8, 8), rows, steps=3, backend="tape")
    assert not result
    assert "no graph was ever replayed (disabled)" in str(result)


def test_compare_says_that_eager_differs_from_itself() -> None:
    calls = iter(range(1_000_000))

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * (1 + next(calls))

    result = compare(Noisy, rows, steps=3, backend="tape")
    assert not result
    assert "eager differs from itself" in str(result)


def test_compare_asks_for_the_inputs_of_a_microbatch_once() -> None:
    drawn = iter(torch.randn(99, 4, 8))
    result = compare(lambda: nn.Linear(8, 8), lambda index: ((next(drawn),), {}), steps=3, backend="tape")
    assert result, str(result)


def test_compare_of_what_has_nothing_to_differentiate() -> None:
    result = compare(nn.ReLU, lambda i: ((rows(i)[0][0].detach(),), {}), steps=3, backend="tape", expect_no_grads=True)
    assert result, str(result)
