"""Every kind of Transformer Engine layer behind the drop-in, whole and layer by layer, bit for bit as without graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphcap import GraphcapError, make_graphed_callables
from tests.gpu.te.kit import (
    BATCH,
    BF16,
    KINDS,
    RECIPES,
    SIZE,
    Case,
    attention_backend,
    choose_attention_again,
    layer,
    train,
)

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
    _require_equal(case, "unfused" if case.dtype is torch.float32 else "fused 1")


@pytest.mark.parametrize("case", [Case(kind, recipe) for kind in ATTENTION for recipe in (None, "delayed")], ids=str)
def test_unfused_attention_is_equal(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    choose_attention_again()
    _require_equal(case, "unfused")
    choose_attention_again()


def _require_equal(case: Case, backend: str) -> None:
    """Eager equals itself (with attention, on a backend that the test names), then both ways to capture equal eager."""
    eager = train(case, "none")
    eager.require_alive()
    if case.kind in ATTENTION:
        assert attention_backend() == backend
        assert not train(case, "none").differs(eager), "eager differs from itself: this attention backend can't be judged"
    for mode in ("whole", "each"):
        assert train(case, mode).differs(eager) == [], mode
        if case.kind in ATTENTION:
            assert attention_backend() == backend


def test_another_attention_backend_under_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old cuDNN versions do this for lengths that are no multiple of 128; here it is made to happen with any version."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    choose = utils.get_attention_backend

    def chosen(parameters: Any) -> Any:
        with monkeypatch.context() as changed:
            if parameters.cuda_graph:
                changed.setenv("NVTE_FUSED_ATTN", "0")
            return choose(parameters)

    monkeypatch.setattr(utils, "get_attention_backend", chosen)
    m = layer("mha")
    sample = torch.ones(128, BATCH, SIZE, device="cuda", dtype=BF16, requires_grad=True)
    expected = m(sample).detach().clone()
    with pytest.raises(GraphcapError, match="UnfusedDotProductAttention while it is captured and FusedAttention"):
        make_graphed_callables(m, (sample,))
    assert torch.equal(m(sample), expected)  # as before


@pytest.mark.parametrize("length", [32, 96])
def test_short_sequences_are_equal_or_refused(length: int) -> None:
    """Whatever this cuDNN's version makes TE choose."""
    torch.manual_seed(3)
    m, eager = layer("mha"), layer("mha")
    eager.load_state_dict(m.state_dict())
    sample = torch.randn(length, BATCH, SIZE, device="cuda", dtype=BF16).requires_grad_()
    y = eager(sample)
    y.backward(torch.ones_like(y))
    seen, given = attention_backend(), sample.detach().clone().requires_grad_()
    refused = ""
    try:
        make_graphed_callables(m, (sample.detach().clone().requires_grad_(),))
    except GraphcapError as error:
        refused = str(error)
    assert not refused or "while it is captured" in refused
    z = m(given)  # behind a graph, or eager as before
    z.backward(torch.ones_like(z))
    assert attention_backend() == seen
    assert torch.equal(y, z) and torch.equal(given.grad, sample.grad)


@pytest.mark.parametrize("caching", [False, True])
def test_state_moves_where_it_should(caching: bool) -> None:
    """The comparison above would pass if no scale ever moved."""
    seen = train(Case("linear", "delayed", caching), "each").tensors
    scales = [t for name, t in seen.items() if name.endswith("scaling_fwd.scale")]
    assert len({tuple(t.tolist()) for t in scales}) > 2


def test_what_torch_compiles_inside_stays_compiled() -> None:
    command = [sys.executable, "-m", "tests.gpu.te.compiled"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.splitlines()[-1] == "equal", found.stdout
