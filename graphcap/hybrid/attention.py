"""`*`: causal grouped-query attention with rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.errors import PlanError
from graphcap.hybrid.config import HybridConfig, exact_dtype
from graphcap.hybrid.layers import HybridLayer, normal


class AttentionLayer(HybridLayer):
    """Grouped-query attention (Ainslie et al. 2023, "GQA") with rope (Su et al. 2021, "RoFormer"). One graphed part.

    `config.attention` picks the arithmetic. "math": matrix products and a softmax in at least float32, written out, so
    that two runs agree bit for bit on any device. "sdpa": torch's fused attention; on CUDA the backward of the Flash
    and cuDNN kernels repeats itself only under strict `torch.use_deterministic_algorithms(True)`.
    """

    symbol = "*"

    def __init__(self, config: HybridConfig, layer_number: int = 1, logical_index: int = 0, **shared: Any) -> None:
        super().__init__(config, layer_number, logical_index, **shared)
        self.queries = config.heads * config.head_dim
        self.keys = config.kv_heads * config.head_dim
        self.qkv = self.context.linear(normal((self.queries + 2 * self.keys, config.hidden), config))
        self.out_proj = self.context.linear(normal((config.hidden, self.queries), config, std=config.residual_std))
        self.rope = Rope(config)

    def mix(self, normed: Tensor, first: bool | None = None) -> Tensor:
        batch, tokens, _ = normed.shape
        q, k, v = (
            rows.view(batch, tokens, -1, self.config.head_dim).transpose(1, 2)
            for rows in self.qkv(normed, first).split((self.queries, self.keys, self.keys), dim=-1)
        )
        attend = causal_attention if self.config.attention == "math" else _fused_attention
        mixed = attend(self.rope(q), self.rope(k), v)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(batch, tokens, self.queries), first)
        return out


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, where a token sees itself and what came before.

    q: [batch, heads, sequence, head_dim]; k, v: [batch, kv_heads, sequence, head_dim]; the result is shaped as q.
    Query head h reads key head h // (heads / kv_heads). Plain matrix products: deterministic, O(sequence^2) memory.
    """
    batch, heads, tokens, size = q.shape
    shared = q.reshape(batch, k.shape[1], heads // k.shape[1], tokens, size)
    scores = shared @ k.unsqueeze(2).transpose(-1, -2) * size**-0.5
    place = torch.arange(tokens, device=q.device)
    hidden_future = place[None, :] > place[:, None]
    scores = scores.to(exact_dtype(q.dtype)).masked_fill(hidden_future, float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    return (weights @ v.unsqueeze(2)).reshape(batch, heads, tokens, size)


def _fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `causal_attention`, by torch. Keys and values are repeated here since not every kernel shares them."""
    copies = q.shape[1] // k.shape[1]
    k, v = (x.unsqueeze(2).expand(-1, -1, copies, -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Rope(nn.Module):
    """Rotary positions: turns the pair (x[i], x[i + head_dim/2]) of token t by t * base^(-2i/head_dim).

    The tables are made once, so that a graph reads them instead of computing powers anew: [max_sequence, head_dim / 2],
    in at least float32, as buffers that are not saved (they follow from the config).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        half = config.head_dim // 2
        # In float64 whatever the config: at position 8192 a float32 angle is off by 5e-4.
        powers = torch.arange(half, dtype=torch.float64) / half
        angles = torch.arange(config.max_sequence, dtype=torch.float64)[:, None] * config.rope_base**-powers
        self.register_buffer("cos", angles.cos().to(config.exact_dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(config.exact_dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, heads, sequence, head_dim]; the same shape and dtype back."""
        tokens = x.shape[-2]
        if tokens > self.cos.shape[0]:
            raise PlanError(f"{tokens} tokens, but HybridConfig(max_sequence={self.cos.shape[0]}): expected no more")
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
