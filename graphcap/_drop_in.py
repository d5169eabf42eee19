"""What make_graphed_callables hands back: graphed functions, and modules that were patched in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch import nn

from graphcap._drop_in_args import Graphable, Quantized
from graphcap._flight import Side
from graphcap._plan import CapturePlan
from graphcap._runner import Runner, Stats
from graphcap._tensors import same_constant
from graphcap.errors import InputMismatch
from graphcap.order import Order

_FIRST = "is_first_microbatch"
_NOT_CAPTURED = (_FIRST, "cuda_graph_stream", "cuda_graph_event")


def deliver(
    runner: Runner, targets: Sequence[Graphable], order: Order, quantized: Quantized, *, ordered: bool, single: bool
) -> Any:
    """The return value: under an order one function per (chunk, microbatch, layer) at its flat index; else the modules,
    patched, and functions for what is no module. A single callable comes back alone."""
    if ordered:
        places = flat_units(order)
    else:
        places = [(unit, 0) for unit in range(len(targets))]
    calls = [GraphedCall(runner, unit, microbatch, targets[unit], quantized) for unit, microbatch in places]
    made = tuple(calls if ordered else map(_install, calls))
    return made[0] if single and len(made) == 1 else made


def flat_units(order: Order) -> list[tuple[int, int]]:
    """(unit, microbatch) in the order of the flat index."""
    found: list[tuple[int, int]] = []
    first = 0
    for count in order.layers_per_chunk:
        for microbatch in range(order.microbatches):
            found += [(first + layer, microbatch) for layer in range(count)]
        first += count
    return found


class GraphedCall:
    """One callable (of one microbatch) behind its graphs. Called like the callable; what is particular to a call:

    is_first_microbatch: a bool, required where weights are cached (cache_quantized_params); else taken and left aside.
    cuda_graph_stream: run the graph on this stream; the current one waits for `cuda_graph_event` (an external event that
        the graph records), or without one for the whole graph.
    A module in the other training mode than at capture runs its own forward.
    """

    def __init__(self, runner: Runner, unit: int, microbatch: int, target: Graphable, quantized: Quantized) -> None:
        self._runner, self._unit, self._microbatch, self._target = runner, unit, microbatch, target
        self._caches_weights = quantized.cache_weights
        self.graphcap_own = runner.plan.units[unit].calls[0]  # what a second capture of the module captures
        self._module = target if isinstance(target, nn.Module) else None
        self._training = self._module is not None and self._module.training
        captured = {name for sample in runner.plan.units[unit].samples for name in sample.kwargs}
        self._aside = tuple(name for name in _NOT_CAPTURED if name not in captured)
        self._defaults, self._takes_first = _signature(self.graphcap_own)
        self._defaults = {name: value for name, value in self._defaults.items() if name not in captured}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner, unit, microbatch = self._runner, self._unit, self._microbatch
        runner.require_open(unit, microbatch)
        aside = {name: kwargs.pop(name) for name in self._aside if name in kwargs} if kwargs else {}
        if self._module is not None and self._module.training != self._training:
            return self._own(args, kwargs, aside, "the other training mode")
        if runner.is_disabled():
            return self._own(args, kwargs, aside, "disabled")
        if self._caches_weights and not isinstance(aside.get(_FIRST), bool):
            raise InputMismatch(
                f"{runner.plan.units[unit].title}: captured with cache_quantized_params=True, so every call says "
                f"is_first_microbatch=True or False; got {aside.get(_FIRST)!r}"
            )
        kwargs = {name: value for name, value in kwargs.items() if not self._is_default(name, value)}
        side = Side.of(runner.backend, aside.get("cuda_graph_stream"), aside.get("cuda_graph_event"))
        return runner.call(unit, microbatch, args, kwargs, side, aside.get(_FIRST))[0]

    def _is_default(self, name: str, value: Any) -> bool:
        """Whether a keyword says what leaving it out says, where it was left out at capture."""
        return name in self._defaults and same_constant(value, self._defaults[name])

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any], aside: dict[str, Any], reason: str) -> Any:
        if self._takes_first and _FIRST in aside:
            kwargs = {**kwargs, _FIRST: aside[_FIRST]}
        return self._runner.run_own(self._unit, self._microbatch, args, kwargs, reason)

    def backward_dw(self) -> None:
        """The delayed weight gradients of this callable's last backward (nothing to do where none are delayed)."""
        self._runner.weight_grad(self._unit, self._microbatch)

    def reset(self) -> None:
        """Free this callable's graphs; a call afterwards raises ClosedError. The others go on."""
        self._runner.close_call(self._unit, self._microbatch)

    @property
    def plan(self) -> CapturePlan:
        """What was captured, for all callables of the call: printable, with slots, who shares them, and bytes."""
        plan: CapturePlan = self._runner.plan
        return plan

    @property
    def stats(self) -> Stats:
        """Replays and eager calls of all callables that were captured together."""
        stats: Stats = self._runner.stats
        return stats

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphable:
        """A copy of a patched module is a plain one. (This object would run the graph, with the first's weights.)"""
        if self._module is None or id(self._module) not in memo:
            raise TypeError("a graphed function can't be copied: its graphs are addresses. Copy the callable, and capture")
        copied: Graphable = MethodType(self.graphcap_own.__func__, memo[id(self._module)])  # type: ignore[attr-defined]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a graphed callable can't be pickled: its graphs are addresses. Save the module's state_dict(), or the module "
            "before make_graphed_callables"
        )


def _signature(function: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Defaults by name, and whether is_first_microbatch may be passed on."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return {}, False
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults, any(p.name == _FIRST or p.kind is p.VAR_KEYWORD for p in parameters)


def _install(call: GraphedCall) -> Graphable:
    module = call._module
    if module is None:
        return call
    module.forward = call
    module.backward_dw = _Verb(call, module, "backward_dw")  # type: ignore[assignment]
    module.reset = _Verb(call, module, "reset")  # type: ignore[assignment]
    return module


class _Verb:
    """`backward_dw` or `reset` on a patched module."""

    def __init__(self, call: GraphedCall, module: nn.Module, name: str) -> None:
        self._call, self._module, self._name = call, module, name

    def __call__(self) -> None:
        getattr(self._call, self._name)()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[], Any]:
        """On a copy, which is a plain module: what its class does."""
        own = getattr(type(self._module), self._name, None)
        return _nothing if own is None else MethodType(own, memo[id(self._module)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._call.__reduce_ex__(protocol)


def _nothing() -> None:
    """What a plain module has to do for `backward_dw` and `reset`."""
