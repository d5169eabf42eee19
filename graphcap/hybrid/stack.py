"""Layers in a row: what a symbol builds, and groups."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from torch import nn

from graphcap.hybrid.attention import AttentionLayer
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.grammar import Item
from graphcap.hybrid.layers import HybridLayer, MLPLayer
from graphcap.hybrid.mamba import MambaLayer
from graphcap.hybrid.moe import MoELayer
from graphcap.partial_layer import Part, PartialLayer, nested

LAYERS: Final = MappingProxyType({kind.symbol: kind for kind in (MambaLayer, AttentionLayer, MLPLayer, MoELayer)})


class LayerGroup(PartialLayer):
    """A group `[...]`: its layers in a row and nothing else, so that grouped and flat models agree bit for bit.

    logical_index: of the group, shared by its layers. The layers have their own physical numbers; the group has none.
    """

    def __init__(self, symbols: Sequence[str], config: HybridConfig, first_number: int, logical_index: int) -> None:
        super().__init__()
        self.logical_index = logical_index
        self.layers = nn.ModuleList(
            _layer(symbol, config, number, logical_index) for number, symbol in enumerate(symbols, start=first_number)
        )
        self._parts = tuple(nested(f"layers.{i}", "hidden -> hidden") for i in range(len(symbols)))

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


def build_layers(items: Sequence[Item], config: HybridConfig) -> list[HybridLayer | LayerGroup]:
    """One module per item, with random weights, numbered from the first: layer 1, item 0."""
    built: list[HybridLayer | LayerGroup] = []
    number = 1
    for logical_index, item in enumerate(items):
        if isinstance(item, tuple):
            built.append(LayerGroup(item, config, number, logical_index))
        else:
            built.append(_layer(item, config, number, logical_index))
        number += len(item)
    return built


def _layer(symbol: str, config: HybridConfig, layer_number: int, logical_index: int) -> HybridLayer:
    return LAYERS[symbol](config, layer_number, logical_index)
