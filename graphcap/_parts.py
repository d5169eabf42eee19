"""Running one part on proxies of what it reads, and differentiating it: what warm-up and recording have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap._plan import PartPlan, Sample, UnitPlan
from graphcap._tensors import Structure, check_leaf, flatten, static_copy, tensors_of, unflatten
from graphcap.errors import CutError, GraphcapError
from graphcap.partial_layer import GRAPHED, NOTHING, run_call


@dataclass(frozen=True, slots=True)
class OutIndex:
    """A leaf of a part's outputs that is tensor number `place`."""

    place: int


@dataclass(slots=True)
class Running:
    """One part while it runs: its proxies and what it made."""

    part: PartPlan
    values: list[Any] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    structure: Structure | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)  # as they came, each object once
    proxies: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    read_index: list[int] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    make_leaves: list[Any] = field(default_factory=list)
    make_structure: Structure | None = None
    returned: list[int | None] = field(default_factory=list)
    changes_state: bool = False
    leaves_attributes: bool = False
    buffers: tuple[torch.Tensor, ...] = ()


def sample_copies(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample arguments on memory of their own, as leaves."""
    leaves, structure = flatten((sample.args, sample.kwargs))
    copies = [
        static_copy(leaf).requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    args, kwargs = unflatten(structure, copies)
    return args, kwargs


def entry_values(unit: UnitPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {NOTHING: None, **unit.program.bind(args, kwargs)}


def distinct_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Each tensor object once, in the order of PartFacts.reads."""
    return list({id(tensor): tensor for tensor in tensors_of(flatten(values)[0])}.values())


def proxy_of(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A leaf on the same memory."""
    return tensor.detach().requires_grad_(requires_grad)


def open_part(
    part: PartPlan, env: dict[str, Any], proxy: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Running, dict[str, Any]]:
    """Before the calls of a part: proxies of the values it reads, by name. `close_part` comes after them."""
    running = Running(part)
    values = [env[name] for name in part.reads]
    running.leaves, running.structure = flatten(values)
    places: dict[int, int] = {}
    given: list[Any] = []
    for leaf in running.leaves:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in places:
                places[id(leaf)] = len(running.inputs)
                running.inputs.append(leaf)
                running.proxies.append(proxy(leaf))
            running.read_index.append(places[id(leaf)])
            given.append(running.proxies[places[id(leaf)]])
        else:
            given.append(leaf)
    running.versions = [p._version for p in running.proxies]
    return running, {NOTHING: None, **dict(zip(part.reads, unflatten(running.structure, given), strict=True))}


def run_inputs(part: PartPlan, env: dict[str, Any], proxy: Any) -> dict[int, torch.Tensor]:
    """The proxies of a part's inputs, made before recording begins; keyed by the id of the tensor that came."""
    return {id(tensor): proxy(tensor) for tensor in distinct_tensors([env[name] for name in part.reads])}


@contextmanager
def in_place_words(part: PartPlan) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "leaf Variable that requires grad is being used in an in-place operation" in str(error):
            raise CutError(f"part {part.name} changes what it reads in place: {_IN_PLACE}") from error
        raise


def run_calls(part: PartPlan, scope: dict[str, Any]) -> None:
    for call in part.calls:
        run_call(call, scope)


def close_part(running: Running, scope: dict[str, Any], env: dict[str, Any]) -> None:
    """After the calls of a part: note what it made, and put it into `env`."""
    part = running.part
    _refuse_in_place(running, running.versions)
    makes = [scope[name] for name in part.makes]
    leaves, running.make_structure = flatten(makes)
    if part.kind is not GRAPHED:  # what an eager part hands on as it came is one tensor under two names, now as at replay
        numbers = {id(proxy): number for number, proxy in enumerate(running.proxies)}
        passed = [numbers.get(id(leaf)) for leaf in leaves]
        leaves = [leaf if n is None else running.inputs[n] for leaf, n in zip(leaves, passed, strict=True)]
        makes = unflatten(running.make_structure, leaves)
    places = {id(tensor): number for number, tensor in enumerate(running.inputs)}
    made: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in made:
                made[id(leaf)] = len(running.made)
                running.made.append(leaf)
                running.returned.append(places.get(id(leaf)))
            running.make_leaves.append(OutIndex(made[id(leaf)]))
        else:
            check_leaf(leaf, f"output {number} of part {part.name}")
            running.make_leaves.append(leaf)
    env.update(zip(part.makes, makes, strict=True))


_IN_PLACE = (
    "the value lies in memory that graphs read again, for the backward too. Work on a clone, or out of place, and make "
    "the new value an output"
)


def _refuse_in_place(running: Running, versions: Sequence[int]) -> None:
    """A graphed part would change the static copy, not the caller's tensor; an eager part what a backward graph reads
    (integers have no backward: those an eager part may change)."""
    for number, (proxy, version) in enumerate(zip(running.proxies, versions, strict=True)):
        if proxy._version != version and (running.part.kind is GRAPHED or proxy.requires_grad):
            what = f"its input number {number} (shape {list(proxy.shape)})"
            raise CutError(f"part {running.part.name} changes {what} in place: {_IN_PLACE}")


def differentiate(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    reentrant: bool,
    retain_graph: bool = True,
) -> tuple[list[torch.Tensor | None], bool]:
    """Gradients of leaf inputs. A reentrant checkpoint inside refuses autograd.grad: then `.backward()` on the leaves
    (aliases, whose `.grad` nobody sees) does the same. Returns also whether that way was needed."""
    if not inputs:
        return [], reentrant
    if not reentrant:
        try:
            found = torch.autograd.grad(
                outputs, inputs, gradients, retain_graph=retain_graph, allow_unused=True
            )
            return list(found), False
        except RuntimeError as error:
            if isinstance(error, GraphcapError) or "checkpoint" not in str(error).lower():
                raise
    for leaf in inputs:
        leaf.grad = None
    torch.autograd.backward(outputs, gradients, retain_graph=retain_graph)
    results = [leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    return results, True


def loss_of(value: Any) -> torch.Tensor | None:
    """The `loss` of an output that has one (attribute or key), if it is differentiable."""
    loss = value.get("loss") if isinstance(value, dict) else getattr(value, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.requires_grad else None


class NoRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A backward that draws random numbers recomputes its forward (an activation checkpoint with dropout): at replay it
    would draw others than the forward did. Names that end in _backward are exempt: they carry the tag of their forward."""

    def __init__(self, part: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._part = part

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not func._schema.name.endswith("_backward"):
            raise CutError(
                f"part {self._part}: its backward draws random numbers ({func}), as an activation checkpoint with dropout "
                "does when it recomputes: a replay would draw others than the forward did. Checkpoint inside an EAGER part, "
                "or without dropout"
            )
        return func(*args, **(kwargs or {}))
