"""What a user can choose about a capture: one frozen record, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from graphcap.errors import PlanError

Grads = Literal["return", "accumulate", "alias"]
Outputs = Literal["copy", "alias"]
OnMismatch = Literal["error", "eager"]
Recompute = Literal["part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """Options of `graphcap.capture`.

    warmup: runs (forward and backward) before recording, so that lazy state settles; at least 1.
    grads: who owns the parameter gradients. "return" hands out fresh memory, as eager does; "accumulate" lets the graph
        add into `.grad` (or `main_grad`), whose buffer is then fixed; "alias" hands out the static gradient itself,
        valid until the slot's next backward (Transformer Engine's clone_param_grads_on_return=False).
    outputs: "copy" hands out fresh memory, "alias" the static output, valid until the next forward of its slot. None:
        "alias" under an order and in the drop-in, else "copy".
    on_mismatch: "error" raises InputMismatch when a call differs from what was captured; "eager" runs the module itself
        and counts the reason in `graphed.stats`.
    retain_graph: a second backward through one forward is allowed, until the slot's next forward.
    on_replay: called with the forward's Step (`0F0` without an order) after each forward that graphs have served, under
        no_grad too; not in warm-up and recording, nor where the module itself runs (disabled(), on_mismatch="eager"). With
        it, graphed parts may change numbers, texts, lists, sets and dicts of them among the attributes of modules: it does
        what their Python would have done. An error in it leaves the slot free, as if the forward had not been.
    recompute: "part" keeps no activation of a part: its backward graph runs its forward once more, with the random numbers
        of the first; eager parts that change no state run under torch.utils.checkpoint. Less memory, more work.
    """

    warmup: int = 3
    grads: Grads = "return"
    outputs: Outputs | None = None
    on_mismatch: OnMismatch = "error"
    retain_graph: bool = False
    on_replay: Callable[[Any], object] | None = None
    recompute: Recompute | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.warmup, int) or isinstance(self.warmup, bool) or self.warmup < 1:
            raise PlanError(f"CaptureConfig(warmup={self.warmup!r}): expected a whole number of at least 1")
        _one_of("grads", self.grads, ("return", "accumulate", "alias"))
        _one_of("outputs", self.outputs, (None, "copy", "alias"))
        _one_of("on_mismatch", self.on_mismatch, ("error", "eager"))
        if self.on_replay is not None and not callable(self.on_replay):
            raise PlanError(f"CaptureConfig(on_replay={self.on_replay!r}): expected a function of the step, or None")
        _one_of("recompute", self.recompute, (None, "part"))
        if not isinstance(self.retain_graph, bool):
            raise PlanError(f"CaptureConfig(retain_graph={self.retain_graph!r}): expected True or False")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise PlanError(f"CaptureConfig({name}={value!r}): expected one of {', '.join(map(repr, allowed))}")
