"""Whose memory is read and written (detector D2): every operator of an analysis, before it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap import _torch_private as private
from graphcap._breaks import Breaks
from graphcap._tensors import flatten, tensors_of
from graphcap._trace import Trace
from graphcap._trace_records import Place, Value
from graphcap.backends.refusal_modes import line_text, user_place
from graphcap.backends.tape import scatter_one_hot
from graphcap.backends.tape_record import written_arguments
from graphcap.backends.tape_refusals import Refusal, refused_call, refused_operator, tensors_in
from graphcap.errors import CutError


class NeedsClone(BaseException):
    """A value is changed in place in a stretch that did not make it: analyse again with a clone there. No Exception,
    so that the user's `except Exception` lets it through."""

    def __init__(self, name: str, stretch: int) -> None:
        super().__init__(name, stretch)
        self.name, self.stretch = name, stretch


@dataclass(slots=True)
class Owner:
    """Whose a storage is. root: the storage that it is a copy of; proxy: the value that it is a proxy of; clone_of: the
    root of the value that is changed here; clone, version: that clone, and how often it was changed so far."""

    stretch: int
    root: int
    key: private.StorageKey
    proxy: Value | None = None
    clone_of: int | None = None
    clone: weakref.ref[torch.Tensor] | None = None
    version: int = 0
    place: Place = None
    inside: int | None = None  # the break that made it, or whose argument it is


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operator to the analysis, before and after."""

    def __init__(self, analysis: Owners) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.analysis = analysis

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        analysis = self.analysis
        if analysis.quiet or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        analysis.before_operator(func, args, kwargs)
        result = func(*args, **kwargs)
        analysis.after_operator(func, args, kwargs, result)
        return result


class _View:
    """Where the backend would see a tensor: on the tape all are on the device, but for what `torch.tensor(...)` made."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.host: dict[int, private.StorageKey] = {}

    def is_host(self, tensor: torch.Tensor) -> bool:
        if self._cuda:
            return tensor.device.type == "cpu"
        return not private.is_transformed(tensor) and has_storage(tensor) and private.storage_key(tensor) in self.host

    def on_device(self, device: object) -> bool:
        if not self._cuda:
            return True
        kind: Any = torch.get_default_device() if device is None else device
        return torch.device(kind).type == "cuda"


class Owners(Trace):
    """A trace that knows of every storage who made it: a stretch, a break, or nobody yet."""

    def __init__(
        self,
        modules: list[nn.Module],
        breaks: Breaks,
        grad: bool,
        device: torch.device,
        constants: Mapping[int, private.StorageKey],
    ) -> None:
        super().__init__(modules, breaks)
        self.grad, self.device, self.allowed = grad, device, dict(constants)
        self.view = _View(device)
        self.quiet = False
        self.inside: int | None = None  # the break that is running
        self.inputs: list[str] = []
        self.title = ""  # of the break that is running
        self.operators = _Operators(self)
        self.owners: dict[int, Owner] = {}
        self.clock = 0
        self._dead: dict[int, Place] = {}
        self.held: set[int] = set()  # storages that were there when the last checkpoint began
        self.drew = False  # a random number was drawn: asked of a call, and of a break
        self.wrote_outside = False  # the break that is running has changed memory that is not its own
        self.reads_inside: set[int] = set()  # storages that it has read
        self._recomputed: dict[int | None, Place] = {}  # roots that a recomputation will read
        self._written: dict[int, tuple[int, Place]] = {}  # any memory: when it was changed last, and where
        self._changed: dict[int, tuple[int, Place]] = {}  # memory of modules and of breaks: when, and where
        self._clones_written: list[Owner] = []  # by the call that is running

    def own(self, tensor: torch.Tensor, stretch: int) -> Owner:
        key = private.storage_key(tensor)
        owner = self.owners[key] = Owner(stretch, key, private.StorageKey(tensor), inside=self.inside)
        return owner

    def refuse_changed(self, value: Value, what: str) -> None:
        """What crosses may be a copy, which does not follow later changes of what it was a view of."""
        self.refuse_dead(value.root, value.place, what)
        when, place = self._changed.get(value.root, (0, None))
        if value.born < when:
            raise CutError(
                f"{what} shares memory with a buffer, a parameter or a break's own tensor that was changed in place since\n"
                f"  made at {line_text(value.place)}\n  changed at {line_text(place)}\n\n"
                f"  used again at {line_text(user_place())}\n  Way out: read it again after the change, or clone it"
            )
        self._refuse_stale_view(value, what)

    def _refuse_stale_view(self, value: Value, what: str) -> None:
        """torch gives a view that requires grad its new history when it is asked for it: in eager behind the break, here in
        front of it, so gradients would be added in another order."""
        when, place = self._written.get(value.root, (0, None))
        tensor = value.now()
        if value.born < when and tensor.requires_grad and tensor._is_view():
            raise CutError(
                f"{what} is a view that was changed in place, or whose base was, after it was taken\n"
                f"  taken at {line_text(value.place)}\n  changed at {line_text(place)}\n"
                f"  used at {line_text(user_place())}\n  Way out: take the view after the change"
            )

    def was_written(self, root: int) -> bool:
        """Whether memory was changed in place so far."""
        return root in self._written

    def refuse_dead(self, root: int, place: Place, what: str) -> None:
        if root in self._dead:
            raise CutError(
                f"{what} shares memory with a tensor that was changed in place behind a break, where graphs keep "
                "copies\n  made at "
                f"{line_text(place)}\n  changed at {line_text(self._dead[root])}\n  used again at "
                f"{line_text(user_place())}\n"
                "  Way out: take the view after the change, or change out of place"
            )

    # ------------------------------------------------------------------------------------------------------- operators

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        row = refused_call(func, args, kwargs, self.view)
        if row is not None:
            self.forbidden(getattr(func, "__name__", repr(func)), row)

    def call(self, title: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if title == "one_hot" and self.device.type == "cpu":
            func = _one_hot(func)
        return super().call(title, func, args, kwargs)

    def on_checkpoint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        result = super().on_checkpoint(args, kwargs)
        self.held = set(self.owners)
        return result

    def forbidden(self, name: str, row: Refusal) -> None:
        raise CutError(
            f"{name} ({row.name}) in a graphed stretch: {row.reason}\n  at {line_text(user_place())}\n"
            f"  Way out: {row.cure}; or break_at the module that does it, or 'auto'"
        )

    def before_operator(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fresh = func._schema.name == "aten::lift_fresh"
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        if self.inside is None and self.held and private.saves_through_hooks():
            for tensor in tensors_in(args, kwargs):
                if has_storage(tensor) and private.storage_key(tensor) in self.held:
                    owner = self.owners[private.storage_key(tensor)]
                    self._recomputed[owner.root] = user_place()
        for tensor in tensors_in(args, kwargs):
            if has_storage(tensor):
                if fresh and not self._is_known(tensor):
                    self.own(tensor, self.stretch)
                self.refuse_read(tensor, func)
                if self.inside is not None:
                    self.reads_inside.add(private.storage_key(tensor))
        if self.inside is None:
            row = refused_operator(func, args, kwargs, self.view)
            if row is not None:
                self.forbidden(str(func), row)
            self._refuse_random_recompute(func)
            for tensor in written_arguments(func, args, kwargs):
                if has_storage(tensor):
                    self.refuse_write(tensor)
        for tensor in written_arguments(func, args, kwargs):
            if has_storage(tensor):
                self._note_change(tensor)

    def returned(self, number: int) -> None:
        """A write that autograd does not count (through `.data`) changes what it saved before the break, too: eager's
        gradients are those of the changed values, and the clone's are not. (Versions move after the operator is done.)"""
        for owner in self._clones_written:
            clone = owner.clone() if owner.clone is not None else None
            if clone is not None and clone._version == owner.version:
                raise CutError(
                    "a tensor from before a break is changed in place through .data (or another alias that autograd does "
                    f"not count)\n  made at {line_text(owner.place)}\n  changed at {line_text(user_place())}\n  Way out: "
                    "change the tensor itself, under torch.no_grad() if need be, or work on a clone"
                )
            owner.version = 0 if clone is None else clone._version
        self._clones_written.clear()

    def _note_change(self, tensor: torch.Tensor) -> None:
        key = private.storage_key(tensor)
        owner = self.owners.get(key)
        self.clock += 1
        self._written[key if owner is None else owner.root] = (self.clock, user_place())
        if owner is not None and self.inside is None:
            roots = (owner.root, owner.clone_of)
            used = next((self._recomputed[root] for root in roots if root in self._recomputed), None)
            if used is not None:
                raise CutError(
                    "a tensor that an activation checkpoint uses is changed in place, so its recomputation would see other "
                    f"values\n  used at {line_text(used)}\n  changed at {line_text(user_place())}\n  Way out: change a clone"
                )
        foreign = owner is None if self.inside is None else owner is None or owner.inside != self.inside
        if foreign:
            self.wrote_outside = True
            self._changed[key if owner is None else owner.root] = (self.clock, user_place())

    def _is_known(self, tensor: torch.Tensor) -> bool:
        key = private.storage_key(tensor)
        return key in self.owners or key in self.allowed

    def refuse_read(self, tensor: torch.Tensor, func: Any) -> None:
        """Detector D2."""
        key = private.storage_key(tensor)
        owner = self.owners.get(key)
        if owner is None:
            if key in self.allowed or self.inside is not None or tensor.numel() == 0:
                return
            raise CutError(
                f"{func} reads a tensor of shape {list(tensor.shape)} of unknown origin (kept from an earlier "
                "run, a global, or "
                "made inside a break that did not return it): a graph would read it as it was at capture\n  at "
                f"{line_text(user_place())}\n"
                "  Way out: pass it as an argument, register it as a buffer, or return it from the break; what a first run "
                "makes and keeps: run the module once before capture"
            )
        self.refuse_dead(owner.root, owner.place, "a tensor")
        if self.inside is not None:
            if owner.inside is None:
                raise CutError(
                    f"the break {self.title} reads a tensor of a graphed stretch that is not its argument\n  made at "
                    f"{line_text(owner.place)}\n  read at {line_text(user_place())}\n  Way out: pass it as an argument"
                )
        elif owner.stretch != self.stretch or owner.inside is not None:
            raise CutError(
                f"{func} reads a tensor of another part past the torch call (an extension's operator? an object that holds "
                f"tensors?)\n  made at {line_text(owner.place)}\n  read at {line_text(user_place())}\n  Way out: "
                "pass it as a plain "
                "argument, or break at the module that does this"
            )

    def refuse_write(self, tensor: torch.Tensor) -> None:
        owner = self.owners.get(private.storage_key(tensor))
        if owner is None:
            return
        if owner.proxy is not None:
            if owner.proxy.name in self.inputs:
                raise CutError(
                    f"{owner.proxy.name} of the callable is changed in place: a graph would change its copy, "
                    f"not the caller's tensor\n  at {line_text(user_place())}\n  Way out: work on a clone, or out of place"
                )
            raise NeedsClone(owner.proxy.name, self.stretch)
        if owner.clone_of is not None:
            self._dead.setdefault(owner.clone_of, user_place())

    def _refuse_random_recompute(self, func: torch._ops.OpOverload) -> None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if private.saves_through_hooks() or any("Checkpoint" in kind.__name__ for kind in self.depth):
            raise CutError(
                f"{func} draws random numbers inside an activation checkpoint in a graphed stretch: the recomputation would "
                f"draw others\n  at {line_text(user_place())}\n  Way out: checkpoint inside a break, or without dropout"
            )

    def after_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for tensor in written_arguments(func, args, kwargs):
            owner = self.owners.get(private.storage_key(tensor)) if has_storage(tensor) else None
            if owner is not None and owner.clone_of is not None and self.inside is None:
                self._clones_written.append(owner)
        sources = [t for t in tensors_in(args, kwargs) if has_storage(t)]
        is_host = func._schema.name == "aten::lift_fresh" or (
            bool(sources) and all(self.view.is_host(tensor) for tensor in sources)
        )
        for tensor in tensors_in(result):
            if has_storage(tensor) and not self._is_known(tensor):
                owner = self.own(tensor, self.stretch)
                owner.place = self.entries[-1].place if self.entries and self.inside is None else None
            if is_host and self.inside is None and has_storage(tensor):
                self.view.host[private.storage_key(tensor)] = private.StorageKey(tensor)


def _one_hot(func: Callable[..., Any]) -> Callable[..., Any]:
    """As the tape records it: the CPU's own checks its range on the host, which a GPU's does not."""

    def scattered(*args: Any, **kwargs: Any) -> Any:
        result = scatter_one_hot(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    return scattered


def has_storage(tensor: torch.Tensor) -> bool:
    return not (
        private.is_transformed(tensor) or tensor.layout is not torch.strided or private.overrides_dispatch(tensor)
    )


def constants_of(modules: list[nn.Module]) -> dict[int, private.StorageKey]:
    """The storages that modules hold: parameters, buffers, tensors in attributes and containers."""
    found: dict[int, private.StorageKey] = {}
    for module in (m for top in modules for m in top.modules()):
        for table in (module._parameters, module._buffers, vars(module)):
            for name, value in table.items():
                if name.startswith("_") and not isinstance(value, torch.Tensor):
                    continue
                for tensor in tensors_of(flatten(value)[0]):
                    if has_storage(tensor):
                        found[private.storage_key(tensor)] = private.StorageKey(tensor)
    return found
