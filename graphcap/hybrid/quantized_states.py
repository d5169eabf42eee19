"""Scales and amax histories of quantised layers in checkpoints: plain tensors by name, one entry per weight.

An entry is a dict with `scale_fwd`, `hist_fwd`, `scale_bwd`, `hist_bwd` (histories: [rows, tensors]), or nothing where a
recipe keeps nothing or a layer has not run yet. Nothing in it is code, so it is read without running any.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from graphcap.fp8_meta import QuantizedState
from graphcap.fp8_reference import RefFp8Linear
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.quantization import transformer_engine

Value = dict[str, Tensor]

# Name in a checkpoint -> names in a snapshot: of the reference, of Transformer Engine.
_NAMES: Final = {
    "scale_fwd": ("scale_fwd", "fwd.scale"),
    "hist_fwd": ("hist_fwd", "fwd.amax_history"),
    "scale_bwd": ("scale_bwd", "bwd.scale"),
    "hist_bwd": ("hist_bwd", "bwd.amax_history"),
}
_TENSORS: Final = {"reference": (2, 1), "te": (3, 2)}
"""Quantised tensors per product, forward and backward: input, weight (and output), gradient (of output and of input)."""


@dataclass(frozen=True, slots=True)
class StatePiece:
    """What one entry stands for: the state of one weight's product. owner: the layer, which makes `count` products, this
    one the `place`-th; state: who keeps it."""

    owner: nn.Module
    state: QuantizedState | None
    place: int
    count: int

    def read(self) -> Value:
        """Copies on the CPU; empty where nothing is kept."""
        assert self.state is not None
        found = self.state.read(self.owner)
        return {name: found[name].chunk(self.count, dim=-1)[self.place].cpu().clone() for name in _NAMES if name in found}


def holds_nothing(value: Any) -> bool:
    """Whether an entry of a checkpoint is an empty one, in any of the forms that readers of such entries expect."""
    if isinstance(value, Tensor):
        return value.numel() == 0
    if isinstance(value, io.BytesIO):
        return not value.getvalue()
    return value is None or value in (b"", {})


def state_problems(saved: Mapping[str, Any], expected: frozenset[str], config: HybridConfig) -> Iterator[str]:
    """What does not fit in a checkpoint's states. saved: its entries among `expected`, the keys of the whole model."""
    if not saved or all(map(holds_nothing, saved.values())):
        return
    for key in sorted(expected - set(saved)):
        yield f"missing: {key}, while other quantised layers have theirs"
    shapes = _shapes(config)
    for key, value in saved.items():
        if holds_nothing(value):
            continue
        if not isinstance(value, dict) or set(value) != set(_NAMES) or not all(map(torch.is_tensor, value.values())):
            yield f"{key}: a state in another form than {', '.join(_NAMES)}, which this model can't read"
        elif found := [f"{n} {list(value[n].shape)}" for n in _NAMES if tuple(value[n].shape) != shapes.get(n)]:
            wanted = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none (its recipe keeps none)"
            yield f"{key}: {', '.join(found)} in the checkpoint, the model's recipe has {wanted}"


def _shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """Of one entry, under the config's recipe; empty if that keeps nothing."""
    assert config.quantization is not None
    recipe = _recipe(config)
    rows = getattr(recipe, "amax_history_len", None) if config.quantization == "te" else recipe.history_len
    if rows is None:
        return {}
    forward, backward = _TENSORS[config.quantization]
    widths = {"scale_fwd": forward, "hist_fwd": forward, "scale_bwd": backward, "hist_bwd": backward}
    return {name: (rows, width) if name.startswith("hist") else (width,) for name, width in widths.items()}


def _recipe(config: HybridConfig) -> Any:
    recipe = config.quant_spec.recipe
    if recipe is None and config.quantization == "te":
        return transformer_engine().get_default_recipe()
    return recipe


def write_states(pieces: Mapping[str, StatePiece], saved: Mapping[str, Any], config: HybridConfig) -> None:
    """Into the layers, in place where they have tensors already; layers without an entry start anew (scale 1, history 0).
    `state_problems` has found nothing."""
    by_owner: dict[nn.Module, list[tuple[str, StatePiece]]] = {}
    for key, piece in pieces.items():
        by_owner.setdefault(piece.owner, []).append((key, piece))
    for owner, entries in by_owner.items():
        ordered: list[Any] = [saved.get(key) for key, _ in sorted(entries, key=lambda entry: entry[1].place)]
        values = [{} if holds_nothing(value) else value for value in ordered]
        _write(owner, entries[0][1].state, values, config)


def _write(owner: nn.Module, state: QuantizedState | None, values: list[Value], config: HybridConfig) -> None:
    assert state is not None
    snapshot = state.snapshot([owner])
    known = next((value for value in values if value), {})
    whole = {name: torch.cat([value.get(name, _fresh(name, known[name])) for value in values], dim=-1) for name in known}
    if not snapshot.tensors[owner] and whole:
        _start(owner, whole, len(values), _recipe(config))
        return
    for name, aliases in _NAMES.items():
        for alias in aliases:
            kept = snapshot.tensors[owner].get(alias)
            if kept is not None:
                kept.copy_(whole[name]) if name in whole else kept.copy_(_fresh(name, kept))
    state.restore(snapshot)
    if isinstance(owner, RefFp8Linear):
        owner.cache = None  # of the weights before


def _fresh(name: str, like: Tensor) -> Tensor:
    return torch.ones_like(like) if name.startswith("scale") else torch.zeros_like(like)


def _start(owner: Any, whole: Value, products: int, recipe: Any) -> None:
    """A module of Transformer Engine that has not run yet makes its tensors as its `set_extra_state` would. That one takes
    pickled entries alone, and none without NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1; ours are plain tensors."""
    owner.fp8_meta.update(num_gemms=products, recipe=recipe)
    owner.init_fp8_meta_tensors(recipe)
    for key, way in (("scaling_fwd", "fwd"), ("scaling_bwd", "bwd")):
        owner.fp8_meta[key].scale.copy_(whole[f"scale_{way}"])
        owner.fp8_meta[key].amax_history.copy_(whole[f"hist_{way}"])
