"""State around a capture: what is refused, kept, put back, and watched for later changes."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from graphcap._tensors import flatten, tensor_problem, tensors_of
from graphcap.errors import CutError, HookError, ModuleError, PlanError, SampleError
from graphcap.fp8_meta import is_quantized

Layers = Sequence[Callable[..., Any]]


def modules_of(layers: Layers) -> list[nn.Module]:
    """The modules behind callables: a module itself, or the owner of a bound method."""
    found: list[nn.Module] = []
    for layer in layers:
        owner = layer if isinstance(layer, nn.Module) else getattr(layer, "__self__", None)
        if isinstance(owner, nn.Module) and not any(owner is known for known in found):
            found.append(owner)
    return found


def named_state(modules: Iterable[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """All parameters and buffers, each once, with a readable name."""
    seen: set[int] = set()
    found = []
    for index, module in enumerate(modules):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found.append((f"{index}.{name}", tensor))
    return found


# ---------------------------------------------------------------------------------------------------- what is refused


def refuse_surroundings() -> None:
    """Modes of the process in which nothing can be captured."""
    if torch.is_inference_mode_enabled():
        raise PlanError(
            "capture under torch.inference_mode(): its tensors can't be static buffers. Capture outside, or under "
            "torch.no_grad(); the captured object may be called under inference_mode"
        )
    if torch._C._functorch.maybe_current_level() is not None:
        raise PlanError("capture inside a functorch transform (vmap, grad, jvp): capture the plain callable instead")


def refuse_modules(modules: Iterable[nn.Module]) -> None:
    """Modules whose own machinery a graph would silence, and parameters that have no plain memory."""
    for module in modules:
        for name, child in module.named_modules():
            kinds = {kind.__name__ for kind in type(child).__mro__}
            if "OptimizedModule" in kinds or getattr(child, "_compiled_call_impl", None) is not None:
                raise PlanError(f"{_where(name, child)} is compiled (torch.compile): capture the plain module")
            for key, inner in child._modules.items():
                if type(inner).__module__ == "graphcap._graphed":  # its named_modules() are those of what it holds
                    raise PlanError(
                        f"{f'{name}.{key}' if name else key} is graphed already, and a graph can't be replayed inside a "
                        "capture: capture the plain modules, or call the graphed one beside this one"
                    )
            if "FSDPModule" in kinds or kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"}:
                raise PlanError(
                    f"{_where(name, child)} is a {type(child).__name__}: its hooks would not run at replay. Capture the "
                    "module inside it, and wrap the captured object"
                )
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            problem = None if is_quantized(tensor) else tensor_problem(tensor)
            if problem:
                raise PlanError(f"{name} {problem}")


def refuse_samples(named: Iterable[tuple[str, Any]]) -> None:
    for name, leaf in named:
        if isinstance(leaf, torch.Tensor):
            problem = tensor_problem(leaf)
            if problem:
                raise SampleError(f"{name} {problem}")


def refuse_hooks(module: nn.Module, title: str) -> None:
    """The drop-in's rule, as torch and TE have it: no hooks on the module when it is captured."""
    for kind in _HOOKS:
        if getattr(module, kind, None):
            raise HookError(
                f"{title} has hooks ({kind.strip('_')}): they would not run at replay. Register them after capture"
            )


def refuse_trained_buffers(module: nn.Module, title: str) -> None:
    """The drop-in's rule, as torch and TE have it: only parameters are trained."""
    for name, buffer in module.named_buffers():
        if buffer.requires_grad:
            raise ModuleError(
                f"{title}: the buffer {name} requires grad, and its gradient would be lost: make it a parameter"
            )


def refuse_inner_hooks(partial_layers: Iterable[nn.Module], top: nn.Module | None) -> None:
    """Hooks on a PartialLayer that is not called itself, since its parts are called one by one."""
    for layer in partial_layers:
        if layer is not top and any(getattr(layer, kind, None) for kind in _HOOKS):
            raise HookError(
                f"{type(layer).__name__} has hooks, but its parts are captured one by one, so its call never happens: "
                "remove them, put the work into a part, or capture this layer on its own"
            )


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def refuse_gradient_hooks(modules: Iterable[nn.Module], on_mismatch: str) -> None:
    """grads="accumulate" adds into `.grad` inside the graph, so tensor hooks on parameters would see nothing."""
    for module in modules:
        for name, parameter in module.named_parameters():
            if getattr(parameter, "_backward_hooks", None):
                raise HookError(
                    f"{name} has a tensor hook (register_hook), which never sees a gradient that the graph adds itself: use "
                    "CaptureConfig(grads='return'), or register_post_accumulate_grad_hook"
                )
            if on_mismatch == "eager" and isinstance(getattr(parameter, "main_grad", None), torch.Tensor):
                raise PlanError(
                    f"{name} has a main_grad: with on_mismatch='eager' an eager call would add to .grad instead. Use "
                    "on_mismatch='error'"
                )


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _where(name: str, module: nn.Module) -> str:
    return f"{name or 'the module'} ({type(module).__name__})"


# ------------------------------------------------------------------------------------------- parameters, as leaf aliases


@dataclass(slots=True)
class Parameters:
    """The parameters of a capture, in a fixed order, and the leaf aliases that stand for them while it runs."""

    names: list[str] = field(default_factory=list)
    real: list[nn.Parameter] = field(default_factory=list)
    alias: list[torch.Tensor] = field(default_factory=list)
    _index: dict[int, int] = field(default_factory=dict)

    def add(self, name: str, real: nn.Parameter, alias: torch.Tensor) -> None:
        self._index[id(real)] = self._index[id(alias)] = len(self.real)
        self.names.append(name)
        self.real.append(real)
        self.alias.append(alias)

    def index_of(self, tensor: torch.Tensor) -> int | None:
        return self._index.get(id(tensor))


@contextmanager
def leaf_aliases(modules: Sequence[nn.Module]) -> Iterator[Parameters]:
    """While inside, every parameter is replaced by a leaf alias of itself (same memory, no hooks, no `.grad`).

    So gradients of warm-up and recording never reach `.grad`, no hook of the user's fires, and no AccumulateGrad node
    that lives on the default stream is met by a backward capture (it would end it: partial-layer.md, "On CUDA", 1).
    """
    parameters = Parameters()
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for index, module in enumerate(modules):
        for name, real in module.named_parameters():
            if parameters.index_of(real) is None:
                parameters.add(f"{index}.{name}" if len(modules) > 1 else name, real, _alias(real))
        for owner in module.modules():
            places += [(owner, name, p) for name, p in owner._parameters.items() if p is not None]
    try:
        for owner, name, real in places:
            setattr(owner, name, parameters.alias[_known(parameters, real)])
        yield parameters
    finally:
        for owner, name, real in places:
            setattr(owner, name, real)


def _alias(real: nn.Parameter) -> torch.Tensor:
    if type(real) is not nn.Parameter:  # a subclass may carry more than its memory: it stands for itself
        return real
    alias = nn.Parameter(real.detach(), requires_grad=real.requires_grad)
    alias.__dict__.update(real.__dict__)
    return alias


def _known(parameters: Parameters, real: torch.Tensor) -> int:
    index = parameters.index_of(real)
    assert index is not None
    return index


def leaves_of(outputs: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """The leaf tensors that outputs were computed from, each with the number of edges that lead to it."""
    edges: dict[int, list[Any]] = {}
    for _, leaf in leaf_edges(outputs):
        edges.setdefault(id(leaf), [leaf, 0])[1] += 1
    return [(variable, count) for variable, count in edges.values()]


def leaf_edges(outputs: Iterable[torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Every edge of the autograd graph that ends in a leaf: the node that it comes from (None for an output that is a
    leaf itself), and the leaf."""
    seen: set[Any] = set()
    stack = []
    for output in outputs:
        if output.grad_fn is not None:
            stack.append(output.grad_fn)
        elif output.requires_grad:
            yield None, output
    seen.update(stack)
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            variable = getattr(following, "variable", None)
            if variable is not None:
                yield node, variable
            elif following not in seen:
                seen.add(following)
                stack.append(following)


# --------------------------------------------------------------------------------------------------- state that is kept

_SIMPLE = bool | int | float | complex | str | bytes | None


_left_alone: ContextVar[frozenset[tuple[int, str]]] = ContextVar("graphcap_left_alone", default=frozenset())


@contextmanager
def left_alone(attributes: frozenset[tuple[int, str]]) -> Iterator[None]:
    """Inside, these attributes (id of a module, name) are somebody else's to keep and compare."""
    token = _left_alone.set(_left_alone.get() | attributes)
    try:
        yield
    finally:
        _left_alone.reset(token)


@contextmanager
def kept_state(modules: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Warm-up and recording run the forward; afterwards buffers (identity and value), tensor and plain attributes,
    lists, dicts and sets, generators, training flags and gradient tensors are as before, also after a failure.

    Gives a list that afterwards holds what was bound inside and is unbound again: a graph may read its tensors, so
    whoever keeps the graph keeps the list.
    """
    unbound: list[Any] = []
    host_generators = _host_generators()
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
    bindings: list[tuple[dict[str, Any], str, Any]] = []
    absent: list[tuple[dict[str, Any], frozenset[str]]] = []
    containers: list[tuple[Any, Any]] = []
    generators: list[tuple[torch.Generator, torch.Tensor]] = []
    seen: set[int] = set()
    theirs = _left_alone.get()
    for module in (m for top in modules for m in top.modules()):
        tables = (module._parameters, module._modules, module._buffers, module.__dict__)
        others = frozenset(name for owner, name in theirs if owner == id(module))
        absent += [(table, others.union(table)) for table in tables]
        for table in tables[2:]:
            for name, value in table.items():
                if name in others:
                    continue
                if isinstance(value, torch.Tensor | _SIMPLE):
                    bindings.append((table, name, value))
                elif isinstance(value, torch.Generator):
                    generators.append((value, value.get_state()))
                elif type(value) in (list, dict, set) and not name.startswith("_"):
                    containers.append((value, value.copy()))
                if name.startswith("_") and not isinstance(value, torch.Tensor):
                    continue
                for tensor in tensors_of(flatten(value)[0]):
                    if id(tensor) not in seen and tensor_problem(tensor) is None:
                        seen.add(id(tensor))
                        tensors.append((tensor, tensor.detach().clone()))
    for parameter in (p for top in modules for p in top.parameters()):
        gradient = getattr(parameter, "main_grad", None)
        if isinstance(gradient, torch.Tensor) and id(gradient) not in seen:
            seen.add(id(gradient))
            tensors.append((gradient, gradient.detach().clone()))
    try:
        yield unbound
    finally:
        for table, names in absent:
            unbound += [_memory(table.pop(name)) for name in [name for name in table if name not in names]]
        for table, name, value in bindings:
            bound = table.get(name)
            if bound is not value and isinstance(bound, torch.Tensor):
                unbound.append(_memory(bound))
            table[name] = value
        for container, copy in containers:
            _refill(container, copy)
        _set_host_generators(host_generators)
        for generator, state in generators:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, saved in tensors:
                tensor.data.copy_(saved)  # .data has its own version counter: nobody's saved tensor is invalidated


def _memory(value: Any) -> Any:
    """A tensor's memory without its history, which would keep all that the recording saved."""
    return value.detach() if isinstance(value, torch.Tensor) and value.grad_fn is not None else value


def _refill(container: Any, copy: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(copy)
    else:
        container.update(copy)


@contextmanager
def kept_autocast() -> Iterator[None]:
    """The autocast cache holds casts of weights made in warm-up; a graph that read them would miss weight updates."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def state_versions(modules: Iterable[nn.Module]) -> list[tuple[int, int]]:
    """Parameters and buffers, and how often each was changed in place."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return [(id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]


def in_caching_autocast() -> bool:
    """Whether an autocast region is open (also one that is switched off for a while) whose casts of parameters are kept
    until its end. Only the outermost region's end clears the cache."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0 and torch.is_autocast_cache_enabled()


# (id of the module, or 0, and name) -> (its class, or "" where changes at every call are not refused; state)
Attributes = dict[tuple[int, str], tuple[str, Any]]


def plain_attributes(modules: Iterable[nn.Module]) -> Attributes:
    """Host state of modules: numbers, texts, bound tensors, functions, containers and plain objects (see `frozen_form`);
    and Python's and NumPy's random generators. What has no class is only watched after capture: changing it at
    every call is not refused (private containers, such as caches, and objects)."""
    found: Attributes = {(0, name): ("generator", state) for name, state in _host_generators().items()}
    theirs = _left_alone.get()
    for module in (m for top in modules for m in top.modules()):
        kind = type(module).__name__
        for name, value in module.__dict__.items():
            if name in MODULE_TABLES or name == "training" or (id(module), name) in theirs:
                continue
            if isinstance(value, _SIMPLE):
                found[id(module), name] = (kind, value)
            elif isinstance(value, torch.Tensor):
                found[id(module), name] = (kind, id(value))
            elif type(value) in (list, dict) and not name.startswith("_"):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                found[id(module), name] = (kind, [(k, v if isinstance(v, _SIMPLE) else id(v)) for k, v in items])
            else:
                found[id(module), name] = ("", frozen_form(value))
        for name, buffer in module._buffers.items():
            if (id(module), name) not in theirs:
                found[id(module), name] = (kind, id(buffer))
        for name in (*module._parameters, *module._modules):
            found[id(module), name] = ("", True)
    return found


MODULE_TABLES = frozenset(vars(nn.Module())) - {"training"}
LARGEST = 256  # entries of a container, fields of an object: larger ones are compared by identity and length


def frozen_form(value: Any) -> Any:
    """What is compared of a value: itself if it is simple, else its identity, and one level of its contents."""
    if isinstance(value, _SIMPLE):
        return value
    parts = contents(value)
    return id(value), None if parts is None else [(k, v if isinstance(v, _SIMPLE) else id(v)) for k, v in parts]


def contents(value: Any) -> list[tuple[Any, Any]] | None:
    """One level of a container (by index or key), or the simple fields of a plain object; None of anything else."""
    if isinstance(value, list | tuple | set):
        return list(enumerate(value)) if len(value) <= LARGEST else None
    if isinstance(value, dict):
        return list(value.items()) if len(value) <= LARGEST else None
    if is_plain_object(value):
        return [(k, v) for k, v in list(vars(value).items())[:LARGEST] if isinstance(v, _SIMPLE | tuple)]
    return None


def is_plain_object(value: Any) -> bool:
    """A dataclass, a namespace, a config: an object of a class of somebody's own, which holds values and does nothing."""
    kind = type(value)
    if isinstance(value, type | nn.Module | torch.Tensor) or callable(value) or not hasattr(value, "__dict__"):
        return False
    root = kind.__module__.partition(".")[0]
    return kind.__name__ in ("SimpleNamespace", "Namespace") or root not in (*sys.stdlib_module_names, "torch")


def _host_generators() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:  # torch does without, and so do we
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


def _set_host_generators(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    if "numpy.random" in states:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = states["numpy.random"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def changed_attributes(before: Attributes, after: Attributes) -> set[tuple[int, str]]:
    """Which attributes (id of the module, name) are not what they were, or new: lazy state that a first run has filled."""
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def declarable(modules: Iterable[nn.Module]) -> set[tuple[int, str]]:
    """The attributes (id of the module, name) that hold plain values now, which the user's `on_replay` can change."""
    return {
        (id(module), name)
        for module in (m for top in modules for m in top.modules())
        for name, value in module.__dict__.items()
        if name not in MODULE_TABLES and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return all(map(_is_plain, value.values())) if isinstance(value, dict) else isinstance(value, _SIMPLE)


def refuse_host_effects(before: Attributes, after: Attributes, part: str, allowed: Container[tuple[int, str]]) -> None:
    """allowed: (id of the module, name) of what a replay sets again."""
    for key, (kind, value) in after.items():
        if kind and key not in allowed and (key not in before or before[key][1] != value):
            owner, name = key
            what = f"the attribute {kind}.{name}" if owner else f"the state of the generator {name}"
            raise CutError(
                f"part {part}: its Python changes {what} at every call. Python does not run at replay, so the graph would "
                "repeat what it did at capture. Move this work into an EAGER part, do it in "
                "CaptureConfig(on_replay=), keep the value in a buffer that is changed in place (a random choice: draw it "
                "with torch on the device), or return it as an output"
            )


# ------------------------------------------------------------------------------------- which modules a part has called


def eager_only(modules: Iterable[nn.Module], graphed: Container[int], eager: Container[int]) -> set[int]:
    """The ids of the modules that are the business of EAGER parts: those called there alone, what lies beside them in the
    same ModuleList or ModuleDict (an expert without tokens is not called in warm-up), and everything below them that no
    graphed part calls."""
    found: set[int] = set()

    def called(module: nn.Module) -> tuple[bool, bool]:
        """Whether graphed parts, and whether only EAGER parts, call anything of it. Marks what is theirs."""
        in_graphs, alone = id(module) in graphed, id(module) in eager and id(module) not in graphed
        children = [(child, *called(child)) for child in module._modules.values() if child is not None]
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_list and any(id(child) in found for child, _, _ in children):
            found.update(id(child) for child, graphs, _ in children if not graphs)
        in_graphs = in_graphs or any(graphs for _, graphs, _ in children)
        below = any(only for _, _, only in children)
        if alone or (is_list and below and not in_graphs):
            found.add(id(module))
        return in_graphs, alone or below

    def spread(module: nn.Module, inside: bool) -> None:
        inside = id(module) not in graphed and (inside or id(module) in found)
        if inside:
            found.add(id(module))
        for child in module._modules.values():
            if child is not None:
                spread(child, inside)

    for top in modules:
        called(top)
        spread(top, False)
    return found


@contextmanager
def visited_modules() -> Iterator[set[int]]:
    """The ids of the modules called inside, on this thread."""
    seen: set[int] = set()
    thread = threading.get_ident()

    def note(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread:
            seen.add(id(module))

    handle = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
