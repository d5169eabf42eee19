"""The drop-in on a GPU: orders, delayed weight gradients, streams, memory; and modules of Transformer Engine."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from graphcap import Order, make_graphed_callables
from graphcap.testing import deterministic
from tests.drop_in.chains import assert_chain_equal, captured, valid_orders
from tests.drop_in.delayed import WAYS, Block, run_put_off

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with deterministic("cuda"):
        yield


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(valid_orders(), st.booleans())
def test_any_order(order: Order, reuse: bool) -> None:
    assert_chain_equal(order, [2, 2], device="cuda", width=64, _reuse_graph_input_output_buffers=reuse)


def test_soak_with_side_stream_work() -> None:
    """A public report saw divergence after about 80 steps of an interleaved order."""
    side, noise = torch.cuda.Stream(), torch.randn(512, 512, device="cuda")

    def between(number: int) -> None:
        with torch.cuda.stream(side):
            torch.mm(noise, noise)
        junk = [torch.full((1000 + 17 * (number % 31),), float("nan"), device="cuda") for _ in range(4)]
        del junk

    assert_chain_equal(
        Order.interleaved(0, 2, 2, 4),
        [1, 1],
        steps=200,
        device="cuda",
        width=64,
        between=between,
        rate=0.01,
        _reuse_graph_input_output_buffers=True,
    )


def drawn(seed: int, grad: bool = True) -> Tensor:
    made = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).cuda()
    return made.requires_grad_(grad)


def values(module: nn.Module) -> dict[str, Tensor | None]:
    found = {name: p.grad for name, p in module.named_parameters()}
    return found | {f"main {name}": getattr(p, "main_grad", None) for name, p in module.named_parameters()}


def assert_equal(mine: nn.Module, twin: nn.Module) -> None:
    ours, theirs = values(mine), values(twin)
    for name, value in theirs.items():
        assert (value is None) == (ours[name] is None), name
        assert value is None or torch.equal(value, ours[name]), name  # type: ignore[arg-type]
    assert any(value is not None and bool(value.count_nonzero()) for value in theirs.values())


@pytest.mark.parametrize("where", WAYS)
def test_delayed_weight_gradients(where: str) -> None:
    module = Block(64, where).cuda()
    for p in module.parameters():
        if hasattr(p, "main_grad"):
            p.main_grad = p.main_grad.cuda()
    twin = copy.deepcopy(module).cuda()
    for p in twin.parameters():
        if hasattr(p, "main_grad"):
            p.main_grad = p.main_grad.cuda()
    signed = [1, 1, -1, -1, -1.5, -1.5]
    made = make_graphed_callables((module,), ((drawn(0),),) * 2, _order=signed)
    for step in range(5):
        outputs = [made[m](drawn(10 * step + m)) for m in range(2)]
        expected = [twin(drawn(10 * step + m)) for m in range(2)]
        for mine, theirs in zip(outputs, expected, strict=True):
            assert torch.equal(mine, theirs)
        for out in (*outputs, *expected):
            out.backward(drawn(5, grad=False))
        for call in made:
            call.backward_dw()
        for _ in range(2):
            run_put_off(twin)
        assert_equal(module, twin)


@pytest.mark.parametrize("with_event", [False, True])
def test_graphs_on_a_stream_of_the_callers(with_event: bool) -> None:
    """The caller's stream waits for the graph, or for the event that the graph records."""
    event = torch.cuda.Event(external=True)

    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.linear(x))
            if with_event and torch.cuda.is_current_stream_capturing():
                event.record()
            return y

    module = Recording().cuda()
    twin = copy.deepcopy(module)
    stream = torch.cuda.Stream()
    graphed = make_graphed_callables(module, (drawn(0),))
    more: dict[str, Any] = {"cuda_graph_stream": stream, **({"cuda_graph_event": event} if with_event else {})}
    for step in range(20):
        mine, theirs = drawn(step), drawn(step)
        for p in (*module.parameters(), *twin.parameters()):
            p.grad = None
        y, z = graphed(mine, **more), twin(theirs)
        assert torch.equal(y, z)
        y.square().sum().backward()
        z.square().sum().backward()
        assert mine.grad is not None
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
        assert_equal(module, twin)


def test_memory_does_not_grow_with_the_microbatches() -> None:
    """What the allocator holds for 16 and for 64 microbatches, with shared buffers: the same."""

    def held(microbatches: int) -> tuple[int, int]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        order = Order.interleaved(0, 2, 2, microbatches)
        layers, made = captured(
            order, [2, 2], device="cuda", width=512, _reuse_graph_input_output_buffers=True
        )
        torch.cuda.empty_cache()
        taken = torch.cuda.memory_reserved() - before
        static = made[0].plan.static_bytes
        for call in made:
            call.reset()
        del layers
        return taken, static

    small, large = held(16), held(64)
    assert small[1] == large[1]
    assert large[0] <= small[0] * 1.05 + 4 * 2**20


# ---------------------------------------------------------------------------------------------------- Transformer Engine


@pytest.fixture
def te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")  # without it these tests fail: they are for it


def te_modules(te: Any, kind: str, **more: Any) -> nn.Module:
    make = {
        "linear": lambda: te.Linear(64, 64, **more),
        "layernorm_linear": lambda: te.LayerNormLinear(64, 64, **more),
        "layernorm_mlp": lambda: te.LayerNormMLP(64, 128, **more),
        "transformer_layer": lambda: te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, **more),
    }
    torch.manual_seed(2)
    module: nn.Module = make[kind]().cuda()
    return module


def te_input(kind: str, seed: int) -> Tensor:
    shape = (16, 2, 64) if kind == "transformer_layer" else (32, 64)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda().requires_grad_()


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "transformer_layer"])
@pytest.mark.parametrize("individual", [False, True])
def test_modules_of_te_equal_eager(te: Any, kind: str, individual: bool) -> None:
    """Three steps of two accumulations: no graph, each module, the whole sequence."""
    modules = [te_modules(te, kind) for _ in range(2)]
    twins = [te_modules(te, kind) for _ in range(2)]
    for module, twin in zip(modules, twins, strict=True):
        twin.load_state_dict(module.state_dict())
    mine, theirs = nn.Sequential(*modules), nn.Sequential(*twins)
    if individual:
        for module in modules:
            make_graphed_callables(module, (te_input(kind, 0),), num_warmup_iters=10)
    else:
        mine = make_graphed_callables(mine, (te_input(kind, 0),), num_warmup_iters=10)
    for step in range(3):
        for p in (*mine.parameters(), *theirs.parameters()):
            p.grad = None
        for m in range(2):
            x, y = te_input(kind, 10 * step + m), te_input(kind, 10 * step + m)
            out, expected = mine(x, is_first_microbatch=m == 0) if not individual else mine(x), theirs(y)
            assert torch.equal(out, expected)
            out.square().sum().backward()
            expected.square().sum().backward()
            assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
        assert_equal(mine, theirs)
        with torch.no_grad():
            for p in (*mine.parameters(), *theirs.parameters()):
                p.sub_(0.01 * p.grad)


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp"])
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("signed", [None, [1, 1, -1, -1.5, -1, -1.5]], ids=str)
def test_delayed_weight_gradients_of_te(te: Any, kind: str, fused: bool, signed: list[float] | None) -> None:
    more = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": fused, "bias": False}
    module, twin = te_modules(te, kind, **more), te_modules(te, kind, **more)
    twin.load_state_dict(module.state_dict())
    for p in (*module.parameters(), *twin.parameters()):
        if fused:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    told: list[int] = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: told.append(1))  # type: ignore[operator]
    if signed is None:
        make_graphed_callables(module, (te_input(kind, 0),))
        calls: list[Any] = [module]
    else:
        calls = list(make_graphed_callables((module,), ((te_input(kind, 0),),) * 2, _order=signed))
    assert told == []
    for step in range(4):
        for m, call in enumerate(calls):
            x, y = te_input(kind, 10 * step + m), te_input(kind, 10 * step + m)
            out, expected = call(x), twin(y)
            assert torch.equal(out, expected)
            out.square().sum().backward()
            expected.square().sum().backward()
            assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
            call.backward_dw()
            twin.backward_dw()  # type: ignore[operator]
        assert len(told) == (step + 1) * len(calls)
        for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
            for kept in ("main_grad",) if fused and hasattr(p, "main_grad") else ("grad",):
                a, b = getattr(p, kept), getattr(q, kept)
                assert (a is None) == (b is None), name
                assert a is None or torch.equal(a, b), name
