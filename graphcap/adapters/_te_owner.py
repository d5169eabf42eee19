"""What one Transformer Engine module or operation holds between calls: tensors, host state, registration, weight cache.

An owner is a TransformerEngineBaseModule (`fp8_meta`, one dict for both directions) or a BasicOperation of te.ops
(`_fp8_metas`, one dict per direction, None before the first low-precision run). Names of tensors here: "fwd.scale",
"fwd.amax_history", "bwd.scale", "bwd.amax_history".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphcap.adapters._te_names import Names

Meta = dict[str, Any]

# Attributes in which an owner keeps its low-precision state. The adapter sees to them; nobody else restores or compares
# them, since registration, an evaluation without FP8 and the recipe's own set-up change them beside the graphs.
MODULE_STATE = (
    "fp8",
    "fp8_calibration",
    "fp8_parameters",
    "fp8_initialized",
    "fp8_meta",
    "fp8_meta_tensors_initialized",
    "quantizers",
    "_fp8_workspaces",
)
OPERATION_STATE = ("_fp8_metas", "_quantizers")

# The plain tensors inside TE's quantised tensors (Float8, MXFP8, block-wise, NVFP4) and quantizers.
INNER = (
    "_data",
    "_transpose",
    "_scale_inv",
    "_rowwise_data",
    "_columnwise_data",
    "_rowwise_scale_inv",
    "_columnwise_scale_inv",
    "_amax_rowwise",
    "_amax_columnwise",
    "scale",
    "amax",
)

_KEYS = {"fwd": "scaling_fwd", "bwd": "scaling_bwd"}
_TENSORS = ("scale", "amax_history")
CACHE = "_fp8_workspaces"


def owners_of(names: Names, unit: nn.Module) -> tuple[nn.Module, ...]:
    """Every owner under a module, in module order, each once, whether it has run or not."""
    return tuple(module for module in unit.modules() if isinstance(module, (names.base, names.operation)))


def state_names(names: Names, owner: nn.Module) -> frozenset[str]:
    """The attributes that hold an owner's low-precision state."""
    return frozenset(MODULE_STATE if isinstance(owner, names.base) else OPERATION_STATE)


def metas(owner: nn.Module) -> list[Meta]:
    """The dicts that hold recipe, group and scaling state; none where there are none yet."""
    meta = vars(owner).get("fp8_meta")
    if meta is not None:
        return [meta]
    split = vars(owner).get("_fp8_metas") or {}
    return [entry for entry in (split.get("forward"), split.get("backward")) if entry is not None]


def scaling_states(owner: nn.Module) -> dict[str, Any]:
    """The recipe's state per direction ("fwd", "bwd"), as far as there is one."""
    found = {}
    for meta in metas(owner):
        for direction, key in _KEYS.items():
            if key in meta:
                found[direction] = meta[key]
    return found


def tensors(owner: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that outlive a call, by name: scales and histories of delayed scaling, whatever recipe they belong to
    (attention in FP8 keeps some under a current-scaling recipe). Empty for recipes that keep none."""
    found = {}
    for direction, state in scaling_states(owner).items():
        for name in _TENSORS:
            value = getattr(state, name, None)
            if isinstance(value, torch.Tensor):
                found[f"{direction}.{name}"] = value
    return found


def is_delayed(owner: nn.Module) -> bool:
    return bool(tensors(owner))


def keeps_own_recipe(names: Names, owner: nn.Module) -> bool:
    """Attention chooses a recipe of its own from the running one; its dict's "recipe" must not be overwritten."""
    return isinstance(owner, names.attention)


def quantizers(owner: nn.Module) -> Iterator[Any]:
    for name in ("quantizers", "_quantizers"):
        table = vars(owner).get(name) or {}
        for entries in table.values():
            yield from (entry for entry in entries if entry is not None)


def weight_cache(owner: nn.Module) -> dict[str, Any] | None:
    """The cache of quantised weights by TE's names; operations of te.ops have none."""
    cache: dict[str, Any] | None = vars(owner).get(CACHE)
    return cache


def set_weight_cache(owner: nn.Module, cache: dict[str, Any]) -> None:
    vars(owner)[CACHE] = cache


# ------------------------------------------------------------------------------------------------- memory behind values


def memory_of(value: Any) -> dict[str, torch.Tensor]:
    """The plain tensors inside a quantised tensor (data, transpose, scales) or a quantizer, by attribute name. A plain
    tensor is its own memory, under the name ""."""
    if isinstance(value, torch.Tensor) and not is_quantized(value):
        return {"": value}
    held = ((name, getattr(value, name, None)) for name in INNER)
    return {name: inner for name, inner in held if isinstance(inner, torch.Tensor)}


def is_quantized(value: Any) -> bool:
    """Whether a tensor is a wrapper around quantised memory (primary weights of quantized_model_init)."""
    return isinstance(value, torch.Tensor) and type(value).__module__.startswith("transformer_engine.")


def touched_memory(owner: nn.Module, cache: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """Every plain tensor of an owner that a recorded kernel may read or write, by a readable name."""
    found = dict(tensors(owner))
    for number, quantizer in enumerate(quantizers(owner)):
        found.update({f"quantizer {number}.{key}": value for key, value in memory_of(quantizer).items()})
    for name, workspace in (cache or {}).items():
        found.update({f"cached {name}.{key}": value for key, value in memory_of(workspace).items()})
    for name, parameter in owner._parameters.items():
        if is_quantized(parameter):
            found.update({f"{name}.{key}": value for key, value in memory_of(parameter).items()})
    return found


# ------------------------------------------------------------------------------------------------------------ host state

HostState = dict[str, Any]


def host_state(names: Names, owner: nn.Module) -> HostState:
    """The low-precision attributes as they are now; dicts are copied one level deep (two where te.ops nests them)."""
    held = vars(owner)
    return {name: _copied(held[name]) for name in state_names(names, owner) if name in held}


def set_host_state(names: Names, owner: nn.Module, state: HostState) -> None:
    """Put attributes back; dicts keep their identity, since quantizers and autograd contexts refer to them."""
    held = vars(owner)
    for name in state_names(names, owner):
        if name not in state:
            held.pop(name, None)
        elif isinstance(held.get(name), dict) and isinstance(state[name], dict):
            _refill(held[name], state[name])
        else:
            held[name] = _copied(state[name])


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return list(value) if type(value) is list else value


def _refill(held: dict[Any, Any], state: dict[Any, Any]) -> None:
    for key in [key for key in held if key not in state]:
        del held[key]
    for key, value in state.items():
        if isinstance(held.get(key), dict) and isinstance(value, dict):
            _refill(held[key], value)
        else:
            held[key] = _copied(value)


# ---------------------------------------------------------------------------------------------------------- registration


def is_registered(names: Names, owner: nn.Module) -> bool:
    """Whether the reductions of this process reach every tensor of this owner."""
    held = [meta for meta in metas(owner) if any(key in meta for key in _KEYS.values())]
    return bool(held) and all(_reaches(names, meta) for meta in held)


def record_of(names: Names, owner: nn.Module) -> dict[str, Any] | None:
    """Where an owner says that it is registered: bucket key -> position; None if it never was."""
    found: dict[str, Any] = {}
    known = False
    for meta in metas(owner):
        record = meta.get(names.record_key)
        if record is not None:
            known = True
            found.update(dict(zip(record[1::2], record[0::2], strict=True)))
    return found if known else None


def register(names: Names, owner: nn.Module, recipe: Any, group: Any, *, local_recipe: bool) -> None:
    """Take part in the reductions from now on: recipe and group of the running autocast, then TE's own registration,
    which does nothing the second time. A record that leads nowhere (FP8GlobalStateManager.reset(), a deep copy, state
    that was made anew) is dropped first: TE would believe it, and the scales would stay as they are for ever.

    local_recipe: the owner has chosen a recipe of its own from the running one (attention), and keeps it.
    """
    for meta in metas(owner):
        if not any(key in meta for key in _KEYS.values()):
            continue
        meta["fp8_group"] = group
        if not local_recipe:
            meta["recipe"] = recipe
        if names.record_key in meta and not _reaches(names, meta):
            del meta[names.record_key]
        if local_recipe:
            key = names.manager.get_unique_autocast_key(meta["recipe"], group)
            names.state.arguments.setdefault(key, (meta["recipe"], group))
        names.manager.add_fp8_tensors_to_global_buffer(meta)


def _reaches(names: Names, meta: Meta) -> bool:
    """Whether the record of a meta leads to its own tensors in the process-wide lists."""
    wanted = [meta[key] for key in _KEYS.values() if key in meta]
    wanted = [state for state in wanted if isinstance(getattr(state, "amax_history", None), torch.Tensor)]
    record = meta.get(names.record_key)
    if record is None:
        return not wanted
    places = dict(zip(record[1::2], record[0::2], strict=True))
    listed: list[tuple[Any, Any]] = []
    for key, position in places.items():
        histories, scales = names.state.histories.get(key, []), names.state.scales.get(key, [])
        if position < min(len(histories), len(scales)):
            listed.append((histories[position], scales[position]))
    return all(
        any(_same_memory(history, state.amax_history) and _same_memory(scale, state.scale) for history, scale in listed)
        for state in wanted
    )


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape)
