"""Schedule units: each logical layer as five slots, of which dense layers leave some empty.

| slot | stream | of `E`, and of a group that ends in one | of `-` | of `M`, `*` |
|---|---|---|---|---|
| pre_dispatch | compute | the layers before it; norm, shared expert, router, sort | the layers before it | the layer |
| dispatch | comm | all-to-all of the rows | | |
| mlp | compute | experts | norm, SwiGLU, residual | |
| combine | comm | all-to-all back, weighted sum, shared expert's result, residual | | |
| mtp_post | compute | | | |

The layers of an MTP depth are units as well, behind those of the decoder: the first one's slot 1 begins with the depth's
norms and projection (in the first depth also with the final norm, whose result the head reads too), the last one's slot 5
is the depth's own final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from graphcap.errors import PlanError
from graphcap.hybrid.layers import HybridLayer, MLPLayer, RMSNorm
from graphcap.hybrid.model import HybridChunk
from graphcap.hybrid.moe import MoELayer
from graphcap.hybrid.mtp import MTPDepth
from graphcap.hybrid.schedule_nodes import Slot
from graphcap.hybrid.stack import LayerGroup
from graphcap.hybrid.wgrad import set_delayed
from graphcap.partial_layer import GRAPHED, Part, PartialLayer

SLOTS: Final = ("pre_dispatch", "dispatch", "mlp", "combine", "mtp_post")

KEPT: Final = ("weights", "order", "inverse", "residual")
"""What slot 1 of an `E` unit hands to slot 4 past the experts (and `shared`, if there is a shared expert)."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """The way into an MTP depth. final_norm: the decoder's, in the first depth, whose states are not normed yet."""

    depth: MTPDepth
    final_norm: RMSNorm | None


class PreDispatch(PartialLayer):
    """Slot 1 as a callable of its own, which a graph can hold (and holds, if `graphed`): hidden -> what the unit's later
    slots read."""

    def __init__(
        self,
        before: Sequence[HybridLayer],
        moe: MoELayer | None,
        entrance: Entrance | None = None,
        *,
        graphed: bool = False,
    ) -> None:
        super().__init__()
        # Registered for capture's checks of parameters and modules; names do not matter, the model owns the layers. Of
        # an `E` only what runs here: its experts may change (their weight gradients are delayed or not) under a graph.
        for place, layer in enumerate(before):
            self.add_module(f"layer{place}", layer)
        if moe is not None:
            self.norm, self.shared_mlp, self.router_weight = moe.norm, moe.shared_mlp, moe.router_weight
            self.tracker = moe.tracker  # capture puts its sums back
        if entrance is not None:
            self.final_norm = entrance.final_norm
            self.enorm, self.hnorm = entrance.depth.enorm, entrance.depth.hnorm
            self.eh_proj = entrance.depth.eh_proj
        self.graphed = graphed
        self._before, self._moe, self._entrance = tuple(before), (moe,), entrance
        self.reads = ("hidden",) if entrance is None else ("hidden", f"ahead_{entrance.depth.depth}")
        self.inputs = ", ".join(self.reads)
        self.makes: tuple[str, ...] = ("hidden",)
        if moe is not None:
            shared = ("shared",) if moe.shared_mlp is not None else ()
            self.makes = ("rows", "counts", *KEPT, *shared)
        if entrance is not None and entrance.final_norm is not None:
            self.makes += ("hidden_0",)
        self.outputs = ", ".join(self.makes)
        self.has_linear = bool(before) or entrance is not None or (moe is not None and moe.shared_mlp is not None)

    def parts(self) -> Sequence[Part]:
        return (GRAPHED("compute", f"{self.inputs} -> {self.outputs}"),)

    def compute(self, hidden: Tensor, ahead: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        normed: tuple[Tensor, ...] = ()
        if self._entrance is not None:
            assert ahead is not None
            if self.final_norm is not None:
                hidden = self.final_norm(hidden)
                normed = (hidden,)
            hidden = self._entrance.depth.enter(hidden, ahead)
        for layer in self._before:
            hidden = layer.whole(hidden)
        (moe,) = self._moe
        made: tuple[Tensor, ...] = (hidden,)
        if moe is not None:
            made = moe.before_dispatch(hidden, self.router_weight, in_graph=self.graphed)
        return made[0] if len(self.makes) == 1 else (*made, *normed)

    def need_backward_dw(self) -> bool:
        """False: `backward_dw` passes the call on to modules below, and has no work of its own."""
        return False

    def backward_dw(self) -> None:
        """The shared expert's and every earlier layer's delayed weight gradients: all whose input gradients this slot's
        backward computes."""
        (moe,) = self._moe
        if moe is not None:
            moe.shared_backward_dw()
        for layer in reversed(self._before):
            layer.backward_dw()
        if self._entrance is not None:
            self.eh_proj.backward_dw()

    def delay(self, delayed: bool) -> None:
        (moe,) = self._moe
        if moe is not None and moe.shared_mlp is not None:
            set_delayed(moe.shared_mlp, delayed)
        for layer in self._before:
            set_delayed(layer, delayed)
        if self._entrance is not None:
            set_delayed(self.eh_proj, delayed)


@dataclass(frozen=True, slots=True)
class Unit:
    """One schedule unit: its slots in order, None where there is nothing to do. `hidden` is what it reads and makes.

    pre: slot 1 as a callable. tail: the `-` or `E` at its end.
    """

    text: str
    slots: tuple[Slot | None, ...]
    pre: PreDispatch | None
    tail: HybridLayer | None

    def delay(self, delayed: bool) -> None:
        """Whether backwards leave weight gradients to `dw`; of a graphed slot 1, to a graph of its own."""
        if self.pre is not None:
            self.pre.delay(delayed)
        if isinstance(self.tail, MoELayer):
            self.tail.delay_experts(delayed)
        elif self.tail is not None:
            set_delayed(self.tail, delayed)


def build_unit(
    layers: Sequence[HybridLayer],
    *,
    pre_graphed: bool = False,
    entrance: Entrance | None = None,
    leaves: MTPDepth | None = None,
) -> Unit:
    """The unit of some layers in a row; `-` or `E` may only stand last. pre_graphed: slot 1's outputs lie in a graph's
    memory, so that none of them may be freed. entrance, leaves: an MTP depth that begins or ends here."""
    text = "".join(layer.symbol for layer in layers)
    for layer in layers[:-1]:
        if isinstance(layer, MoELayer | MLPLayer):
            raise PlanError(f"schedule unit {text!r}: {layer.symbol!r} must be the last layer of its unit")
    if not layers:
        raise PlanError("a schedule unit of no layers")
    if layers[0].config.recompute == "layer":
        raise PlanError(
            "HybridConfig(recompute='layer') and an overlapped schedule: a slot keeps what its own backward reads. Use "
            "recompute='norm' or 'none', or run the model without overlap"
        )
    tail = layers[-1] if isinstance(layers[-1], MoELayer | MLPLayer) else None
    before = layers[:-1] if tail is not None else layers
    post = None
    if leaves is not None:
        post = Slot("mtp_post", "compute", _twice(leaves), ("hidden",), ("hidden", f"hidden_{leaves.depth}"))
    if isinstance(tail, MoELayer):
        pre = PreDispatch(before, tail, entrance, graphed=pre_graphed)
        return Unit(text, (_pre_slot(pre), *_moe_slots(tail, pre_graphed), post), pre, tail)
    dense = PreDispatch(before, None, entrance, graphed=pre_graphed) if before or entrance is not None else None
    return Unit(text, (_pre_slot(dense), None, _mlp_slot(tail), None, post), dense, tail)


def _twice(depth: MTPDepth) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The normed states for the next depth and for the head."""

    def run(hidden: Tensor) -> tuple[Tensor, Tensor]:
        out = depth.leave(hidden)
        return out, out

    return run


def _pre_slot(pre: PreDispatch | None) -> Slot | None:
    if pre is None:
        return None
    dw = pre.backward_dw if pre.has_linear else None
    return Slot("pre_dispatch", "compute", pre.compute, pre.reads, pre.makes, dw=dw)


def _mlp_slot(tail: HybridLayer | None) -> Slot | None:
    if tail is None:
        return None
    return Slot("mlp", "compute", tail.whole, ("hidden",), ("hidden",), dw=tail.backward_dw)


def _moe_slots(moe: MoELayer, pre_graphed: bool) -> tuple[Slot, Slot, Slot]:
    parallel = moe.parallel
    travels = parallel.size > 1
    # An exchange keeps no tensor, so what is sent may be freed; at home `received` is `rows` itself. Experts whose rows
    # are sorted first keep the sorted copy.
    sorts = travels and len(parallel.share(moe.config.experts)) > 1
    dispatch = Slot(
        "dispatch",
        "comm",
        moe.dispatch,
        ("rows", "counts"),
        ("received", "layout"),
        frees=("rows",) if travels and not pre_graphed else (),
    )
    experts = Slot(
        "mlp",
        "compute",
        moe.experts,
        ("received", "layout"),
        ("made",),
        frees=("received",) if sorts else (),
        dw=moe.experts_backward_dw,
    )
    shared = ("shared",) if moe.shared_mlp is not None else ()

    def combine(made: Tensor, layout: object, *kept: Tensor) -> Tensor:
        return moe.combine(moe.collect(made, layout), *kept)  # type: ignore[arg-type]

    back = Slot("combine", "comm", combine, ("made", "layout", *KEPT, *shared), ("hidden",), frees=("made",))
    return dispatch, experts, back


def group_layers(items: Sequence[HybridLayer | LayerGroup], *, regroup: bool) -> list[list[HybridLayer]]:
    """The layers of each unit. Every item is one unit; with `regroup`, layers that stand alone join the next `-` or `E`
    that stands alone, as if the pattern had brackets around them: a unit of its own before an `E` leaves half of its
    all-to-alls with nothing to hide behind."""
    units: list[list[HybridLayer]] = []
    open_unit = False
    for item in items:
        layers = item.members() if isinstance(item, LayerGroup) else [item]
        alone = isinstance(item, HybridLayer)
        if regroup and alone and open_unit:
            units[-1] += layers
        else:
            units.append(layers)
        open_unit = alone and not isinstance(item, MoELayer | MLPLayer)
    return units


def chunk_units(chunk: HybridChunk, *, regroup: bool, pre_graphed: bool) -> tuple[Unit, ...]:
    """The units of a chunk in order: decoder, then MTP depths, whose layers are always grouped as by `regroup`."""
    groups = group_layers(list(chunk.decoder.layers), regroup=regroup)
    units = [build_unit(layers, pre_graphed=pre_graphed) for layers in groups]
    for depth in chunk.mtp.depths() if chunk.mtp is not None else ():
        entrance = Entrance(depth, chunk.decoder.final_norm if depth.depth == 1 else None)
        inner = group_layers(list(depth.physical_layers()), regroup=True)
        for place, layers in enumerate(inner):
            units.append(
                build_unit(
                    layers,
                    pre_graphed=pre_graphed,
                    entrance=entrance if place == 0 else None,
                    leaves=depth if place == len(inner) - 1 else None,
                )
            )
    return tuple(units)
