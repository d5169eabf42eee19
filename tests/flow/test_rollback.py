"""Nothing is left behind by a capture, whether it succeeds or fails, and wherever it fails."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch

import graphcap
from graphcap import CaptureError, ForbiddenOpError, HookError, SampleError, WarmupError
from graphcap.testing import compare, deterministic
from tests.flow.small import agrees, capture, rows, twin_of

_HOOKS = [
    name
    for name in vars(nn.Module())
    if name.endswith("_hooks") or name.endswith("_hooks_with_kwargs") or name.endswith("_hooks_always_called")
]


def frozen(value: torch.Tensor | None) -> Any:
    return None if value is None else (id(value), value.data_ptr(), value.detach().clone())


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Everything that design rule 2 names."""
    state: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        state[f"parameter {name}"] = frozen(parameter)
        state[f"gradient {name}"] = frozen(parameter.grad)
        state[f"flags {name}"] = (parameter.requires_grad, sorted(vars(parameter)), parameter.is_leaf)
        state[f"tensor hooks {name}"] = len(parameter._backward_hooks or ())
        state[f"main_grad {name}"] = frozen(getattr(parameter, "main_grad", None))
    for name, buffer in module.named_buffers():
        state[f"buffer {name}"] = frozen(buffer)
    for name, inner in module.named_modules():
        state[f"training {name}"] = inner.training
        state[f"attributes {name}"] = list(vars(inner))
        state[f"order {name}"] = [list(inner._parameters), list(inner._buffers), list(inner._modules)]
        state[f"hooks {name}"] = [len(getattr(inner, kind)) for kind in _HOOKS]
        for key, value in vars(inner).items():
            if isinstance(value, torch.Tensor):
                state[f"tensor {name}.{key}"] = frozen(value)
            elif isinstance(value, list) and not key.startswith("_"):
                state[f"list {name}.{key}"] = [frozen(v) if isinstance(v, torch.Tensor) else v for v in value]
            elif isinstance(value, torch.Generator):
                state[f"generator {name}.{key}"] = value.get_state()
            elif isinstance(value, bool | int | float | str | None):
                state[f"value {name}.{key}"] = value
        state[f"class {name}"] = dict(vars(type(inner)))
    state["rng"] = torch.get_rng_state()
    state["python rng"] = random.getstate()
    state["gc"] = (gc.isenabled(), gc.get_freeze_count() > 0, gc.get_threshold())
    state["modes"] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    state["autocast"] = (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    state["dispatch modes"] = list(_python_dispatch._get_current_dispatch_mode_stack())
    state["function modes"] = torch._C._len_torch_function_stack()
    state["saved tensor hooks"] = torch._C._autograd._top_saved_tensors_default_hooks(False)
    state["torch"] = (
        nn.Module.__call__,
        nn.Module._call_impl,
        torch.autograd.Function.apply,
        torch.Tensor.backward,
        torch.nn.functional.one_hot,
        torch.tensor,
    )
    state["global hooks"] = len(nn.modules.module._global_forward_pre_hooks)
    state["threads"] = threading.active_count()
    state["settings"] = (sys.getrecursionlimit(), torch.get_num_threads(), torch.get_default_dtype())
    return state


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a is b or a == b)


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    assert [name for name in before if not equal(before[name], after[name])] == []


class Raising(torch.autograd.Function):
    """Identity whose backward can fail."""

    fail_at = 0
    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Raising.runs += 1
        if Raising.runs == Raising.fail_at:
            raise ArithmeticError("backward failed")
        return gradient * 2


class Everything(nn.Module):
    """A module with every kind of state that a forward changes, and a switch for each way to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.plain = torch.zeros(8)
        self.cache: torch.Tensor | None = None
        self.states = [torch.zeros(8)]
        self.log: list[str] = ["made"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Failing.runs += 1
        self.count += 1
        self.plain.add_(1)
        self.states[0].add_(1)
        if self.cache is None:
            self.cache = torch.ones(8) * 2
            self.log.append("cached")
        Failing.act(x)
        y = Raising.apply(self.drop(self.norm(self.linear(x))))
        return self.head(y) * self.cache + self.plain * 0 + self.states[0] * 0


class Failing:
    """How the forward fails: at run `at`, by `kind`."""

    at = 0
    kind = ""
    runs = 0

    @classmethod
    def act(cls, x: torch.Tensor) -> None:
        if cls.runs != cls.at:
            return
        if cls.kind == "item":
            x.sum().item()
        elif cls.kind == "interrupt":
            raise KeyboardInterrupt
        elif cls.kind == "swallowed":
            try:
                x.sum().item()
            except RuntimeError:
                pass
        elif cls.kind:
            raise ValueError("forward failed")


def build() -> Everything:
    torch.manual_seed(5)
    module = Everything()
    for index, parameter in enumerate(module.parameters()):
        if index % 2:
            parameter.grad = torch.full_like(parameter, 0.5)
        if index == 2:
            parameter.register_hook(lambda g: g)
            parameter.tag = "mine"
    module.norm.eval()
    module.register_forward_hook(lambda *_: None)
    module.linear.register_forward_hook(lambda *_: None)
    return module


# name, what is raised, warm-up runs: Failing.at counts forwards, Raising.fail_at backwards (3 warm-up runs, then recording)
STAGES: list[tuple[str, dict[str, Any], type[BaseException]]] = [
    ("success", {}, NotImplementedError),
    ("warm-up 1", {"kind": "raise", "at": 1}, WarmupError),
    ("warm-up 2", {"kind": "raise", "at": 2}, WarmupError),
    ("forward recording", {"kind": "raise", "at": 4}, CaptureError),
    ("backward in warm-up", {"fail_at": 2}, WarmupError),
    ("backward recording", {"fail_at": 4}, CaptureError),
    ("a forbidden operation", {"kind": "item", "at": 4}, ForbiddenOpError),
    ("a swallowed forbidden operation", {"kind": "swallowed", "at": 4}, ForbiddenOpError),
    ("an interrupt in warm-up", {"kind": "interrupt", "at": 2}, KeyboardInterrupt),
    ("an interrupt while recording", {"kind": "interrupt", "at": 4}, KeyboardInterrupt),
]


def armed(kind: str = "", at: int = 0, fail_at: int = 0) -> None:
    Failing.kind, Failing.at, Failing.runs = kind, at, 0
    Raising.fail_at, Raising.runs = fail_at, 0


def attempt(run: Callable[[], Any], error: type[BaseException]) -> None:
    if error is NotImplementedError:
        run()
        return
    with pytest.raises(error):
        run()


@pytest.mark.parametrize(("arm", "error"), [stage[1:] for stage in STAGES], ids=[stage[0] for stage in STAGES])
@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_everything_is_as_before(arm: dict[str, Any], error: type[BaseException], grads: str) -> None:
    module = build()
    if grads == "accumulate":
        for parameter in module.parameters():
            parameter._backward_hooks = None
    sample = rows(requires_grad=True)
    given = frozen(sample)
    before = snapshot(module)
    armed(**arm)
    attempt(lambda: capture(module, (sample,), grads=grads), error)
    unchanged(before, snapshot(module))
    assert equal(given, frozen(sample))
    assert sample.grad is None
    armed()

    again = snapshot(module)  # the same process captures the same module, and the repaired callable computes right
    capture(module, (sample,), grads=grads)
    unchanged(again, snapshot(module))
    with deterministic("cpu"):
        result = compare(Repaired, lambda index: ((rows(),), {}), steps=3, backend="tape")
    assert result, str(result)


class Lazy(nn.Module):
    """Makes things at its first run, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "tables"):
            self.tables = [torch.arange(8.0)]
            self.names = {"a": 1}
            self.inner = nn.Identity()
            self.register_buffer("late", torch.ones(8))
            self.made = object()
        return self.inner(self.linear(x) * self.tables[0] + self.late)


def test_what_a_first_run_makes_is_taken_away_and_stays_alive_for_the_graph() -> None:
    module = Lazy()
    before = snapshot(module)
    graphed = capture(module)
    unchanged(before, snapshot(module))
    gc.collect()
    twin = twin_of(module)
    agrees(graphed, twin, rows())
    with graphcap.disabled():
        graphed(rows())  # now the module has made its own
    agrees(graphed, twin, rows())


class Repaired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x)))


def test_main_grad_is_as_before() -> None:
    module = nn.Linear(8, 8)
    for parameter in module.parameters():
        parameter.main_grad = torch.full(parameter.shape, 0.25)
    before = snapshot(module)
    capture(module, grads="accumulate")
    unchanged(before, snapshot(module))


@pytest.mark.parametrize("context", ["no_grad", "autocast", "gc off", "gc frozen", "anomaly"])
def test_modes_of_the_caller_survive(context: str) -> None:
    module = build()
    capturing: Any = {
        "no_grad": torch.no_grad,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    }
    if context in capturing:
        with capturing[context]():
            before = snapshot(module)
            armed()
            capture(module)
            armed(kind="raise", at=4)
            with pytest.raises(CaptureError):
                capture(module)
            unchanged(before, snapshot(module))
        return
    armed()
    try:
        gc.disable() if context == "gc off" else gc.freeze()
        before = snapshot(module)
        capture(module)
        unchanged(before, snapshot(module))
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_generator_of_the_module_is_put_back() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + torch.rand(8, generator=self.generator)

    module = Noisy()
    before = snapshot(module)
    with pytest.raises(CaptureError, match=r"[Gg]enerator"):
        capture(module)
    unchanged(before, snapshot(module))


def test_a_refused_plan_touches_nothing() -> None:
    module = build()
    before = snapshot(module)
    with pytest.raises(HookError):
        graphcap.make_graphed_callables(module, (torch.ones(4, 8),), backend="tape")
    for args in ("text", ({"x": torch.ones(4, 8).to_sparse()},), (torch.ones(4, 8).to("meta"),)):
        with pytest.raises(SampleError):
            capture(module, args)
    unchanged(before, snapshot(module))


def test_a_failed_drop_in_leaves_every_module_its_own_forward() -> None:
    modules = (nn.Linear(8, 8), Everything(), nn.Linear(8, 8))
    before = [snapshot(m) for m in modules]
    armed(kind="raise", at=4)
    with pytest.raises(CaptureError):
        graphcap.make_graphed_callables(modules, ((torch.ones(4, 8),),) * 3, backend="tape")
    for module, state in zip(modules, before, strict=True):
        unchanged(state, snapshot(module))
    assert all("forward" not in vars(module) for module in modules)


def test_rng_after_capture_is_that_of_eager() -> None:
    """A module with dropout draws the same numbers as if capture had not happened."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    armed()
    capture(Everything())
    torch.manual_seed(1)
    module = nn.Dropout(0.5)
    state = torch.get_rng_state()
    capture(module)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(torch.rand(3), expected)
