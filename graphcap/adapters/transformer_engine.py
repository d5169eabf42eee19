"""Transformer Engine's low-precision state across a capture: `QuantizedState` for its modules and te.ops operations.

What TE does at every call and a replay would skip (registration for the amax reduction, the choice between casting a
weight and using the cached copy, who reduces after backward) is done by `before_forward` and `after_backward`; what
warm-up and recording would leave behind (amaxes in histories, caches, the process-wide flag) is undone by `end_capture`
and `restore`. TE's own function does most of this too; where this adapter differs on purpose, the reason stands at the
place. Supported: TE 2.11 to 2.20 (see `_te_names`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from graphcap._compiled import as_warmed_up
from graphcap.adapters import _te_owner as own
from graphcap.adapters._te_attention import Choices
from graphcap.adapters._te_names import Names, compiled_functions, names
from graphcap.adapters._te_plan import (
    HOST_FIELDS,
    OpenCapture,
    PartState,
    TransformerEnginePlan,
    TransformerEngineTicket,
    UnitState,
    changed_fields,
    pins_of,
    print_of,
    recipe_fields,
)
from graphcap.errors import StateError
from graphcap.fp8_meta import QuantSpec, Snapshot


@functools.cache
def _the_state() -> TransformerEngineState:
    return TransformerEngineState()


def state_of(module: nn.Module) -> TransformerEngineState:
    """The one implementation for every TE module. Raises StateError for a TE that is not supported."""
    return _the_state()


class TransformerEngineState:
    """`QuantizedState` for Transformer Engine. One per process, since TE's own switches are process-wide."""

    differentiates_once = True  # its backwards let go of what the forward saved

    def __init__(self) -> None:
        self._te: Names = names()
        self._open: OpenCapture | None = None
        # owner -> the mark of the plan whose replay cast its weights last; not there if none has
        self._last_cast: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()

    # ------------------------------------------------------------------------------------------------- what there is

    def owners(self, unit: nn.Module) -> tuple[nn.Module, ...]:
        """Every TE module and te.ops operation under `unit`, in module order, each once, whether it has run or not."""
        return own.owners_of(self._te, unit)

    def attributes(self, owner: nn.Module) -> frozenset[str]:
        """Attributes that are this adapter's business: registration, an evaluation in high precision and TE's own set-up
        change them beside the graphs, so nobody else restores or compares them."""
        return own.state_names(self._te, owner)

    def current(self) -> QuantSpec:
        """The settings of the innermost te.autocast now."""
        state = self._te.state
        enabled, calibrating = bool(state.enabled), bool(state.calibrating)
        if not (enabled or calibrating):
            return QuantSpec(enabled=False)
        return QuantSpec(enabled=enabled, recipe=state.recipe, group=state.group, calibrating=calibrating)

    def supports(self, recipe: Any) -> tuple[bool, str]:
        """Whether this device and this TE run a recipe; if not, why."""
        manager = self._te.manager
        if recipe is not None and recipe.mxfp8():
            return _verdict(manager.is_mxfp8_available())
        if recipe is not None and recipe.float8_block_scaling():
            return _verdict(manager.is_fp8_block_scaling_available())
        if recipe is not None and recipe.nvfp4():
            return _verdict(manager.is_nvfp4_available())
        return _verdict(manager.is_fp8_available())

    def key(self, spec: QuantSpec) -> Hashable:
        """What tells one reduction bucket from another: every field of the recipe, and the group itself. (TE's own keys
        leave out amax_compute_algo and scaling_factor_compute_algo, so two recipes that differ there share one bucket,
        graphs or not.)"""
        return tuple(repr(entry) for entry in recipe_fields(spec.recipe)), spec.group

    # ------------------------------------------------------------------------------------------------------- capture

    def begin_capture(self, specs: Sequence[QuantSpec], units: Sequence[nn.Module]) -> OpenCapture:
        """Change what is process-wide; `end_capture` undoes it in reverse, whatever happens between."""
        if self._open is not None:
            raise StateError(
                "a capture of Transformer Engine modules is in progress (on another thread?): TE's switches are "
                "process-wide, so captures follow one another"
            )
        self._require_supported(specs)
        for spec, unit in zip(specs, units, strict=True):
            if spec.active:
                self._require_lengths(self.owners(unit), spec.recipe)
        owners = tuple({owner: None for unit in units for owner in self.owners(unit)})
        before = {owner: own.host_state(self._te, owner) for owner in owners}
        with ExitStack() as undo:
            opened = OpenCapture(specs, units, owners, before, _flag_for(specs, units), undo)
            self._open = opened
            undo.callback(setattr, self, "_open", None)
            self._switch(undo)
            opened.choices = self._watch_attention(undo)
            self._te.state.flag = opened.flag if all(map(_caches, specs)) else None
            for owner in owners:
                if own.weight_cache(owner) is not None:
                    # A private cache: an eager call may drop or rebuild entries of its own (on Hopper, a forward without
                    # gradients drops the transposes), and recorded kernels would go on in freed memory.
                    own.set_weight_cache(owner, {})
            opened.undo = undo.pop_all()
        return opened

    def _require_supported(self, specs: Sequence[QuantSpec]) -> None:
        for spec in specs:
            fine, reason = self.supports(spec.recipe) if spec.active else (True, "")
            if not fine:
                raise StateError(f"{type(spec.recipe).__name__} does not run here: {reason}")

    def _switch(self, undo: ExitStack) -> None:
        te = self._te
        undo.callback(te.graph.set_capture_start if te.graph.is_graph_capturing() else te.graph.set_capture_end)
        te.graph.set_capture_start()
        # TE's switch alone is not enough: the backward of GroupedLinear reduces all the same (2.10 and later), which would
        # be recorded, collective included.
        name = "reduce_and_update_fp8_tensors"
        undo.callback(setattr, te.manager, name, vars(te.manager)[name])
        setattr(te.manager, name, staticmethod(_reduce_nothing))
        undo.callback(setattr, te.state, "flag", te.state.flag)
        undo.callback(setattr, te.state, "first", te.state.first)
        undo.callback(_truncate, te.checkpoint_first, len(te.checkpoint_first))
        undo.callback(_keep_keys, te.state.arguments, frozenset(te.state.arguments))
        undo.callback(self._truncate_stashes, [(stash, len(stash)) for stash in te.state.stashes])
        for function, value in compiled_functions(te.jit).items():
            undo.callback(setattr, te.jit, function, value)
            setattr(te.jit, function, as_warmed_up(value, f"transformer_engine.pytorch.jit.{function}"))

    def _watch_attention(self, undo: ExitStack) -> Choices:
        te = self._te
        choose = te.attention_utils.get_attention_backend
        choices = Choices(choose, te.attention_backends)
        undo.callback(setattr, te.attention_utils, "get_attention_backend", choose)
        te.attention_utils.get_attention_backend = choices
        return choices

    def _truncate_stashes(self, lengths: list[tuple[Any, int]]) -> None:
        """What a forward without its backward has put aside for recomputation would be met by a later backward."""
        for stash in self._te.state.stashes:
            length = next((n for known, n in lengths if known is stash), 0)
            while len(stash) > length:
                stash.pop()

    def _require_lengths(self, owners: Sequence[nn.Module], recipe: Any) -> None:
        """TE makes a history anew when its length changes, and a recorded kernel would go on with the old one. Done here
        before the recording, it would break TE's reduction, as it does in eager code: `adjust_amax_history_length` (2.20)
        puts the backward's history in the forward's place of the process-wide lists."""
        if recipe is None or not recipe.delayed():
            return
        for owner in owners:
            for name, tensor in own.tensors(owner).items():
                if not name.endswith("amax_history") or own.keeps_own_recipe(self._te, owner):
                    continue
                if len(tensor) != recipe.amax_history_len:
                    raise StateError(
                        f"{type(owner).__name__} has run with an amax history of {len(tensor)} rows, and the recipe's "
                        f"amax_history_len is {recipe.amax_history_len}: Transformer Engine can't change the length of a "
                        "module that takes part in its reductions. Capture with the length that the module has run with, "
                        "or with a module that has not run yet"
                    )

    @contextmanager
    def call_scope(self, handle: OpenCapture, unit: int) -> Iterator[None]:
        """Around one run of a unit: te.autocast as a capture needs it, for this run alone (TE's function patches the
        class, so that other modules of it are called without FP8), and the flag where the unit caches weights."""
        te, spec = self._te, handle.specs[unit]
        flag = te.state.flag
        te.state.flag = handle.flag if _caches(spec) else None
        try:
            with te.autocast(
                enabled=spec.enabled,
                calibrating=spec.calibrating,
                recipe=spec.recipe,
                amax_reduction_group=spec.group,
                _graph=True,
            ):
                yield
        finally:
            te.state.flag = flag

    @contextmanager
    def watch(self, handle: OpenCapture, unit: int, part: int) -> Iterator[None]:
        """Inside, note the owners that run a forward in low precision (or calibrate), in order of their first one. Found
        where every such forward passes, not by module hooks, which miss `self.layer.forward(x)`."""
        te, thread = self._te, threading.get_ident()
        mine = frozenset(handle.owners)

        def note(owner: nn.Module) -> None:
            low = te.state.enabled or te.state.calibrating
            if low and threading.get_ident() == thread and owner in mine:
                self._refuse_inner_region(owner, handle.specs[unit])
                handle.note(unit, part, owner)

        prepare, run = te.base.prepare_forward, te.fuser.__call__

        @functools.wraps(prepare)
        def prepare_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            note(module)
            return prepare(module, *args, **kwargs)

        @functools.wraps(run)
        def fuser_call(fuser: Any, *args: Any, **kwargs: Any) -> Any:
            for operation in fuser._basic_ops:
                if operation.num_quantizers("forward") or operation.num_quantizers("backward"):
                    note(operation)
            return run(fuser, *args, **kwargs)

        te.base.prepare_forward, te.fuser.__call__ = prepare_forward, fuser_call
        assert handle.choices is not None
        handle.choices.ask_again()
        handle.choices.recording = True
        try:
            yield
        finally:
            handle.choices.recording = False
            te.base.prepare_forward, te.fuser.__call__ = prepare, run

    def _refuse_inner_region(self, owner: nn.Module, outer: QuantSpec) -> None:
        """No replay enters the regions that the captured code opens: they would neither register nor reduce."""
        inner = self.current()
        same = (inner.enabled, inner.calibrating) == (outer.enabled, outer.calibrating)
        if outer.recipe is not None:  # None is TE's default, which only TE resolves
            same = same and recipe_fields(inner.recipe, HOST_FIELDS) == recipe_fields(outer.recipe, HOST_FIELDS)
        if (not same or inner.group is not outer.group) and not own.keeps_own_recipe(self._te, owner):
            raise StateError(
                f"{type(owner).__name__} runs in an autocast region that the captured code opens itself, under {inner}, and "
                f"the capture is under {outer}: a replay runs no Python, so that region would not be entered. Open it "
                "around the calls, and capture inside it (or with quantization=, recipe=)"
            )

    def end_capture(self, handle: OpenCapture, ok: bool) -> TransformerEnginePlan | None:
        """Always called. Undoes `begin_capture`; owners that no recorded part has run are as they were, registration and
        quantizers included, so that their first eager forward sets them up as if there had been no capture."""
        if handle.closed:
            return None
        handle.closed = True
        if ok:
            handle.kept = frozenset(owner for seen in handle.visited.values() for owner in seen)
        plan = self._plan(handle) if ok else None
        try:
            handle.undo.close()
        finally:
            for owner, before in handle.before.items():
                if owner not in handle.kept:
                    own.set_host_state(self._te, owner, before)
                elif own.CACHE in before:
                    own.set_weight_cache(owner, before[own.CACHE])
        return plan

    def _plan(self, handle: OpenCapture) -> TransformerEnginePlan:
        units = {
            idx: UnitState(spec, bool(self.owners(unit)), recipe_fields(spec.recipe, HOST_FIELDS))
            for idx, (spec, unit) in enumerate(zip(handle.specs, handle.units, strict=True))
        }
        parts = {
            place: PartState(tuple(seen), tuple(print_of(owner) for owner in seen))
            for place, seen in handle.visited.items()
        }
        caches = {owner: own.weight_cache(owner) or {} for owner in handle.kept}
        return TransformerEnginePlan(units, parts, pins_of(tuple(caches), caches), handle.flag)

    # ---------------------------------------------------------------------------------------------------- tensors kept

    def snapshot(self, owners: Iterable[nn.Module]) -> Snapshot:
        """Clones of every tensor that outlives a call. An owner without state yet is noted as absent."""
        kept = {}
        for owner in owners:
            kept[owner] = {name: tensor.detach().clone() for name, tensor in own.tensors(owner).items()}
        return Snapshot(kept, frozenset(owner for owner, held in kept.items() if not held), {})

    def restore(self, snapshot: Snapshot, only: Iterable[nn.Module] | None = None) -> None:
        """Put the tensors back in place; what was absent and is there now starts as TE starts it (scale 1, history 0).
        Nothing is written if a shape does not fit. (A history that was made longer or shorter meanwhile fits: TE keeps
        the first rows and fills up with zeros.)"""
        chosen = None if only is None else set(only)
        pairs: list[tuple[torch.Tensor, torch.Tensor | None, str]] = []
        for owner, saved in snapshot.tensors.items():
            if chosen is not None and owner not in chosen:
                continue
            for name, tensor in own.tensors(owner).items():
                value = saved.get(name)
                if value is not None and not _fits(value, tensor, name):
                    raise StateError(
                        f"{type(owner).__name__}: {name} had the shape {list(value.shape)} before the capture and has "
                        f"{list(tensor.shape)} now: nothing was written back"
                    )
                pairs.append((tensor, value, name))
        with torch.no_grad():
            for tensor, value, name in pairs:
                _write_back(tensor, value, name)

    # --------------------------------------------------------------------------------------------------------- replay

    def check(self, plan: TransformerEnginePlan, unit: int, spec: QuantSpec) -> list[str]:
        """Why a replay of a unit under `spec` (the running autocast) would not be what eager computes; empty if it is.
        Another group is fine: only the host's reduction knows it."""
        problems = self._check_spec(plan.units[unit], spec)
        for (number, _), part in plan.parts.items():
            if number == unit:
                problems += _problems(part)
        return problems

    def _check_spec(self, unit: UnitState, spec: QuantSpec) -> list[str]:
        if not unit.owners or not (unit.spec.active or spec.active):
            return []
        captured = unit.spec
        if captured.enabled != spec.enabled:
            return [
                f"te.autocast: enabled was {captured.enabled} at capture and is {spec.enabled} now; recorded kernels go on "
                "as captured. Call under the autocast of the capture, or capture again"
            ]
        if captured.calibrating != spec.calibrating:
            return [f"te.autocast: calibrating was {captured.calibrating} at capture and is {spec.calibrating} now"]
        fields = recipe_fields(spec.recipe, HOST_FIELDS)
        return [] if fields == unit.fields else changed_fields(unit.fields, fields)

    def before_forward(
        self, plan: TransformerEnginePlan, unit: int, part: int, first_microbatch: bool | None, will_backward: bool
    ) -> TransformerEngineTicket:
        """What the eager forward would have done on the host, in its order: recipe, group and registration of every module
        that the part runs; whether weights are cast; who reduces after backward. `check` has found nothing wrong."""
        place = plan.parts.get((unit, part))
        if place is None or not place.visited:
            return TransformerEngineTicket(False)
        whole, spec = plan.units[unit], self.current()
        for found in place.prints:
            found.renew_transposes()
        self._register(place, spec)
        if _caches(whole.spec):
            self._set_flag(plan, place, first_microbatch)
        owns = bool(will_backward and whole.spec.enabled and self._te.manager.is_first_fp8_module())
        return TransformerEngineTicket(owns)

    def _register(self, part: PartState, spec: QuantSpec) -> None:
        """Once, and again only after FP8GlobalStateManager.reset() or a change of a record. In the order of the calls, and
        attention included, as eager registers: the ranks of a group must agree on the order, and some may run eagerly."""
        te = self._te
        lists = te.state.histories
        for owner in part.visited:
            held = own.metas(owner)
            records = tuple(id(meta.get(te.record_key)) for meta in held)
            same_group = all(meta["fp8_group"] is spec.group for meta in held)
            if part.lists is lists and same_group and part.records.get(owner) == records:
                continue
            own.register(te, owner, spec.recipe, spec.group, local_recipe=own.keeps_own_recipe(te, owner))
            part.records[owner] = tuple(id(meta.get(te.record_key)) for meta in held)
        part.lists = lists

    def _set_flag(self, plan: TransformerEnginePlan, part: PartState, first_microbatch: bool | None) -> None:
        """1 keeps the cached weights. One flag per capture, written whenever its value changes and by whoever is called: TE
        has one for the process, written by the first module of an autocast alone, so others read what was meant for it."""
        if not isinstance(first_microbatch, bool):
            raise StateError(
                "captured with cached weights, so every call says is_first_microbatch=True or False; "
                f"got {first_microbatch!r}"
            )
        assert plan.flag is not None
        last = self._last_cast
        skip = not first_microbatch and all(
            last.get(owner) is plan.mark and not own.weight_cache(owner) for owner in part.visited
        )
        if skip is not plan.flag_value:
            plan.flag.fill_(float(skip))
            plan.flag_value = skip
        if skip:
            return
        # Weights are cast by this replay. An eager forward with is_first_microbatch=False would go on with what eager code
        # cast before it, whatever has become of the weights: without a cache it casts. And a cache that is there again says
        # that eager code has cast since, so that the next replay does, too.
        for owner in part.visited:
            last[owner] = plan.mark
            cache = own.weight_cache(owner)
            if cache:
                cache.clear()

    def after_backward(self, ticket: TransformerEngineTicket) -> None:
        """The reduction of gradient amaxes, by the part that was the first of its autocast."""
        if ticket.done:
            raise StateError("after_backward twice for one forward")
        ticket.done = True
        if ticket.owns_backward:
            self._te.manager.reduce_and_update_fp8_tensors(forward=False)

    def abandon(self, ticket: TransformerEngineTicket) -> None:
        """The forward of this ticket did not happen: its claim goes back while its autocast is open."""
        state = self._te.state
        if ticket.owns_backward and not ticket.done and state.depth > 0:
            state.first = True
        ticket.done = True

    def release(self, plan: TransformerEnginePlan) -> None:
        """Let the memory of a plan go. Owners stay registered: eager code needs that."""
        plan.pins.clear()
        plan.parts.clear()

    def autocast(self, spec: QuantSpec) -> AbstractContextManager[None]:
        """te.autocast for an eager region; its exit reduces forward amaxes."""
        region: AbstractContextManager[None] = self._te.autocast(
            enabled=spec.enabled,
            calibrating=spec.calibrating,
            recipe=spec.recipe,
            amax_reduction_group=spec.group,
        )
        return region

    # -------------------------------------------------------------------------------------------------------- for tests

    def read(self, owner: nn.Module) -> dict[str, torch.Tensor]:
        """Clones of an owner's state: scale_fwd, hist_fwd, scale_bwd, hist_bwd."""
        renamed = {"fwd.scale": "scale_fwd", "fwd.amax_history": "hist_fwd"}
        renamed |= {"bwd.scale": "scale_bwd", "bwd.amax_history": "hist_bwd"}
        return {renamed[name]: tensor.detach().clone() for name, tensor in own.tensors(owner).items()}

    def is_registered(self, owner: nn.Module) -> bool:
        """Whether reductions reach this owner's state."""
        return own.is_registered(self._te, owner)

    def record(self, owner: nn.Module) -> dict[str, Any] | None:
        """Where an owner says that it is registered, or None if it never was."""
        return own.record_of(self._te, owner)


def _problems(part: PartState) -> list[str]:
    return [problem for found in part.prints if (problem := found.problem()) is not None]


def _reduce_nothing(*_: Any, **__: Any) -> None:
    """In place of TE's reduction while a capture is open."""


def _verdict(found: Any) -> tuple[bool, str]:
    fine, reason = found
    return bool(fine), str(reason or "")


def _caches(spec: QuantSpec) -> bool:
    return spec.enabled and spec.cache_weights


def _flag_for(specs: Sequence[QuantSpec], units: Sequence[nn.Module]) -> torch.Tensor | None:
    if not any(map(_caches, specs)):
        return None
    tensor = next((t for unit in units for t in (*unit.parameters(), *unit.buffers())), None)
    device = torch.device("cuda", torch.cuda.current_device()) if tensor is None else tensor.device
    return torch.zeros(1, dtype=torch.float32, device=device)


def _truncate(values: list[Any], length: int) -> None:
    del values[length:]


def _keep_keys(table: dict[Any, Any], keys: frozenset[Any]) -> None:
    for key in [key for key in table if key not in keys]:
        del table[key]


def _fits(saved: torch.Tensor, now: torch.Tensor, name: str) -> bool:
    if name.endswith("amax_history"):
        return saved.shape[1:] == now.shape[1:]
    return saved.shape == now.shape


def _write_back(tensor: torch.Tensor, value: torch.Tensor | None, name: str) -> None:
    if value is None:
        tensor.fill_(1.0 if name.endswith("scale") else 0.0)
    elif value.shape == tensor.shape:
        tensor.copy_(value)
    else:
        rows = min(len(value), len(tensor))
        tensor[:rows].copy_(value[:rows])
        tensor[rows:].zero_()
