"""Traced units under everything else that capture offers: orders, slots, gradients, modes, tuples of layers, plans."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap import CaptureConfig
from graphcap.errors import CutError
from graphcap.testing import compare, deterministic
from tests.cut import cases_crossing, cases_state  # noqa: F401  (they fill EQUAL)
from tests.cut.cases import EQUAL, Base, Break, drawn, one_tensor


class Layer(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        y = self.brk(h) + h
        return self.c(torch.tanh(y)) + torch.tanh(self.b(y)) + self.brk2(h * 0.5)


def judged(build: Any, **options: Any) -> None:
    torch.manual_seed(1)
    with deterministic("cpu"):
        verdict = compare(
            build,
            one_tensor,
            **{
                "steps": 5,
                "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                "backend": "tape",
                "break_at": "*brk*",
                **options,
            },
        )
    assert verdict, str(verdict)


@pytest.mark.parametrize(
    "order",
    [
        "0F0 0B0 0F1 0B1",
        "0F0 0F1 0B1 0B0",
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "0F0 0I0 0W0 0F1 0I1 0W1",
        "0F0 0F1 0I0 0I1 0W0 0W1",
    ],
)
@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_orders(order: str, grads: Any) -> None:
    judged(Layer, order=order, config=CaptureConfig(grads=grads))


def test_two_chunks() -> None:
    judged(lambda: (Layer(), Layer()), order="0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1", break_at="[01].brk*")


def test_a_tuple_of_layers_is_one_unit() -> None:
    judged(lambda: (Layer(), nn.Linear(8, 8), Layer()), break_at=("0.brk", "2.brk*", Break))


@pytest.mark.parametrize("config", [{"grads": "alias"}, {"outputs": "alias"}, {"warmup": 1}, {"retain_graph": True}])
def test_configs(config: dict[str, Any]) -> None:
    judged(Layer, config=CaptureConfig(**config))


def test_no_gradients() -> None:
    judged(Layer, grad_mode=False, expect_no_grads=True)


def captured(module: nn.Module, **options: Any) -> graphcap.Graphed:
    return graphcap.capture(module, (drawn(0),), backend="tape", break_at="*brk*", **options)


def test_captured_with_gradients_and_called_without() -> None:
    module = Layer()
    graphed = captured(module)
    with torch.no_grad():
        assert torch.equal(graphed(drawn(4)), module(drawn(4)))


def test_under_autocast() -> None:
    module = Layer()
    twin = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        graphed = captured(module)
        graphed(x := drawn(5)).float().sum().backward()
        twin(z := drawn(5)).float().sum().backward()
    assert torch.equal(x.grad, z.grad)  # type: ignore[arg-type]
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        assert q.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_mismatches_run_eagerly() -> None:
    module = Layer()
    graphed = captured(module, config=CaptureConfig(on_mismatch="eager"))
    x = torch.randn(6, 8)
    assert torch.equal(graphed(x), module(x))
    assert sum(graphed.stats.eager.values()) == 1


def test_a_failing_break_frees_the_slot() -> None:
    class Failing(Break):
        fail = False

        def forward(self, x: Tensor, **_: Any) -> Tensor:
            if self.fail:
                raise RuntimeError("an expert failed")
            return super().forward(x)

    module = Layer()
    module.brk = Failing()
    graphed = captured(module)
    module.brk.fail = True
    with pytest.raises(RuntimeError, match="expert failed"):
        graphed(drawn(1))
    module.brk.fail = False
    assert torch.equal(graphed(drawn(2)), module(drawn(2)))


def test_a_hook_added_to_a_break_later_runs() -> None:
    module = Layer()
    graphed = captured(module)
    seen: list[int] = []
    module.brk.register_forward_hook(lambda *_: seen.append(1))
    graphed(drawn(1))
    graphed(drawn(2))
    assert len(seen) == 2


def test_a_replaced_break_parameter_is_followed() -> None:
    """The break is ordinary Python: it reads what its module holds now."""
    module = Layer()
    graphed = captured(module)
    module.brk.linear = nn.Linear(8, 8)
    assert torch.equal(graphed(drawn(3)), module(drawn(3)))


def test_nothing_is_left_behind_and_the_plan_is_readable() -> None:
    module = EQUAL["dropout in every part"].build()
    state = torch.get_rng_state()
    call, capturing = nn.Module.__call__, torch.cuda.is_current_stream_capturing
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    graphed = captured(module)
    assert torch.equal(state, torch.get_rng_state())
    assert nn.Module.__call__ is call
    assert torch.cuda.is_current_stream_capturing is capturing
    assert torch.autograd.Function.apply.__func__ is apply  # type: ignore[attr-defined]
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    text = str(graphed.plan)
    assert "brk" in text and "break_at='*brk*'" in text
    assert graphed.plan.graphs == len(graphed.plan.breaks) + 1


def test_a_model_that_asks_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape answers as a GPU would; the trace hides it from the model, or the recording would take another branch."""
    from graphcap.backends.scopes import is_capturing

    class Asking(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = self.brk(self.a(x))
            return self.b(h) if torch.cuda.is_current_stream_capturing() else self.b(h).sin() * 2

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    judged(Asking)
    with monkeypatch.context() as patch:
        import contextlib

        patch.setattr("graphcap._torch_private.not_capturing_for_users", lambda thread: contextlib.nullcontext())
        with pytest.raises(CutError, match=r"(?s)other torch calls.*sin"):
            captured(Asking())


def test_partial_layers_say_already_where_to_break() -> None:
    class Declared(graphcap.PartialLayer):
        def parts(self) -> Any:
            return (graphcap.GRAPHED("run", "hidden -> hidden"),)

        def run(self, hidden: Tensor) -> Tensor:
            return hidden * 2

    with pytest.raises(CutError, match="PartialLayer"):
        graphcap.capture(nn.Sequential(Declared(), nn.Linear(8, 8)), (drawn(0),), backend="tape", break_at="1")
