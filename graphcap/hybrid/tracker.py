"""What the routers and the MTP layers report: sums on the device, one slot per layer and per MTP depth.

A write is device work in place on buffers that stay where they are, so it may stand inside a graph: capture puts the
buffers back as they were, and every replay adds what an eager forward adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphcap.errors import PlanError
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.first_order import refuse_create_graph

AUX_LOSS: Final = "aux_loss"
Z_LOSS: Final = "z_loss"
MTP_LOSS: Final = "mtp_loss"
METRICS: Final = (AUX_LOSS, Z_LOSS, MTP_LOSS)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric since the last reset. per_slot: mean per slot over what was recorded there, 0.0 where nothing was.
    mean: over all records, that is over layers and microbatches. records: how many there were."""

    per_slot: tuple[float, ...]
    mean: float
    records: int


@dataclass(frozen=True, slots=True)
class TrackerReport:
    """What a `LayerTracker` has gathered; losses without their coefficients. rows: per slot, rows that each expert
    got (a token counts `top_k` times)."""

    aux_loss: Metric
    z_loss: Metric
    mtp_loss: Metric
    rows: tuple[tuple[int, ...], ...]


class LayerTracker(nn.Module):
    """Sums of per-layer values of a model with `layers` main layers and `mtp_depth` MTP depths.

    Slot `layer_number - 1` belongs to a main layer, slot `layers + depth - 1` to everything of MTP depth `depth` (from
    1), which is given and never derived from a layer's number: all depths number their layers alike. Pipeline stages
    have trackers of the same length, so that they can be added up.

    sums: [3, layers + mtp_depth], the metrics in the order of `METRICS`, at least float32; records: int64, how often
    each was added to; rows: int64 [layers + mtp_depth, experts]. loss_scale: 0-dim, 1 at first: the gradient that
    attached losses start from. With a loss scaler, or where the mean over microbatches is trained, set it to the factor
    that the main loss gets, in place (`tracker.loss_scale.fill_(...)`). Nothing of this is in the state dict.
    """

    sums: Tensor
    records: Tensor
    rows: Tensor
    loss_scale: Tensor

    def __init__(self, layers: int, mtp_depth: int = 0, experts: int = 0, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers, self.mtp_depth = layers, mtp_depth
        size = layers + mtp_depth
        self.register_buffer("sums", torch.zeros(len(METRICS), size, dtype=dtype), persistent=False)
        self.register_buffer("records", torch.zeros(len(METRICS), size, dtype=torch.int64), persistent=False)
        self.register_buffer("rows", torch.zeros(size, experts, dtype=torch.int64), persistent=False)
        self.register_buffer("loss_scale", torch.ones((), dtype=dtype), persistent=False)

    @classmethod
    def of(cls, config: HybridConfig) -> LayerTracker:
        """The tracker of a model: as long as its whole pattern, whatever a stage holds of it."""
        pattern = config.layers
        return cls(pattern.physical_layers, pattern.mtp_depth, config.experts, dtype=config.exact_dtype)

    def slot(self, layer_number: int, mtp_depth: int | None = None) -> int:
        """The index of a layer's values. layer_number: physical, from 1; mtp_depth: from 1, None in the main stack."""
        if mtp_depth is not None:
            if not 1 <= mtp_depth <= self.mtp_depth:
                raise PlanError(f"mtp_depth={mtp_depth}: expected 1 to {self.mtp_depth}, the depths of the pattern")
            return self.layers + mtp_depth - 1
        if not 1 <= layer_number <= self.layers:
            raise PlanError(
                f"layer_number={layer_number}: expected 1 to {self.layers}, the layers of the main pattern (a layer of "
                "an MTP depth is told its mtp_depth)"
            )
        return layer_number - 1

    def record(self, metric: str, slot: int, value: Tensor) -> None:
        """Add a 0-dim value, on the device; PlanError for a metric that is none of `METRICS`."""
        if metric not in METRICS:
            raise PlanError(f"metric {metric!r}: expected one of {', '.join(METRICS)}")
        index = METRICS.index(metric)
        with torch.no_grad():
            self.sums[index, slot].add_(value.detach())
            self.records[index, slot].add_(1)

    def record_rows(self, slot: int, counts: Tensor) -> None:
        """Add rows per expert, int64 [experts]."""
        with torch.no_grad():
            self.rows[slot].add_(counts)

    def reset(self) -> None:
        """Back to nothing, in place; loss_scale stays."""
        for buffer in (self.sums, self.records, self.rows):
            buffer.zero_()

    def report(self, groups: Sequence[dist.ProcessGroup] = ()) -> TrackerReport:
        """Read it all, on the host. groups: process groups to add up over first, such as the pipeline's (each slot is
        filled on one stage) and the data-parallel one (means stay means): a collective call on every rank of them. The
        tracker itself is left as it is."""
        sums, records, rows = (buffer.detach().clone() for buffer in (self.sums, self.records, self.rows))
        for group in groups:
            for buffer in (sums, records, rows):
                dist.all_reduce(buffer, group=group)
        means = (sums / records.clamp(min=1)).tolist()
        aux_loss, z_loss, mtp_loss = (
            Metric(tuple(means[i]), float(sums[i].sum()) / max(1, int(records[i].sum())), int(records[i].sum()))
            for i in range(len(METRICS))
        )
        return TrackerReport(aux_loss, z_loss, mtp_loss, tuple(map(tuple, rows.tolist())))

    def extra_repr(self) -> str:
        return f"{self.layers} layers, {self.mtp_depth} MTP depths"


def router_losses(
    config: HybridConfig, logits: Tensor, probs: Tensor, counts: Tensor
) -> tuple[tuple[str, float, Tensor], ...]:
    """The losses that the config asks for: (metric, coefficient, 0-dim value).

    logits, probs: [T, experts] in at least float32; counts: int64 [experts], of T * top_k choices.
    aux_loss: experts * sum over e of (share of choices that fell on e) * (mean probability of e), 1 when balanced (Fedus
    et al. 2021, "Switch transformers", eq. 4). z_loss: mean of logsumexp(logits)^2 (Zoph et al. 2022, "ST-MoE", eq. 5).
    """
    losses = []
    if config.aux_loss:
        share = counts.to(probs.dtype) / (probs.shape[0] * config.top_k)
        losses.append((AUX_LOSS, config.aux_loss, config.experts * (share * probs.mean(0)).sum()))
    if config.z_loss:
        losses.append((Z_LOSS, config.z_loss, torch.logsumexp(logits, dim=-1).square().mean()))
    return tuple(losses)


def attach_loss(carrier: Tensor, loss: Tensor, scale: Tensor | None = None) -> Tensor:
    """`carrier`, unchanged; whenever a gradient comes back through it, `loss` (0-dim) is differentiated as well, from
    `scale` (0-dim, read when the backward runs; None means 1). So a loss needs no way of its own to the end of the
    model, and no place in what pipeline stages send each other."""
    out: Tensor = _AttachLoss.apply(carrier, loss, scale)  # type: ignore[no-untyped-call]
    return out


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        ctx.scale = torch.ones_like(loss) if scale is None else scale
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # A second backward comes through here as well, and the loss would be in it once too often.
        refuse_create_graph("attached losses (aux_loss, z_loss, mtp_loss)")
        return grads[0], ctx.scale.clone(), None
