"""Every argument of torch's and of Transformer Engine's make_graphed_callables, and what comes back."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap import ClosedError, DeviceError, InFlightError, InputMismatch, make_graphed_callables
from graphcap.backends.scopes import is_capturing
from tests.flow.twins import WIDTH, drawn, linear

# Transformer Engine 2.20, pytorch/graph.py: the parameters in order.
TE = [
    *("modules", "sample_args", "num_warmup_iters", "allow_unused_input", "sample_kwargs"),
    *("fp8_enabled", "fp8_calibrating", "fp8_recipe", "fp8_group", "fp8_weight_caching"),
    *("enabled", "calibrating", "recipe", "amax_reduction_group", "cache_quantized_params"),
    *("_order", "_num_layers_per_chunk", "pool", "retain_graph_in_backward", "_reuse_graph_input_output_buffers"),
    *("clone_param_grads_on_return", "pre_warmup_hook", "post_warmup_hook", "capture_time_hooks"),
]


def graph(callables: Any, samples: Any, **options: Any) -> Any:
    return make_graphed_callables(callables, samples, **{"backend": "tape", **options})


class Scale(nn.Module):
    """x * weight: the gradient of the weight is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


# ---------------------------------------------------------------------------------------------------------- signature


def test_positional_use_of_either_original_works() -> None:
    parameters = inspect.signature(make_graphed_callables).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == TE
    torchs = list(inspect.signature(torch.cuda.make_graphed_callables).parameters)
    assert torchs == ["callables", "sample_args", "num_warmup_iters", "allow_unused_input", "pool"]
    assert "callables" in parameters
    defaults = {name: p.default for name, p in parameters.items()}
    assert (defaults["num_warmup_iters"], defaults["clone_param_grads_on_return"]) == (3, True)


def test_torch_s_fifth_argument_and_te_s() -> None:
    make_graphed_callables(linear(), (drawn(0),), 3, False, (0, 1), backend="tape")  # a pool handle
    made = make_graphed_callables(lambda x, *, y: x * y, (drawn(0),), 3, False, {"y": drawn(1)}, backend="tape")
    assert torch.equal(made(drawn(2), y=drawn(3)), drawn(2) * drawn(3))


OLD_AND_NEW = [
    ("fp8_enabled", "enabled", False),
    ("fp8_calibrating", "calibrating", False),
    ("fp8_recipe", "recipe", object()),
    ("fp8_group", "amax_reduction_group", object()),
    ("fp8_weight_caching", "cache_quantized_params", False),
]


@pytest.mark.parametrize(("old", "new", "value"), OLD_AND_NEW, ids=[old for old, _, _ in OLD_AND_NEW])
def test_deprecated_names(old: str, new: str, value: Any) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old}= is deprecated.*use {new}=") as caught:
        graph_here = make_graphed_callables(linear(), (drawn(0),), backend="tape", **{old: value})
    assert [Path(w.filename).name for w in caught] == [Path(__file__).name]
    assert graph_here is not None
    with pytest.raises(ValueError, match=f"{old}= is the deprecated name of {new}="):
        graph(linear(), (drawn(0),), **{old: value, new: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph(linear(), (drawn(0),), **{new: value})


def test_enabled_is_a_bool_or_one_per_module() -> None:
    samples = ((drawn(0),), (drawn(0),))
    graph((linear(), linear()), samples, enabled=(False, False))
    with pytest.raises(TypeError, match="expected a bool or a tuple of bools"):
        graph(linear(), (drawn(0),), enabled=1)
    with pytest.raises(TypeError, match="expected a bool"):
        graph(linear(), (drawn(0),), enabled=("yes",))
    with pytest.raises(ValueError, match="1 entries for 2 callables"):
        graph((linear(), linear()), samples, enabled=(False,))


class Microbatch(nn.Module):
    """Notes what it is told; `is_first_microbatch` is a host value, as in TE's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.told: list[Any] = []

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, scale: float = 1.0) -> Tensor:
        if not torch.is_grad_enabled():
            self.told.append(is_first_microbatch)
        return self.linear(x) * scale


def test_the_first_microbatch_is_told_where_weights_are_cached() -> None:
    module = Microbatch()
    graph(module, (drawn(0),), cache_quantized_params=True)
    for wrong in ({}, {"is_first_microbatch": 1}, {"is_first_microbatch": None}):
        with pytest.raises(ValueError, match="is_first_microbatch=True or False"):
            module(drawn(1), **wrong)
    for first in (True, False):
        module(drawn(1), is_first_microbatch=first).sum().backward()


def test_the_first_microbatch_goes_to_the_modules_own_forward() -> None:
    module, plain = Microbatch(), linear()
    graph((module, plain), ((drawn(0),), (drawn(0),)))
    module(drawn(1), is_first_microbatch=True).sum().backward()  # nothing is cached: left aside
    plain(drawn(1), is_first_microbatch=True).sum().backward()
    module.eval()
    plain.eval()
    with torch.no_grad():
        module(drawn(1), is_first_microbatch=False)
        plain(drawn(1), is_first_microbatch=False)
        module.train()
        with graphcap.disabled():
            module(drawn(1), is_first_microbatch=True)
    assert module.told == [False, True]


def test_a_first_microbatch_that_was_captured_is_an_argument_like_others() -> None:
    module = Microbatch()
    graph(module, (drawn(0),), sample_kwargs={"is_first_microbatch": True})
    module(drawn(1), is_first_microbatch=True).sum().backward()
    with pytest.raises(InputMismatch, match="is_first_microbatch"):
        module(drawn(1), is_first_microbatch=False)


def test_keywords() -> None:
    """Missing ones raise as in TE; additional ones are not ignored, unless they say what leaving them out says."""

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return x * mask

    made = graph(masked, (drawn(0),), sample_kwargs={"mask": drawn(1)})
    with pytest.raises(TypeError, match="mask"):
        made(drawn(2))
    module = Microbatch()
    graph(module, (drawn(0),))
    expected = copy.deepcopy(module)(drawn(3))
    assert torch.equal(module(drawn(3), scale=1.0), expected)
    with pytest.raises(TypeError, match="scale"):
        module(drawn(3), scale=2.0)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_warm_up_hooks_run_once_around_all_warm_ups(count: int) -> None:
    calls: list[str] = []

    class Noted(Scale):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("recorded" if is_capturing() else "run")
            return super().forward(x)

    graph(
        (Noted(), Noted()),
        ((drawn(0),),) * 2,
        num_warmup_iters=count,
        pre_warmup_hook=lambda: calls.append("before"),
        post_warmup_hook=lambda: calls.append("after"),
    )
    assert calls == ["before", *["run"] * 2 * max(1, count), "after", "recorded", "recorded"]


def test_hooks_that_are_none() -> None:
    with pytest.raises(TypeError, match="pre_warmup_hook"):
        graph(linear(), (drawn(0),), pre_warmup_hook=3)


MOMENTS = ("forward_pre", "forward", "backward_pre", "backward")


def noting(calls: list[Any], module: nn.Module, name: str) -> dict[str, dict[int, Callable[[Any], None]]]:
    def hook_of(moment: str) -> Callable[[Any], None]:
        def hook(given: Any) -> None:
            assert given is module
            assert not is_capturing()
            calls.append((name, moment))

        return hook

    return {f"{moment}_hooks": {0: hook_of(moment)} for moment in MOMENTS}


@pytest.mark.parametrize("signed", [None, [1, 2, -2, -1], [1, 1, 2, -2, 2, -2, -1, -1]], ids=str)
def test_capture_time_hooks(signed: list[int] | None) -> None:
    """TE's sequence: the order, as often as warm-up runs, and once more while recording; never at a replay."""
    calls: list[Any] = []
    modules = Scale(), Scale()
    hooks = [noting(calls, module, str(number + 1)) for number, module in enumerate(modules)]
    count = 1 if signed is None else signed.count(1)
    made = graph(
        modules, ((drawn(0),),) * 2 * count, num_warmup_iters=2, capture_time_hooks=hooks, _order=signed
    )
    one_pass: list[Any] = []
    for number in signed or [1, 2, -2, -1]:
        moments = MOMENTS[:2] if number > 0 else MOMENTS[2:]
        one_pass += [(str(abs(number)), moment) for moment in moments]
    assert calls == one_pass * 3
    made[0](drawn(1)).sum().backward()
    assert len(calls) == len(one_pass) * 3


def test_capture_time_hooks_for_some() -> None:
    calls: list[Any] = []
    modules = Scale(), Scale()
    hooks = [None, {"forward_hooks": {"a": lambda m: calls.append("a"), "b": lambda m: calls.append("b")}}]
    graph(modules, ((drawn(0),),) * 2, num_warmup_iters=1, capture_time_hooks=hooks)
    assert calls == ["a", "b"] * 2


def test_capture_time_hooks_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="unknown keys"):
        graph(Scale(), (drawn(0),), capture_time_hooks=[{"forwards": {}}])
    with pytest.raises(ValueError, match="2 entries for 1"):
        graph(Scale(), (drawn(0),), capture_time_hooks=[None, None])
    module = Scale()
    for moment in MOMENTS:
        with pytest.raises(RuntimeError, match="returned a value"):
            graph(module, (drawn(0),), capture_time_hooks=[{f"{moment}_hooks": {0: lambda m: 1}}])
        assert "forward" not in vars(module)


# ---------------------------------------------------------------------------------------------------------- gradients


def two_gradients(call: Callable[[Tensor], Tensor], module: Scale) -> tuple[Tensor, Tensor, Tensor]:
    """The weight's gradient of a first pass, a copy of it made then, and that of a second pass."""
    (first,) = torch.autograd.grad(call(drawn(1)).sum(), (module.weight,))
    kept = first.clone()
    (second,) = torch.autograd.grad(call(drawn(2)).sum(), (module.weight,))
    return first, kept, second


@pytest.mark.parametrize("ordered", [False, True])
def test_parameter_gradients_are_owned(ordered: bool) -> None:
    module = Scale()
    made = graph((module,), ((drawn(0),),), _order=[1, -1] if ordered else None)[0]
    first, kept, second = two_gradients(made, module)
    assert torch.equal(first, kept) and not torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_two_passes_accumulate() -> None:
    module = Scale()
    graph(module, (drawn(0),))
    for step in (1, 2):
        module(drawn(step)).sum().backward()
    assert torch.equal(module.weight.grad, drawn(1).sum(0) + drawn(2).sum(0))


def test_the_clone_can_be_left_out() -> None:
    module = Scale()
    graph(module, (drawn(0),), clone_param_grads_on_return=False)
    first, kept, second = two_gradients(module, module)
    assert not torch.equal(first, kept)  # what the caller asked for
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, drawn(2).sum(0))


@pytest.mark.parametrize("marked", [True, False])
def test_the_policy_of_a_parameter_is_that_of_the_capture(marked: bool) -> None:
    """`skip_backward_post_hook`: the gradient's life is somebody else's business (delayed weight gradients), so the
    static buffer itself is returned; decided at capture."""
    module = Scale()
    module.weight.skip_backward_post_hook = marked
    graph(module, (drawn(0),))
    module.weight.skip_backward_post_hook = not marked
    first, _, second = two_gradients(module, module)
    assert (first.data_ptr() == second.data_ptr()) is marked
    assert torch.equal(second, drawn(2).sum(0))


def test_only_the_marked_parameter_aliases() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a + self.b

    module = Two()
    module.a.skip_backward_post_hook = True  # type: ignore[attr-defined]
    graph(module, (drawn(0),))
    wanted = (module.a, module.b)
    first = torch.autograd.grad(module(drawn(1)).sum(), wanted)
    second = torch.autograd.grad(module(drawn(2)).sum(), wanted)
    assert first[0].data_ptr() == second[0].data_ptr()
    assert first[1].data_ptr() != second[1].data_ptr()


def test_retain_graph_in_backward() -> None:
    for allowed in (True, False):
        module = Scale()
        graph(module, (drawn(0),), retain_graph_in_backward=allowed)
        y = module(drawn(1)).sum()
        y.backward(retain_graph=True)
        if allowed:
            y.backward()
            assert torch.equal(module.weight.grad, drawn(1).sum(0) * 2)
        else:
            with pytest.raises(graphcap.ReplayError, match="retain_graph"):
                y.backward()


# ------------------------------------------------------------------------------------------------- what comes back


def test_reset_frees_one_callable() -> None:
    made = graph((Scale(), Scale()), ((drawn(0),),) * 4, _order=[1, 2, -2, -1, 1, 2, -2, -1])
    made[1].reset()
    made[1].reset()
    with pytest.raises(RuntimeError, match="reset"):
        made[1](drawn(1))
    for other in (made[0], made[2], made[3]):
        assert torch.equal(other(drawn(1)), drawn(1))
    for call in made:
        call.reset()
    for call in made:
        with pytest.raises(ClosedError):
            call(drawn(1))


def test_reset_of_a_microbatch_that_shares_its_graphs() -> None:
    made = graph((Scale(),), ((drawn(0),),) * 2, _order=[1, -1, 1, -1], _reuse_graph_input_output_buffers=True)
    made[0].reset()
    with pytest.raises(ClosedError):
        made[0](drawn(1))
    made[1](drawn(1)).sum().backward()


def test_reset_of_patched_modules() -> None:
    first, second = Scale(), Scale()
    graph((first, second), ((drawn(0),),) * 2)
    first.reset()
    with pytest.raises(RuntimeError, match="reset"):
        first(drawn(1))
    with pytest.raises(RuntimeError, match="reset"):
        first.eval()(drawn(1))
    assert torch.equal(second(drawn(1)), drawn(1))
    graph(first, (drawn(0),))  # and it can be graphed again
    assert torch.equal(first.eval()(drawn(2)), drawn(2))


def test_a_patched_module_can_be_captured_again() -> None:
    module = Scale()
    graph(module, (drawn(0),))
    old = module.forward
    graph(module, (drawn(0, 5, WIDTH),))
    assert module.forward is not old
    assert torch.equal(module(drawn(1, 5, WIDTH)), drawn(1, 5, WIDTH))
    assert torch.equal(old(drawn(1)), drawn(1))


def test_copies_and_pickles_of_a_patched_module() -> None:
    module = Scale()
    graph(module, (drawn(0),))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.mul_(3)
    assert torch.equal(twin(drawn(1)), drawn(1) * 3)
    twin.backward_dw()
    twin.reset()
    assert torch.equal(twin(drawn(1)), drawn(1) * 3)
    assert torch.equal(module(drawn(1)), drawn(1))
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(module)
    with pytest.raises(TypeError, match="copied"):
        copy.deepcopy(graph((Scale(),), ((drawn(0),),), _order=[1, -1])[0])


def test_a_plan_and_numbers_come_with_what_is_returned() -> None:
    module = Scale()
    graph(module, (drawn(0),))
    module(drawn(1)).sum().backward()
    assert module.forward.stats.replays == 1
    assert "1 graphed part" in str(module.forward.plan)


def test_a_single_callable_comes_back_alone() -> None:
    assert callable(graph(lambda x: x * 2, (drawn(0),)))
    assert callable(graph(Scale(), (drawn(0),), _order=[1, -1]))
    assert isinstance(graph((Scale(),), ((drawn(0),),)), tuple)
    made = graph((Scale(), Scale()), ((drawn(0),),) * 2, _order=[1, -1], _num_layers_per_chunk=2)
    assert isinstance(made, tuple) and len(made) == 2


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_buffer_that_requires_grad() -> None:
    module = Scale()
    module.register_buffer("shift", torch.zeros(WIDTH, requires_grad=True))
    for builtin in (RuntimeError, AssertionError, ValueError):  # TE's, torch's, ours
        with pytest.raises(builtin, match="the buffer shift requires grad"):
            graph(module, (drawn(0),))


def test_hooks_raise_what_either_original_raises() -> None:
    module = Scale()
    module.register_forward_hook(lambda *_: None)
    for builtin in (RuntimeError, AssertionError):
        with pytest.raises(builtin, match="hooks"):
            graph(module, (drawn(0),))


def test_streams_are_refused_on_the_tape() -> None:
    module = Scale()
    graph(module, (drawn(0),))
    with pytest.raises(DeviceError, match="no streams"):
        module(drawn(1), cuda_graph_stream=object())
    with pytest.raises(InputMismatch, match="cuda_graph_event without cuda_graph_stream"):
        module(drawn(1), cuda_graph_event=object())
    module(drawn(1), cuda_graph_stream=None, cuda_graph_event=None).sum().backward()
    with pytest.raises(InFlightError):
        kept = module(drawn(1)), module(drawn(2))
        del kept


def test_low_precision_waits_for_its_state() -> None:
    for name in ("enabled", "calibrating"):
        with pytest.raises(graphcap.StateError):
            graph(linear(), (drawn(0),), **{name: True})
