"""The drop-in with Transformer Engine's arguments: names, keywords, orders, hooks, who owns gradients, delayed gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from graphcap import make_graphed_callables
from tests.gpu.te.kit import BATCH, BF16, LENGTH, SIZE, autocast, drawn, layer, plain, recipe, scaling

pytestmark = pytest.mark.gpu

ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]
MICROBATCHES = 3


def sample(dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(LENGTH, BATCH, SIZE, device="cuda", dtype=dtype, requires_grad=True)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in {*a, *b} if name not in a or name not in b or not torch.equal(a[name], b[name])]


# ----------------------------------------------------------------------------------------------------------- arguments


def test_the_old_names_do_the_same_with_a_warning() -> None:
    sides = []
    for old in (False, True):
        torch.manual_seed(3)
        m = layer("linear")
        found = recipe("delayed")
        if old:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                make_graphed_callables(
                    m, (sample(),), fp8_enabled=True, fp8_recipe=found, fp8_group=None, fp8_weight_caching=True
                )
            assert sum(issubclass(w.category, DeprecationWarning) for w in seen) >= 3
        else:
            make_graphed_callables(m, (sample(),), enabled=True, recipe=found, cache_quantized_params=True)
        with autocast(found):
            y = m(drawn(1), is_first_microbatch=True)
        y.backward(drawn(2, requires_grad=False))
        sides.append({"y": y.detach().clone(), "grad": m.weight.grad.clone(), **scaling(m)})
    assert same(*sides) == []


def test_low_precision_per_callable() -> None:
    sides = []
    for graphed in (False, True):
        torch.manual_seed(3)
        low, high = layer("linear"), layer("linear")
        found = recipe("delayed")
        if graphed:
            make_graphed_callables((low, high), ((sample(),), (sample(),)), enabled=(True, False), recipe=found)
        with autocast(found):
            h = low(drawn(1))
        y = high(h)
        y.backward(drawn(2, requires_grad=False))
        sides.append({"y": y.detach().clone(), "grad": low.weight.grad.clone(), **scaling(low), **scaling(high)})
    assert same(*sides) == []


def test_keyword_tensors() -> None:
    sides = []
    for graphed in (False, True):
        torch.manual_seed(3)
        m = layer("transformer", torch.float32, self_attn_mask_type="arbitrary")
        for parameter in m.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if graphed:
            mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda")
            make_graphed_callables(
                m, (sample(torch.float32),), sample_kwargs={"attention_mask": mask}, allow_unused_input=True
            )
        seen = {}
        for number in range(3):
            generator = torch.Generator("cuda").manual_seed(number)
            mask = torch.rand(BATCH, 1, LENGTH, LENGTH, device="cuda", generator=generator) > 0.5
            mask[..., 0] = False  # somebody to attend to
            y = m(drawn(number, torch.float32), attention_mask=mask)
            y.backward(drawn(number + 50, torch.float32, requires_grad=False))
            seen[f"y {number}"] = y.detach().clone()
        seen |= {name: parameter.grad.clone() for name, parameter in m.named_parameters()}
        sides.append(seen)
    assert all(t.isfinite().all() for t in sides[0].values())
    assert same(*sides) == []


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_several_positional_tensors(dtype: torch.dtype) -> None:
    import transformer_engine.pytorch as te

    def three(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (LENGTH, BATCH, 4, 32)
        made = [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for _ in range(3)]
        return [t.requires_grad_() for t in made]

    def run(graphed: bool) -> dict[str, torch.Tensor]:
        m = te.DotProductAttention(4, 32, attention_dropout=0.0)
        if graphed:
            m = make_graphed_callables(m, three(9), num_warmup_iters=3, enabled=False)
        seen = {}
        for number in range(3):
            given = three(number)
            y = m(*given)
            y.backward(torch.ones_like(y))
            seen |= {f"{number} {name}": t.grad.clone() for name, t in zip("qkv", given, strict=True)}
            seen[f"{number} y"] = y.detach().clone()
        return seen

    eager = run(False)
    assert same(eager, run(False)) == [], "eager differs from itself: this attention backend can't be judged"
    assert same(eager, run(True)) == []


def test_dropout_starts_from_the_same_random_state() -> None:
    sides = []
    for graphed in (False, True):
        torch.manual_seed(3)
        m = layer("layernorm_mlp", torch.float32)
        stack = torch.nn.Sequential(m, torch.nn.Dropout(0.3))
        if graphed:
            make_graphed_callables(stack, (sample(torch.float32),))
        torch.manual_seed(4)
        seen = {}
        for number in range(3):
            y = stack(drawn(number, torch.float32))
            y.backward(torch.ones_like(y))
            seen[f"{number}"] = y.detach().clone()
        sides.append({**seen, **{n: p.grad.clone() for n, p in stack.named_parameters()}})
    assert same(*sides) == []


# -------------------------------------------------------------------------------------------------------------- orders


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("clone", [False, True])
@pytest.mark.parametrize("low", [None, "delayed", "current"])
def test_interleaved_order(low: str | None, clone: bool, reuse: bool) -> None:
    sides = [_interleaved(graphed, low, clone, reuse) for graphed in (False, True)]
    assert same(*sides) == []


def _interleaved(graphed: bool, low: str | None, clone: bool, reuse: bool) -> dict[str, torch.Tensor]:
    """Two chunks of one layer, three microbatches; weights are cached where they are quantised."""
    torch.manual_seed(3)
    layers = (layer("linear"), layer("layernorm_mlp"))
    found = None if low is None else recipe(low)
    calls: dict[tuple[int, int], Any] = {(c, m): layers[c] for c in range(2) for m in range(MICROBATCHES)}
    if graphed:
        made = make_graphed_callables(
            layers,
            tuple((sample(),) for _ in calls),
            allow_unused_input=True,
            enabled=found is not None,
            recipe=found,
            cache_quantized_params=found is not None,
            _order=ORDER,
            _reuse_graph_input_output_buffers=reuse,
            clone_param_grads_on_return=clone,
        )
        calls = {(i // MICROBATCHES, i % MICROBATCHES): call for i, call in enumerate(made)}
    parameters = {f"{c}.{n}": p for c, m in enumerate(layers) for n, p in m.named_parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.01)
    seen: dict[str, torch.Tensor] = {}
    for parameter in parameters.values():  # a buffer of the user's, so that no static gradient becomes `.grad`
        parameter.grad = torch.zeros_like(parameter)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        count = {1: 0, 2: 0, -1: 0, -2: 0}
        for number in ORDER:
            place = (abs(number) - 1, count[number])
            count[number] += 1
            seed = 1000 * step + 10 * place[1] + place[0]
            if number > 0:
                inputs[place] = drawn(seed)
                more = {"is_first_microbatch": place[1] == 0} if found is not None else {}
                with autocast(found):
                    outputs[place] = calls[place](inputs[place], **more)
                seen[f"{step} {place} output"] = outputs[place].detach().clone()
            else:
                outputs[place].backward(drawn(seed + 500, requires_grad=False))
                seen[f"{step} {place} grad"] = inputs[place].grad.clone()
        for name, parameter in parameters.items():
            seen[f"{step} grad {name}"] = parameter.grad.clone()
        optimizer.step()
        for m in layers:
            seen |= {f"{step} {type(m).__name__} {name}": t for name, t in scaling(m).items()}
    return seen


# -------------------------------------------------------------------------------------------- gradients and their owners


def test_returned_gradients_are_owned() -> None:
    m = make_graphed_callables(layer("linear"), (sample(),))
    m(drawn(1)).backward(drawn(2, requires_grad=False))
    first, kept = m.weight.grad, m.weight.grad.clone()
    m.weight.grad = None
    m(drawn(3)).backward(drawn(4, requires_grad=False))
    assert torch.equal(first, kept)
    assert m.weight.grad.data_ptr() != first.data_ptr()


def test_two_replays_accumulate() -> None:
    torch.manual_seed(3)
    m = layer("linear")
    eager = layer("linear")
    eager.load_state_dict(m.state_dict())
    make_graphed_callables(m, (sample(),))
    for module in (m, eager):
        for number in range(2):
            module(drawn(number)).backward(drawn(number + 5, requires_grad=False))
    assert torch.equal(m.weight.grad, eager.weight.grad)


def test_gradients_added_into_main_grad() -> None:
    sides = []
    for graphed in (False, True):
        torch.manual_seed(3)
        m = layer("linear", bias=False, fuse_wgrad_accumulation=True)
        m.weight.main_grad = torch.zeros(m.weight.shape, device="cuda")
        if graphed:
            make_graphed_callables(m, (sample(),), allow_unused_input=True)
            assert not m.weight.main_grad.any()
        for step in range(2):
            m.weight.main_grad.zero_()
            for number in range(2):
                m(drawn(10 * step + number)).backward(drawn(number + 5, requires_grad=False))
        sides.append({"main": m.weight.main_grad.clone()})
    assert sides[0]["main"].any()
    assert same(*sides) == []


@pytest.mark.parametrize("low", [None, "delayed"])
@pytest.mark.parametrize("fused", [False, True])
def test_delayed_weight_gradients(low: str | None, fused: bool) -> None:
    """`-1.5`: the delayed weight gradients of chunk 1."""
    sides = []
    for graphed in (False, True):
        torch.manual_seed(3)
        m = layer("linear", bias=False, delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
        fired = []
        m.register_wgrad_accumulation_and_reduce_hooks(lambda fired=fired: fired.append(1))
        if fused:
            m.weight.main_grad = torch.zeros(m.weight.shape, device="cuda")
        found = None if low is None else recipe(low)
        calls: Any = (m, m)
        if graphed:
            calls = make_graphed_callables(
                (m,),
                ((sample(),), (sample(),)),
                allow_unused_input=True,
                enabled=found is not None,
                recipe=found,
                _order=[1, 1, -1, -1.5, -1, -1.5],
                _num_layers_per_chunk=[1],
            )
        seen = {}
        for step in range(3):
            m.weight.grad = None
            if fused:
                m.weight.main_grad.zero_()
            outputs = []
            for microbatch in range(2):
                with autocast(found):
                    outputs.append(calls[microbatch](drawn(10 * step + microbatch)))
            for microbatch in range(2):
                outputs[microbatch].backward(drawn(10 * step + microbatch + 5, requires_grad=False))
                calls[microbatch].backward_dw()
                gradient = m.weight.main_grad if fused else m.weight.grad
                seen[f"{step}.{microbatch}"] = gradient.clone()
            assert len(fired) == 2 * (step + 1)
        sides.append({**seen, **scaling(m)})
    assert sides[0]["0.0"].any()
    assert same(*sides) == []


# --------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("ordered", [False, True])
def test_capture_time_hooks_run_outside_of_graphs(ordered: bool) -> None:
    seen: list[str] = []

    def note(word: str) -> Any:
        def hook(module: torch.nn.Module) -> None:
            assert not torch.cuda.is_current_stream_capturing()
            seen.append(word)

        return hook

    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    hooks = [{kind: {0: note(kind)} for kind in kinds}]
    m = layer("linear")
    order = {"_order": [1, -1]} if ordered else {}
    made = make_graphed_callables((m,), ((sample(),),), num_warmup_iters=2, capture_time_hooks=hooks, **order)
    assert seen == list(kinds) * 3
    made[0](drawn(1)).backward(drawn(2, requires_grad=False))
    assert len(seen) == 12


def test_a_reset_callable_is_closed() -> None:
    m = make_graphed_callables(layer("linear"), (sample(),), enabled=True, recipe=recipe("delayed"))
    with autocast(recipe("delayed")):
        m(drawn(1)).backward(drawn(2, requires_grad=False))
    m.reset()
    with pytest.raises(RuntimeError):
        m(drawn(1))


def test_gradient_buffers_made_like_quantised_weights() -> None:
    """TE's tests give every parameter a `.grad` made by empty_like, which for a quantised weight is quantised too."""
    import transformer_engine.pytorch as te

    sides = []
    for graphed in (False, True):
        torch.manual_seed(3)
        found = recipe("current")
        with te.quantized_model_init(enabled=True, recipe=found):
            m = layer("linear")
            for parameter in m.parameters():
                parameter.grad = torch.empty_like(parameter)
            if graphed:
                make_graphed_callables(m, (sample(),), enabled=True, recipe=found)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
        for step in range(2):
            optimizer.zero_grad(set_to_none=False)
            with autocast(found):
                y = m(drawn(step))
            y.backward(drawn(step + 5, requires_grad=False))
            optimizer.step()
        sides.append({"y": y.detach().clone(), **{n: plain(p) for n, p in m.named_parameters()}})
    assert same(*sides) == []
