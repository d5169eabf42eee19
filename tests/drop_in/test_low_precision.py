"""The low-precision arguments on the reference in plain torch: outputs, gradients, scales, histories are eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcap import InputMismatch, make_graphed_callables
from graphcap.fp8_meta import QuantSpec
from graphcap.fp8_reference import RefFp8Linear, RefManager, RefRecipe
from graphcap.testing import deterministic
from tests.flow.twins import drawn

WIDTH = 16
RECIPE = RefRecipe(history_len=4)


def layers_of(manager: RefManager, count: int = 2) -> tuple[nn.Module, ...]:
    torch.manual_seed(5)
    return tuple(RefFp8Linear(WIDTH, WIDTH, manager, history_len=4) for _ in range(count))


def state(manager: RefManager, layers: tuple[nn.Module, ...]) -> dict[str, Tensor]:
    return {f"{n}.{k}": v for n, layer in enumerate(layers) for k, v in manager.read(layer).items() if "weight" not in k}


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("signed", [None, [1, 2, -2, -1, 1, 2, -2, -1]], ids=str)
@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.filterwarnings("ignore:make_graphed_callables:DeprecationWarning")
def test_equals_eager(caching: bool, signed: Any, old_names: bool) -> None:
    ours, theirs = RefManager(), RefManager()
    mine, twins = layers_of(ours), layers_of(theirs)
    new = ("enabled", "recipe", "cache_quantized_params")
    names = ("fp8_enabled", "fp8_recipe", "fp8_weight_caching") if old_names else new
    count = 1 if signed is None else 2
    samples = ((drawn(0, 8, WIDTH),),) * (2 * count)
    made = make_graphed_callables(
        mine, samples, _order=signed, backend="tape", **dict(zip(names, (True, RECIPE, caching), strict=True))
    )
    spec = QuantSpec(recipe=RECIPE, cache_weights=caching)
    with deterministic("cpu"):
        for step in range(4):
            for m in range(2):
                found = []
                for manager, layers, graphed in ((ours, mine, True), (theirs, twins, False)):
                    calls: Any = [made[0], made[1]] if signed is None else [made[m], made[2 + m]]
                    x = drawn(10 * step + m, 8, WIDTH)
                    kwargs = {"is_first_microbatch": m == 0} if caching else {}
                    with manager.autocast(spec):
                        h: Tensor = x
                        for call in calls if graphed else layers:
                            h = call(h, **kwargs)
                    h.square().sum().backward()
                    record = {"out": h.detach().clone(), "input": x.grad, **state(manager, layers)}
                    record |= {f"{n}.weight": next(layer.parameters()).grad for n, layer in enumerate(layers)}
                    found.append(record)
                for name, value in found[1].items():
                    assert value is not None and bool(value.isfinite().all())
                    assert torch.equal(found[0][name], value), (step, m, name)  # type: ignore[arg-type]
            with torch.no_grad():
                for layer in (*mine, *twins):
                    layer.weight.sub_(0.01 * layer.weight.grad)  # type: ignore[union-attr, operator]
                    layer.weight.grad = None  # type: ignore[union-attr]


def test_enabled_per_module() -> None:
    """The second layer runs in full precision, whatever the region around the call says of the first."""
    manager = RefManager()
    layers = layers_of(manager)
    plain = copy.deepcopy(layers[1].weight)
    made = make_graphed_callables(
        layers, ((drawn(0, 8, WIDTH),),) * 2, enabled=(True, False), recipe=RECIPE, backend="tape"
    )
    with manager.autocast(QuantSpec(recipe=RECIPE)):
        made[0](drawn(1, 8, WIDTH))
    x = drawn(2, 8, WIDTH)
    assert torch.equal(made[1](x), x @ plain.t())  # type: ignore[operator]


def test_a_call_outside_of_the_region_is_refused() -> None:
    manager = RefManager()
    (layer,) = layers_of(manager, 1)
    make_graphed_callables(layer, (drawn(0, 8, WIDTH),), enabled=True, recipe=RECIPE, backend="tape")
    with pytest.raises(InputMismatch, match="quantisation"):
        layer(drawn(1, 8, WIDTH))
