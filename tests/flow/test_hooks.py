"""Hooks: around a captured module at every call, recorded or refused inside, and never silently lost."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import CutError, HookError, InputMismatch
from tests.flow.small import Mlp, Routed, agrees, capture, rows, same_gradients, twin_of


def register_all(module: nn.Module, seen: list[str]) -> None:
    """One hook of every kind; those with a result change it."""

    def before(_: nn.Module, args: Any) -> Any:
        seen.append("before")
        return (args[0] * 2,)

    def after(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append("after")
        return output * 3

    def backward_before(_: nn.Module, gradients: Any) -> Any:
        seen.append("backward before")
        return (gradients[0] * 0.5,)

    def backward(_: nn.Module, inputs: Any, __: Any) -> Any:
        seen.append("backward")
        return (inputs[0] * 0.25,)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    module.register_full_backward_pre_hook(backward_before)
    module.register_full_backward_hook(backward)


@pytest.mark.parametrize("when", ["before capture", "after capture"])
@pytest.mark.parametrize("kind", [Mlp, Routed])
def test_hooks_on_the_captured_module_run_around_every_call(kind: Any, when: str) -> None:
    module, seen, expected = kind(), [], []
    twin = twin_of(module)
    if when == "before capture":
        register_all(module, seen)
    graphed = capture(module, (rows(requires_grad=True),))
    if when == "after capture":
        register_all(module, seen)
    register_all(twin, expected)
    assert seen == []
    for step in range(3):
        agrees(graphed, twin, rows(requires_grad=True))
        assert seen == expected
        assert seen.count("before") == step + 1
    assert graphed.stats.replays == 3
    assert "forward" not in vars(module)


def test_hooks_run_once_where_the_call_is_served_eagerly() -> None:
    module, seen = Mlp(), []
    module.register_forward_hook(lambda *_: seen.append(1))
    graphed = capture(module, on_mismatch="eager")
    graphed(rows(5, 8))
    assert len(seen) == 1
    with graphcap.disabled():
        graphed(rows())
    with graphed.eager():
        graphed(rows())
    assert len(seen) == 3
    assert graphed.stats.eager["disabled"] == 2


def test_a_hook_that_raises_leaves_the_module_as_it_was() -> None:
    module = Mlp()
    graphed = capture(module)

    def fail(*_: Any) -> None:
        raise ValueError("from the hook")

    for register in (module.register_forward_pre_hook, module.register_forward_hook):
        handle = register(fail)
        with pytest.raises(ValueError, match="from the hook"):
            graphed(rows())
        handle.remove()
        assert "forward" not in vars(module)
        agrees(graphed, twin_of(module), rows())


def test_a_hook_that_changes_the_shape_of_an_input_is_a_mismatch() -> None:
    module = Mlp()
    graphed = capture(module)
    module.register_forward_pre_hook(lambda _, args: (args[0][:1],))
    with pytest.raises(InputMismatch, match=r"expected shape \[4, 8\], got \[1, 8\]"):
        graphed(rows())


def test_keyword_hooks() -> None:
    class Scaled(Mlp):
        def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * by

    module = Scaled()
    graphed = capture(module, (rows(),), {"by": rows(8)})
    twin = twin_of(module)
    for side in (module, twin):
        side.register_forward_pre_hook(lambda _, args, kw: (args, {"by": kw["by"] * 2}), with_kwargs=True)
    agrees(graphed, twin, rows(), by=rows(8))


def test_hooks_on_the_graphed_object_itself() -> None:
    graphed, seen = capture(Mlp()), []
    graphed.register_forward_hook(lambda *_: seen.append(1))
    graphed(rows())
    assert seen == [1]


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_the_drop_in_refuses_hooks(register: str) -> None:
    module = Mlp()
    handle = getattr(module, register)(lambda *_: None)
    with pytest.raises(HookError, match=r"Mlp .* has hooks") as caught:
        graphcap.make_graphed_callables(module, (rows(),), backend="tape")
    assert isinstance(caught.value, RuntimeError)
    handle.remove()
    graphcap.make_graphed_callables(module, (rows(),), backend="tape")(rows()).sum().backward()


def test_hooks_on_an_inner_layer_of_a_chunk_are_refused() -> None:
    first, second = Mlp(), Mlp()
    second.register_forward_hook(lambda *_: None)
    with pytest.raises(HookError, match="Mlp"):
        capture((first, second))


def test_tensor_work_of_a_hook_inside_a_graphed_part_is_recorded() -> None:
    module = Mlp()
    module.up.register_forward_hook(lambda _, __, out: out * 2)
    module.down.register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 0.5,))
    twin = twin_of(module)
    assert len(twin.up._forward_hooks) == 1
    graphed = capture(module)
    for _ in range(2):
        agrees(graphed, twin, rows())


def test_host_work_of_a_hook_inside_a_graphed_part_is_refused() -> None:
    module = Mlp()

    def count(up: nn.Module, *_: Any) -> None:
        up.calls = getattr(up, "calls", 0) + 1

    module.up.register_forward_hook(count)
    with pytest.raises(CutError, match=r"Linear\.calls"):
        capture(module)
    with pytest.raises(CutError, match=r"Linear\.calls"):
        capture(module, warmup=1)
    assert not hasattr(module.up, "calls")


def test_a_hook_added_inside_a_graphed_part_is_warned_of_once() -> None:
    module = Mlp()
    graphed = capture(module)
    graphed(rows()).sum().backward()
    module.up.register_forward_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            graphed(rows()).sum().backward()
    assert [str(w.message).split(",")[0] for w in caught] == ["up got a hook after capture"]


def test_hooks_of_an_eager_part_run_at_every_call() -> None:
    module, seen = Routed(), []
    graphed = capture(module)
    module.expert.register_forward_hook(lambda *_: seen.append("forward"))
    module.expert.register_full_backward_hook(lambda *_: seen.append("backward"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            graphed(rows()).sum().backward()
    assert seen == ["forward", "backward"] * 2


def test_gradient_hooks_of_parameters_run_once_a_backward() -> None:
    """grads="return": the parameter is an input of the node, so whatever hangs on it works as in eager."""
    module = Mlp()
    twin = twin_of(module)
    seen: list[str] = []
    graphed = capture(module)
    for side in (module, twin):
        side.up.weight.register_hook(lambda g: g * 2)
        side.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    for _ in range(2):
        for side in (graphed, twin):
            x = torch.ones(4, 8)
            side(x).square().sum().backward()
    same_gradients(module, twin)
    assert len(seen) == 4


def test_capture_fires_no_hook() -> None:
    module, seen = Mlp(), []
    module.register_forward_hook(lambda *_: seen.append("module"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module.up.weight.register_hook(lambda g: seen.append("tensor"))
    module.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    capture(module)
    assert seen == []
