"""FP8 in plain torch: a linear layer with delayed or current scaling, and the manager of its state.

It computes what Transformer Engine computes in kind (per-tensor scales, e4m3 forward and e5m2 backward, amax histories,
reductions over a process group, a cache of quantised weights), in operators that run on any device and on the tape. It is
not fast: it is the implementation of `graphcap.fp8_meta.QuantizedState` on which the rules can be tested without a GPU.

Delayed scaling: a cast uses the scale that earlier calls led to, and leaves its amax in row 0 of a history; leaving the
autocast region (forward), or the backward of the first layer of the region (backward), reduces all rows over the group and
makes new scales. Current scaling: every cast takes its own amax, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap._fp8_scaling import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    INPUT,
    WEIGHT,
    Bucket,
    cast,
    largest_over,
    note,
    recipe_of,
    update,
    with_rows,
)
from graphcap._fp8_scaling import RefRecipe as RefRecipe
from graphcap.errors import InputMismatch, StateError
from graphcap.fp8_meta import QuantSpec


@dataclass(slots=True)
class Region:
    """What is active: the spec, and, in the runs of a capture, which one."""

    spec: QuantSpec = field(default_factory=lambda: QuantSpec(enabled=False))
    capturing: Capturing | None = None
    unit: int = 0


@dataclass(slots=True)
class Capturing:
    """One capture in progress. resized: history tensors that were made longer or shorter, as they were."""

    specs: tuple[QuantSpec, ...]
    owners: tuple[RefFp8Linear, ...]
    flags: dict[int, Tensor]
    eager_caches: dict[RefFp8Linear, WeightCache | None]
    resized: list[tuple[RefFp8Linear, str, Tensor]]
    visited: dict[tuple[int, int], dict[RefFp8Linear, None]] = field(default_factory=dict)
    watching: tuple[int, int] | None = None


@dataclass(slots=True)
class RefPlan:
    """A finished capture. prints: (address, shape) of every state tensor that kernels touch. flag_values: what each unit's
    flag holds. caches: the quantised weights that its graphs read, where weights are cached."""

    specs: tuple[QuantSpec, ...]
    visited: dict[tuple[int, int], tuple[RefFp8Linear, ...]]
    prints: dict[tuple[RefFp8Linear, str], tuple[int, tuple[int, ...]]]
    flags: dict[int, Tensor]
    flag_values: dict[int, float]
    caches: dict[RefFp8Linear, WeightCache]
    pins: list[Any]


@dataclass(slots=True)
class RefTicket:
    owns_backward: bool
    epoch: int
    done: bool = False


@dataclass(frozen=True, slots=True)
class RefSnapshot:
    tensors: dict[RefFp8Linear, dict[str, Tensor]]
    absent: frozenset[RefFp8Linear]
    host: dict[str, Any]


@dataclass(slots=True)
class WeightCache:
    """A quantised weight: the values, and 1 / scale that they were cast with."""

    q: Tensor
    scale_inv: Tensor

    def fits(self, weight: Tensor, recipe: RefRecipe) -> bool:
        return self.q.dtype == recipe.forward and self.q.device == weight.device

    def take(self, other: WeightCache) -> None:
        """Written in place, as Transformer Engine does: a backward that is still to come sees the newer cast."""
        self.q.copy_(other.q)
        self.scale_inv.copy_(other.scale_inv)


class RefManager:
    """Autocast regions, registration, reductions and captures of the layers that were made with it: an implementation of
    `graphcap.fp8_meta.QuantizedState`. One for a model, as a rule."""

    differentiates_once = False

    def __init__(self) -> None:
        self._region = Region()
        self._depth = 0
        self._epoch = 0
        self._first_is_free = False  # whether the reduction after backward is still to be claimed in this region
        self._buckets: dict[Bucket, list[RefFp8Linear]] = {}
        self._registered: set[RefFp8Linear] = set()
        self._open: Capturing | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RefManager:
        """A copied layer stays with its manager: regions of the manager hold for it, and it registers when it first runs."""
        return self

    # -------------------------------------------------------------------------------------------------------- regions

    @contextmanager
    def autocast(self, spec: QuantSpec) -> Iterator[None]:
        """Layers inside run under `spec`. Leaving the outermost region reduces forward amaxes where gradients are on."""
        recipe_of(spec)
        before = self._region
        if self._depth == 0:
            self._first_is_free = True
            self._epoch += 1
        self._region = Region(spec, before.capturing, before.unit)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._region = before
        if spec.enabled and self._depth == 0 and self._region.capturing is None and torch.is_grad_enabled():
            self.reduce(forward=True)

    def current(self) -> QuantSpec:
        return self._region.spec

    def supports(self, recipe: Any) -> tuple[bool, str]:
        if not isinstance(recipe, RefRecipe):
            return False, f"expected a RefRecipe, got {type(recipe).__name__}"
        return True, ""

    @property
    def capturing(self) -> Capturing | None:
        """The capture whose run this is."""
        return self._region.capturing

    # ----------------------------------------------------------------------------------------------- what layers ask for

    def prepare(self, owner: RefFp8Linear, spec: QuantSpec) -> None:
        """What the start of every low-precision forward does: history length, registration, being noticed."""
        recipe = recipe_of(spec)
        capturing = self._region.capturing
        if capturing is not None:
            self._refuse_inner_region(owner, spec, capturing.specs[self._region.unit])
        owner.resize(recipe.history_len)
        if capturing is None:
            self._register(owner, spec)
        elif capturing.watching is not None:
            capturing.visited.setdefault(capturing.watching, {})[owner] = None

    @staticmethod
    def _refuse_inner_region(owner: RefFp8Linear, spec: QuantSpec, outer: QuantSpec) -> None:
        """No replay enters the regions that the captured code opens: they would neither register nor reduce."""
        same = (spec.enabled, spec.calibrating, recipe_of(spec)) == (outer.enabled, outer.calibrating, recipe_of(outer))
        if not same or spec.group is not outer.group:
            raise StateError(
                f"{owner.title} runs in an autocast region that the captured code opens itself, under {spec}, and the "
                f"capture is under {outer}: a replay runs no Python, so that region would not be entered. Open it around "
                "the calls, and capture inside it (or with quantization=, recipe=)"
            )

    def skip_flag(self) -> Tensor | None:
        """In a capture that caches weights: the flag that recorded casts of weights obey (1: leave it as it is)."""
        region = self._region
        return None if region.capturing is None else region.capturing.flags.get(region.unit)

    def claim(self) -> bool:
        """The first layer of a region that will have a backward reduces after it."""
        if self._region.capturing is not None or not self._first_is_free:
            return False
        self._first_is_free = False
        return True

    # ---------------------------------------------------------------------------------------------- registration, reduction

    def _register(self, owner: RefFp8Linear, spec: QuantSpec) -> None:
        recipe = recipe_of(spec)
        if recipe.kind != "delayed" or owner in self._registered:
            return
        self._registered.add(owner)
        for direction in (FORWARD, BACKWARD):
            bucket = Bucket(direction, recipe, spec.group, id(spec.group))
            self._buckets.setdefault(bucket, []).append(owner)

    def is_registered(self, owner: RefFp8Linear) -> bool:
        return owner in self._registered

    def reduce(self, forward: bool) -> None:
        """New scales from the amaxes that were collected, for every bucket of the direction: the largest over the group, a
        turn of the history, the scale that maps the history's amax to the format's largest value."""
        if self._region.capturing is not None or self._open is not None:
            return
        direction = FORWARD if forward else BACKWARD
        for bucket, owners in self._buckets.items():
            if bucket.direction != direction:
                continue
            histories = [owner.history(direction) for owner in owners]
            with torch.no_grad():
                rows = torch.cat([history[0] for history in histories])
                if bucket.recipe.reduce_amax:
                    largest_over(rows, bucket.group)
                parts = torch.split(rows, [history.shape[1] for history in histories])
                for owner, history, last in zip(owners, histories, parts, strict=True):
                    update(bucket, history, owner.scale(direction), last)

    # ---------------------------------------------------------------------------------------------------------- capture

    def owners(self, unit: nn.Module) -> tuple[RefFp8Linear, ...]:
        return tuple(m for m in unit.modules() if isinstance(m, RefFp8Linear) and m.quantized_state is self)

    def attributes(self, owner: RefFp8Linear) -> frozenset[str]:
        return frozenset((*STATE, "cache"))

    def begin_capture(self, specs: Any, units: Any) -> Capturing:
        if self._open is not None:
            raise StateError("a capture with this RefManager is open already: end it first")
        specs = tuple(specs)
        for spec in specs:
            recipe_of(spec)
        owners: dict[RefFp8Linear, None] = {}
        resized: list[tuple[RefFp8Linear, str, Tensor]] = []
        flags: dict[int, Tensor] = {}
        for number, (spec, unit) in enumerate(zip(specs, units, strict=True)):
            for owner in self.owners(unit):
                owners[owner] = None
                if spec.active:
                    resized += [(owner, name, before) for name, before in owner.resize(recipe_of(spec).history_len)]
                if spec.enabled and spec.cache_weights and number not in flags:
                    flags[number] = torch.zeros(1, device=owner.weight.device)
        handle = Capturing(specs, tuple(owners), flags, {owner: owner.cache for owner in owners}, resized)
        for owner in owners:
            owner.cache = None
        self._open = handle
        return handle

    @contextmanager
    def call_scope(self, handle: Capturing, unit: int) -> Iterator[None]:
        before, free = self._region, self._first_is_free
        self._region = Region(handle.specs[unit], handle, unit)
        try:
            yield
        finally:
            self._region, self._first_is_free = before, free

    @contextmanager
    def watch(self, handle: Capturing, unit: int, part: int) -> Iterator[None]:
        before, handle.watching = handle.watching, (unit, part)
        try:
            yield
        finally:
            handle.watching = before

    def end_capture(self, handle: Capturing, ok: bool) -> RefPlan | None:
        self._open = None
        private = {owner: owner.cache for owner in handle.owners}
        for owner, cache in handle.eager_caches.items():
            owner.cache = cache
        visited = {key: tuple(owners) for key, owners in handle.visited.items()} if ok else {}
        seen = dict.fromkeys(owner for owners in visited.values() for owner in owners)
        for owner, name, before in handle.resized:
            if owner not in seen:  # what no graph runs is as it was
                setattr(owner, name, before)
        if not ok:
            return None
        tensors = {(owner, name): getattr(owner, name) for owner in seen for name in STATE}
        return RefPlan(
            handle.specs,
            visited,
            {key: (tensor.data_ptr(), tuple(tensor.shape)) for key, tensor in tensors.items()},
            handle.flags,
            dict.fromkeys(handle.flags, 0.0),
            {owner: cache for owner in seen if (cache := private[owner]) is not None},
            [*tensors.values(), *handle.flags.values()],
        )

    def snapshot(self, owners: Any) -> RefSnapshot:
        tensors = {owner: {name: getattr(owner, name).clone() for name in STATE} for owner in owners}
        return RefSnapshot(tensors, frozenset(), {"first": self._first_is_free, "depth": self._depth, "epoch": self._epoch})

    def restore(self, snapshot: RefSnapshot, only: Any = None) -> None:
        chosen = set(snapshot.tensors) if only is None else set(only)
        with torch.no_grad():
            for owner in chosen:
                for name, saved in snapshot.tensors[owner].items():
                    tensor = getattr(owner, name)
                    tensor.copy_(saved if saved.shape == tensor.shape else with_rows(saved, tensor.shape[0]))
        self._first_is_free = snapshot.host["first"]

    # ----------------------------------------------------------------------------------------------------------- replay

    def check(self, plan: RefPlan, unit: int, spec: QuantSpec) -> list[str]:
        captured = plan.specs[unit]
        for name in ("enabled", "calibrating"):
            if getattr(captured, name) != getattr(spec, name):
                return [f"{name} was {getattr(captured, name)} at capture and is {getattr(spec, name)} now"]
        if not captured.active:
            return []
        names = ("kind", "history_len", "forward", "backward")
        then, now = recipe_of(captured), recipe_of(spec)
        if then.recorded != now.recorded:
            return [
                f"recipe.{name} was {getattr(then, name)} at capture and is {getattr(now, name)} now"
                for name in names
                if getattr(then, name) != getattr(now, name)
            ]
        for (owner, name), (address, shape) in plan.prints.items():
            tensor = getattr(owner, name)
            if tensor.data_ptr() != address or tuple(tensor.shape) != shape:
                return [f"{owner.title}.{name} lies in other memory than at capture (another history_len in between?)"]
        return []

    def before_forward(
        self, plan: RefPlan, unit: int, part: int, first_microbatch: bool | None, will_backward: bool
    ) -> RefTicket:
        captured, spec, owners = plan.specs[unit], self.current(), plan.visited.get((unit, part), ())
        if owners:
            for owner in owners:
                self._register(owner, spec)
            if captured.enabled and captured.cache_weights:
                self._set_flag(plan, unit, owners, first_microbatch)
        owns = bool(owners) and captured.enabled and will_backward and self.claim()
        return RefTicket(owns, self._epoch)

    def _set_flag(self, plan: RefPlan, unit: int, owners: tuple[RefFp8Linear, ...], first_microbatch: bool | None) -> None:
        if not isinstance(first_microbatch, bool):
            raise InputMismatch(
                "captured with cached weights, so every call says is_first_microbatch=True or False; got "
                f"{first_microbatch!r}"
            )
        for owner in owners:
            if not first_microbatch:
                owner.bring_cast_to(plan.caches[owner], recipe_of(plan.specs[unit]))
            owner.cache = plan.caches[owner]
        if plan.flag_values[unit] != float(not first_microbatch):
            plan.flags[unit].fill_(float(not first_microbatch))
            plan.flag_values[unit] = float(not first_microbatch)

    def after_backward(self, ticket: RefTicket) -> None:
        if ticket.done:
            raise StateError("a second backward through one forward: its amaxes would be collected and reduced twice")
        ticket.done = True
        if ticket.owns_backward:
            self.reduce(forward=False)

    def abandon(self, ticket: RefTicket) -> None:
        if ticket.owns_backward and not ticket.done and ticket.epoch == self._epoch and self._depth > 0:
            self._first_is_free = True
        ticket.done = True

    def release(self, plan: RefPlan) -> None:
        plan.pins.clear()
        plan.caches.clear()

    def read(self, owner: RefFp8Linear) -> dict[str, Tensor]:
        found = {name: getattr(owner, name).clone() for name in STATE}
        if owner.cache is not None:
            found |= {"weight_q": owner.cache.q.clone(), "weight_scale_inv": owner.cache.scale_inv.clone()}
        return found


STATE = ("scale_fwd", "hist_fwd", "scale_bwd", "hist_bwd")


class RefFp8Linear(nn.Module):
    """y = x W^T (+ b) with both operands quantised per tensor, and so the gradient: dx = g W, dW = g^T x.

    x: [..., inputs], y: [..., outputs], in x's dtype; products are made in float32 from the dequantised values. Outside of
    an autocast region of `manager` it is nn.Linear.
    State (buffers, float32): scale_fwd [2] and hist_fwd [history_len, 2] of input and weight, scale_bwd [1] and hist_bwd
    [history_len, 1] of the output's gradient; `state_dict()` holds them as extra state. delay_wgrad: `backward` leaves dW
    (and db) to `backward_dw()`, which adds into `.grad`.
    """

    scale_fwd: Tensor
    hist_fwd: Tensor
    scale_bwd: Tensor
    hist_bwd: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        manager: RefManager,
        bias: bool = False,
        *,
        delay_wgrad: bool = False,
        history_len: int = 16,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.quantized_state = manager
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(outputs, device=device, dtype=dtype)) if bias else None
        nn.init.normal_(self.weight, std=inputs**-0.5)
        exact: dict[str, Any] = {"device": self.weight.device, "dtype": torch.float32}
        self.register_buffer("scale_fwd", torch.ones(2, **exact), persistent=False)
        self.register_buffer("hist_fwd", torch.zeros(history_len, 2, **exact), persistent=False)
        self.register_buffer("scale_bwd", torch.ones(1, **exact), persistent=False)
        self.register_buffer("hist_bwd", torch.zeros(history_len, 1, **exact), persistent=False)
        self.delay_wgrad = delay_wgrad
        self.cache: WeightCache | None = None
        self.outstanding: list[tuple[Tensor, Tensor]] = []  # what backwards have left to backward_dw

    @property
    def title(self) -> str:
        return f"RefFp8Linear({self.weight.shape[1]}, {self.weight.shape[0]})"

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """x: [..., inputs]. is_first_microbatch: None casts the weight and keeps nothing; True casts and keeps it; False
        takes what was kept."""
        manager = self.quantized_state
        spec = manager.current()
        if not spec.active:
            return F.linear(x, self.weight, self.bias)
        manager.prepare(self, spec)
        recipe = recipe_of(spec)
        if not spec.enabled:
            self._collect(x, self.weight)
            return F.linear(x, self.weight, self.bias)
        weight = self._quantised_weight(recipe, is_first_microbatch)
        made: Tensor = _QuantisedLinear.apply(x, self.weight, self.bias, self, recipe, weight)  # type: ignore[no-untyped-call]
        return made

    def _collect(self, *tensors: Tensor) -> None:
        for column, tensor in enumerate(tensors):
            note(self.hist_fwd, column, tensor.detach())

    def _quantised_weight(self, recipe: RefRecipe, first: bool | None) -> WeightCache:
        flag = self.quantized_state.skip_flag()
        with torch.no_grad():
            if flag is not None:
                if self.cache is None:
                    self.cache = self._cast_weight(recipe, None)
                else:
                    self._recast(self.cache, recipe, flag)
                return self.cache
            if first is None or self.quantized_state.capturing is not None:
                return self._cast_weight(recipe, None)
            if self.cache is None or not self.cache.fits(self.weight, recipe):
                self.cache = self._cast_weight(recipe, None)
            elif first:
                self.cache.take(self._cast_weight(recipe, None))
            return self.cache

    def bring_cast_to(self, cache: WeightCache, recipe: RefRecipe) -> None:
        """Make `cache`, which a graph reads, hold the cast that a forward with is_first_microbatch=False would take: the
        last one, whoever made it (this graph, another capture's, an eager forward); a new one where there is none."""
        latest = self.cache
        if latest is cache:
            return
        with torch.no_grad():
            known = latest is not None and latest.fits(self.weight, recipe)
            cache.take(latest if latest is not None and known else self._cast_weight(recipe, None))

    def _cast_weight(self, recipe: RefRecipe, keep: Tensor | None) -> WeightCache:
        q, scale_inv = cast(self.weight.detach(), recipe, recipe.forward, self.scale_fwd, self.hist_fwd, WEIGHT, keep=keep)
        return WeightCache(q, scale_inv)

    def _recast(self, cache: WeightCache, recipe: RefRecipe, flag: Tensor) -> None:
        """A cast that the device decides on: where the flag is 1, nothing changes, the amax row included."""
        keep = flag[0] == 1
        new = self._cast_weight(recipe, keep)
        cache.q.copy_(torch.where(keep, cache.q.float(), new.q.float()).to(cache.q.dtype))
        cache.scale_inv.copy_(torch.where(keep, cache.scale_inv, new.scale_inv))

    # ------------------------------------------------------------------------------------------------------------ state

    def history(self, direction: str) -> Tensor:
        return self.hist_fwd if direction == FORWARD else self.hist_bwd

    def scale(self, direction: str) -> Tensor:
        return self.scale_fwd if direction == FORWARD else self.scale_bwd

    def resize(self, rows: int) -> list[tuple[str, Tensor]]:
        """Histories of another length are new tensors; returns (name, tensor) of those that were replaced."""
        replaced = []
        for name in ("hist_fwd", "hist_bwd"):
            before = getattr(self, name)
            if before.shape[0] != rows:
                replaced.append((name, before))
                setattr(self, name, with_rows(before, rows))
        return replaced

    def get_extra_state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in STATE}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.resize(state["hist_fwd"].shape[0])
        with torch.no_grad():
            for name in STATE:
                getattr(self, name).copy_(state[name])

    # -------------------------------------------------------------------------------------------------- weight gradients

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw()` has work of this module's own."""
        return self.delay_wgrad

    def backward_dw(self) -> None:
        """Add the weight gradient of the oldest backward that has not had it. StateError where there is none."""
        if not self.delay_wgrad:
            return
        if not self.outstanding:
            raise StateError(f"{self.title}.backward_dw(): no backward has run since the last one")
        x, gradient = self.outstanding.pop(0)
        pairs = [(self.weight, _weight_gradient(x, gradient, self.weight.dtype))]
        if self.bias is not None:
            pairs.append((self.bias, gradient.sum(0).to(self.bias.dtype)))
        for parameter, made in pairs:
            if parameter.requires_grad:
                parameter.grad = made if parameter.grad is None else parameter.grad + made


class _QuantisedLinear(torch.autograd.Function):
    """Quantised values are attributes of the context: a cached weight is written in place by a later cast, in eager forwards
    and in replays, which saved tensors would complain of."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        owner: RefFp8Linear,
        recipe: RefRecipe,
        cached: WeightCache,
    ) -> Tensor:
        rows = x.detach().reshape(-1, x.shape[-1])
        q, scale_inv = cast(rows, recipe, recipe.forward, owner.scale_fwd, owner.hist_fwd, INPUT)
        made = (q.float() * scale_inv) @ (cached.q.float() * cached.scale_inv).t()
        if bias is not None:
            made = made + bias.float()
        ctx.owner, ctx.recipe, ctx.q, ctx.scale_inv, ctx.weight = owner, recipe, q, scale_inv, cached
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.claimed = any(ctx.needs_input_grad[:3]) and owner.quantized_state.claim()
        return made.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        owner, recipe = ctx.owner, ctx.recipe
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])
        q, scale_inv = cast(rows, recipe, recipe.backward, owner.scale_bwd, owner.hist_bwd, GRADIENT)
        gradient = q.float() * scale_inv
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = (gradient @ (ctx.weight.q.float() * ctx.weight.scale_inv)).to(ctx.dtypes[0]).reshape(ctx.shape)
        x = ctx.q.float() * ctx.scale_inv
        if owner.delay_wgrad:
            owner.outstanding.append((x, gradient))
        else:
            if ctx.needs_input_grad[1]:
                dw = _weight_gradient(x, gradient, ctx.dtypes[1])
            if ctx.needs_input_grad[2]:
                db = gradient.sum(0).to(ctx.dtypes[2])
        if ctx.claimed:
            owner.quantized_state.reduce(forward=False)
        return dx, dw, db, None, None, None


def _weight_gradient(x: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient.t() @ x).to(dtype)
