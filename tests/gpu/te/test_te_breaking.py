"""MoE layers that break: attention, router and shared expert in graphs, routed experts eager, under an interleaved order,
with cached weights and an amax group. The judge is the same model without graphs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import Order
from graphcap.fp8_meta import QuantSpec
from tests.gpu.te.kit import attention_backend, autocast, recipe, scaling

pytestmark = pytest.mark.gpu

ORDERS = {
    "one chunk": Order.parse("0F0 0F1 0B0 0F2 0B1 0B2"),
    "two chunks": Order.interleaved(0, 2, 2, 4),
}


def example() -> Any:
    path = Path(__file__).parents[3] / "examples" / "te_breaking_layer.py"
    spec = importlib.util.spec_from_file_location("te_breaking_layer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def group() -> Iterator[Any]:
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield torch.distributed.new_group([0])
    finally:
        torch.distributed.destroy_process_group()


def drawn(seed: int) -> torch.Tensor:
    e = example()
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(e.LENGTH, e.BATCH, e.WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)


def build(chunks: int) -> tuple[nn.Module, ...]:
    torch.manual_seed(0)
    return tuple(example().Stack(layers=1) for _ in range(chunks))


class Eager:
    """The step-wise interface on plain modules."""

    def __init__(self, chunks: tuple[nn.Module, ...]) -> None:
        self.chunks = chunks
        self.live: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, step: str, x: torch.Tensor, **more: Any) -> torch.Tensor:
        chunk, microbatch = step.split("F")
        leaf = x.detach().requires_grad_()
        out = self.chunks[int(chunk)](leaf, **more)
        self.live[f"{chunk}B{microbatch}"] = (leaf, out)
        return out.detach()

    def backward(self, step: str, gradient: torch.Tensor) -> tuple[torch.Tensor | None]:
        leaf, out = self.live.pop(step)
        out.backward(gradient)
        return (leaf.grad,)


def train(
    run: Any, chunks: tuple[nn.Module, ...], order: Order, found: Any, group: Any, steps: int
) -> dict[str, torch.Tensor]:
    parameters = {f"{c}.{name}": p for c, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    seen: dict[str, torch.Tensor] = {}
    for number in range(steps):
        optimizer.zero_grad()
        hidden: dict[int, torch.Tensor] = {}
        gradients: dict[int, torch.Tensor] = {}
        for at in order:
            m, where = at.microbatch, f"{number} {at}"
            if str(at.phase) == "F":
                x = drawn(100 * number + m) if at.chunk == 0 else hidden[m]
                with autocast(found, group):
                    made = run.forward(str(at), x.requires_grad_(), is_first_microbatch=m == 0)
                hidden[m] = made.detach().clone()
                seen[f"{where} output"] = hidden[m]
            else:
                last = at.chunk == order.chunks - 1
                arrived = drawn(7000 + 100 * number + m) if last else gradients[m]
                (gradients[m],) = run.backward(str(at), arrived)
                seen[f"{where} input grad"] = gradients[m].clone()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                seen[f"{number} grad {name}"] = parameter.grad.clone()
        optimizer.step()
        for c, chunk in enumerate(chunks):
            seen |= {f"{number} chunk {c} {name}": tensor for name, tensor in scaling(chunk).items()}
        seen |= {f"{number} weight {name}": p.detach().clone() for name, p in parameters.items()}
    return seen


def differs(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [n for n in dict.fromkeys([*a, *b]) if n not in a or n not in b or not torch.equal(a[n], b[n])]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("low", ["delayed", "current"])
def test_breaking_layers_equal_eager(low: str, name: str, group: Any) -> None:
    order, found = ORDERS[name], recipe(low)
    eager_chunks = build(order.chunks)
    eager = train(Eager(eager_chunks), eager_chunks, order, found, group, steps=3)
    again = build(order.chunks)
    assert differs(eager, train(Eager(again), again, order, found, group, steps=3)) == [], "eager differs from itself"
    assert all(tensor.isfinite().all() for tensor in eager.values())
    chunks = build(order.chunks)
    sample = drawn(1).requires_grad_()
    first: Any = {"is_first_microbatch": True}
    samples = ((sample,), first) if order.chunks == 1 else (((sample,),) * order.chunks, (first,) * order.chunks)
    graphed = graphcap.capture(
        chunks[0] if order.chunks == 1 else chunks,
        *samples,
        order=order,
        quantization=QuantSpec(recipe=found, group=group, cache_weights=True),
    )
    assert graphed.plan.breaks
    assert differs(eager, train(graphed, chunks, order, found, group, steps=3)) == []
    assert attention_backend() == "fused 1"


def test_scales_of_both_kinds_of_part_move(group: Any) -> None:
    order, found = ORDERS["one chunk"], recipe("delayed")
    chunks = build(1)
    graphed = graphcap.capture(
        chunks[0],
        (drawn(1).requires_grad_(),),
        {"is_first_microbatch": True},
        order=order,
        quantization=QuantSpec(recipe=found, group=group, cache_weights=True),
    )
    seen = train(graphed, chunks, order, found, group, steps=2)
    last = {name: tensor for name, tensor in seen.items() if name.startswith("1 chunk") and name.endswith("fwd.scale")}
    kinds = {name.split()[4].split(".")[0] for name, tensor in last.items() if (tensor[:2] != 1).all()}
    assert {"LayerNormLinear", "Linear", "LayerNormMLP", "GroupedLinear"} <= kinds


def test_the_example_runs_equal(capsys: pytest.CaptureFixture[str]) -> None:
    example().main()
    text = capsys.readouterr().out
    count, total = text.splitlines()[-1].split(" of ")[0], text.splitlines()[-1].split(" of ")[1].split()[0]
    assert count == total, text.splitlines()[-1]
