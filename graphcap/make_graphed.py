"""The verbs: plan, warm up, record, bind. The only module that knows all four stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn

from graphcap import _capture, _compiled, _delayed, _drop_in, _guards, _plan, _quantization, _trace_plan, _warmup
from graphcap import _drop_in_args as args_of
from graphcap._drop_in_args import Graphable
from graphcap._graphed import Graphed
from graphcap._plan import CapturePlan, Layers
from graphcap._ranks import Ranks
from graphcap._runner import Ambient, Runner
from graphcap._tensors import call_args, call_kwargs, flatten
from graphcap.backends import choose
from graphcap.backends.scopes import is_capturing
from graphcap.config import CaptureConfig
from graphcap.errors import CaptureError, OrderError, PlanError, SampleError, WarmupError
from graphcap.fp8_meta import QuantSpec
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
    quantization: QuantSpec | None = None,
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
    quantization: under what quantised modules run (docs/guides/fp8.md); None: the autocast region around this call. With
        `cache_weights` every call of the graphed object says is_first_microbatch=True or False.
    Nothing is left behind: buffers, gradients, generators and modes are as before, also when capture fails.
    Raises PlanError, CutError (what can't be cut), CaptureError (what can't be recorded), DeviceError.
    """
    order = as_order(order)
    chunks, samples, root = normalise(module, sample_args, sample_kwargs, order)
    plan = _plan.build(chunks, samples, order, config or CaptureConfig())
    runner = _run_stages(plan, backend, drop_in=False, break_at=break_at, quantization=quantization)
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
    quantization: Any = None,
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
    state, specs = _quantization.choose(modules, quantization, len(plan.units))
    theirs = _quantization.exempt_from(state, modules)
    attributes = _guards.plain_attributes(modules)
    with (
        _compiled.plain_or_refused(),
        _guards.left_alone(theirs),
        backend.session(),
        _guards.kept_state(modules) as kept,
        _guards.leaf_aliases(modules) as parameters,
        _delayed.quiet(_delayed.owners_of(modules)),
        _guards.kept_autocast(),
        _quantization.session_of(state, specs, [unit.layers for unit in plan.units]) as session,
    ):
        ranks = Ranks(backend.device)
        with ranks.stage("warm-up", watch=True):
            if asks_for_breaks(break_at):
                _quantization.refuse_cached_cut(session)
                plan = _trace_plan.cut_at(plan, break_at, backend.device, scope=session.run)
            facts = _warmup.run(plan, backend, parameters, session)
            delayed = all(seen.delayed for sets in facts.units for seen in sets)
            _quantization.refuse_split_backwards(plan, session, delayed)
            _quantization.refuse_recompute(plan, session, any(seen.delayed for sets in facts.units for seen in sets))
            if not allow_unused:
                _refuse_unused(facts)
        with ranks.stage("recording"):
            captured = _capture.record(facts, backend, pool, kept, session=session)
        lazy = _guards.changed_attributes(attributes, _guards.plain_attributes(modules))
    return Runner(captured, backend, ambient, lazy | theirs, session.replaying())


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
            if isinstance(layer, nn.Module) and drop_in:
                _guards.refuse_trained_buffers(layer, unit.title)
        for sample in unit.samples:
            _guards.refuse_samples(_named_leaves(sample))
    if plan.config.grads == "accumulate":
        _guards.refuse_gradient_hooks(modules, plan.config.on_mismatch)


def _as_module(layer: Any) -> nn.Module | None:
    return layer if isinstance(layer, nn.Module) else None


def _named_leaves(sample: _plan.Sample) -> list[tuple[str, Any]]:
    return list(zip(sample.spec.names, flatten((sample.args, sample.kwargs))[0], strict=True))


def _refuse_unused(facts: _warmup.WarmupFacts) -> None:
    """torch's and TE's rule without allow_unused_input: an input that requires grad must get a gradient. (A parameter
    may get none: torch refuses that too, TE does not.)"""
    for unit in (sets[0] for sets in facts.units):
        if not unit.grad:
            continue
        for part in unit.parts:
            for number, leaf in enumerate(part.reads):
                if leaf.spec.requires_grad and leaf.source is None and number not in part.grad_inputs:
                    raise WarmupError(
                        f"input {number} of {unit.unit.title} requires grad but is not used: pass allow_unused_input=True"
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
        return chunks, [(call_args(a), call_kwargs(k)) for a, k in zip(args, kwargs, strict=True)], root
    if order is not None and isinstance(sample_args, tuple | list) and len(sample_args) == 1:
        sample_args = sample_args[0] if isinstance(sample_args[0], tuple) else sample_args
        if isinstance(sample_kwargs, tuple | list) and len(sample_kwargs) == 1:
            sample_kwargs = sample_kwargs[0]
    return chunks, [(call_args(sample_args), call_kwargs(sample_kwargs))], root


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


# ------------------------------------------------------------------------------------------------------------- drop-in


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
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Sequence[float] | Order | str | None = None,
    _num_layers_per_chunk: Sequence[int] | int | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], None] | None = None,
    post_warmup_hook: Callable[[], None] | None = None,
    capture_time_hooks: Any = None,
    *,
    callables: Any = None,
    backend: str = "auto",
) -> Any:
    """torch.cuda's and Transformer Engine's (TE 2.20) function of this name: graphed forms of separate callables.

    modules: one callable or a tuple; the user's code may run between them (torch calls it `callables`; torch's fifth
        positional argument, a pool handle of two ints, is taken as `pool`). sample_args: a tuple of arguments (a tuple of
        such tuples for a tuple of callables); sample_kwargs likewise, dicts. Without `_order` modules are patched in place
        (`module.forward`) and returned, other callables come back as functions; what comes back has `backward_dw()` and
        `reset()`.
    num_warmup_iters: runs before recording (0 is taken as 1). allow_unused_input: an input that requires grad may get none.
    _order: signed chunk numbers as in TE (+c forward, -c backward of chunk c, -c-0.5 its weight gradients), an Order, or its
        text. Then sample_args has one entry per (chunk, microbatch, layer) at
        `sum(L[:chunk]) * M + microbatch * L[chunk] + layer`, and so has the returned tuple of functions.
        _num_layers_per_chunk: L; default: equally many.
    _reuse_graph_input_output_buffers: microbatches whose lives do not overlap in the order share buffers.
    clone_param_grads_on_return=False: parameter gradients are the graph's own memory, valid until its next backward.
    retain_graph_in_backward: a second backward through one forward is allowed, until the next forward.
    pre_warmup_hook, post_warmup_hook, capture_time_hooks: run around warm-up and recording, never inside a graph.
    enabled, recipe, amax_reduction_group, calibrating, cache_quantized_params, and their deprecated names fp8_*: low
        precision, as in TE.
    Better than the originals: every call is checked; nothing is left behind when capture fails; the parameter order is
    right under every order. A module in the other training mode than at capture runs its own forward, as there.
    Every argument beside its original: docs/guides/coming-from-transformer-engine.md and coming-from-torch-cuda.md.
    """
    modules = args_of.first_argument(modules, callables)
    if sample_args is None:
        raise SampleError("sample_args is missing: a tuple of arguments, or one such tuple per callable")
    if pool is None and args_of.is_pool_handle(sample_kwargs):
        pool, sample_kwargs = sample_kwargs, None
    single = not isinstance(modules, tuple | list)
    targets: tuple[Graphable, ...] = (modules,) if single else tuple(modules)
    quantized = args_of.quantized(
        len(targets),
        args_of.Renamed("enabled", enabled, "fp8_enabled", fp8_enabled),
        args_of.Renamed("recipe", recipe, "fp8_recipe", fp8_recipe),
        args_of.Renamed("amax_reduction_group", amax_reduction_group, "fp8_group", fp8_group),
        args_of.Renamed("calibrating", calibrating, "fp8_calibrating", fp8_calibrating),
        args_of.Renamed("cache_quantized_params", cache_quantized_params, "fp8_weight_caching", fp8_weight_caching),
    )
    order = args_of.drop_in_order(_order, _num_layers_per_chunk, len(targets))
    if _reuse_graph_input_output_buffers and _order is None:
        raise OrderError("_reuse_graph_input_output_buffers needs _order: only an order says which lives overlap")
    plan = _plan.build_callables(
        targets,
        args_of.drop_in_samples(len(targets), sample_args, sample_kwargs, order, single),
        order,
        CaptureConfig(
            warmup=max(1, num_warmup_iters),
            outputs="alias",
            grads="return" if clone_param_grads_on_return else "alias",
            retain_graph=retain_graph_in_backward,
        ),
        given_order=_order is not None,
        share_slots=_reuse_graph_input_output_buffers,
        hooks=args_of.time_hooks(pre_warmup_hook, post_warmup_hook, capture_time_hooks, len(targets)),
        alias_parameters=args_of.skipped_parameters(targets),
    )
    runner = _run_stages(
        plan,
        backend,
        drop_in=True,
        pool=pool,
        allow_unused=allow_unused_input,
        quantization=quantized.specs(),
    )
    return _drop_in.deliver(runner, targets, order, quantized, ordered=_order is not None, single=single)
