"""Small parameter gradients side by side, so that one copy hands them all out.

A gradient that leaves a graph must be memory of its own. One clone per parameter costs about 10 us of CPU time on an H200
host; one copy of an arena and a view for each costs 3 us per parameter. Large gradients stay where they are: recording
them into an arena would be one more pass over their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphcap import _torch_private as private

SMALL = 1 << 20  # bytes; above, a copy's time on the GPU counts for more than the launch that it costs
ALIGNED = 512  # bytes; as the caching allocator aligns: kernels choose by alignment, and so may the bits differ


@dataclass(frozen=True, slots=True)
class Arena:
    """Small parameter gradients of one backward side by side, so that one copy gives them all to the caller. like: what
    lies there, gaps included; places: (number of the result, its place in `like`)."""

    flat: torch.Tensor
    like: tuple[torch.Tensor, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def numbers(self) -> frozenset[int]:
        """The results that lie here."""
        return frozenset(number for number, _ in self.places)

    def fresh(self) -> dict[int, torch.Tensor]:
        """Copies on new memory, by the number of the result."""
        views = private.unflatten(self.flat.clone(), self.like)
        return {number: views[place] for number, place in self.places}


def pack(
    results: Sequence[torch.Tensor | None], numbers: Sequence[int]
) -> tuple[list[torch.Tensor | None], Arena | None]:
    """Move the small gradients among `numbers` side by side (recorded: one copy kernel)."""
    packed: list[torch.Tensor | None] = list(results)
    chosen = [n for n in numbers if _is_small(results[n])]
    first = next((results[n] for n in chosen), None)
    chosen = [n for n in chosen if first is not None and _alike(results[n], first)]
    if first is None or len(chosen) < 2:
        return packed, None
    size, sources = first.element_size(), [results[n] for n in chosen]
    like: list[torch.Tensor] = []
    places = []
    for number, source in zip(chosen, sources, strict=True):
        assert source is not None
        places.append((number, len(like)))
        like.append(source)
        gap = -source.numel() * size % ALIGNED // size
        if gap:
            like.append(first.new_empty(gap))
    flat = first.new_empty(sum(tensor.numel() for tensor in like))
    views = private.unflatten(flat, like)
    with torch.no_grad():
        torch._foreach_copy_([views[place] for _, place in places], sources)  # type: ignore[arg-type]
    for number, place in places:
        packed[number] = views[place]
    return packed, Arena(flat, tuple(view.detach() for view in views), tuple(places))


def _is_small(result: torch.Tensor | None) -> bool:
    return result is not None and result.is_contiguous() and 0 < result.nbytes <= SMALL


def _alike(result: torch.Tensor | None, first: torch.Tensor) -> bool:
    return result is not None and result.dtype == first.dtype and result.device == first.device


def same_arena(
    arena: Arena | None, results: Sequence[torch.Tensor | None], first: Sequence[torch.Tensor | None]
) -> Arena | None:
    """The first pattern's arena, as far as another pattern leaves its gradients there as well."""
    if arena is None:
        return None
    places = tuple((n, place) for n, place in arena.places if results[n] is not None and results[n] is first[n])
    return replace(arena, places=places) if places else None
