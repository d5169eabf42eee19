"""Tensors and nested containers: what a call looks like, compared at replay with what it looked like at capture."""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from graphcap.errors import SampleError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a graph assumes of a tensor. `stride` has 0 for dimensions of size 0 or 1, where it means nothing, except
    that an expanded dimension (stride 0, size > 1) keeps its 0."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    seen_stride: tuple[int, ...] = field(default=(), compare=False, repr=False)  # as it was, for the quick comparison

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        shape = tuple(tensor.shape)
        return TensorSpec(shape, _stride(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride())

    @property
    def expanded(self) -> bool:
        return any(stride == 0 and size > 1 for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        count = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= 1 if stride == 0 and size > 1 else size
        return count * self.dtype.itemsize

    def difference(self, tensor: torch.Tensor, *, strict: bool, grad_mode: bool) -> str | None:
        """How `tensor` differs, as "expected ..., got ...", or None. `strict`: strides and a missing requires_grad
        count too (strides of an expanded tensor always do); requires_grad counts in grad mode only."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            problem = tensor_problem(tensor)
            if problem:
                return f"expected a plain tensor, got one that {problem}"
        if tensor.shape != self.shape:
            return f"expected shape {list(self.shape)}, got {list(tensor.shape)}"
        if tensor.dtype != self.dtype:
            return f"expected dtype {self.dtype}, got {tensor.dtype}"
        if tensor.device != self.device:
            return f"expected device {self.device}, got {tensor.device}"
        if grad_mode and tensor.requires_grad != self.requires_grad and (strict or tensor.requires_grad):
            return f"expected requires_grad={self.requires_grad}, got {tensor.requires_grad}"
        # the plain comparison first: it holds almost always, and this runs at every call
        if (strict or self.expanded) and tensor.stride() != self.stride and _stride(tensor) != self.stride:
            return f"expected strides {list(self.stride)}, got {list(tensor.stride())}"
        return None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}"


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


_PLAIN = (torch.Tensor, nn.Parameter)


_planning: ContextVar[bool] = ContextVar("graphcap_planning", default=False)


@contextmanager
def planning() -> Iterator[None]:
    """Inside, meta tensors are fine: nothing will be recorded."""
    token = _planning.set(True)
    try:
        yield
    finally:
        _planning.reset(token)


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor can't be read by a graph, or None."""
    if nn.parameter.is_lazy(tensor):
        return "is not initialised (a lazy module): run the module once first"
    if tensor.device.type == "meta" and not _planning.get():
        return "is on the meta device: give it memory first (module.to_empty(device=...)); graphcap.plan takes it as it is"
    if tensor.is_nested:
        return "is a nested tensor: its shapes depend on the data"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: only strided tensors have fixed memory"
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) and not isinstance(tensor, nn.Parameter | nn.Buffer):
        return f"is a {type(tensor).__name__}, a tensor subclass: pass the plain tensor inside it"
    if type(tensor.data) is not torch.Tensor:
        return f"holds a {type(tensor.data).__name__}, a tensor subclass: capture the local module instead"
    return None


def static_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy with the same strides: kernels may choose by strides, and so may the bits differ."""
    made = empty_static(tensor)
    with torch.no_grad():
        compact(made).copy_(compact(tensor.detach()))
    return made.detach()


def empty_static(tensor: torch.Tensor) -> torch.Tensor:
    """New memory with the shape, dtype, device and strides of `tensor`; expanded dimensions stay expanded."""
    core = compact(tensor)
    if overlaps(core):
        raise SampleError(
            f"a sample of shape {list(tensor.shape)} and strides {list(tensor.stride())} has elements that share memory: "
            "pass a contiguous copy"
        )
    if core.numel() == 0 or not core.is_contiguous():
        made = torch.empty_strided(core.shape, core.stride(), dtype=core.dtype, device=core.device)
    else:
        made = torch.empty(core.shape, dtype=core.dtype, device=core.device)
    return made.expand(tensor.shape) if core.shape != tensor.shape else made


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an expanded tensor once: a view with size 1 in every expanded dimension."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements lie in one place (expanded dimensions apart: see `compact`)."""
    if tensor.numel() < 2:
        return False
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


Getter = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Structure:
    """A nested container without its leaves. `kind` None is a leaf. Two structures are equal when the containers have
    the same types, keys and lengths. `order` are a dict's keys as they came: they are rebuilt so, but not compared."""

    kind: type | None
    context: Any = None
    children: tuple[Structure, ...] = ()
    order: tuple[Any, ...] = field(default=(), compare=False)


_LEAF = Structure(None)
_PLAIN_CONTAINERS = (tuple, list, dict, OrderedDict)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of nested tuples, lists, dicts, dataclasses and registered pytree nodes, and the rest."""
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves)


def _flatten(value: Any, leaves: list[Any]) -> Structure:
    kind = type(value)
    if isinstance(value, torch.Tensor) or value is None:
        leaves.append(value)
        return _LEAF
    if kind is tuple or kind is list:
        return Structure(kind, None, tuple(_flatten(item, leaves) for item in value))
    if kind is dict or kind is OrderedDict:
        keys = tuple(sorted(value)) if all(isinstance(key, str) for key in value) else tuple(value)
        return Structure(kind, keys, tuple(_flatten(value[key], leaves) for key in keys), tuple(value))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return Structure(kind, "namedtuple", tuple(_flatten(item, leaves) for item in value))
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        return Structure(kind, context, tuple(_flatten(item, leaves) for item in children))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = tuple(f.name for f in dataclasses.fields(value))
        return Structure(kind, fields, tuple(_flatten(getattr(value, name), leaves) for name in fields))
    leaves.append(value)
    return _LEAF


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The inverse of `flatten`."""
    return _unflatten(structure, iter(leaves))


def _unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    kind = structure.kind
    if kind is None:
        return next(leaves)
    children = [_unflatten(child, leaves) for child in structure.children]
    if kind is tuple:
        return tuple(children)
    if kind is list:
        return children
    if kind is dict or kind is OrderedDict:
        by_key = dict(zip(structure.context, children, strict=True))
        return kind((key, by_key[key]) for key in structure.order)
    if structure.context == "namedtuple":
        return kind(*children)
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        return node.unflatten_fn(children, structure.context)
    made: Any = object.__new__(kind)  # a dataclass: its __post_init__ has run for the original already
    for name, child in zip(structure.context, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def getters(structure: Structure) -> list[tuple[Getter, ...]] | None:
    """How to reach every leaf, in the order of `flatten`; None where a container must be asked by its own function."""
    kind = structure.kind
    if kind is None:
        return [()]
    found: list[tuple[Getter, ...]] = []
    for index, child in enumerate(structure.children):
        below = getters(child)
        step = _getter(structure, index)
        if below is None or step is None:
            return None
        found += [(step, *path) for path in below]
    return found


def _getter(structure: Structure, index: int) -> Getter | None:
    kind, context = structure.kind, structure.context
    if kind is tuple or kind is list or context == "namedtuple":
        return operator.itemgetter(index)
    if kind is dict or kind is OrderedDict:
        return operator.itemgetter(context[index])
    return None


def paths(structure: Structure, root: str) -> list[str]:
    """A readable name of every leaf, in the order of `flatten`."""
    if structure.kind is None:
        return [root]
    found: list[str] = []
    for index, child in enumerate(structure.children):
        found += paths(child, _step(root, structure, index))
    return found


def _step(root: str, structure: Structure, index: int) -> str:
    kind, context = structure.kind, structure.context
    if kind is not None and context == "namedtuple":
        return f"{root}.{kind._fields[index]}"  # type: ignore[attr-defined]
    if kind is dict or kind is OrderedDict:
        return f"{root}[{context[index]!r}]"
    if kind is not None and dataclasses.is_dataclass(kind) and isinstance(context, tuple):
        return f"{root}.{context[index]}"
    return f"{root}[{index}]"


def same_constant(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors would make Python take the same way."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float | complex):
        return repr(a) == repr(b)  # 0.0 is not -0.0 (1 / x tells), and nan is nan
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # arrays and the like have no single truth value: not the same
        return False


def check_leaf(value: Any, path: str) -> None:
    """A leaf that is no tensor must not hide one: it would be frozen at capture without a word."""
    if isinstance(value, torch.Tensor | int | float | str | bytes | bool | complex | type(None) | torch.dtype):
        return
    where = _hidden_tensor(value, set())
    if where is not None:
        raise SampleError(
            f"{path} is a {type(value).__name__} that holds a tensor ({where}): graphcap can't see into it. Pass the "
            "tensors as arguments, make the class a dataclass, or register it with torch.utils._pytree"
        )


_CLOSED = (type, nn.Module, ModuleType, FunctionType, str, bytes, int, float, complex, type(None))
_LOOKS = 10_000  # objects that one argument may consist of before the search for tensors gives up


def _hidden_tensor(value: Any, seen: set[int]) -> str | None:
    """The place at which an object holds a tensor, as Python would write it, or None."""
    if isinstance(value, torch.Tensor):
        return ""
    if isinstance(value, _CLOSED) or id(value) in seen or len(seen) > _LOOKS:
        return None
    seen.add(id(value))
    for place, item in _held(value):
        below = _hidden_tensor(item, seen)
        if below is not None:
            return place + below
    return None


def _held(value: Any) -> list[tuple[str, Any]]:
    held: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        held += [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        held += [(f"[{index}]", item) for index, item in enumerate(value)]
    held += [(f".{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return held + [(f".{name}", getattr(value, name)) for name in slots if hasattr(value, name)]


@dataclass(frozen=True, slots=True)
class CallSpec:
    """What a call looked like: structure, one TensorSpec per tensor leaf, every other leaf as a constant."""

    structure: Structure
    leaves: tuple[Any, ...]  # TensorSpec or constant
    names: tuple[str, ...]
    plain: bool  # positional arguments alone, none of them a container: a call needs no flattening
    shareable: bool  # two and more leaves require grad: they may turn out to be one tensor

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSpec:
        leaves, structure = flatten((args, kwargs))
        names = call_names(structure)
        for leaf, name in zip(leaves, names, strict=True):
            check_leaf(leaf, name)
        specs = tuple(TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in leaves)
        plain = not kwargs and all(child.kind is None for child in structure.children[0].children)
        shareable = sum(isinstance(x, TensorSpec) and x.requires_grad for x in specs) > 1
        return CallSpec(structure, specs, names, plain, shareable)

    def same_signature(self, other: CallSpec) -> bool:
        """Whether both calls can use one set of static buffers."""
        return self.structure == other.structure and all(
            a == b if isinstance(a, TensorSpec) else not isinstance(b, TensorSpec) and same_constant(a, b)
            for a, b in zip(self.leaves, other.leaves, strict=True)
        )

    def difference(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, strict: bool, grad_mode: bool) -> str | None:
        """The first difference of a call, as "name: expected ..., got ...", or None."""
        if self.plain and not kwargs and self._is_just_so(args, strict and grad_mode and self.shareable, grad_mode):
            return None
        leaves, structure = flatten((args, kwargs))
        if structure != self.structure:
            return _structure_difference(self, structure)
        return self._leaves_difference(leaves, strict=strict, grad_mode=grad_mode)

    def _is_just_so(self, args: tuple[Any, ...], may_be_shared: bool, grad_mode: bool) -> bool:
        """Whether a plain call is the captured one down to its strides: almost always it is, and this runs at every call.
        False says nothing: the careful comparison has the word."""
        if len(args) != len(self.leaves) or may_be_shared:
            return False
        for expected, leaf in zip(self.leaves, args, strict=True):
            if type(expected) is TensorSpec:
                if (
                    type(leaf) not in _PLAIN
                    or leaf.layout is not torch.strided
                    or leaf.shape != expected.shape
                    or leaf.stride() != expected.seen_stride
                    or leaf.dtype is not expected.dtype
                    or leaf.device != expected.device
                    or (grad_mode and leaf.requires_grad != expected.requires_grad)
                ):
                    return False
            elif leaf is not expected:
                return False
        return True

    def _leaves_difference(self, leaves: Sequence[Any], *, strict: bool, grad_mode: bool) -> str | None:
        for expected, leaf, name in zip(self.leaves, leaves, self.names, strict=True):
            found = _leaf_difference(expected, leaf, strict=strict, grad_mode=grad_mode)
            if found is not None:
                return f"{name}: {found}"
        return self._same_leaf(leaves) if strict and grad_mode and self.shareable else None

    def _same_leaf(self, leaves: Sequence[Any]) -> str | None:
        """One tensor in two places: its gradients would be added in the order of the arguments, not of their uses."""
        seen: dict[int, str] = {}
        for leaf, name in zip(leaves, self.names, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                if id(leaf) in seen:
                    return (
                        f"{name}: is the same tensor as {seen[id(leaf)]}, and eager would add its gradients in an order "
                        "that a graph can't know: pass a view in one place (x.view_as(x))"
                    )
                seen[id(leaf)] = name
        return None


def call_args(value: Any) -> tuple[Any, ...]:
    """Sample arguments as a tuple; one tensor stands for itself."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if not isinstance(value, tuple | list):
        raise SampleError(f"sample_args: expected a tuple of arguments, got {type(value).__name__}")
    return tuple(value)


def call_kwargs(value: Any) -> dict[str, Any]:
    """Sample keywords as a dict of their own."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SampleError(f"sample_kwargs: expected a dict with names as keys, got {type(value).__name__}")
    return dict(value)


def call_names(structure: Structure) -> tuple[str, ...]:
    positional, keyword = structure.children
    names = [name for i, child in enumerate(positional.children) for name in paths(child, f"argument {i}")]
    for key, child in zip(keyword.context, keyword.children, strict=True):
        names += paths(child, f"keyword {key!r}")
    return tuple(names)


def _leaf_difference(expected: Any, leaf: Any, *, strict: bool, grad_mode: bool) -> str | None:
    if isinstance(expected, TensorSpec):
        if not isinstance(leaf, torch.Tensor):
            return f"expected a tensor ({expected}), got {leaf!r}"
        return expected.difference(leaf, strict=strict, grad_mode=grad_mode)
    if isinstance(leaf, torch.Tensor):
        return f"expected {expected!r}, as at capture, got a tensor"
    if not same_constant(expected, leaf):
        return f"expected {expected!r}, which is frozen in the graph, got {leaf!r}"
    return None


def _structure_difference(spec: CallSpec, structure: Structure) -> str:
    positional, keyword = spec.structure.children
    new_positional, new_keyword = structure.children
    if len(positional.children) != len(new_positional.children):
        return f"expected {len(positional.children)} positional arguments, got {len(new_positional.children)}"
    missing = [key for key in keyword.context if key not in new_keyword.context]
    extra = [key for key in new_keyword.context if key not in keyword.context]
    if missing or extra:
        said = [f"keyword {key!r} is missing" for key in missing] + [f"keyword {key!r} was not captured" for key in extra]
        return "; ".join(said)
    both = zip(positional.children, new_positional.children, strict=True)
    pairs = [(f"argument {i}", a, b) for i, (a, b) in enumerate(both)]
    pairs += [
        (f"keyword {key!r}", a, b)
        for key, a, b in zip(keyword.context, keyword.children, new_keyword.children, strict=True)
    ]
    for name, a, b in pairs:
        if a != b:
            return f"{name}: expected {_describe(a)}, got {_describe(b)}"
    return "the nesting of the arguments differs"


def _describe(structure: Structure) -> str:
    if structure.kind is None:
        return "a single value"
    keys = f" with keys {list(structure.context)}" if structure.kind in (dict, OrderedDict) else ""
    return f"a {structure.kind.__name__} of {len(structure.children)}{keys}"


def tensors_of(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
