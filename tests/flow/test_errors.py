"""What can't be captured or replayed is refused by name before anything is wrong; what can, works."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import graphcap
from graphcap import CaptureError, CutError, InFlightError, InputMismatch, PlanError, ReplayError, SampleError
from tests.flow.small import Mlp, Routed, agrees, capture, rows, same_gradients, twin_of

# ------------------------------------------------------------------------------------------------- what autograd may do


def test_create_graph_raises_and_the_next_step_is_right() -> None:
    module = Mlp()
    twin, graphed = twin_of(module), capture(module, (rows(requires_grad=True),))
    x = rows(requires_grad=True)
    with pytest.raises(ReplayError, match="create_graph"):
        torch.autograd.grad(graphed(x).sum(), x, create_graph=True)
    gc.collect()
    agrees(graphed, twin, rows(requires_grad=True))


def test_a_second_backward_raises() -> None:
    graphed = capture(Mlp())
    out = graphed(rows())
    out.sum().backward(retain_graph=True)
    before = {n: p.grad.clone() for n, p in graphed.named_parameters()}
    with pytest.raises(ReplayError, match="retain_graph=True"):
        out.square().sum().backward()
    assert all(torch.equal(before[n], p.grad) for n, p in graphed.named_parameters())


def test_retain_graph_two_losses_give_the_sum() -> None:
    module = Routed()
    twin, graphed = twin_of(module), capture(module, retain_graph=True)
    for _ in range(3):
        x = rows()
        for side in (graphed, twin):
            side.zero_grad()
            out = side(x)
            out.square().sum().backward(retain_graph=True)
            out.exp().sum().backward()
        same_gradients(module, twin)


def test_retain_graph_ends_with_the_next_forward() -> None:
    graphed = capture(Mlp(), retain_graph=True)
    out = graphed(rows())
    out.sum().backward(retain_graph=True)
    graphed(rows()).sum().backward()
    with pytest.raises(ReplayError, match="later forward"):
        out.sum().backward()


def test_a_backward_after_the_slot_was_used_again_raises() -> None:
    """The second line of defence: reset() forgets the flight, so the generation number must speak."""
    graphed = capture(Mlp())
    out = graphed(rows())
    graphed.reset()
    graphed(rows()).sum().backward()
    with pytest.raises(ReplayError, match="later forward"):
        out.sum().backward()


def test_two_forwards_in_flight() -> None:
    graphed = capture(Mlp())
    first = graphed(rows())
    with pytest.raises(InFlightError, match="still in flight"):
        graphed(rows())
    del first
    graphed(rows()).sum().backward()


def test_sparse_gradients_in_a_graphed_part_are_refused() -> None:
    table = nn.Embedding(10, 8, sparse=True)
    with pytest.raises(graphcap.GraphcapError, match="sparse"):
        capture(table, (torch.randint(0, 10, (4,)),))
    assert table.weight.grad is None


def test_sparse_gradients_of_an_eager_part_work() -> None:
    class Layer(graphcap.PartialLayer):
        inputs = "ids"
        outputs = "hidden"

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8, sparse=True)
            self.head = nn.Linear(8, 8)

        def parts(self) -> Any:
            return graphcap.EAGER("look", "ids -> embedded"), graphcap.GRAPHED("project", "embedded -> hidden")

        def look(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

        def project(self, embedded: torch.Tensor) -> torch.Tensor:
            return self.head(embedded)

    layer = Layer()
    twin, graphed = twin_of(layer), capture(layer, (torch.randint(0, 10, (4,)),))
    ids = torch.randint(0, 10, (4,))
    for side in (graphed, twin):
        side(ids).square().sum().backward()
    assert layer.table.weight.grad.is_sparse
    assert torch.equal(layer.table.weight.grad.to_dense(), twin.table.weight.grad.to_dense())
    assert torch.equal(layer.head.weight.grad, twin.head.weight.grad)


# -------------------------------------------------------------------------------------------- modules, tensors, contexts


class Logging(torch.Tensor):
    """A subclass that answers functions itself."""


def test_tensor_subclasses_are_refused() -> None:
    with pytest.raises(SampleError, match="argument 0 is a Logging"):
        capture(Mlp(), (rows().as_subclass(Logging),))
    nested = torch.nested.nested_tensor([rows(2, 8), rows(3, 8)], layout=torch.jagged)
    with pytest.raises(SampleError, match="nested tensor"):
        capture(Mlp(), (nested,))
    with pytest.raises(SampleError, match="sparse"):
        capture(Mlp(), (rows().to_sparse(),))


@pytest.mark.parametrize("make", [lambda x: x.as_subclass(Logging), torch.Tensor.to_sparse], ids=["subclass", "sparse"])
def test_tensor_subclasses_at_replay(make: Any) -> None:
    """What was captured from a plain tensor is not served with one that means something else."""
    graphed = capture(Mlp())
    with pytest.raises(InputMismatch, match="argument 0"):
        graphed(make(rows()))


@pytest.fixture
def one_process_group() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_wrappers_are_refused(one_process_group: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(PlanError, match="FSDP"):
        capture(fully_shard(Mlp(), mesh=mesh))
    with pytest.raises(PlanError, match="DistributedDataParallel"):
        capture(nn.parallel.DistributedDataParallel(Mlp()))
    with pytest.raises(PlanError, match=r"up.weight holds a DTensor|up.weight is a DTensor"):
        capture(distribute_module(Mlp(), mesh))
    with pytest.raises(SampleError, match="DTensor"):
        capture(Mlp(), (distribute_tensor(rows(), mesh, [Replicate()]),))


def test_compiled_modules_are_refused() -> None:
    module = Mlp()
    module.up = torch.compile(module.up, backend="eager")
    with pytest.raises(PlanError, match=r"up .*compiled"):
        capture(module)
    module = Mlp()
    module.down.compile(backend="eager")
    with pytest.raises(PlanError, match=r"down .*compiled"):
        capture(module)


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(PlanError, match="not initialised"):
        capture(nn.LazyLinear(3))


def test_functorch_is_refused() -> None:
    module = Mlp()

    def inside(x: torch.Tensor) -> torch.Tensor:
        capture(module, (x,))
        return x

    with pytest.raises(PlanError, match="functorch"):
        torch.vmap(inside)(rows(3, 4, 8))
    with pytest.raises(PlanError, match="functorch"):
        torch.func.grad(lambda x: inside(x).sum())(rows())


def test_a_capture_inside_a_capture_is_refused() -> None:
    class Nesting(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            capture(nn.Linear(8, 8), (torch.ones(4, 8),))
            return super().forward(x)

    with pytest.raises(CaptureError, match="inside a capture"):
        capture(Nesting())
    agrees(capture(module := Mlp()), twin_of(module), rows())


def test_a_graphed_object_inside_a_captured_module_is_refused_by_name() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = capture(Mlp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    outer = Outer()
    with pytest.raises(PlanError, match=r"inner.*graphed"):
        capture(outer)
    with pytest.raises(PlanError, match="graphed"):
        capture(outer.inner)
    outer.inner(rows()).sum().backward()


def test_inference_mode_refuses_a_capture_and_replays_one() -> None:
    module = Mlp()
    with torch.inference_mode(), pytest.raises(PlanError, match="inference_mode"):
        capture(module)
    twin, graphed = twin_of(module), capture(module)
    x = rows()
    with torch.inference_mode():
        assert torch.equal(graphed(x), twin(x))
        inside = rows()
        assert torch.equal(graphed(inside), twin(inside))
    agrees(graphed, twin, rows())


# --------------------------------------------------------------------------------------------------------- sample inputs


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * self.scale + b.square()


def test_two_samples_that_share_storage() -> None:
    module = Add()
    base = rows(8, 8)
    twin, graphed = twin_of(module), capture(module, (base[:4], base[4:]))
    same = rows()
    agrees(graphed, twin, rows(8, 8)[:4], rows(8, 8)[4:])
    agrees(graphed, twin, same, same)
    again = capture(module, (same, same))  # one tensor given twice: still two arguments
    agrees(again, twin, rows(), rows())
    agrees(again, twin, same, same)


def test_a_sample_that_is_a_parameter() -> None:
    module, weight = Add(), nn.Parameter(rows())
    twin, graphed = twin_of(module), capture(module, (weight, rows()))
    agrees(graphed, twin, weight, rows())
    assert weight.grad is None
    agrees(graphed, twin, rows(requires_grad=True), rows())


def test_samples_that_are_views_expanded_or_empty() -> None:
    for make in (
        lambda: rows(4, 16)[:, ::2],
        lambda: rows(8, 4).t(),
        lambda: rows(10, 8)[3:7],
        lambda: rows(1, 8).expand(4, 8),
        lambda: rows(4, 1).expand(4, 8),
        lambda: torch.randn(()).expand(4, 8),
    ):
        module = Add()
        twin, graphed = twin_of(module), capture(module, (make(), rows()))
        for _ in range(2):
            agrees(graphed, twin, make(), rows())


def test_an_empty_sample() -> None:
    module = Add()
    graphed = capture(module, (rows(0, 8), rows(0, 8)))
    out = graphed(rows(0, 8), rows(0, 8))
    out.sum().backward()
    assert out.shape == (0, 8)
    assert torch.equal(module.scale.grad, torch.zeros(8))


def test_a_sample_whose_elements_overlap_is_refused() -> None:
    with pytest.raises(SampleError, match="share memory"):
        capture(Add(), (torch.randn(20).as_strided((4, 8), (1, 1)), rows()))


def test_meta_parameters_are_refused() -> None:
    with pytest.raises(PlanError, match=r"up.weight is on the meta device"):
        capture(Mlp().to("meta"))
    module = Mlp()
    module.down.to("meta")
    with pytest.raises(PlanError, match=r"down.weight is on the meta device"):
        capture(module)
    with pytest.raises(SampleError, match="meta"):
        capture(Mlp(), (rows().to("meta"),))


def test_an_opaque_object_that_holds_a_tensor_is_refused() -> None:
    class Cache:
        def __init__(self, value: Any) -> None:
            self.value = value

    class Slotted:
        __slots__ = ("value",)

        def __init__(self, value: Any) -> None:
            self.value = value

    class Names(dict):  # type: ignore[type-arg]
        pass

    def call(x: torch.Tensor, cache: Any) -> torch.Tensor:
        return x * 2

    for cache in (Cache(rows()), Cache([rows()]), Cache({"k": Cache((rows(),))}), Slotted(rows()), Names(k=rows())):
        with pytest.raises(SampleError, match="holds a tensor"):
            capture(call, (rows(), cache))
    capture(call, (rows(), Cache(3)))


def test_the_same_for_outputs() -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    with pytest.raises(SampleError, match="output 0 of part 0 is a Box"):
        capture(lambda x: Box(x * 2))


# ------------------------------------------------------------------------------------- what a graphed part must not do


def test_an_input_changed_in_place_is_refused() -> None:
    with pytest.raises(CutError, match="in place"):
        capture(lambda x: x.mul_(2))
    with pytest.raises(CutError, match="in place"):
        capture(lambda x: x[0].zero_() + x)


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_an_attribute_set_at_every_call_is_refused(warmup: int) -> None:
    class Counting(Mlp):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    class Listing(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(x))
            return super().forward(x)

    for kind, name in ((Counting, "calls"), (Listing, "seen")):
        module = kind()
        keys = set(vars(module))
        with pytest.raises(CutError, match=f"{kind.__name__}.{name}"):
            capture(module, warmup=warmup)
        assert set(vars(module)) == keys


def test_a_closure_that_requires_grad_is_refused() -> None:
    hidden = rows(requires_grad=True)
    with pytest.raises(CutError, match="neither an argument nor a parameter"):
        capture(lambda x: x * hidden)
    hidden.requires_grad_(False)
    graphed = capture(lambda x: x * hidden)
    x = rows()
    assert torch.equal(graphed(x), x * hidden)


def test_a_parameter_reached_otherwise_than_as_an_attribute_is_refused() -> None:
    """While recording, an alias stands for the parameter; whoever has the parameter itself would get no gradient."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.weights = [self.linear.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weights[0].t() + self.linear.bias

    with pytest.raises(CutError, match=r"reaches the parameter linear\.weight otherwise"):
        capture(Listed())


def test_python_random_choices_are_refused_and_their_state_kept() -> None:
    def layer_drop(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if random.random() < 0.5 else x * 3

    def numpy_noise(x: torch.Tensor) -> torch.Tensor:
        return x * float(numpy.random.rand())

    before = random.getstate(), numpy.random.get_state()[1].tobytes()
    for call, name in ((layer_drop, "random"), (numpy_noise, r"numpy\.random")):
        for warmup in (1, 3):
            with pytest.raises(CutError, match=rf"the generator {name} at every call"):
                capture(call, warmup=warmup)
    assert (random.getstate(), numpy.random.get_state()[1].tobytes()) == before


def test_warmup_runs_that_disagree_are_refused() -> None:
    runs = [0]  # a global of the user's: no module attribute tells

    def shapes(x: torch.Tensor) -> Any:
        return x.repeat(runs[0], 1)

    def constants(x: torch.Tensor) -> Any:
        return x * 2, runs[0]

    def structures(x: torch.Tensor) -> Any:
        return (x * 2, None) if runs[0] % 2 else (x * 2, x * 3)

    for call in (shapes, constants, structures):
        for warmup in (1, 3):

            def counted(x: torch.Tensor, call: Any = call) -> Any:
                runs[0] += 1
                return call(x)

            with pytest.raises((CutError, CaptureError), match=r"run|record"):
                capture(counted, warmup=warmup)


def test_out_of_memory_says_so() -> None:
    left = [0]

    class Full(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("tried to allocate 80 GiB")
            return super().forward(x)

    module = Full()
    for runs in (0, 1, 3):  # in the first warm-up run, in the second, while recording
        left[0] = runs
        with pytest.raises(CaptureError, match=r"out of memory.*80 GiB") as caught:
            capture(module)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        left[0] = 10**6
        agrees(capture(module), twin_of(module), rows())


# ------------------------------------------------------------------------------------------------------ life and threads


def test_another_thread_is_refused() -> None:
    graphed = capture(Mlp())
    found: list[BaseException] = []

    def run() -> None:
        try:
            graphed(rows())
        except ReplayError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "another thread" in str(found[0])
    graphed(rows()).sum().backward()


def test_a_failure_in_an_eager_part_frees_the_slot() -> None:
    module = Routed()
    twin, graphed = twin_of(module), capture(module)
    for _ in range(2):
        module.fail = True
        with pytest.raises(RuntimeError, match="an expert failed"):
            graphed(rows())
        module.fail = False
        agrees(graphed, twin, rows())


def test_an_eager_part_that_returns_another_shape_frees_the_slot() -> None:
    module = Routed()
    twin, graphed = twin_of(module), capture(module)
    module.width = 7
    with pytest.raises(InputMismatch, match=r"experts.*expected shape \[4, 8\], got \[4, 7\]"):
        graphed(rows())
    module.width = 8
    agrees(graphed, twin, rows())


def test_a_call_after_close() -> None:
    graphed = capture(Mlp())
    graphed(rows())
    graphed.close()
    graphed.close()
    with pytest.raises(graphcap.ClosedError):
        graphed(rows())
    with graphcap.disabled(), pytest.raises(graphcap.ClosedError):
        graphed(rows())
    assert graphed.module(rows()).shape == (4, 8)


def test_a_backward_after_close() -> None:
    graphed = capture(Mlp())
    out = graphed(rows())
    graphed.close()
    with pytest.raises(ReplayError):
        out.sum().backward()
