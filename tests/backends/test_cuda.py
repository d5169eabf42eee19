"""CUDA graphs against the conformance suite; `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphcap.backends.base import Pool
from graphcap.backends.cuda import CudaBackend, raise_failure, unique
from graphcap.errors import CaptureError, ForbiddenOpError
from tests.backends.conformance import Conformance, record


@pytest.mark.gpu
class TestCuda(Conformance):
    @pytest.fixture
    def backend(self) -> CudaBackend:
        return CudaBackend(torch.device("cuda"))

    @pytest.fixture(scope="class", autouse=True)
    def _warm(self) -> None:
        """Libraries make handles at the first call of each thread (also the engine's), which no capture allows."""
        device = torch.device("cuda")
        torch.fft.rfft(torch.randn(4, 8, device=device))
        for dtype in (torch.float32, torch.bfloat16):
            net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device, dtype)
            net(torch.randn(4, 8, device=device, dtype=dtype)).sum().backward()
        torch.cuda.synchronize()

    def test_a_sync_that_no_operator_announces(self, backend: CudaBackend, pool: Pool) -> None:
        """It invalidates the capture itself; the process must draw random numbers and capture afterwards."""
        x = self.tensor(backend, 64)

        def run() -> torch.Tensor:
            y = x + torch.rand_like(x)
            torch.cuda.synchronize()
            return y

        state = torch.cuda.get_rng_state()
        with pytest.raises(ForbiddenOpError, match="invalidated"):
            record(backend, pool, run)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        torch.rand(4, device=backend.device)
        self.usable(backend, pool)
        self.usable(backend, backend.new_pool())

    def test_graphs_from_before_a_failure_follow_the_seed(self, backend: CudaBackend, pool: Pool) -> None:
        """Recovery must not give the generator a new state object: earlier graphs hold the old one."""
        x = torch.ones(256, device=backend.device)
        graph, y = record(backend, pool, lambda: torch.nn.functional.dropout(x, 0.5))
        with pytest.raises(ForbiddenOpError):
            record(backend, pool, lambda: (torch.rand_like(x), torch.cuda.synchronize()))
        for seed in range(2):
            torch.manual_seed(seed)
            graph.replay()
            torch.manual_seed(seed)
            assert torch.equal(y, torch.nn.functional.dropout(x, 0.5))

    def test_a_swallowed_sync(self, backend: CudaBackend, pool: Pool) -> None:
        x = self.tensor(backend, 64)

        def run() -> torch.Tensor:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                pass
            return x + 1

        with pytest.raises(CaptureError):
            record(backend, pool, run)
        self.usable(backend, pool)

    def test_a_sync_in_a_backward(self, backend: CudaBackend, pool: Pool) -> None:
        """Backward nodes run on the engine's device thread; the refusal must reach them."""

        class Syncs(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
                return grad * grad.sum().item()

        x = self.tensor(backend, 4).requires_grad_(True)
        grad = torch.ones(4, device=backend.device)
        _, y = record(backend, pool, lambda: Syncs.apply(x))
        with pytest.raises(ForbiddenOpError) as info:
            record(backend, pool, lambda: torch.autograd.grad(y, x, grad))
        assert "scalar read" in str(info.value), "found by torch only: the modes did not reach the device thread"
        self.usable(backend, pool)

    def test_out_of_memory(self, backend: CudaBackend, pool: Pool) -> None:
        x = self.tensor(backend, 4)
        total = torch.cuda.get_device_properties(backend.device).total_memory
        with pytest.raises(CaptureError, match="out of memory") as info:
            record(backend, pool, lambda: (x + 1, torch.zeros(total, device=backend.device)))
        assert isinstance(info.value.__cause__, torch.OutOfMemoryError)
        self.usable(backend, pool)

    def test_a_second_thread_may_allocate_meanwhile(self, backend: CudaBackend, pool: Pool) -> None:
        import threading

        x, errors = self.tensor(backend, 4), []

        def busy() -> None:
            try:
                torch.empty(64 << 20, dtype=torch.uint8, device=backend.device)
            except Exception as error:
                errors.append(error)

        def run() -> torch.Tensor:
            thread = threading.Thread(target=busy)
            thread.start()
            thread.join()
            return x + 1

        graph, y = record(backend, pool, run)
        graph.replay()
        assert torch.equal(y, x + 1)
        assert not errors

    def test_the_pool_outlives_its_graphs(self, backend: CudaBackend, pool: Pool) -> None:
        x = self.tensor(backend, 4)
        graph, y = record(backend, pool, lambda: x + 1)
        graph.reset()
        torch.cuda.empty_cache()
        assert y.numel() == 4
        self.usable(backend, pool)

    def test_replay_waits_for_an_event_of_another_stream(self, backend: CudaBackend, pool: Pool) -> None:
        x = self.tensor(backend, 1 << 22)
        graph, y = record(backend, pool, lambda: x * 2)
        side = torch.cuda.Stream(backend.device)
        side.wait_stream(torch.cuda.current_stream())
        key = backend.stream_key()
        with torch.cuda.stream(side):
            assert backend.stream_key() != key
            for _ in range(20):
                x.add_(1)
            event = backend.record_event()
        event.wait()
        graph.replay()
        assert torch.equal(y, x * 2)

    def test_a_session_captures_many_graphs(self, backend: CudaBackend, pool: Pool) -> None:
        layers = [nn.Linear(16, 16, device=backend.device) for _ in range(8)]
        x = self.tensor(backend, 4, 16)
        with torch.no_grad(), backend.session():
            h, graphs = x, []
            for layer in layers:
                layer(h)  # warm
            for layer in layers:
                graph, h = record(backend, pool, lambda layer=layer, h=h: layer(h).relu())
                graphs.append(graph)
        for graph in graphs:
            graph.replay()
        with torch.no_grad():
            expected = x
            for layer in layers:
                expected = layer(expected).relu()
        assert torch.equal(h, expected)


# --- without a GPU ----------------------------------------------------------------------------------------------------


def test_importing_the_backend_starts_nothing() -> None:
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


def test_failures_are_worded() -> None:
    refused = ForbiddenOpError("refused")
    with pytest.raises(ForbiddenOpError, match="refused"):
        raise_failure(None, refused)
    with pytest.raises(ForbiddenOpError, match="refused") as info:
        raise_failure(KeyError("later"), refused)
    assert isinstance(info.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="mine"):
        raise_failure(KeyError("mine"), None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        raise_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None)
    with pytest.raises(CaptureError, match="out of memory") as oom:
        raise_failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), None)
    assert isinstance(oom.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(ForbiddenOpError, match="invalidated") as sync:
        raise_failure(RuntimeError("CUDA error: operation not permitted when stream is capturing"), None)
    assert isinstance(sync.value.__cause__, RuntimeError)


def test_generators_without_repetitions() -> None:
    own = torch.Generator()
    assert unique((torch.default_generator, own, own, torch.default_generator)) == [torch.default_generator, own]
