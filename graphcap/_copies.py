"""Copies into static memory and out of it, as few kernels as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphcap._tensors import compact
from graphcap.errors import InputMismatch


@dataclass(frozen=True, slots=True)
class Memory:
    """A static tensor to copy into: its compact view, its strides, where it lies, and whether copies may be left out."""

    place: int
    static: torch.Tensor
    strides: tuple[int, ...]
    address: int
    storage: int
    expanded: bool


class Copies:
    """Fills a group of static tensors: what lies in its place already is left, the others go in one copy."""

    __slots__ = ("memories", "storages")

    def __init__(self, memories: Sequence[Memory]) -> None:
        self.memories = tuple(memories)
        self.storages = frozenset(memory.storage for memory in memories)

    def fill(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """`tensors[memory.place]` into every memory; a missing one is zeroed."""
        targets, sources = [], []
        for memory in self.memories:
            source = tensors[memory.place]
            if source is None:
                memory.static.zero_()
                continue
            if source.layout is not torch.strided:
                raise InputMismatch(
                    f"a gradient with the layout {source.layout} arrived; only dense gradients can be copied into a static "
                    "buffer (embedding(sparse=True) in an eager part?)"
                )
            if source.data_ptr() == memory.address and (memory.expanded or source.stride() == memory.strides):
                continue
            if memory.expanded:
                source = _like(source, memory.static)
            if source.untyped_storage().data_ptr() in self.storages and source.numel():
                source = source.clone()  # an aliased output that comes back may lie in what is written here
            targets.append(memory.static)
            sources.append(source)
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        elif targets:
            torch._foreach_copy_(targets, sources)


def memory_of(place: int, static: torch.Tensor) -> Memory:
    core = compact(static)
    storage = static.untyped_storage().data_ptr()
    return Memory(place, core, core.stride(), static.data_ptr(), storage, core.shape != static.shape)


def _like(tensor: torch.Tensor, core: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that `core` (size 1 where expanded) holds."""
    for dim, size in enumerate(core.shape):
        if tensor.shape[dim] != size:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def fresh(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on memory of their own. On a GPU one kernel copies many: x * 1 has the bits of x."""
    if len(tensors) > 1 and tensors[0].is_cuda and all(t.is_floating_point() for t in tensors):
        return list(torch._foreach_mul(list(tensors), 1))
    return [tensor.clone() for tensor in tensors]
