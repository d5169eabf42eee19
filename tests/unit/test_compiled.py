"""Compiled functions under graphcap's modes: they run as eager code runs them, during and after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap._compiled import as_warmed_up
from graphcap.backends.refusal_modes import CallGate, Gate, OperatorGate
from graphcap.errors import StateError


@pytest.fixture(autouse=True)
def _forget() -> None:
    """Dynamo keeps what it knows by code object, which the functions of these tests share."""
    torch.compiler.reset()


class Everything:
    """A device view for the gates."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        return False

    def on_device(self, device: object) -> bool:
        return True


class Counted:
    """A function, compiled by a backend that counts: how often it has compiled, how often what it compiled has run."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) * 2

        self.call = torch.compile(function, backend=self._compile)

    def _compile(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return module(*args)

        return run


def under_gates(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    gate = Gate(Everything(), ())
    with ExitStack() as stack:
        stack.enter_context(CallGate(gate))
        stack.enter_context(OperatorGate(gate))
        made: torch.Tensor = call(x)
    return made


def test_without_it_dynamo_gives_up_for_good() -> None:
    """The reason for all this. If torch mends it, this test says so."""
    counted, x = Counted(), torch.ones(3)
    counted.call(x)
    under_gates(counted.call, x)
    counted.call(x)
    assert (counted.compiled, counted.ran) == (1, 1)


def test_what_was_compiled_runs_under_gates_and_after() -> None:
    counted, x = Counted(), torch.ones(3)
    call = as_warmed_up(counted.call, "function")
    expected = call(x)
    for number in range(3):
        assert torch.equal(under_gates(call, x), expected)
        assert torch.equal(counted.call(x), expected)
        assert (counted.compiled, counted.ran) == (1, 3 + 2 * number)


def test_gradients_through_what_was_compiled() -> None:
    counted = Counted()
    call = as_warmed_up(counted.call, "function")
    sides = []
    for run in (counted.call, lambda x: under_gates(call, x)):
        x = torch.linspace(-1, 1, 5).requires_grad_()
        run(x).sum().backward()
        sides.append(x.grad)
    assert counted.compiled == 1
    assert torch.equal(*sides) and sides[0].any()


def test_nothing_is_compiled_while_modes_look_on() -> None:
    counted, x = Counted(), torch.ones(3)
    call = as_warmed_up(counted.call, "the function")
    with pytest.raises(StateError, match="the function is compiled by"):
        under_gates(call, x)
    assert counted.compiled == 0
    call(x)
    under_gates(call, x)
    with pytest.raises(StateError, match="at least one warm-up run"):
        under_gates(call, torch.ones(3, dtype=torch.float64))
    assert (counted.compiled, counted.ran) == (1, 2)


def test_a_mode_that_looks_on_sees_the_plain_function_and_dynamo_does_not_notice() -> None:
    class Looks(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    Looks.__module__ = "graphcap.some"
    counted, x = Counted(), torch.ones(3)
    call = as_warmed_up(counted.call, "function")
    with Looks():
        call(x)
    assert "aten.tanh.default" in Looks.names
    assert (counted.compiled, counted.ran) == (0, 0)
    call(x)
    under_gates(call, x)
    assert (counted.compiled, counted.ran) == (1, 2)


def test_under_function_modes_what_is_compiled_serves_everybody() -> None:
    class Follows(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError("the compiler asked a mode")

    Follows.__module__ = "graphcap.some"
    counted, x = Counted(), torch.ones(3)
    call = as_warmed_up(counted.call, "function")
    with Follows():
        call(x)
    under_gates(call, x)
    counted.call(x)
    assert (counted.compiled, counted.ran) == (1, 3)


def test_errors_of_the_function_pass() -> None:
    @torch.compile(backend="eager")
    def fails(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    call = as_warmed_up(fails, "fails")
    x = torch.ones(2, 2)
    call(x)
    with pytest.raises(ValueError, match="mine"):
        under_gates(as_warmed_up(_mine, "mine"), x)


def _mine(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("mine")


def test_a_mode_of_the_users_stays() -> None:
    class Seen(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        under_gates(as_warmed_up(torch.tanh, "tanh"), torch.ones(2))
    assert "aten.tanh.default" in Seen.names
