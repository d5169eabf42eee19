"""`M`: Mamba-2 (Dao & Gu 2024, "Transformers are SSMs: generalized models and efficient algorithms through structured
state space duality"), in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.errors import PlanError
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.layers import HybridLayer, RMSNorm, exactly, normal


class MambaLayer(HybridLayer):
    """in_proj, causal convolution, selective scan, gated norm, out_proj. One graphed part.

    A_log, D, dt_bias ([mamba_heads]) and the scan are float32 (float64 in a float64 model).
    """

    symbol = "M"

    def __init__(self, config: HybridConfig, layer_number: int = 1, logical_index: int = 0, **shared: Any) -> None:
        super().__init__(config, layer_number, logical_index, **shared)
        heads, inner, exact = config.mamba_heads, config.mamba_inner, config.exact_dtype
        self.shared = config.mamba_groups * config.mamba_state  # width of B, and of C
        self.in_proj = self.context.linear(normal((2 * inner + 2 * self.shared + heads, config.hidden), config))
        bound = config.mamba_conv**-0.5
        taps = torch.empty(inner + 2 * self.shared, config.mamba_conv, dtype=config.dtype)
        self.conv_weight = nn.Parameter(taps.uniform_(-bound, bound))
        self.conv_bias = nn.Parameter(torch.zeros(inner + 2 * self.shared, dtype=config.dtype))
        # As in the paper's code release: decay rates from 1 to 16, time steps from 0.001 to 0.1, uniform in their log.
        self.A_log = nn.Parameter(torch.empty(heads, dtype=exact).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads, dtype=exact))
        steps = torch.empty(heads, dtype=exact).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())  # softplus of it gives the steps
        self.gated_norm = RMSNorm(inner, config)
        self.out_proj = self.context.linear(normal((config.hidden, inner), config, std=config.residual_std))

    def mix(self, normed: Tensor, first: bool | None = None) -> Tensor:
        batch, tokens, _ = normed.shape
        config = self.config
        inner, exact = config.mamba_inner, config.exact_dtype
        gate, mixed, steps = self.in_proj(normed, first).split((inner, inner + 2 * self.shared, config.mamba_heads), dim=-1)
        mixed = F.silu(causal_conv(mixed.to(exact), self.conv_weight.to(exact), self.conv_bias.to(exact)))
        x, b, c = torch.split(mixed, [inner, self.shared, self.shared], dim=-1)
        with exactly(x):
            y = ssd_scan(
                x.reshape(batch, tokens, config.mamba_heads, config.mamba_head_dim),
                F.softplus(steps.to(exact) + self.dt_bias),
                -self.A_log.exp(),
                b.reshape(batch, tokens, config.mamba_groups, config.mamba_state),
                c.reshape(batch, tokens, config.mamba_groups, config.mamba_state),
                self.D,
                chunk=config.mamba_chunk,
            ).reshape(batch, tokens, inner)
        gated = (y * F.silu(gate.to(exact))).to(normed.dtype)
        out: Tensor = self.out_proj(self.gated_norm(gated), first)
        return out


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y[t] = bias + sum over i of weight[:, i] * x[t - taps + 1 + i], each channel by itself; tokens before 0 are 0.

    x: [batch, sequence, channels], weight: [channels, taps], bias: [channels]; the result is shaped as x.
    One product per tap rather than conv1d: cuDNN picks its algorithm by trying them out, which a capture can't hold and
    which may differ between two runs.
    """
    tokens, taps = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    y = bias
    for tap in range(taps):
        y = y + padded[:, tap : tap + tokens] * weight[:, tap]
    return y


def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, *, chunk: int) -> Tensor:
    """The selective scan, by blocks of `chunk` tokens (section 6 of the paper): for each head, with B, C of its group,

        state[t] = exp(dt[t] a) state[t-1] + dt[t] B[t] x[t]^T        y[t] = C[t]^T state[t] + d x[t]

    x: [batch, sequence, heads, head_dim]; dt: [batch, sequence, heads], positive; a (negative), d: [heads];
    b, c: [batch, sequence, groups, state]. All of one dtype, at least float32; at least one token, else PlanError. The
    result is shaped as x.
    Inside a block all tokens at once, by matrix products; from block to block the state is carried in a Python loop,
    whose length is a shape, not data: a graph holds it.
    """
    batch, tokens, heads, size = x.shape
    groups, state = b.shape[2:]
    if tokens == 0:
        raise PlanError("a Mamba layer got 0 tokens: expected at least one")
    chunk = min(chunk, tokens)
    rest = -tokens % chunk
    # A padded token has dt = 0: it neither decays the state nor adds to it.
    x_pad, b, c = (F.pad(t, (0, 0, 0, 0, 0, rest)) for t in (x, b, c))
    dt = F.pad(dt, (0, 0, 0, rest))
    blocks = (tokens + rest) // chunk

    # [batch, block, group, head of group, token of block, ...]
    steps = dt.view(batch, blocks, chunk, groups, heads // groups).permute(0, 1, 3, 4, 2)
    inputs = x_pad.view(batch, blocks, chunk, groups, heads // groups, size).permute(0, 1, 3, 4, 2, 5)
    inputs = inputs * steps.unsqueeze(-1)
    b = b.view(batch, blocks, chunk, groups, 1, state).permute(0, 1, 3, 4, 2, 5)
    c = c.view(batch, blocks, chunk, groups, 1, state).permute(0, 1, 3, 4, 2, 5)
    # log of the decay from the block's start up to and with each token
    decay = prefix_sum(steps * a.view(groups, heads // groups, 1))

    place = torch.arange(chunk, device=x.device)
    future = place[None, :] > place[:, None]
    # Masked before exp: the decay of a later token onto an earlier one would overflow, and inf * 0 is NaN in backward.
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    y = (c @ b.transpose(-1, -2) * between) @ inputs

    to_end = (decay[..., -1:] - decay).exp().unsqueeze(-1)
    added = b.transpose(-1, -2) @ (inputs * to_end)  # [batch, block, group, head, state, head_dim]
    through = decay[..., -1, None, None].exp()
    carried = torch.zeros_like(added[:, 0])
    before = []
    for block in range(blocks):
        before.append(carried)
        carried = carried * through[:, block] + added[:, block]
    y = y + (c @ torch.stack(before, dim=1)) * decay.exp().unsqueeze(-1)
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, tokens + rest, heads, size)[:, :tokens]
    return y + x * d.view(heads, 1)


def prefix_sum(x: Tensor) -> Tensor:
    """cumsum over the last axis by doubling: log2(size) additions of the tensor to itself, shifted.

    torch lists floating point cumsum on CUDA among what strict deterministic mode refuses; additions of whole tensors
    have one order, forward and backward.
    """
    shift, size = 1, x.shape[-1]
    while shift < size:
        x = x + F.pad(x[..., : size - shift], (shift, 0))
        shift *= 2
    return x
