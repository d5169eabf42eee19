"""Every kind of Transformer Engine layer behind the drop-in, whole and layer by layer, bit for bit as without graphs."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.te.kit import KINDS, RECIPES, Case, train

pytestmark = pytest.mark.gpu

ATTENTION = ("mha", "transformer")


def _cases() -> list[Case]:
    high = [Case(kind) for kind in KINDS] + [Case(kind, dtype=torch.float32) for kind in ("linear", *ATTENTION)]
    low = [
        Case(kind, recipe, caching)
        for kind in KINDS
        for recipe in RECIPES
        for caching in (False, True)
        if not (kind == "linear_op" and (caching or recipe == "block"))  # te.ops has no weight cache, and no block GEMM
    ]
    primary = [
        Case(kind, recipe, caching, primary=True)
        for kind in ("linear", "layernorm_mlp", "transformer")
        for recipe in RECIPES
        for caching in (False, True)
    ]
    return [*high, *low, *primary]


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_three_modes_are_equal(case: Case) -> None:
    eager = train(case, "none")
    eager.require_alive()
    if case.kind in ATTENTION:
        assert not train(case, "none").differs(eager), "eager differs from itself: this attention backend can't be judged"
    for mode in ("whole", "each"):
        assert train(case, mode).differs(eager) == [], mode


@pytest.mark.parametrize("caching", [False, True])
def test_state_moves_where_it_should(caching: bool) -> None:
    """The comparison above would pass if no scale ever moved."""
    seen = train(Case("linear", "delayed", caching), "each").tensors
    scales = [t for name, t in seen.items() if name.endswith("scaling_fwd.scale")]
    assert len({tuple(t.tolist()) for t in scales}) > 2
