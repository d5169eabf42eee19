"""What every implementation of `graphcap.fp8_meta.QuantizedState` keeps: T1 to T14 of the FP8 study, by value.

Anchors: with an input of 2, a gradient of 0.5 and a history whose most recent amax counts, the forward scale of the input
is 448 / 2 = 224 and the backward scale 57344 / 0.5 = 114688. A subclass gives the fixture `impl`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

import graphcap
from graphcap import InputMismatch, StateError
from graphcap.fp8_meta import QuantizedState, QuantSpec
from graphcap.order import Order
from graphcap.partial_layer import EAGER, GRAPHED, Part, PartialLayer

WIDTH, ROWS = 64, 32


class Implementation(Protocol):
    """What a subclass brings."""

    backend: str
    device: str
    dtype: torch.dtype
    state: QuantizedState

    def recipe(self, **fields: Any) -> Any:
        """A delayed-scaling recipe with these fields of RefRecipe (history_len, algo, margin, reduce_amax, forward)."""

    def linear(self, bias: bool = False) -> nn.Module:
        """A quantised layer from WIDTH to WIDTH."""

    def reset(self) -> None:
        """Forget every registration."""


def spec_of(impl: Implementation, **fields: Any) -> QuantSpec:
    own = {name: fields.pop(name) for name in ("group", "cache_weights", "enabled") if name in fields}
    return QuantSpec(recipe=impl.recipe(**{"history_len": 4, "algo": "most_recent", **fields}), **own)


def rows(impl: Implementation, value: float | None = None, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(ROWS, WIDTH, generator=generator) if value is None else torch.full((ROWS, WIDTH), value)
    return made.to(impl.device, impl.dtype).requires_grad_()


def region(impl: Implementation, spec: QuantSpec) -> AbstractContextManager[None]:
    return impl.state.autocast(spec)


def step(
    impl: Implementation, spec: QuantSpec, call: Callable[..., Tensor], value: float = 2.0, gradient: float = 0.5, **kw: Any
) -> Tensor:
    with region(impl, spec):
        out = call(rows(impl, value), **kw)
    out.backward(torch.full_like(out, gradient))
    return out.detach().clone()


def graphed(impl: Implementation, module: Any, spec: QuantSpec, **options: Any) -> graphcap.Graphed:
    return graphcap.capture(module, (rows(impl, 1.0),), backend=impl.backend, quantization=spec, **options)


def forward_scale(impl: Implementation, owner: nn.Module) -> float:
    return float(impl.state.read(owner)["scale_fwd"][0])


def backward_scale(impl: Implementation, owner: nn.Module) -> float:
    return float(impl.state.read(owner)["scale_bwd"][0])


def same_state(impl: Implementation, ours: nn.Module, theirs: nn.Module, where: str = "") -> None:
    a, b = impl.state.read(ours), impl.state.read(theirs)
    for name in ("scale_fwd", "hist_fwd", "scale_bwd", "hist_bwd"):
        assert torch.equal(a[name], b[name]), f"{where}: {name} is {a[name]}, eager's {b[name]}"


class Beside(PartialLayer):
    """A in a graph, B eager, in one region."""

    inputs, outputs = "x", "y"

    def __init__(self, impl: Implementation) -> None:
        super().__init__()
        self.a, self.b = impl.linear(), impl.linear()

    def parts(self) -> tuple[Part, ...]:
        return GRAPHED("first", "x -> h"), EAGER("second", "h -> y", reason="to be the eager one")

    def first(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out

    def second(self, h: Tensor) -> Tensor:
        out: Tensor = self.b(torch.full_like(h, 2.0) + 0.0 * h)
        return out


class Nested(nn.Module):
    """A layer inside a container of the container's own class."""

    def __init__(self, impl: Implementation) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(impl.linear()), impl.linear())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Direct(nn.Module):
    """Calls `forward` of its layer, so that no hook of nn.Module sees it."""

    def __init__(self, impl: Implementation) -> None:
        super().__init__()
        self.layer = impl.linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer.forward(x)
        return out


class Deep(nn.Module):
    def __init__(self, impl: Implementation, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(impl.linear() for _ in range(layers))

    def forward(self, x: Tensor, **kw: Any) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, **kw))
        return x


class Failing(nn.Module):
    """Fails at a chosen run: warm-up makes them before recording does."""

    def __init__(self, impl: Implementation, fail_at: int, backward: bool) -> None:
        super().__init__()
        self.layer, self.fail_at, self.backward = impl.linear(), fail_at, backward
        self.runs = [0]  # in a closure-like place: attributes of the module are put back

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return _fails(out, self) if self.backward else self._count(out)

    def _count(self, out: Tensor) -> Tensor:
        COUNT["runs"] += 1
        if COUNT["runs"] == self.fail_at:
            raise RuntimeError("planted failure")
        return out


COUNT = {"runs": 0}


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail_at: int) -> Tensor:
        ctx.fail_at = fail_at
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        COUNT["runs"] += 1
        if COUNT["runs"] == ctx.fail_at:
            raise RuntimeError("planted failure")
        return gradient * 1, None


def _fails(x: Tensor, module: Failing) -> Tensor:
    out: Tensor = _Fails.apply(x, module.fail_at)  # type: ignore[no-untyped-call]
    return out


class QuantizedConformance:
    """Rules by value. Every test makes its layers anew."""

    @pytest.fixture(autouse=True)
    def _fresh(self, impl: Implementation) -> Any:
        torch.manual_seed(0)
        impl.reset()
        COUNT["runs"] = 0
        yield
        gc.collect()

    def test_t1_scales_after_one_step(self, impl: Implementation) -> None:
        spec = spec_of(impl)
        eager, layer = impl.linear(), impl.linear()
        layer.load_state_dict(eager.state_dict())
        run = graphed(impl, layer, spec)
        outs = [step(impl, spec, call) for call in (eager, run)]
        assert torch.equal(*outs)
        for owner in (eager, layer):
            assert forward_scale(impl, owner) == 224.0
            assert backward_scale(impl, owner) == 114688.0
        same_state(impl, layer, eager)
        assert torch.equal(layer.weight.grad, eager.weight.grad)

    def test_t2_warm_up_leaves_nothing_in_the_history(self, impl: Implementation) -> None:
        spec = spec_of(impl, algo="max")
        layer = impl.linear()
        before = impl.state.read(layer) if impl.state.is_registered(layer) else None
        run = graphcap.capture(layer, (rows(impl, 100.0),), backend=impl.backend, quantization=spec)
        assert before is None
        assert float(impl.state.read(layer)["hist_fwd"].abs().max()) == 0.0
        step(impl, spec, run)
        assert forward_scale(impl, layer) == 224.0

    @pytest.mark.parametrize("orders", [None, "0F0 0F1 0B0 0B1"])
    def test_t3_cached_weights_over_microbatches(self, impl: Implementation, orders: str | None) -> None:
        """Two microbatches a step, three steps and more, weights changing: bit for bit, and one row of history a step."""
        spec = spec_of(impl, cache_weights=True, algo="max")
        eager, layer = Deep(impl), Deep(impl)
        layer.load_state_dict(eager.state_dict())
        samples = (rows(impl, 1.0),) if orders is None else ((rows(impl, 1.0),),)
        run = graphcap.capture(layer, samples, backend=impl.backend, quantization=spec, order=orders)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, layer)]
        for number in range(20):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            if orders is None:
                for micro in range(2):
                    self._one(impl, spec, eager, run, number * 2 + micro, first=micro == 0)
            else:
                self._two_in_flight(impl, spec, eager, run, number)
            for ours, theirs in zip(layer.parameters(), eager.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad), f"step {number}"
                assert ours.grad.abs().max() > 0
            for ours, theirs in zip(layer.layers, eager.layers, strict=True):
                same_state(impl, ours, theirs, f"step {number}")
            for optimizer in optimizers:
                optimizer.step()
        history = impl.state.read(layer.layers[0])["hist_fwd"]
        assert (history[1:, 1] != 0).all()

    def _one(self, impl: Implementation, spec: QuantSpec, eager: Any, run: Any, seed: int, first: bool) -> None:
        results = []
        for call in (eager, run):
            x = rows(impl, None, seed)
            with region(impl, spec):
                out = call(x, is_first_microbatch=first)
            out.backward(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(out))
            results.append((out.detach().clone(), x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert torch.isfinite(results[0][0]).all()

    def _two_in_flight(self, impl: Implementation, spec: QuantSpec, eager: Any, run: Any, number: int) -> None:
        gradients = [
            torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number + m)).to(impl.device, impl.dtype)
            for m in range(2)
        ]
        outs = []
        for micro in range(2):
            with region(impl, spec):
                outs.append(eager(rows(impl, None, number * 2 + micro), is_first_microbatch=micro == 0))
        for micro in range(2):
            outs[micro].backward(gradients[micro])
        made = []
        for micro in range(2):
            with region(impl, spec):
                made.append(
                    run.forward(f"0F{micro}", rows(impl, None, number * 2 + micro), is_first_microbatch=micro == 0).clone()
                )
        for micro in range(2):
            run.backward(f"0B{micro}", gradients[micro])
        assert all(torch.equal(a, b) for a, b in zip(outs, made, strict=True))

    def test_t4_one_set_caches_another_does_not(self, impl: Implementation) -> None:
        """A flag of one capture is not read by another's graphs."""
        caching, plain, eager = impl.linear(), impl.linear(), impl.linear()
        plain.load_state_dict(eager.state_dict())
        a = graphed(impl, caching, cached := spec_of(impl, cache_weights=True))
        b = graphed(impl, plain, spec := spec_of(impl))
        seen = []
        for number in range(4):
            step(impl, cached, a, is_first_microbatch=True)
            step(impl, cached, a, is_first_microbatch=False)  # a's flag says: leave the weights
            seen.append(step(impl, spec, b))
            assert torch.equal(seen[-1], step(impl, spec, eager)), f"step {number}"
            for module in (plain, eager):
                with torch.no_grad():
                    module.weight.mul_(2)
        assert not torch.equal(seen[0], seen[-1])

    def test_t5_eager_first_then_graph(self, impl: Implementation) -> None:
        spec = spec_of(impl, cache_weights=True)
        eager, layer = impl.linear(), impl.linear()
        layer.load_state_dict(eager.state_dict())
        for module in (eager, layer):
            step(impl, spec, module, is_first_microbatch=True)
        run = graphed(impl, layer, spec)
        for module in (eager, layer):
            with torch.no_grad():
                module.weight.mul_(2)
        for first in (True, False, False):
            ours = step(impl, spec, run, is_first_microbatch=first)
            theirs = step(impl, spec, eager, is_first_microbatch=first)
            assert torch.equal(ours, theirs)
            same_state(impl, layer, eager)

    def test_t6_a_graph_beside_an_eager_part(self, impl: Implementation) -> None:
        spec = spec_of(impl)
        eager, layer = Beside(impl), Beside(impl)
        layer.load_state_dict(eager.state_dict())
        run = graphed(impl, layer, spec)
        assert not impl.state.is_registered(layer.b)
        for number in range(3):
            outs = [step(impl, spec, call) for call in (eager, run)]
            assert torch.equal(*outs), f"step {number}"
            for ours, theirs in ((layer.a, eager.a), (layer.b, eager.b)):
                same_state(impl, ours, theirs, f"step {number}")
        assert forward_scale(impl, layer.a) == forward_scale(impl, layer.b) == 224.0
        assert impl.state.is_registered(layer.a)
        assert impl.state.is_registered(layer.b)

    @pytest.mark.parametrize(("fail_at", "backward"), [(2, False), (4, False), (2, True), (4, True)])
    def test_t7_a_failed_capture_leaves_nothing(self, impl: Implementation, fail_at: int, backward: bool) -> None:
        """In the second warm-up run and in recording, forward and backward: state as before, and eager goes on right."""
        spec = spec_of(impl)
        other = impl.linear()
        step(impl, spec, other)
        module = Failing(impl, fail_at, backward)
        step(impl, spec, module.layer)
        before = [impl.state.read(owner) for owner in (other, module.layer)]
        COUNT["runs"] = 0
        with pytest.raises(graphcap.GraphcapError, match="planted failure"):
            graphed(impl, module, spec)
        for owner, was in zip((other, module.layer), before, strict=True):
            now = impl.state.read(owner)
            assert now.keys() == was.keys()
            for name in was:
                assert torch.equal(now[name].float(), was[name].float()), name
        twin = deepcopy(module.layer)
        COUNT["runs"] = 100
        for owner in (module.layer, twin):
            step(impl, spec, owner, 4.0, 0.25)
            assert forward_scale(impl, owner) == 112.0
            assert backward_scale(impl, owner) == 229376.0
        step(impl, spec, graphed(impl, module.layer, spec))
        assert forward_scale(impl, module.layer) == 224.0

    def test_t8_a_graph_without_backward_claims_nothing(self, impl: Implementation) -> None:
        spec = spec_of(impl)
        frozen, trained = impl.linear().eval().requires_grad_(False), impl.linear()
        with torch.no_grad():
            run = graphcap.capture(frozen, (rows(impl, 1.0).detach(),), backend=impl.backend, quantization=spec)
        with region(impl, spec):
            with torch.no_grad():
                hidden = run(rows(impl, 2.0).detach())
            out = trained(hidden)
        out.backward(torch.full_like(out, 0.5))
        assert backward_scale(impl, trained) == 114688.0

    def test_t9_another_history_length_is_refused(self, impl: Implementation) -> None:
        spec = spec_of(impl)
        layer = impl.linear()
        run = graphed(impl, layer, spec)
        step(impl, spec, run)
        longer = spec_of(impl, history_len=16)
        with pytest.raises((InputMismatch, StateError), match=r"history|memory"):
            step(impl, longer, run)
        impl.reset()  # what takes part in TE's reduction can't change its length, graphs or not
        step(impl, longer, layer)  # eager: new histories, which the graph does not know
        with pytest.raises((InputMismatch, StateError), match=r"history|memory"):
            step(impl, spec, run)

    def test_t11_the_first_replay_casts_whatever_it_is_told(self, impl: Implementation) -> None:
        spec = spec_of(impl, cache_weights=True)
        eager, layer = impl.linear(), impl.linear()
        layer.load_state_dict(eager.state_dict())
        run = graphed(impl, layer, spec)
        for module in (eager, layer):
            with torch.no_grad():
                module.weight.mul_(2)
        ours = step(impl, spec, run, is_first_microbatch=False)
        theirs = step(impl, spec, eager, is_first_microbatch=False)  # eager has nothing cached, and casts
        assert torch.equal(ours, theirs)
        same_state(impl, layer, eager)

    def test_t12_nested_containers_of_one_class(self, impl: Implementation) -> None:
        spec = spec_of(impl)
        eager, layer = Nested(impl), Nested(impl)
        layer.load_state_dict(eager.state_dict())
        run = graphed(impl, layer, spec)
        for _ in range(3):
            assert torch.equal(*[step(impl, spec, call) for call in (eager, run)])
        same_state(impl, layer.inner[0][0], eager.inner[0][0])
        assert forward_scale(impl, layer.inner[0][0]) == 224.0

    def test_t13_a_replay_outside_of_the_region(self, impl: Implementation) -> None:
        spec = spec_of(impl)
        layer = impl.linear()
        run = graphed(impl, layer, spec)
        with pytest.raises((InputMismatch, StateError), match="enabled was True at capture and is False now"):
            run(rows(impl, 2.0))
        step(impl, spec, run)
        assert forward_scale(impl, layer) == 224.0
        other = graphcap.capture(
            layer,
            (rows(impl, 1.0),),
            backend=impl.backend,
            quantization=spec,
            config=graphcap.CaptureConfig(on_mismatch="eager"),
        )
        out = other(rows(impl, 2.0))
        assert torch.equal(out, nn.functional.linear(rows(impl, 2.0), layer.weight))
        assert sum(other.stats.eager.values()) == 1

    def test_t14_a_direct_call_of_forward_is_seen(self, impl: Implementation) -> None:
        spec = spec_of(impl)
        module = Direct(impl)
        step(impl, spec, graphed(impl, module, spec))
        assert forward_scale(impl, module.layer) == 224.0
        assert backward_scale(impl, module.layer) == 114688.0

    # ----------------------------------------------------------------------------------------------- beyond the fourteen

    def test_another_recipe_is_refused(self, impl: Implementation) -> None:
        spec = spec_of(impl)
        run = graphed(impl, impl.linear(), spec)
        e4m3 = replace(spec, recipe=self.only_e4m3(impl))
        with pytest.raises((InputMismatch, StateError), match="quantisation"):
            step(impl, e4m3, run)

    def only_e4m3(self, impl: Implementation) -> Any:
        return impl.recipe(history_len=4, algo="most_recent", backward=torch.float8_e4m3fn)

    def test_a_call_must_say_which_microbatch(self, impl: Implementation) -> None:
        spec = spec_of(impl, cache_weights=True)
        run = graphed(impl, impl.linear(), spec)
        for wrong in ({}, {"is_first_microbatch": None}, {"is_first_microbatch": 1}):
            with pytest.raises(InputMismatch, match="is_first_microbatch=True or False"):
                step(impl, spec, run, **wrong)
        step(impl, spec, run, is_first_microbatch=True)

    def test_an_eager_call_between_two_microbatches(self, impl: Implementation) -> None:
        """It casts weights, without gradients (for which some frameworks keep less): the replay after it is eager's."""
        spec = spec_of(impl, cache_weights=True)
        eager, layer = impl.linear(), impl.linear()
        layer.load_state_dict(eager.state_dict())
        run = graphed(impl, layer, spec)
        for number in range(6):
            for micro in range(2):
                first = micro == 0
                outs = [step(impl, spec, c, 1.0 + number, is_first_microbatch=first) for c in (eager, run)]
                assert torch.equal(*outs), (number, micro)
                with region(impl, spec), torch.no_grad():  # its exit reduces, so nothing of this is left to the next step
                    for module in (layer, eager):
                        module(rows(impl, 3.0), is_first_microbatch=True)
            for module in (eager, layer):
                with torch.no_grad():
                    module.weight.mul_(1.5)

    def test_the_region_around_the_capture_counts(self, impl: Implementation) -> None:
        spec = spec_of(impl)
        layer = impl.linear()
        with region(impl, spec):
            run = graphcap.capture(layer, (rows(impl, 1.0),), backend=impl.backend)
        step(impl, spec, run)
        assert forward_scale(impl, layer) == 224.0

    def test_a_high_precision_capture_is_refused_in_a_region(self, impl: Implementation) -> None:
        layer = impl.linear()
        run = graphcap.capture(layer, (rows(impl, 1.0),), backend=impl.backend)
        assert torch.equal(run(rows(impl, 2.0)), layer(rows(impl, 2.0)))
        with pytest.raises((InputMismatch, StateError), match="enabled was False at capture and is True now"):
            step(impl, spec_of(impl), run)

    def test_an_interleaved_order_of_two_chunks(self, impl: Implementation) -> None:
        """20 steps, weights cached over four microbatches and changing from step to step."""
        spec = spec_of(impl, cache_weights=True, algo="max")
        eager, chunks = [Deep(impl, 2) for _ in range(2)], [Deep(impl, 2) for _ in range(2)]
        for ours, theirs in zip(chunks, eager, strict=True):
            ours.load_state_dict(theirs.state_dict())
        order = Order.interleaved(0, 2, 2, 4)
        run = graphcap.capture(
            tuple(chunks), ((rows(impl, 1.0),),) * 2, order=order, backend=impl.backend, quantization=spec
        )
        both = (eager, chunks)
        optimizers = [torch.optim.SGD([p for m in side for p in m.parameters()], lr=0.05) for side in both]
        for number in range(20):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            _interleave(impl, spec, order, number, _eager_steps(eager))
            _interleave(impl, spec, order, number, run)
            for ours, theirs in zip(chunks, eager, strict=True):
                for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert torch.equal(p.grad, q.grad), f"step {number}"
                    assert p.grad.abs().max() > 0
                for a, b in zip(ours.layers, theirs.layers, strict=True):
                    same_state(impl, a, b, f"step {number}")
            for optimizer in optimizers:
                optimizer.step()


class _eager_steps:
    """The step-wise interface on plain modules."""

    def __init__(self, chunks: Any) -> None:
        self.chunks, self.live = chunks, {}

    def forward(self, step: str, x: Tensor, **kw: Any) -> Tensor:
        chunk, micro = step.split("F")
        leaf = x.detach().requires_grad_()
        out = self.chunks[int(chunk)](leaf, **kw)
        self.live[chunk, micro] = (leaf, out)
        return out.detach()

    def backward(self, step: str, gradient: Tensor) -> tuple[Tensor]:
        leaf, out = self.live.pop(tuple(step.split("B")))
        out.backward(gradient)
        return (leaf.grad,)


def _interleave(impl: Implementation, spec: QuantSpec, order: Order, number: int, run: Any) -> None:
    hidden: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    for at in order:
        micro = at.microbatch
        if str(at.phase) == "F":
            x = rows(impl, None, number * 4 + micro) if at.chunk == 0 else hidden[micro].requires_grad_()
            with region(impl, spec):
                hidden[micro] = run.forward(str(at), x, is_first_microbatch=micro == 0).detach().clone()
        else:
            seed = torch.Generator().manual_seed(1000 + number * 4 + micro)
            given = torch.randn(ROWS, WIDTH, generator=seed).to(impl.device, impl.dtype)
            arrived = gradients.pop(micro) if at.chunk == 0 else given
            (gradients[micro],) = run.backward(str(at), arrived)
