"""The fault classes of low-precision state under graphs, each with the value that is right: Transformer Engine's modules.

Anchors: input 2, gradient 0.5, history of 4 rows, most_recent: the forward scale is 448 / 2 = 224, the backward scale
57344 / 0.5 = 114688.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import GraphcapError, make_graphed_callables
from graphcap.fp8_meta import QuantSpec
from tests.gpu.te.kit import BF16, autocast, recipe, scaling

pytestmark = pytest.mark.gpu

FORWARD, BACKWARD = 448 / 2, 57344 / 0.5


def lin(**more: Any) -> Any:
    import transformer_engine.pytorch as te

    return te.Linear(64, 64, bias=False, params_dtype=BF16, **more)


def x(value: float = 1.0) -> torch.Tensor:
    return torch.full((32, 64), value, device="cuda", dtype=BF16).requires_grad_()


def graph(module: Any, value: float = 1.0, **more: Any) -> Any:
    found = more.pop("recipe", recipe("delayed"))
    return make_graphed_callables(module, (x(value),), enabled=True, recipe=found, **more)


def step(module: Any, value: float = 1.0, gradient: float = 1.0, **more: Any) -> torch.Tensor:
    with autocast(more.pop("recipe", recipe("delayed")), more.pop("group", None)):
        y = module(x(value), **more)
    y.backward(torch.full_like(y, gradient))
    return y.detach().clone()


def scale(module: Any, direction: str = "fwd", index: int = 0) -> float:
    return float(module.fp8_meta[f"scaling_{direction}"].scale[index])


def manager() -> Any:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager


def require_anchor(module: Any) -> None:
    assert (scale(module), scale(module, "bwd")) == (FORWARD, BACKWARD)


# ------------------------------------------------------------------------------------------- histories and registration


def test_eager_reaches_the_anchors() -> None:
    m = lin()
    step(m, 2.0, 0.5)
    require_anchor(m)


def test_a_replay_registers_and_reduces() -> None:
    m = graph(lin())
    step(m, 2.0, 0.5)
    require_anchor(m)


def test_warm_up_does_not_reach_the_history() -> None:
    m = graph(lin(), 100.0, recipe=recipe("delayed", amax_compute_algo="max"))
    assert (scale(m), scale(m, "bwd")) == (1.0, 1.0)
    assert not m.fp8_meta["scaling_fwd"].amax_history.any()
    step(m, 1.0, recipe=recipe("delayed", amax_compute_algo="max"))
    assert scale(m) == 448.0


def test_state_of_before_is_there_again_after_a_capture() -> None:
    m = lin()
    step(m, 2.0, 0.5)
    before = scaling(m)
    graph(m, 100.0)
    after = scaling(m)
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_a_module_that_was_not_run_stays_untouched() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = lin(), lin()

        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return self.used(t)

    m = graph(Half(), allow_unused_input=True)
    step(m, 2.0, 0.5)
    require_anchor(m.used)
    assert "scaling_fwd" not in m.idle.fp8_meta
    assert manager().get_buffer_info() not in m.idle.fp8_meta
    step(m.idle, 2.0, 0.5)
    require_anchor(m.idle)


def test_a_forward_that_is_called_directly_is_seen() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return self.inner.forward(t)

    m = graph(Direct())
    step(m, 2.0, 0.5)
    require_anchor(m.inner)


def test_nested_modules_of_one_class_are_all_in_low_precision() -> None:
    m = nn.Sequential(nn.Sequential(lin()), lin())
    eager = copy.deepcopy(m)
    graph(m)
    for value in (2.0, 3.0):
        assert torch.equal(step(m, value, 0.5), step(eager, value, 0.5))
    a, b = scaling(m), scaling(eager)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_group_reaches_the_registration() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        group = torch.distributed.new_group([0])
        m = graph(lin(), amax_reduction_group=group)
        step(m, 2.0, 0.5, group=group)
        require_anchor(m)
        assert m.fp8_meta["fp8_group"] is group
        assert f"group={id(group)}" in m.fp8_meta[manager().get_buffer_info()][1]
        m.eval()
        step(m, 2.0, 0.5, group=group)  # the module's own forward, still in the same bucket
        assert m.fp8_meta["fp8_group"] is group
    finally:
        torch.distributed.destroy_process_group()


def test_a_reset_of_the_manager_does_not_stop_the_scales() -> None:
    m = graph(lin())
    step(m, 1.0)
    manager().reset()
    step(m, 2.0, 0.5)
    require_anchor(m)


def test_eager_and_graph_share_one_registration() -> None:
    m = lin()
    step(m, 1.0)
    graph(m)
    step(m, 2.0, 0.5)
    require_anchor(m)
    key = m.fp8_meta[manager().get_buffer_info()][1]
    assert len(manager().quantization_state.global_scale_buffer[key]) == 1


# ------------------------------------------------------------------------------------------------------ weight caching


def test_two_captures_do_not_share_the_flag() -> None:
    a = graph(lin(), cache_quantized_params=True)
    step(a, is_first_microbatch=True)
    step(a, is_first_microbatch=False)  # its flag says now: keep the cached weight
    current = recipe("current")
    b = graph(lin(), recipe=current)
    one = step(b, recipe=current)
    with torch.no_grad():
        b.weight.mul_(2.0)
    assert torch.equal(step(b, recipe=current), 2 * one)


def test_the_flag_is_written_by_whoever_is_called() -> None:
    current = recipe("current")
    a, b = lin(), graph(lin(), cache_quantized_params=True, recipe=current)
    for first in (True, False):
        step(b, recipe=current, is_first_microbatch=first)
    before = step(b, recipe=current, is_first_microbatch=False)
    with torch.no_grad():
        b.weight.mul_(2.0)
    with autocast(current):
        a(x())  # an eager module is the first of this autocast
        y = b(x(), is_first_microbatch=True)
    assert torch.equal(y.detach(), 2 * before)
    y.backward(torch.ones_like(y))


def test_the_first_replay_uses_the_weights_of_now() -> None:
    for name in ("delayed", "current", "block"):
        found = recipe(name)
        m = graph(lin(), cache_quantized_params=True, recipe=found)
        eager = lin()
        with torch.no_grad():
            m.weight.mul_(2.0)
            eager.weight.copy_(m.weight)
        assert torch.equal(
            step(m, recipe=found, is_first_microbatch=False), step(eager, recipe=found, is_first_microbatch=False)
        ), name


def test_an_eager_call_does_not_change_the_weights_of_the_graph() -> None:
    m, eager = lin(), lin()
    with torch.no_grad():
        eager.weight.copy_(m.weight)
    graph(m, cache_quantized_params=True)
    for module in (m, eager):
        step(module, 2.0, is_first_microbatch=True)
        module.eval()
        with torch.no_grad(), autocast(recipe("delayed")):
            module(x(), is_first_microbatch=True)  # on Hopper this drops the transpose of the module's own cache
        module.train()
        module.weight.grad = None
    first, second = x(2.0), x(2.0)
    for module, given in ((m, first), (eager, second)):
        with autocast(recipe("delayed")):
            y = module(given, is_first_microbatch=True)
        y.backward(torch.ones_like(y))
    assert torch.equal(first.grad, second.grad)
    assert torch.equal(m.weight.grad, eager.weight.grad)


def test_a_call_without_the_flag_is_refused() -> None:
    m = graph(lin(), cache_quantized_params=True)
    with pytest.raises(ValueError, match="is_first_microbatch"):
        step(m)
    with pytest.raises(ValueError, match="is_first_microbatch"):
        step(m, is_first_microbatch=None)


def test_eager_modules_never_read_a_flag() -> None:
    m = graph(lin(), cache_quantized_params=True)
    step(m, is_first_microbatch=True)
    step(m, is_first_microbatch=False)
    assert manager().get_skip_fp8_weight_update_tensor() is None


# ----------------------------------------------------------------------------------------- who reduces after a backward


def test_a_forward_without_backward_does_not_claim_the_reduction() -> None:
    frozen = lin().eval().requires_grad_(False)
    graph_of_frozen = make_graphed_callables(
        frozen, (x().detach(),), enabled=True, recipe=recipe("delayed"), allow_unused_input=True
    )
    trained = lin()
    with autocast(recipe("delayed")):
        with torch.no_grad():
            h = graph_of_frozen(x(2.0).detach())
        y = trained(h.detach())
    y.backward(torch.full_like(y, 0.5))
    assert scale(trained, "bwd") == BACKWARD


def test_capture_of_a_grouped_linear_leaves_other_modules_alone() -> None:
    from tests.gpu.te.kit import Grouped, drawn

    other = lin()
    step(other, 2.0, 0.5)
    before = scaling(other)
    grouped = Grouped(params_dtype=BF16)
    make_graphed_callables(grouped, (drawn(0),), enabled=True, recipe=recipe("delayed"))
    assert all(torch.equal(v, scaling(other)[k]) for k, v in before.items())
    with autocast(recipe("delayed")):
        y = grouped(drawn(1))
    y.backward(torch.ones_like(y))
    step(other, 2.0, 0.5)
    require_anchor(other)


# ------------------------------------------------------------------------------------------------- failures and refusals


class Broken(nn.Module):
    """Fails at a chosen run of its forward, or in the backward of it."""

    def __init__(self, at: int, in_backward: bool) -> None:
        super().__init__()
        self.inner, self.at, self.in_backward = lin(), at, in_backward
        self.count = [0]

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        y = self.inner(t)
        BROKEN["runs"] += 1
        if BROKEN["runs"] == self.at:
            if self.in_backward:
                y.register_hook(_fail)
            else:
                raise RuntimeError("broken on purpose")
        return y


BROKEN = {"runs": 0}


def _fail(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("at", [2, 4])  # the second warm-up run, and the recording
def test_after_a_failed_capture_eager_training_is_right(at: int, in_backward: bool) -> None:
    BROKEN["runs"] = 0
    m = Broken(at, in_backward)
    step_before = lin()
    step(step_before, 2.0, 0.5)
    before = scaling(step_before)
    with pytest.raises(GraphcapError, match="broken on purpose"):
        graph(m)
    assert "scaling_fwd" not in m.inner.fp8_meta and not m.inner.fp8_initialized
    assert all(torch.equal(v, scaling(step_before)[k]) for k, v in before.items())
    m.at = -1
    step(m, 2.0, 0.5)
    require_anchor(m.inner)
    step(step_before, 2.0, 0.5)
    require_anchor(step_before)
    after = lin()
    graph(after)
    step(after, 2.0, 0.5)
    require_anchor(after)


def test_another_history_length_before_capture_is_refused() -> None:
    """Eager code fails on it too (TE 2.20 mixes up the histories of the two directions), but only after the forward."""
    m = lin()
    step(m)
    before = scaling(m)
    with pytest.raises(GraphcapError, match="amax history of 4 rows, and the recipe's amax_history_len is 16"):
        graph(m, recipe=recipe("delayed", amax_history_len=16))
    assert all(torch.equal(v, scaling(m)[k]) for k, v in before.items())
    step(m, 2.0, 0.5)
    require_anchor(m)
    graph(m)
    step(m, 4.0, 0.25)
    assert (scale(m), scale(m, "bwd")) == (FORWARD / 2, BACKWARD * 2)


def test_another_history_length_after_capture_is_refused() -> None:
    m = graph(lin())
    step(m)
    with pytest.raises(GraphcapError, match="amax_history_len"):
        step(m, recipe=recipe("delayed", amax_history_len=16))
    manager().reset()  # TE's reduction fails on a module that takes part in it and changes its length
    m.eval()
    step(m, recipe=recipe("delayed", amax_history_len=16))
    m.train()
    with pytest.raises(GraphcapError, match="amax_history"):
        step(m, 2.0)


def test_another_format_is_refused() -> None:
    from transformer_engine.common.recipe import Format

    m = graph(lin())
    with pytest.raises(GraphcapError, match="fp8_format"):
        step(m, recipe=recipe("delayed", fp8_format=Format.E4M3))
    step(m, 2.0, 0.5)
    require_anchor(m)


def test_another_kind_of_recipe_is_refused() -> None:
    m = graph(lin())
    with pytest.raises(GraphcapError, match="Float8CurrentScaling"):
        step(m, recipe=recipe("current"))


def test_a_call_outside_autocast_is_refused() -> None:
    m = graph(lin())
    with pytest.raises(GraphcapError, match="autocast"):
        m(x())


def test_an_evaluation_in_high_precision_between_steps() -> None:
    m, eager = lin(), lin()
    with torch.no_grad():
        eager.weight.copy_(m.weight)
    graph(m)
    for value in (2.0, 3.0):
        assert torch.equal(step(m, value), step(eager, value))
        for module in (m, eager):
            module.eval()
            with torch.no_grad():
                module(x())
            module.train()
    assert all(torch.equal(v, scaling(eager)[k]) for k, v in scaling(m).items())


def test_without_warm_up_runs() -> None:
    m = graph(lin(), num_warmup_iters=0, cache_quantized_params=True)
    step(m, 2.0, 0.5, is_first_microbatch=True)
    require_anchor(m)


def test_an_operation_that_ran_in_high_precision_between_is_refused_or_right() -> None:
    import transformer_engine.pytorch.ops as te_ops

    m = te_ops.Sequential(te_ops.Linear(64, 64, bias=False, dtype=BF16))
    graph(m)
    step(m, 2.0, 0.5)
    m.eval()
    with torch.no_grad():
        m(x())  # TE throws the scales away here
    m.train()
    with pytest.raises(GraphcapError, match="anew"):
        step(m, 2.0, 0.5)


def test_a_copy_of_a_graphed_module_is_plain_and_right() -> None:
    m = graph(lin())
    step(m)
    twin = copy.deepcopy(m)
    manager().reset()
    twin.fp8_meta.pop(manager().get_buffer_info(), None)
    step(twin, 2.0, 0.5)
    require_anchor(twin)
    step(m, 2.0, 0.5)
    require_anchor(m)


def test_primary_weights_that_were_written_get_their_transpose_again() -> None:
    import transformer_engine.pytorch as te

    with te.quantized_model_init(enabled=True, recipe=recipe("delayed")):
        m, eager = lin(), lin()
    with torch.no_grad():
        eager.weight.copy_(m.weight.dequantize())
        m.weight.copy_(m.weight.dequantize())
    graph(m)
    for module in (m, eager):
        step(module)
        with torch.no_grad():
            module.weight._data.copy_(module.weight._data.flip(0))
            module.weight._reset_caches()
    first, second = x(), x()
    for module, given in ((m, first), (eager, second)):
        with autocast(recipe("delayed")):
            y = module(given)
        y.backward(torch.ones_like(y))
    assert torch.equal(first.grad, second.grad)


class OwnRegion(nn.Module):
    """A module that opens a region of its own in its forward."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.inner, self.settings = lin(), settings

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        with te.autocast(**self.settings):
            made: torch.Tensor = self.inner(given)
        return made


@pytest.mark.parametrize("outer", ["none", "delayed"])
def test_a_region_that_captured_code_opens_is_refused(outer: str) -> None:
    module = OwnRegion(enabled=True, recipe=recipe("current"))
    settings: dict[str, Any] = {} if outer == "none" else {"quantization": QuantSpec(recipe=recipe("delayed"))}
    with pytest.raises(GraphcapError, match="region that the captured code opens itself"):
        graphcap.capture(module, (x(),), **settings)


def test_a_region_of_the_same_settings_inside_is_fine() -> None:
    found = recipe("delayed")
    module, eager = (OwnRegion(enabled=True, recipe=found) for _ in range(2))
    with torch.no_grad():
        eager.inner.weight.copy_(module.inner.weight)
    graphed = graphcap.capture(module, (x(),), quantization=QuantSpec(recipe=found))
    for _ in range(3):
        made = []
        for call in (graphed, eager):
            given = x()
            with autocast(found):
                y = call(given)
            y.backward(torch.ones_like(y))
            made.append((y.detach().clone(), given.grad))
        assert torch.equal(made[0][0], made[1][0])
        assert torch.equal(made[0][1], made[1][1])
