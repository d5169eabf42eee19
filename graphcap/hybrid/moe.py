"""`E`: a mixture of experts whose expert part breaks the graph, and the row permutation it is built on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.layers import HybridLayer, SwiGLU, normal
from graphcap.hybrid.tracker import LayerTracker, attach_loss, router_losses
from graphcap.partial_layer import EAGER, GRAPHED, Part

Routed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class MoELayer(HybridLayer):
    """Each token visits the `top_k` of `experts` SwiGLUs that a float32 router gives the highest probability; their
    results are added, weighted by those probabilities, renormalised to sum 1 (with top_k=1 the probability as it is, as
    in Fedus et al. 2021, "Switch transformers"). No token is dropped.

    Three parts: "route" (norm, router, rows sorted by expert) and "combine" (back in token order, weighted sum,
    residual) have static shapes, tokens * top_k rows in all, and are graphed. "experts" is eager: how many rows an
    expert gets is known from the data alone. An expert without rows is not run: the gradients of its weights stay None.

    In training mode the router's losses (see `HybridConfig`) hang on the weights, and `tracker`, if it has one, adds up
    what they were at `slot`.
    """

    symbol = "E"

    def __init__(self, config: HybridConfig, layer_number: int = 1, logical_index: int = 0) -> None:
        super().__init__(config, layer_number, logical_index)
        self.tracker: LayerTracker | None = None
        self.slot = layer_number - 1
        self.router_weight = normal((config.experts, config.hidden), config, dtype=config.exact_dtype)
        if config.expert_gemm == "grouped":
            self.grouped = GroupedSwiGLU(config.experts, config.expert_ffn, config)
        else:
            self.expert_mlps = nn.ModuleList(SwiGLU(config.expert_ffn, config) for _ in range(config.experts))

    def parts(self) -> Sequence[Part]:
        return (
            GRAPHED("route", "hidden -> rows, counts, weights, order, inverse"),
            EAGER("experts", "rows, counts -> routed", reason="rows per expert depend on the data"),
            GRAPHED("combine", "routed, weights, order, inverse, hidden -> hidden"),
        )

    def route(self, hidden: Tensor) -> Routed:
        """hidden: [batch, sequence, hidden]. With T = batch * sequence tokens and k = top_k, returns

        rows: [T * k, hidden], normed tokens, sorted by expert, within an expert by token;
        counts: int64 [experts], rows per expert; weights: [T, k] in at least float32;
        order, inverse: int64 [T * k]; row r is choice `order[r]` of all T * k, choice i is row `inverse[i]`.
        """
        config = self.config
        tokens = self.norm(hidden).flatten(0, 1)
        logits = F.linear(tokens.to(config.exact_dtype), self.router_weight)
        probs = torch.softmax(logits, dim=-1)
        # Only the choice is taken from topk: the backward of its values is a scatter, that of the product below is not.
        chosen = probs.detach().topk(config.top_k, dim=-1).indices
        visits = chosen.unsqueeze(-1) == torch.arange(config.experts, device=hidden.device)  # [T, k, experts]
        picked = (probs.unsqueeze(1) * visits).sum(-1)
        # One choice renormalised would always weigh 1, and the router would get no gradient.
        weights = picked / picked.sum(-1, keepdim=True) if config.top_k > 1 else picked
        order = torch.argsort(chosen.flatten(), stable=True)
        inverse = torch.argsort(order)
        rows = permute_rows(tokens, order, inverse, config.top_k)
        counts = visits.sum((0, 1))
        if self.training:
            weights = self.track(logits, probs, counts, weights)
        return rows, counts, weights, order, inverse

    def track(self, logits: Tensor, probs: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """`weights` with the router's losses attached; values and counts go to the tracker. All on the device."""
        for metric, coefficient, loss in router_losses(self.config, logits, probs, counts):
            scale = None if self.tracker is None else self.tracker.loss_scale
            weights = attach_loss(weights, coefficient * loss, scale)
            if self.tracker is not None:
                self.tracker.record(metric, self.slot, loss)
        if self.tracker is not None and self.config.router_statistics:
            self.tracker.record_rows(self.slot, counts)
        return weights

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each expert on its rows, [T * k, hidden] to the same. The loop reads `counts` on the host."""
        if self.config.expert_gemm == "grouped":
            done: Tensor = self.grouped(rows, counts)
            return done
        pieces = torch.split(rows, counts.tolist())
        made = [mlp(piece) for mlp, piece in zip(self.expert_mlps, pieces, strict=True) if piece.shape[0]]
        return torch.cat(made) if made else rows

    def combine(self, routed: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, hidden: Tensor) -> Tensor:
        """The weighted sum of each token's `top_k` results, added to `hidden`."""
        choices = permute_rows(routed, inverse, order, 1).view(*weights.shape, routed.shape[-1])
        # sum over the axis k of a dense tensor: the same order in every run, where index_add would use atomics.
        mixed = (choices.to(weights.dtype) * weights.unsqueeze(-1)).sum(1)
        return hidden + mixed.to(hidden.dtype).view_as(hidden)


class GroupedSwiGLU(nn.Module):
    """All experts' SwiGLUs in two grouped matrix products; rows of an expert lie together, in the experts' order.

    Every row belongs to an expert, so no row of the outputs is left unwritten (grouped_mm leaves rows behind the last
    offset as they are). An expert without rows gets a gradient of zeros here, where the loop leaves None.
    """

    def __init__(self, experts: int, inner: int, config: HybridConfig) -> None:
        super().__init__()
        self.gate_up = normal((experts, config.hidden, 2 * inner), config)
        self.down = normal((experts, inner, config.hidden), config, std=config.residual_std)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [R, hidden] bfloat16; counts: int64 [experts], their sum is R."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows, self.gate_up, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)


def permute_rows(x: Tensor, source: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """out[r] = x[source[r] // copies]: every row of `x` comes `copies` times, in the order of `source`.

    x: [rows, width]; source: int64 [rows * copies], a permutation; inverse: its inverse. Nothing is checked, since a
    check would read the device. The gradient is deterministic, other than that of indexing: see `_PermuteRows`.
    """
    out: Tensor = _PermuteRows.apply(x, source, inverse, copies)  # type: ignore[no-untyped-call]
    return out


class _PermuteRows(torch.autograd.Function):
    """The backward of x[index] adds gradients where rows repeat: by atomics (no fixed order) or, in deterministic mode,
    after a sort. Here the inverse permutation is at hand, so it is a gather, and then a sum over the copies of each row
    in their own order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, source if copies == 1 else source // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (inverse,) = ctx.saved_tensors
        grad = grads[0].index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.view(grad.shape[0] // ctx.copies, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None
