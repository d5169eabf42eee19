"""What the layers of the hybrid model share (base class, norm, linear, SwiGLU), and the dense MLP layer.

Every layer is pre-norm and owns its residual: it takes and returns the residual stream `hidden`, [batch, sequence,
hidden] in `config.dtype`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.quantization import LayerContext, Quantization, ReferenceLinear
from graphcap.hybrid.recompute import checkpointed
from graphcap.hybrid.wgrad import DelayedLinear
from graphcap.partial_layer import EAGER, GRAPHED, Part, PartialLayer


class HybridLayer(PartialLayer):
    """One physical layer.

    symbol: what it is in a pattern. layer_number: physical, from 1. logical_index: of its item, from 0; members of a
    group share it. context: how its linear layers compute (`quantization`: the model's, which its layers share); where
    the config quantises, a layer also takes `is_first_microbatch`.
    """

    symbol: ClassVar[str]

    def __init__(
        self,
        config: HybridConfig,
        layer_number: int = 1,
        logical_index: int = 0,
        *,
        quantization: Quantization | None = None,
        mtp_depth: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.inputs = f"hidden{config.first_microbatch_input}"
        self.context = LayerContext.of(config, layer_number, quantization, mtp_depth)
        self.layer_number = layer_number
        self.logical_index = logical_index
        self.norm = RMSNorm(config.hidden, config)
        self.delayed = False  # weight gradients wait for backward_dw; see wgrad.py

    def parts(self) -> Sequence[Part]:
        if self.config.recompute == "layer":
            return (EAGER("recomputed", "hidden -> hidden", reason="computed again in the backward"),)
        return self.plain_parts()

    def plain_parts(self) -> Sequence[Part]:
        """The parts without recomputation of the whole layer."""
        return (self.static("whole", f"hidden{self.config.first_microbatch} -> hidden"),)

    def static(self, method: str, signature: str) -> Part:
        """A part whose shapes are static."""
        return static_part(method, signature, delayed=self.delayed)

    def recomputed(self, hidden: Tensor) -> Tensor:
        """The layer, of which the backward keeps the input alone."""
        return checkpointed(self.straight, hidden)

    def straight(self, hidden: Tensor) -> Tensor:
        """The layer from input to output, part after part, without recomputation of the whole."""
        return self.whole(hidden)

    def need_backward_dw(self) -> bool:
        """False: `backward_dw` passes the call on to modules below, and has no work of its own."""
        return False

    def backward_dw(self) -> None:
        """The delayed weight gradients of one backward: of the linear layers, oldest first. Nothing to do where weight
        gradients are not delayed (`delayed_wgrad`); StateError where they are and none is outstanding."""
        for module in self.modules():
            if isinstance(module, DelayedLinear | ReferenceLinear):
                module.backward_dw()

    def whole(self, hidden: Tensor, first: bool | None = None) -> Tensor:
        """The layer with its norm and residual, for a layer that no data-dependent shape breaks. first: whether weights
        have changed since the last call, where quantised weights are cached."""
        self.context.require_region(self)
        out: Tensor = hidden + self.mix(self.norm(hidden), first)
        return out

    def mix(self, normed: Tensor, first: bool | None = None) -> Tensor:
        """What the layer adds to the residual stream; shapes and dtypes as `hidden`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.symbol!r}, layer_number={self.layer_number}, logical_index={self.logical_index}"


def static_part(method: str, signature: str, *, delayed: bool) -> Part:
    """A part whose shapes are static: graphed, unless its weight gradients are delayed. Those wait in a queue on the host,
    which a graph would not fill at replay; a graph's own W step delays them."""
    kind, reason = (EAGER, "weight gradients are delayed") if delayed else (GRAPHED, None)
    return kind(method, signature, reason=reason)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019), computed in at least float32."""

    def __init__(self, size: int, config: HybridConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.exact_dtype = config.exact_dtype
        self.weight = nn.Parameter(torch.ones(size, dtype=config.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x, self.weight)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """`forward` with a weight that the caller holds."""
        # A node of its own also where nothing is converted: the two gradients of x are added to each other first, and
        # then to the residual's, whether the norm is a part of a larger graph, recomputed, or a slot of a schedule.
        exact = x.view_as(x) if x.dtype == self.exact_dtype else x.to(self.exact_dtype)
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return (exact * scale * weight.to(self.exact_dtype)).to(x.dtype)


def exactly(x: Tensor) -> AbstractContextManager[Any]:
    """A region for products that stay in the dtype of their factors, also where torch.autocast is on around it."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU variants improve transformer"); [..., hidden] to the same."""

    def __init__(self, inner: int, config: HybridConfig, context: LayerContext) -> None:
        super().__init__()
        self.gate_up: Any = context.linear(normal((2 * inner, config.hidden), config))
        self.down: Any = context.linear(normal((config.hidden, inner), config, std=config.residual_std))

    def forward(self, x: Tensor, first: bool | None = None) -> Tensor:
        gate, up = self.gate_up(x, first).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up, first)
        return out

    def need_backward_dw(self) -> bool:
        """False: `backward_dw` passes the call on to modules below, and has no work of its own."""
        return False

    def backward_dw(self) -> None:
        """The delayed weight gradients of one backward."""
        self.down.backward_dw()
        self.gate_up.backward_dw()


class MLPLayer(HybridLayer):
    """`-`: a dense SwiGLU. One graphed part."""

    symbol = "-"

    def __init__(self, config: HybridConfig, layer_number: int = 1, logical_index: int = 0, **shared: Any) -> None:
        super().__init__(config, layer_number, logical_index, **shared)
        self.mlp = SwiGLU(config.ffn, config, self.context)

    def mix(self, normed: Tensor, first: bool | None = None) -> Tensor:
        out: Tensor = self.mlp(normed, first)
        return out


def linear(inputs: int, outputs: int, config: HybridConfig, *, std: float | None = None) -> DelayedLinear:
    """A linear layer without bias in `config.dtype`, its weight normal with `std` (default: config.init_std)."""
    return DelayedLinear(inputs, outputs, normal((outputs, inputs), config, std=std))


def normal(
    shape: Sequence[int], config: HybridConfig, *, std: float | None = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """A parameter on the default device, normal with `std` (default: config.init_std), in `dtype` (config.dtype)."""
    weight = torch.empty(*shape, dtype=dtype or config.dtype)
    return nn.Parameter(weight.normal_(std=config.init_std if std is None else std))
