"""Functions of the user's that torch.compile has made: in EAGER parts they go on as they are, elsewhere they are refused.
The backend of these tests gives other values than the function itself, so that whoever runs it uncompiled is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import EAGER, GRAPHED, CutError


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _louder(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return tuple(value * 1.5 for value in module(*args))

    return run


def _function(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) + 1


class Declared(graphcap.PartialLayer):
    inputs, outputs = "x", "y"

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def parts(self) -> Any:
        return (
            GRAPHED("one", "x -> h"),
            EAGER("middle", "h -> k", reason="compiled"),
            GRAPHED("two", "k -> y"),
        )

    def one(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.first(x)
        return made

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.function(h)
        return made

    def two(self, k: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(k)
        return made


class Middle(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.function(x)
        return made


def cut(function: Callable[..., Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Middle(function), nn.Linear(4, 4))


@pytest.mark.parametrize("form", ["declared", "cut"])
def test_in_an_eager_part_it_stays_compiled_for_graphs_and_eager_runs(form: str) -> None:
    compiled = torch.compile(_function, backend=_louder)
    model = Declared(compiled) if form == "declared" else cut(compiled)
    x = torch.randn(3, 4)
    expected = model(x)
    assert not torch.equal(compiled(x), _function(x))
    options: dict[str, Any] = {} if form == "declared" else {"break_at": "1"}
    graphed = graphcap.capture(model, (x,), backend="tape", **options)
    for _ in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(graphed(x), model(x))
    assert torch.equal(model(x), model[2](_function(model[0](x)) * 1.5) if form == "cut" else model(x))
    assert not torch.equal(compiled(x), _function(x)), "a capture has made Dynamo give it up"
    assert expected.shape == (3, 4)


@pytest.mark.parametrize("break_at", [(), "auto"])
def test_in_a_graphed_part_it_is_refused_and_stays_as_it_is(break_at: Any) -> None:
    compiled = torch.compile(_function, backend=_louder)
    model, x = cut(compiled), torch.randn(3, 4)
    before = model(x)
    with pytest.raises(CutError, match=r"calls _function, which torch\.compile has made") as caught:
        graphcap.capture(model, (x,), backend="tape", break_at=break_at)
    assert "EAGER part" in str(caught.value)
    assert torch.equal(model(x), before)


def test_never_run_before() -> None:
    """Its first run ever is the capture's warm-up."""
    compiled = torch.compile(_function, backend=_louder)
    with pytest.raises(CutError, match=r"torch\.compile has made"):
        graphcap.capture(cut(compiled), (torch.randn(3, 4),), backend="tape")
    x = torch.randn(3, 4)
    assert torch.equal(compiled(x), _function(x) * 1.5)


def test_a_plan_leaves_it_as_it_is() -> None:
    compiled = torch.compile(_function, backend=_louder)
    model, x = cut(compiled), torch.randn(3, 4)
    before = model(x)
    graphcap.plan(model, (x,), break_at="1")
    assert torch.equal(model(x), before)


def test_a_backend_that_changes_nothing_is_no_matter() -> None:
    model, x = cut(torch.compile(_function, backend="eager")), torch.randn(3, 4)
    graphed = graphcap.capture(model, (x,), backend="tape")
    assert torch.equal(graphed(x), model(x))
