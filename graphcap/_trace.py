"""A user's forward while it runs as a whole: which tensor is which value, and in which stretch it is used.

Words: stretch k is what runs between break k - 1 and break k. A *value* is a tensor as the user's code knows it, whatever
stretch it is used in; its name says where it was made (`relu#2:17:0`: result 0 of call 17, in stretch 2). In a stretch
that did not make it, a value is stood for by a *proxy*, a leaf: arguments are replaced as calls are made, so the user's
code never holds a proxy unless a call returned it.

The trace sees outermost torch calls (a TorchFunctionMode), calls of modules and autograd Functions (_breaks.py). All
runs of one forward must see the same calls; _trace_analysis.py makes the first one, and _trace_follow.py compares.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphcap import _attributes
from graphcap import _torch_private as private
from graphcap._breaks import Breaks, Target
from graphcap._trace_records import Entry, Place, SetRecord, StateRef, Value, constant, spec, state_of, swapped
from graphcap.backends.refusal_modes import line_text, user_place
from graphcap.backends.tape_refusals import tensors_in
from graphcap.errors import CutError


class Trace(ABC):
    """What all runs share; also the watcher of intercepted calls."""

    def __init__(self, modules: list[nn.Module], breaks: Breaks) -> None:
        self.modules, self.breaks = modules, breaks
        self.state = state_of(modules)
        self.stretch = 0
        self.entries: list[Entry] = []
        self.results: list[tuple[Any, ...]] = []
        self.calls_in: dict[int, int] = {}  # stretch -> number of calls
        self.visited: set[int] = {id(module) for module in modules}
        self.depth: list[type] = []  # autograd Functions that are running
        self.tensors_held = _attributes.snapshot(modules)  # at the beginning of the stretch
        self._before = dict(self.tensors_held)
        self._set_places: set[tuple[int, str]] = set()  # what stretches set; what breaks set is theirs
        self.active = False
        self._applies = False  # the arguments of a Function are being replaced
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Value]] = {}

    # ------------------------------------------------------------------------------------------------------ subclasses

    @abstractmethod
    def cross(self, value: Value) -> torch.Tensor:
        """What stands for an earlier value in this stretch, at its first use there."""

    @abstractmethod
    def unknown(self, tensor: torch.Tensor, where: str) -> Value | None:
        """A tensor that no call was seen to make; a Value if it becomes one here."""

    @abstractmethod
    def at_break(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """A break is called."""

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch call is about to run."""
        return None

    def noted(self, number: int) -> None:
        """A call was written down."""
        return None

    def returned(self, number: int) -> None:
        """Its results were."""
        return None

    # ---------------------------------------------------------------------------------------------------------- values

    def state_ref(self, tensor: torch.Tensor) -> StateRef | None:
        found = self.state.get(id(tensor))
        return found if found is not None and found.get() is tensor else None

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        found = self._known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def register(self, tensor: torch.Tensor, value: Value) -> Value:
        self._known[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def new_value(self, tensor: torch.Tensor, name: str, made: int, place: Place) -> Value:
        return self.register(tensor, Value(name, made, weakref.ref(tensor), place))

    def use(self, tensor: torch.Tensor, where: str) -> tuple[torch.Tensor, str]:
        """What a call in this stretch gets for a tensor, and the name of the value if it crosses into the stretch."""
        if private.is_transformed(tensor):
            return tensor, ""
        value = self.value_of(tensor)
        if value is None:
            self.unknown(tensor, where)
            return tensor, ""
        home = value.homes.get(self.stretch, tensor if value.made == self.stretch else None)
        if home is not tensor:  # the recomputation would get it as it is
            self._refuse_recomputed(value)
        if value.made == self.stretch:
            assert home is not None
            return home, ""
        if home is None:
            name = value.name
            proxy = self.cross(value)
            value.homes[self.stretch] = proxy
            self.register(proxy, value)
            return proxy, name
        return home, value.name

    # ------------------------------------------------------------------------------------------------------ attributes

    @abstractmethod
    def set_leaf(self, tensor: torch.Tensor, title: str) -> Any:
        """What an attribute was set to, as the script has it."""

    def take_changes(self) -> list[SetRecord]:
        """The tensor attributes that were set since the last look."""
        now = _attributes.snapshot(self.modules)
        found = _attributes.changes(self.tensors_held, now)
        self.tensors_held = now
        self._set_places.update(found)
        records: list[SetRecord] = []
        for (_, key), (module, value) in found.items():
            leaf = value
            if isinstance(value, torch.Tensor):
                if self.value_of(value) is None:
                    self.unknown(value, f"set:{len(records)}")
                leaf = self.set_leaf(value, f"{type(module).__name__}.{key}")
            records.append(SetRecord(module, key, leaf))
        return records

    def put_attributes_back(self) -> None:
        """The run is over: attributes are as they were, and their tensors can go."""
        _attributes.put_back(self._before, self.modules, self._set_places)
        self.tensors_held, self._before = {}, {}

    # ----------------------------------------------------------------------------------------------------------- calls

    def call(self, title: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call with its arguments replaced, and write it down."""
        number = len(self.entries)
        self.calls_in[self.stretch] = self.calls_in.get(self.stretch, 0) + 1
        described: list[Any] = []

        def swap(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                described.append(constant(leaf))
                return leaf
            given, crossing = self.use(leaf, f"{number}:{len(described)}")
            described.append((crossing, *spec(given)))
            return given

        with self._own_work():
            args, kwargs = swapped(args, kwargs, swap)
        self.entries.append(Entry(title, tuple(described), user_place()))
        self.results.append(())
        self.noted(number)
        result = func(*args, **kwargs)
        with self._own_work():
            self._note_results(number, title, result)
        return result

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """What the trace does itself is nobody's call."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def _note_results(self, number: int, title: str, result: Any) -> None:
        specs: list[Any] = []
        for place, tensor in enumerate(tensors_in(result)):
            if private.is_transformed(tensor):
                continue
            specs.append(spec(tensor))
            if self.value_of(tensor) is None and self.state_ref(tensor) is None:
                name = f"{title}#{self.stretch}:{number}:{place}"
                self.new_value(tensor, name, self.stretch, self.entries[number].place)
        if not specs and isinstance(result, bool | int | float | str):
            specs.append(constant(result))
        self.results[number] = tuple(specs)
        self.returned(number)

    # --------------------------------------------------------------------------------------------------------- watcher

    def on_module(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.active:
            return run(*args, **kwargs)
        target = self.breaks.targets.get(id(module))
        if target is not None:
            return self.at_break(target, args, kwargs, run if target.stand_in is None else target.stand_in)
        self.visited.add(id(module))
        return run(*args, **kwargs)

    def on_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.active:
            return target.what(*args, **kwargs)
        return self.at_break(target, args, kwargs, target.stand_in or target.what)

    def on_apply(self, kind: type, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.active or torch.is_inference_mode_enabled():
            return run(*args, **kwargs)

        if kind.__name__ == "CheckpointFunction":
            # Its nested backward adds to parameters in an order of its own, which parts can't repeat.
            raise CutError(
                f"a reentrant activation checkpoint in a graphed stretch, or around a break\n"
                f"  at {line_text(user_place())}\n  Way out: checkpoint(..., use_reentrant=False), or let the "
                "whole checkpoint lie inside a break"
            )

        def inside(*inner: Any, **named: Any) -> Any:  # its arguments are replaced before it begins
            self._applies = False
            self.depth.append(kind)
            try:
                return run(*inner, **named)
            finally:
                self.depth.pop()

        self._applies = True
        try:
            return self.call(f"{kind.__name__}.apply", inside, args, kwargs)
        finally:
            self._applies = False

    def on_checkpoint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a checkpoint keeps for its recomputation, which nobody traces, must be what this stretch reads."""
        if not self.active:
            return args, kwargs
        where = f"{len(self.entries)}:checkpoint"
        function, *rest = args

        def swap(leaf: Any) -> Any:
            return self.use(leaf, where)[0] if isinstance(leaf, torch.Tensor) else leaf

        with self._own_work():
            given, kwargs = swapped(tuple(rest), kwargs, swap)
        recomputing = _Recomputing(self, self.stretch)

        def recompute(*inner: Any, **named: Any) -> Any:
            with recomputing:
                return function(*inner, **named)

        return (recompute, *given), kwargs

    def _refuse_recomputed(self, value: Value) -> None:
        if (self._applies and private.saves_through_hooks()) or any("Checkpoint" in kind.__name__ for kind in self.depth):
            raise CutError(
                "a tensor of another part is used inside an activation checkpoint without being its argument, so its "
                f"recomputation would go wrong\n  made at {line_text(value.place)}\n  used at "
                f"{line_text(user_place())}\n  Way out: pass it to checkpoint(...) as an argument"
            )

    def on_direct_forward(self, target: Target) -> None:
        if self.active:
            raise CutError(
                f"{target.title} is a break, but its .forward is called directly, past its hooks\n  at "
                f"{line_text(user_place())}\n  Way out: call the module itself, or break at the module that does this"
            )

    def refuse_nesting(self, target: Target, mode: object) -> None:
        """States of torch in which a graph can't be ended and another begun."""
        if self.depth:
            kind = self.depth[-1].__name__
            cure = "let the checkpointed region lie inside one break or between two" if "Checkpoint" in kind else (
                "break at the module that calls it"
            )
            raise CutError(f"{target.title} is called inside {kind}.apply: a break can't be in there. Way out: {cure}")
        if private.saves_through_hooks():
            raise CutError(
                f"{target.title} is called where saved-tensor hooks are active (an activation checkpoint around it?): what "
                "is recomputed would contain a break. Way out: checkpoint inside the break or between breaks, or break at "
                "the module that contains the checkpoint"
            )
        if private.in_functorch_transform():
            raise CutError(f"{target.title} is called inside a functorch transform (vmap, grad): break outside of it")
        if torch.is_inference_mode_enabled():
            raise CutError(f"{target.title} is called under inference_mode: use torch.no_grad()")
        if mode is not None and private.top_function_mode() is not mode:
            raise CutError(
                f"{target.title} is called inside a TorchFunctionMode of the model's (`with torch.device(...)`?): open it "
                "inside the break or between breaks"
            )


class Mode(TorchFunctionMode):
    """Hands outermost torch calls to the trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in _METADATA or name.startswith("get ") or not self.trace.active:
            return func(*args, **kwargs)
        if name in _HOOKS or name.startswith("set "):
            raise CutError(
                f"{name.removeprefix('set ')} is set on a tensor, or hooked to one, in a graphed stretch: Python "
                "does not run "
                f"at replay\n  at {line_text(user_place())}\n  Way out: break at the module that does it"
            )
        self.trace.called(func, args, kwargs)
        return self.trace.call(name, func, args, kwargs)


class _Recomputing(TorchFunctionMode):
    """The recomputation of a checkpoint runs in the backward, which is not traced: what its function holds of other parts
    is replaced as it was in the forward."""

    def __init__(self, trace: Trace, stretch: int) -> None:
        super().__init__()
        self.trace, self.stretch = trace, stretch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def swap(leaf: Any) -> Any:
            value = self.trace.value_of(leaf) if isinstance(leaf, torch.Tensor) else None
            return leaf if value is None else value.homes.get(self.stretch, leaf)

        args, kwargs = swapped(args, kwargs or {}, swap)
        return func(*args, **kwargs)


_METADATA = frozenset((
    "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "is_contiguous", "is_floating_point",
    "is_complex", "is_signed", "storage_offset", "get_device", "__len__", "__hash__", "is_same_size", "is_inference",
    "is_pinned", "is_conj", "is_neg", "has_names", "untyped_storage", "data_ptr", "is_tensor", "result_type", "can_cast",
    "is_distributed", "dim_order", "is_shared", "is_coalesced", "storage_type", "_is_view", "is_storage", "__dir__",
    "__reduce_ex__",
))
_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "set_"))
_TENSORS = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))


def _name(func: Callable[..., Any]) -> str:
    """The name of a call; "get x" and "set x" for attributes, but for those that make a tensor."""
    name = getattr(func, "__name__", repr(func))
    if name not in ("__get__", "__set__", "__delete__"):
        return name
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name != "__get__":
        return f"set {attribute}"
    return attribute if attribute in _TENSORS else f"get {attribute}"
