"""The hybrid model under torch.autocast, and where second derivatives are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphcap import capture
from graphcap.errors import StateError
from graphcap.hybrid import (
    AttentionLayer,
    HybridConfig,
    HybridModel,
    MambaLayer,
    MLPLayer,
    MoELayer,
    delayed_wgrad,
)
from graphcap.hybrid import mamba as mamba_module
from graphcap.hybrid.layers import HybridLayer
from graphcap.hybrid.recompute import not_kept


def autocast(device: str = "cpu") -> torch.autocast:
    return torch.autocast(device, torch.bfloat16)


# ------------------------------------------------------------------------------------------------------------ autocast


def test_the_router_stays_exact() -> None:
    """Choices, weights and losses of the same rows are those outside of the region, bit for bit."""
    torch.manual_seed(1)
    layer = MoELayer(HybridConfig(init_std=0.2, experts=8))
    normed = torch.randn(64, 32)
    weights, chosen = layer.route(normed)
    with autocast():
        inside = layer.route(normed)
    assert weights.dtype is torch.float32
    assert torch.equal(inside[0], weights)
    assert torch.equal(inside[1], chosen)


def test_the_scan_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layer gives the scan comes out as it would outside of the region."""
    calls: list[tuple[Tensor, Tensor]] = []
    scan = mamba_module.ssd_scan

    def watched(*args: Tensor, chunk: int) -> Tensor:
        made = scan(*args, chunk=chunk)
        with torch.autocast("cpu", enabled=False):
            calls.append((made, scan(*args, chunk=chunk)))
        return made

    monkeypatch.setattr(mamba_module, "ssd_scan", watched)
    torch.manual_seed(1)
    layer = MambaLayer(HybridConfig(init_std=0.2))
    with autocast():
        layer(torch.randn(2, 19, 32))
    ((made, expected),) = calls
    assert made.dtype is torch.float32
    assert torch.equal(made, expected)


@pytest.mark.parametrize("recompute", ["none", "norm", "layer"])
def test_graphs_on_equals_graphs_off_under_autocast(recompute: Any) -> None:
    train_under_autocast(recompute, "cpu")


def train_under_autocast(recompute: Any, device: str) -> None:
    """Graphs beside eager, and recomputation, which runs behind the region, beside none: no bit differs."""
    models = []
    for kind in (recompute, recompute, "none"):
        torch.manual_seed(2)
        config = HybridConfig(pattern="M[*E]-/*E", shared_ffn=24, recompute=kind, init_std=0.2)
        with torch.device(device):
            models.append(HybridModel(config))
    tokens = torch.arange(24, device=device).view(2, 12)
    with autocast(device):
        graphed = capture(models[0], (tokens, tokens), backend="tape" if device == "cpu" else "cuda")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first = [parameter.clone() for parameter in models[0].parameters()]
    for step in range(5):
        batch = (tokens * (2 * step + 3)) % 256
        losses = []
        for model, optimizer in zip((graphed, *models[1:]), optimizers, strict=True):
            optimizer.zero_grad()
            with autocast(device):
                losses.append(model(batch, batch).loss)
            losses[-1].backward()
            optimizer.step()
        assert bool(losses[0].isfinite())
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[0], losses[2])
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(parameters[0], parameters[1])
            assert torch.equal(parameters[0], parameters[2])
    dense = [n for n, p in models[0].named_parameters() if ".expert_mlps." not in n]
    moved = {n for (n, p), q in zip(models[0].named_parameters(), first, strict=True) if not torch.equal(p, q)}
    assert moved.issuperset(dense)


# --------------------------------------------------------------------------------------------------- second derivatives


def doubly(layer: torch.nn.Module, hidden: Tensor) -> Tensor:
    """The gradient of a gradient's square, by `autograd.grad`, which runs nothing that does not lead to its input."""
    (grad,) = torch.autograd.grad(layer(hidden).square().sum(), hidden, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), hidden)
    return second


def states() -> Tensor:
    return torch.randn(1, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def layer_of(kind: type[HybridLayer], **values: Any) -> HybridLayer:
    torch.manual_seed(0)
    return kind(HybridConfig(dtype=torch.float64, init_std=0.2, **values))


@pytest.mark.parametrize("kind", [MambaLayer, AttentionLayer, MLPLayer, MoELayer])
def test_second_derivatives(kind: type[HybridLayer]) -> None:
    """They are there, also with recompute="layer"."""
    plain = doubly(layer_of(kind), states())
    assert bool(plain.any())
    assert torch.equal(doubly(layer_of(kind, recompute="layer"), states()), plain)
    # By differences of first gradients: d/dh |g|^2 = 2 H g.
    layer, hidden, step = layer_of(kind), states(), 1e-6
    (grad,) = torch.autograd.grad(layer(hidden).square().sum(), hidden)
    ahead, behind = ((hidden + sign * step * grad).detach().requires_grad_() for sign in (1, -1))
    g1, g2 = (torch.autograd.grad(layer(at).square().sum(), at)[0] for at in (ahead, behind))
    torch.testing.assert_close(plain, (g1 - g2) / step, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [MambaLayer, AttentionLayer, MLPLayer])
def test_second_derivatives_of_delayed_layers_are_refused(kind: type[HybridLayer]) -> None:
    """The weight stands in the delayed backward as an alias: its part of a second gradient went missing silently."""
    layer = layer_of(kind)
    with pytest.raises(StateError, match=r"create_graph=True through delayed weight gradients"), delayed_wgrad(layer):
        doubly(layer, states())
    assert bool(doubly(layer, states()).any())


@pytest.mark.parametrize("name", ["aux_loss", "z_loss"])
def test_second_derivatives_through_attached_losses_are_refused(name: str) -> None:
    """The second backward passes where the loss is attached, too, and added its first gradient once more."""
    layer = layer_of(MoELayer, **{name: 0.1})
    with pytest.raises(StateError, match=r"create_graph=True through attached losses"):
        doubly(layer, states())
    assert bool(doubly(layer.eval(), states()).any())


def test_second_derivatives_through_a_recomputed_norm_are_refused() -> None:
    """The norm that is computed again is a graph of its own: what the first gradient owes to it went missing silently."""
    with pytest.raises(StateError, match=r"create_graph=True through a norm that is computed again"):
        doubly(layer_of(MoELayer, recompute="norm"), states())


def test_second_derivatives_through_a_norm_that_a_graph_does_not_keep_are_refused() -> None:
    hidden, weight = states(), torch.ones(32, dtype=torch.float64, requires_grad=True)

    def layer(hidden: Tensor) -> Tensor:
        with not_kept(lambda x, w: x.square() * w, hidden, weight) as value:
            return value.square()

    with pytest.raises(StateError, match=r"create_graph=True through a norm that is computed again"):
        doubly(layer, hidden)  # type: ignore[arg-type]
