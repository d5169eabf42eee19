"""What leaves a graph belongs to the caller, except where the contract says that it is the static buffer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import HookError, PlanError, StateError
from graphcap.testing import compare, deterministic
from tests.flow.small import Mlp, Routed, agrees, capture, rows, same_gradients, twin_of

# --------------------------------------------------------------------------------------------------- grads="return"


@pytest.mark.parametrize("kind", [Mlp, Routed])
def test_two_backwards_add_up(kind: Any) -> None:
    """The first gradient is kept by autograd as `.grad`: were it the static buffer, the sum would be g2 + g2."""
    module = kind()
    twin, graphed = twin_of(module), capture(module)
    for _ in range(3):
        for side in (module, twin):
            side.zero_grad(set_to_none=True)
        for _ in range(2):
            x = rows()
            graphed(x).square().sum().backward()
            twin(x).square().sum().backward()
        same_gradients(module, twin)


def test_earlier_gradients_do_not_change() -> None:
    graphed = capture(module := Mlp(), (rows(requires_grad=True),))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(4):
        x = rows(requires_grad=True)
        module.zero_grad(set_to_none=True)
        out = graphed(x)
        out.square().sum().backward()
        for tensor in (out.detach(), x.grad, *(p.grad for p in module.parameters())):
            kept.append((tensor, tensor.clone()))
    assert all(torch.equal(tensor, value) for tensor, value in kept)
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor, _ in kept)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))  # small gradients share a storage


def test_a_view_of_a_leaf_as_input() -> None:
    """ViewBackward makes a new tensor on the same storage, and AccumulateGrad steals it."""
    weight, other = torch.randn(32, requires_grad=True), torch.randn(32, requires_grad=True)
    module = Mlp().requires_grad_(False)
    graphed = capture(module, (rows(requires_grad=True),))
    graphed(weight.view(4, 8)).square().sum().backward()
    first = weight.grad.clone()
    graphed(other.view(4, 8)).square().sum().backward()
    assert torch.equal(weight.grad, first)
    graphed(weight.view(4, 8)).exp().sum().backward()

    expected = weight.detach().clone().requires_grad_()
    module(expected.view(4, 8)).square().sum().backward()
    assert torch.equal(first, expected.grad)
    module(expected.view(4, 8)).exp().sum().backward()
    assert torch.equal(weight.grad, expected.grad)


def test_gradients_of_an_input_that_the_caller_also_uses() -> None:
    """The caller's own sum of two paths is in fresh memory too."""
    module = Mlp()
    twin, graphed = twin_of(module), capture(module, (rows(requires_grad=True),))
    for _ in range(2):
        agrees(graphed, twin, rows(requires_grad=True))
    x = rows(requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for side, leaf in ((graphed, x), (twin, y)):
        hidden = leaf * 2
        (side(hidden) + hidden).square().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_gradients_are_the_callers_to_change() -> None:
    module = Mlp()
    twin, graphed = twin_of(module), capture(module)
    for _ in range(3):
        x = rows()
        for side in (graphed, twin):
            side(x).square().sum().backward()
            nn.utils.clip_grad_norm_(side.parameters(), 0.1)
            for p in side.parameters():
                p.grad.mul_(3)
        same_gradients(module, twin)


# -------------------------------------------------------------------------------------------------------- outputs


def test_kept_outputs_do_not_change() -> None:
    graphed = capture(Routed())
    kept = []
    for _ in range(3):
        with torch.no_grad():
            out = graphed(rows())
        kept.append((out, out.clone()))
    assert all(torch.equal(out, value) for out, value in kept)
    kept[0][0].zero_()  # the caller's to write, too
    with torch.no_grad():
        x = rows()
        assert torch.equal(graphed(x), graphed.module(x))


def test_outputs_that_pass_through_or_repeat() -> None:
    def call(x: torch.Tensor) -> Any:
        y = x * 2
        return {"same": y, "again": y, "view": y[:2], "input": x, "flat": y.view(-1)}

    graphed = capture(call)
    x = rows()
    kept = graphed(x)
    graphed(rows())
    for name, value in call(x).items():
        assert torch.equal(kept[name], value), name
    assert kept["same"] is kept["again"]


def test_aliased_outputs_last_until_the_next_forward() -> None:
    """outputs="alias": no copy, so the next forward writes over what was handed out."""
    graphed = capture(Mlp(), outputs="alias")
    x = rows()
    with torch.no_grad():
        out = graphed(x)
        assert torch.equal(out, graphed.module(x))
        value = out.clone()
        later = graphed(rows())
    assert out.data_ptr() == later.data_ptr()
    assert not torch.equal(out, value)
    assert torch.equal(out, later)


def test_an_aliased_output_as_the_next_input() -> None:
    module = Mlp()
    graphed = capture(module, outputs="alias")
    x = rows()
    with torch.no_grad():
        assert torch.equal(graphed(graphed(graphed(x))), module(module(module(x))))


# --------------------------------------------------------------------------------------------------- grads="alias"


def test_aliased_gradients_last_until_the_next_backward() -> None:
    """grads="alias": `.grad` is the static buffer, so adding a second backward gives g2 + g2. Zero or consume it first."""
    module = Mlp()
    twin, graphed = twin_of(module), capture(module, grads="alias")
    for _ in range(2):
        agrees(graphed, twin, rows())  # one backward a step: right
    module.zero_grad(set_to_none=True)
    graphed(rows()).sum().backward()
    first = module.down.weight.grad
    before = first.clone()
    module.zero_grad(set_to_none=True)
    graphed(rows()).sum().backward()
    assert module.down.weight.grad.data_ptr() == first.data_ptr()
    assert not torch.equal(first, before)


def test_aliased_gradients_do_not_alias_each_other() -> None:
    """In a + b both get one tensor; as `.grad` of both, clipping would scale it twice."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a + self.b) + x

    module = Sum()
    twin, graphed = twin_of(module), capture(module, grads="alias")
    agrees(graphed, twin, rows())
    for side in (module, twin):
        for parameter in side.parameters():
            parameter.grad.mul_(3)
    same_gradients(module, twin)


# --------------------------------------------------------------------------------------------- grads="accumulate"


def test_accumulate_equals_eager() -> None:
    with deterministic("cpu"):
        for order in (None, "0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1"):
            result = compare(
                Routed,
                lambda index: ((torch.randn(4, 8, generator=torch.Generator().manual_seed(index)),), {}),
                steps=4,
                backend="tape",
                order=order,
                config=graphcap.CaptureConfig(grads="accumulate"),
            )
            assert result, f"{order}: {result}"


def test_accumulate_keeps_the_buffer_that_exists() -> None:
    module = Mlp()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    twin = twin_of(module)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    buffers = [p.grad for p in module.parameters()]
    graphed = capture(module, grads="accumulate")
    for _ in range(3):
        x = rows()
        graphed(x).square().sum().backward()
        twin(x).square().sum().backward()
        same_gradients(module, twin)
    for side in (module, twin):
        side.zero_grad(set_to_none=False)
    graphed(x).square().sum().backward()
    twin(x).square().sum().backward()
    same_gradients(module, twin)
    assert all(p.grad is b for p, b in zip(module.parameters(), buffers, strict=True))


def test_accumulate_binds_again_after_set_to_none() -> None:
    module = Mlp()
    twin, graphed = twin_of(module), capture(module, grads="accumulate")
    assert module.up.weight.grad is None
    buffers = None
    for _ in range(3):
        agrees(graphed, twin, rows())  # zero_grad(set_to_none=True) inside
        now = [p.grad for p in module.parameters()]
        assert buffers is None or all(a is b for a, b in zip(now, buffers, strict=True))
        buffers = now


def test_accumulate_refuses_a_foreign_gradient_by_name() -> None:
    module = Mlp()
    graphed = capture(module, grads="accumulate")
    graphed(rows()).sum().backward()
    module.down.weight.grad = torch.ones(8, 8)
    with pytest.raises(StateError, match=r"down\.weight\.grad is another tensor"):
        graphed(rows()).sum().backward()
    module.down.weight.grad = None
    module.zero_grad()
    agrees(graphed, twin_of(module), rows())


def test_accumulate_into_main_grad() -> None:
    """bf16 parameters, fp32 main_grad, as Megatron keeps them."""
    module = Mlp().bfloat16()
    twin = twin_of(module)
    for side in (module, twin):
        for parameter in side.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
    mains = [p.main_grad for p in module.parameters()]
    graphed = capture(module, (rows().bfloat16(),), grads="accumulate")
    for _ in range(3):
        x = rows().bfloat16()
        graphed(x).float().square().sum().backward()
        twin(x).float().square().sum().backward()
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            theirs.main_grad.add_(theirs.grad)
            theirs.grad = None
            assert ours.grad is None
            assert torch.equal(ours.main_grad, theirs.main_grad)
    assert all(p.main_grad is m for p, m in zip(module.parameters(), mains, strict=True))
    assert mains[0].count_nonzero()


@pytest.mark.parametrize("new", [None, torch.zeros(8, 8)], ids=["gone", "another"])
def test_accumulate_refuses_another_main_grad(new: Any) -> None:
    module = Mlp()
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    graphed = capture(module, grads="accumulate")
    graphed(rows()).sum().backward()
    module.up.weight.main_grad = new
    with pytest.raises(StateError, match=r"up\.weight\.main_grad is another tensor"):
        graphed(rows()).sum().backward()


def test_accumulate_with_main_grad_refuses_eager_calls() -> None:
    module = Mlp()
    module.up.weight.main_grad = torch.zeros(8, 8)
    with pytest.raises(PlanError, match=r"up\.weight has a main_grad"):
        capture(module, grads="accumulate", on_mismatch="eager")


def test_accumulate_runs_post_accumulate_hooks_once() -> None:
    module = Mlp()
    graphed = capture(module, grads="accumulate")
    seen: list[Any] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.clone())))
    graphed(rows()).sum().backward()
    assert sorted(name for name, _ in seen) == sorted(name for name, _ in module.named_parameters())
    assert all(torch.equal(value, module.get_parameter(name).grad) for name, value in seen)


def test_accumulate_refuses_tensor_hooks() -> None:
    module = Mlp()
    handle = module.up.weight.register_hook(lambda g: g * 2)
    with pytest.raises(HookError, match=r"up\.weight has a tensor hook"):
        capture(module, grads="accumulate")
    handle.remove()
    graphed = capture(module, grads="accumulate")
    module.up.weight.register_hook(lambda g: g * 2)
    with pytest.raises(StateError, match=r"up\.weight .*tensor hook"):
        graphed(rows()).sum().backward()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_integer_inputs(grads: str) -> None:
    """Nothing but the parameters is differentiable; in "accumulate" these are no inputs of the node."""
    module = Tokens()
    twin, graphed = twin_of(module), capture(module, (torch.randint(0, 10, (4,)),), grads=grads)
    for _ in range(3):
        agrees(graphed, twin, torch.randint(0, 10, (4,)))


class Tied(graphcap.PartialLayer):
    """One weight in two graphed parts, another in one part twice."""

    inputs = "hidden"
    outputs = "hidden"

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8, bias=False)
        self.twice = nn.Linear(8, 8, bias=False)

    def parts(self) -> Any:
        return (
            graphcap.GRAPHED("first", "hidden -> hidden"),
            graphcap.EAGER("between", "hidden -> hidden"),
            graphcap.GRAPHED("second", "hidden -> hidden"),
        )

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(hidden))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 1.5

    def second(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.twice(torch.tanh(self.twice(self.shared(hidden))))


@pytest.mark.parametrize("grads", ["return", "accumulate", "alias"])
def test_tied_parameters(grads: str) -> None:
    """What is used in two parts goes the way of "return", since (G + a) + b is not G + (a + b)."""
    layer = Tied()
    twin, graphed = twin_of(layer), capture(layer, grads=grads)
    for _ in range(3):
        agrees(graphed, twin, rows())
    if grads == "alias":
        return
    for _ in range(3):  # onto what is there
        x = rows()
        graphed(x).square().sum().backward()
        twin(x).square().sum().backward()
    same_gradients(layer, twin)
