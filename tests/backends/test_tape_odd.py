"""Tensors that the tape can't describe, kernels of the user, modes of the user, errors at replay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphcap.backends.base import Pool
from graphcap.backends.tape import TapeBackend
from graphcap.backends.tape_fake import fake_outputs
from graphcap.errors import CaptureError, ForbiddenOpError, ReplayError
from tests.backends.conformance import record

Tensor = torch.Tensor


@pytest.fixture
def backend() -> TapeBackend:
    return TapeBackend(torch.device("cpu"))


@pytest.fixture
def pool(backend: TapeBackend) -> Pool:
    return backend.new_pool()


# --- what the tape can't describe -------------------------------------------------------------------------------------


class _Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("the refusal must come first")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: _Wrapper(torch.ones(2)), "_Wrapper"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
    ids=["wrapper", "sparse", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_fixed_memory(
    backend: TapeBackend, pool: Pool, make: Callable[[], Tensor], match: str
) -> None:
    odd = make()
    with pytest.raises(ForbiddenOpError, match=match):
        record(backend, pool, lambda: odd * 2)
    x = torch.ones(2)
    graph, y = record(backend, pool, lambda: x * 2)
    graph.replay()
    assert torch.equal(y, x * 2)


def test_meta_tensors_are_only_shapes(backend: TapeBackend, pool: Pool) -> None:
    x, meta = torch.ones(2), torch.ones(2, device="meta")
    graph, y = record(backend, pool, lambda: x * (meta + torch.zeros(2, device="meta")).numel())
    assert graph.operations == 1
    graph.replay()
    assert torch.equal(y, x * 2)
    with pytest.raises(ForbiddenOpError, match="meta"):
        record(backend, pool, lambda: x * meta)


def test_higher_order_operators_are_refused(backend: TapeBackend, pool: Pool) -> None:
    x = torch.ones(2)
    with pytest.raises(ForbiddenOpError, match="cond"):
        record(backend, pool, lambda: torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)))


def test_a_functorch_transform_is_refused(backend: TapeBackend, pool: Pool) -> None:
    def run(x: Tensor) -> Tensor:
        return record(backend, pool, lambda: x * 2)[1]

    with pytest.raises(CaptureError, match="functorch"):
        torch.func.vmap(run)(torch.ones(2, 2))


def test_capture_under_inference_mode(backend: TapeBackend, pool: Pool) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.inference_mode():
        graph, y = record(backend, pool, lambda: F.one_hot(layer(x).argmax(-1), 4) + layer(x))
        graph.replay()
        assert torch.equal(y, F.one_hot(layer(x).argmax(-1), 4) + layer(x))
    with pytest.raises(ForbiddenOpError, match="nonzero"), torch.inference_mode():
        record(backend, pool, lambda: torch.where(x > 0))


def test_host_data_meets_device_tensors(backend: TapeBackend, pool: Pool) -> None:
    x = torch.ones(4)
    with pytest.raises(ForbiddenOpError, match="host data"):
        record(backend, pool, lambda: x * torch.from_numpy(np.ones(4, "f")))


def test_a_failed_capture_keeps_nothing_alive(backend: TapeBackend, pool: Pool) -> None:
    """Garbage collection may be off for long (a session): reference counts alone must free what the failure held."""
    x, alive = torch.randn(4), []

    def run() -> Tensor:
        y = x + 1
        alive.append(weakref.ref(y))
        y.sum().item()
        return y

    gc.disable()
    try:
        for swallow in (False, True):
            try:
                record(backend, pool, lambda swallow=swallow: swallowed(run) if swallow else run())
            except ForbiddenOpError:
                pass
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


def swallowed(run: Callable[[], Tensor]) -> None:
    try:
        run()
    except ForbiddenOpError:
        pass


def test_modes_of_the_user_under_a_capture(backend: TapeBackend, pool: Pool) -> None:
    """They see the user's operators, as in eager, and none of the tape's own."""
    seen: list[str] = []

    class Sees(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(4)
    with Sees():
        graph, y = record(backend, pool, lambda: x * 2 + 1)
        graph.replay()
    assert seen == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert torch.equal(y, x * 2 + 1)


def test_a_default_device_does_not_matter(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4)
    with torch.device("meta"):
        graph, y = record(backend, pool, lambda: x * 2)
        graph.replay()
    assert torch.equal(y, x * 2)


def test_an_error_at_replay_names_the_operator(backend: TapeBackend, pool: Pool) -> None:
    table, index = torch.randn(4, 2), torch.tensor([1])
    graph, _ = record(backend, pool, lambda: F.embedding(index, table))
    index.fill_(9)
    with pytest.raises(IndexError) as info:
        graph.replay()
    assert "aten.embedding.default" in info.value.__notes__[0]


# --- kernels of the user ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    library = torch.library.Library("graphcap_tests", "FRAGMENT")
    library.define("by_mode(Tensor x) -> Tensor")
    library.impl("by_mode", lambda x: x * (2 if x.requires_grad and torch.is_grad_enabled() else 3), "CPU")
    library.define("expanded(Tensor x) -> Tensor")
    library.impl("expanded", lambda x: (x.sum(0, keepdim=True) + 1).expand(3, 4), "CPU")
    library.define("secretly(Tensor x, Tensor seen) -> Tensor")
    library.impl("secretly", lambda x, seen: (seen.add_(x), x * 2)[1], "CPU")
    yield torch.ops.graphcap_tests
    library._destroy()


def test_a_kernel_that_asks_for_gradients(backend: TapeBackend, pool: Pool, kernels: Any) -> None:
    """As depthwise convolution does, which picks its algorithm so."""
    x = torch.randn(4, requires_grad=True)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            graph, y = record(backend, pool, lambda: kernels.by_mode(x))
            expected = kernels.by_mode(x)
        graph.replay()
        assert torch.equal(y, expected)
        assert torch.equal(y, x * (2 if enabled else 3))


def test_a_kernel_whose_result_is_expanded(backend: TapeBackend, pool: Pool, kernels: Any) -> None:
    x = torch.randn(3, 4)
    graph, y = record(backend, pool, lambda: kernels.expanded(x))
    graph.replay()
    assert y.stride() == (0, 1)
    assert torch.equal(y, kernels.expanded(x))


def test_a_kernel_that_writes_what_its_schema_calls_read_only(backend: TapeBackend, pool: Pool, kernels: Any) -> None:
    x, seen = torch.randn(4), torch.zeros(4)
    graph, _ = record(backend, pool, lambda: kernels.secretly(x, seen))
    assert not seen.any()
    graph.replay()
    graph.replay()
    assert torch.equal(seen, x + x)


def test_a_shape_that_depends_on_values_unannounced(backend: TapeBackend, pool: Pool) -> None:
    library = torch.library.Library("graphcap_tests_dynamic", "FRAGMENT")
    library.define("positive(Tensor x) -> Tensor")
    library.impl("positive", lambda x: x[x > 0].clone(), "CPU")
    x = torch.ones(4)
    graph, _ = record(backend, pool, lambda: torch.ops.graphcap_tests_dynamic.positive(x))
    x[0] = -1
    with pytest.raises(ReplayError, match="shape"):
        graph.replay()
    library._destroy()


def test_fake_outputs_hand_back_what_is_written() -> None:
    x = torch.zeros(3)
    result = fake_outputs(torch.ops.aten.bernoulli_.float, (x, 0.5), {}, ValueError())
    assert result is x
