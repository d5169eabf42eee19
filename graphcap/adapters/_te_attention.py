"""Which attention backend Transformer Engine takes in eager calls, and which while it is captured.

TE tells its choice whether a capture is in progress, and some cuDNN versions lose their fused kernels there (cuDNN up to
9.15 does for sequences of keys that are no multiple of 128, without a padding mask). Both choices are right, and they round
differently: a graph would not compute what eager computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from graphcap.errors import StateError

# Of what TE's get_attention_backend returns: flash, its version, fused, its number, unfused.
_CHOSEN = 5


class Choices:
    """In place of TE's get_attention_backend while a capture is open. It answers what TE answers, and raises StateError for
    a graphed part whose eager calls would run another backend. Asked once per set of parameters: the answer may need
    cuDNN, which a stream that records can't call."""

    def __init__(self, choose: Callable[..., Any], cache: MutableMapping[str, Any]) -> None:
        self._choose, self._cache = choose, cache
        self._known: list[tuple[Any, Any, Any]] = []  # parameters, TE's answer, its answer for an eager call
        self.recording = False
        self.ask_again()

    def ask_again(self) -> None:
        """TE keeps its last answer: have it ask at the next call."""
        self._cache["backend_selection_requires_update"] = True

    def __call__(self, parameters: Any) -> Any:
        answer, eager = self._both(parameters)
        if self.recording and tuple(answer[:_CHOSEN]) != tuple(eager[:_CHOSEN]):
            raise StateError(
                f"DotProductAttention runs {name_of(answer)} while it is captured and {name_of(eager)} in eager calls of "
                "the same shapes (Transformer Engine's choice, which looks at cuDNN's version and whether a capture is in "
                "progress): a graph would round differently. Use lengths of keys that are multiples of 128, a newer cuDNN "
                "(from 9.15.1), one backend for both (NVTE_FUSED_ATTN=0), or run attention in an EAGER part"
            )
        return answer

    def _both(self, parameters: Any) -> tuple[Any, Any]:
        for known, answer, eager in self._known:
            if known == parameters:
                return answer, eager
        answer = self._choose(parameters)
        told = any(field.name == "cuda_graph" for field in dataclasses.fields(parameters))
        eager = self._choose(dataclasses.replace(parameters, cuda_graph=False)) if told else answer
        self._known.append((dataclasses.replace(parameters), answer, eager))
        return answer, eager


def name_of(answer: Any) -> str:
    """The backend in words."""
    flash, version, fused, number, unfused = answer[:_CHOSEN]
    if flash:
        return f"FlashAttention {version}"
    if fused:
        return f"FusedAttention (cuDNN, sub-backend {int(number)})"
    return "UnfusedDotProductAttention" if unfused else "no backend"
