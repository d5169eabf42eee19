"""What training asks of the layers: delayed weight gradients, recomputation, shared experts. Bit for bit."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcap import capture
from graphcap.errors import PlanError, StateError
from graphcap.hybrid import (
    AttentionLayer,
    ExpertParallel,
    HybridConfig,
    HybridModel,
    MambaLayer,
    MLPLayer,
    MoELayer,
    delayed_wgrad,
    shard_experts,
)
from graphcap.hybrid.layers import HybridLayer, RMSNorm, linear
from graphcap.hybrid.recompute import DiscardedOutput, not_kept
from graphcap.hybrid.wgrad import WgradQueue
from graphcap.testing import compare

KINDS = [MambaLayer, AttentionLayer, MLPLayer, MoELayer]


def outputs_and_gradients(
    layer: torch.nn.Module, steps: int = 3, delayed: bool = False, dtype: torch.dtype = torch.float32
) -> list[Tensor | None]:
    """Of `steps` microbatches whose gradients add up."""
    seen: list[Tensor | None] = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        hidden = torch.randn(2, 19, 32, generator=generator).to(dtype).requires_grad_()
        out = layer(hidden)
        out.float().square().sum().backward()
        if delayed:
            layer.backward_dw()
        seen += [out.detach(), hidden.grad]
    return [*seen, *(p.grad for p in layer.parameters())]


def assert_same(first: list[Tensor | None], second: list[Tensor | None]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and bool(a.isfinite().all()) and bool(a.count_nonzero()))


def layer_of(kind: type[HybridLayer], **values: Any) -> HybridLayer:
    torch.manual_seed(5)
    return kind(HybridConfig(init_std=0.2, **values))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_delayed_weight_gradients_are_those_of_the_backward(kind: type[HybridLayer], dtype: torch.dtype) -> None:
    layer = layer_of(kind, dtype=dtype, shared_ffn=24, experts=8)
    twin = copy.deepcopy(layer)
    with delayed_wgrad(layer):
        found = outputs_and_gradients(layer, delayed=True, dtype=dtype)
    assert_same(found, outputs_and_gradients(twin, dtype=dtype))


def test_delayed_weight_gradients_of_grouped_experts() -> None:
    values = {"dtype": torch.bfloat16, "expert_gemm": "grouped", "experts": 6}
    layer = layer_of(MoELayer, **values)
    twin = copy.deepcopy(layer)
    with delayed_wgrad(layer):
        found = outputs_and_gradients(layer, delayed=True, dtype=torch.bfloat16)
    assert_same(found, outputs_and_gradients(twin, dtype=torch.bfloat16))


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_a_layer_that_runs_several_times_in_one_forward(uses: int) -> None:
    """Autograd adds up the uses' gradients and then adds the sum to `.grad`; so does `backward_dw(uses)`."""
    grads = []
    for delayed in (False, True):
        torch.manual_seed(3)
        layer = linear(16, 16, HybridConfig())
        with delayed_wgrad(layer, delayed):
            for _ in range(3):
                rows = torch.randn(40, 16)
                total = torch.zeros(())
                for use in range(uses):
                    total = total + (layer(rows + use) * torch.randn(40, 16)).sum()
                total.backward()
                layer.backward_dw(uses)
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)
    if uses > 1:
        with pytest.raises(StateError, match="its queue is empty"), delayed_wgrad(layer):
            layer(rows).sum().backward()
            layer.backward_dw(uses)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_delayed(kind: type[HybridLayer]) -> None:
    """The weights of linear layers wait; everything else gets its gradient from the backward."""
    layer = layer_of(kind, shared_ffn=24, experts=2)
    with delayed_wgrad(layer):
        layer(torch.randn(2, 19, 32)).sum().backward()
        waiting = {name for name, p in layer.named_parameters() if p.grad is None}
        layer.backward_dw()
    linear = ("qkv", "proj", "gate_up", "down")
    expected = {name for name, _ in layer.named_parameters() if any(word in name for word in linear)}
    assert waiting == expected != set()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_popping_nothing_is_an_error(kind: type[HybridLayer]) -> None:
    layer = layer_of(kind)
    layer.backward_dw()  # not delayed: nothing to do
    with delayed_wgrad(layer):
        with pytest.raises(StateError, match="its queue is empty"):
            layer.backward_dw()
        with torch.no_grad():  # leaves nothing behind
            layer(torch.randn(1, 3, 32))
        with pytest.raises(StateError, match="its queue is empty"):
            layer.backward_dw()


TRAINED = ("expert_mlps", "router", "shared", "down", "norm", "embedding", "qkv", "in_proj", "output_layer")


@pytest.mark.parametrize("recompute", ["none", "norm", "layer"])
@pytest.mark.parametrize("trained", TRAINED)
def test_frozen_weights(trained: str, recompute: str) -> None:
    """What is frozen leaves nothing to `backward_dw`, and what is not gets the gradient of an undelayed backward, however
    much of the backward the frozen ones leave out."""
    found = []
    for delayed in (True, False):
        torch.manual_seed(3)
        choice = recompute if delayed else "none"
        model = HybridModel(HybridConfig(pattern="E[M*E]-", shared_ffn=24, init_std=0.2, recompute=choice))  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        tokens = torch.arange(24).view(2, 12)
        for step in range(2):
            with delayed_wgrad(model, delayed):
                model(tokens + step, tokens).loss.backward()
                for layer in (model.output_layer, *reversed(list(model.decoder.layers))):
                    layer.backward_dw()  # type: ignore[union-attr,operator]
        found.append([p.grad for p in model.parameters()])
    assert any(grad is not None and grad.any() for grad in found[1])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["M[*E]-", "[M*E]/*-/*-", "-/E", "*|[M-]|E/*E"])
@pytest.mark.parametrize("training", [True, False])
def test_a_whole_model(pattern: str, training: bool) -> None:
    """One call does it for the model: layers, groups, MTP layers and their projections, and the output layer, which runs
    once for the main prediction and, in training, once per depth."""
    torch.manual_seed(3)
    model = HybridModel(HybridConfig(pattern=pattern, shared_ffn=24, init_std=0.2, aux_loss=0.02)).train(training)
    twin = copy.deepcopy(model)
    chunks = model.chunks()
    for step in range(3):
        tokens = torch.arange(24).view(2, 12) + step
        with delayed_wgrad(model):
            if step < 2:
                loss = model(tokens, tokens).loss
            else:
                hidden = tokens
                for chunk in chunks[:-1]:
                    hidden = chunk(hidden)
                ahead = {"tokens": tokens} if model.mtp is not None and len(chunks) > 1 else {}
                loss = chunks[-1](hidden, tokens, **ahead).loss
            loss.backward()
            for one in reversed(chunks) if step == 2 else (model,):
                one.backward_dw()
            with pytest.raises(StateError, match="its queue is empty"):
                model.backward_dw()
        twin(tokens, tokens).loss.backward()
    found, expected = ([p.grad for p in m.parameters()] for m in (model, twin))
    assert sum(grad is not None and bool(grad.any()) for grad in expected) > 5
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [True, False])
def test_delayed_under_autocast(inside: bool) -> None:
    """The backward may run inside the region or behind it."""
    torch.manual_seed(3)
    model = HybridModel(HybridConfig(pattern="M[*E]-/*-", shared_ffn=24, init_std=0.2))
    twin = copy.deepcopy(model)
    for step in range(3):
        tokens = torch.arange(24).view(2, 12) + step
        for one, delayed in ((model, True), (twin, False)):
            with delayed_wgrad(one, delayed):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = one(tokens, tokens).loss
                    if inside:
                        loss.backward()
                if not inside:
                    loss.backward()
                one.backward_dw()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 12, 13, 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_delayed_with_inputs_that_are_not_contiguous(dtype: torch.dtype, tokens: int) -> None:
    """With MTP the output layer reads slices of the sequence. One product for all sequences and one for each differ in the
    last bits (13 tokens, float64)."""
    delayed_with_slices(dtype, tokens, "cpu")


def delayed_with_slices(dtype: torch.dtype, tokens: int, device: str) -> None:
    found = []
    for delayed in (True, False):
        torch.manual_seed(3)
        with torch.device(device):
            layer = linear(16, 256, HybridConfig(dtype=dtype, init_std=0.2))
            both = torch.randn(2, 2 * tokens, 16, dtype=dtype, requires_grad=True)
        with delayed_wgrad(layer, delayed):
            out = [layer(piece) for piece in both.chunk(2, dim=1)]
            torch.stack(out).square().sum().backward()
            layer.backward_dw(2)
        found.append([*(one.detach() for one in out), both.grad, layer.weight.grad])
    assert_same(*found)


def test_a_tied_weight_is_not_delayed() -> None:
    torch.manual_seed(3)
    model = HybridModel(HybridConfig(pattern="M-", tie_embeddings=True))
    with pytest.raises(PlanError, match="tie_embeddings=True and delayed weight gradients"), delayed_wgrad(model):
        pass
    twin = copy.deepcopy(model)
    for step in range(3):
        tokens = torch.arange(24).view(2, 12) + step
        with delayed_wgrad(model.decoder):
            model(tokens, tokens).loss.backward()
            for layer in reversed(list(model.decoder.layers)):
                layer.backward_dw()
        twin(tokens, tokens).loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["[M*-]", "M[M-]*|-"])
def test_captured_with_delayed_weight_gradients(pattern: str) -> None:
    """What has weights to delay is eager, the output layer as well; the rest is graphs."""
    torch.manual_seed(3)
    model = HybridModel(HybridConfig(pattern=pattern, shared_ffn=24, init_std=0.2, aux_loss=0.02))
    twin = copy.deepcopy(model)
    tokens = torch.arange(24).view(2, 12)
    with delayed_wgrad(model):
        graphed = capture(model, (tokens, tokens), backend="tape")
        for step in range(3):
            graphed(tokens + step, tokens).loss.backward()
            graphed.backward_dw()
            twin(tokens + step, tokens).loss.backward()
    assert dict(graphed.stats.eager) == {}
    assert graphed.stats.replays > 0
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_delayed_experts_are_not_captured() -> None:
    model = HybridModel(HybridConfig(pattern="M[*E]"))
    tokens = torch.arange(24).view(2, 12)
    with (
        pytest.raises(PlanError, match=r"capture of layer 3 .* which experts have any depends on the data"),
        delayed_wgrad(model),
    ):
        capture(model, (tokens, tokens), backend="tape")
    assert capture(model, (tokens, tokens), backend="tape")(tokens, tokens).loss.isfinite()


def test_shared_expert_before_its_backward_is_an_error() -> None:
    layer = layer_of(MoELayer, shared_ffn=24)
    assert isinstance(layer, MoELayer)
    with pytest.raises(StateError, match="after the slot"), delayed_wgrad(layer):
        layer.shared_backward_dw()


def test_a_weight_gradient_left_behind_is_an_error() -> None:
    layer = layer_of(MLPLayer)
    with pytest.raises(StateError, match="1 weight gradients are outstanding"), delayed_wgrad(layer):
        layer(torch.randn(1, 3, 32)).sum().backward()


def test_a_failed_step_leaves_nothing_behind() -> None:
    layer = layer_of(AttentionLayer)
    with pytest.raises(KeyError), delayed_wgrad(layer):
        layer(torch.randn(1, 3, 32)).sum().backward()
        raise KeyError
    queues = [m.outstanding for m in layer.modules() if isinstance(getattr(m, "outstanding", None), WgradQueue)]
    assert [len(queue) for queue in queues] == [0, 0]
    assert outputs_and_gradients(layer)


def test_hooks_of_a_parameter_run_when_its_gradient_is_there() -> None:
    layer = layer_of(MLPLayer)
    seen: list[str] = []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    with delayed_wgrad(layer):
        layer(torch.randn(1, 3, 32)).sum().backward()
        assert seen == ["norm.weight"]
        layer.backward_dw()
    assert sorted(seen) == ["mlp.down.weight", "mlp.gate_up.weight", "norm.weight"]


def test_delayed_layers_are_not_graphed() -> None:
    layer = layer_of(MoELayer, shared_ffn=24)
    with delayed_wgrad(layer):
        assert {part.kind.value for part in layer.parts() if part.kind} == {"eager"}
    assert {part.kind.value for part in layer.parts() if part.kind} == {"eager", "graphed"}


# ------------------------------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize("recompute", ["norm", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_changes_no_bit(recompute: str, dtype: torch.dtype) -> None:
    models = []
    for choice in ("none", recompute):
        torch.manual_seed(3)
        config = HybridConfig(pattern="M[*E]E-", dtype=dtype, shared_ffn=24, recompute=choice)  # type: ignore[arg-type]
        models.append(HybridModel(config))
    tokens = torch.randint(0, 256, (2, 20))
    results: list[list[Tensor | None]] = []
    for model in models:
        found: list[Tensor | None] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for step in range(20):
            optimizer.zero_grad()
            loss = model(tokens.roll(step, 1)[:, :-1], tokens.roll(step, 1)[:, 1:]).loss
            loss.backward()
            found += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
            optimizer.step()
        results.append(found)
    assert_same(*results)


def test_the_norm_s_output_is_really_freed() -> None:
    layer = layer_of(MoELayer, recompute="norm", shared_ffn=24)
    assert isinstance(layer, MoELayer)
    hidden = torch.randn(2, 9, 32, requires_grad=True)
    normed = layer.normalise(hidden)
    shared = layer.shared(normed)
    weights, chosen = layer.route(normed)
    rows, counts, order, inverse = layer.preprocess(normed, chosen)
    received, layout = layer.dispatch(rows, counts)
    assert normed.untyped_storage().nbytes() > 0
    made = layer.experts(received, layout)
    assert normed.untyped_storage().nbytes() == 0
    again: list[int] = []
    made.register_hook(lambda _: again.append(normed.untyped_storage().nbytes()))
    layer.combine(layer.collect(made, layout), weights, order, inverse, hidden, shared).sum().backward()
    assert again == [2 * 9 * 32 * 4]


def test_a_second_hook_on_the_combined_output_is_an_error() -> None:
    """Upstream's bug: the post-MLP helper hooks the combined output as well, and attention's gradients are corrupted."""
    layer = layer_of(MoELayer, recompute="norm")
    assert isinstance(layer, MoELayer)
    hidden = torch.randn(2, 9, 32, requires_grad=True)
    rows, counts, *kept = layer.before_dispatch(hidden)
    discarded = layer._discarded
    assert discarded is not None
    out = layer.combine(layer.exchange(rows, counts), *kept)
    discarded.discard(out)
    with pytest.raises(StateError, match="exactly one hook belongs to it"):
        out.sum().backward()


def test_a_hook_that_comes_too_late_is_an_error() -> None:
    scale = torch.ones(4, requires_grad=True)
    discarded = DiscardedOutput(lambda x: x * scale, (scale,))
    x = torch.randn(4, requires_grad=True)
    value = discarded(x)
    out = (value * 3).sum()
    other = torch.zeros(1, requires_grad=True) * 1
    discarded.discard(other)
    with pytest.raises(StateError, match="before it was computed again"):
        out.backward()


@pytest.mark.parametrize("hooks", [1, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_several_backwards_through_one_graph(frozen: bool, hooks: int) -> None:
    """The value is computed again for each of them, also if nothing in front of it wants a gradient (its own backward does
    not run then); a second hook is an error either way."""
    grads = []
    for recompute in ("norm", "none"):
        layer = layer_of(MoELayer, recompute=recompute)
        assert isinstance(layer, MoELayer)
        layer.norm.weight.requires_grad_(not frozen)
        rows, counts, *kept = layer.before_dispatch(torch.ones(2, 9, 32).cumsum(1).requires_grad_(not frozen))
        discarded = layer._discarded
        out = layer.combine(layer.exchange(rows, counts), *kept)
        if discarded is not None and hooks == 2:
            discarded.discard(out)
            with pytest.raises(StateError, match="exactly one hook belongs to it"):
                out.sum().backward()
            return
        for step in range(3):
            out.square().sum().backward(retain_graph=step < 2)
        grads.append([p.grad for p in layer.parameters()])
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and bool(a.any()))  # type: ignore[arg-type]


def test_inside_a_graph_nothing_holds_the_norm_s_output() -> None:
    """`not_kept`: when the consumers have run, the value's memory is gone; the backward computes it again, bit for bit."""
    norm = RMSNorm(32, HybridConfig())
    shared, router = linear(32, 48, HybridConfig()), linear(32, 4, HybridConfig())
    source = torch.randn(2, 9, 32, requires_grad=True)
    leaves = (source, norm.weight, shared.weight, router.weight)
    runs: list[Tensor] = []

    def run(x: Tensor, weight: Tensor) -> Tensor:
        runs.append(norm.normed(x, weight))
        return runs[-1]

    def consumed(value: Tensor) -> Tensor:
        flat = value.flatten(0, 1)  # a view
        return shared(flat).square().sum() + (router(flat).softmax(-1) ** 2).sum() + (flat * 2).sum()

    with not_kept(run, source, norm.weight) as value:
        out = consumed(value)
        held = weakref.ref(value.untyped_storage())
    runs.clear()
    del value
    gc.collect()
    assert held() is None
    found = torch.autograd.grad(out, leaves)
    assert len(runs) == 3  # for the two products, and for its own backward
    expected = torch.autograd.grad(consumed(norm(source)), leaves)
    assert all(map(torch.equal, found, expected))
    assert all(bool(grad.any()) for grad in found)


def test_inside_a_graph_no_node_keeps_itself_alive() -> None:
    """A node that saves its own output (softmax) through a hook that hands on the very tensor is never freed."""
    norm = RMSNorm(32, HybridConfig())
    source = torch.randn(2, 9, 32, requires_grad=True)
    with not_kept(norm.normed, source, norm.weight) as value:
        made = value.softmax(-1)
    held = weakref.ref(made.untyped_storage())
    torch.autograd.grad(made.sum(), source, retain_graph=True)
    assert held() is not None
    del value, made
    gc.collect()
    assert held() is None


def test_a_model_with_shared_out_experts_is_copied() -> None:
    """With a group of its own, which can't be copied: the copy lives on the same ranks."""

    class Group:
        def __reduce__(self) -> str:
            raise TypeError("cannot pickle 'ProcessGroup' object")

    layer = layer_of(MoELayer)
    layer.parallel = ExpertParallel(1, 2, Group())  # type: ignore[assignment,arg-type]
    twin = copy.deepcopy(layer)
    assert twin.parallel is layer.parallel  # type: ignore[comparison-overlap]
    assert twin.router_weight is not layer.router_weight


def test_without_grad_nothing_is_discarded() -> None:
    layer = layer_of(MoELayer, recompute="norm")
    plain = layer_of(MoELayer)
    hidden = torch.randn(2, 9, 32)
    with torch.no_grad():
        assert torch.equal(layer(hidden), plain(hidden))


@pytest.mark.parametrize("recompute", ["norm", "layer"])
def test_captured_with_recomputation(recompute: str) -> None:
    def build() -> HybridModel:
        torch.manual_seed(3)
        return HybridModel(HybridConfig(pattern="[*E]M", shared_ffn=24, recompute=recompute))  # type: ignore[arg-type]

    def inputs(index: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        ids = torch.randint(0, 256, (2, 13), generator=torch.Generator().manual_seed(index))
        return (ids[:, :-1], ids[:, 1:]), {}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    assert compare(build, inputs, steps=20, backend="tape")


# ------------------------------------------------------------------------------------------------------------- sharing


def test_shared_expert_is_added_once_to_every_token() -> None:
    layer = layer_of(MoELayer, shared_ffn=24, dtype=torch.float64)
    assert isinstance(layer, MoELayer)
    hidden = torch.randn(2, 9, 32, dtype=torch.float64)
    with_shared = layer(hidden)
    extra = layer.shared(layer.normalise(hidden)).view_as(hidden)
    layer.shared_mlp = None
    torch.testing.assert_close(with_shared, layer(hidden) + extra, rtol=1e-12, atol=1e-12)


def test_one_rank_needs_no_process_group() -> None:
    layer = layer_of(MoELayer)
    names = list(layer.state_dict())
    before = layer(torch.ones(1, 4, 32))
    assert shard_experts(layer) is layer
    assert list(layer.state_dict()) == names
    assert torch.equal(layer(torch.ones(1, 4, 32)), before)
    assert math.isfinite(float(before.detach().sum()))


def test_config_refuses() -> None:
    with pytest.raises(PlanError, match="shared_ffn=-1"):
        HybridConfig(shared_ffn=-1)
    with pytest.raises(PlanError, match="recompute='all'"):
        HybridConfig(recompute="all")  # type: ignore[arg-type]
