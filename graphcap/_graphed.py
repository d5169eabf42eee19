"""The public object: a module that runs graphs where it can, and says why where it can't."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphcap import _guards
from graphcap._flight import Flight
from graphcap._plan import CapturePlan, Layers
from graphcap._runner import Runner, Stats
from graphcap._steps import Steps, run_plain
from graphcap.errors import ClosedError, PlanError
from graphcap.order import Step


class Graphed(nn.Module):
    """A captured module. It is called like the module, has its parameter names, and computes the same bits.

    module: the user's module (a ModuleList where a tuple was captured). plan: print it. stats: replays and eager calls.
    Under an order call the steps: forward("0F1", x), backward("0B1", grad), input_grad, weight_grad.
    """

    def __init__(self, module: nn.Module, runner: Runner, chunks: tuple[Layers, ...]) -> None:
        super().__init__()
        self.module = module
        object.__setattr__(self, "_runner", runner)
        object.__setattr__(self, "_chunks", chunks)
        object.__setattr__(self, "_steps", Steps(runner.plan.order, self._call_step, self._weight_work))
        self.training = module.training
        self._register_load_state_dict_pre_hook(_into_module, with_module=True)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_report_own_names)  # type: ignore[no-untyped-call]

    # ----------------------------------------------------------------------------------------------------- properties

    @property
    def plan(self) -> CapturePlan:
        """What was captured: parts, breaks with reasons, slots, graphs, static_bytes. Printable."""
        plan: CapturePlan = self._runner.plan
        return plan

    @property
    def stats(self) -> Stats:
        """Replays, eager calls by reason, recorded operations."""
        stats: Stats = self._runner.stats
        return stats

    # --------------------------------------------------------------------------------------------------------- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`graphed(x)`: the module's outputs. `graphed.forward(step, x)`: the F step of an order, e.g. "0F1"."""
        if args and _is_step(args[0]):
            return self._steps_ready().forward(args[0], args[1:], kwargs)
        order = self.plan.order
        if order.chunks * order.microbatches > 1:
            raise PlanError(
                f"captured under an order ({order}): call graphed.forward(step, ...) with the step, e.g. '{order[0]}'"
            )
        return self._call_chunk(0, 0, args, kwargs)[0]

    def backward(self, step: Step | str, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The B step: `grad_outputs`, one per differentiable output (none: from the loss). Returns one gradient per
        tensor argument of the forward; parameter gradients go where eager puts them."""
        return self._steps_ready().backward(step, grad_outputs)

    def input_grad(self, step: Step | str, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The I step: as `backward`, without parameter gradients."""
        return self._steps_ready().input_grad(step, grad_outputs)

    def weight_grad(self, step: Step | str) -> None:
        """The W step: the parameter gradients that belong to an I step."""
        self._steps_ready().weight_grad(step)

    def _steps_ready(self) -> Steps:
        if self._runner.closed:
            raise ClosedError("this graphed object was closed; capture again")
        steps: Steps = self._steps
        return steps

    def _call_step(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Flight | None]:
        return self._call_chunk(step.chunk, step.microbatch, args, kwargs)

    def _weight_work(self, chunk: int) -> Callable[[Step], None] | None:
        """What an I step leaves to the W step besides autograd's part, if modules of the chunk delay weight gradients."""
        if not self._runner.is_delayed(chunk):
            return None
        run: Callable[[Step], None] = lambda step: self._runner.weight_grad(step.chunk, step.microbatch)  # noqa: E731
        return run

    def backward_dw(self) -> None:
        """Without an order: the weight gradients that the module's delayed modules put off in the last backward."""
        self._runner.weight_grad(0, 0)

    def _call_chunk(
        self, chunk: int, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Flight | None]:
        layers = self._chunks[chunk]
        top = layers[0] if len(layers) == 1 else None
        if self._runner.is_disabled() and not self._runner.closed:
            if not self._runner.is_delayed(chunk):
                self._runner.stats.eager["disabled"] += 1
                return run_plain(layers, args, kwargs), None
            return self._runner.run_own(chunk, microbatch, args, kwargs, "disabled"), None
        if not isinstance(top, nn.Module) or not _guards.has_hooks(top) or self._runner.closed:
            found: tuple[Any, Flight | None] = self._runner.call(chunk, microbatch, args, kwargs)
            return found
        return self._with_hooks(top, chunk, microbatch, args, kwargs)

    def _with_hooks(
        self, top: nn.Module, chunk: int, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Flight | None]:
        """Hooks on the captured module run around the graph: its own `__call__`, with the graph as its forward."""
        flights: list[Flight | None] = []

        def graph(*inner_args: Any, **inner_kwargs: Any) -> Any:
            value, flight = self._runner.call(chunk, microbatch, inner_args, inner_kwargs)
            flights.append(flight)
            return value

        with replaced_forward(top, graph):
            value = top(*args, **kwargs)
        return value, flights[0] if flights else None

    # ------------------------------------------------------------------------------------------------------ lifetime

    def reset(self) -> None:
        """Forget forwards in flight and the position in the order; the graphs stay."""
        self._steps.reset()
        self._runner.reset()

    def close(self) -> None:
        """Free the graphs and buffers. A call afterwards raises ClosedError; closing twice is fine."""
        self._steps.reset()
        self._runner.close()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, this object runs its module eagerly."""
        self._runner.eager_depth += 1
        try:
            yield
        finally:
            self._runner.eager_depth -= 1

    # ------------------------------------------------------------------------------------- names, copies, attributes

    def train(self, mode: bool = True) -> Graphed:
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "module":
                raise
            return getattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a graphed object can't be pickled: its graphs are addresses. Save graphed.state_dict(), or "
                        "pickle graphed.module")


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module's `forward` is another function, on this instance alone, while inside."""
    had = "forward" in module.__dict__
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if had:
            module.__dict__["forward"] = before
        else:
            del module.__dict__["forward"]


_STEP_TEXT = re.compile(r"\d+[FBIW]\d+")


def _is_step(value: Any) -> bool:
    return isinstance(value, Step) or (isinstance(value, str) and _STEP_TEXT.fullmatch(value) is not None)


def _into_module(
    graphed: Graphed, state_dict: dict[str, Any], prefix: str, _: Any, __: Any, ___: Any, ____: Any, errors: list[str]
) -> None:
    """Loading through a parent, which hands the entries from child to child: ours have the module's own names."""
    own = [key for key in state_dict if key.startswith(prefix)]
    state_dict.update({f"{prefix}module.{key[len(prefix):]}": state_dict.pop(key) for key in own})
    object.__setattr__(graphed, "_loading", (prefix, errors))


def _report_own_names(graphed: Graphed, incompatible: Any) -> None:
    """After `_into_module`: what is reported has the module's own names again."""
    prefix, errors = graphed._loading
    for names in (incompatible.missing_keys, incompatible.unexpected_keys, errors):
        names[:] = [name.replace(f"{prefix}module.", prefix, 1) for name in names]
