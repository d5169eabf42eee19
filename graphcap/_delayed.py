"""Modules that put weight gradients off: their `backward` keeps the work, `backward_dw()` does it.

Transformer Engine's modules with delay_wgrad_compute=True are such modules, and so is any module whose class has
`backward_dw()`; `need_backward_dw()`, where there is one, says whether it has work of its own. The part's backward graph
then holds what `backward()` does, and a graph of its own what `backward_dw()` does. Where such a module puts the gradient
(`main_grad`: inside the graph; `.grad`: assigned, added, or only where there is none) is found by trying while warming up.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from graphcap import _torch_private as private
from graphcap._guards import Parameters
from graphcap.errors import CaptureError, ModuleError, ReplayError, WarmupError
from graphcap.order import Phase

Mode = Literal["assign", "overwrite", "add", "replace", "keep", "autograd"]

# What TE and Megatron-LM call when a delayed weight gradient is there (it starts the reduction over ranks).
_FIRE = "_trigger_wgrad_accumulation_and_reduce_hooks"


@dataclass(frozen=True, slots=True)
class Delivery:
    """How `backward_dw()` leaves the gradient of one parameter in `.grad`: in place of what is there ("assign" a tensor of
    its own, "overwrite" that one), summed with it ("add" in place, "replace" by a new tensor), only where nothing is
    ("keep"), or by autograd's own accumulation, which runs the parameter's hooks ("autograd")."""

    index: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class DelayedWork:
    """The modules of one part with delayed weight gradients, in module order, and what ends in `.grad`."""

    owners: tuple[nn.Module, ...]
    deliveries: tuple[Delivery, ...]


def owners_of(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Every module with put-off work of its own. One that only hands `backward_dw()` on to modules below it has none."""
    found: dict[int, nn.Module] = {}
    for top in modules:
        for path, module in top.named_modules():
            if not _owns(module):
                continue
            below = [child for child in module.modules() if child is not module and _has_verb(child)]
            if below and not _says(module):
                if not all(_says(child) for child in below):
                    raise ModuleError(
                        f"{path or 'the module'} ({type(module).__name__}) has backward_dw(), and so has a module below it: "
                        "is its work its own, or theirs? Give both need_backward_dw(); False says: none of its own"
                    )
                continue
            found[id(module)] = module
    return tuple(found.values())


def _has_verb(module: nn.Module) -> bool:
    return callable(getattr(type(module), "backward_dw", None))  # the class's: the drop-in puts one on instances


def _says(module: nn.Module) -> bool:
    return callable(getattr(module, "need_backward_dw", None))


def _owns(module: nn.Module) -> bool:
    return _has_verb(module) and (not _says(module) or bool(module.need_backward_dw()))  # type: ignore[operator]


def run(owner: nn.Module) -> None:
    """The put-off work, as the module's class does it."""
    type(owner).backward_dw(owner)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class EagerWork:
    """What one backward of an eager call has put off."""

    owners: tuple[nn.Module, ...]

    def run(self) -> None:
        for owner in self.owners:
            run(owner)


def watch_backward(outputs: Iterable[torch.Tensor], then: Callable[[], None]) -> None:
    """Call `then` once for every backward pass that reaches one of these outputs of an eager call."""
    seen: list[int] = []  # the last pass; a pass that failed never ends

    def begin(_: torch.Tensor) -> None:
        number = private.backward_number()
        if seen != [number]:
            seen[:] = [number]
            private.after_backward(then)

    for output in outputs:
        if output.requires_grad and not output.is_leaf:
            output.register_hook(begin)  # type: ignore[no-untyped-call]


def fire(owner: nn.Module) -> None:
    """What waits for the gradient: hooks that a replay, in which no Python runs, would skip."""
    trigger = getattr(owner, _FIRE, None)
    if trigger is not None:
        trigger()


@contextmanager
def quiet(owners: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, nobody is told of gradients (those of warm-up and recording are nobody's), and work that was put off but
    not done is forgotten at the end, so that a failed capture leaves none to the next `backward_dw()`."""
    kept = [(store, list(_entries(store))) for owner in owners for store in _stores(owner)]
    silenced = [owner for owner in owners if hasattr(owner, _FIRE)]
    before = [owner.__dict__.get(_FIRE) for owner in silenced]
    for owner in silenced:
        owner.__dict__[_FIRE] = _nothing
    try:
        yield
    finally:
        for owner, own in zip(silenced, before, strict=True):
            if own is None:
                del owner.__dict__[_FIRE]
            else:
                owner.__dict__[_FIRE] = own
        for store, entries in kept:
            inside = _entries(store)
            inside.clear()
            inside.extend(entries)


def _nothing() -> None:
    """In place of a module's trigger while nobody is to be told."""


def _stores(owner: nn.Module) -> list[Any]:
    """Lists and queues in a module, or one level down in an object that it holds (TE's WeightGradStore)."""
    held = [value for value in vars(owner).values() if not isinstance(value, nn.Module)]
    objects = [value for value in held if not isinstance(value, torch.Tensor) and hasattr(value, "__dict__")]
    held += [inner for value in objects for inner in vars(value).values()]
    return [value for value in held if isinstance(value, list | deque | queue.Queue)]


def _entries(store: Any) -> Any:
    return store.queue if isinstance(store, queue.Queue) else store


def pending(owners: Sequence[nn.Module]) -> int:
    """How much lies in the lists and queues of these modules."""
    return sum(len(_entries(store)) for owner in owners for store in _stores(owner))


@dataclass(slots=True)
class Trial:
    """What one unit's delayed modules do with their gradients, over its warm-up runs.

    Every `.grad` is None; in the last run (`probing`) a known tensor, larger than any gradient of the run before, from
    which follows what became of it.
    """

    owners: tuple[nn.Module, ...]
    probing: bool = False
    _alone: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    _modes: dict[int, dict[int, Mode]] = field(default_factory=dict)
    _visited: dict[int, tuple[nn.Module, ...]] = field(default_factory=dict)

    def after_backward(self, part: int, visited: set[int], parameters: Parameters) -> None:
        """Run the work that the backward of this part has put off."""
        owners = self._visited[part] = tuple(owner for owner in self.owners if id(owner) in visited)
        if not owners:
            return
        _refuse_shared(owners, parameters)
        given = {}
        if self.probing and part in self._alone:
            given = {index: torch.full_like(g, _probe(g)) for index, g in self._alone[part].items()}
        versions = {index: value._version for index, value in given.items()}
        with _accumulated(parameters) as by_autograd:
            found = collect(owners, parameters, given)
        if not given:
            self._alone[part] = found
            return
        self._modes[part] = {
            index: "keep"
            if found.get(index) is given[index] and given[index]._version == versions[index]
            else _placed(
                _mode(alone, found.get(index), _probe(alone), parameters.names[index]), found[index] is given[index]
            )
            for index, alone in self._alone[part].items()
        } | dict.fromkeys(by_autograd & self._alone[part].keys(), "autograd")

    def work(self, part: int) -> DelayedWork | None:
        owners = self._visited.get(part, ())
        if not owners:
            return None
        modes = self._modes.get(part, {})
        return DelayedWork(owners, tuple(Delivery(index, mode) for index, mode in sorted(modes.items())))


@contextmanager
def _accumulated(parameters: Parameters) -> Iterator[set[int]]:
    """Notes the parameters into whose `.grad` autograd accumulates inside."""
    found: set[int] = set()

    def noting(index: int) -> Callable[[torch.Tensor], None]:
        return lambda _: found.add(index)

    leaves = [(index, alias) for index, alias in enumerate(parameters.alias) if alias.requires_grad]
    handles = [
        alias.register_post_accumulate_grad_hook(noting(index))  # type: ignore[no-untyped-call]
        for index, alias in leaves
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def collect(owners: Sequence[nn.Module], parameters: Parameters, given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Run the put-off work on aliases whose `.grad` is `given`, else None; what is there afterwards, by parameter."""
    for index, value in given.items():
        parameters.alias[index].grad = value
    try:
        for owner in owners:
            run(owner)
        return {index: alias.grad for index, alias in enumerate(parameters.alias) if alias.grad is not None}
    finally:
        for alias in parameters.alias:
            alias.grad = None


def _probe(alone: torch.Tensor) -> float:
    largest = alone.abs().nan_to_num(posinf=0).max().item() if alone.numel() else 0
    return 3 * max(1, largest)


def require_turn(part: int, done: set[tuple[int, Phase]], name: str) -> None:
    """One backward is put off at a time: what its weight gradients are made from is in the graph's own memory."""
    if (part, Phase.B) in done and (part, Phase.W) not in done:
        raise ReplayError(
            f"part {name}: a second backward through one forward before the delayed weight gradients of the first, which "
            "would be lost: call backward_dw() (or the W step) between them"
        )
    done.discard((part, Phase.W))


def _placed(mode: Mode, same: bool) -> Mode:
    """`same`: whether the tensor that was in `.grad` is still there."""
    if same:
        return "overwrite" if mode == "assign" else mode
    return "replace" if mode == "add" else mode


def deliver(parameter: nn.Parameter, gradient: torch.Tensor, mode: Mode, *, aliased: bool) -> None:
    """Leave a gradient of the graph's in `.grad` as `backward_dw()` does. aliased: the caller takes the graph's memory."""
    if mode == "autograd":
        # It takes what it gets as `.grad` if there is none, and hooks may keep it.
        kept = parameter.grad is None or parameter._backward_hooks
        torch.autograd.backward((parameter,), (gradient.clone() if kept and not aliased else gradient.detach(),))
        return
    with torch.no_grad():
        if parameter.grad is None or mode == "assign":
            parameter.grad = gradient.detach() if aliased else gradient.clone()
        elif mode == "add":
            parameter.grad.add_(gradient)
        elif mode == "replace":
            parameter.grad = parameter.grad + gradient
        elif mode == "overwrite":
            parameter.grad.copy_(gradient)


def _mode(alone: torch.Tensor, found: torch.Tensor | None, probe: float, name: str) -> Mode:
    """What became of a `.grad` that was `probe` everywhere, by a gradient that is about `alone`."""
    usable = alone.isfinite()
    if found is not None and found.shape == alone.shape and bool(usable.any()):
        value, gradient = found[usable].double(), alone[usable].double()
        distances: dict[Mode, float] = {
            "assign": (value - gradient).abs().sum().item(),
            "add": (value - gradient - probe).abs().sum().item(),
        }
        nearest = min(distances, key=lambda mode: distances[mode])
        if distances[nearest] < 0.25 * probe * value.numel():
            return nearest
    raise WarmupError(
        f"backward_dw() left in {name}.grad what is neither the gradient nor a sum with it (or the gradient is not finite "
        "on the sample arguments), so a replay can't do the same: assign, or add to, the gradient that is there; or add "
        "into main_grad"
    )


def _refuse_shared(owners: Sequence[nn.Module], parameters: Parameters) -> None:
    seen: dict[int, nn.Module] = {}
    for owner in owners:
        mine = [m for m in owner.modules() if m is owner or all(m is not other for other in owners)]
        for parameter in (p for m in mine for p in m._parameters.values() if p is not None):
            index = parameters.index_of(parameter)
            if index is not None and seen.setdefault(index, owner) is not owner:
                raise ModuleError(
                    f"{parameters.names[index]} gets a delayed weight gradient from two modules of one part, whose order a "
                    "graph would fix: let the module that shares it compute its gradient in backward"
                )


def require_same(work: DelayedWork, found: dict[int, torch.Tensor], part: str) -> None:
    """Recording must leave gradients where warm-up did."""
    if set(found) != {delivery.index for delivery in work.deliveries}:
        raise CaptureError(
            f"part {part}: backward_dw() left gradients of {len(found)} parameters while recording, and of "
            f"{len(work.deliveries)} while warming up: it takes another way while it is captured"
        )
