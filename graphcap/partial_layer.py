"""Cutting a callable into graphed and eager parts.

Declared form: a `PartialLayer` names its parts in order. Each part is a method that takes and returns tensors; a short
text says which values it reads and which it makes:

    class MoELayer(graphcap.PartialLayer):
        inputs = "hidden"
        outputs = "hidden"

        def parts(self):
            return (
                GRAPHED("route", "hidden -> tokens, weights, counts, residual"),
                EAGER("experts", "tokens, weights, counts -> routed"),
                GRAPHED("combine", "routed, residual -> hidden"),
            )

        def route(self, hidden): ...

`layer(hidden)` runs the parts one after the other, so the layer is an ordinary module; `graphcap.capture` turns the
graphed parts into graphs. Neighbouring graphed parts, also of neighbouring layers, become one graph.

The automatic cut of unmodified modules (`break_at=`) produces the same `Program`: see _trace.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from graphcap._attributes import Attribute
from graphcap.errors import CutError


class PartKind(enum.Enum):
    """Whether a part is recorded into a graph or runs as ordinary Python at every call."""

    GRAPHED = "graphed"
    EAGER = "eager"

    def __call__(self, method: str, signature: str, *, reason: str | None = None) -> Part:
        """A part: the method's name and "names it reads -> names it makes". `reason` says why a part is eager; the
        plan prints it."""
        reads, makes = _parse_signature(method, signature)
        return Part(self, method, reads, makes, reason)


GRAPHED = PartKind.GRAPHED
EAGER = PartKind.EAGER


@dataclass(frozen=True, slots=True)
class Part:
    """One declared part. `kind` None: `target` names a submodule that is cut in its own way (see `nested`)."""

    kind: PartKind | None
    target: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    reason: str | None = None


def nested(submodule: str, signature: str) -> Part:
    """A part that is a submodule: a PartialLayer contributes its own parts, any other module is one graphed part."""
    reads, makes = _parse_signature(submodule, signature)
    return Part(None, submodule, reads, makes)


class PartialLayer(nn.Module):
    """A module that says which of its parts a graph may hold.

    Class attributes `inputs` and `outputs` name the values that come in (arguments of `forward`, in order; `name=None`
    marks one that may be left out) and go out (one name: the value itself; several: a tuple). `parts()` lists the parts.
    """

    inputs: str = "hidden"
    outputs: str = "hidden"

    def parts(self) -> Sequence[Part]:
        raise CutError(f"{type(self).__name__}.parts() is not defined: list the layer's parts in order")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parts in order, eagerly. `graphcap.capture` gives the same values with graphs."""
        values = bind_inputs(self, args, kwargs)
        for part in self.parts():
            target = self.get_submodule(part.target) if part.kind is None else getattr(self, part.target)
            made = target(*(values[name] for name in part.reads))
            values.update(zip(part.makes, spread(made, len(part.makes), part.target), strict=True))
        return gather(tuple(values[name] for name in _names(self.outputs)))


def bind_inputs(layer: PartialLayer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a call's arguments stand for, by name; TypeError as Python raises for a wrong call."""
    names = input_names(layer)
    title = type(layer).__name__
    if len(args) > len(names):
        raise TypeError(f"{title} takes {len(names)} arguments ({', '.join(names)}) but {len(args)} were given")
    values = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise TypeError(f"{title} got an unexpected keyword argument {name!r}: it takes {', '.join(names)}")
        if name in values:
            raise TypeError(f"{title} got two values for argument {name!r}")
        values[name] = value
    for name, optional in names.items():
        if name not in values:
            if not optional:
                raise TypeError(f"{title} misses its argument {name!r}")
            values[name] = None
    return values


def input_names(layer: PartialLayer) -> dict[str, bool]:
    """The names in `layer.inputs`, in order, and whether each may be left out."""
    names: dict[str, bool] = {}
    for entry in layer.inputs.split(","):
        name, equals, default = (piece.strip() for piece in entry.partition("="))
        if equals and default != "None":
            raise CutError(f"{type(layer).__name__}.inputs: {entry.strip()!r}: only '=None' marks an optional input")
        names[_checked(name, layer.inputs)] = bool(equals)
    return names


def spread(made: Any, count: int, what: str) -> tuple[Any, ...]:
    """A part's result as one value per name it makes."""
    if count == 1:
        return (made,)
    if not isinstance(made, tuple | list) or len(made) != count:
        size = f"{type(made).__name__} of {len(made)}" if isinstance(made, tuple | list) else type(made).__name__
        raise CutError(f"part {what!r} should return {count} values (a tuple), as its signature says, not {size}")
    return tuple(made)


def gather(values: tuple[Any, ...]) -> Any:
    """The inverse of `spread`: one value as itself, several as a tuple."""
    return values[0] if len(values) == 1 else values


@dataclass(frozen=True, slots=True)
class Call:
    """One step of a program: `run(*values)` reads `reads` and makes `makes` (names unique in the program).
    hoisted: an eager call that was moved in front of everything, where it costs no graph. sets: of an eager call, the
    attributes that graphed calls before it have set: they must be in place when it runs."""

    kind: PartKind
    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    layer: int
    reason: str | None = None
    hoisted: bool = False
    sets: tuple[Attribute, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A callable as straight-line code over named values.

    `bind(args, kwargs)` gives the first values; the calls run in order; `outputs` name the results, of which `assemble`
    makes what the callable returns. `partial_layers` are the modules whose `__call__` is bypassed since their parts are
    called one by one. `trace`: of a callable that was cut by itself, whose graphed calls can't be called one by one:
    it runs the whole callable, and enters a context for each part as it gets there. sets: the attributes that graphed calls
    have set in the end.
    """

    bind: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]
    partial_layers: tuple[nn.Module, ...]
    assemble: Callable[[tuple[Any, ...]], Any] = gather
    trace: Traced | None = None
    sets: tuple[Attribute, ...] = ()

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """All that graphed calls set, wherever."""
        return (*(attribute for call in self.calls for attribute in call.sets), *self.sets)

    @property
    def ends(self) -> tuple[str, ...]:
        """The values that are needed in the end: results, and what attributes hold."""
        held = [attribute.value for attribute in self.attributes if attribute.value is not None]
        return tuple(dict.fromkeys((*self.outputs, *held)))

    def result(self, env: Mapping[str, Any]) -> Any:
        return self.assemble(tuple(env[name] for name in self.outputs))


@dataclass(frozen=True, slots=True)
class Opened:
    """A part that is about to run: the values that it may use, by name; `stands`: they hold its results already, so
    that it must not run (recording does so with eager parts)."""

    scope: dict[str, Any]
    stands: bool = False


def run_call(call: Call, scope: dict[str, Any]) -> None:
    made = call.run(*(scope[name] for name in call.reads))
    scope.update(zip(call.makes, spread(made, len(call.makes), call.name), strict=True))


def run_plain(layers: Sequence[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Layers in sequence, eagerly: the output of one is the first argument of the next."""
    value = layers[0](*args, **kwargs)
    for layer in layers[1:]:
        value = layer(value)
    return value


class Traced(Protocol):
    """A callable that runs as a whole, part after part."""

    def follow(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: Sequence[Any],
        opened: Callable[[Any], AbstractContextManager[Opened]],
    ) -> set[int]:
        """Run it; `opened(part)` is entered where a part begins and left where it ends, with what it makes in the scope.
        Returns the ids of the modules whose Python ran in graphed parts."""


ARGUMENTS = ("args", "kwargs")


def flatten(layers: Sequence[Callable[..., Any]]) -> Program:
    """The program of layers called in sequence: the output of one is the first argument of the next; the first one
    takes all arguments of the call."""
    if not layers:
        raise CutError("an empty tuple of layers: nothing to capture")
    writer = _Writer()
    first = layers[0]
    if isinstance(first, PartialLayer):
        entry = tuple(input_names(first))
        outputs = writer.inline(first, "0", entry, layer=0)

        def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
            return bind_inputs(first, args, kwargs)

    else:
        outputs = (writer.plain(first, "0", ARGUMENTS, layer=0, unpack=True),)

        def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
            return {"args": args, "kwargs": kwargs}

    for index, layer in enumerate(layers[1:], start=1):
        if len(outputs) != 1:
            raise CutError(
                f"layer {index - 1} makes {len(outputs)} values, but the next layer takes its output as one first "
                "argument: let it declare one output (it may be a tuple made by its last part)"
            )
        if isinstance(layer, PartialLayer):
            missing = [name for name, optional in list(input_names(layer).items())[1:] if not optional]
            if missing:
                raise CutError(f"layer {index} needs {', '.join(missing)} besides the output of layer {index - 1}")
            outputs = writer.inline(layer, str(index), outputs, layer=index)
        else:
            outputs = (writer.plain(layer, str(index), outputs, layer=index, unpack=False),)
    return Program(bind, tuple(writer.calls), outputs, tuple(writer.partial_layers))


class _Writer:
    """Collects calls with unique value names."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.partial_layers: list[nn.Module] = []
        self._count = 0

    def inline(self, owner: PartialLayer, path: str, arguments: tuple[str, ...], layer: int) -> tuple[str, ...]:
        """Append the parts of `owner`, called with the values `arguments`; returns the names of its outputs."""
        self.partial_layers.append(owner)
        names = input_names(owner)
        scope: dict[str, str] = dict(zip(names, arguments, strict=False))
        for name in list(names)[len(arguments) :]:
            scope[name] = NOTHING
        for part in owner.parts():
            reads = tuple(self._lookup(scope, name, owner, part) for name in part.reads)
            if part.kind is None:
                makes = self._nested(owner, part, f"{path}.{part.target}", reads, layer)
            else:
                makes = tuple(self._fresh(f"{path}.{name}") for name in part.makes)
                run = getattr(owner, part.target, None)
                if not callable(run):
                    raise CutError(f"{type(owner).__name__} lists the part {part.target!r} but has no such method")
                name = f"{path}.{part.target}"
                self.calls.append(Call(part.kind, name, run, reads, makes, layer, part.reason))
            scope.update(zip(part.makes, makes, strict=True))
        ends = _names(owner.outputs)
        unmade = [name for name in ends if name not in scope]
        if unmade:
            raise CutError(f"{type(owner).__name__}.outputs names {', '.join(unmade)}, which no part makes")
        return tuple(scope[name] for name in ends)

    def plain(
        self, run: Callable[..., Any], path: str, reads: tuple[str, ...], layer: int, *, unpack: bool
    ) -> str:
        """Append any other callable as one graphed part; returns the name of its output."""
        made = self._fresh(f"{path}.output")
        call = _Unpacked(run) if unpack else run
        self.calls.append(Call(GRAPHED, path, call, reads, (made,), layer))
        return made

    def _nested(
        self, owner: PartialLayer, part: Part, path: str, reads: tuple[str, ...], layer: int
    ) -> tuple[str, ...]:
        child = owner.get_submodule(part.target)
        if isinstance(child, PartialLayer):
            makes = self.inline(child, path, reads, layer)
        else:
            makes = tuple(self._fresh(f"{path}.{name}") for name in part.makes)
            self.calls.append(Call(GRAPHED, path, child, reads, makes, layer))
        if len(makes) != len(part.makes):
            raise CutError(f"{path}: {len(makes)} outputs, but the signature of the part names {len(part.makes)}")
        return makes

    def _lookup(self, scope: dict[str, str], name: str, owner: PartialLayer, part: Part) -> str:
        if name not in scope:
            raise CutError(
                f"{type(owner).__name__}: part {part.target!r} reads {name!r}, which is neither an input "
                f"({owner.inputs}) nor made by an earlier part"
            )
        return scope[name]

    def _fresh(self, name: str) -> str:
        self._count += 1
        return f"{name}#{self._count}"


NOTHING = "None"  # the value name of an optional input that was left out


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A callable that takes all arguments of the call as two values."""

    run: Callable[..., Any]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(*args, **kwargs)


def _parse_signature(target: str, signature: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    reads, arrow, makes = signature.partition("->")
    if not arrow:
        raise CutError(f"part {target!r}: {signature!r}: expected 'names it reads -> names it makes'")
    return _names(reads), _names(makes)


def _names(text: str) -> tuple[str, ...]:
    return tuple(_checked(name.strip(), text) for name in text.split(","))


def _checked(name: str, text: str) -> str:
    if not name.isidentifier():
        raise CutError(f"{text!r}: {name!r} is not a name")
    return name
