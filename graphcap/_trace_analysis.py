"""The first traced run: eager, on copies, with every check. It gives the script that later runs must repeat.

Proxies are copies here, so that every stretch has storages of its own and "who may read this memory" is exact: an
operator reads what its stretch made, the stretch's proxies, and the modules' parameters, buffers and tensors (detector D2).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap import _torch_private as private
from graphcap._breaks import Breaks, Target, intercepted
from graphcap._tensors import check_leaf, compact, empty_static, flatten, tensor_problem, tensors_of, unflatten
from graphcap._trace import (
    OUTSIDE,
    BreakRecord,
    Mode,
    Place,
    Ref,
    Script,
    Trace,
    Value,
    spec,
    taken_apart,
)
from graphcap.backends.refusal_modes import line_text, user_place
from graphcap.backends.tape import scatter_one_hot
from graphcap.backends.tape_record import written_arguments
from graphcap.backends.tape_refusals import Refusal, refused_call, refused_operator, tensors_in
from graphcap.errors import CutError, SampleError


class NeedsClone(BaseException):
    """A value is changed in place in a stretch that did not make it: analyse again with a clone there. No Exception,
    so that the user's `except Exception` lets it through."""

    def __init__(self, name: str, stretch: int) -> None:
        super().__init__(name, stretch)
        self.name, self.stretch = name, stretch


@dataclass(slots=True)
class _Owner:
    """Whose a storage is. root: the storage that it is a copy of; proxy: the value that it is a proxy of; clone_of: the
    root of the value that is changed here."""

    stretch: int
    root: int
    key: private.StorageKey
    proxy: Value | None = None
    clone_of: int | None = None
    place: Place = None
    inside: int | None = None  # the break that made it, or whose argument it is


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operator to the analysis, before and after."""

    def __init__(self, analysis: Analysis) -> None:
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


class Analysis(Trace):
    """One eager run of `function` with all checks; `script()` afterwards."""

    def __init__(
        self,
        modules: list[nn.Module],
        breaks: Breaks,
        grad: bool,
        device: torch.device,
        cloned: frozenset[tuple[str, int]] = frozenset(),
        constants: Mapping[int, private.StorageKey] | None = None,
    ) -> None:
        super().__init__(modules, breaks)
        self.grad, self.device, self.cloned = grad, device, cloned
        self.allowed = dict(constants if constants is not None else constants_of(modules))
        self.view = _View(device)
        self.quiet = False
        self.inside: int | None = None  # the break that is running
        self.called_targets: set[int] = set()
        self._owners: dict[int, _Owner] = {}
        self._dead: dict[int, Place] = {}
        self._reads: dict[int, dict[str, None]] = {}
        self._records: list[BreakRecord] = []
        self._unseen: set[str] = set()
        self._values: list[Value] = []
        self._inputs: list[str] = []
        self._mode = Mode(self)
        self._operators = _Operators(self)
        self._title = ""  # of the break that is running
        self._output: tuple[Any, tuple[Any, ...]] | None = None

    # ------------------------------------------------------------------------------------------------------------- run

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Script:
        for number, tensor in enumerate(distinct(args, kwargs)):
            self._own(tensor, OUTSIDE)
            self._inputs.append(self.new_value(tensor, f"input {number}", OUTSIDE, None).name)
        with torch.set_grad_enabled(self.grad), intercepted(self, self.breaks):
            with self._watching():
                result = function(*args, **kwargs)
                for number, tensor in enumerate(tensors_of(flatten(result)[0])):
                    if self.value_of(tensor) is None:
                        self.unknown(tensor, f"out:{number}")
        leaves, structure = flatten(result)
        self._output = (structure, tuple(self._output_leaf(number, leaf) for number, leaf in enumerate(leaves)))
        return self._script()

    @contextmanager
    def _watching(self) -> Any:
        self.active = True
        try:
            with self._operators, self._mode:
                yield
        finally:
            self.active = False

    def _output_leaf(self, number: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return _checked(leaf, f"output {number}")
        return self._leaf(leaf, f"output {number} of the callable")

    def _leaf(self, tensor: torch.Tensor, what: str) -> Any:
        value = self.value_of(tensor)
        if value is not None:
            self._refuse_dead(value.root, value.place, what)
            return Ref(value.name)
        state = self.state_ref(tensor)
        if state is not None:
            return state
        raise CutError(
            f"{what} is a tensor of shape {list(tensor.shape)} that graphcap saw nobody make (kept from an earlier run, or "
            f"reached past the arguments)\n  at {line_text(user_place())}\n  Way out: pass it as an argument, or "
            "keep it in a buffer"
        )

    def _script(self) -> Script:
        assert self._output is not None
        return Script(
            tuple(self.entries),
            tuple(self.results),
            tuple(self._records),
            tuple(tuple(self._reads.get(stretch, ())) for stretch in range(self.stretch + 1)),
            frozenset(self.calls_in),
            self.cloned,
            frozenset(self._unseen),
            tuple(self._inputs),
            *self._output,
        )

    def escaped(self) -> list[Value]:
        """Values of stretches that are alive although the run's result was dropped: somebody keeps them."""
        for value in self._values:
            value.homes.clear()
        self._owners.clear()
        gc.collect()
        alive = []
        for value in self._values:
            tensor = value.origin()
            if value.made >= 0 and tensor is not None:
                alive.append(value)
        return alive

    # ---------------------------------------------------------------------------------------------------------- values

    def new_value(self, tensor: torch.Tensor, name: str, made: int, place: Place) -> Value:
        value = super().new_value(tensor, name, made, place)
        if has_storage(tensor):
            key = private.storage_key(tensor)
            if key not in self._owners and key not in self.allowed:
                self._own(tensor, made)
            owner = self._owners.get(key)
            value.root = key if owner is None else owner.root
        self._values.append(value)
        return value

    def _own(self, tensor: torch.Tensor, stretch: int) -> _Owner:
        key = private.storage_key(tensor)
        owner = self._owners[key] = _Owner(stretch, key, private.StorageKey(tensor), inside=self.inside)
        return owner

    def cross(self, value: Value) -> torch.Tensor:
        self._refuse_dead(value.root, value.place, f"a value made at {line_text(value.place)}")
        self._reads.setdefault(self.stretch, {})[value.name] = None
        source = value.now()
        if (value.name, self.stretch) in self.cloned and source.requires_grad and source._is_view():
            # Eager gives the base a new history then, and adds gradients in another order than a clone's would be.
            raise CutError(
                f"a view taken before a break is changed in place after it\n  taken at {line_text(value.place)}\n "
                " changed in the "
                f"stretch that uses it at {line_text(user_place())}\n  Way out: take the view after the break, or "
                "change out of place"
            )
        proxy = self._copy(source)
        owner = self._own(proxy, self.stretch)
        owner.place = value.place
        if (value.name, self.stretch) in self.cloned:
            owner.clone_of = value.root
            value.name, value.made, value.root, value.homes = (
                f"{value.name}@{self.stretch}",
                self.stretch,
                private.storage_key(proxy),
                {},
            )
        else:
            owner.root, owner.proxy = value.root, value
        return proxy

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """On memory of its own, with the same strides, and no leaf: in-place operations must get as far as D2."""
        quiet, self.quiet = self.quiet, True
        try:
            problem = tensor_problem(tensor)
            if problem is not None:
                raise CutError(f"a tensor that crosses a break {problem}\n  at {line_text(user_place())}")
            made = self._filled(tensor)
            if not (tensor.requires_grad and self.grad):
                return made
            with torch.enable_grad():
                leaf = made.detach().requires_grad_(True)
                core = torch.empty_like(compact(made))
                core.copy_(compact(leaf))
                return core.expand(made.shape) if core.shape != made.shape else core
        except SampleError as error:
            raise CutError(f"a tensor that crosses a break can't be copied: {error}\n  at {line_text(user_place())}") from error
        finally:
            self.quiet = quiet

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made = empty_static(tensor.detach())
            compact(made).copy_(compact(tensor.detach()))
        return made

    def unknown(self, tensor: torch.Tensor, where: str) -> Value | None:
        if not has_storage(tensor) or self.state_ref(tensor) is not None:
            return None
        owner = self._owners.get(private.storage_key(tensor))
        if owner is None:
            return None  # D2 judges it when an operator reads it
        if owner.stretch != self.stretch or owner.inside is not None:
            raise CutError(
                "a tensor crosses a break that graphcap did not see being made (by an operator called from C++, or inside a "
                f"break that did not return it)\n  used at {line_text(user_place())}\n  Way out: let the break "
                "contain its use, or return it"
            )
        name = f"unseen#{self.stretch}:{where}"
        self._unseen.add(name)
        return self.new_value(tensor, name, self.stretch, user_place())

    def _refuse_dead(self, root: int, place: Place, what: str) -> None:
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

    def forbidden(self, name: str, row: Refusal) -> None:
        raise CutError(
            f"{name} ({row.name}) in a graphed stretch: {row.reason}\n  at {line_text(user_place())}\n"
            f"  Way out: {row.cure}; or break_at the module that does it, or 'auto'"
        )

    def before_operator(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fresh = func._schema.name == "aten::lift_fresh"
        for tensor in tensors_in(args, kwargs):
            if has_storage(tensor):
                if fresh and not self._is_known(tensor):
                    self._own(tensor, self.stretch)
                self._refuse_read(tensor, func)
        if self.inside is None:
            row = refused_operator(func, args, kwargs, self.view)
            if row is not None:
                self.forbidden(str(func), row)
            self._refuse_random_recompute(func)
            for tensor in written_arguments(func, args, kwargs):
                if has_storage(tensor):
                    self._refuse_write(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        key = private.storage_key(tensor)
        return key in self._owners or key in self.allowed

    def _refuse_read(self, tensor: torch.Tensor, func: Any) -> None:
        """Detector D2."""
        key = private.storage_key(tensor)
        owner = self._owners.get(key)
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
        self._refuse_dead(owner.root, owner.place, "a tensor")
        if self.inside is not None:
            if owner.inside is None:
                raise CutError(
                    f"the break {self._title} reads a tensor of a graphed stretch that is not its argument\n  made at "
                    f"{line_text(owner.place)}\n  read at {line_text(user_place())}\n  Way out: pass it as an argument"
                )
        elif owner.stretch != self.stretch or owner.inside is not None:
            raise CutError(
                f"{func} reads a tensor of another part past the torch call (an extension's operator? an object that holds "
                f"tensors?)\n  made at {line_text(owner.place)}\n  read at {line_text(user_place())}\n  Way out: "
                "pass it as a plain "
                "argument, or break at the module that does this"
            )

    def _refuse_write(self, tensor: torch.Tensor) -> None:
        owner = self._owners.get(private.storage_key(tensor))
        if owner is None:
            return
        if owner.proxy is not None:
            if owner.proxy.name in self._inputs:
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
        sources = [t for t in tensors_in(args, kwargs) if has_storage(t)]
        is_host = func._schema.name == "aten::lift_fresh" or (
            bool(sources) and all(self.view.is_host(tensor) for tensor in sources)
        )
        for tensor in tensors_in(result):
            if has_storage(tensor) and not self._is_known(tensor):
                owner = self._own(tensor, self.stretch)
                owner.place = self.entries[-1].place if self.entries and self.inside is None else None
            if is_host and self.inside is None and has_storage(tensor):
                self.view.host[private.storage_key(tensor)] = private.StorageKey(tensor)

    # ---------------------------------------------------------------------------------------------------------- breaks

    def at_break(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        self.refuse_nesting(target, self._mode)
        if private.top_dispatch_mode() is not self._operators:
            raise CutError(f"{target.title} is called inside a TorchDispatchMode of the model's")
        self.called_targets.add(id(target.what))
        # The modes are on top of the stack: refuse_nesting saw to it.
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.active, self.quiet = False, True
        try:
            return self._run_break(target, args, kwargs, run)
        finally:
            self.active, self.quiet, self.inside = True, False, None
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _run_break(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        number, place = len(self._records), user_place()
        leaves, structure = taken_apart((args, kwargs))
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and self.value_of(leaf) is None:
                self.unknown(leaf, f"break:{at}")
        what = f"an argument of the break {target.title}"
        recorded = tuple(
            self._leaf(leaf, what) if isinstance(leaf, torch.Tensor) else _checked(leaf, what) for leaf in leaves
        )
        given, raw = self._break_arguments(leaves, number)
        before = [tensor._version for tensor in given if isinstance(tensor, torch.Tensor)]
        new_args, new_kwargs = unflatten(structure, given)
        state = (torch.is_grad_enabled(), self._autocast())
        self._title, self.inside, self.quiet = target.title, number, False
        result = run(*new_args, **new_kwargs)
        self.inside, self.quiet = None, True
        if before != [tensor._version for tensor in given if isinstance(tensor, torch.Tensor)]:
            raise CutError(
                f"the break {target.title} changes its argument in place, which lies in memory that graphs read "
                "again\n  called at "
                f"{line_text(place)}\n  Way out: clone it in the break"
            )
        self.stretch += 1
        record, tree = self._results_of(target, number, result, raw, place, (structure, recorded), state)
        self._records.append(record)
        return tree

    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _break_arguments(self, leaves: list[Any], number: int) -> tuple[list[Any], dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Copies for the break, one per value; and by the copy's id what the user passed."""
        given: list[Any] = []
        copies: dict[int, torch.Tensor] = {}
        raw: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for leaf in leaves:
            value = self.value_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if value is None:
                given.append(leaf)
                continue
            if id(value) not in copies:
                source = value.now()
                copy = copies[id(value)] = self._copy(source)
                owner = self._own(copy, self.stretch)
                owner.root, owner.inside = value.root, number
                raw[id(copy)] = (copy, leaf)
            given.append(copies[id(value)])
        return given, raw

    def _results_of(
        self,
        target: Target,
        number: int,
        result: Any,
        raw: dict[int, tuple[torch.Tensor, torch.Tensor]],
        place: Place,
        arguments: tuple[Any, tuple[Any, ...]],
        state: tuple[bool, tuple[bool, torch.dtype]],
    ) -> tuple[BreakRecord, Any]:
        leaves, structure = taken_apart(result)
        recorded: list[Any] = []
        new: list[str] = []
        specs: list[Any] = []
        what = f"a result of the break {target.title}"
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                recorded.append(_checked(leaf, what))
                continue
            specs.append(spec(leaf))
            if id(leaf) in raw:  # its very argument: the value that the user passed
                leaves[at] = raw[id(leaf)][1]
            elif self.value_of(leaf) is None and self.state_ref(leaf) is None:
                problem = tensor_problem(leaf)
                if problem is not None:
                    raise CutError(f"{what} {problem}\n  called at {line_text(place)}")
                name = f"{target.title.rsplit('.', 1)[-1]}#b{number}:{at}"
                self.new_value(leaf, name, OUTSIDE, place)
                new.append(name)
            recorded.append(self._leaf(leaves[at], what))
        grad, autocast = state
        record = BreakRecord(
            target, *arguments, structure, tuple(recorded), tuple(specs), tuple(new), grad, autocast, place
        )
        return record, unflatten(structure, leaves)


def _one_hot(func: Callable[..., Any]) -> Callable[..., Any]:
    """As the tape records it: the CPU's own checks its range on the host, which a GPU's does not."""

    def scattered(*args: Any, **kwargs: Any) -> Any:
        result = scatter_one_hot(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    return scattered


def _checked(leaf: Any, what: str) -> Any:
    try:
        check_leaf(leaf, what)
    except SampleError as error:
        raise CutError(f"{error}\n  at {line_text(user_place())}") from error
    return leaf


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


def distinct(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors_of(flatten((args, kwargs))[0])}.values())
