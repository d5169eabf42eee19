"""What only the tape shows: poison, the imitated pool, restored bytes, version counters."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphcap import _torch_private as private
from graphcap.backends.base import Pool
from graphcap.backends.tape import TapeBackend
from graphcap.backends.tape_memory import poison_byte
from graphcap.errors import ForbiddenOpError, ReplayError
from tests.backends.conformance import record

Tensor = torch.Tensor


@pytest.fixture
def backend() -> TapeBackend:
    return TapeBackend(torch.device("cpu"))


@pytest.fixture
def pool(backend: TapeBackend) -> Pool:
    return backend.new_pool()


def is_poison(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return not bool(tensor.any())


# --- poison -----------------------------------------------------------------------------------------------------------


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
EIGHTS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHTS, torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_the_poison_of_each_dtype(backend: TapeBackend, pool: Pool, dtype: torch.dtype) -> None:
    x = torch.ones(8)
    graph, y = record(backend, pool, lambda: x.to(dtype).clone())
    assert is_poison(y.float() if dtype in EIGHTS else y)
    graph.replay()
    assert torch.equal(y.float() if dtype in EIGHTS else y, x if dtype in EIGHTS else x.to(dtype))


def test_poison_is_by_the_dtype_written() -> None:
    assert poison_byte(torch.float32) == 0xFF
    assert poison_byte(torch.int8) == 0
    assert poison_byte(torch.float8_e4m3fnuz) == 0x80


def test_a_value_used_before_the_first_replay_is_nan(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4)
    _, (y, index) = record(backend, pool, lambda: (x + 1, x.argmax()))
    assert is_poison(y)
    assert is_poison(index)
    assert is_poison(y * 2 + x)


def test_views_of_outside_memory_are_not_poisoned(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4, 3)
    before = x.clone()
    _, (view, part, same) = record(backend, pool, lambda: (x.t(), x[1:], x.detach()))
    assert torch.equal(x, before)
    assert torch.equal(view, before.t())
    assert torch.equal(part, before[1:])
    assert same.data_ptr() == x.data_ptr()


def test_a_failed_capture_leaves_poison_too(backend: TapeBackend, pool: Pool) -> None:
    x, kept = torch.randn(4), []
    with pytest.raises(KeyError), backend.capture(pool):
        kept.append(x + 1)
        raise KeyError
    assert is_poison(kept[0])


def test_pool_poison_covers_all_captures(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4)
    first, y = record(backend, pool, lambda: x + 1)
    second, z = record(backend, pool, lambda: y + 1)
    first.replay()
    second.replay()
    assert torch.equal(z, x + 1 + 1)
    pool.poison()
    assert is_poison(y)
    assert is_poison(z)
    first.replay()
    second.replay()
    assert torch.equal(z, x + 1 + 1)


def test_memory_that_is_never_written_stays_poison(backend: TapeBackend, pool: Pool) -> None:
    graph, y = record(backend, pool, lambda: torch.empty(4))
    graph.replay()
    assert is_poison(y)


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_temporaries_are_poisoned_at_the_end_of_a_replay(backend: TapeBackend, pool: Pool) -> None:
    x, addresses = torch.randn(4), []

    def run() -> Tensor:
        temporary = x * 2
        addresses.append(temporary.data_ptr())
        return temporary + 1

    graph, y = record(backend, pool, run)
    graph.replay()
    assert torch.equal(y, x * 2 + 1)
    dead = [memory for memory in graph.born if memory.address == addresses[0]]
    assert len(dead) == 1
    assert bool(dead[0].bytes.view(torch.float32).isnan().all())


def test_what_autograd_saved_is_no_temporary(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4, requires_grad=True)
    grad = torch.ones(4)
    forward, y = record(backend, pool, lambda: x.exp().tanh())
    backward, (g,) = record(backend, pool, lambda: torch.autograd.grad(y, x, grad))
    forward.replay()
    backward.replay()
    twin = x.detach().clone().requires_grad_(True)
    assert torch.equal(g, torch.autograd.grad(twin.exp().tanh(), twin, grad)[0])


def test_a_planted_stale_read_is_found(backend: TapeBackend, pool: Pool) -> None:
    """`reader` reads memory that nobody held when `later` was captured: a real pool gives it to `later`."""
    x = torch.randn(4)
    first, y = record(backend, pool, lambda: [x + 1])
    reader, z = record(backend, pool, lambda: y[0] * 2)
    y.clear()
    later, other = record(backend, pool, lambda: x * 3)
    first.replay()
    reader.replay()
    assert torch.equal(z, (x + 1) * 2), "in the order of capture nothing is stale"
    later.replay()
    reader.replay()
    assert is_poison(z)
    assert torch.equal(other, x * 3)


def test_memory_that_is_held_is_not_reused(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4)
    first, y = record(backend, pool, lambda: x + 1)
    view = y[1:]
    del y
    later, _ = record(backend, pool, lambda: x * 3)
    first.replay()
    later.replay()
    assert torch.equal(view, (x + 1)[1:])


def test_memory_held_by_its_storage_object_is_not_reused(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4)
    first, y = record(backend, pool, lambda: x + 1)
    storage = y.untyped_storage()
    del y
    later, _ = record(backend, pool, lambda: x * 3)
    first.replay()
    later.replay()
    assert torch.equal(torch.empty(0).set_(storage, 0, (4,), (1,)), x + 1)


@pytest.mark.parametrize("both_ways", [False, True])
def test_an_earlier_graph_replayed_again_overwrites_later_memory(both_ways: bool) -> None:
    """Two slots in one pool: the forward of slot 0 runs again while what slot 1 computed is still needed."""
    backend = TapeBackend(torch.device("cpu"), reuse_both_ways=both_ways)
    pool, x = backend.new_pool(), torch.randn(4)
    slot0, _ = record(backend, pool, lambda: (x * 2).relu_() + 1)  # leaves a temporary, which slot1 may live in
    slot1, z = record(backend, pool, lambda: x * 3)
    slot0.replay()
    slot1.replay()
    assert torch.equal(z, x * 3)
    slot0.replay()
    assert is_poison(z) is both_ways


def test_a_graph_without_dead_memory_lends_nothing() -> None:
    backend = TapeBackend(torch.device("cpu"), reuse_both_ways=True)
    pool, x = backend.new_pool(), torch.randn(4)
    first, _y = record(backend, pool, lambda: x * 2)
    later, z = record(backend, pool, lambda: x * 3)
    later.replay()
    first.replay()
    assert torch.equal(z, x * 3)


def test_memory_that_dies_after_the_later_capture_is_not_reused(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4)
    first, y = record(backend, pool, lambda: [x + 1])
    reader, z = record(backend, pool, lambda: y[0] * 2)
    later, _ = record(backend, pool, lambda: x * 3)
    y.clear()
    first.replay()
    later.replay()
    reader.replay()
    assert torch.equal(z, (x + 1) * 2)


def test_another_pool_reuses_nothing(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4)
    first, y = record(backend, pool, lambda: [x + 1])
    reader, z = record(backend, pool, lambda: y[0] * 2)
    y.clear()
    later, _ = record(backend, backend.new_pool(), lambda: x * 3)
    first.replay()
    later.replay()
    reader.replay()
    assert torch.equal(z, (x + 1) * 2)


def test_a_dropped_autograd_graph_frees_its_memory_for_later_captures(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4, requires_grad=True)
    forward, y = record(backend, pool, lambda: [x.exp().tanh()])
    backward, (g,) = record(backend, pool, lambda: torch.autograd.grad(y[0], x, torch.ones(4)))
    y.clear()
    later, _ = record(backend, pool, lambda: x.detach() * 3)
    forward.replay()
    later.replay()
    backward.replay()
    assert is_poison(g)


def test_what_the_graph_reads_stays_alive(backend: TapeBackend, pool: Pool) -> None:
    x = [torch.randn(64)]
    expected = x[0] * 2
    graph, y = record(backend, pool, lambda: x[0] * 2)
    dead = weakref.ref(x[0])
    x.clear()
    assert dead() is None, "the tensor goes, the memory stays"
    noise = [torch.randn(64) for _ in range(8)]
    graph.replay()
    assert torch.equal(y, expected)
    assert len(noise) == 8


# --- outside memory ---------------------------------------------------------------------------------------------------


def test_outside_storages_are_restored_bit_for_bit_after_a_failure(backend: TapeBackend, pool: Pool) -> None:
    layer = nn.BatchNorm1d(3)
    base = torch.randn(6)
    base[1] = float("nan")
    flags, x = torch.tensor([True, False]), torch.randn(5, 3)
    tensors = (base, flags, *layer.parameters(), *layer.buffers())
    before = [tensor.detach().clone() for tensor in tensors]

    def run() -> None:
        layer(x)
        base[2:].add_(1)
        base.mul_(2)
        flags.logical_not_()
        with torch.no_grad():
            layer.weight.zero_()
        x[0].sum().item()

    with pytest.raises(ForbiddenOpError):
        record(backend, pool, run)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach().view(-1).view(torch.uint8), old.view(-1).view(torch.uint8))


def test_versions_do_not_move(backend: TapeBackend, pool: Pool) -> None:
    layer, x = nn.BatchNorm1d(3), torch.randn(5, 3)
    counter, kept = torch.zeros(2), {}

    def run() -> Tensor:
        y = layer(x)
        counter.add_(1)
        kept.update({id(t): (t, t._version) for t in (y, x, counter, *layer.parameters(), *layer.buffers())})
        return y

    graph, _ = record(backend, pool, run)
    pool.poison()
    graph.replay()
    graph.replay()
    assert [tensor._version for tensor, _ in kept.values()] == [version for _, version in kept.values()]
    assert torch.equal(counter, torch.full_like(counter, 2))


def test_growing_outside_memory_is_refused_before_it_happens(backend: TapeBackend, pool: Pool) -> None:
    x = torch.ones(2)
    address = x.data_ptr()
    with pytest.raises(ForbiddenOpError, match="by address"):
        record(backend, pool, lambda: x.resize_(1000))
    assert x.data_ptr() == address
    assert tuple(x.shape) == (2,)


def test_growing_outside_memory_by_out_is_refused(backend: TapeBackend, pool: Pool) -> None:
    x, out = torch.ones(8), torch.empty(0)
    with pytest.raises(ForbiddenOpError, match="resized"):
        record(backend, pool, lambda: torch.add(x, 1, out=out))
    assert out.untyped_storage().nbytes() == 0


def test_growing_memory_born_in_the_capture(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(8)
    graph, y = record(backend, pool, lambda: torch.empty(1).resize_(8).copy_(x))
    assert is_poison(y)
    graph.replay()
    assert torch.equal(y, x)


def test_memory_that_was_freed_after_the_capture_is_noticed(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(8)
    graph, _ = record(backend, pool, lambda: x + 1)
    graph.replay()
    x.untyped_storage().resize_(0)
    with pytest.raises(ReplayError, match="by address"):
        graph.replay()


def test_overlapping_storages_are_restored_last_touched_first(backend: TapeBackend, pool: Pool) -> None:
    x = torch.zeros(4)
    proxy = torch.empty(0).set_(private.storage_on_address(x.data_ptr(), 16, x.device), 0, (4,), (1,))
    graph, _ = record(backend, pool, lambda: (x.add_(1), proxy.add_(1)))
    assert not x.any()
    graph.replay()
    assert torch.equal(x, torch.full((4,), 2.0))


def test_a_proxy_on_the_same_memory(backend: TapeBackend, pool: Pool) -> None:
    """A second storage object on a static output's memory, as the cut makes them: same memory, and it stays alive."""
    x = torch.randn(8)
    first, y = record(backend, pool, lambda: x + 1)
    storage = private.storage_on_address(y.data_ptr(), y.untyped_storage().nbytes(), y.device)
    proxy = torch.empty(0).set_(storage, 0, (8,), (1,))
    second, z = record(backend, pool, lambda: torch.bernoulli(proxy.sigmoid()) + proxy)
    torch.manual_seed(0)
    first.replay()
    second.replay()
    torch.manual_seed(0)
    assert torch.equal(z, torch.bernoulli((x + 1).sigmoid()) + (x + 1))


def test_reset_frees_the_memory(backend: TapeBackend, pool: Pool) -> None:
    big = torch.randn(1000)
    graph, y = record(backend, pool, lambda: big + 1)
    graph.replay()
    dead = weakref.ref(graph.born[0])
    del y
    assert dead() is not None
    graph.reset()
    assert dead() is None


def test_a_dropped_graph_frees_the_memory(backend: TapeBackend, pool: Pool) -> None:
    graph, y = record(backend, pool, lambda: torch.ones(3) + 1)
    dead = weakref.ref(graph.born[0])
    del y, graph
    assert dead() is None
    pool.poison()


# --- kernels that refuse poison ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda y: torch.multinomial(y.softmax(-1), 2).float(),
        lambda y: torch.bernoulli(y.sigmoid()),
        lambda y: F.binary_cross_entropy(y.sigmoid(), torch.full_like(y, 0.5)),
        lambda y: y.new_full((4,), 8).long() // (y[0] * 0 + 2).long(),
        lambda y: torch.zeros_like(y).bernoulli_(y.sigmoid()),
        lambda y: torch.add(torch.bernoulli(y.sigmoid()), y),
    ],
    ids=["multinomial", "bernoulli", "bce", "division", "bernoulli_", "derived"],
)
def test_a_later_capture_computes_on_poison(
    backend: TapeBackend, pool: Pool, use: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 4)
    first, y = record(backend, pool, lambda: x + 1)
    second, z = record(backend, pool, lambda: use(y))
    assert is_poison(z)
    torch.manual_seed(0)
    first.replay()
    second.replay()
    torch.manual_seed(0)
    expected = use(x + 1)
    assert torch.equal(z, expected)
    assert z.stride() == expected.stride()
    assert torch.isfinite(z).all()


class _Resample(torch.autograd.Function):
    """A backward whose kernel raises on poison."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        p = x.sigmoid()
        ctx.save_for_backward(p)
        return p * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return grad * torch.bernoulli(p)


def test_a_backward_that_refuses_poison(backend: TapeBackend, pool: Pool) -> None:
    x, grad = torch.randn(16, requires_grad=True), torch.randn(16)
    forward, y = record(backend, pool, lambda: _Resample.apply(x))
    backward, (g,) = record(backend, pool, lambda: torch.autograd.grad(y, x, grad))
    assert is_poison(g)
    torch.manual_seed(0)
    forward.replay()
    backward.replay()
    torch.manual_seed(0)
    assert torch.equal(g, grad * torch.bernoulli(x.detach().sigmoid()))


def test_genuine_errors_surface_on_poison_too(backend: TapeBackend, pool: Pool) -> None:
    x = torch.randn(4, 3)
    _, y = record(backend, pool, lambda: x + 1)
    with pytest.raises(RuntimeError, match="shape"):
        record(backend, pool, lambda: y @ y)


def test_genuine_errors_on_values_surface(backend: TapeBackend, pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="p_in"):
        record(backend, pool, lambda: torch.bernoulli(torch.full((3,), 2.0)))
    x = torch.full((3,), 1.0)
    first, y = record(backend, pool, lambda: x + 1)
    first.replay()
    with pytest.raises(RuntimeError, match="p_in"):
        record(backend, pool, lambda: torch.bernoulli(y))
