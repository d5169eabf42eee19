"""A group is a boundary of schedules and checkpoints, and no arithmetic: also with graphs, over 20 steps."""

from __future__ import annotations

import pytest
import torch

from graphcap.hybrid import HybridConfig, HybridLayer, HybridModel, LayerGroup
from tests.hybrid.side_by_side import train

SIZES = {"hidden": 16, "head_dim": 4, "mamba_head_dim": 4, "ffn": 32, "expert_ffn": 16, "max_sequence": 24}


def test_grouped_equals_flat_with_graphs() -> None:
    """Each side is compared with its own eager twin after every step; here the two with each other."""
    grouped = train(HybridConfig(pattern="[M*E][*-]/*E", z_loss=0.01, **SIZES))  # type: ignore[arg-type]
    flat = train(HybridConfig(pattern="M*E*-/*E", z_loss=0.01, **SIZES))  # type: ignore[arg-type]
    assert grouped.tracker.report() == flat.tracker.report()
    for a, b in zip(grouped.parameters(), flat.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("pattern", ["M[M*E]-", "[*-][*E]|M"])
def test_names_carry_the_indices(pattern: str) -> None:
    """Of items in the pattern, and of members in their group."""
    model = HybridModel(HybridConfig(pattern=pattern, **SIZES))  # type: ignore[arg-type]
    names = {name: module for name, module in model.named_modules() if isinstance(module, HybridLayer | LayerGroup)}
    number = 0
    for index, item in enumerate(model.config.layers.items):
        if isinstance(item, str):
            number += 1
            places = [(f"decoder.layers.{index}", number)]
        else:
            assert isinstance(names[f"decoder.layers.{index}"], LayerGroup)
            places = [(f"decoder.layers.{index}.layers.{i}", number + i + 1) for i in range(len(item))]
            number += len(item)
        for (name, physical), symbol in zip(places, item, strict=True):
            layer = names[name]
            assert isinstance(layer, HybridLayer)
            assert (layer.symbol, layer.layer_number, layer.logical_index) == (symbol, physical, index)
    assert number == model.config.layers.physical_layers
