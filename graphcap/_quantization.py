"""Where the stages call `graphcap.fp8_meta.QuantizedState`: one session around warm-up and recording, and one small object
per graphed part for its replays. Without quantised modules there is neither."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from graphcap import fp8_meta
from graphcap._plan import CapturePlan, Layers
from graphcap.errors import OrderError, PlanError, StateError
from graphcap.fp8_meta import Handle, QuantizedState, QuantPlan, QuantSpec, Ticket
from graphcap.order import Phase

FIRST_MICROBATCH = "is_first_microbatch"  # a keyword of calls, under Transformer Engine's name
Exempt = frozenset[tuple[int, str]]  # (id of a module, attribute): left to the implementation


@dataclass(slots=True)
class Session:
    """A capture in progress: which runs and parts are whose. `plan` is there once it has ended well."""

    state: QuantizedState | None = None
    specs: tuple[QuantSpec, ...] = ()
    handle: Handle = None
    plan: QuantPlan | None = None

    @property
    def once(self) -> bool:
        """Whether one forward has one backward (see QuantizedState.differentiates_once)."""
        return self.state is not None and self.state.differentiates_once

    def run(self, unit: int) -> AbstractContextManager[None]:
        """Around every run of a unit."""
        return nullcontext() if self.state is None else self.state.call_scope(self.handle, unit)

    def part(self, unit: int, part: int) -> AbstractContextManager[None]:
        """Around the recording of a part's forward."""
        return nullcontext() if self.state is None else self.state.watch(self.handle, unit, part)

    def replaying(self) -> Replaying | None:
        if self.state is None or self.plan is None:
            return None
        return Replaying(self.state, self.plan, self.specs)


@dataclass(frozen=True, slots=True)
class Replaying:
    """The quantised state of a finished capture."""

    state: QuantizedState
    plan: QuantPlan
    specs: tuple[QuantSpec, ...]

    def problem(self, unit: int) -> str | None:
        """Why a unit can't be replayed here."""
        now = replace(self.state.current(), cache_weights=self.specs[unit].cache_weights)
        found = self.state.check(self.plan, unit, now)
        return f"quantisation: {found[0]}" if found else None

    def caches(self, unit: int) -> bool:
        return self.specs[unit].enabled and self.specs[unit].cache_weights

    def part(self, unit: int, part: int) -> QuantizedPart | None:
        """What a part has to do around its replays; None where it has no owners."""
        return QuantizedPart(self.state, self.plan, unit, part) if self.plan.visited.get((unit, part)) else None


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """One graphed part that runs quantised modules."""

    state: QuantizedState
    plan: QuantPlan
    unit: int
    part: int

    def before(self, first_microbatch: bool | None, will_backward: bool) -> Ticket:
        return self.state.before_forward(self.plan, self.unit, self.part, first_microbatch, will_backward)

    def after(self, ticket: Ticket, missed: set[int] | None) -> None:
        """missed: where gradients of some outputs alone arrived, the ids of the parameters that they do not lead to. The
        layer that ran first reduces in its backward, so where that does not run, nobody does."""
        if missed is not None and not self._reaches_first(ticket, missed):
            return
        self.state.after_backward(ticket)

    def _reaches_first(self, ticket: Ticket, missed: set[int]) -> bool:
        if not ticket.owns_backward:
            return True
        owner = self.plan.visited[self.unit, self.part][0]
        trained = [p for p in owner.parameters(recurse=False) if p.requires_grad] if isinstance(owner, nn.Module) else []
        if trained:
            return any(id(p) not in missed for p in trained)
        raise StateError(
            f"a backward of some outputs alone, through a part whose first quantised layer ({type(owner).__name__}) has "
            "nothing to train: whether the reduction of its region is due can't be told. Differentiate all outputs in one "
            "backward, or run this step with graphcap.disabled()"
        )

    def abandon(self, ticket: Ticket) -> None:
        self.state.abandon(ticket)


def choose(modules: Sequence[nn.Module], given: Any, units: int) -> tuple[QuantizedState | None, tuple[QuantSpec, ...]]:
    """The implementation and one spec per unit. given: a QuantSpec, one per unit, or None: the region that is open."""
    state = fp8_meta.find(modules)
    if given is None:
        specs = (QuantSpec(enabled=False) if state is None else state.current(),) * units
    else:
        specs = (given,) * units if isinstance(given, QuantSpec) else tuple(given)
    for spec in specs:
        if not isinstance(spec, QuantSpec):
            raise StateError(
                f"quantization is a {type(spec).__name__}: pass graphcap.fp8_meta.QuantSpec(recipe=..., group=...), or "
                "capture inside the autocast region"
            )
        if state is not None and spec.active:
            able, why = state.supports(spec.recipe)
            if not able:
                raise StateError(f"the recipe can't be captured: {why}")
    return state, specs


def refuse_split_backwards(plan: CapturePlan, session: Session, delayed: bool) -> None:
    """I and W steps run the backward of a quantised module twice, and each collects amaxes and reduces."""
    if session.once and plan.strict and not delayed and any(step.phase is Phase.I for step in plan.order):
        raise OrderError(
            f"order {plan.order}: I and W steps run a backward twice, which these modules do not allow. Use modules that "
            "delay their weight gradients (delay_wgrad_compute=True), or B steps"
        )
    active = session.state is not None and any(spec.active for spec in session.specs)
    if active and plan.strict and not delayed and any(step.phase is Phase.I for step in plan.order):
        raise OrderError(
            f"order {plan.order}: I and W steps run the backward of a quantised module twice, so its amaxes would be "
            "collected and reduced twice. Use modules that delay their weight gradients (backward_dw()), or B steps"
        )


def refuse_cached_cut(session: Session) -> None:
    """What an analysis sees of a host value is its constant: an eager module would be told of the captured microbatch."""
    if session.state is not None and any(spec.enabled and spec.cache_weights for spec in session.specs):
        raise PlanError(
            "break_at with cached weights (cache_weights, cache_quantized_params): eager modules would get the "
            f"{FIRST_MICROBATCH} of the capture at every call, and use weights of another step. Declare the parts "
            f"(PartialLayer: {FIRST_MICROBATCH} may be one of its inputs), or capture with cache_weights=False"
        )


def refuse_recompute(plan: CapturePlan, session: Session, delayed: bool) -> None:
    """recompute runs a part's Python once more, and modules that keep books of their forwards would book it twice."""
    if plan.config.recompute is None:
        return
    if delayed or (session.state is not None and any(spec.active for spec in session.specs)):
        what = "put weight gradients off (backward_dw())" if delayed else "collect amaxes in low precision"
        raise PlanError(
            f"CaptureConfig(recompute={plan.config.recompute!r}) with modules that {what}: they would do so once more in "
            "the recomputation. Capture without recompute"
        )


def exempt_from(state: QuantizedState | None, modules: Iterable[nn.Module]) -> Exempt:
    """The attributes that hold quantised state, of all owners under `modules`."""
    if state is None:
        return frozenset()
    owners = (owner for module in modules for owner in state.owners(module))
    return frozenset((id(owner), name) for owner in owners for name in state.attributes(owner))


@contextmanager
def session_of(state: QuantizedState | None, specs: tuple[QuantSpec, ...], units: Sequence[Layers]) -> Iterator[Session]:
    """Warm-up and recording happen inside; afterwards the quantised state is as before, also after a failure."""
    if state is None:
        yield Session()
        return
    roots = [_root(layers) for layers in units]
    owners = dict.fromkeys(owner for root in roots for owner in state.owners(root))
    snapshot = state.snapshot(owners)
    session = Session(state, specs, state.begin_capture(specs, roots))
    ok = False
    try:
        yield session
        ok = True
    finally:
        session.plan = state.end_capture(session.handle, ok)
        session.handle = None
        state.restore(snapshot)


def _root(layers: Layers) -> nn.Module:
    modules = [layer if isinstance(layer, nn.Module) else getattr(layer, "__self__", None) for layer in layers]
    found = [module for module in modules if isinstance(module, nn.Module)]
    return found[0] if len(found) == 1 else nn.ModuleList(found)
