"""Checkpoints by published keys (see keys.py), written and read by torch.distributed.checkpoint.

That library ignores keys nobody asks for, converts dtypes without a word and raises a BaseException; so its metadata is
compared with our keys first, and nothing is written into a model before everything has been compared and read.
"""

from __future__ import annotations

import dataclasses
import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from graphcap import Graphed
from graphcap.errors import GraphcapError, PlanError, StateError
from graphcap.hybrid.config import QUANTIZATION_FIELDS, HybridConfig
from graphcap.hybrid.gpt import GPTModel
from graphcap.hybrid.keys import (
    EXTRA_STATE,
    Holder,
    Piece,
    Pieces,
    expected_pieces,
    expected_states,
    extra_state_keys,
    pieces_of,
    states_of,
)
from graphcap.hybrid.model import HybridChunk
from graphcap.hybrid.quantized_states import StatePiece, holds_nothing, state_problems, write_states

CONFIG_FILE: Final = "hybrid_config.json"
"""Beside the tensors: the HybridConfig, for `graphcap convert`. Reading a checkpoint needs only the tensors."""

STATE: Final = "optimizer.state."
GROUPS: Final = "optimizer.param_groups"
GROUP: Final = "optimizer.group."
"""`optimizer.group.<published key>`: the number of the parameter's group, where there are several."""

Model = nn.Module | Sequence[nn.Module]


def save(model: Model, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the weights of a HybridModel, a HybridChunk (a pipeline stage), several chunks (a rank's), a GPTModel, or what
    `capture` made of them, into the folder `path`; with an optimizer its state too. Scales and amax histories of quantised
    layers go along, under the keys `..._extra_state`.

    Where torch.distributed is initialised this is a collective call on all ranks, each of which gives what it holds: its
    stage, its experts. StateError, on all ranks and before anything is written, if there is a checkpoint already, for
    optimizer state that belongs to no key (that of other models' parameters, or in another form), and if all ranks together
    do not hold the whole model, so that nobody could load it; and for what could not be written.
    """
    folder = Path(path)
    with _together() as held:
        holders = _holders(model)
        if (folder / ".metadata").exists():
            raise StateError(f"{folder} holds a checkpoint already: choose another folder, or delete that one")
        pieces = _all_pieces(holders)
        state: dict[str, Any] = {key: piece.published() for key, piece in pieces.items()}
        config = holders[0].config
        state |= {key: piece.read() for key, piece in _all_states(holders).items()}
        if any(holder.output_layer is not None for holder in holders):
            state |= dict.fromkeys(extra_state_keys(config), b"")
        if optimizer is not None:
            state |= _optimizer_entries(pieces, optimizer)
        held.update(pieces)
    missing = sorted(expected_pieces(config).keys() - held)
    if missing:
        raise StateError(
            f"{len(missing)} keys of the model ({config.pattern!r}) are held by no rank that saves ({_few(missing)}), so "
            "that the checkpoint could not be loaded: give the chunks of all stages, in one call or one call on every rank"
        )
    write(state, folder, config)


@contextmanager
def _together() -> Iterator[set[str]]:
    """Inside, every rank prepares by itself and notes the keys that it holds; behind, the set is that of all ranks. Where
    one of them fails all raise: writing is collective, and the others would wait for it forever."""
    held: set[str] = set()
    failed: GraphcapError | None = None
    try:
        yield held
    except GraphcapError as error:
        failed = error
    if dist.is_available() and dist.is_initialized():
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, (None if failed is None else str(failed), held))
        errors = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(said) if text is not None]
        if errors and failed is None:
            raise StateError(f"nothing has been written, since not all ranks can save: {'; '.join(errors)}")
        held.update(*(keys for _, keys in said))
    if failed is not None:
        raise failed


def _few(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")


def write(state: dict[str, Any], folder: Path, config: HybridConfig | None) -> None:
    """Tensors and plain values by key, and the config beside them."""
    alone = not (dist.is_available() and dist.is_initialized())
    try:
        with _quiet():
            planner = DefaultSavePlanner(flatten_state_dict=False)  # the optimizer's groups are one entry
            dcp_save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=alone)
    except CheckpointException as error:  # no Exception: it would pass every handler that expects one
        raise StateError(f"{folder}: the checkpoint could not be written: {_causes(error)}") from error
    if config is not None and (alone or dist.get_rank() == 0):
        (folder / CONFIG_FILE).write_text(config_text(config), encoding="utf-8")


def load(model: Model, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read a checkpoint into what `save` takes, in place: captured graphs go on with the new values.

    Every rank reads for itself, and judges the checkpoint against the keys of the whole model, so that all ranks agree
    without a word: missing and unexpected keys, other shapes and dtypes are one StateError that lists them all, and
    nothing has been written then. Saved on other numbers of stages or ranks of experts is the same checkpoint. Without an
    optimizer its state in the checkpoint is left alone; with one, the model's parameters without state there (an expert that
    never had a token) end without state, and each must be in the parameter group that it was saved in.

    A quantised model takes scales and histories from the checkpoint, or starts them anew where it has none at all (it was
    trained in high precision); a model without quantisation refuses a checkpoint that has some. Quantised weights are cast
    anew: the next call says is_first_microbatch=True.
    """
    folder, holders = Path(path), _holders(model)
    pieces = _all_pieces(holders)
    metadata = read_metadata(folder)
    entries = metadata.state_dict_metadata
    whole = expected_pieces(holders[0].config) | pieces
    also = (GROUPS, GROUP) if optimizer is not None else ()
    data = read(folder, [key for key in entries if key.startswith(also) or EXTRA_STATE.search(key)])
    groups = {key.removeprefix(GROUP): int(data.pop(key)) for key in [*data] if key.startswith(GROUP)}
    quantised = expected_states(holders[0].config)
    saved = {key: value for key, value in data.items() if key in quantised}
    problems = [*_weight_problems(entries, whole, {key: data[key] for key in data if key not in saved})]
    problems += _layout_problems(folder, holders[0].config)
    problems += state_problems(saved, quantised, holders[0].config)
    if optimizer is not None:
        problems += _optimizer_problems(entries, whole, pieces, optimizer, data.get(GROUPS))
        problems += _group_problems(pieces, optimizer, groups)
    if problems:
        raise StateError(
            f"{folder} does not fit the model ({holders[0].config.pattern!r}); nothing has been loaded:\n  "
            + "\n  ".join(problems)
        )
    wanted = [*pieces]
    if optimizer is not None:
        wanted += [key for key in entries if key.startswith(STATE) and _model_key(key) in pieces]
    tensors = read(folder, wanted)
    states = {} if optimizer is None else _collected_states(pieces, tensors)
    for key, piece in pieces.items():
        piece.write(piece.parameter, tensors[key])
    write_states(_all_states(holders), saved, holders[0].config)
    if optimizer is not None:
        _write_optimizer(optimizer, pieces, states, data[GROUPS])


# -------------------------------------------------------------------------------------------------------------- reading


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint holds; StateError if there is none."""
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:  # the metadata are a pickle: where that is damaged, any class of error comes
        raise StateError(f"{folder} is no checkpoint that can be read: {type(error).__name__}: {error}") from error


def read(folder: Path, keys: list[str]) -> dict[str, Any]:
    """These entries, tensors on the CPU and in the dtype that was saved. Every rank reads for itself."""
    entries = read_metadata(folder).state_dict_metadata
    state: dict[str, Any] = {}
    for key in keys:
        entry = entries[key]
        if isinstance(entry, TensorStorageMetadata):
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        else:
            state[key] = None
    if state:
        try:
            with _quiet():
                planner = _Planner(flatten_state_dict=False)
                dcp_load(state, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
        except CheckpointException as error:
            what = f"{folder}: the checkpoint could not be read, nothing has been loaded"
            raise StateError(f"{what}: {_causes(error)}") from error
    return state


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _causes(error: CheckpointException) -> str:
    """What went wrong on which rank, in a line, instead of all ranks' stacks."""
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items())


class _Planner(DefaultLoadPlanner):
    """Plain values without running code that a pickle might hold: torch's planner unpickles anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with torch.serialization.safe_globals([io.BytesIO, bytes]):
            self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


# ------------------------------------------------------------------------------------------------------------ comparing


def _weight_problems(entries: Mapping[str, Any], whole: Pieces, data: Mapping[str, Any]) -> Iterator[str]:
    for key, piece in whole.items():
        if key not in entries:
            yield f"missing: {key} {list(piece.shape)}"
    for key, entry in entries.items():
        if key in whole:
            yield from _differences(key, entry, whole[key].shape, whole[key].parameter.dtype)
        elif EXTRA_STATE.search(key):
            if key in data and not holds_nothing(data[key]):
                yield f"unexpected: {key} holds the state of a quantised module, which this model has no place for"
        elif not key.startswith("optimizer."):
            yield f"unexpected: {key}"


_LAYOUT: Final = {
    "*": ("heads", "kv_heads", "head_dim"),
    "M": ("mamba_heads", "mamba_head_dim", "mamba_groups", "mamba_state"),
}
"""How the rows of a layer's tensors are to be read. Other numbers may give the same shapes, and another model."""


def _layout_problems(folder: Path, config: HybridConfig) -> Iterator[str]:
    """Where a config lies beside the tensors."""
    values = _config_values(folder) or {}
    symbols = [symbol for symbol, count in config.layers.counts().items() if count]
    for name in (name for symbol in symbols for name in _LAYOUT.get(symbol, ())):
        there, here = values.get(name), getattr(config, name)
        if name in values and there != here:
            yield f"{CONFIG_FILE}: {name}={there} of the checkpoint, {here} of the model"


def _differences(key: str, entry: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> Iterator[str]:
    if not isinstance(entry, TensorStorageMetadata):
        yield f"{key}: no tensor in the checkpoint, expected one of shape {list(shape)}"
        return
    if tuple(entry.size) != shape:
        yield f"{key}: shape {list(entry.size)} in the checkpoint, {list(shape)} in the model"
    if dtype is not None and entry.properties.dtype != dtype:
        yield f"{key}: {entry.properties.dtype} in the checkpoint, {dtype} in the model"


# ------------------------------------------------------------------------------------------------------- the optimizer


def _model_key(key: str) -> str:
    """The published key in `optimizer.state.<name>.<published key>`."""
    return key.removeprefix(STATE).partition(".")[2]


def _state_name(key: str) -> str:
    return key.removeprefix(STATE).partition(".")[0]


def _optimizer_entries(pieces: Pieces, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State tensors of a parameter's shape ride on its keys; 0-dim ones (Adam's step) stand under each of them."""
    entries: dict[str, Any] = {GROUPS: {"class": type(optimizer).__name__, "groups": _hyperparameters(optimizer)}}
    held = {id(piece.parameter) for piece in pieces.values()}
    strange = [list(p.shape) for p, state in optimizer.state.items() if state and id(p) not in held]
    if strange:
        shown = ", ".join(map(str, strange[:4])) + (", ..." if len(strange) > 4 else "")
        raise StateError(
            f"{type(optimizer).__name__} has state of {len(strange)} parameters that are not among those to be saved "
            f"(shapes {shown}) and would be lost: save all chunks that it trains together, and give the rest an "
            "optimizer of its own"
        )
    numbers = _group_numbers(optimizer)
    for key, piece in pieces.items():
        if len(optimizer.param_groups) > 1 and id(piece.parameter) in numbers:
            entries[f"{GROUP}{key}"] = torch.tensor(numbers[id(piece.parameter)])
        for name, value in optimizer.state.get(piece.parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.shape not in (piece.parameter.shape, torch.Size()):
                shown = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise StateError(
                    f"{type(optimizer).__name__}'s state {name!r} of {key} ({shown}) can't be saved by key: expected a "
                    f"tensor of the parameter's shape {list(piece.parameter.shape)}, or one number as a tensor"
                )
            entries[f"{STATE}{name}.{key}"] = piece.published(value) if value.dim() else value.detach()
    return entries


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        for name, value in group.items():
            if not _is_plain(value):
                raise StateError(
                    f"{type(optimizer).__name__}'s {name}={value!r} of parameter group {number} ({type(value).__name__}) "
                    "could be written, but is not read back, as reading runs no code: expected numbers, texts or tensors"
                )
    return groups


def _is_plain(value: Any) -> bool:
    """What is read back without running code."""
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, value)) and (type(value) is not dict or all(map(_is_plain, value.values())))
    return value is None or type(value) in (bool, int, float, complex, str, Tensor)


def _group_numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """By the parameters' ids."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _group_problems(mine: Pieces, optimizer: torch.optim.Optimizer, saved: Mapping[str, int]) -> Iterator[str]:
    """Groups have their own learning rates, which must not reach other parameters because groups came in another order."""
    numbers = _group_numbers(optimizer)
    for key, piece in mine.items():
        here, there = numbers.get(id(piece.parameter)), saved.get(key)
        if None not in (here, there) and here != there:
            yield f"{GROUPS}: {key} is in group {there} in the checkpoint, in group {here} in the optimizer"


def _optimizer_problems(
    entries: Mapping[str, Any], whole: Pieces, mine: Pieces, optimizer: torch.optim.Optimizer, saved: Any
) -> Iterator[str]:
    if not isinstance(saved, dict):
        yield f"missing: {GROUPS}, the checkpoint has no optimizer state (load without an optimizer)"
        return
    if saved["class"] != type(optimizer).__name__:
        yield f"{GROUPS}: of {saved['class']}, expected {type(optimizer).__name__}"
    if len(saved["groups"]) != len(optimizer.param_groups):
        yield f"{GROUPS}: {len(saved['groups'])} in the checkpoint, {len(optimizer.param_groups)} in the optimizer"
    names: dict[str, set[str]] = {}
    for key, entry in entries.items():
        if not key.startswith(STATE):
            continue
        model_key, name = _model_key(key), _state_name(key)
        names.setdefault(model_key, set()).add(name)
        if model_key not in whole:
            yield f"unexpected: {key}"
        elif not isinstance(entry, TensorStorageMetadata) or len(entry.size):
            yield from _differences(key, entry, whole[model_key].shape, _state_dtype(mine, model_key, name, optimizer))
    for group in _by_parameter(mine).values():
        if len({frozenset(names.get(key, ())) for key, _ in group}) > 1:
            with_state = [key for key, _ in group if key in names]
            yield f"{STATE}*: only {', '.join(with_state)} of one stacked parameter have (all) states"


def _state_dtype(mine: Pieces, key: str, name: str, optimizer: torch.optim.Optimizer) -> torch.dtype | None:
    """Of a state that the optimizer has already; None, any, where there is none to compare with."""
    value = optimizer.state.get(mine[key].parameter, {}).get(name) if key in mine else None
    return value.dtype if isinstance(value, Tensor) else None


def _by_parameter(pieces: Pieces) -> dict[int, list[tuple[str, Piece]]]:
    """Stacked experts are one parameter with several keys."""
    found: dict[int, list[tuple[str, Piece]]] = {}
    for key, piece in pieces.items():
        found.setdefault(id(piece.parameter), []).append((key, piece))
    return found


States = dict[nn.Parameter, dict[str, Tensor]]


def _collected_states(pieces: Pieces, tensors: Mapping[str, Tensor]) -> States:
    """Parameter-shaped states, on the CPU; those of parameters that have none are left out."""
    states: States = {}
    for key, value in tensors.items():
        if not key.startswith(STATE):
            continue
        name, piece = _state_name(key), pieces[_model_key(key)]
        state = states.setdefault(piece.parameter, {})
        if value.dim():
            whole = state.setdefault(name, torch.empty(piece.parameter.shape, dtype=value.dtype, device="cpu"))
            piece.write(whole, value)
        elif not torch.equal(state.setdefault(name, value), value):
            raise StateError(
                f"{key} is {value.item()}, but {state[name].item()} for another part of the same stacked parameter, which "
                "has one for all: load into expert_gemm='loop', whose experts step on their own. Nothing has been loaded"
            )
    return states


def _write_optimizer(optimizer: torch.optim.Optimizer, pieces: Pieces, states: States, saved: dict[str, Any]) -> None:
    held = {id(piece.parameter) for piece in pieces.values()}
    for group, hyperparameters in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name, value in hyperparameters.items():
            if isinstance(group.get(name), Tensor):
                group[name].copy_(torch.as_tensor(value))  # in place: a graph may read it
            else:
                group[name] = value
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            if id(parameter) not in held:
                continue  # of another chunk, which is loaded by itself, or of another model
            if parameter not in states:
                optimizer.state.pop(parameter, None)
                continue
            kept = optimizer.state[parameter]
            for name, value in states[parameter].items():
                if isinstance(kept.get(name), Tensor):
                    kept[name].copy_(value)
                else:
                    kept[name] = value.to(parameter.device) if value.dim() or on_device else value
            for name in [name for name, value in kept.items() if value is not None and name not in states[parameter]]:
                del kept[name]


# --------------------------------------------------------------------------------------------------------------- models


def _holders(model: Any) -> tuple[Holder, ...]:
    if isinstance(model, Graphed):
        model = model.module
    found = tuple(model) if isinstance(model, tuple | list | nn.ModuleList) else (model,)
    if not found or not all(isinstance(one, HybridChunk | GPTModel) for one in found):
        names = ", ".join(type(one).__name__ for one in found)
        raise PlanError(f"a checkpoint of {names or 'nothing'}: expected a HybridModel, its chunks, or a GPTModel")
    return found


def _all_pieces(holders: tuple[Holder, ...]) -> Pieces:
    pieces: Pieces = {}
    for holder in holders:
        if holder.config != holders[0].config:
            raise PlanError(
                f"a checkpoint of chunks of several models ({holders[0].config.pattern!r}, {holder.config.pattern!r}, or of "
                "other sizes): expected those of one"
            )
        for key, piece in pieces_of(holder).items():
            if key in pieces and pieces[key].parameter is not piece.parameter:
                raise StateError(
                    f"two of the chunks hold a parameter of their own for {key}, of which one would be lost: expected "
                    "chunks of one model (or, on several ranks, one call on each)"
                )
            pieces[key] = piece
    return pieces


def _all_states(holders: tuple[Holder, ...]) -> dict[str, StatePiece]:
    states: dict[str, StatePiece] = {}
    for holder in holders:
        states |= states_of(holder)
    return states


def config_text(config: HybridConfig) -> str:
    """A config as JSON, without what says how it is quantised: that belongs to a run, not to the weights."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in QUANTIZATION_FIELDS]
    values: dict[str, Any] = {name: getattr(config, name) for name in names}
    values |= {"dtype": str(config.dtype).removeprefix("torch.")}
    return json.dumps(values, indent=1) + "\n"


def read_config(folder: Path) -> HybridConfig | None:
    """The config beside a checkpoint, None if there is none (Megatron-LM writes none)."""
    values = _config_values(folder)
    if values is None:
        return None
    try:
        return HybridConfig(**values | {"dtype": getattr(torch, values["dtype"])})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(f"{folder / CONFIG_FILE} is not the config of a hybrid model: {error}") from error


def _config_values(folder: Path) -> dict[str, Any] | None:
    file = folder / CONFIG_FILE
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StateError(f"{file} is not the config of a hybrid model: {error}") from error
    if not isinstance(values, dict):
        raise StateError(f"{file} is not the config of a hybrid model: expected an object of names and values")
    return values
