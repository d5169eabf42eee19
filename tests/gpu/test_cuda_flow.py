"""The whole flow on a GPU: the eager twin judges, bit for bit. Run by hand: pytest -m gpu."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import CaptureConfig, Order
from graphcap.hybrid import HybridConfig, HybridModel
from graphcap.testing import compare

pytestmark = pytest.mark.gpu


def hybrid(pattern: str = "[M*E][M*E]", dtype: torch.dtype = torch.bfloat16, **size: Any) -> HybridModel:
    torch.manual_seed(3)
    return HybridModel(HybridConfig(pattern=pattern, dtype=dtype, **size)).cuda()


def tokens(index: int, length: int = 64) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(index)
    text = torch.randint(0, 256, (2, length + 1), generator=generator).cuda()
    return (text[:, :-1], text[:, 1:].contiguous()), {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_hybrid_equals_eager(dtype: torch.dtype, grads: Any) -> None:
    result = compare(lambda: hybrid(dtype=dtype), tokens, steps=20, config=CaptureConfig(grads=grads))
    assert result, str(result)


@pytest.mark.parametrize(
    "order",
    [
        Order.forward_backward(3),
        Order.gpipe(3),
        Order.one_f_one_b(0, 2, 4),
        Order.parse("0F0 0F1 0F2 0B2 0B1 0B0"),
        Order.parse("0F0 0F1 0I0 0W0 0I1 0W1"),
        Order.parse("0F0 0F1 0I0 0I1 0W1 0W0"),
    ],
    ids=str,
)
def test_orders_equal_eager(order: Order) -> None:
    result = compare(hybrid, tokens, steps=6, order=order)
    assert result, str(result)


class Block(nn.Module):
    """Dropout, a norm with buffers, a residual: state of every kind in one small module."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.3, self.training)
        return x + self.second(inner)


def rows(index: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(index)
    return (torch.randn(32, 64, generator=generator).cuda().requires_grad_(),), {}


def block_build() -> Block:
    torch.manual_seed(1)
    return Block().cuda()


def chain_build() -> tuple[tuple[Block, Block], tuple[Block, Block]]:
    torch.manual_seed(1)
    return (Block().cuda(), Block().cuda()), (Block().cuda(), Block().cuda())


@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_dropout_and_buffers_equal_eager(grads: Any) -> None:
    result = compare(block_build, rows, steps=20, config=CaptureConfig(grads=grads))
    assert result, str(result)


def small_steps(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """The cotangents are random: SGD with the usual rate diverges, and NaN proves nothing."""
    return torch.optim.SGD(parameters, lr=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_interleaved_chain_of_same_shaped_chunks(rank: int) -> None:
    order = Order.interleaved(pp_rank=rank, pp_size=2, chunks=2, microbatches=4)
    result = compare(chain_build, rows, steps=20, order=order, optimizer=small_steps)
    assert result, str(result)


def test_soak_of_an_interleaved_order_with_side_stream_work() -> None:
    """A public report saw divergence after about 80 steps."""
    noise = torch.randn(512, 512, device="cuda")
    side = torch.cuda.Stream()

    def inputs(index: int) -> Any:
        with torch.cuda.stream(side):
            torch.mm(noise, noise)
        junk = [torch.full((1000 + 17 * (index % 31),), float("nan"), device="cuda") for _ in range(8)]
        del junk
        return rows(index)

    order = Order.interleaved(pp_rank=0, pp_size=2, chunks=2, microbatches=4)
    result = compare(chain_build, inputs, steps=200, order=order, optimizer=small_steps)
    assert result, str(result)


def test_drop_in_equals_eager() -> None:
    torch.manual_seed(0)
    layers = tuple(nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda() for _ in range(2))
    twin = copy.deepcopy(layers)
    samples = tuple((torch.randn(8, 64, device="cuda", requires_grad=True),) for _ in range(4))
    order = [1, 1, 2, 2, -2, -2, -1, -1]
    graphed = graphcap.make_graphed_callables(layers, samples, _order=order)
    for step in range(20):
        inputs = [torch.randn(8, 64, device="cuda", requires_grad=True) for _ in range(2)]
        mine = [x.detach().clone().requires_grad_() for x in inputs]
        outs = [graphed[2 + m](graphed[m](inputs[m])) for m in range(2)]
        eager = [twin[1](twin[0](mine[m])) for m in range(2)]
        for m in range(2):
            assert torch.equal(outs[m], eager[m]), step
            outs[m].square().sum().backward()
            eager[m].square().sum().backward()
            assert torch.equal(inputs[m].grad, mine[m].grad), step
        for a, b in zip(nn.ModuleList(layers).parameters(), nn.ModuleList(twin).parameters(), strict=True):
            assert a.grad is not None
            assert torch.equal(a.grad, b.grad), step
            with torch.no_grad():
                a -= 0.01 * a.grad
                b -= 0.01 * b.grad
            a.grad = b.grad = None


def test_memory_of_the_pool_is_not_read_after_others_wrote_it() -> None:
    """Every free block is NaN between steps: nothing a replay needs may lie in memory that is free."""

    def inputs(index: int) -> Any:
        sizes = [64, 4096, 65536, 1 << 20] * 16
        free = [torch.full((size,), float("nan"), device="cuda") for size in sizes]
        del free
        return tokens(index)

    result = compare(hybrid, inputs, steps=20, order=Order.one_f_one_b(0, 2, 3))
    assert result, str(result)


def test_a_failed_capture_leaves_the_process_usable() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(torch.nn.functional.dropout(x, 0.5))
            return y * float(y.sum().item() > 0)

    state = torch.cuda.get_rng_state()
    with pytest.raises(graphcap.ForbiddenOpError, match="item"):
        graphcap.capture(Reads().cuda(), rows(0)[0])
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.rand(4, device="cuda")
    result = compare(block_build, rows, steps=3)
    assert result, str(result)


def test_another_stream_waits_and_another_thread_is_refused() -> None:
    module = block_build().eval()
    graphed = graphcap.capture(module, rows(0)[0])
    side = torch.cuda.Stream()
    expected = module(rows(1)[0][0])
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = graphed(rows(1)[0][0])
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, expected)
    caught: list[BaseException] = []

    def call() -> None:
        try:
            graphed(rows(2)[0][0])
        except graphcap.ReplayError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_busy_thread_does_not_disturb_a_capture() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            torch.ones(1000, device="cuda").cpu()  # no random numbers: the generator is the capture's

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        graphed = graphcap.capture(block_build().eval(), rows(0)[0])
    finally:
        stop.set()
        thread.join()
    x = rows(1)[0][0]
    assert torch.equal(graphed(x), graphed.module(x))
