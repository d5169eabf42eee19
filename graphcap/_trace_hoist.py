"""Function breaks that can run in front of everything: *hoisted*, so that they cost no graph.

Whole models make their attention mask in a plain function that reads the host. Where its data are arguments of the
callable, or come from them and from constants alone, it runs before the first stretch: what was computed on the way is
computed again, eagerly, and a tensor of which it only asked the shape, dtype or device is stood for by one without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphcap import _torch_private as private
from graphcap._trace_records import Ref, Value, swapped
from graphcap.backends.tape_refusals import tensors_in
from graphcap.errors import InputMismatch


@dataclass(frozen=True, slots=True)
class Recipe:
    """A torch call that can be made again: its tensors are Refs to callable inputs or to results of other recipes.
    result: which tensor of what it returns."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A leaf of a hoisted break's arguments that is computed again; recipes: by value, those that it takes."""

    name: str
    recipes: dict[str, Recipe]
    reads: tuple[str, ...]

    def run(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        known = dict(values)

        def value(name: str) -> torch.Tensor:
            if name not in known:
                recipe = self.recipes[name]
                args, kwargs = swapped(recipe.args, recipe.kwargs, lambda x: value(x.name) if isinstance(x, Ref) else x)
                known[name] = list(tensors_in(recipe.func(*args, **kwargs)))[recipe.result]
            return known[name]

        with torch.no_grad():
            return value(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recomputed) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class StandIn:
    """A leaf of a hoisted break's arguments of which it uses no data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> StandIn:
        return StandIn(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self, title: str) -> torch.Tensor:
        """A tensor of this shape, dtype and device that is not made yet: who asks for its values is told so."""

        def used(operator: str) -> Exception:
            return InputMismatch(
                f"the hoisted break {title} uses the values of an argument ({operator}) of which it used the shape alone at "
                "capture: it runs in front of the graphs, and that tensor is not made yet. Capture with arguments that take "
                "this branch, or break at the module that calls the function"
            )

        return private.memoryless(self.shape, self.stride, self.dtype, self.device, self.requires_grad, used)


class Recipes:
    """The calls of the first stretch that can be made again."""

    def __init__(self) -> None:
        self.table: dict[str, Recipe] = {}

    def note(
        self,
        func: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        made: Iterable[tuple[int, Value]],
        value_of: Callable[[torch.Tensor], Value | None],
        inputs: Iterable[str],
    ) -> None:
        """A call that drew no random number; `made`: its new values."""
        known = {*inputs, *self.table}
        is_known = True

        def refer(leaf: Any) -> Any:
            nonlocal is_known
            if not isinstance(leaf, torch.Tensor):
                return leaf
            value = value_of(leaf)
            if value is None or value.name not in known:
                is_known = False
                return leaf
            return Ref(value.name)

        args, kwargs = swapped(*arguments, refer)
        if is_known and not list(tensors_in(args, kwargs)):  # none hides in a container that was not looked into
            for place, value in made:
                self.table[value.name] = Recipe(func, args, kwargs, place)

    def of(self, name: str, inputs: Iterable[str]) -> Recomputed | None:
        """How to compute a value again, if that can be done."""
        needed: dict[str, Recipe] = {}
        reads: dict[str, None] = {}
        todo, outside = [name], set(inputs)
        while todo:
            at = todo.pop()
            if at in outside:
                reads[at] = None
            elif at not in needed:
                recipe = self.table.get(at)
                if recipe is None:
                    return None
                needed[at] = recipe
                swapped(recipe.args, recipe.kwargs, lambda leaf: todo.append(leaf.name) if isinstance(leaf, Ref) else leaf)
        return Recomputed(name, needed, tuple(reads))
