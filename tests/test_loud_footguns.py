"""Every surprise that raises or warns: the second part of docs/footguns.md."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import CutError, HookError, InFlightError, InputMismatch, ReplayError, StateError
from tests.flow.small import Mlp, Routed, agrees, capture, gradients, rows, same_gradients, twin_of

# ----------------------------------------------------------------------------------------------------------------- loud


def test_constants_are_keys() -> None:
    graphed = capture(lambda x, *, scale: x * scale, (rows(),), {"scale": 2.0})
    with pytest.raises(InputMismatch, match=r"'scale': expected 2\.0"):
        graphed(rows(), scale=3.0)
    as_tensor = capture(lambda x, *, scale: x * scale, (rows(),), {"scale": torch.tensor(2.0)})  # the way out
    x = rows()
    assert torch.equal(as_tensor(x, scale=torch.tensor(3.0)), x * 3)


def test_results_hold_the_slot() -> None:
    graphed = capture(Mlp())
    kept = graphed(rows())
    with pytest.raises(InFlightError, match="drop the result"):
        graphed(rows())
    del kept  # ways out: drop it, run its backward, no_grad for what needs none, an order with more in flight
    gc.collect()
    kept = graphed(rows())
    kept.sum().backward()
    with torch.no_grad():
        graphed(rows())
    two = capture((Mlp(),), ((rows(),),), order="0F0 0F1 0B0 0B1")
    two.forward("0F0", rows()), two.forward("0F1", rows())


def test_two_backwards_of_one_forward() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    module = Heads()
    twin = twin_of(module)
    a, b = twin(torch.ones(4, 8))
    a.sum().backward()
    b.sum().backward()  # eager: two graphs that share nothing
    a, b = capture(module)(torch.ones(4, 8))
    a.sum().backward()
    with pytest.raises(ReplayError, match="second backward"):
        b.sum().backward()
    module.zero_grad()
    a, b = capture(module, retain_graph=True)(torch.ones(4, 8))  # the way out; or (a.sum() + b.sum()).backward()
    a.sum().backward()
    b.sum().backward()
    same_gradients(module, twin)


def test_kinds_of_zero_grad() -> None:
    for grads in ("return", "accumulate"):
        module = Mlp()
        twin, graphed = twin_of(module), capture(module, grads=grads)
        for set_to_none in (True, False, True):
            x = rows()
            for side in (graphed, twin):
                side.zero_grad(set_to_none=set_to_none)
                side(x).square().sum().backward()
            same_gradients(module, twin)
    assert gradients(module)["up.weight"] is not None
    module.up.weight.grad = module.up.weight.grad.clone()  # neither of the two kinds
    with pytest.raises(StateError, match=r"up\.weight\.grad is another tensor"):
        graphed(rows()).sum().backward()


def test_training_flag() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    graphed = capture(module)
    graphed.eval()
    with pytest.raises(InputMismatch, match="training=True"):
        graphed(rows())
    with graphcap.disabled():  # ways out: disabled(), on_mismatch="eager", or a second capture for evaluation
        graphed(rows())
    graphed.train()
    graphed(rows())


def test_hooks_added_inside() -> None:
    module = Mlp()
    graphed = capture(module)
    module.up.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="the hook will not run"):
        graphed(rows())
    with pytest.raises(HookError, match="Register them after capture"):
        module.register_forward_hook(lambda *_: None)
        graphcap.make_graphed_callables(module, (rows(),), backend="tape")


def test_changed_modules() -> None:
    module = Mlp()
    graphed = capture(module)
    module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()})  # in place: fine
    agrees(graphed, twin_of(module), rows())
    module.up = nn.Linear(8, 8)
    with pytest.raises(StateError, match="another"):
        graphed(rows())
    graphed.close()
    agrees(capture(module), twin_of(module), rows())


def test_inputs_that_require_grad() -> None:
    graphed = capture(Mlp())
    with pytest.raises(InputMismatch, match="expected requires_grad=False"):
        graphed(rows(requires_grad=True))
    capture(Mlp(), (rows(requires_grad=True),))(rows(requires_grad=True))  # the way out: samples as calls will be


def test_ddp_around_accumulate() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(capture(Mlp(), grads="accumulate"))
        with pytest.raises(StateError, match="nothing would be reduced"):
            wrapped(rows())
        module = Mlp()
        twin = twin_of(module)
        wrapped = nn.parallel.DistributedDataParallel(capture(module))  # the way out
        for _ in range(2):
            x = rows()
            wrapped(x).square().sum().backward()
            twin(x).square().sum().backward()
            same_gradients(module, twin)
    finally:
        torch.distributed.destroy_process_group()


def test_attributes_that_hold_tensors() -> None:
    class Recomputed(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask = x > 0
            return super().forward(x) * self.mask

    module = Recomputed()
    twin, graphed = twin_of(module), capture(module)
    for _ in range(3):
        x = rows()
        agrees(graphed, twin, x)
        assert torch.equal(module.mask, x > 0)
    normed = Mlp()
    nn.utils.weight_norm(normed.up)  # sets `weight` at every call
    other = Mlp()
    nn.utils.weight_norm(other.up)  # can't be copied: its weight is no leaf
    other.load_state_dict(normed.state_dict())
    agrees(capture(normed), other, rows())

    class Remembering(Mlp):
        previous: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            made = y if self.previous is None else y + self.previous
            self.previous = y.detach()
            return made

    with pytest.raises(CutError, match=r"Remembering\.previous.*the call before this one"):
        capture(Remembering())

    class Buffered(Mlp):  # the way out
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("previous", torch.zeros(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            made = y + self.previous
            self.previous.copy_(y.detach())
            return made

    buffered = Buffered()
    twin, graphed = twin_of(buffered), capture(buffered)
    for _ in range(3):
        agrees(graphed, twin, rows())


def test_recompute_of_state() -> None:
    class Normed(Routed):
        def __init__(self, inside: bool) -> None:
            super().__init__()
            self.norm, self.inside = nn.BatchNorm1d(8), inside

        def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().route(self.norm(hidden) if self.inside else hidden)

        def experts(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().experts(tokens if self.inside else self.norm(tokens))

    with pytest.raises(CutError, match="change it twice"):
        capture(Normed(inside=True), recompute="part")
    module = Normed(inside=False)  # the way out
    twin = twin_of(module)
    graphed = capture(module, recompute="part")
    agrees(graphed, twin, rows())
    assert torch.equal(module.norm.running_mean, twin.norm.running_mean)
    value = graphed(rows())
    with torch.no_grad():
        module.front.weight.mul_(2)
    with pytest.raises(ReplayError, match="changed between its forward and its backward"):
        value.sum().backward()
