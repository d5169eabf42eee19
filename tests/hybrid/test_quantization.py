"""The hybrid model in FP8 by the reference: graphs equal their eager twin bit for bit, scales and histories too, over the
layer kinds, orders and weight caches; contexts; delayed weight gradients; checkpoints; what is refused."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcap import Order, PlanError, ReplayError, StateError
from graphcap.errors import InputMismatch
from graphcap.fp8_reference import RefFp8Linear, RefManager, RefRecipe
from graphcap.hybrid import (
    GPTModel,
    HybridConfig,
    HybridModel,
    MLPLayer,
    OverlapSchedule,
    convert,
    delayed_wgrad,
    load,
    save,
)
from graphcap.hybrid.checkpoint import read, read_config, read_metadata, write
from tests.hybrid.quantized import INTERLEAVED, ONE, assert_alive, assert_equal, eager_side, graphed_side, model_of, step

TOKENS = 16
SIZES: dict[str, Any] = {
    "hidden": 16, "head_dim": 4, "mamba_head_dim": 4, "mamba_state": 8, "ffn": 24, "experts": 3, "expert_ffn": 16,
    "max_sequence": TOKENS, "init_std": 0.1,
}  # fmt: skip
FOUR = RefRecipe(history_len=4)


def plain(pattern: str, **values: Any) -> HybridConfig:
    return HybridConfig(pattern=pattern, **(SIZES | values))


def quantised(pattern: str, **values: Any) -> HybridConfig:
    return plain(pattern, **({"quantization": "reference", "recipe": FOUR, "cache_weights": True} | values))


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def run(model: HybridModel, seed: int = 1, first: bool | None = True) -> Tensor:
    """Forward and backward in a region; the loss."""
    with model.autocast():
        loss = model(*batch(seed), is_first_microbatch=first).loss
    loss.backward()
    return loss.detach()


CASES: dict[str, tuple[str, Order, dict[str, Any], int]] = {
    "all kinds": ("[M*E]|-", INTERLEAVED, {"shared_ffn": 16}, 20),
    "flat, one chunk": ("-*E", ONE, {}, 2),
    "MTP": ("*|-/E", INTERLEAVED, {}, 2),
    "no cache": ("[*E]|-", INTERLEAVED, {"cache_weights": False, "shared_ffn": 16}, 2),
    "current scaling": ("[*E]|-", INTERLEAVED, {"recipe": RefRecipe(kind="current", history_len=4)}, 2),
    "bfloat16, a layer in high precision": (
        "E|[M-]", INTERLEAVED, {"dtype": torch.bfloat16, "high_precision_layers": (3,)}, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_graphs_equal_eager(name: str) -> None:
    pattern, order, values, steps = CASES[name]
    config = quantised(pattern, **values)
    model = model_of(config)
    ours, theirs = graphed_side(model, order), eager_side(model_of(config), order)
    graphed: Any = ours.steps
    assert [part.name.rpartition(".")[2] for part in graphed.plan.breaks] == ["exchange"] * pattern.count("E")
    seen = []
    for number in range(steps):
        seen.append(step(ours, order, number))
        assert_equal(number, seen[-1], step(theirs, order, number))
    assert graphed.stats.replays == steps * order.chunks * order.microbatches
    if steps > 2:
        assert_alive(model, seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_quantised(dtype: torch.dtype) -> None:
    """The same weights in high precision give something else, but not much else. The router stays as it is."""
    low, high = model_of(quantised("[M*E]-", dtype=dtype)), model_of(plain("[M*E]-", dtype=dtype))
    assert_same_parameters(low, high)
    tokens, labels = batch()
    run(low)  # delayed scaling starts with scales of 1
    with torch.no_grad(), low.autocast():
        quantised_logits = low(tokens, labels, is_first_microbatch=True).logits
    with torch.no_grad():
        logits = high(tokens, labels).logits
    assert not torch.equal(quantised_logits, logits)
    torch.testing.assert_close(quantised_logits, logits, rtol=0.1, atol=0.1 * float(logits.abs().max()))
    kinds = {name.rpartition(".")[2] for name, module in low.named_modules() if isinstance(module, RefFp8Linear)}
    assert kinds == {"in_proj", "out_proj", "qkv", "gate_up", "down"}
    assert low.get_parameter("decoder.layers.0.layers.2.router_weight").dtype is torch.float32


def assert_same_parameters(first: HybridModel, second: HybridModel) -> None:
    for (a, p), (b, q) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert a == b
        assert torch.equal(p, q), a


def test_grouped_equals_flat() -> None:
    """Bits, and contexts: they go by the physical number."""
    patterns, values = ("M*EM-", "[M*E][M-]"), {"shared_ffn": 16, "high_precision_layers": (2, 5)}
    sides = [eager_side(model_of(quantised(pattern, **values)), ONE) for pattern in patterns]
    for number in range(2):
        flat, grouped = (step(side, ONE, number) for side in sides)
        for a, b in zip(flat, grouped, strict=True):
            assert (a.value is None) == (b.value is None)
            assert a.value is None or torch.equal(a.value, b.value), f"{a.name} / {b.name}"
    names = [list(side.model.quantized_states()) for side in sides]
    assert names[0] == names[1]
    assert {name.rpartition(".")[0].split(".expert_mlps")[0] for name in names[0]} == {
        "layers.1", "layers.3", "layers.3.shared_mlp", "layers.4",
    }  # fmt: skip
    assert {"layers.1.in_proj", "layers.3.expert_mlps.2.down", "layers.4.out_proj"} <= {*names[0]}


def test_contexts_of_mtp_layers_carry_the_depth() -> None:
    model = model_of(quantised("*/-/-", high_precision_layers=(1,)))
    assert [*model.quantized_states()] == [f"mtp.{d}.layers.1.mlp.{name}" for d in (1, 2) for name in ("gate_up", "down")]
    assert [layer.context.name for layer in model.all_physical_layers()] == ["layers.1", "mtp.1.layers.1", "mtp.2.layers.1"]


def test_a_copied_model_has_a_manager_of_its_own() -> None:
    model = model_of(quantised("[*E]-"))
    run(model)
    twin = copy.deepcopy(model)
    managers = {id(m.quantized_state) for m in twin.modules() if isinstance(m, RefFp8Linear)}
    assert twin.quantization is not None
    assert managers == {id(twin.quantization.manager)}
    assert id(model.quantization.manager) not in managers  # type: ignore[union-attr]
    before = model.quantized_states()
    run(twin, seed=2)
    for name, state in model.quantized_states().items():
        assert all(torch.equal(value, before[name][key]) for key, value in state.items()), name
    assert torch.equal(run(model, seed=2), run(copy.deepcopy(twin), seed=2)) is False  # the twin's scales have moved on
    chunks = copy.deepcopy(model.chunks(2))
    assert chunks[0].quantization is chunks[1].quantization is not model.quantization


def test_a_cached_weight_is_cast_once_a_step() -> None:
    """With the cache a later microbatch uses the first one's cast although the weight has changed; without it does not."""
    for cached in (True, False):
        layer = MLPLayer(quantised("-", cache_weights=cached))
        assert layer.context.quantization is not None
        x = torch.randn(1, TOKENS, 16, generator=torch.Generator().manual_seed(1))
        made = []
        for first in (True, False):
            with torch.no_grad(), layer.context.quantization.autocast():
                made.append(layer(x, is_first_microbatch=first if cached else None))
            with torch.no_grad():
                layer.mlp.down.weight.mul_(2)
        assert torch.equal(*made) is cached


def test_every_layer_hears_of_the_microbatch() -> None:
    """All layer kinds, experts and MTP depths: a cast stays over a step although weights change; the next makes it anew."""
    model = model_of(quantised("[M*E]-/ME", shared_ffn=16, top_k=3))  # every expert gets every token

    def casts(first: bool) -> dict[str, Tensor]:
        run(model, first=first)
        return {name: state["weight_q"].float() for name, state in model.quantized_states().items()}

    before = casts(True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    kept, anew = casts(False), casts(True)
    for name, values in before.items():
        assert torch.equal(values, kept[name]), name
        assert not torch.equal(values, anew[name]), name


def test_delayed_weight_gradients() -> None:
    """The same bits as without a delay, for every layer kind; popping nothing is an error."""
    config = quantised("[M*E]-", shared_ffn=16)
    model, twin = model_of(config), model_of(config)
    weight = model.get_parameter("decoder.layers.1.mlp.down.weight")
    for microbatch in range(2):
        loss = run(twin, microbatch, microbatch == 0)
        with delayed_wgrad(model):
            assert torch.equal(run(model, microbatch, microbatch == 0), loss)
            before = None if weight.grad is None else weight.grad.clone()
            assert (before is None) is (microbatch == 0)
            for layer in (model.output_layer, *reversed([*model.decoder.layers])):
                layer.backward_dw()
            assert before is None or not torch.equal(before, weight.grad)
            with pytest.raises(StateError, match="no backward has run since the last one"):
                model.decoder.layers[1].backward_dw()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    states = twin.quantized_states()
    for name, state in model.quantized_states().items():
        assert all(torch.equal(value, states[name][key]) for key, value in state.items()), name
    with pytest.raises(StateError, match="are outstanding"), delayed_wgrad(model):
        run(model)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_outside_of_a_region() -> None:
    model = model_of(quantised("M[*E]"))
    with pytest.raises(StateError, match=r"layers\.1 \(MambaLayer\) is quantised and runs outside of an autocast region"):
        model(*batch())
    side = graphed_side(model, INTERLEAVED)
    with pytest.raises(ReplayError), torch.no_grad():
        side.steps.forward("0F0", batch()[0], is_first_microbatch=True)  # type: ignore[arg-type]
    with model.autocast(), pytest.raises(InputMismatch, match="is_first_microbatch=True or False"):
        side.steps.forward("0F0", batch()[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantization": "fp8"}, "quantization='fp8'"),
        ({"quantization": None}, r"recipe=.*without quantization"),
        ({"quantization": None, "recipe": None}, r"cache_weights=True\): expected False without quantization"),
        ({"recipe": "delayed"}, "expected a RefRecipe"),
        ({"recompute": "layer"}, "would collect its amaxes twice"),
        ({"recompute": "norm"}, "would collect its amaxes twice"),
        ({"expert_gemm": "grouped", "dtype": torch.bfloat16}, "expected 'loop' with quantization"),
        ({"high_precision_layers": (3,)}, "physical layer numbers, 1 to 2"),
        ({"high_precision_layers": [1]}, "a tuple of physical layer numbers"),
        ({"quantization": "te", "recipe": None, "hidden": 24}, r"expected 24 \(a width of a product\) a multiple of 16"),
        ({"quantization": "te", "recipe": None, "expert_ffn": 24}, "expert_ffn=24"),
        ({"quantization": "te", "recipe": None, "dtype": torch.float64}, "bfloat16 or float32"),
    ],
)
def test_configs_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        quantised("[*E]", **values)


def test_transformer_engine_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    config = quantised("*", quantization="te", recipe=None)
    with pytest.raises(PlanError, match="needs Transformer Engine, which can't be loaded here"):
        model_of(config)


def test_what_has_no_quantised_form() -> None:
    with pytest.raises(PlanError, match="its layers have no FP8 form"):
        GPTModel(quantised("[*-]"))
    with pytest.raises(PlanError, match="an overlapped schedule"):
        OverlapSchedule(model_of(quantised("[*E]")))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def states_in(folder: Path) -> dict[str, Any]:
    keys = [key for key in read_metadata(folder).state_dict_metadata if key.endswith("._extra_state")]
    return read(folder, keys)


def test_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """5 steps, save, load into a model that has not run and into captured graphs, 5 steps: as 10 in one go."""
    config = quantised("[*E]-")
    straight = eager_side(model_of(config), ONE)
    for number in range(5):
        step(straight, ONE, number)
    save(straight.model, tmp_path, straight.optimizer)
    fresh, captured = eager_side(model_of(config, seed=6), ONE), graphed_side(model_of(config, seed=7), ONE)
    step(captured, ONE, 99)
    for side in (fresh, captured):
        load(side.model, tmp_path, side.optimizer)
    for number in range(5, 10):
        expected = step(straight, ONE, number)
        assert_equal(number, step(fresh, ONE, number), expected)
        assert_equal(number, step(captured, ONE, number), expected)


def test_keys_and_gate(tmp_path: Path) -> None:
    """One entry per quantised weight, beside the weight's; the output layer's empty one under the gate as before."""
    for pattern, output in (("*E-", True), ("[*E]-", False)):
        model = model_of(quantised(pattern, high_precision_layers=(3,)))
        run(model)
        folder = tmp_path / pattern.replace("*", "A")
        save(model, folder)
        found = states_in(folder)
        assert ("output_layer._extra_state" in found) is output
        assert found.pop("output_layer._extra_state", b"") == b""
        moe = "decoder.layers.0" if not output else "decoder.layers.1"
        experts = {f"{moe}.mlp.experts.experts.{i}.linear_fc{n}._extra_state" for i in range(3) for n in (1, 2)}
        attention = {f"decoder.layers.0.self_attention.linear_{name}._extra_state" for name in ("qkv", "proj")}
        assert set(found) == experts | attention
        qkv = found["decoder.layers.0.self_attention.linear_qkv._extra_state"]
        assert {name: tuple(value.shape) for name, value in qkv.items()} == {
            "scale_fwd": (2,), "hist_fwd": (4, 2), "scale_bwd": (1,), "hist_bwd": (4, 1),
        }  # fmt: skip
        assert torch.equal(qkv["scale_fwd"], model.quantized_states()["layers.1.qkv"]["scale_fwd"])
        config = read_config(folder)
        assert config is not None
        assert config.quantization is None


def test_a_model_without_quantisation_refuses_states(tmp_path: Path) -> None:
    model = model_of(quantised("[*-]"))
    run(model)
    save(model, tmp_path)
    other = model_of(plain("[*-]"), seed=6)
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(StateError, match=r"unexpected: .*linear_qkv\._extra_state holds the state of a quantised module"):
        load(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_a_checkpoint_in_high_precision_starts_the_states_anew(tmp_path: Path) -> None:
    high = model_of(plain("[*-]"))
    save(high, tmp_path)
    low = model_of(quantised("[*-]"), seed=6)
    run(low)
    load(low, tmp_path)
    assert_same_parameters(low, high)
    for state in low.quantized_states().values():
        assert set(state) == {"scale_fwd", "hist_fwd", "scale_bwd", "hist_bwd"}  # no cast of the weights before
        assert all(bool((value == (1 if name.startswith("scale") else 0)).all()) for name, value in state.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("other rows", r"linear_qkv\._extra_state: hist_fwd \[4, 2\], hist_bwd \[4, 1\] in the .* hist_fwd \[8, 2\]"),
        ("missing", r"missing: decoder\.layers\.0\.mlp\.linear_fc1\._extra_state, while other quantised layers have theirs"),
        ("bytes", r"linear_fc2\._extra_state: a state in another form"),
        ("a layer too many", r"unexpected: .*linear_qkv\._extra_state holds the state"),
    ],
)
def test_states_that_do_not_fit(change: str, message: str, tmp_path: Path) -> None:
    model = model_of(quantised("[*-]"))
    run(model)
    save(model, tmp_path / "saved")
    entries = read(tmp_path / "saved", [*read_metadata(tmp_path / "saved").state_dict_metadata])
    if change == "missing":
        del entries["decoder.layers.0.mlp.linear_fc1._extra_state"]
    if change == "bytes":
        entries["decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.ones(7, dtype=torch.uint8)
    write(entries, tmp_path / "changed", None)
    recipe = RefRecipe(history_len=8) if change == "other rows" else FOUR
    kept = (1,) if change == "a layer too many" else ()
    other = model_of(quantised("[*-]", recipe=recipe, high_precision_layers=kept), seed=6)
    before = [t.clone() for t in (*other.parameters(), *other.buffers())]
    with pytest.raises(StateError, match=message):
        load(other, tmp_path / "changed")
    assert all(torch.equal(a, b) for a, b in zip(before, (*other.parameters(), *other.buffers()), strict=True))


def test_stages_and_conversion_take_the_states_along(tmp_path: Path) -> None:
    """Two stages save, a converted pattern and a whole model load."""
    config = quantised("*E|*E")
    model = model_of(config)
    run(model)
    save(model.chunks(), tmp_path / "flat")
    convert(tmp_path / "flat", tmp_path / "grouped", "[*E][*E]")
    whole = model_of(replace(config, pattern="[*E][*E]"), seed=6)
    load(whole, tmp_path / "grouped")
    ours, theirs = model.quantized_states(), whole.quantized_states()
    assert [*ours] == [*theirs]
    for name, state in theirs.items():
        assert all(torch.equal(value, ours[name][key]) for key, value in state.items()), name
    assert torch.equal(run(model, seed=2), run(whole, seed=2))
    assert isinstance(whole.quantization.manager, RefManager)  # type: ignore[union-attr]
