"""The drop-in's arguments as frozen records: old and new names, orders, samples, hooks. Touches no device.

Names, defaults and the rules for deprecated names are those of Transformer Engine 2.20 (pytorch/graph.py) and of
torch.cuda.make_graphed_callables (torch 2.11 to 2.14).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphcap._tensors import call_args, call_kwargs
from graphcap._time_hooks import MOMENTS, Hook, TimeHooks
from graphcap.errors import ArgumentError, OrderError, PlanError, SampleError
from graphcap.order import Order

Graphable = Callable[..., Any]
Samples = list[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Quantized:
    """What the callables are to be run with. enabled: one per callable; the rest holds for all of them.

    recipe, group: None where nothing is enabled or calibrated, as in TE. cache_weights: quantised weights are kept from
    one microbatch to the next, and calls say which one is the first.
    """

    enabled: tuple[bool, ...]
    recipe: object | None = None
    group: object | None = None
    calibrating: bool = False
    cache_weights: bool = False

    @property
    def active(self) -> bool:
        """Whether anything needs quantised state."""
        return self.calibrating or any(self.enabled)


@dataclass(frozen=True, slots=True)
class Renamed:
    """A keyword under its new and its old name, as the caller gave them."""

    new: str
    value: Any
    old: str
    old_value: Any

    def chosen(self, stacklevel: int) -> Any:
        """The value; the old name still works, with a warning; both at once do not."""
        if self.old_value is None:
            return self.value
        if self.value is not None:
            raise PlanError(f"{self.old}= is the deprecated name of {self.new}=, and both are given: pass {self.new}= alone")
        warnings.warn(
            f"make_graphed_callables: {self.old}= is deprecated, as in Transformer Engine: use {self.new}=",
            category=DeprecationWarning,
            stacklevel=stacklevel,
        )
        return self.old_value


def quantized(
    count: int,
    enabled: Renamed,
    recipe: Renamed,
    group: Renamed,
    calibrating: Renamed,
    cache_weights: Renamed,
    *,
    stacklevel: int = 4,
) -> Quantized:
    """One record from the five arguments under ten names, for `count` callables."""
    on = enabled.chosen(stacklevel)
    on = False if on is None else on
    if not isinstance(on, tuple):
        _require_bool("enabled", on, " or a tuple of bools, one per callable")
        on = (on,) * count
    for value in on:
        _require_bool("an entry of enabled", value, "")
    if len(on) != count:
        raise PlanError(f"enabled has {len(on)} entries for {count} callables: pass one per callable, or one bool for all")
    calibrate = bool(calibrating.chosen(stacklevel))
    used = any(on) or calibrate
    chosen_recipe, chosen_group = recipe.chosen(stacklevel), group.chosen(stacklevel)
    return Quantized(
        on,
        chosen_recipe if used else None,
        chosen_group if used else None,
        calibrate,
        bool(cache_weights.chosen(stacklevel)),
    )


def _require_bool(name: str, value: Any, more: str) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is {value!r} ({type(value).__name__}): expected a bool{more}")


# ----------------------------------------------------------------------------------------------- callables and samples


def first_argument(modules: Any, callables: Any) -> Any:
    """What to graph, under TE's name or torch's."""
    if (modules is None) == (callables is None):
        raise SampleError("pass the callables once: as the first argument, as modules= (TE's name) or callables= (torch's)")
    return callables if modules is None else modules


def is_pool_handle(value: Any) -> bool:
    """Two ints: what torch.cuda.graph_pool_handle() and CUDAGraph.pool() give."""
    return isinstance(value, tuple) and len(value) == 2 and all(type(item) is int for item in value)


def drop_in_order(given: Any, layers: Any, count: int) -> Order:
    """The order that the callables run in; without one, each forward is followed by its backward.

    given: signed numbers with half steps, an Order or its text. layers: layers of each chunk (one number: of every chunk).
    """
    if given is None:
        if layers is not None:
            raise OrderError("_num_layers_per_chunk without _order: only an order has chunks")
        return Order.forward_backward(1, layers_per_chunk=count)
    order = _order_of(given)
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers] * order.chunks
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


def _order_of(given: Any) -> Order:
    if isinstance(given, Order):
        return given
    return Order.parse(given) if isinstance(given, str) else Order.from_signed(list(given))


def drop_in_samples(count: int, sample_args: Any, sample_kwargs: Any, order: Order, single: bool) -> Samples:
    """(args, kwargs) per (chunk, microbatch, layer), at `order.flat_index`. A single callable's are taken as they are."""
    entries = count * order.microbatches
    if single and entries == 1:
        return [(call_args(sample_args), call_kwargs(sample_kwargs))]
    if not isinstance(sample_args, tuple | list) or len(sample_args) != entries:
        size = len(sample_args) if isinstance(sample_args, tuple | list) else type(sample_args).__name__
        raise OrderError(f"sample_args: expected {entries} entries (callables x microbatches), got {size}")
    kwargs: Any = [{}] * entries if sample_kwargs is None else sample_kwargs
    if not isinstance(kwargs, tuple | list) or len(kwargs) != entries:
        raise OrderError(f"sample_kwargs: expected {entries} dicts, as many as sample_args")
    return [(call_args(a), call_kwargs(k)) for a, k in zip(sample_args, kwargs, strict=True)]


# ---------------------------------------------------------------------------------------------------------------- hooks


def time_hooks(before: Hook | None, after: Hook | None, per_callable: Any, count: int) -> TimeHooks:
    """pre_warmup_hook, post_warmup_hook and capture_time_hooks as one record.

    per_callable: one entry per callable: None, or a dict from "forward_pre_hooks", "forward_hooks",
    "backward_pre_hooks", "backward_hooks" to {anything: hook}; a hook takes the module and returns None.
    """
    for name, hook in (("pre_warmup_hook", before), ("post_warmup_hook", after)):
        if hook is not None and not callable(hook):
            raise ArgumentError(f"{name} is {hook!r}: expected a function without arguments")
    if per_callable is None:
        return TimeHooks(before, after)
    if len(per_callable) != count:
        raise PlanError(f"capture_time_hooks has {len(per_callable)} entries for {count} callables: pass one (or None) each")
    return TimeHooks(before, after, tuple(_one_callables_hooks(entry) for entry in per_callable))


def _one_callables_hooks(entry: Mapping[str, Mapping[Any, Hook]] | None) -> tuple[tuple[Hook, ...], ...]:
    entry = entry or {}
    unknown = sorted(set(entry) - set(MOMENTS), key=str)
    if unknown:
        raise PlanError(f"capture_time_hooks: unknown keys {unknown}: expected {', '.join(MOMENTS)}")
    return tuple(tuple(entry.get(moment, {}).values()) for moment in MOMENTS)


# ------------------------------------------------------------------------------------------------- which gradients alias


def skipped_parameters(callables: Sequence[Graphable]) -> frozenset[int]:
    """The ids of parameters marked `skip_backward_post_hook`: who set the mark manages the life of the gradient by
    itself, so that it is handed out as it is (TE #2937). What is marked later changes nothing."""
    modules = [c for c in callables if isinstance(c, torch.nn.Module)]
    return frozenset(id(p) for m in modules for p in m.parameters() if getattr(p, "skip_backward_post_hook", False))
