"""recompute="part" on a GPU: the backward graph must draw what the forward drew. Run by hand: pytest -m gpu."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphcap
from graphcap import EAGER, GRAPHED, CaptureConfig, PartialLayer
from graphcap.partial_layer import Part
from graphcap.testing import compare
from tests.cut.cases import EQUAL
from tests.flow.test_recompute import ORDERS, Dropped, Plain, inputs
from tests.gpu.test_cuda_cut import HOST_TENSORS, on_gpu
from tests.gpu.test_cuda_flow import hybrid, tokens

pytestmark = pytest.mark.gpu
PART = CaptureConfig(recompute="part")
TWICE = ("BatchNorm buffers in stretches and breaks", "a buffer that a stretch changes in place")  # refused: they would be


def on_device(index: int) -> Any:
    return on_gpu(inputs(index))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", [Dropped, Plain])
def test_dropout_in_every_part(build: Any, order: str | None) -> None:
    options = {"break_at": "experts"} if build is Plain else {}
    verdict = compare(lambda: build().cuda(), on_device, steps=20, order=order, config=PART, **options)
    assert verdict, str(verdict)


class Attention(nn.Module):
    """Fused kernels that draw by themselves: attention with dropout, and fused dropout in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.experts = (nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.tanh(self.first(x)).view(2, 32, 2, 32).transpose(1, 2)
        made = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2, is_causal=True).transpose(1, 2).reshape(2, 32, 64)
        y = self.experts(F.dropout(made, 0.1)) + x
        return self.last(F.dropout(torch.sin(y) * torch.rand_like(y), 0.3)) + y


def rows(index: int) -> Any:
    drawn = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(index)).to(torch.bfloat16)
    return (drawn.cuda().requires_grad_(),), {}


@pytest.mark.parametrize("order", [None, "0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"])
def test_fused_kernels_that_draw(order: str | None) -> None:
    verdict = compare(lambda: Attention().cuda(), rows, steps=20, order=order, config=PART, break_at="experts")
    assert verdict, str(verdict)


def test_seeds_set_between_steps_and_the_state_afterwards() -> None:
    """manual_seed reaches the graphs; a backward leaves the generator where it was."""
    module = Plain().cuda()
    twin = copy.deepcopy(module)
    graphed = graphcap.capture(module, *on_device(0), break_at="experts", config=PART)
    for index in range(6):
        sides = []
        for side in (graphed, twin):
            torch.cuda.manual_seed(index % 3)
            (x,), _ = on_device(index)
            value = side(x)
            forward = torch.cuda.get_rng_state()
            torch.rand(7, device="cuda")  # somebody draws between forward and backward
            between = torch.cuda.get_rng_state()
            value.square().mean().backward()
            assert torch.equal(torch.cuda.get_rng_state(), between)
            sides.append((value.detach(), x.grad, forward, torch.rand(5, device="cuda")))
        for ours, theirs in zip(*sides, strict=True):
            assert torch.equal(ours, theirs)
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and p.grad.count_nonzero() and torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_the_hybrid_model(grads: Any) -> None:
    config = CaptureConfig(recompute="part", grads=grads)
    verdict = compare(lambda: hybrid(), tokens, steps=20, order="0F0 0F1 0B0 0B1", config=config)
    assert verdict, str(verdict)


@pytest.mark.parametrize("name", [name for name in EQUAL if name not in (*HOST_TENSORS, *TWICE)])
def test_hazard_equal_to_eager(name: str) -> None:
    case = EQUAL[name]
    torch.manual_seed(1)
    verdict = compare(
        lambda: case.build().cuda(),
        lambda index: on_gpu(case.inputs(index)),
        steps=5,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        break_at=case.break_at,
        **{**case.options, "config": PART},
    )
    assert verdict, str(verdict)


class Wide(PartialLayer):
    """Megabytes are saved between two values that cross. Declared parts: of an unmodified model, all activations lie in the
    pool while its forward is followed, and the pool stays as large (docs/guides/recompute.md)."""

    inputs, outputs = "x", "x"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self.experts = nn.Linear(512, 512)
        for number in range(6):
            setattr(self, f"block{number}", partial(self.block, number))

    def parts(self) -> tuple[Part, ...]:
        each = [(GRAPHED(f"block{n}", "x -> x"), EAGER("expert", "x -> x", reason="to break")) for n in range(6)]
        return tuple(part for pair in each for part in pair)

    def block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(torch.sin(x) * 1.5)
        out: torch.Tensor = self.blocks[number](x)
        return out

    def expert(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(x)
        return out


def test_the_pool_is_smaller() -> None:
    reserved = {}
    for recompute in (None, "part"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        x = torch.randn(4096, 512, device="cuda", requires_grad=True)
        config = CaptureConfig(recompute=recompute)  # type: ignore[arg-type]
        graphed = graphcap.capture(Wide().cuda(), (x,), config=config)
        torch.cuda.empty_cache()
        reserved[recompute] = torch.cuda.memory_reserved() - before
        if recompute:
            assert graphed.plan.recompute_saves >= 6 * 8 * 4096 * 512 * 4
        graphed.close()
        del graphed
    # 6 parts of 8 rounds of 8 MiB against one part at a time
    assert reserved["part"] < 0.6 * reserved[None], reserved
