"""What every backend must do; run by test_tape.py and, with the marker gpu, by test_cuda.py.

Everything is judged against eager from the same state, bit for bit, on finite values.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from graphcap.backends.base import Backend, Graph, Pool
from graphcap.errors import CaptureError, ForbiddenOpError, ReplayError
from tests.backends.modules import Autocast, Checkpointed, Drawing, Squared
from tests.backends.refusal_rows import LINES, Inputs, Line

Tensor = torch.Tensor


def record(backend: Backend, pool: Pool, run: Callable[[], object], **options: object) -> tuple[Graph, object]:
    """Capture `run()`; returns the graph and what it returned."""
    with backend.capture(pool, **options) as graph:
        result = run()
    return graph, result


def same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.isfinite(a).all()) and torch.equal(a, b)


def tensors(result: object) -> list[Tensor]:
    """The tensors of a result; torch's named tuples (topk, sort) are no pytrees."""
    plain = tuple(result) if isinstance(result, tuple) else result
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def generator_of(backend: Backend) -> torch.Generator:
    if backend.device.type == "cuda":
        return torch.cuda.default_generators[backend.device.index or 0]
    return torch.default_generator


class Conformance:
    """Subclasses give the fixture `backend`."""

    @pytest.fixture
    def pool(self, backend: Backend) -> Pool:
        return backend.new_pool()

    def tensor(self, backend: Backend, *size: int) -> Tensor:
        return torch.randn(*size, device=backend.device)

    # --- what a replay reads ---

    def test_replay_reads_changed_inputs(self, backend: Backend, pool: Pool) -> None:
        x, w = self.tensor(backend, 5, 4), self.tensor(backend, 4, 3)
        with backend.session():
            graph, y = record(backend, pool, lambda: F.gelu(x @ w).sum(0))
        for _ in range(3):
            x.copy_(self.tensor(backend, 5, 4))
            graph.replay()
            assert same(y, F.gelu(x @ w).sum(0))

    def test_scalars_are_frozen(self, backend: Backend, pool: Pool) -> None:
        x, factor = self.tensor(backend, 4), 2.0
        graph, y = record(backend, pool, lambda: x * factor)
        factor = 3.0
        graph.replay()
        assert same(y, x * 2.0)

    def test_a_rebound_weight_is_not_followed(self, backend: Backend, pool: Pool) -> None:
        layer = nn.Linear(4, 4).to(backend.device)
        x, old = self.tensor(backend, 2, 4), copy.deepcopy(layer)
        with torch.no_grad():
            graph, y = record(backend, pool, lambda: layer(x))
        layer.weight.data = torch.zeros_like(layer.weight)
        graph.replay()
        assert same(y, old(x))
        assert not torch.equal(y, layer(x))

    def test_a_weight_updated_in_place_is_followed(self, backend: Backend, pool: Pool) -> None:
        layer = nn.Linear(4, 4).to(backend.device)
        x = self.tensor(backend, 2, 4)
        with torch.no_grad():
            graph, y = record(backend, pool, lambda: layer(x))
            layer.weight.mul_(3.0)
            graph.replay()
            assert same(y, layer(x))

    def test_python_does_not_run_again(self, backend: Backend, pool: Pool) -> None:
        x, calls = self.tensor(backend, 4), []

        def run() -> Tensor:
            calls.append(1)
            return x + 1

        graph, _ = record(backend, pool, run)
        graph.replay()
        graph.replay()
        assert len(calls) == 1

    def test_results_keep_their_address(self, backend: Backend, pool: Pool) -> None:
        x = self.tensor(backend, 4)
        graph, y = record(backend, pool, lambda: x + 1)
        address = y.data_ptr()
        graph.replay()
        assert y.data_ptr() == address
        assert same(y, x + 1)

    # --- in place, buffers, views ---

    def test_in_place_on_outside_memory(self, backend: Backend, pool: Pool) -> None:
        counter, x = torch.zeros(3, device=backend.device), self.tensor(backend, 3)
        graph, _ = record(backend, pool, lambda: counter.add_(x))
        assert torch.equal(counter, torch.zeros_like(counter))
        expected = torch.zeros_like(counter)
        for _ in range(3):
            graph.replay()
            expected.add_(x)
            assert same(counter, expected)

    def test_a_view_of_outside_memory_is_written_through(self, backend: Backend, pool: Pool) -> None:
        table, x = self.tensor(backend, 4, 3), self.tensor(backend, 3)
        before = table.clone()
        graph, row = record(backend, pool, lambda: table[1].copy_(x))
        assert torch.equal(table, before)
        graph.replay()
        assert same(table[1], x)
        assert same(table[2], before[2])
        assert row.data_ptr() == table[1].data_ptr()

    def test_batch_norm_buffers(self, backend: Backend, pool: Pool) -> None:
        layer = nn.BatchNorm1d(6).to(backend.device)
        twin, x = copy.deepcopy(layer), self.tensor(backend, 8, 6)
        graph, y = record(backend, pool, lambda: layer(x).detach())
        for ours, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours, theirs), "the capture left something in the buffers"
        for _ in range(3):
            x.copy_(self.tensor(backend, 8, 6))
            graph.replay()
            assert same(y, twin(x).detach())
            for ours, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
                assert torch.equal(ours, theirs)

    @pytest.mark.parametrize(
        "run",
        [
            lambda x: x.t().reshape(-1) * 2,
            lambda x: x.unflatten(1, (2, 3)).transpose(0, 1).contiguous(),
            lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
            lambda x: x.expand(3, 4, 6).sum(0),
            lambda x: x.clone().view(torch.int32) & 0x7FFFFFFF,
            lambda x: x[:, ::2].clone().t_().mul_(2),
            lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
            lambda x: torch.fft.rfft(x).conj().mul(2).abs(),
            lambda x: (lambda z: torch.view_as_real(z @ z.conj().t()))(torch.complex(x, x + 1)),
            lambda x: torch.stack(torch._foreach_mul([x, x + 1], 2.0)),
            lambda x: torch.where(x > 0, x, -x).to(torch.bfloat16).float(),
        ],
        ids=["t", "unflatten", "chunk", "expand", "dtype", "t_", "out", "conj", "conj mm", "foreach", "bf16"],
    )
    def test_views_and_shapes(self, backend: Backend, pool: Pool, run: Callable[[Tensor], Tensor]) -> None:
        x = self.tensor(backend, 4, 6)
        run(x)  # makes cuFFT's plan
        graph, y = record(backend, pool, lambda: run(x))
        for _ in range(2):
            x.copy_(self.tensor(backend, 4, 6))
            graph.replay()
            assert same(y.float(), run(x).float())
            assert y.stride() == run(x).stride()

    # --- forward and backward ---

    @staticmethod
    def train_graphs(
        backend: Backend, pool: Pool, module: nn.Module, x: Tensor, grad: Tensor
    ) -> tuple[Graph, Graph, Tensor, tuple[Tensor, ...]]:
        """A forward and a backward graph of module(x), the static output, the gradients of x and the parameters."""
        leaves = (x, *module.parameters())
        forward, y = record(backend, pool, lambda: module(x))
        backward, grads = record(backend, pool, lambda: torch.autograd.grad(y, leaves, grad))
        pool.poison()
        return forward, backward, y.detach(), grads

    def check_training(
        self, backend: Backend, pool: Pool, module: nn.Module, make: Callable[[], Tensor], steps: int = 3
    ) -> list[Tensor]:
        """Graphs against an eager twin, from the same generator states; returns the outputs of the steps."""
        # cuBLAS, cuDNN and the allocator must be warm before a real capture.
        warm = copy.deepcopy(module)
        with backend.session(), torch.random.fork_rng():
            for _ in range(2):
                warm(make().requires_grad_(True)).sum().backward()
        twin = copy.deepcopy(module)
        x = make().requires_grad_(True)
        grad = torch.empty_like(twin(x))
        twin = copy.deepcopy(module)
        with backend.session():
            forward, backward, y, grads = self.train_graphs(backend, pool, module, x, grad)
        outputs = []
        for step in range(steps):
            value, cotangent = make(), torch.randn_like(grad)
            with torch.no_grad():
                x.copy_(value)
                grad.copy_(cotangent)
            torch.manual_seed(step)
            forward.replay()
            ours = y.clone()
            backward.replay()
            torch.manual_seed(step)
            leaf = value.clone().requires_grad_(True)
            theirs = twin(leaf)
            expected = torch.autograd.grad(theirs, (leaf, *twin.parameters()), cotangent)
            assert same(ours, theirs.detach())
            for got, want in zip(grads, expected, strict=True):
                assert same(got, want)
                assert want.any(), "a gradient that is zero proves nothing"
            for got, want in zip(module.buffers(), twin.buffers(), strict=True):
                assert torch.equal(got, want)
            with torch.no_grad():
                for p, q, g in zip(module.parameters(), twin.parameters(), expected[1:], strict=True):
                    p.sub_(0.1 * g)
                    q.sub_(0.1 * g)
            outputs.append(ours)
        return outputs

    def test_training(self, backend: Backend, pool: Pool) -> None:
        module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).to(backend.device)
        self.check_training(backend, pool, module, lambda: self.tensor(backend, 5, 8))

    def test_training_with_batch_norm_and_in_place(self, backend: Backend, pool: Pool) -> None:
        module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 4))
        self.check_training(backend, pool, module.to(backend.device), lambda: self.tensor(backend, 5, 8))

    def test_training_with_a_function(self, backend: Backend, pool: Pool) -> None:
        self.check_training(backend, pool, Squared().to(backend.device), lambda: self.tensor(backend, 5, 8))

    def test_training_with_checkpoint(self, backend: Backend, pool: Pool) -> None:
        self.check_training(backend, pool, Checkpointed().to(backend.device), lambda: self.tensor(backend, 5, 8))

    def test_training_under_autocast(self, backend: Backend, pool: Pool) -> None:
        module = Autocast(backend.device.type).to(backend.device)
        self.check_training(backend, pool, module, lambda: self.tensor(backend, 5, 8))

    def test_detach_and_second_use_of_a_static_output(self, backend: Backend, pool: Pool) -> None:
        x = self.tensor(backend, 4)
        graph, (y, z) = record(backend, pool, lambda: (lambda y: (y, y.detach() + y))(x * 2))
        graph.replay()
        assert same(y, x * 2)
        assert same(z, x * 4)

    def test_replay_from_inside_autograd_and_under_modes(self, backend: Backend, pool: Pool) -> None:
        x = self.tensor(backend, 4, 4)
        graph, y = record(backend, pool, lambda: x @ x)
        expected = x @ x

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, leaf: Tensor) -> Tensor:
                graph.replay()
                return y.clone()

            @staticmethod
            def backward(ctx: object, grad: Tensor) -> Tensor:
                graph.replay()
                return y.clone()

        leaf = torch.ones(4, 4, device=backend.device, requires_grad=True)
        with torch.autocast(backend.device.type, torch.bfloat16):
            out = Node.apply(leaf)
            out.sum().backward()
        assert same(out.detach(), expected)
        assert same(leaf.grad, expected)
        with torch.inference_mode():
            x.mul_(2)
            graph.replay()
        assert same(y, x @ x)

    # --- random numbers ---

    @pytest.mark.parametrize(
        "draw",
        [
            lambda x: F.dropout(x, 0.5),
            lambda x: x * torch.rand(4, 6, device=x.device),
            lambda x: x * torch.randn_like(x),
            lambda x: x * torch.randint(1, 9, (4, 6), device=x.device),
            lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
            lambda x: x * torch.multinomial(torch.ones(4, 9, device=x.device), 6, replacement=True),
            lambda x: x * torch.empty_like(x).normal_(),
            lambda x: x * torch.empty_like(x).uniform_(1, 2),
            lambda x: x * torch.empty_like(x).exponential_(),
            lambda x: F.rrelu(x, training=True),
            lambda x: F.alpha_dropout(x, 0.5, training=True),
            lambda x: F.gumbel_softmax(x),
        ],
        ids=[
            *("dropout", "rand", "randn", "randint", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_"),
            *("rrelu", "alpha_dropout", "gumbel_softmax"),
        ],
    )
    def test_random_operators(self, backend: Backend, pool: Pool, draw: Callable[[Tensor], Tensor]) -> None:
        ones = torch.ones(4, 6, device=backend.device)
        outputs = self.check_training(backend, pool, Drawing(draw), lambda: -ones)
        assert not torch.equal(outputs[0], outputs[1]), "the numbers of the capture were repeated"

    def test_replays_advance_the_generator(self, backend: Backend, pool: Pool) -> None:
        x = torch.ones(64, device=backend.device)
        graph, y = record(backend, pool, lambda: F.dropout(x, 0.5))
        torch.manual_seed(3)
        masks = []
        for _ in range(3):
            graph.replay()
            masks.append(y.clone())
        torch.manual_seed(3)
        for mask in masks:
            assert same(mask, F.dropout(x, 0.5))
        assert not torch.equal(masks[0], masks[1])

    def test_a_capture_leaves_the_generators(self, backend: Backend, pool: Pool) -> None:
        x, own = torch.ones(8, device=backend.device), torch.Generator(backend.device)
        before, own_before = generator_of(backend).get_state(), own.get_state()
        with backend.session():
            record(
                backend,
                pool,
                lambda: (F.dropout(x), torch.rand(3, device=x.device, generator=own)),
                generators=[own],
            )
        assert torch.equal(generator_of(backend).get_state(), before)
        assert torch.equal(own.get_state(), own_before)

    def test_a_registered_generator(self, backend: Backend, pool: Pool) -> None:
        own, twin = torch.Generator(backend.device), torch.Generator(backend.device)
        own.manual_seed(5)
        twin.manual_seed(5)
        draw = lambda generator: torch.rand(4, device=backend.device, generator=generator)  # noqa: E731
        graph, y = record(backend, pool, lambda: draw(own), generators=[own])
        for _ in range(3):
            graph.replay()
            assert same(y, draw(twin))

    def test_an_unregistered_generator_is_refused(self, backend: Backend, pool: Pool) -> None:
        own = torch.Generator(backend.device)
        before = own.get_state()
        with pytest.raises(ForbiddenOpError, match="generators="):
            record(backend, pool, lambda: torch.rand(4, device=backend.device, generator=own))
        assert torch.equal(own.get_state(), before)
        self.usable(backend, pool)

    # --- failure ---

    def usable(self, backend: Backend, pool: Pool) -> None:
        """The backend captures, replays and draws as if nothing had been."""
        x = torch.ones(64, device=backend.device)
        graph, y = record(backend, pool, lambda: F.dropout(x, 0.5) + x)
        torch.manual_seed(1)
        graph.replay()
        torch.manual_seed(1)
        assert same(y, F.dropout(x, 0.5) + x)

    def test_an_error_of_the_user_comes_through(self, backend: Backend, pool: Pool) -> None:
        x, counter = self.tensor(backend, 4), torch.zeros(4, device=backend.device)
        state = generator_of(backend).get_state()

        def run() -> None:
            counter.add_(x)
            F.dropout(x)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            record(backend, pool, run)
        assert torch.equal(counter, torch.zeros_like(counter))
        assert torch.equal(generator_of(backend).get_state(), state)
        self.usable(backend, pool)

    def test_a_wrong_shape_comes_through(self, backend: Backend, pool: Pool) -> None:
        x = self.tensor(backend, 4, 3)
        with pytest.raises(RuntimeError, match="shape"):
            record(backend, pool, lambda: x @ x)
        self.usable(backend, pool)

    def test_a_refusal_leaves_everything(self, backend: Backend, pool: Pool) -> None:
        x, counter = self.tensor(backend, 4), torch.zeros(4, device=backend.device)

        def run() -> None:
            counter.add_(x)
            counter.sum().item()

        with pytest.raises(ForbiddenOpError) as info:
            record(backend, pool, run)
        message = str(info.value)
        assert "item" in message
        assert "conformance.py" in message
        assert "counter.sum().item()" in message
        assert "EAGER part" in message
        assert torch.equal(counter, torch.zeros_like(counter))
        assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
        assert torch.overrides._len_torch_function_stack() == 0
        self.usable(backend, pool)

    def test_a_swallowed_refusal_still_fails(self, backend: Backend, pool: Pool) -> None:
        x = self.tensor(backend, 4)

        def run() -> Tensor:
            try:
                return x * x.sum().item()
            except Exception:
                return x

        with pytest.raises(ForbiddenOpError, match="item"):
            record(backend, pool, run)
        self.usable(backend, pool)

    def test_a_refusal_in_a_backward(self, backend: Backend, pool: Pool) -> None:
        class Reads(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: object, grad: Tensor) -> Tensor:
                return grad * len(grad.tolist())

        x = self.tensor(backend, 4).requires_grad_(True)
        _, y = record(backend, pool, lambda: Reads.apply(x))
        with pytest.raises(ForbiddenOpError, match="tolist"):
            record(backend, pool, lambda: torch.autograd.grad(y, x, torch.ones_like(y)))
        self.usable(backend, pool)

    def test_nested_captures_are_refused(self, backend: Backend, pool: Pool) -> None:
        x = self.tensor(backend, 4)
        with pytest.raises(CaptureError, match="inside a capture"):
            record(backend, pool, lambda: record(backend, pool, lambda: x + 1))
        self.usable(backend, pool)

    def test_a_replay_inside_a_capture_is_refused(self, backend: Backend, pool: Pool) -> None:
        x = self.tensor(backend, 4)
        graph, _ = record(backend, pool, lambda: x + 1)
        with pytest.raises(CaptureError, match="inside a capture"):
            record(backend, pool, graph.replay)
        graph.replay()

    # --- the table of refusals ---

    @pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
    def test_refusals(self, backend: Backend, pool: Pool, line: Line) -> None:
        inputs = Inputs.on(backend.device)
        before = copy.deepcopy(inputs)
        if line.row is None:
            line.run(copy.deepcopy(inputs))  # cuBLAS and the like are warm before a real capture
            graph, result = record(backend, pool, lambda: line.run(inputs))
            self.check_captured(graph, result, line, inputs, before)
            return
        with pytest.raises(ForbiddenOpError) as info:
            record(backend, pool, lambda: line.run(inputs))
        assert f"({line.row})" in str(info.value)
        assert "refusal_rows.py" in str(info.value)
        for name in Inputs.__slots__:
            assert torch.equal(getattr(inputs, name), getattr(before, name))
        self.usable(backend, pool)

    @staticmethod
    def check_captured(graph: Graph, result: object, line: Line, inputs: Inputs, before: Inputs) -> None:
        """A replay gives what eager gives, in the results and in place."""
        torch.manual_seed(2)
        graph.replay()
        torch.manual_seed(2)
        expected = line.run(before)
        for got, want in zip(tensors(result), tensors(expected), strict=True):
            assert torch.equal(got, want)
        for name in Inputs.__slots__:
            assert torch.equal(getattr(inputs, name), getattr(before, name))

    # --- pools, graphs, sessions ---

    def test_two_graphs_in_one_pool(self, backend: Backend, pool: Pool) -> None:
        x, w = self.tensor(backend, 4, 4), self.tensor(backend, 4, 4)
        first, h = record(backend, pool, lambda: torch.tanh(x @ w))
        second, y = record(backend, pool, lambda: (h @ w).sigmoid())
        for _ in range(3):
            x.copy_(self.tensor(backend, 4, 4))
            first.replay()
            second.replay()
            assert same(y, (torch.tanh(x @ w) @ w).sigmoid())

    def test_a_pool_by_handle(self, backend: Backend, pool: Pool) -> None:
        again = backend.new_pool(pool.handle)
        assert again.handle == pool.handle
        self.usable(backend, again)

    def test_operations_and_reset(self, backend: Backend, pool: Pool) -> None:
        x = self.tensor(backend, 4)
        graph, _ = record(backend, pool, lambda: (x + 1) * 2)
        assert graph.operations in ((2,) if backend.name == "tape" else (0, 2))
        graph.reset()
        graph.reset()
        with pytest.raises(ReplayError, match="reset"):
            graph.replay()
        self.usable(backend, pool)

    def test_a_failed_graph_is_no_graph(self, backend: Backend, pool: Pool) -> None:
        with pytest.raises(KeyError), backend.capture(pool) as graph:
            raise KeyError("mine")
        with pytest.raises(ReplayError):
            graph.replay()

    @pytest.mark.parametrize("enabled", [True, False])
    @pytest.mark.parametrize("fails", [True, False])
    def test_session_restores(self, backend: Backend, enabled: bool, fails: bool) -> None:
        was, frozen = gc.isenabled(), gc.get_freeze_count()  # another library may have frozen some at its import
        (gc.enable if enabled else gc.disable)()
        state, key = generator_of(backend).get_state(), backend.stream_key()
        try:
            with pytest.raises(KeyError) if fails else no_error(), backend.session():
                assert not gc.isenabled()
                torch.rand(4, device=backend.device)
                if fails:
                    raise KeyError("mine")
            assert gc.isenabled() is enabled
            assert gc.get_freeze_count() == frozen
        finally:
            (gc.enable if was else gc.disable)()
        assert torch.equal(generator_of(backend).get_state(), state)
        assert backend.stream_key() == key

    def test_generator_states(self, backend: Backend) -> None:
        states = backend.generator_states()
        first = torch.rand(4, device=backend.device)
        backend.restore_generator_states(states)
        assert torch.equal(torch.rand(4, device=backend.device), first)

    def test_events(self, backend: Backend) -> None:
        event = backend.record_event()
        event.wait()
        backend.synchronize()
        assert backend.stream_key() == backend.stream_key()


class no_error:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


__all__: Sequence[str] = ("Conformance",)
