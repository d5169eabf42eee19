"""The hybrid model in FP8 by Transformer Engine: attention, Mamba, MLP and shared experts in graphs, routed experts eager in
te.GroupedLinear. The judge is the same model without graphs, after it has been compared with itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphcap import Order, PlanError, StateError, demo
from graphcap._demo_sides import Value
from graphcap.fp8_meta import find
from graphcap.hybrid import HybridConfig, HybridModel, delayed_wgrad, load, save
from graphcap.testing import deterministic
from tests.gpu.te.kit import recipe
from tests.hybrid.quantized import (
    INTERLEAVED,
    ONE,
    assert_alive,
    assert_equal,
    eager_side,
    graphed_side,
    model_of,
    step,
)

pytestmark = pytest.mark.gpu

# Widths of all products are multiples of 16 (Mamba's in_proj: 2 * 256 + 2 * 2 * 16 + 16 = 592), and so are the tokens.
SIZES: dict[str, Any] = {
    "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256, "expert_ffn": 128, "shared_ffn": 128,
    "mamba_heads": 16, "mamba_head_dim": 16, "max_sequence": 128, "init_std": 0.1, "dtype": torch.bfloat16,
}  # fmt: skip


def config_of(pattern: str, low: str = "delayed", **values: Any) -> HybridConfig:
    made = {"quantization": "te", "recipe": recipe(low), "cache_weights": True}
    return HybridConfig(pattern=pattern, **(SIZES | made | values))


@pytest.fixture
def group() -> Iterator[Any]:
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield torch.distributed.new_group([0])
    finally:
        torch.distributed.destroy_process_group()


def run_eager(config: HybridConfig, order: Order, steps: int) -> list[list[Value]]:
    side = eager_side(model_of(config, "cuda"), order)
    return [step(side, order, number) for number in range(steps)]


CASES = {
    "all kinds, delayed": ("[M*E]M|[*-]-", INTERLEAVED, "delayed", {}, 20),
    "MTP, delayed": ("*E|-/ME", INTERLEAVED, "delayed", {}, 4),
    "flat, one chunk, delayed": ("M*-E", ONE, "delayed", {}, 5),
    "no cache, delayed": ("[*E]|[M-]", INTERLEAVED, "delayed", {"cache_weights": False}, 4),
    "current": ("[M*E]|[*-]", INTERLEAVED, "current", {}, 4),
    "a layer in high precision": ("[*E]|[M-]", INTERLEAVED, "delayed", {"high_precision_layers": (3,)}, 4),
    "float32": ("[*E]|[M-]", INTERLEAVED, "delayed", {"dtype": torch.float32}, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_graphs_equal_eager(name: str, group: Any) -> None:
    pattern, order, low, values, steps = CASES[name]
    config = config_of(pattern, low, amax_group=group, **values)
    with deterministic("cuda"):
        eager, again = run_eager(config, order, steps), run_eager(config, order, steps)
        for number, (a, b) in enumerate(zip(eager, again, strict=True)):
            assert_equal(number, a, b)  # eager differs from itself: nothing can be judged
        model = model_of(config, "cuda")
        side = graphed_side(model, order)
        assert [part.name.rpartition(".")[2] for part in side.steps.plan.breaks] == ["exchange"] * pattern.count("E")
        seen = []
        for number in range(steps):
            seen.append(step(side, order, number))
            assert_equal(number, seen[-1], eager[number])
    if low == "delayed":
        assert_alive(model, seen)
        assert any(".te_experts.gate_up" in name for name in model.quantized_states())


def test_it_is_quantised() -> None:
    """The same weights and batches in bfloat16 give something else, but not much else; routers stay float32 and plain."""
    tokens = torch.randint(0, 256, (1, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    low = model_of(config_of("[M*E][*-]"), "cuda")
    high = model_of(HybridConfig(pattern="[M*E][*-]", **SIZES), "cuda")
    with torch.no_grad():
        with low.autocast():
            quantised = low(tokens, is_first_microbatch=True).logits
        plain = high(tokens).logits
    assert not torch.equal(quantised, plain)
    # Not element by element: a token whose experts were nearly tied may have gone to another one.
    assert float((quantised - plain).norm() / plain.norm()) < 0.2
    assert low.get_parameter("decoder.layers.0.layers.2.router_weight").dtype is torch.float32
    assert all(".router" not in name for name in low.quantized_states())


def test_grouped_equals_flat() -> None:
    with deterministic("cuda"):
        flat, grouped = (run_eager(config_of(pattern), ONE, 3) for pattern in ("M*EM-", "[M*E][M-]"))
    for number, (a, b) in enumerate(zip(flat, grouped, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert (x.value is None) == (y.value is None)
            assert x.value is None or torch.equal(x.value, y.value), f"step {number}, {x.name} / {y.name}"


def test_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """3 steps, save, load into a model that has not run and into a captured one, 3 steps: as 6 in one go."""
    config = config_of("[M*E]|[*-]")
    with deterministic("cuda"):
        straight = eager_side(model_of(config, "cuda"), INTERLEAVED)
        for number in range(3):
            step(straight, INTERLEAVED, number)
        save(straight.model, tmp_path, straight.optimizer)
        fresh = eager_side(model_of(config, "cuda", seed=6), INTERLEAVED)
        captured = graphed_side(model_of(config, "cuda", seed=7), INTERLEAVED)
        step(captured, INTERLEAVED, 99)
        for side in (fresh, captured):
            load(side.model, tmp_path, side.optimizer)
        for number in range(3, 6):
            expected = step(straight, INTERLEAVED, number)
            assert_equal(number, step(fresh, INTERLEAVED, number), expected)
            assert_equal(number, step(captured, INTERLEAVED, number), expected)


def test_checkpoint_of_another_history_is_refused(tmp_path: Path) -> None:
    side = eager_side(model_of(config_of("[*E]"), "cuda"), ONE)
    step(side, ONE, 0)
    save(side.model, tmp_path)
    longer = config_of("[*E]", recipe=recipe("delayed", amax_history_len=8))
    with pytest.raises(StateError, match=r"hist_fwd \[4, 3\]"):
        load(model_of(longer, "cuda"), tmp_path)


def test_experts_without_any_row() -> None:
    """As on a rank that got no rows: nothing comes out, gradients are zero, and the modules take part in reductions."""
    config = config_of("E")
    experts = model_of(config, "cuda").decoder.layers[0].te_experts
    state = find([experts])
    assert state is not None
    rows = torch.zeros(0, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with state.autocast(config.quant_spec):
        made = experts(rows, [0] * config.experts, True)
    assert made.shape == (0, 128)
    made.sum().backward()
    assert all(state.is_registered(owner) for owner in state.owners(experts))
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_copy_is_refused_once_it_has_run() -> None:
    """A copied module would believe that it is registered: its scales would never move."""
    model = model_of(config_of("*"), "cuda")
    step(eager_side(model, ONE), ONE, 0)
    with pytest.raises(StateError, match="Build twice from one seed"):
        copy.deepcopy(model)


def test_outside_of_a_region_is_refused() -> None:
    model = model_of(config_of("[*E]"), "cuda")
    with pytest.raises(StateError, match=r"layers\.1 .*outside of an autocast region"):
        model(torch.zeros(1, 128, dtype=torch.int64, device="cuda"))


def test_delayed_weight_gradients_are_refused() -> None:
    model = model_of(config_of("[*E]"), "cuda")
    with pytest.raises(PlanError, match="can't be delayed with quantization='te'"), delayed_wgrad(model):
        pass
    assert not any(getattr(module, "delayed", False) for module in model.modules())


def test_same_weights_as_in_high_precision() -> None:
    """The seed gives the same weights whether or not layers are quantised; the experts' are stacked otherwise."""
    low, high = model_of(config_of("M[*E]-"), "cuda"), model_of(HybridConfig(pattern="M[*E]-", **SIZES), "cuda")
    assert isinstance(low, HybridModel)
    theirs = dict(high.named_parameters())
    for name, parameter in low.named_parameters():
        if ".te_experts." in name:
            where, _, rest = name.partition(".te_experts.")
            product, _, number = rest.partition(".weight")
            name = f"{where}.expert_mlps.{number}.{product}.weight"
        assert torch.equal(parameter, theirs.pop(name)), name
    assert not theirs


def test_the_demo() -> None:
    facts: list[demo.CaptureFacts] = []
    result = demo.run(demo.DemoSettings(fp8=True, steps=5), facts.append)
    assert result.equal, result.verdict
    assert facts[0].quantization is not None
    assert facts[0].quantization.startswith("Transformer Engine ")
    assert result.replays > 0
    assert result.eager_calls == 0
