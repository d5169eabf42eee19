"""The state of quantised modules across warm-up, capture and replay: a protocol, framework neutral.

A quantised module (an *owner*) does more on a forward than launch kernels: it registers its scaling factors for the next
reduction of maxima (amax), decides whether a weight is cast anew or taken from a cache, and claims or leaves the reduction
after the backward. A replay runs no Python, so the library does these things around it, in the order in which eager code
does them. What is particular to a framework is behind `QuantizedState`: `graphcap.fp8_reference` (plain torch, runs on the
tape) and `graphcap.adapters.transformer_engine`.

Capture: owners -> snapshot -> begin_capture -> [call_scope + unit(...) + backward] per warm-up run -> the same once under
`watch` while recording -> end_capture(ok) in finally -> restore. Replay, per graphed part that has owners: before_forward
-> inputs are copied -> replay -> (the user's autocast exit reduces forward amaxes) -> backward replay -> after_backward.

How the stages find an implementation (`find`): a module's attribute `quantized_state` (an object with these methods), or
the adapter of the package that its class comes from. How a unit's `QuantSpec` gets in: `capture(..., quantization=QuantSpec(
...))`, the drop-in's arguments, or, where neither says anything, the autocast region around the call of `capture`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from graphcap.errors import StateError

Owner = Any  # an object with quantisation state, hashed by identity; a module in both implementations
Handle = Any  # a capture in progress

# Packages whose modules keep quantised state, and the adapter that knows it; imported only when such a module is met.
ADAPTERS = {"transformer_engine": "graphcap.adapters.transformer_engine"}


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Under what a unit runs.

    enabled: whether modules quantise. recipe: the framework's recipe object (scaling kind, formats, history). group: the
    process group over which amaxes are reduced; None is the framework's default. calibrating: amaxes are collected without
    quantising. cache_weights: a quantised weight is kept over the microbatches of a step; every call then says by
    `is_first_microbatch` whether weights have changed since.
    """

    enabled: bool = True
    recipe: Any = None
    group: Any = None
    calibrating: bool = False
    cache_weights: bool = False

    @property
    def active(self) -> bool:
        """Whether quantised state changes at all."""
        return self.enabled or self.calibrating


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Persistent tensors of owners, by name, as copies; owners that had no state yet; host state."""

    tensors: Mapping[Owner, Mapping[str, torch.Tensor]]
    absent: frozenset[Owner]
    host: Mapping[str, Any]


class QuantPlan(Protocol):
    """The result of a capture, for one implementation alone but for `visited`.

    visited: the owners that ran while part `part` of unit `unit` was recorded, in the order in which they ran first.
    """

    @property
    def visited(self) -> Mapping[tuple[int, int], tuple[Owner, ...]]: ...


class Ticket(Protocol):
    """One forward replay of one part. owns_backward: the reduction after the backward is this part's."""

    @property
    def owns_backward(self) -> bool: ...


@runtime_checkable
class QuantizedState(Protocol):
    """What a framework does on the host around quantised modules. No method may synchronise with the device.

    Rules that every implementation keeps (tests/fp8/conformance.py): snapshot, begin, end, restore leave `read(owner)` bit
    for bit as before, also when capture raises; number and order of reductions per autocast region equal eager's; no tensor
    of a visited owner moves until `release`, or `check` says so; owners that were not visited are untouched; a replay equals
    eager in outputs, gradients, scales and histories.
    """

    @property
    def differentiates_once(self) -> bool:
        """Whether the backward of these modules can run only once for one forward, so that every way in which a caller may
        start a backward has to be served by one recorded backward, with zeros where no gradient arrives."""

    def owners(self, unit: nn.Module) -> tuple[Owner, ...]:
        """All owners under a module, in module order, each once, initialised or not. Changes nothing."""

    def attributes(self, owner: Owner) -> frozenset[str]:
        """The names of the attributes in which an owner keeps its quantised state: the implementation sees to them, and
        nobody else restores or compares them."""

    def current(self) -> QuantSpec:
        """The autocast region that is open here; `enabled=False` outside of any. `cache_weights` means nothing."""

    def supports(self, recipe: Any) -> tuple[bool, str]:
        """Whether this device and version can run a recipe, and why not."""

    def begin_capture(self, specs: Sequence[QuantSpec], units: Sequence[nn.Module]) -> Handle:
        """Open a capture of `units`, unit i under `specs[i]`. Registration and both reductions are off for their owners;
        casts of cached weights obey a flag of this capture's own; weight caches are private ones. Raises StateError if one
        is open already, or a recipe is not supported."""

    def call_scope(self, handle: Handle, unit: int) -> AbstractContextManager[None]:
        """Around every warm-up and recording run of a unit: its spec is active, in the capturing mode. Undone on any exit;
        may be entered again inside itself."""

    def watch(self, handle: Handle, unit: int, part: int) -> AbstractContextManager[None]:
        """While a part is recorded: note each owner at its first real low-precision forward, whoever calls it."""

    def end_capture(self, handle: Handle, ok: bool) -> QuantPlan | None:
        """Undo begin_capture; always called. With `ok`: the plan, which keeps every tensor alive that a kernel may touch."""

    def snapshot(self, owners: Iterable[Owner]) -> Snapshot:
        """Copies of every persistent tensor, and of host state that a forward changes."""

    def restore(self, snapshot: Snapshot, only: Iterable[Owner] | None = None) -> None:
        """Write it back in place. Owners that were absent get initial values (scale 1, history 0). Raises StateError, before
        anything is written, if a tensor has another shape or address."""

    def check(self, plan: QuantPlan, unit: int, spec: QuantSpec) -> list[str]:
        """Why replaying a unit under `spec` would be wrong now (quantisation off, another recipe or group, state that has
        moved); empty: nothing is wrong."""

    def before_forward(
        self, plan: QuantPlan, unit: int, part: int, first_microbatch: bool | None, will_backward: bool
    ) -> Ticket:
        """What the part's owners would do on a forward: group and recipe, registration (once), the cast flag, the claim of
        the reduction after backward (only if a backward will run). Graphs have weight caches of their own, but eager
        forwards, replays, and replays of another capture may take turns: with is_first_microbatch=False whoever runs never
        uses a cast that is older than the last one, and casts anew where it can't have that."""

    def after_backward(self, ticket: Ticket) -> None:
        """The backward of the part has been replayed: reduce, if the ticket claimed it. StateError the second time. Not
        called where the gradients that arrived do not lead to the layer that ran first: in eager it does not reduce."""

    def abandon(self, ticket: Ticket) -> None:
        """The forward failed: the claim is free again, if the region is still open."""

    def release(self, plan: QuantPlan) -> None:
        """The graphs are gone: let go of what was kept alive for them. Owners stay registered."""

    def autocast(self, spec: QuantSpec) -> AbstractContextManager[None]:
        """A region of eager code under a spec; leaving the outermost one reduces forward amaxes, if gradients are on."""

    def read(self, owner: Owner) -> dict[str, torch.Tensor]:
        """Copies of an owner's state, for tests: scale_fwd, hist_fwd, scale_bwd, hist_bwd, and, where a weight is cached,
        weight_q and weight_scale_inv."""

    def is_registered(self, owner: Owner) -> bool:
        """Whether reductions reach this owner's state."""


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a quantised one of a package with an adapter, which then sees to the memory inside it."""
    return type(tensor).__module__.partition(".")[0] in ADAPTERS


def find(modules: Iterable[nn.Module]) -> QuantizedState | None:
    """The implementation for everything quantised under `modules`, or None. StateError if there would be two."""
    found: dict[int, QuantizedState] = {}
    for module in (m for top in modules for m in top.modules()):
        state = _state_of(module)
        if state is not None:
            found[id(state)] = state
    if len(found) > 1:
        names = ", ".join(sorted(type(state).__name__ for state in found.values()))
        raise StateError(
            f"modules of one capture keep their quantised state in {len(found)} places ({names}): whoever reduces the one "
            "does not know of the other. Use one manager, or capture them separately"
        )
    return next(iter(found.values()), None)


def _state_of(module: nn.Module) -> QuantizedState | None:
    own = getattr(module, "quantized_state", None)
    if isinstance(own, QuantizedState):
        return own
    for kind in type(module).__mro__:
        adapter = ADAPTERS.get(kind.__module__.partition(".")[0])
        if adapter is not None:
            state: QuantizedState | None = importlib.import_module(adapter).state_of(module)
            return state
    return None
