"""Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2): depth d predicts the token 1 + d ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.errors import PlanError
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.layers import HybridLayer, RMSNorm, linear, static_part
from graphcap.hybrid.quantization import Quantization
from graphcap.hybrid.stack import build_layers
from graphcap.partial_layer import GRAPHED, Part, PartialLayer, nested

IGNORED_LABEL = -100
"""Tokens with this label do not count in the loss."""


class MTPDepth(PartialLayer):
    """One depth: the hidden states of the depth before (of the decoder, normed, for the first) and the embedding of the
    tokens `depth` ahead, both normed, go through one projection and the layers of the MTP pattern.

    depth: from 1. `hidden`, `embedded`: [batch, sequence, hidden]; the result is shaped alike and normed. The layers
    number themselves from 1 in every depth.
    """

    inputs = "hidden, embedded"
    outputs = "hidden"

    def __init__(self, config: HybridConfig, depth: int, quantization: Quantization | None = None) -> None:
        super().__init__()
        self.inputs = f"hidden, embedded{config.first_microbatch_input}"
        self.depth = depth
        self.enorm = RMSNorm(config.hidden, config)
        self.hnorm = RMSNorm(config.hidden, config)
        self.eh_proj = linear(2 * config.hidden, config.hidden, config)
        self.mtp_model_layer = nn.Module()  # a level of names: see the published keys
        self.mtp_model_layer.layers = nn.ModuleList(
            build_layers(tuple(config.layers.mtp), config, quantization=quantization, mtp_depth=depth)
        )
        self.final_layernorm = RMSNorm(config.hidden, config)
        signature = f"hidden{config.first_microbatch} -> hidden"
        inner = [nested(f"mtp_model_layer.layers.{i}", signature) for i in range(len(config.layers.mtp))]
        self._rest = (*inner, GRAPHED("leave", "hidden -> hidden"))

    def parts(self) -> Sequence[Part]:
        return (static_part("enter", "hidden, embedded -> hidden", delayed=self.eh_proj.delayed), *self._rest)

    def need_backward_dw(self) -> bool:
        """False: `backward_dw` passes the call on to modules below, and has no work of its own."""
        return False

    def backward_dw(self) -> None:
        """The delayed weight gradients of one backward, the last layer first, the projection at the end."""
        for layer in reversed(list(self.physical_layers())):
            layer.backward_dw()
        self.eh_proj.backward_dw()

    def enter(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Norm both, join, project."""
        out: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return out

    def leave(self, hidden: Tensor) -> Tensor:
        """This depth's own final norm."""
        out: Tensor = self.final_layernorm(hidden)
        return out

    def physical_layers(self) -> Iterator[HybridLayer]:
        """The layers in order."""
        return (layer for layer in self.mtp_model_layer.modules() if isinstance(layer, HybridLayer))

    def extra_repr(self) -> str:
        return f"depth={self.depth}"


class MTPBlock(nn.Module):
    """Names only: `layers.<depth - 1>`."""

    def __init__(self, config: HybridConfig, quantization: Quantization | None = None) -> None:
        super().__init__()
        depths = range(1, config.layers.mtp_depth + 1)
        self.layers = nn.ModuleList(MTPDepth(config, depth, quantization) for depth in depths)

    def depths(self) -> Iterator[MTPDepth]:
        """In order."""
        return (layer for layer in self.layers if isinstance(layer, MTPDepth))


def roll_left(x: Tensor, by: int, fill: int) -> Tensor:
    """x[:, t + by] at place t, and `fill` in the last `by` places, where the sequence has nothing to show. x: [batch,
    sequence], whole numbers or bool."""
    return F.pad(x[:, by:], (0, min(by, x.shape[1])), value=fill)


def depth_targets(depth: int, labels: Tensor | None, loss_mask: Tensor | None, tokens: Tensor | None) -> Tensor:
    """The labels of one depth, int64 [batch, sequence], -100 where there are none or the mask says False.

    labels: of the main loss, the token that comes next. Without them (reinforcement learning has none) they are the
    tokens rolled left by one; either way, depth d reads them another d places ahead. loss_mask: bool; it belongs to the
    labels, so it is rolled as far as they are.
    """
    if labels is None:
        assert tokens is not None
        labels = roll_left(tokens, 1, IGNORED_LABEL)
    return roll_left(masked(labels, loss_mask), depth, IGNORED_LABEL)  # masked, then rolled: that is in lockstep


def masked(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    """`labels` with -100 where the mask says False. PlanError for a mask that is not bool or has another shape: of a mask of
    numbers it could not be said which of them count."""
    if loss_mask is None:
        return labels
    if loss_mask.dtype != torch.bool or loss_mask.shape != labels.shape:
        raise PlanError(
            f"loss_mask: {loss_mask.dtype} of shape {list(loss_mask.shape)}: expected torch.bool of the labels' shape "
            f"{list(labels.shape)}, True where a token counts (mask > 0 makes one of a mask of numbers)"
        )
    return labels.masked_fill(~loss_mask, IGNORED_LABEL)


def check_labels(labels: Tensor, batch: int, sequence: int) -> None:
    """PlanError for labels of another shape than [batch, sequence]: transposed ones, once flattened, would fit."""
    if tuple(labels.shape) != (batch, sequence):
        raise PlanError(
            f"labels of shape {list(labels.shape)}: expected that of the tokens, [batch, sequence] = {[batch, sequence]}"
        )


def mean_cross_entropy(logits: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean over the tokens that count, in `dtype`; 0 (not NaN) where none does, as in a sequence shorter than the depth.

    logits: [batch, sequence, vocab]; labels: int64 [batch, sequence].
    """
    flat = labels.flatten()
    total = F.cross_entropy(logits.to(dtype).flatten(0, -2), flat, ignore_index=IGNORED_LABEL, reduction="sum")
    return total / (flat != IGNORED_LABEL).sum().clamp(min=1)
