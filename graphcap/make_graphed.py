"""The verbs: plan, warm up, record, bind. The only module that knows all four stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, overload

import torch
from torch import nn

from graphcap import _capture, _guards, _plan, _trace_plan, _warmup
from graphcap._graphed import Ambient, Graphed, Runner
from graphcap._plan import CapturePlan, Layers
from graphcap._ranks import Ranks
from graphcap._tensors import flatten
from graphcap.backends import choose
from graphcap.backends.scopes import is_capturing
from graphcap.config import CaptureConfig
from graphcap.errors import CaptureError, OrderError, PlanError, SampleError, StateError, WarmupError
from graphcap.order import Order

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def capture(
    module: Any,
    sample_args: Any,
    sample_kwargs: Any = None,
    *,
    break_at: Any = (),
    order: Order | str | None = None,
    backend: str = "auto",
    config: CaptureConfig | None = None,
    quantization: object | None = None,
) -> Graphed:
    """Capture a module (or a tuple of layers, or a tuple of chunks under an order) and return its graphed form.

    module: an nn.Module, a PartialLayer, or a tuple of them that is called in sequence. Under an order with C chunks: a
        tuple of C chunks, each a module or a tuple of layers.
    sample_args, sample_kwargs: arguments as calls will have them (shapes, dtypes, strides, requires_grad, constants);
        their values do not matter. Under an order: one entry per chunk.
    break_at: what must run eagerly: names or patterns of submodules (``"*.experts"``), modules, module classes, functions,
        "auto" (whatever reads the host), or several of these. The model stays as it is (docs/guides/capture-any-model.md).
    order: the steps that will run (`Order` or its text); None means forward, backward, forward, backward, ...
    backend: "cuda", "tape" (CPU, for tests), or "auto".
    Nothing is left behind: buffers, gradients, generators and modes are as before, also when capture fails.
    Raises PlanError, CutError (what can't be cut), CaptureError (what can't be recorded), DeviceError.
    """
    if quantization is not None:
        raise StateError("quantization: captured FP8 state is not built yet. Capture without it")
    order = as_order(order)
    chunks, samples, root = normalise(module, sample_args, sample_kwargs, order)
    plan = _plan.build(chunks, samples, order, config or CaptureConfig())
    runner = _run_stages(plan, backend, drop_in=False, break_at=break_at)
    return Graphed(root, runner, chunks)


def as_order(order: Any) -> Order | None:
    if isinstance(order, str):
        return Order.parse(order)
    if order is None or isinstance(order, Order):
        return order
    raise OrderError(
        f"order={order!r}: expected an Order or its text ('0F0 0B0'); signed numbers, as Transformer Engine has them, "
        "become one with Order.from_signed"
    )


def _run_stages(
    plan: CapturePlan,
    backend_name: str,
    *,
    drop_in: bool,
    pool: object | None = None,
    allow_unused: bool = True,
    break_at: Any = (),
) -> Runner:
    """Warm up, record and bind a plan; whatever happens inside, the surroundings are as before."""
    layers = tuple(layer for unit in plan.units for layer in unit.layers)
    modules = _guards.modules_of(layers)
    refuse(plan, modules, drop_in)
    if not asks_for_breaks(break_at):
        for module in modules:
            _plan.refuse_hidden_parts(module)
    samples = [(name, leaf) for unit in plan.units for s in unit.samples for name, leaf in _named_leaves(s)]
    tensors = [(n, t) for n, t in [*_guards.named_state(modules), *samples] if isinstance(t, torch.Tensor)]
    backend = choose(backend_name, tensors)
    ambient = Ambient.now(backend.device)
    attributes = _guards.plain_attributes(modules)
    with (
        backend.session(),
        _guards.kept_state(modules) as kept,
        _guards.leaf_aliases(modules) as parameters,
        _guards.kept_autocast(),
    ):
        ranks = Ranks(backend.device)
        with ranks.stage("warm-up", watch=True):
            if asks_for_breaks(break_at):
                plan = _trace_plan.cut_at(plan, break_at, backend.device)
            facts = _warmup.run(plan, backend, parameters)
            if not allow_unused:
                _refuse_unused(facts)
        with ranks.stage("recording"):
            captured = _capture.record(facts, backend, pool, kept)
        lazy = _guards.changed_attributes(attributes, _guards.plain_attributes(modules))
    return Runner(captured, backend, ambient, lazy)


def asks_for_breaks(break_at: Any) -> bool:
    return not isinstance(break_at, str | tuple | list) or bool(break_at)


def refuse(plan: CapturePlan, modules: Sequence[nn.Module], drop_in: bool) -> None:
    if is_capturing():
        raise CaptureError("a capture inside a capture: capture before, or after, what is being captured")
    _guards.refuse_surroundings()
    _guards.refuse_modules(modules)
    for unit in plan.units:
        top = unit.layers[0] if len(unit.layers) == 1 else None
        _guards.refuse_inner_hooks(unit.program.partial_layers, None if drop_in else _as_module(top))
        for layer in unit.layers:
            if isinstance(layer, nn.Module) and (drop_in or layer is not top):
                _guards.refuse_hooks(layer, f"{type(layer).__name__} ({unit.title})")
        for sample in unit.samples:
            _guards.refuse_samples(_named_leaves(sample))
    if plan.config.grads == "accumulate":
        _guards.refuse_gradient_hooks(modules, plan.config.on_mismatch)


def _as_module(layer: Any) -> nn.Module | None:
    return layer if isinstance(layer, nn.Module) else None


def _named_leaves(sample: _plan.Sample) -> list[tuple[str, Any]]:
    return list(zip(sample.spec.names, flatten((sample.args, sample.kwargs))[0], strict=True))


def _refuse_unused(facts: _warmup.WarmupFacts) -> None:
    """torch's rule without allow_unused_input: what requires grad must get a gradient."""
    for unit in (sets[0] for sets in facts.units):
        if not unit.grad:
            continue
        for part in unit.parts:
            for number, leaf in enumerate(part.reads):
                if leaf.spec.requires_grad and leaf.source is None and number not in part.grad_inputs:
                    raise WarmupError(
                        f"input {number} of {unit.unit.title} requires grad but is not used: pass allow_unused_input=True"
                    )
        used = {index for part in unit.parts for index in part.parameters}
        mine = {id(p) for m in _guards.modules_of(unit.unit.layers) for p in m.parameters() if p.requires_grad}
        for index, alias in enumerate(facts.parameters.alias):  # what the modules hold while they are captured
            if id(alias) in mine and index not in used:
                raise WarmupError(
                    f"parameter {facts.parameters.names[index]} of {unit.unit.title} requires grad but is not used: pass "
                    "allow_unused_input=True"
                )


# ------------------------------------------------------------------------------------------------ arguments of capture


class _Function(nn.Module):
    """A plain function as a module, so that it can stand in a ModuleList."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def normalise(
    module: Any, sample_args: Any, sample_kwargs: Any, order: Order | None
) -> tuple[tuple[Layers, ...], list[tuple[Args, Kwargs]], nn.Module]:
    """Chunks of layers, one (args, kwargs) per chunk, and the module that holds them all."""
    chunks, root, per_chunk = as_chunks(module, order)
    if per_chunk:
        args = _per_chunk(sample_args, len(chunks), "sample_args")
        kwargs = _per_chunk(sample_kwargs, len(chunks), "sample_kwargs") if sample_kwargs is not None else [{}] * len(chunks)
        return chunks, [(_args(a), _kwargs(k)) for a, k in zip(args, kwargs, strict=True)], root
    if order is not None and isinstance(sample_args, tuple | list) and len(sample_args) == 1:
        sample_args = sample_args[0] if isinstance(sample_args[0], tuple) else sample_args
        if isinstance(sample_kwargs, tuple | list) and len(sample_kwargs) == 1:
            sample_kwargs = sample_kwargs[0]
    return chunks, [(_args(sample_args), _kwargs(sample_kwargs))], root


def as_chunks(module: Any, order: Order | None) -> tuple[tuple[Layers, ...], nn.Module, bool]:
    """Chunks of layers, the module that holds them all (its parameter names are the user's), and whether `module` was
    given chunk by chunk."""
    module = tuple(module) if isinstance(module, list | nn.ModuleList) else module
    if order is not None and isinstance(module, tuple) and len(module) == order.chunks:
        chunks = tuple(_layers(entry) for entry in module)
        return chunks, nn.ModuleList([_root(chunk) for chunk in chunks]), True
    if order is not None and order.chunks > 1:
        given = f"a tuple of {len(module)}" if isinstance(module, tuple) else f"a {type(module).__name__}"
        raise PlanError(f"the order has {order.chunks} chunks, so `module` is a tuple with one entry per chunk, not {given}")
    layers = _layers(module)
    return (layers,), _root(layers), False


def _layers(entry: Any) -> Layers:
    layers = tuple(entry) if isinstance(entry, tuple | list | nn.ModuleList) else (entry,)
    if not layers:
        raise PlanError("an empty tuple of layers: nothing to capture")
    for layer in layers:
        if isinstance(layer, Graphed):
            raise PlanError("capture of a graphed object: capture its module (graphed.module), or close() it first")
        if not callable(layer):
            raise PlanError(f"{type(layer).__name__} is not callable: pass modules, or tuples of modules")
    return layers


def _root(layers: Layers) -> nn.Module:
    modules = [layer if isinstance(layer, nn.Module) else _Function(layer) for layer in layers]
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def _per_chunk(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, tuple | list) or len(value) != count:
        size = f"{len(value)} entries" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
        raise PlanError(f"{name}: expected one entry per chunk ({count}), got {size}")
    return list(value)


def _args(value: Any) -> Args:
    if isinstance(value, torch.Tensor):
        return (value,)
    if not isinstance(value, tuple | list):
        raise SampleError(f"sample_args: expected a tuple of arguments, got {type(value).__name__}")
    return tuple(value)


def _kwargs(value: Any) -> Kwargs:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SampleError(f"sample_kwargs: expected a dict with names as keys, got {type(value).__name__}")
    return dict(value)


# ------------------------------------------------------------------------------------------------------------- drop-in

Graphable = Callable[..., Any]


@overload
def make_graphed_callables(modules: tuple[Graphable, ...], sample_args: Any, *a: Any, **k: Any) -> tuple[Graphable, ...]: ...
@overload
def make_graphed_callables(modules: Graphable, sample_args: Any, *a: Any, **k: Any) -> Graphable: ...
def make_graphed_callables(
    modules: Any = None,
    sample_args: Any = None,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    _order: Sequence[float] | Order | str | None = None,
    _num_layers_per_chunk: Sequence[int] | None = None,
    pool: Any = None,
    _reuse_graph_input_output_buffers: bool = False,
    *,
    callables: Any = None,
    backend: str = "auto",
) -> Any:
    """torch.cuda's and Transformer Engine's function of this name: graphed forms of separate callables.

    modules: one callable or a tuple; the user's code may run between them (torch calls it `callables`; torch's fifth
        positional argument, a pool handle of two ints, is taken as `pool`). sample_args: a tuple of arguments (a tuple of
        such tuples for a tuple of callables). Without `_order` modules are patched in place (`module.forward`) and
        returned, other callables come back as functions.
    _order: signed chunk numbers as in TE (+c forward, -c backward of chunk c), an Order, or its text. Then sample_args
        has one entry per (chunk, microbatch, layer) at `sum(L[:chunk]) * M + microbatch * L[chunk] + layer`, and so has
        the returned tuple of functions. _num_layers_per_chunk: L; default: equally many.
    _reuse_graph_input_output_buffers: microbatches whose lives do not overlap in the order share buffers.
    Better than the originals: every call is checked; nothing is left behind when capture fails; the parameter order is
    right under every order. A module in the other training mode than at capture runs its own forward, as there.
    """
    modules = _first_argument(modules, callables)
    if sample_args is None:
        raise SampleError("sample_args is missing: a tuple of arguments, or one such tuple per callable")
    if pool is None and _is_pool_handle(sample_kwargs):
        pool, sample_kwargs = sample_kwargs, None
    single = not isinstance(modules, tuple | list)
    targets: tuple[Graphable, ...] = (modules,) if single else tuple(modules)
    order = _drop_in_order(_order, _num_layers_per_chunk, len(targets), sample_args)
    samples = _drop_in_samples(targets, sample_args, sample_kwargs, order, single)
    if _reuse_graph_input_output_buffers and _order is None:
        raise OrderError("_reuse_graph_input_output_buffers needs _order: only an order says which lives overlap")
    config = CaptureConfig(warmup=max(1, num_warmup_iters), outputs="alias")
    plan = _plan.build_callables(
        targets, samples, order, config, given_order=_order is not None, share_slots=_reuse_graph_input_output_buffers
    )
    runner = _run_stages(plan, backend, drop_in=True, pool=pool, allow_unused=allow_unused_input)
    if _order is not None:
        return tuple(
            _graphed_function(runner, unit, microbatch, targets[unit])
            for unit, microbatch in _flat_units(order)
        )
    returned = tuple(_install(runner, unit, target) for unit, target in enumerate(targets))
    return returned[0] if single else returned


def _first_argument(modules: Any, callables: Any) -> Any:
    """What to graph, under TE's name or torch's."""
    if (modules is None) == (callables is None):
        raise SampleError("pass the callables once: as the first argument, as modules= (TE's name) or callables= (torch's)")
    return callables if modules is None else modules


def _is_pool_handle(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(item) is int for item in value)


def _drop_in_order(given: Any, layers: Sequence[int] | None, count: int, sample_args: Any) -> Order:
    if given is None:
        if layers is not None:
            raise OrderError("_num_layers_per_chunk without _order: only an order has chunks")
        return Order.forward_backward(1, layers_per_chunk=count)
    order = given
    if isinstance(given, str):
        order = Order.parse(given)
    elif not isinstance(given, Order):
        order = Order.from_signed(list(given))
    if layers is None:
        if count % order.chunks:
            raise OrderError(
                f"{count} callables for {order.chunks} chunks: not equally many layers a chunk; pass _num_layers_per_chunk"
            )
        layers = [count // order.chunks] * order.chunks
    if len(layers) != order.chunks or sum(layers) != count:
        raise OrderError(f"_num_layers_per_chunk={list(layers)} does not fit {count} callables in {order.chunks} chunks")
    return Order(
        tuple(order),
        chunks=order.chunks,
        microbatches=order.microbatches,
        layers_per_chunk=tuple(layers),
        training=order.training,
    ).check()


def _drop_in_samples(
    callables: Sequence[Graphable], sample_args: Any, sample_kwargs: Any, order: Order, single: bool
) -> list[tuple[Args, Kwargs]]:
    count = len(callables) * order.microbatches
    args = [sample_args] if single and count == 1 and not _is_nested(sample_args) else sample_args
    if not isinstance(args, tuple | list) or len(args) != count:
        size = len(args) if isinstance(args, tuple | list) else type(args).__name__
        raise OrderError(f"sample_args: expected {count} entries (callables x microbatches), got {size}")
    if sample_kwargs is None:
        kwargs: Any = [{}] * count
    else:
        kwargs = [sample_kwargs] if isinstance(sample_kwargs, dict) and count == 1 else sample_kwargs
    if not isinstance(kwargs, tuple | list) or len(kwargs) != count:
        raise OrderError(f"sample_kwargs: expected {count} dicts, as many as sample_args")
    return [(_args(a), _kwargs(k)) for a, k in zip(args, kwargs, strict=True)]


def _is_nested(sample_args: Any) -> bool:
    """Whether a single callable's samples come as a tuple of one tuple (torch takes the plain tuple)."""
    return (
        isinstance(sample_args, tuple | list)
        and len(sample_args) == 1
        and isinstance(sample_args[0], tuple)
        and all(isinstance(item, torch.Tensor) for item in sample_args[0])
    )


def _flat_units(order: Order) -> list[tuple[int, int]]:
    """(unit, microbatch) in the order of the flat index."""
    found: list[tuple[int, int]] = []
    first = 0
    for count in order.layers_per_chunk:
        for microbatch in range(order.microbatches):
            found += [(first + layer, microbatch) for layer in range(count)]
        first += count
    return found


def _graphed_function(runner: Runner, unit: int, microbatch: int, target: Graphable) -> Graphable:
    own = runner.plan.units[unit].calls[0]
    training = target.training if isinstance(target, nn.Module) else None

    def graphed(*args: Any, **kwargs: Any) -> Any:
        if training is not None and target.training != training:  # type: ignore[attr-defined]
            return own(*args, **kwargs)
        return runner.call(unit, microbatch, args, kwargs)[0]

    graphed.reset = runner.close  # type: ignore[attr-defined]
    return graphed


def _install(runner: Runner, unit: int, target: Graphable) -> Graphable:
    graphed = _graphed_function(runner, unit, 0, target)
    if not isinstance(target, nn.Module):
        return graphed
    target.forward = _Forward(graphed, target, runner.plan.units[unit].calls[0], runner.close)
    return target


@dataclass(frozen=True, slots=True)
class _Forward:
    """The `forward` of a module that the drop-in has patched."""

    call: Graphable
    target: nn.Module
    own: Graphable
    reset: Callable[[], None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphable:
        """A copy of the module is a plain one. (A function would be shared, and run the graph with the first's weights.)"""
        copied: Graphable = MethodType(self.own.__func__, memo[id(self.target)])  # type: ignore[attr-defined]
        return copied
