"""Each layer against something simpler that computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphcap.errors import PatternError, PlanError
from graphcap.hybrid import AttentionLayer, HybridConfig, MambaLayer, MLPLayer, MoELayer
from graphcap.hybrid.attention import Rope, causal_attention
from graphcap.hybrid.layers import HybridLayer, RMSNorm
from graphcap.hybrid.mamba import causal_conv, prefix_sum, ssd_scan
from graphcap.hybrid.moe import permute_rows

EXACT = HybridConfig(dtype=torch.float64, hidden=16, ffn=24, expert_ffn=12, mamba_heads=4, mamba_state=8)


# ---------------------------------------------------------------------------------------------------------------- Mamba


def scan_one_by_one(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The recurrence as it is written down, token by token."""
    heads = x.shape[2]
    b, c = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (b, c))
    state = x.new_zeros(x.shape[0], heads, b.shape[-1], x.shape[-1])
    rows = []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = state * decay + dt[:, t, :, None, None] * b[:, t, :, :, None] * x[:, t, :, None, :]
        rows.append((c[:, t, :, :, None] * state).sum(-2))
    return torch.stack(rows, dim=1) + x * d[:, None]


def scan_inputs(tokens: int, heads: int = 4, groups: int = 2, size: int = 3, state: int = 5) -> list[Tensor]:
    shared = (2, tokens, groups, state)
    shapes = ((2, tokens, heads, size), (2, tokens, heads), (heads,), shared, shared)
    x, dt, a, b, c = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [x, F.softplus(dt), -a.exp(), b, c, torch.randn(heads, dtype=torch.float64)]


@pytest.mark.parametrize("tokens", [1, 4, 7, 16, 23])
@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_chunked_scan_is_the_recurrence(tokens: int, chunk: int) -> None:
    inputs = [t.requires_grad_() for t in scan_inputs(tokens)]
    expected, found = scan_one_by_one(*inputs), ssd_scan(*inputs, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for grad, want in zip(torch.autograd.grad((found * weight).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-11)


def test_no_tokens() -> None:
    with pytest.raises(PlanError, match="0 tokens: expected at least one"):
        MambaLayer(HybridConfig())(torch.zeros(1, 0, 32))


def test_scan_stays_finite_where_decay_is_strong() -> None:
    """exp() of the masked half would overflow: its gradient must not be NaN."""
    x, dt, a, b, c, d = scan_inputs(32)
    inputs = [x.float(), (dt * 100).float(), (a * 100).float(), b.float(), c.float(), d.float()]
    inputs = [t.detach().requires_grad_() for t in inputs]
    grads = torch.autograd.grad(ssd_scan(*inputs, chunk=16).sum(), inputs)
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_prefix_sum_is_cumsum(size: int) -> None:
    x = torch.randn(3, size, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(prefix_sum(x), x.cumsum(-1), rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(prefix_sum, (x,))


def test_conv_is_conv1d() -> None:
    x, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((2, 9, 6), (6, 4), (6,)))
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], bias, groups=6).transpose(1, 2)
    torch.testing.assert_close(causal_conv(x, weight, bias), expected)


def test_mamba_keeps_delicate_parameters_in_float32() -> None:
    layer = MambaLayer(HybridConfig(dtype=torch.bfloat16))
    assert {name for name, p in layer.named_parameters() if p.dtype == torch.float32} == {"A_log", "D", "dt_bias"}
    steps = F.softplus(layer.dt_bias)
    assert bool(((steps > 0.9e-3) & (steps < 0.11)).all())


# ------------------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_torch_s_with_repeated_keys(kv_heads: int) -> None:
    q, k, v = (torch.randn(2, heads, 11, 8, dtype=torch.float64) for heads in (4, kv_heads, kv_heads))
    k_all, v_all = (t.repeat_interleave(4 // kv_heads, dim=1) for t in (k, v))
    expected = F.scaled_dot_product_attention(q, k_all, v_all, is_causal=True)
    torch.testing.assert_close(causal_attention(q, k, v), expected, rtol=1e-10, atol=1e-12)


def test_attention_choices_agree() -> None:
    torch.manual_seed(1)
    plain = AttentionLayer(HybridConfig(dtype=torch.float64, attention="math"))
    fused = AttentionLayer(HybridConfig(dtype=torch.float64, attention="sdpa"))
    fused.load_state_dict(plain.state_dict())
    hidden = torch.randn(2, 13, 32, dtype=torch.float64)
    torch.testing.assert_close(fused(hidden), plain(hidden), rtol=1e-10, atol=1e-12)


def test_rope_depends_on_distance_alone() -> None:
    rope = Rope(EXACT)
    q, k = (torch.randn(8, dtype=torch.float64).expand(1, 1, 20, 8) for _ in range(2))
    scores = (rope(q) @ rope(k).transpose(-1, -2))[0, 0]
    for shift in (1, 5):
        torch.testing.assert_close(scores[shift:, shift:], scores[:-shift, :-shift])
    torch.testing.assert_close(rope(q).norm(dim=-1), q.norm(dim=-1))
    assert not torch.allclose(scores[:, 0], scores[0, 0].expand(20))


def test_rope_refuses_more_tokens_than_its_table() -> None:
    layer = AttentionLayer(HybridConfig(max_sequence=8))
    with pytest.raises(PlanError, match="9 tokens, but HybridConfig"):
        layer(torch.zeros(1, 9, 32))


# ------------------------------------------------------------------------------------------------------------------ MoE


def moe_densely(layer: MoELayer, hidden: Tensor) -> Tensor:
    """All experts on all tokens, then the chosen ones by weight."""
    tokens = layer.norm(hidden).flatten(0, 1)
    probs = torch.softmax(tokens @ layer.router_weight.T, dim=-1)
    values, chosen = probs.topk(layer.config.top_k, dim=-1)
    if layer.config.top_k > 1:
        values = values / values.sum(-1, keepdim=True)
    weights = torch.zeros_like(probs).scatter(1, chosen, values)
    results = torch.stack([mlp(tokens) for mlp in layer.expert_mlps], dim=1)
    return hidden + (results * weights.unsqueeze(-1)).sum(1).view_as(hidden)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (4, 1), (3, 3), (1, 1)])
def test_moe_is_the_dense_sum(experts: int, top_k: int) -> None:
    layer = MoELayer(HybridConfig(dtype=torch.float64, experts=experts, top_k=top_k, init_std=0.3))
    hidden = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    found, expected = layer(hidden), moe_densely(layer, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(found)
    wanted = [hidden, *layer.parameters()]
    grads = torch.autograd.grad((found * weight).sum(), wanted, allow_unused=True)
    dense = torch.autograd.grad((expected * weight).sum(), wanted)
    for grad, want in zip(grads, dense, strict=True):
        torch.testing.assert_close(torch.zeros_like(want) if grad is None else grad, want, rtol=1e-9, atol=1e-11)


def test_expert_without_tokens_has_no_gradient() -> None:
    layer = MoELayer(HybridConfig(experts=8, top_k=2))
    hidden = torch.randn(1, 3, 32)
    layer(hidden).sum().backward()
    counts = layer.before_dispatch(hidden)[1]
    assert 0 in counts.tolist()
    assert counts.sum() == 6
    for count, mlp in zip(counts.tolist(), layer.expert_mlps, strict=True):
        for weight in mlp.parameters():
            assert (weight.grad is None) == (count == 0)


def test_experts_without_any_token() -> None:
    layer = MoELayer(HybridConfig())
    assert layer(torch.zeros(1, 0, 32)).shape == (1, 0, 32)


def test_route_sorts_by_expert_then_token() -> None:
    layer = MoELayer(HybridConfig(top_k=3))
    hidden = torch.randn(2, 5, 32)
    rows, counts, weights, order, inverse, _ = layer.before_dispatch(hidden)
    tokens = layer.norm(hidden).flatten(0, 1)
    assert torch.equal(rows, tokens[order // 3])
    assert torch.equal(order[inverse], torch.arange(30))
    assert counts.dtype == torch.int64
    start = 0
    for count in counts.tolist():
        assert order[start : start + count].tolist() == sorted(order[start : start + count].tolist())
        start += count
    torch.testing.assert_close(weights.sum(-1), torch.ones(10))


@pytest.mark.parametrize("copies", [1, 3])
def test_permute_rows_gradient(copies: int) -> None:
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    source = torch.randperm(4 * copies)
    inverse = source.argsort()
    assert torch.equal(permute_rows(x, source, inverse, copies), x[source // copies])
    assert torch.autograd.gradcheck(lambda t: permute_rows(t, source, inverse, copies), (x,))
    assert torch.autograd.gradgradcheck(lambda t: permute_rows(t, source, inverse, copies), (x,))


def test_combine_gradient() -> None:
    layer = MoELayer(EXACT)
    order = torch.randperm(6)
    shapes = ((6, 16), (3, 2), (1, 3, 16))
    routed, weights, hidden = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    assert torch.autograd.gradcheck(
        lambda r, w, h: layer.combine(r, w, order, order.argsort(), h), (routed, weights, hidden)
    )


# ----------------------------------------------------------------------------------------------------------- all layers


@pytest.mark.parametrize("kind", [MambaLayer, AttentionLayer, MLPLayer, MoELayer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_repeats_itself(kind: type[HybridLayer], dtype: torch.dtype) -> None:
    layer = kind(HybridConfig(dtype=dtype), 3, 2)
    assert (layer.layer_number, layer.logical_index) == (3, 2)
    hidden = torch.randn(2, 19, 32, dtype=dtype, requires_grad=True)
    runs = []
    for _ in range(2):
        out = layer(hidden)
        assert out.dtype == dtype
        assert out.shape == hidden.shape
        wanted = [hidden, *layer.parameters()]
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), wanted, allow_unused=True)])
    for first, second in zip(*runs, strict=True):
        assert (first is None and second is None) or torch.equal(first, second)
        assert first is None or (bool(torch.isfinite(first).all()) and bool(first.count_nonzero()))


def test_mlp_is_swiglu() -> None:
    layer = MLPLayer(EXACT)
    hidden = torch.randn(2, 3, 16, dtype=torch.float64)
    gate, up = layer.mlp.gate_up.weight.chunk(2)
    normed = F.rms_norm(hidden, (16,), eps=EXACT.norm_eps)
    expected = hidden + (F.silu(normed @ gate.T) * (normed @ up.T)) @ layer.mlp.down.weight.T
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-10, atol=1e-12)


def test_norm_is_torch_s() -> None:
    norm = RMSNorm(16, EXACT)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, EXACT.norm_eps), rtol=1e-12, atol=0)


# --------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden": 0}, "hidden=0"),
        ({"vocab": True}, "vocab=True"),
        ({"ffn": 2.0}, "ffn=2.0"),
        ({"kv_heads": 3}, "divisor of heads=4"),
        ({"head_dim": 7}, "even number"),
        ({"top_k": 5}, "at most experts=4"),
        ({"mamba_groups": 3}, "divisor of mamba_heads=8"),
        ({"norm_eps": 0.0}, "above 0"),
        ({"rope_base": float("nan")}, "finite number"),
        ({"init_std": "x"}, "finite number"),
        ({"dtype": torch.float16}, "torch.bfloat16"),
        ({"attention": "flash"}, "'math' or 'sdpa'"),
        ({"tie_embeddings": 1}, "True or False"),
    ],
)
def test_config_refuses(values: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match="expected") as caught:
        HybridConfig(**values)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_config_refuses_a_bad_pattern() -> None:
    with pytest.raises(PatternError, match="nested"):
        HybridConfig(pattern="[[M]]")


def test_large_config() -> None:
    config = HybridConfig.large()
    assert (config.hidden, config.experts, config.top_k) == (2048, 128, 8)
    assert config.layers.counts() == {"M": 8, "*": 8, "-": 0, "E": 8}
    with torch.device("meta"):
        layer = MoELayer(config)
    assert round(sum(p.numel() for p in layer.parameters()) / 1e9, 1) == 0.6


def test_grouped_experts_compute_what_the_loop_computes() -> None:
    """The same weights in two grouped products: equal up to the rounding of bfloat16, empty experts included."""
    config = HybridConfig(dtype=torch.bfloat16, expert_gemm="grouped", experts=6, top_k=2)
    layer = MoELayer(config)
    loop = MoELayer(HybridConfig(dtype=torch.bfloat16, experts=6, top_k=2))
    for number, mlp in enumerate(loop.expert_mlps):
        with torch.no_grad():
            mlp.gate_up.weight.copy_(layer.grouped.gate_up[number].T)
            mlp.down.weight.copy_(layer.grouped.down[number].T)
    rows = torch.randn(12, config.hidden, dtype=torch.bfloat16)
    counts = torch.tensor([3, 0, 4, 1, 0, 4])
    torch.testing.assert_close(layer.exchange(rows, counts), loop.exchange(rows, counts), rtol=2e-2, atol=1e-4)
