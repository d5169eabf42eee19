"""Layers in a row: what a symbol builds, and groups."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from graphcap.hybrid.attention import AttentionLayer
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.grammar import Item
from graphcap.hybrid.layers import HybridLayer, MLPLayer
from graphcap.hybrid.mamba import MambaLayer
from graphcap.hybrid.moe import MoELayer
from graphcap.hybrid.quantization import Quantization
from graphcap.partial_layer import Part, PartialLayer, nested

LAYERS: Final = MappingProxyType({kind.symbol: kind for kind in (MambaLayer, AttentionLayer, MLPLayer, MoELayer)})


class LayerGroup(PartialLayer):
    """A group `[...]`: its layers in a row and nothing else, so that grouped and flat models agree bit for bit.

    logical_index: of the group, shared by its layers. The layers have their own physical numbers; the group has none.
    """

    def __init__(
        self, symbols: Sequence[str], config: HybridConfig, first_number: int, logical_index: int, **shared: Any
    ) -> None:
        super().__init__()
        self.logical_index = logical_index
        self.layers = nn.ModuleList(
            _layer(symbol, config, number, logical_index, **shared)
            for number, symbol in enumerate(symbols, start=first_number)
        )
        self.inputs = f"hidden{config.first_microbatch_input}"
        signature = f"hidden{config.first_microbatch} -> hidden"
        self._parts = tuple(nested(f"layers.{i}", signature) for i in range(len(symbols)))

    def parts(self) -> Sequence[Part]:
        return self._parts

    def need_backward_dw(self) -> bool:
        """False: `backward_dw` passes the call on to modules below, and has no work of its own."""
        return False

    def backward_dw(self) -> None:
        """The delayed weight gradients of one backward, of every layer, the last one first."""
        for layer in reversed(self.members()):
            layer.backward_dw()

    def members(self) -> list[HybridLayer]:
        """The layers in order."""
        return [layer for layer in self.layers if isinstance(layer, HybridLayer)]


def build_layers(
    items: Sequence[Item],
    config: HybridConfig,
    *,
    quantization: Quantization | None = None,
    mtp_depth: int | None = None,
) -> list[HybridLayer | LayerGroup]:
    """One module per item, with random weights, numbered from the first: layer 1, item 0. quantization: what quantised
    layers share; None: made here, if the config quantises. mtp_depth: of a depth's layers."""
    shared = {"quantization": quantization or Quantization.of(config), "mtp_depth": mtp_depth}
    built: list[HybridLayer | LayerGroup] = []
    number = 1
    for logical_index, item in enumerate(items):
        if isinstance(item, tuple):
            built.append(LayerGroup(item, config, number, logical_index, **shared))
        else:
            built.append(_layer(item, config, number, logical_index, **shared))
        number += len(item)
    return built


def _layer(symbol: str, config: HybridConfig, layer_number: int, logical_index: int, **shared: Any) -> HybridLayer:
    return LAYERS[symbol](config, layer_number, logical_index, **shared)
