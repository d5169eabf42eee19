"""Checkpoints from one layer pattern to another, and to and from a GPT: by occurrence.

The i-th attention layer becomes the i-th attention layer, and so for MLPs (dense or experts) and for Mamba layers; what
has no layer number is copied. Optimizer state goes along. The tensors pass through the CPU's memory, all at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from graphcap.errors import PatternError, StateError
from graphcap.hybrid.checkpoint import read, read_config, read_metadata, write
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.grammar import pattern_error
from graphcap.hybrid.keys import OUTPUT_EXTRA_STATE, layer_pieces
from graphcap.hybrid.mamba import MambaLayer
from graphcap.hybrid.pattern import Pattern

_OPTIMIZER: Final = r"optimizer\.(?:state\.[^.]+|group)\."
_LAYER: Final = re.compile(rf"^({_OPTIMIZER})?decoder\.layers\.(\d+)\.([^.]+)\.")
_NORM: Final = re.compile(rf"^((?:{_OPTIMIZER})?decoder\.)final_(?:layer)?norm\.")
_DEPTH: Final = re.compile(r"^mtp\.layers\.(\d+)\.")
_FAMILY: Final = {
    "mixer": "M",
    "self_attention": "*",
    "input_layernorm": "*",
    "mlp": "MLP",
    "pre_mlp_layernorm": "MLP",
}
_PLURALS: Final = {"M": "Mamba layers", "*": "attention layers", "MLP": "MLPs"}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done: patterns as written; copied, dropped and made count entries of the checkpoint."""

    source: str
    target: str
    copied: int
    dropped: int
    made: int


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    pattern: str | None = None,
    drop_mamba: bool = False,
    seed: int = 0,
) -> Conversion:
    """Write the checkpoint in folder `source` into the new folder `target`, for the pattern `to`.

    to: a pattern, or "gpt": one `[*-]` or `[*E]` per layer. pattern: of the source; None: from the config beside it.
    drop_mamba: Mamba layers that `to` has no place for are left out. Mamba layers that only `to` has are drawn anew with
    `seed`, in the sizes of the config beside the source, and have no optimizer state.
    PatternError where layers can't be matched; StateError for what is no checkpoint of the source's pattern.
    """
    folder, config = Path(source), read_config(Path(source))
    if (Path(target) / ".metadata").exists():
        raise StateError(f"{target} holds a checkpoint already: choose another folder, or delete that one")
    entries = list(read_metadata(folder).state_dict_metadata)
    if pattern is None and config is None:
        raise StateError(f"{folder} has no config that tells its pattern: give the pattern")
    before = Pattern.parse(pattern if pattern is not None else config.pattern if config is not None else "")
    _check_source(entries, before)
    after = Pattern.parse(_gpt_pattern(before) if to == "gpt" else to)
    places, dropped_layers, new_layers = _matched(before, after, drop_mamba)
    names: dict[str, str] = {}
    for key in entries:
        name = _renamed(key, places, dropped_layers, after.grouped)
        if name is not None:
            names[key] = name
    state: dict[str, Any] = {names[key]: value for key, value in read(folder, list(names)).items()}
    if not after.grouped:
        state[OUTPUT_EXTRA_STATE] = b""
    made = _new_mamba_layers(new_layers, after, config, seed)
    write(state | made, Path(target), None if config is None else replace(config, pattern=str(after)))
    return Conversion(str(before), str(after), len(names), len(entries) - len(names), len(made))


def _check_source(entries: list[str], before: Pattern) -> None:
    """Whether a checkpoint has the layers of its pattern, each with experts or without, and its MTP depths: one that lacks
    some would be converted into one that lacks some."""
    held: dict[Place, str] = {}
    for key in entries:
        found = _LAYER.match(key)
        if found and found[1] is None:
            place = (_FAMILY.get(found[3], found[3]), int(found[2]))
            expert = held.get(place) == "E" or key.startswith((f"{found[0]}router.", f"{found[0]}experts."))
            held[place] = "E" if expert else "-" if place[0] == "MLP" else place[0]
    expected = {(family, at): symbol for family, places in _places(before).items() for at, symbol in places}
    wrong = [
        f"layer {at}: {held.get((family, at), 'nothing')}, expected {expected.get((family, at), 'nothing')}"
        for family, at in sorted(held.keys() | expected.keys(), key=lambda place: place[1])
        if held.get((family, at)) != expected.get((family, at))
    ]
    depths = {found[1] for key in entries if (found := _DEPTH.match(key))}
    if depths != set(map(str, range(before.mtp_depth))):
        wrong.append(f"{len(depths)} MTP depths, expected {before.mtp_depth}")
    if wrong:
        raise StateError(
            f"the checkpoint does not have the layers of {str(before)!r} ({'; '.join(wrong[:4])}"
            f"{'; ...' if len(wrong) > 4 else ''}): is that the pattern of this checkpoint?"
        )


def _gpt_pattern(before: Pattern) -> str:
    """One group per attention layer and its MLP."""
    symbols = "".join(layer.symbol for layer in before.layers)
    mlps = [symbol for symbol in symbols if symbol in "-E"]
    if before.mtp:
        why = "the keys of MTP layers differ between hybrid and GPT models: convert a model without them"
        raise pattern_error(before.text, before.text.index("/"), why)
    if len(set(mlps)) > 1:
        why = "a GPT model's layers are all dense or all experts: expected '-' or 'E', not both"
        raise pattern_error(before.text, before.text.index(mlps[0]), why)
    if symbols.count("*") != len(mlps):
        raise pattern_error(before.text, 0, f"{symbols.count('*')} attention layers and {len(mlps)} MLPs: expected as many")
    return "".join(f"[*{symbol}]" for symbol in mlps)


Place = tuple[str, int]  # family, logical index: a group has one member of each family


def _places(pattern: Pattern) -> dict[str, list[tuple[int, str]]]:
    """Per family, the logical index and symbol of every layer, in order."""
    found: dict[str, list[tuple[int, str]]] = {family: [] for family in _PLURALS}
    for layer in pattern.layers:
        found["MLP" if layer.symbol in "-E" else layer.symbol].append((layer.logical, layer.symbol))
    return found


def _matched(before: Pattern, after: Pattern, drop_mamba: bool) -> tuple[dict[Place, int], set[Place], list[int]]:
    """Old place -> new logical index; old places that are dropped; new logical indices that Mamba layers are made for."""
    if (before.mtp, before.mtp_depth) != (after.mtp, after.mtp_depth):
        raise PatternError(f"{before} and {after} have different MTP layers: expected the same behind '/'")
    old, new = _places(before), _places(after)
    places: dict[Place, int] = {}
    for family, plural in _PLURALS.items():
        here, there = old[family], new[family]
        if len(here) != len(there) and not (family == "M" and (not here or (not there and drop_mamba))):
            hint = ": pass drop_mamba (--drop-mamba) to leave them out" if family == "M" and not there else ""
            raise PatternError(f"{before} has {len(here)} {plural}, {after} has {len(there)}: expected as many{hint}")
        for (logical, symbol), (index, other) in zip(here, there, strict=False):
            if symbol != other:
                raise PatternError(f"{before} and {after}: an MLP would turn from {symbol!r} into {other!r}")
            places[family, logical] = index
    dropped = set() if new["M"] else {("M", logical) for logical, _ in old["M"]}
    return places, dropped, [] if old["M"] else [index for index, _ in new["M"]]


def _renamed(key: str, places: dict[Place, int], dropped: set[Place], grouped: bool) -> str | None:
    """The key in the converted checkpoint; None: it is not in there."""
    if key == OUTPUT_EXTRA_STATE or key.startswith(f"{OUTPUT_EXTRA_STATE}/"):
        return None  # holds nothing; the new pattern decides whether there is one
    found = _LAYER.match(key)
    if found:
        place = (_FAMILY[found[3]], int(found[2]))
        if place in dropped:
            return None
        start, stop = found.span(2)
        return f"{key[:start]}{places[place]}{key[stop:]}"
    return _NORM.sub(rf"\g<1>final_{'layernorm' if grouped else 'norm'}.", key)


def _new_mamba_layers(indices: list[int], after: Pattern, config: HybridConfig | None, seed: int) -> dict[str, Any]:
    if not indices:
        return {}
    if config is None:
        raise StateError("the sizes of new Mamba layers are not known: the source has no config beside its tensors")
    made: dict[str, Any] = {}
    config = replace(config, pattern=str(after))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        for index in indices:
            layer = MambaLayer(config, 1, index)
            made |= {key: piece.published() for key, piece in layer_pieces(layer, f"decoder.layers.{index}.")}
    return made
