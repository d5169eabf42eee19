"""`graphcap.testing.bisect` names the part whose graph differs, wherever the fault is planted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap._replay import BoundPart
from graphcap.testing import bisect, deterministic
from tests.cut.test_plan import Cut

SCALE = 1.0


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.linear, self.cut, self.norm = nn.Linear(4, 4), Cut(), norm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.cut(torch.dropout(self.linear(x), 0.2, self.training)) + x) * SCALE
        return result


class Declared(graphcap.PartialLayer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def parts(self) -> Any:
        return (
            graphcap.GRAPHED("enter", "hidden -> inner, hidden"),
            graphcap.EAGER("double", "inner -> inner"),
            graphcap.GRAPHED("leave", "inner, hidden -> hidden"),
        )

    def enter(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(hidden), hidden.tanh()

    def double(self, inner: torch.Tensor) -> torch.Tensor:
        return inner * 2

    def leave(self, inner: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(inner) + hidden
        return result


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def inputs(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(6, 4, generator=torch.Generator().manual_seed(index)),), {}


def run(**options: Any) -> graphcap.testing.Bisection:
    with deterministic("cpu"):
        return bisect(build, inputs, steps=4, backend="tape", break_at="*.cut", **options)


@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_nothing_to_find(grads: Any) -> None:
    found = run(config=graphcap.CaptureConfig(grads=grads))
    assert found and found.fault is None and "equal over 4 steps" in str(found)


@pytest.mark.parametrize("order", [None, "0F0 0F1 0B0 0B1"])
@pytest.mark.parametrize("part", [0, 2, 4])
def test_a_wrong_output(monkeypatch: pytest.MonkeyPatch, part: int, order: str | None) -> None:
    plain = BoundPart.run

    def wrong(self: BoundPart, tensors: Any, side: Any) -> Any:
        outputs = plain(self, tensors, side)
        if self.index == part:
            with torch.no_grad():
                outputs[-1].flatten()[0].add_(0.5)  # output 0 of the first part is its input, which passes through
        return outputs

    monkeypatch.setattr(BoundPart, "run", wrong)
    found = run(order=order)
    assert not found and found.fault is not None and found.fault.part == part
    assert "1 of 24 values differ, by at most 0.5" in str(found) and found.step == 0
    assert found.fault.value.startswith("output ")
    assert "made at" in str(found) and "test_bisect.py" in str(found.fault.line)


@pytest.mark.parametrize("grads", ["return", "accumulate"])
@pytest.mark.parametrize("part", [0, 2, 4])
def test_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch, part: int, grads: Any) -> None:
    plain = BoundPart.backward

    def wrong(self: BoundPart, flight: Any, gradients: Any) -> Any:
        changed = [None if g is None else g * 2 for g in gradients] if self.index == part else gradients
        return plain(self, flight, changed)

    monkeypatch.setattr(BoundPart, "backward", wrong)
    found = run(config=graphcap.CaptureConfig(grads=grads))
    assert not found and found.fault is not None and found.fault.part == part
    assert found.fault.value.startswith("gradient of")


def test_recomputed_activations_tie_parts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuild() -> nn.Module:
        return nn.Sequential(Block(nn.LayerNorm), Block(nn.LayerNorm))  # no running statistics: recompute refuses them

    def recomputed() -> graphcap.testing.Bisection:
        config = graphcap.CaptureConfig(recompute="part")
        with deterministic("cpu"):
            return bisect(rebuild, inputs, steps=4, backend="tape", break_at="*.cut", config=config)

    assert recomputed()
    plain = BoundPart.backward

    def wrong(self: BoundPart, flight: Any, gradients: Any) -> Any:
        changed = [None if g is None else g * 2 for g in gradients] if self.index == 2 else gradients
        return plain(self, flight, changed)

    monkeypatch.setattr(BoundPart, "backward", wrong)
    found = recomputed()
    assert not found and found.fault is None and "can't be run one by one: recompute='part'" in str(found)


def test_a_global_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(index: int) -> Any:
        if index == 2:
            monkeypatch.setitem(globals(), "SCALE", 1.5)
        return inputs(index)

    with deterministic("cpu"):
        found = bisect(build, changing, steps=4, backend="tape", break_at="*.cut")
    assert not found and found.step == 2 and found.fault is not None and found.fault.part == 2
    assert "does not do what it did at capture" in str(found)


@pytest.mark.parametrize("part", [0, 2])
def test_declared_parts(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    plain = BoundPart.run

    def wrong(self: BoundPart, tensors: Any, side: Any) -> Any:
        outputs = plain(self, tensors, side)
        with torch.no_grad():
            outputs[-1].mul_(2 if self.index == part else 1)
        return outputs

    with deterministic("cpu"):
        assert bisect(Declared, inputs, steps=3, backend="tape")
        monkeypatch.setattr(BoundPart, "run", wrong)
        found = bisect(Declared, inputs, steps=3, backend="tape")
    assert not found and found.fault is not None and found.fault.part == part
