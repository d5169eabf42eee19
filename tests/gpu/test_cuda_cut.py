"""The automatic cut on a GPU: whole models of transformers, and every small hazard. Run by hand: pytest -m gpu."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import graphcap
from graphcap.errors import CutError
from graphcap.testing import compare, deterministic
from tests.cut.cases import EQUAL, HOLDER, REFUSED
from tests.cut.test_hazards import cases_crossing, cases_refused, cases_state  # noqa: F401  (they fill EQUAL and REFUSED)
from tests.cut.test_models import MODELS, padded, tokens
from tests.flow.test_attributes import KINDS, rows
from tests.flow.twins import assert_same, gradients

pytestmark = pytest.mark.gpu


# Their tensor is no buffer, so `.cuda()` leaves it on the CPU, where eager can't use it either.
HOST_TENSORS = ("a tensor attribute that was there before capture", "a global tensor")


def on_gpu(value: Any) -> Any:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().cuda().requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_unmodified_models_equal_eager(name: str, dtype: torch.dtype, experts: str) -> None:
    def build() -> torch.nn.Module:
        model = MODELS[name][0](dtype)
        model.config._experts_implementation = experts
        return model.cuda()

    verdict = compare(build, lambda index: on_gpu(tokens(index)), steps=20, break_at=("*.experts", "auto"))
    assert verdict, str(verdict)


@pytest.mark.parametrize("name", [name for name in EQUAL if name not in HOST_TENSORS])
def test_hazard_equal_to_eager(name: str) -> None:
    case = EQUAL[name]
    torch.manual_seed(1)
    verdict = compare(
        lambda: case.build().cuda(),
        lambda index: on_gpu(case.inputs(index)),
        steps=5,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        break_at=case.break_at,
        **case.options,
    )
    assert verdict, str(verdict)


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in HOST_TENSORS])
def test_hazard_refused(name: str) -> None:
    case = REFUSED[name]
    HOLDER.clear()
    torch.manual_seed(1)
    module = case.build().cuda()
    args, kwargs = on_gpu(case.inputs(0))
    with pytest.raises(CutError):
        graphcap.capture(module, args, kwargs, break_at=case.break_at)
    torch.rand(2, device="cuda")  # the generator still works


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_more_than_experts_with_padding(name: str) -> None:
    build, experts = MODELS[name]

    def on_device() -> torch.nn.Module:
        return build(torch.float32).cuda()

    verdict = compare(on_device, lambda index: on_gpu(padded(index)), steps=20, break_at=("*.experts", "auto"))
    assert verdict, str(verdict)
    for inputs in (tokens, padded):
        args, kwargs = on_gpu(inputs(0))
        plan = graphcap.capture(on_device(), args, kwargs, break_at=("*.experts", "auto")).plan
        # some versions of transformers count in the load-balancing loss with bincount, which no graph can hold
        others = [part for part in plan.breaks if "experts" not in part.name and "bincount" not in (part.reason or "")]
        assert not others, str(plan)
        assert len(plan.breaks) - len([p for p in plan.breaks if "experts" not in p.name]) == experts
        assert plan.graphs == len(plan.breaks) + 1, str(plan)


@pytest.mark.parametrize("kind", KINDS)
def test_an_auxiliary_loss_kept_as_an_attribute(kind: str) -> None:
    build, options = KINDS[kind]
    torch.manual_seed(1)
    module = build().cuda()
    twin = copy.deepcopy(module)
    with deterministic("cuda"):
        graphed = graphcap.capture(module, (rows(0).detach().cuda().requires_grad_(),), **options)
        for step in range(20):
            found = []
            for call, owner in ((graphed, module), (twin, twin)):
                owner.zero_grad(set_to_none=True)
                x = rows(step).detach().cuda().requires_grad_()
                loss = call(x).square().mean() + 0.3 * owner.router.aux_loss
                loss.backward()
                found.append((loss.detach().clone(), x.grad, gradients(owner)))
                with torch.no_grad():
                    for parameter in owner.parameters():
                        parameter -= 0.05 * (0 if parameter.grad is None else parameter.grad)
            assert torch.equal(found[0][0], found[1][0])
            assert torch.equal(found[0][1], found[1][1])
            assert_same(found[0][2], found[1][2])
