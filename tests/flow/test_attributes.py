"""Tensor attributes that a graphed part sets (`self.aux_loss = ...`): after a replay they are what eager would have left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap import EAGER, GRAPHED, CaptureConfig, CutError, PartialLayer
from graphcap.partial_layer import Part
from graphcap.testing import deterministic
from tests.flow.twins import assert_same, gradients

WIDTH = 8


class Router(nn.Module):
    """Softmax routing; its load-balancing loss stays behind as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.aux_loss: Any = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        weight, chosen = scores.max(-1)
        self.aux_loss = (scores.mean(0) ** 2).sum() * 4
        return weight, chosen


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            made = made.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return made


class Moe(nn.Module):
    """For the automatic cut, at `experts`."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.router, self.experts = nn.Linear(WIDTH, WIDTH), Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.front(x))
        return h + self.experts(h, *self.router(h))


class DeclaredMoe(PartialLayer):
    inputs = outputs = "x"

    def __init__(self) -> None:
        super().__init__()
        self.front, self.router, self.experts = nn.Linear(WIDTH, WIDTH), Router(), Experts()

    def parts(self) -> tuple[Part, ...]:
        return (
            GRAPHED("route", "x -> h, weight, chosen"),
            EAGER("expert", "h, weight, chosen -> made"),
            GRAPHED("combine", "h, made -> x"),
        )

    def route(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.front(x))
        return (h, *self.router(h))

    def expert(self, h: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        return self.experts(h, weight, chosen)

    def combine(self, h: Tensor, made: Tensor) -> Tensor:
        return h + made


class Whole(nn.Module):
    """One graph: only the router."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.router = nn.Linear(WIDTH, WIDTH), Router()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.front(x))
        weight, _ = self.router(h)
        return h * weight[:, None]


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "automatic": (Moe, {"break_at": "experts"}),
    "declared": (DeclaredMoe, {}),
    "whole": (Whole, {}),
}


def rows(seed: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed + 3)).requires_grad_()


def captured(module: Any, **options: Any) -> graphcap.Graphed:
    return graphcap.capture(module, (rows(0),), backend="tape", **options)


def both(kind: str, **options: Any) -> tuple[Any, graphcap.Graphed]:
    build, more = KINDS[kind]
    torch.manual_seed(1)
    module = build()
    twin = copy.deepcopy(module)
    return twin, captured(module, **more, **options)


@pytest.mark.parametrize("config", [{}, {"outputs": "alias"}, {"grads": "accumulate"}, {"warmup": 1}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_aux_loss(kind: str, config: dict[str, Any]) -> None:
    """The caller adds it to the loss, in two steps of three."""
    with deterministic("cpu"):
        twin, graphed = both(kind, config=CaptureConfig(**config))
        assert graphed.module.router.aux_loss is None, "capture leaves nothing behind"
        sides = [(twin, twin), (graphed, graphed.module)]
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for _, module in sides]
        first = gradients(twin)
        for step in range(20):
            seen: list[Any] = []
            for (call, module), optimizer in zip(sides, optimizers, strict=True):
                x = rows(step)
                optimizer.zero_grad(set_to_none=True)
                loss = call(x).square().mean()
                aux = call.router.aux_loss
                assert aux.requires_grad and bool(aux.isfinite())
                (loss + 0.3 * aux if step % 3 else loss).backward()
                seen.append((loss.detach().clone(), aux.detach().clone(), x.grad, gradients(module)))
                optimizer.step()
            for mine, other in zip(seen[1][:3], seen[0][:3], strict=True):
                assert torch.equal(mine, other)
            assert_same(seen[1][3], seen[0][3])
        assert graphed.stats.replays == 20
        assert not graphed.stats.eager
        assert_same(dict(graphed.module.named_parameters()), dict(twin.named_parameters()))
        assert all(value is None for value in first.values())


@pytest.mark.parametrize("kind", [DeclaredMoe, Whole])
def test_several_microbatches_in_flight(kind: Callable[[], nn.Module]) -> None:
    """The drop-in under an order: three forwards, each with its own loss, before their backwards."""
    torch.manual_seed(1)
    module = kind()
    twin = copy.deepcopy(module)
    with deterministic("cpu"):
        calls = graphcap.make_graphed_callables(
            (module,), tuple((rows(0),) for _ in range(3)), _order=[1, 1, 1, -1, -1, -1], backend="tape"
        )
        for step in range(20):
            sides = ((calls, module), ((twin,) * 3, twin))
            seen = []
            for forwards, owner in sides:
                owner.zero_grad(set_to_none=True)
                xs = [rows(step * 3 + number) for number in range(3)]
                losses = []
                for call, x in zip(forwards, xs, strict=True):
                    out = call(x)
                    losses.append(out.square().mean() + 0.1 * owner.router.aux_loss)
                values = [loss.detach().clone() for loss in losses]
                for loss in losses:
                    loss.backward()
                seen.append((values, [x.grad for x in xs], gradients(owner)))
                with torch.no_grad():
                    for parameter in owner.parameters():
                        parameter -= 0.05 * (0 if parameter.grad is None else parameter.grad)
            for mine, other in zip([*seen[0][0], *seen[0][1]], [*seen[1][0], *seen[1][1]], strict=True):
                assert torch.equal(mine, other)
            assert_same(seen[0][2], seen[1][2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_without_backward_is_let_go(kind: str) -> None:
    """The attribute alone would keep the last forward in flight."""
    twin, graphed = both(kind)
    for step in range(3):
        x = rows(step)
        assert torch.equal(graphed(x), twin(x))
        assert torch.equal(graphed.router.aux_loss, twin.router.aux_loss)
        assert graphed.router.aux_loss.requires_grad
    kept = graphed.router.aux_loss
    with pytest.raises(graphcap.errors.InFlightError):
        graphed(rows(9))
    assert graphed.router.aux_loss is kept, "somebody else holds it: nothing has changed"
    kept.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_modes(kind: str) -> None:
    twin, graphed = both(kind)
    with torch.no_grad():
        x = rows(1)
        assert torch.equal(graphed(x), twin(x))
        assert not graphed.router.aux_loss.requires_grad
        assert torch.equal(graphed.router.aux_loss, twin.router.aux_loss)
    before = graphed.router.aux_loss.clone()
    held = graphed.router.aux_loss
    graphed(rows(2)).sum().backward()
    assert torch.equal(held, before), "an attribute that was kept is the caller's own"
    with graphcap.disabled():
        x = rows(3)
        assert torch.equal(graphed(x), twin(x))
        assert torch.equal(graphed.router.aux_loss, twin.router.aux_loss)
    x = rows(4)
    assert torch.equal(graphed(x), twin(x))
    assert torch.equal(graphed.router.aux_loss, twin.router.aux_loss)


# ----------------------------------------------------------------------------------------------------- kinds of attributes


class Setting(PartialLayer):
    """`first` runs in the first graphed part, `eager` in the EAGER one, `last` in the last."""

    inputs = outputs = "x"

    def __init__(self, first: Any = None, eager: Any = None, last: Any = None) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.ones(WIDTH))
        self._first, self._eager, self._last = first, eager, last
        self.aux: Any = None

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("a", "x -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e -> x")

    def a(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.front(x))
        return h if self._first is None else h + self._given(self._first, h, x)

    def b(self, h: Tensor) -> Tensor:
        e = h * h.detach().abs().max().item()
        return e if self._eager is None else e + self._given(self._eager, e, e)

    def c(self, e: Tensor) -> Tensor:
        y = self.back(e)
        return y if self._last is None else y + self._given(self._last, y, e)

    def _given(self, function: Any, made: Tensor, given: Tensor) -> Any:
        value = function(self, made, given)
        return 0.0 if value is None else value


class _Break(nn.Module):
    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = (owner,)

    def forward(self, h: Tensor) -> Tensor:
        made: Tensor = self.owner[0].b(h)
        return made


def cut(**functions: Any) -> nn.Module:
    """The same for the automatic cut: an ordinary module with a break."""
    inner = Setting(**functions)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.back, self.brk, self.aux = inner.front, inner.back, _Break(self), None
            self.register_buffer("state", torch.ones(WIDTH))
            self._first, self._eager, self._last = inner._first, inner._eager, inner._last

        a, b, c, _given = Setting.a, Setting.b, Setting.c, Setting._given

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.brk(self.a(x)))

    return Plain()


def sets(value: Callable[[Any, Tensor, Tensor], Any], name: str = "aux") -> Callable[[Any, Tensor, Tensor], None]:
    def setting(module: Any, made: Tensor, given: Tensor) -> None:
        setattr(module, name, value(module, made, given))

    return setting


def _both_parts(m: Any, made: Tensor, given: Tensor) -> None:
    m.aux = made.mean()


def _delete(m: Any, made: Tensor, given: Tensor) -> None:
    if "aux" in vars(m):
        del m.aux


SET: dict[str, dict[str, Any]] = {
    "in the first part": {"first": sets(lambda m, h, x: h.mean())},
    "in the last part": {"last": sets(lambda m, h, x: h.mean())},
    "in both": {"first": _both_parts, "last": _both_parts},
    "two attributes": {"first": sets(lambda m, h, x: h.mean(), "one"), "last": sets(lambda m, h, x: h.sum() * 0.1)},
    "detached": {"first": sets(lambda m, h, x: h.detach())},
    "an argument": {"first": sets(lambda m, h, x: x)},
    "the output itself": {"last": sets(lambda m, h, x: h)},
    "a value that crosses": {"last": sets(lambda m, h, x: x)},
    "a buffer": {"first": sets(lambda m, h, x: None), "last": sets(lambda m, h, x: m.state)},
    "None in the end": {"first": sets(lambda m, h, x: h.mean()), "last": sets(lambda m, h, x: None)},
    "deleted in the end": {"first": sets(lambda m, h, x: h.mean()), "last": _delete},
    "in the EAGER part": {"eager": sets(lambda m, h, x: h.mean())},
    "read again in its part": {"first": lambda m, h, x: setattr(m, "aux", h * 2) or m.aux.mean()},
    "detached and read in a later part": {
        "first": sets(lambda m, h, x: h.detach() * 2),
        "last": lambda m, y, e: m.aux.mean(),
    },
}


HOW: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "declared": (Setting, {}),
    "declared, one warm-up run": (Setting, {"config": CaptureConfig(warmup=1)}),
    "automatic": (cut, {"break_at": "brk"}),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", SET)
def test_equal(case: str, how: str) -> None:
    build, options = HOW[how]
    torch.manual_seed(1)
    module = build(**SET[case])
    twin = copy.deepcopy(module)
    with deterministic("cpu"):
        graphed = captured(module, **options)
        assert module.aux is None and "one" not in vars(module)
        for step in range(20):
            seen = []
            for call, owner in ((graphed, module), (twin, twin)):
                owner.zero_grad(set_to_none=True)
                x = rows(step)
                loss = call(x).square().mean()
                held = {name: vars(owner)[name] for name in ("aux", "one") if name in vars(owner)}
                for value in held.values():
                    if isinstance(value, Tensor) and value.requires_grad:
                        loss = loss + value.square().mean()
                loss.backward()
                values = {name: None if v is None else v.detach().clone() for name, v in held.items()}
                seen.append((loss.detach(), x.grad, values, gradients(owner)))
                if isinstance(held.get("aux"), Tensor) and case == "a buffer":
                    assert held["aux"] is owner.state
                with torch.no_grad():
                    for parameter in owner.parameters():
                        parameter -= 0.01 * parameter.grad
            assert torch.equal(seen[0][0], seen[1][0])
            assert torch.equal(seen[0][1], seen[1][1])
            assert seen[0][2].keys() == seen[1][2].keys()
            for name, value in seen[1][2].items():
                assert (value is None and seen[0][2][name] is None) or torch.equal(value, seen[0][2][name])
            assert_same(seen[0][3], seen[1][3])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "the value of the last call": (
        {"first": lambda m, h, x: [0.0 if m.aux is None else m.aux.mean(), setattr(m, "aux", h.detach())][0]},
        "the call before this one",
    ),
    "read with gradient in a later part": (
        {"first": sets(lambda m, h, x: h * 2), "last": lambda m, y, e: m.aux.mean()},
        "gradient would be lost|not through its signature",
    ),
    "read in the EAGER part": (
        {"first": sets(lambda m, h, x: h * 2), "eager": lambda m, h, x: m.aux.mean()},
        "EAGER part .* reads Setting.aux",
    ),
    "set in a graphed and in an EAGER part": (
        {"first": sets(lambda m, h, x: h.mean()), "eager": sets(lambda m, h, x: h.mean())},
        "graphed part and in an EAGER part",
    ),
    "a buffer bound anew": (
        {"first": lambda m, h, x: setattr(m, "state", h.detach().mean(0))},
        "changes the attribute Setting.state",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    parts, words = REFUSED[case]
    torch.manual_seed(1)
    module = Setting(**parts)
    with pytest.raises(CutError, match=words):
        captured(module)
    assert module.aux is None


CUT_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "the value of the last call": (REFUSED["the value of the last call"][0], "unknown origin"),
    "the value of the last call, handed to a break": (
        {"first": lambda m, h, x: [setattr(m, "old", m.aux), setattr(m, "aux", h.detach())][0]},
        "as the call before left it|saw nobody make|unknown origin",
    ),
    "read in the break": (REFUSED["read in the EAGER part"][0], "not its argument"),
    "set in a stretch and in the break": (
        {"first": sets(lambda m, h, x: h.mean()), "eager": sets(lambda m, h, x: None)},
        "in the break",
    ),
    "a tensor of a stretch in a list": (
        {"first": lambda m, h, x: setattr(m, "several", [h.mean()])},
        "kept by something|every call",
    ),
}


@pytest.mark.parametrize("case", CUT_REFUSED)
def test_refused_by_the_automatic_cut(case: str) -> None:
    parts, words = CUT_REFUSED[case]
    torch.manual_seed(1)
    module: Any = cut(**parts)
    with pytest.raises(CutError, match=words):
        captured(module, break_at="brk")
    assert module.aux is None


def test_read_with_gradient_in_a_later_stretch() -> None:
    """Where the forward is followed as a whole, the attribute is a value like any other."""
    torch.manual_seed(1)
    module: Any = cut(**REFUSED["read with gradient in a later part"][0])
    twin = copy.deepcopy(module)
    with deterministic("cpu"):
        graphed = captured(module, break_at="brk")
        for step in range(20):
            found = []
            for call, owner in ((graphed, module), (twin, twin)):
                owner.zero_grad(set_to_none=True)
                x = rows(step)
                (call(x).square().mean() + owner.aux.square().mean()).backward()
                found.append((x.grad, gradients(owner)))
                with torch.no_grad():
                    for parameter in owner.parameters():
                        parameter -= 0.01 * parameter.grad
            assert torch.equal(found[0][0], found[1][0])
            assert_same(found[0][1], found[1][1])


def test_nothing_of_the_recording_is_kept() -> None:
    """An attribute set while recording would hold its autograd graph, and with it all that the forward saved."""
    for kind in KINDS:
        _, graphed = both(kind)
        kept = [t for t in graphed._runner.capture.kept if isinstance(t, Tensor)]
        assert all(t.grad_fn is None for t in kept)
        assert graphed.module.router.aux_loss is None
