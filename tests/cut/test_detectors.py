"""Each detector has a planted fault that it finds, and that goes by unseen, and wrong, without it.

Where another detector looks at the same fault, the test says which, and takes that one away as well.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import graphcap
from graphcap import CutError, ForbiddenOpError, _capture, _guards, _torch_private, _trace_plan
from graphcap._crossings import Crossings
from graphcap._trace_follow import _Follower
from graphcap._trace_owners import Owners
from graphcap._warmup_pass import _Shape
from graphcap.backends.scopes import is_capturing
from graphcap.backends.tape_record import Recorder
from tests.cut.cases import WIDTH, Base, Break, drawn
from tests.flow.small import Routed

HELD: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _nothing_held() -> Iterator[None]:
    HELD.clear()
    yield
    HELD.clear()


def off(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> None:
    """Switch a detector off: its functions do nothing."""
    for name in names:
        monkeypatch.setattr(owner, name, lambda *a, **k: None)


def captured(module: nn.Module, **options: Any) -> graphcap.Graphed:
    return graphcap.capture(module, (drawn(0),), backend="tape", **options)


def is_wrong(module: nn.Module, **options: Any) -> bool:
    """Whether the graphed module, which nobody refused, differs from its twin within three steps: output or gradients."""
    twin = copy.deepcopy(module)
    graphed = captured(module, **options)
    for index in range(1, 4):
        sides = []
        for side, owner in ((graphed, module), (twin, twin)):
            torch.manual_seed(index)
            owner.zero_grad()
            x = drawn(index)
            if "leaf" in HELD:
                HELD["leaf"] = HELD["leaf"].detach().requires_grad_()
            value = side(x)
            value.square().mean().backward()
            leaf = HELD["leaf"].grad if "leaf" in HELD else None
            sides.append([value.detach(), x.grad, leaf, *(p.grad for p in owner.parameters())])
        for ours, theirs in zip(*sides, strict=True):
            if (ours is None) != (theirs is None) or (ours is not None and not torch.equal(ours, theirs)):
                return True
    return False


# --------------------------------------------------------------------------------------------- D1 and D2, declared parts


class Sideways(Routed):
    """The eager part leaves a tensor for the graphed part behind it, past the signature."""

    detached = False

    def experts(self, tokens: Tensor) -> Tensor:
        made = super().experts(tokens)
        HELD["made"] = (made.detach() if self.detached else made) * 2
        return made

    def combine(self, routed: Tensor, residual: Tensor) -> Tensor:
        return super().combine(routed, residual) + HELD["made"]


class SidewaysDetached(Sideways):
    detached = True


def test_d2_alone_sees_a_crossing_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CutError, match="not through its signature"):
        captured(SidewaysDetached())
    off(monkeypatch, Crossings, "_check")
    assert is_wrong(SidewaysDetached())


def test_d1_and_d2_both_see_a_crossing_with_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        off(patch, Crossings, "_check")
        with pytest.raises(CutError, match="its gradient would be lost"):
            captured(Sideways())
    with monkeypatch.context() as patch:
        off(patch, _Shape, "_refuse_lost")
        with pytest.raises(CutError, match="not through its signature"):
            captured(Sideways())
    off(monkeypatch, Crossings, "_check")
    off(monkeypatch, _Shape, "_refuse_lost")
    assert is_wrong(Sideways())


class Foreign(Routed):
    """A leaf that no part made, and that is no parameter."""

    def combine(self, routed: Tensor, residual: Tensor) -> Tensor:
        return super().combine(routed, residual) * HELD["leaf"]


def test_d1_alone_sees_a_foreign_leaf_in_declared_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    HELD["leaf"] = torch.full((WIDTH,), 0.5, requires_grad=True)
    with pytest.raises(CutError, match="its gradient would be lost"):
        captured(Foreign())
    off(monkeypatch, _Shape, "_refuse_lost")
    assert is_wrong(Foreign())


# ------------------------------------------------------------------------------------------------------- D2, traced parts


class Stale(Base):
    """A stretch reads a tensor of unknown origin, which is another one at each step."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.brk(self.a(x))
        return self.b(y) * _step_tensor()


def _step_tensor() -> Tensor:
    HELD["step"] = HELD.get("step", 0)
    made: Tensor = HELD.setdefault(("table", HELD["step"]), torch.full((WIDTH,), 1.0 + HELD["step"]))
    return made


def test_d2_sees_a_tensor_of_unknown_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stale()
    _step_tensor()  # it is there before the capture
    with pytest.raises(CutError, match="unknown origin"):
        captured(module, break_at="*brk*")
    off(monkeypatch, Owners, "refuse_read")
    graphed = captured(module, break_at="*brk*")
    x = drawn(1)
    assert torch.equal(graphed(x), module(x))
    HELD["step"] = 1
    assert not torch.equal(graphed(x), module(x))


class SideChannel(Break):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return super().forward(x) + HELD["h"]


class ReadsPast(Base):
    """The break reads a tensor of the stretch that is not its argument: there is none such at replay."""

    def __init__(self) -> None:
        super().__init__()
        self.brk = SideChannel()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            HELD["h"] = self.a(x) * 1
        return self.b(self.brk(self.c(x)))


def test_d2_sees_what_a_break_reads_past_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CutError, match="not its argument"):
        captured(ReadsPast(), break_at="*brk*")
    off(monkeypatch, Owners, "refuse_read")
    HELD.clear()
    with pytest.raises(CutError, match="kept by something that outlives"):  # the escape is seen as well
        captured(ReadsPast(), break_at="*brk*")
    off(monkeypatch, _trace_plan, "_refuse_escapes")
    assert is_wrong(ReadsPast(), break_at="*brk*")


# ------------------------------------------------------------------------------------------------------------ host state


class Scaled(Routed):
    """A number that Python changes at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def combine(self, routed: Tensor, residual: Tensor) -> Tensor:
        self.calls += 1
        return super().combine(routed, residual) * (1 + self.calls % 2)


def test_the_comparison_of_host_state_sees_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CutError, match=r"changes the attribute Scaled\.calls"):
        captured(Scaled())
    off(monkeypatch, _guards, "refuse_host_effects")
    assert is_wrong(Scaled())


class Counted(Base):
    """The same in a stretch: there the sequence of calls shows the number, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.brk(self.a(x)) * (1 + self.calls % 2))


def test_the_sequence_of_calls_sees_a_counter_that_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    off(monkeypatch, _guards, "refuse_host_effects")
    with pytest.raises(CutError, match="other torch calls"):
        captured(Counted(), break_at="*brk*")
    off(monkeypatch, _trace_plan, "_refuse_difference")
    with pytest.raises(CutError, match="other torch calls"):  # the later runs are compared as well
        captured(Counted(), break_at="*brk*")
    off(monkeypatch, _Follower, "noted", "returned")
    assert is_wrong(Counted(), break_at="*brk*")


# --------------------------------------------------------------------------------------------------------------- escapes


class Escapes(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        HELD["h"] = h
        return self.b(self.brk(h))


def test_the_search_for_escaped_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CutError, match="kept by something that outlives"):
        captured(Escapes(), break_at="*brk*")
    off(monkeypatch, _trace_plan, "_refuse_escapes")
    module = Escapes()
    graphed = captured(module, break_at="*brk*")
    HELD.clear()
    graphed(drawn(1))
    assert "h" not in HELD  # the log that eager writes is not written
    module(drawn(1))
    assert "h" in HELD


# ---------------------------------------------------------------------------------------------- random numbers in backward


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(lambda t: F.dropout(torch.sin(self.linear(t)), 0.5), x, use_reentrant=False)
        return torch.tanh(made + F.dropout(x, 0.5))


def test_random_numbers_in_a_recorded_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((CutError, ForbiddenOpError), match="random"):
        captured(Dropping())
    with monkeypatch.context() as patch:
        off(patch, Recorder, "_refuse_set_seed")  # only the tape has this one: CUDA raises at the seed by itself
        with pytest.raises(CutError, match="its backward draws random numbers"):
            captured(Dropping())
    off(monkeypatch, Recorder, "_refuse_set_seed")
    monkeypatch.setattr(_capture, "NoRandom", lambda part: contextlib.nullcontext())
    assert is_wrong(Dropping())


# ----------------------------------------------------------------------------------------------------- saved-tensor hooks


class Packed(Base):
    """What autograd saves goes through bfloat16: in the break, too, as long as Python runs it in there."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            y = torch.tanh(self.brk(torch.sin(x)) * self.a.bias)
        return self.b(y)


class PackingBreak(Break):
    """Nothing but floating point is saved."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return torch.sin(x) * torch.tanh(self.linear.bias)


def packed() -> nn.Module:
    module = Packed()
    module.brk = PackingBreak()
    return module


def test_saved_tensor_hooks_around_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CutError, match="saved-tensor hooks are active"):
        captured(packed(), break_at="brk")
    monkeypatch.setattr(_torch_private, "saves_through_hooks", lambda: False)
    assert is_wrong(packed(), break_at="brk")


# ------------------------------------------------------------------------------- "am I captured?", and the sequence of calls


class Asking(Base):
    """Takes another branch while it is captured; both are as long."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.brk(self.a(x))
        return self.b(h.cos() if torch.cuda.is_current_stream_capturing() else h.sin())


def test_the_answer_to_models_that_ask_and_the_sequence_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)  # the tape answers as a GPU would
    assert not is_wrong(Asking(), break_at="brk")
    monkeypatch.setattr(_torch_private, "not_capturing_for_users", lambda thread: contextlib.nullcontext())
    with pytest.raises(CutError, match=r"(?s)other torch calls.*cos"):
        captured(Asking(), break_at="brk")
    off(monkeypatch, _Follower, "noted", "returned")
    assert is_wrong(Asking(), break_at="brk")
