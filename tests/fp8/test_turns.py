"""The reference where eager code and graphs take turns, and what a capture must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap import StateError
from graphcap.fp8_meta import QuantSpec
from graphcap.fp8_reference import STATE, RefFp8Linear, RefManager, RefRecipe
from tests.flow.twins import assert_same

WIDTH = 16
RECIPE = RefRecipe(history_len=4)
CACHED = QuantSpec(recipe=RECIPE, cache_weights=True)
Side = tuple[RefManager, Any]


def pair(build: Callable[[RefManager], Any]) -> tuple[Side, Side]:
    """Eager's and ours, equal and apart."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        manager = RefManager()
        made.append((manager, build(manager)))
    return made[0], made[1]


def linear(manager: RefManager, **options: Any) -> RefFp8Linear:
    return RefFp8Linear(WIDTH, WIDTH, manager, history_len=4, **options)


def drawn(seed: int, rows: int = 8) -> Tensor:
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return (values * (1 + seed % 3)).requires_grad_()


def same(ours: nn.Module, theirs: nn.Module, where: Any) -> None:
    for name in STATE:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), (where, name)


def same_weights(ours: nn.Module, theirs: nn.Module, where: Any) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad), where
        assert q.grad.abs().max() > 0


def trained(
    manager: RefManager, spec: QuantSpec, call: Callable[..., Tensor], seed: int, **kw: Any
) -> tuple[Tensor, Tensor | None]:
    x = drawn(seed)
    with manager.autocast(spec):
        out = call(x, **kw)
    out.backward(drawn(seed + 1000).detach())
    return out.detach().clone(), x.grad


def moved(*modules: nn.Module) -> None:
    """A step of an optimiser that is easy to read, on each of them."""
    with torch.no_grad():
        for p in (p for module in modules for p in module.parameters()):
            p.sub_(0.05 * p.grad.clamp(-1, 1))  # type: ignore[union-attr]
            p.grad = None


@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("turns", ["gege", "eegg", "ggee", "egeg", "geeg"])
def test_cached_weights_when_eager_and_graph_take_turns(turns: str, kind: Any) -> None:
    """Microbatches of a step that run without graphs (a shape that was not captured) take the cast of those that did, and
    the other way about: the weights of no earlier step, and no second cast."""
    spec = QuantSpec(recipe=RefRecipe(kind=kind, history_len=4), cache_weights=True)
    (manager, eager), (own, layer) = pair(linear)
    run = graphcap.capture(layer, (drawn(0),), backend="tape", quantization=spec)
    for step in range(20):
        for micro, who in enumerate(turns):
            kw = {"is_first_microbatch": micro == 0}
            theirs = trained(manager, spec, eager, 10 * step + micro, **kw)
            with graphcap.disabled() if who == "e" else nullcontext():
                ours = trained(own, spec, run, 10 * step + micro, **kw)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (step, micro)
            same(layer, eager, (step, micro))
        same_weights(layer, eager, step)
        moved(eager, layer)
    assert run.stats.replays == 20 * turns.count("g")


def test_two_captures_of_one_layer_share_its_cast() -> None:
    """Two lengths of a sequence, each with its graphs, in turn within a step."""
    (manager, eager), (own, layer) = pair(linear)
    runs = {rows: graphcap.capture(layer, (drawn(0, rows),), backend="tape", quantization=CACHED) for rows in (8, 12)}
    for step in range(20):
        for micro, rows in enumerate((8, 12, 12, 8) if step % 2 else (12, 8, 12, 8)):
            found = []
            for m, call in ((manager, eager), (own, runs[rows])):
                with m.autocast(CACHED):
                    out = call(drawn(10 * step + micro, rows), is_first_microbatch=micro == 0)
                out.backward(drawn(step + 7, rows).detach())
                found.append(out.detach().clone())
            assert torch.equal(*found), (step, micro)
            same(layer, eager, (step, micro))
        same_weights(layer, eager, step)
        moved(eager, layer)


def test_a_second_first_microbatch_before_the_backward_of_the_first() -> None:
    """A cast is written in place: a backward that is still to come sees the newer one, in eager code and in replays."""
    (manager, eager), (own, layer) = pair(linear)
    run = graphcap.capture((layer,), ((drawn(0),),), order="0F0 0F1 0B0 0B1", backend="tape", quantization=CACHED)
    for step in range(20):
        inputs, outs = [drawn(2 * step + m) for m in range(2)], []
        for x in inputs:
            with manager.autocast(CACHED):
                outs.append(eager(x, is_first_microbatch=True))
        for m, out in enumerate(outs):
            out.backward(drawn(50 + m).detach())
        for m, out in enumerate(outs):
            with own.autocast(CACHED):
                made = run.forward(f"0F{m}", drawn(2 * step + m), is_first_microbatch=True)
            assert torch.equal(made, out), (step, m)
        for m, x in enumerate(inputs):
            (gradient,) = run.backward(f"0B{m}", drawn(50 + m).detach())
            assert torch.equal(gradient, x.grad), (step, m)  # type: ignore[arg-type]
        same(layer, eager, step)
        same_weights(layer, eager, step)
        moved(eager, layer)


class Unused(nn.Module):
    """Holds a layer that this forward does not run."""

    def __init__(self, manager: RefManager) -> None:
        super().__init__()
        self.used, self.other = linear(manager), RefFp8Linear(WIDTH, WIDTH, manager, history_len=16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


@pytest.mark.parametrize("fails", [False, True])
def test_a_layer_that_no_graph_runs_keeps_its_history(fails: bool) -> None:
    """It has been trained under a longer history than the capture's recipe has."""
    manager = RefManager()
    module = Unused(manager)
    long = QuantSpec(recipe=RefRecipe(history_len=16))
    for number in range(10):
        with manager.autocast(long):
            out = module.other(drawn(number))
        out.sum().backward()
    before = {name: (getattr(module.other, name), getattr(module.other, name).clone()) for name in STATE}
    sample = drawn(0) if not fails else torch.randn(8, WIDTH + 1)
    with pytest.raises(graphcap.GraphcapError) if fails else nullcontext():
        graphcap.capture(module, (sample,), backend="tape", quantization=QuantSpec(recipe=RECIPE))
    for name, (tensor, value) in before.items():
        assert getattr(module.other, name) is tensor, name
        assert torch.equal(tensor, value), name
    assert before["hist_fwd"][1][9:].count_nonzero() > 0


class Chain(nn.Module):
    def __init__(self, manager: RefManager, delay: bool) -> None:
        super().__init__()
        self.a, self.b = (linear(manager, bias=True, delay_wgrad=delay) for _ in range(2))

    def forward(self, x: Tensor, **kw: Any) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x, **kw)), **kw)
        return out


def test_delayed_weight_gradients() -> None:
    """I and W steps: W is where `backward_dw()` runs."""
    (manager, eager), (own, layer) = pair(lambda m: Chain(m, True))
    run = graphcap.capture((layer,), ((drawn(0),),), order="0F0 0F1 0I0 0I1 0W0 0W1", backend="tape", quantization=CACHED)
    for step in range(20):
        inputs, outs = [drawn(2 * step + m) for m in range(2)], []
        for m, x in enumerate(inputs):
            kw = {"is_first_microbatch": m == 0}
            with manager.autocast(CACHED):
                outs.append(eager(x, **kw))
        for m, out in enumerate(outs):
            out.backward(drawn(50 + m).detach())
            with own.autocast(CACHED):
                assert torch.equal(run.forward(f"0F{m}", drawn(2 * step + m), is_first_microbatch=m == 0), out)
        assert eager.a.weight.grad is None
        for m, x in enumerate(inputs):
            (gradient,) = run.input_grad(f"0I{m}", drawn(50 + m).detach())
            assert torch.equal(gradient, x.grad), (step, m)  # type: ignore[arg-type]
        assert layer.a.weight.grad is None
        for m in range(2):
            eager.b.backward_dw()
            eager.a.backward_dw()
            run.weight_grad(f"0W{m}")
        same(layer.a, eager.a, step)
        same(layer.b, eager.b, step)
        same_weights(layer, eager, step)
        moved(eager, layer)


def test_a_delay_moves_no_bit() -> None:
    (manager, delayed), _ = pair(lambda m: Chain(m, True))
    (other, plain), _ = pair(lambda m: Chain(m, False))
    for step in range(5):
        sides = ((manager, delayed), (other, plain))
        found = [trained(m, CACHED, module, step, is_first_microbatch=True) for m, module in sides]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), step
        assert delayed.a.weight.grad is None
        delayed.b.backward_dw()
        delayed.a.backward_dw()
        same_weights(delayed, plain, step)
        moved(delayed, plain)
    with pytest.raises(graphcap.StateError, match="no backward has run"):
        delayed.a.backward_dw()


def test_split_backwards_without_delay_are_refused() -> None:
    with pytest.raises(graphcap.OrderError, match="collected and reduced twice"):
        graphcap.capture((linear(RefManager()),), ((drawn(0),),), order="0F0 0I0 0W0", backend="tape", quantization=CACHED)


class Experts(nn.Module):
    """Reads on the host how many rows each gets."""

    def __init__(self, manager: RefManager) -> None:
        super().__init__()
        self.each = nn.ModuleList(linear(manager) for _ in range(2))

    def forward(self, h: Tensor, is_first_microbatch: bool | None) -> Tensor:
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.each):
            rows = ((h[:, 0] > 0) == bool(number)).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_copy(0, rows, expert(h[rows], is_first_microbatch))
        return out


class Routed(nn.Module):
    """An ordinary model, which says nothing of parts."""

    def __init__(self, manager: RefManager, tied: bool) -> None:
        super().__init__()
        self.before = linear(manager)
        self.after = self.before if tied else linear(manager)
        self.experts = Experts(manager)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        h = torch.tanh(self.before(x, is_first_microbatch))
        out = self.experts(h, is_first_microbatch)
        made: Tensor = self.after(torch.tanh(out) + h, is_first_microbatch)
        return made


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("break_at", ["experts", "auto"])
def test_an_automatic_cut(break_at: str, tied: bool) -> None:
    """Experts that the cut leaves to eager code keep their own state. One layer may be run by two graphs."""
    spec = QuantSpec(recipe=RECIPE)
    (manager, eager), (own, model) = pair(lambda m: Routed(m, tied))
    run = graphcap.capture(model, (drawn(0),), break_at=break_at, backend="tape", quantization=spec)
    assert run.plan.breaks
    assert not any(own.is_registered(expert) for expert in model.experts.each)
    for step in range(20):
        for micro in range(2):
            found = []
            for m, call in ((manager, eager), (own, run)):
                x = drawn(2 * step + micro)
                with m.autocast(spec):
                    out = call(x)
                out.backward(drawn(70 + micro).detach())
                found.append((out.detach().clone(), x.grad))
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (step, micro)
            for ours, theirs in zip(own.owners(model), manager.owners(eager), strict=True):
                same(ours, theirs, (step, micro))
        same_weights(model, eager, step)
        moved(eager, model)


def test_an_automatic_cut_with_cached_weights_is_refused() -> None:
    """Eager experts would be told the captured call's word for the microbatch, as a constant."""
    model = Routed(RefManager(), False)
    with pytest.raises(graphcap.PlanError, match="is_first_microbatch of the capture at every call"):
        graphcap.capture(
            model, (drawn(0),), {"is_first_microbatch": True}, break_at="experts", backend="tape", quantization=CACHED
        )


# ------------------------------------------------------------------------------------- regions inside, outputs left aside


class Opening(nn.Module):
    """Opens an autocast region of its own."""

    def __init__(self, manager: RefManager, spec: QuantSpec) -> None:
        super().__init__()
        self.layer, self.spec = RefFp8Linear(8, 8, manager), spec

    def forward(self, x: Tensor) -> Tensor:
        with self.layer.quantized_state.autocast(self.spec):
            out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("outer", [QuantSpec(enabled=False), QuantSpec(recipe=RefRecipe(margin=2))], ids=["none", "other"])
def test_a_region_of_the_captured_code_is_refused(outer: QuantSpec) -> None:
    """A replay does not enter it: its layers would be under another recipe, or nobody would reduce."""
    manager = RefManager()
    module = Opening(manager, QuantSpec(recipe=RefRecipe()))
    x = torch.ones(4, 8, requires_grad=True)
    with pytest.raises(StateError, match="opens itself"):
        graphcap.capture(module, (x,), backend="tape", quantization=outer)
    module(x).sum().backward()
    assert float(module.layer.scale_fwd[0]) == 448


class TwoOutputs(nn.Module):
    def __init__(self, manager: RefManager) -> None:
        super().__init__()
        self.a, self.b = RefFp8Linear(8, 8, manager), RefFp8Linear(8, 8, manager)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_a_backward_that_does_not_reach_the_first_layer_reduces_nothing(used: tuple[int, ...], frozen: bool) -> None:
    """The layer that ran first reduces in its backward; where it is frozen, nobody can tell whether that ran."""
    made = []
    for graphed in (True, False):
        torch.manual_seed(1)
        manager = RefManager()
        module = TwoOutputs(manager)
        module.a.requires_grad_(not frozen)
        spec = QuantSpec(recipe=RefRecipe(history_len=4))
        x = torch.ones(4, 8, requires_grad=True)
        call: Any = graphcap.capture(module, (x,), backend="tape", quantization=spec) if graphed else module
        record: dict[str, Tensor | None] = {}
        for step in range(3):
            for p in module.parameters():
                p.grad = None
            x = (torch.arange(32.0).reshape(4, 8) / 32 + step).requires_grad_()
            with manager.autocast(spec):
                y = call(x)
            loss = sum(y[i].sum() * 0.01 for i in used)
            if graphed and frozen and len(used) == 1:
                with pytest.raises(StateError, match="nothing to train"):
                    loss.backward()
                return
            loss.backward()
            record |= {f"{step} x": x.grad, f"{step} a": module.a.weight.grad, f"{step} b": module.b.weight.grad}
            for name in ("a", "b"):
                record |= {f"{step} {name} {k}": v for k, v in manager.read(getattr(module, name)).items()}
        made.append(record)
    assert_same(*made)
