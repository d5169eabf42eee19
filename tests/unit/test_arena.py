"""Small gradients side by side: their values, places, alignment, and what stays outside."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

import graphcap
from graphcap import _arena
from graphcap._arena import Arena, pack, same_arena


def gradients() -> list[Tensor | None]:
    torch.manual_seed(0)
    return [torch.randn(3, 5), None, torch.randn(7), torch.randn(4, 4).t(), torch.randn(2), torch.randn(())]


def packed(results: list[Tensor | None]) -> tuple[list[Tensor | None], Arena]:
    moved, arena = pack(results, range(len(results)))
    assert arena is not None
    return moved, arena


def test_values_and_places() -> None:
    results = gradients()
    moved, arena = packed(results)
    copies = arena.fresh()
    assert set(copies) == {0, 2, 4, 5}  # None and the transposed one stay outside
    assert moved[1] is None and moved[3] is results[3]
    for number, copy in copies.items():
        original, static = results[number], moved[number]
        assert original is not None and static is not None
        assert torch.equal(copy, original) and torch.equal(static, original) and copy.stride() == original.stride()
        assert static.untyped_storage().data_ptr() == arena.flat.untyped_storage().data_ptr()
        assert (static.data_ptr() - arena.flat.data_ptr()) % _arena.ALIGNED == 0
        copy.zero_()
    assert all(torch.equal(moved[n], results[n]) for n in copies)  # type: ignore[arg-type]  # none of them is None


def test_what_is_not_packed() -> None:
    large = torch.randn(_arena.SMALL // 4 + 1)
    results: list[Tensor | None] = [large, torch.randn(2), torch.randn(2, dtype=torch.float64)]
    assert pack(results, range(3))[1] is None  # one small gradient of a dtype alone gains nothing
    moved, arena = packed([*results, torch.randn(3)])
    assert moved[0] is large and [number for number, _ in arena.places] == [1, 3]


def test_only_the_numbers_that_are_asked_for() -> None:
    moved, arena = pack(gradients(), [4, 5])
    assert arena is not None and [number for number, _ in arena.places] == [4, 5]
    assert moved[0] is not None and moved[0].untyped_storage().data_ptr() != arena.flat.untyped_storage().data_ptr()


def test_another_pattern_shares_what_lies_there() -> None:
    first, arena = packed(gradients())
    other = list(first)
    other[2], other[4] = None, torch.randn(2)
    shared = same_arena(arena, other, first)
    assert shared is not None and [number for number, _ in shared.places] == [0, 5]
    assert same_arena(arena, [None] * len(first), first) is None


class Many(torch.nn.Module):
    """Parameters of odd sizes, one above the limit, one whose gradient is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lines = torch.nn.ModuleList(torch.nn.Linear(8, width) for width in (1, 3, 8, 13))
        self.large = torch.nn.Linear(8, _arena.SMALL // 32 + 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = torch.cat([torch.tanh(line(x)) for line in self.lines], dim=-1)
        return parts, self.large(x)


def test_equal_to_eager_with_every_choice_of_outputs() -> None:
    module = Many()
    twin, graphed = deepcopy(module), graphcap.capture(module, (torch.randn(4, 8),), backend="tape")
    for choice in ((True, True), (True, False), (False, True)) * 3:
        x = torch.randn(4, 8)
        for side in (graphed, twin):
            side.zero_grad(set_to_none=True)
            outputs = zip(side(x), choice, strict=True)
            sum(out.square().mean() for out, there in outputs if there).backward()  # type: ignore[union-attr]
        for (name, ours), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
            assert ours.grad is None or ours.grad.abs().max() > 0, name
