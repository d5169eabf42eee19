"""The first traced run: eager, on copies, with every check. It gives the script that later runs must repeat.

Proxies are copies here, so that every stretch has storages of its own and "who may read this memory" is exact: an
operator reads what its stretch made, the stretch's proxies, and the modules' parameters, buffers and tensors (detector D2).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphcap import _attributes, _guards
from graphcap import _torch_private as private
from graphcap._attributes import ABSENT
from graphcap._breaks import Breaks, Target, intercepted
from graphcap._tensors import check_leaf, compact, empty_static, flatten, tensor_problem, tensors_of, unflatten
from graphcap._trace import Mode
from graphcap._trace_hoist import Recipes, Recomputed, StandIn
from graphcap._trace_owners import Owners, has_storage
from graphcap._trace_records import (
    OUTSIDE,
    BreakRecord,
    Place,
    Ref,
    Script,
    SetRecord,
    StateRef,
    Value,
    spec,
    strided_clone,
    taken_apart,
)
from graphcap.backends.refusal_modes import line_text, user_place
from graphcap.backends.tape_refusals import tensors_in
from graphcap.errors import CutError, GraphcapError, SampleError


class Analysis(Owners):
    """One eager run of `function` with all checks; `script()` afterwards."""

    def __init__(
        self,
        modules: list[nn.Module],
        breaks: Breaks,
        grad: bool,
        device: torch.device,
        cloned: frozenset[tuple[str, int]],
        constants: Mapping[int, private.StorageKey],
        hoists: bool = True,
    ) -> None:
        super().__init__(modules, breaks, grad, device, constants)
        self.cloned, self.hoists = cloned, hoists
        self.recipes = Recipes()
        self._hoisted: list[BreakRecord] = []
        self._open: dict[tuple[int, str], SetRecord] = {}  # attributes that this stretch has set
        self._sets: list[tuple[SetRecord, ...]] = []
        self._kept: tuple[SetRecord, ...] = ()
        self._set_by_breaks: dict[tuple[int, str], str] = {}
        self.called_targets: set[int] = set()
        self.stack: list[nn.Module] = []  # the modules that are running
        self.callers: dict[int, nn.Module | None] = {}  # of break modules and functions
        self._reads: dict[int, dict[str, None]] = {}
        self._records: list[BreakRecord] = []
        self._unseen: set[str] = set()
        self._values: list[Value] = []
        self._given: list[tuple[str, private.StorageKey]] = []  # what breaks got, and which
        self._left: list[tuple[Value, private.StorageKey]] = []  # memory that a clone has taken the place of
        self._mode = Mode(self)
        self._output: tuple[Any, tuple[Any, ...]] | None = None

    # ------------------------------------------------------------------------------------------------------------- run

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Script:
        for number, tensor in enumerate(distinct(args, kwargs)):
            self.own(tensor, OUTSIDE)
            self.inputs.append(self.new_value(tensor, f"input {number}", OUTSIDE, None).name)
        try:
            with torch.set_grad_enabled(self.grad), intercepted(self, self.breaks), _guards.kept_autocast():
                with self._watching():
                    result = function(*args, **kwargs)
                    for number, tensor in enumerate(tensors_of(flatten(result)[0])):
                        if self.value_of(tensor) is None:
                            self.unknown(tensor, f"out:{number}")
            leaves, structure = flatten(result)
            self._output = (structure, tuple(self._output_leaf(number, leaf) for number, leaf in enumerate(leaves)))
            self._close_sets()
            self._kept = self._all_sets()
            return self._script()
        finally:
            self.put_attributes_back()

    @contextmanager
    def _watching(self) -> Any:
        self.active = True
        try:
            with self.operators, self._mode:
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
            self.refuse_changed(value, what)
            return Ref(value.name)
        state = self.state_ref(tensor)
        if state is not None:
            return state
        raise CutError(
            f"{what} is a tensor of shape {list(tensor.shape)} that graphcap saw nobody make (kept from an earlier run, or "
            f"reached past the arguments)\n  at {line_text(user_place())}\n  Way out: pass it as an argument, or "
            "keep it in a buffer"
        )

    # ------------------------------------------------------------------------------------------------------ attributes

    def set_leaf(self, tensor: torch.Tensor, title: str) -> Any:
        return self._leaf(tensor, f"the attribute {title}")

    def _note_sets(self) -> None:
        self._open.update((record.place, record) for record in self.take_changes())

    def _close_sets(self) -> None:
        """The end of a stretch."""
        self._note_sets()
        self._sets.append(tuple(self._open.values()))
        self._open.clear()

    def _note_break_sets(self, title: str) -> None:
        now = _attributes.snapshot(self.modules)
        self._set_by_breaks.update((place, title) for place in _attributes.changes(self.tensors_held, now))
        self.tensors_held = now

    def _all_sets(self) -> tuple[SetRecord, ...]:
        """The attributes that stretches have set, as they are in the end."""
        last = {record.place: record for records in self._sets for record in records}
        for place, record in last.items():
            if place in self._set_by_breaks:
                raise CutError(
                    f"{record.title} is set in a graphed stretch and in the break {self._set_by_breaks[place]}: set it in "
                    "one of them"
                )
            now = record.owner.__dict__.get(record.key, ABSENT)
            leaf = self.set_leaf(now, record.title) if isinstance(now, torch.Tensor) else now
            last[place] = SetRecord(record.owner, record.key, leaf)
        return tuple(last.values())

    def _refuse_stale(self) -> None:
        """A set attribute that is handed on as it was before: a replay would find the new one in its place."""
        assert self._output is not None
        places = {record.place: record for record in self._kept}
        leaves = [leaf for record in (*self._hoisted, *self._records) for leaf in record.argument_leaves]
        leaves += [leaf for record in (*self._hoisted, *self._records) for leaf in record.result_leaves]
        leaves += [record.leaf for records in (*self._sets, self._kept) for record in records]
        for leaf in (*leaves, *self._output[1]):
            if isinstance(leaf, StateRef) and leaf.table == "__dict__" and (id(leaf.owner), leaf.key) in places:
                raise CutError(
                    f"{places[id(leaf.owner), leaf.key].title} is used as the call before left it, and set anew: a graph "
                    "can't tell the two apart\n  Way out: keep it in a buffer that is changed in place, or pass it as an "
                    "argument"
                )

    def _script(self) -> Script:
        assert self._output is not None
        self._refuse_stale()
        return Script(
            tuple(self.entries),
            tuple(self.results),
            tuple(self._hoisted),
            tuple(self._records),
            tuple(tuple(self._reads.get(stretch, ())) for stretch in range(self.stretch + 1)),
            frozenset(self.calls_in),
            self.cloned,
            frozenset(self._unseen),
            tuple(self.inputs),
            tuple(self._sets),
            self._kept,
            *self._output,
        )

    def escaped(self) -> list[Value]:
        """Values of stretches that are alive although the run's result was dropped: somebody keeps them."""
        for value in self._values:
            value.homes.clear()
        self.owners.clear()
        gc.collect()
        # Who still holds memory that eager would have changed in place would see the change.
        alive = [value for value, key in self._left if not key.is_gone()]
        for value in self._values:
            tensor = value.origin()
            if value.made >= 0 and tensor is not None:
                alive.append(value)
        return alive

    def keepers(self) -> list[str]:
        """Breaks whose arguments are alive although the run is over; call it after `escaped`."""
        return [title for title, key in self._given if not key.is_gone()]

    # ---------------------------------------------------------------------------------------------------------- values

    def call(self, title: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, self.drew = len(self.entries), False
        result = super().call(title, func, args, kwargs)
        if self.hoists and self.stretch == 0 and not self.drew and not title.endswith(".apply"):
            made = []
            for place, tensor in enumerate(tensors_in(result)):
                value = self.value_of(tensor)
                if value is not None and value.name == f"{title}#0:{number}:{place}" and not tensor.requires_grad:
                    made.append((place, value))
            self.recipes.note(func, (args, kwargs), made, self.value_of, self.inputs)
        return result

    def new_value(self, tensor: torch.Tensor, name: str, made: int, place: Place) -> Value:
        value = super().new_value(tensor, name, made, place)
        if has_storage(tensor):
            key = private.storage_key(tensor)
            if key not in self.owners and key not in self.allowed:
                self.own(tensor, made)
            owner = self.owners.get(key)
            value.root = key if owner is None else owner.root
        self.clock += 1
        value.born = self.clock
        self._values.append(value)
        return value

    def cross(self, value: Value) -> torch.Tensor:
        self.refuse_changed(value, "a tensor from before a break")
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
        owner = self.own(proxy, self.stretch)
        owner.place = value.place
        self.held.add(private.storage_key(proxy))
        if (value.name, self.stretch) in self.cloned:
            if value.root in self.allowed:
                raise CutError(
                    f"a view of a buffer or parameter, taken before a break, is changed in place after it\n  taken at "
                    f"{line_text(value.place)}\n  changed in the stretch that uses it at {line_text(user_place())}\n"
                    "  Way out: take the view after the break"
                )
            self._left.append((value, self.owners[value.root].key))
            owner.clone_of = value.root
            owner.clone, owner.version = weakref.ref(proxy), proxy._version
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
                return strided_clone(made.detach().requires_grad_(True))
        except SampleError as error:
            where = line_text(user_place())
            raise CutError(f"a tensor that crosses a break can't be copied: {error}\n  at {where}") from error
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
        owner = self.owners.get(private.storage_key(tensor))
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

    # ---------------------------------------------------------------------------------------------------------- breaks

    def on_module(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.stack.append(module)
        try:
            return super().on_module(module, run, args, kwargs)
        finally:
            self.stack.pop()

    def at_break(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        self.refuse_nesting(target, self._mode)
        if private.top_dispatch_mode() is not self.operators:
            raise CutError(f"{target.title} is called inside a TorchDispatchMode of the model's")
        self.called_targets.add(id(target.what))
        around = self.stack[:-1] if isinstance(target.what, nn.Module) else self.stack
        self.callers[id(target.what)] = around[-1] if around else None
        # The modes are on top of the stack: refuse_nesting saw to it.
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.active, self.quiet = False, True
        try:
            return self._run_break(target, args, kwargs, run)
        finally:
            self.active, self.quiet, self.inside = True, False, None
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _run_break(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        number, place = len(self._hoisted) + len(self._records), user_place()
        leaves, structure = taken_apart((args, kwargs))
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and self.value_of(leaf) is None:
                self.unknown(leaf, f"break:{at}")
        self._note_sets()
        what = f"an argument of the break {target.title}"
        recorded = tuple(
            self._leaf(leaf, what) if isinstance(leaf, torch.Tensor) else _checked(leaf, what) for leaf in leaves
        )
        given, raw = self._break_arguments(target.title, leaves, number)
        before = [tensor._version for tensor in given if isinstance(tensor, torch.Tensor)]
        new_args, new_kwargs = unflatten(structure, given)
        state = (torch.is_grad_enabled(), self._autocast(), _guards.in_caching_autocast())
        self.title, self.inside, self.quiet = target.title, number, False
        self.drew = self.wrote_outside = False
        self.reads_inside = set()
        with _guards.kept_autocast():  # a cast that one part made is not for another
            result = self._result(target, run, new_args, new_kwargs, place)
        self.inside, self.quiet = None, True
        self._note_break_sets(target.title)
        if before != [tensor._version for tensor in given if isinstance(tensor, torch.Tensor)]:
            raise CutError(
                f"the break {target.title} changes its argument in place, which lies in memory that graphs read "
                "again\n  called at "
                f"{line_text(place)}\n  Way out: clone it in the break"
            )
        hoisted = self._hoistable(target, (leaves, given), result, raw)
        if hoisted is None:
            self._close_sets()
            self.stretch += 1
            record, tree = self._results_of(target, number, result, raw, place, (structure, recorded), state)
            self._records.append(record)
        else:
            record, tree = self._results_of(target, number, result, raw, place, (structure, hoisted), state)
            self._hoisted.append(record)
        return tree

    def _result(
        self, target: Target, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], place: Place
    ) -> Any:
        planning = self.breaks.planning
        if planning is None or not planning.meta:
            return run(*args, **kwargs)
        try:
            return run(*args, **kwargs)
        except GraphcapError:
            raise
        except Exception as error:
            what = "the stand-in of the break" if target.stand_in is not None else "the break"
            raise CutError(
                f"{what} {target.title} can't run on meta tensors, which have no values: {type(error).__name__}: {error}\n"
                f"  called at {line_text(place)}\n  Way out: say what it returns (stand_ins, or --like-input where the "
                "result looks like its first tensor), or plan a small configuration of the model on the CPU"
            ) from error

    def _hoistable(
        self,
        target: Target,
        arguments: tuple[list[Any], list[Any]],
        result: Any,
        raw: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[Any, ...] | None:
        """The arguments of a function break that can run in front of everything: it reads only what is there then, and
        what it does would not be seen to have moved. None of any other break."""
        # A break before it may leave something behind that it reads; a random number would be drawn in another order.
        # So would an attribute that the stretch has set.
        if not self.hoists or isinstance(target.what, nn.Module):
            return None
        if self._open or self._records or self.drew or self.wrote_outside:
            return None
        results = tensors_of(taken_apart(result)[0])
        if any(tensor.requires_grad or id(tensor) in raw for tensor in results):
            return None
        if any(key not in self.owners and self.was_written(key) for key in self.reads_inside):
            return None
        seen = self.reads_inside.union(private.storage_key(tensor) for tensor in results if has_storage(tensor))
        made: list[Any] = []
        for leaf, copy in zip(*arguments, strict=True):
            value = self.value_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if isinstance(leaf, torch.Tensor) and value is None:
                state = self.state_ref(leaf)
                if state is None or self.was_written(private.storage_key(leaf)):
                    return None
                made.append(state)
            elif value is None:
                made.append(leaf)
            elif value.name in self.inputs:
                made.append(Ref(value.name))
            elif private.storage_key(copy) not in seen:
                made.append(StandIn.of(copy))
            else:
                again = None if self.was_written(value.root) else self.recipes.of(value.name, self.inputs)
                if again is None:
                    return None
                made.append(again)
        return tuple(made)

    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _break_arguments(
        self, title: str, leaves: list[Any], number: int
    ) -> tuple[list[Any], dict[int, tuple[torch.Tensor, torch.Tensor]]]:
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
                owner = self.own(copy, self.stretch)
                owner.root, owner.inside = value.root, number
                raw[id(copy)] = (copy, leaf)
                self._given.append((title, owner.key))
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
        state: tuple[bool, tuple[bool, torch.dtype], bool],
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
        grad, autocast, in_region = state
        reads: dict[str, None] = {}
        for leaf in arguments[1]:
            names = (leaf.name,) if isinstance(leaf, Ref) else leaf.reads if isinstance(leaf, Recomputed) else ()
            reads.update(dict.fromkeys(names))
        record = BreakRecord(
            target,
            *arguments,
            structure,
            tuple(recorded),
            tuple(specs),
            tuple(new),
            grad,
            autocast,
            in_region,
            place,
            tuple(reads),
        )
        return record, unflatten(structure, leaves)


def _checked(leaf: Any, what: str) -> Any:
    try:
        check_leaf(leaf, what)
    except SampleError as error:
        raise CutError(f"{error}\n  at {line_text(user_place())}") from error
    return leaf


def distinct(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors_of(flatten((args, kwargs))[0])}.values())
