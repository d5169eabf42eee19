"""Small hazards for the automatic cut: each a module and its inputs. `EQUAL` must agree with eager bit for bit, `REFUSED`
must raise CutError and say the words given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8
Module = Callable[[], nn.Module]
HOLDER: dict[str, Any] = {}


def drawn(seed: int, *shape: int, grad: bool = True) -> Tensor:
    made = torch.randn(shape or (4, WIDTH), generator=torch.Generator().manual_seed(seed + 5))
    return made.requires_grad_(grad)


def one_tensor(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (drawn(index),), {}


@dataclass(frozen=True)
class Case:
    """break_at and inputs as for `compare`; options are passed to capture."""

    build: Module
    break_at: Any = "*brk*"
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]] = one_tensor
    breaks: int | None = None
    words: str = ""
    options: dict[str, Any] = field(default_factory=dict)


EQUAL: dict[str, Case] = {}
REFUSED: dict[str, Case] = {}


def equal(name: str, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def note(build: type[nn.Module]) -> type[nn.Module]:
        EQUAL[name] = Case(build, **options)
        return build

    return note


def refused(name: str, words: str, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def note(build: type[nn.Module]) -> type[nn.Module]:
        REFUSED[name] = Case(build, words=words, **options)
        return build

    return note


class Break(nn.Module):
    """Multiplies the rows that the data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        chosen = (x.sum(-1) > 0).nonzero().squeeze(-1)
        made = self.linear(x.index_select(0, chosen)).to(x.dtype)
        return torch.tanh(x) + torch.zeros_like(x).index_add(0, chosen, made)


class Base(nn.Module):
    """Three linears and two breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.brk, self.brk2 = Break(), Break()
