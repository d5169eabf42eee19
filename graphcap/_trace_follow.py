"""Later traced runs: they repeat the script of the analysis, and say so when they do not.

`TracedProgram.follow` is what warm-up and recording call; `BreakCall` is what a replay runs for a break.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphcap import _attributes, _guards
from graphcap._breaks import Breaks, Target, intercepted
from graphcap._plan import PartPlan
from graphcap._tensors import flatten, same_constant, unflatten
from graphcap._trace import Mode, Trace
from graphcap._trace_analysis import distinct
from graphcap._trace_hoist import Recomputed, StandIn
from graphcap._trace_records import OUTSIDE, BreakRecord, Entry, Ref, Script, StateRef, Value, strided_clone, taken_apart
from graphcap.backends.refusal_modes import line_text, user_place
from graphcap.errors import CutError, InputMismatch
from graphcap.partial_layer import EAGER, GRAPHED, Call, Opened, Program, gather, run_call, run_plain


@dataclass(frozen=True, slots=True)
class Stretch:
    """The `run` of a graphed call: it can't be run by itself, only as a piece of the whole forward."""

    number: int

    def __call__(self, *values: Any) -> Any:
        raise AssertionError("a stretch of a traced callable runs inside TracedProgram.follow")


@dataclass(frozen=True, slots=True)
class BreakCall:
    """The `run` of an eager call: the break on its arguments, rebuilt from the values that cross, in the modes of the
    capture. ambient: grad mode and autocast that surround the whole callable."""

    number: int
    record: BreakRecord
    ambient_grad: bool
    ambient_autocast: tuple[bool, torch.dtype]
    device: str

    @property
    def in_caching_autocast(self) -> bool:
        return self.record.in_region

    def __call__(self, *values: torch.Tensor) -> Any:
        named = dict(zip(self.record.reads, values, strict=True))
        leaves = [self._argument(leaf, named) for leaf in self.record.argument_leaves]
        args, kwargs = unflatten(self.record.arguments, leaves)
        versions = [_version(value) for value in values]
        with self._modes():
            result = self.record.target(*args, **kwargs)
        if versions != [_version(value) for value in values]:
            raise InputMismatch(
                f"the break {self.record.target.title} changed its argument in place, which lies in memory that graphs read "
                "again. Clone it in the break"
            )
        return self._made(result, named)

    @property
    def target(self) -> Target:
        return self.record.target

    def _argument(self, leaf: Any, named: dict[str, torch.Tensor]) -> Any:
        if isinstance(leaf, Ref):
            return named[leaf.name]
        if isinstance(leaf, Recomputed):
            return leaf.run(named)
        return leaf.make(self.record.target.title) if isinstance(leaf, StandIn) else current(leaf)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        grad, autocast = self.record.grad, self.record.autocast
        with ExitStack() as stack:
            if grad != self.ambient_grad:
                stack.enter_context(torch.set_grad_enabled(grad))
            if autocast != self.ambient_autocast:
                stack.enter_context(torch.autocast(self.device, dtype=autocast[1], enabled=autocast[0]))
            yield

    def _made(self, result: Any, named: dict[str, torch.Tensor]) -> Any:
        record = self.record
        leaves, structure = taken_apart(result)
        if structure != record.results:
            raise self._mismatch("returned another structure than at capture")
        made: dict[str, torch.Tensor] = {}
        given = {id(tensor) for tensor in named.values()}
        for leaf, expected in zip(leaves, record.result_leaves, strict=True):
            if not isinstance(expected, Ref):
                if not (leaf is current(expected) or same_constant(current(expected), leaf)):
                    raise self._mismatch(
                        f"returned {_short(leaf)}, but {_short(current(expected))} at capture, which the graph has "
                        "frozen"
                    )
            elif not isinstance(leaf, torch.Tensor):
                raise self._mismatch(f"returned {_short(leaf)}, but a tensor at capture")
            elif expected.name in named:
                if leaf is not named[expected.name]:
                    raise self._mismatch("returned a new tensor, but the very tensor that it was given at capture")
            elif id(leaf) in given:
                raise self._mismatch("returned the very tensor that it was given, but a new tensor at capture")
            elif made.setdefault(expected.name, leaf) is not leaf:
                raise self._mismatch("returned two tensors, but one tensor twice at capture")
        if len({id(tensor) for tensor in made.values()}) < len(made):
            raise self._mismatch("returned one tensor twice, but two tensors at capture")
        return gather(tuple(made[name] for name in record.new))

    def _mismatch(self, what: str) -> InputMismatch:
        return InputMismatch(
            f"the break {self.record.target.title} {what}. What crosses a break must be the same kind of thing at "
            "every call: "
            "break at the module that contains this one and what uses its result"
        )


def current(leaf: Any) -> Any:
    return leaf.get() if isinstance(leaf, StateRef) else leaf


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """A callable with its script: `follow` runs it once more, part by part."""

    layers: tuple[Callable[..., Any], ...]
    script: Script
    breaks: Breaks
    grad: bool
    device: str

    def follow(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: Sequence[Any],
        opened: Callable[[Any], AbstractContextManager[Opened]],
    ) -> set[int]:
        run = _Follower(self, _guards.modules_of(self.layers), parts, opened)
        run.run(args, kwargs)
        return run.visited


def program_of(layers: tuple[Callable[..., Any], ...], script: Script, breaks: Breaks, grad: bool, device: str) -> Program:
    """The script as straight-line code: a graphed call per stretch that has calls, an eager one per break."""
    ambient = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    calls: list[Call] = []
    wanted = sorted(script.wanted)
    for number, record in enumerate(script.hoisted):
        run = BreakCall(number, record, grad, ambient, device)
        reason = record.target.reason
        calls.append(Call(EAGER, record.target.title, run, record.reads, record.new, 0, reason, hoisted=True))
    for number, reads in enumerate(script.reads):
        if number in script.filled:
            made = tuple(name for name in wanted if _made_in(name, number))
            calls.append(Call(GRAPHED, _title(script, number), Stretch(number), reads, made, 0))
        if number < len(script.breaks):
            record = script.breaks[number]
            run = BreakCall(number, record, grad, ambient, device)
            sets = tuple(record.attribute() for record in script.sets[number])
            reason = record.target.reason
            calls.append(Call(EAGER, record.target.title, run, record.reads, record.new, 0, reason, sets=sets))
    names = tuple(dict.fromkeys(leaf.name for leaf in script.output_leaves if isinstance(leaf, Ref)))

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        # One value per tensor argument: at capture all of them are copies, so that no two are one object.
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        return dict(zip(script.inputs, tensors, strict=True))

    def assemble(values: tuple[Any, ...]) -> Any:
        named = dict(zip(names, values, strict=True))
        return unflatten(
            script.output, [named[x.name] if isinstance(x, Ref) else current(x) for x in script.output_leaves]
        )

    trace = TracedProgram(layers, script, breaks, grad, device)
    kept = tuple(record.attribute() for record in script.kept)
    return Program(bind, tuple(calls), names, (), assemble, trace, kept)


def _made_in(name: str, stretch: int) -> bool:
    """Whether stretch number `stretch` made the value: `relu#2:17:0`, or changed it in place: `relu#1:3:0@2`."""
    _, at, changed = name.rpartition("@")
    if at:
        return changed == str(stretch)
    return name.rpartition("#")[2].split(":")[0] == str(stretch)


def _title(script: Script, number: int) -> str:
    if number < len(script.breaks):
        return f"[{number}] up to {script.breaks[number].target.title}"
    return f"[{number}] to the end"


class _Follower(Trace):
    """One run that repeats a script; `opened` is entered and left around every part."""

    def __init__(
        self,
        program: TracedProgram,
        modules: list[nn.Module],
        parts: Sequence[PartPlan],
        opened: Callable[[PartPlan], AbstractContextManager[Opened]],
    ) -> None:
        super().__init__(modules, program.breaks)
        self.program, self.script = program, program.script
        self._wanted = self.script.wanted
        self._opened = opened
        self._stretches: dict[int, tuple[PartPlan, Call]] = {}
        self._breaks: dict[int, tuple[PartPlan, Call]] = {}
        self._hoisted: list[tuple[PartPlan, Call]] = []
        self._done: list[dict[str, torch.Tensor]] = []  # what hoisted breaks made
        self._asked = 0  # how many of them the forward has called
        for part in parts:
            for call in part.calls:
                if call.hoisted:
                    self._hoisted.append((part, call))
                    continue
                table = self._stretches if isinstance(call.run, Stretch) else self._breaks
                table[call.run.number] = (part, call)  # type: ignore[attr-defined]
        self._made: dict[str, torch.Tensor] = {}
        self._context: AbstractContextManager[Opened] | None = None
        self._scope: dict[str, Any] = {}
        self._stands = False
        self._mode = Mode(self)
        self._mode_on = False

    # ------------------------------------------------------------------------------------------------------------- run

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, tensor in zip(self.script.inputs, distinct(args, kwargs), strict=True):
            self.new_value(tensor, name, OUTSIDE, None)
        try:
            self._follow(args, kwargs)
        finally:
            self.put_attributes_back()

    def _follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            with intercepted(self, self.breaks):
                self._run_hoisted()
                self._begin_stretch()
                result = run_plain(self.program.layers, args, kwargs)
                leaves = [leaf for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)]
                for number, tensor in enumerate(leaves):
                    if self.value_of(tensor) is None:
                        self.unknown(tensor, f"out:{number}")
                self._end_stretch()
        except BaseException:
            self._abort()
            raise
        if self._asked != len(self._hoisted):
            raise CutError(
                f"the forward called {self._asked} of the hoisted breaks in one run, but {len(self._hoisted)} in another"
            )
        if len(self.entries) != len(self.script.entries) or self.stretch != len(self.script.breaks):
            raise CutError(
                f"the forward made {len(self.entries)} torch calls and {self.stretch} breaks in one run, but "
                f"{len(self.script.entries)} and {len(self.script.breaks)} in another: it takes another branch"
            )
        self._compare_outputs(result)

    def _compare_outputs(self, result: Any) -> None:
        leaves, structure = flatten(result)
        if structure != self.script.output:
            raise CutError("the callable returned another structure in one run than in another")
        for leaf, expected in zip(leaves, self.script.output_leaves, strict=True):
            if isinstance(expected, Ref):
                value = self.value_of(leaf) if isinstance(leaf, torch.Tensor) else None
                if value is None or value.name != expected.name:
                    raise CutError(
                        f"the callable returned {_short(leaf)} in one run, and the value {expected.name} in "
                        "another"
                    )
            elif not (leaf is current(expected) or same_constant(leaf, current(expected))):
                raise CutError(
                    f"the callable returned {_short(leaf)} in one run and {_short(expected)} in another; a graph "
                    "would freeze it"
                )

    def _run_hoisted(self) -> None:
        for (part, call), record in zip(self._hoisted, self.script.hoisted, strict=True):
            self._run_or_stand_in(part, call, record)
            self._done.append({name: self._scope[name] for name in call.makes})
            if call is part.calls[-1]:
                self._leave()

    def _run_or_stand_in(self, part: PartPlan, call: Call, record: BreakRecord) -> None:
        if call is part.calls[0]:
            self._enter(part)
        if self._stands:
            self._stand_in(record)
        else:
            self._run_break(call)

    def _begin_stretch(self) -> None:
        self.tensors_held = _attributes.snapshot(self.modules)
        entry = self._stretches.get(self.stretch)
        if entry is not None:
            self._enter(entry[0])
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self.active = self._mode_on = True

    def _end_stretch(self) -> None:
        self.active = self._mode_on = False
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._require_same_sets()
        entry = self._stretches.get(self.stretch)
        if entry is None:
            return
        missing = [name for name in entry[1].makes if name not in self._made]
        if missing:
            at = len(self.entries)
            there = self.script.entries[at] if at < len(self.script.entries) else "the end of the forward"
            raise CutError(
                "the forward makes other torch calls in one run than in another, so a graph of it would be wrong: it left "
                f"out\n  {there}\n  (it never made {', '.join(missing)}). Way out: break at the module that decides"
            )
        self._scope.update((name, self._made[name]) for name in entry[1].makes)
        self._made.clear()
        self._leave()

    def set_leaf(self, tensor: torch.Tensor, title: str) -> Any:
        value = self.value_of(tensor)
        return self.state_ref(tensor) if value is None else Ref(value.name)

    def _require_same_sets(self) -> None:
        found = {record.place: record for record in self.take_changes()}
        expected = {record.place: record for record in self.script.sets[self.stretch]}
        if found != expected:
            titles = {record.title for record in (*found.values(), *expected.values())}
            raise CutError(
                f"the forward sets {', '.join(sorted(titles))} to something else in one run than in another: a replay would "
                "set it always as at capture"
            )

    def _enter(self, part: PartPlan) -> None:
        context = self._opened(part)
        opened = context.__enter__()
        self._context, self._scope, self._stands = context, opened.scope, opened.stands

    def _leave(self) -> None:
        context, self._context = self._context, None
        assert context is not None
        context.__exit__(None, None, None)

    def _abort(self) -> None:
        """An error on its way: undo what is open, as `with` would."""
        if self._mode_on:
            self.active = self._mode_on = False
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(*sys.exc_info())

    # ---------------------------------------------------------------------------------------------------------- values

    def new_value(self, tensor: torch.Tensor, name: str, made: int, place: Any) -> Value:
        if made == self.stretch and name in self._wanted:
            self._made[name] = tensor
        return super().new_value(tensor, name, made, place)

    def cross(self, value: Value) -> torch.Tensor:
        proxy: torch.Tensor | None = self._scope.get(value.name)
        entry = self._stretches.get(self.stretch)
        if proxy is None or entry is None or value.name not in entry[1].reads:
            raise CutError(
                f"the value {value.name} is used in another part in one run than in another\n  made at "
                f"{line_text(value.place)}\n"
                f"  used at {line_text(user_place())}"
            )
        if (value.name, self.stretch) not in self.script.cloned:
            return proxy
        with torch.set_grad_enabled(self.program.grad):
            clone = strided_clone(proxy)
        value.name, value.made, value.homes = f"{value.name}@{self.stretch}", self.stretch, {}
        if value.name in self._wanted:
            self._made[value.name] = clone
        return clone

    def unknown(self, tensor: torch.Tensor, where: str) -> Value | None:
        name = f"unseen#{self.stretch}:{where}"
        if name not in self.script.unseen:
            return None
        return self.new_value(tensor, name, self.stretch, user_place())

    def noted(self, number: int) -> None:
        entry = self.entries[number]
        if number >= len(self.script.entries) or not entry.same(self.script.entries[number]):
            expected: Entry | None = self.script.entries[number] if number < len(self.script.entries) else None
            raise different(entry, expected)

    def returned(self, number: int) -> None:
        if self.results[number] != self.script.results[number]:
            raise CutError(
                f"call {self.entries[number]}\n  gave {self.results[number]} in this run, but "
                f"{self.script.results[number]} in the first"
            )

    # ---------------------------------------------------------------------------------------------------------- breaks

    def at_break(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        number = self.stretch
        self.refuse_nesting(target, self._mode)
        if self._asked < len(self._hoisted):
            with self._own_work():
                record, made = self.script.hoisted[self._asked], self._done[self._asked]
                self._require_same_break(target, record, args, kwargs)
                self._asked += 1
                return self._handed_on(record, made, args, kwargs)
        expected = self.script.breaks[number] if number < len(self.script.breaks) else None
        record = self._require_same_break(target, expected, args, kwargs)
        self._end_stretch()
        part, call = self._breaks[number]
        self._run_or_stand_in(part, call, record)
        made = {name: self._scope[name] for name in call.makes}
        if call is part.calls[-1]:
            self._leave()
        self.stretch += 1
        tree = self._handed_on(record, made, args, kwargs)
        self._begin_stretch()
        return tree

    def _handed_on(
        self, record: BreakRecord, made: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the caller of a break gets for what it made."""
        given = self._given(args, kwargs)
        for name, tensor in made.items():
            self.new_value(tensor, name, OUTSIDE, record.place)
        leaves = [
            (made[x.name] if x.name in made else given[x.name]) if isinstance(x, Ref) else current(x)
            for x in record.result_leaves
        ]
        return unflatten(record.results, leaves)

    def _stand_in(self, record: BreakRecord) -> None:
        """What only the next break reads has no copy from warm-up; nobody looks at its values while recording."""
        tensors = [leaf for leaf in record.result_leaves if isinstance(leaf, Ref | StateRef)]
        for leaf, (dtype, shape, requires_grad) in zip(tensors, record.result_specs, strict=True):
            if isinstance(leaf, Ref) and leaf.name in record.new and leaf.name not in self._scope:
                empty = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.program.device)
                self._scope[leaf.name] = empty.requires_grad_(requires_grad)

    def _run_break(self, call: Call) -> None:
        try:
            run_call(call, self._scope)
        except InputMismatch as error:
            raise CutError(f"in warm-up, {error}") from error

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for leaf in taken_apart((args, kwargs))[0]:
            value = self.value_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if value is not None:
                found[value.name] = leaf
        return found

    def _require_same_break(
        self, target: Target, record: BreakRecord | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BreakRecord:
        if record is None or record.target.what is not target.what:
            there = "the end" if record is None else f"the break {record.target.title}"
            raise CutError(f"the forward calls the break {target.title} in one run where another run came to {there}")
        leaves, structure = taken_apart((args, kwargs))
        if structure != record.arguments:
            raise CutError(f"the break {target.title} is called with other arguments in one run than in another")
        for at, (leaf, expected) in enumerate(zip(leaves, record.argument_leaves, strict=True)):
            if isinstance(leaf, torch.Tensor) and isinstance(expected, StandIn):
                is_same = StandIn.of(leaf) == expected
            elif isinstance(leaf, torch.Tensor):
                value = self.value_of(leaf) or self.unknown(leaf, f"break:{at}")
                is_named = isinstance(expected, Ref | Recomputed)
                is_same = value is not None and value.name == expected.name if is_named else (
                    isinstance(expected, StateRef) and expected.get() is leaf
                )
            else:
                is_same = not isinstance(expected, Ref) and (leaf is expected or same_constant(leaf, expected))
            if not is_same:
                raise CutError(
                    f"the break {target.title} is called with {_short(leaf)} in one run and with "
                    f"{_short(expected)} in another, "
                    f"which a graph would freeze\n  at {line_text(user_place())}"
                )
        return record


def different(entry: Entry, expected: Entry | None) -> CutError:
    there = "the end of the forward" if expected is None else str(expected)
    return CutError(
        "the forward makes other torch calls in one run than in another, so a graph of it would be wrong:\n  "
        f"{entry}\n  where "
        f"another run had\n  {there}\n  Way out: break at the module that decides (a counter? a value read in a break?)"
    )
