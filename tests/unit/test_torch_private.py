"""Each private name of torch that we lean on: there, and doing what its docstring says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from graphcap import _torch_private as private


def test_storage_key() -> None:
    x = torch.ones(4)
    assert private.storage_key(x) == private.storage_key(x[1:])
    assert private.storage_key(x) != private.storage_key(x.clone())


def test_storage_holders() -> None:
    lone = private.lone_storage_holders()
    x = torch.ones(4)
    assert private.storage_holders(x) == lone
    view = x[1:]
    assert private.storage_holders(x)[0] > lone[0]
    del view
    assert private.storage_holders(x) == lone
    storage = x.untyped_storage()
    assert private.storage_holders(x)[1] > lone[1]
    del storage
    assert private.storage_holders(x) == lone
    leaf = torch.ones(4, requires_grad=True)
    y = leaf.exp()
    detached = y.detach()
    del y
    assert private.storage_holders(detached) == lone, "nothing but the dropped graph held it"
    kept = leaf.exp()
    seen = kept.detach()
    graph = kept.sum()
    del kept
    assert private.storage_holders(seen)[0] > lone[0], "autograd still needs it"
    del graph
    assert private.storage_holders(seen) == lone


def test_storage_on_address() -> None:
    x = torch.arange(4.0)
    storage = private.storage_on_address(x.data_ptr(), 16, x.device)
    alias = torch.empty(0).set_(storage, 0, (4,), (1,))
    alias[0] = 7
    assert x[0] == 7
    assert private.storage_holders(x) == private.lone_storage_holders()
    del alias, storage
    assert x.tolist() == [7, 1, 2, 3]


def test_conjugate_and_negative_bits() -> None:
    x = torch.tensor([1 + 2j])
    alias = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, (1,), (1,))
    private.set_conjugate_and_negative(alias, True, False)
    assert alias.is_conj()
    assert alias.resolve_conj().item() == 1 - 2j
    imag = x.conj().imag
    assert imag.is_neg()
    alias = torch.empty(0).set_(imag.untyped_storage(), imag.storage_offset(), (1,), (2,))
    private.set_conjugate_and_negative(alias, False, True)
    assert alias.is_neg()
    assert alias.resolve_neg().item() == -2


def test_generator_key() -> None:
    generator = torch.Generator()
    assert private.generator_key(generator) == private.generator_key(generator)
    assert private.generator_key(generator) != private.generator_key(torch.default_generator)


class _Modes(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("a mode of the caller saw an operator")


class _Calls(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("a mode of the caller saw a call")


def test_neutral_dispatch_hides_the_callers_modes() -> None:
    x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    neutral = private.neutral_dispatch
    with torch.autocast("cpu", torch.bfloat16), _Calls(), _Modes(), neutral():
        y = torch.mm(x, w)
        w.add_(1)  # autograd would refuse this of a leaf
    assert y.dtype == torch.float32
    assert not y.requires_grad
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    with torch.inference_mode(), neutral():
        assert not torch.is_inference_mode_enabled()
        assert not torch.ones(1).is_inference()


def test_neutral_dispatch_ends_with_an_error() -> None:
    with pytest.raises(KeyError), private.neutral_dispatch():
        raise KeyError
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad
    assert torch.is_grad_enabled()


def test_is_composite() -> None:
    assert private.is_composite(torch.ops.aten.linear.default)
    assert not private.is_composite(torch.ops.aten.mm.default)
    assert not private.is_composite(torch.ops.aten.silu_backward.default), "it has a recipe and kernels"


def test_overrides_dispatch() -> None:
    class Plain(torch.Tensor):
        pass

    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert not private.overrides_dispatch(torch.ones(1))
    assert not private.overrides_dispatch(torch.nn.Parameter(torch.ones(1)))
    assert not private.overrides_dispatch(torch.ones(1).as_subclass(Plain))
    assert private.overrides_dispatch(torch.ones(1).as_subclass(Own))
    with private.fake_mode() as mode:
        assert private.overrides_dispatch(private.to_fake(mode, torch.ones(1)))


def test_functorch() -> None:
    assert not private.in_functorch_transform()
    seen = []
    torch.func.vmap(lambda x: seen.append(private.in_functorch_transform()) or x)(torch.ones(2))
    assert seen == [True]


def test_fake_mode() -> None:
    mode = private.fake_mode()
    twin = private.to_fake(mode, torch.ones(2, 3).t())
    with mode:
        result = torch.multinomial(twin, 2)
    assert tuple(result.shape) == (3, 2)
    assert tuple(twin.stride()) == (1, 3)


def test_python_nodes() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    y = Twice.apply(x) + Twice.apply(x.exp())
    assert [type(node).__name__ for node in private.python_nodes([y, x])] == ["TwiceBackward", "TwiceBackward"]
    assert private.python_nodes([x * 2]) == []


def test_after_backward() -> None:
    seen: list[str] = []

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            private.after_backward(lambda: seen.append("end"))
            return grad

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append("later node"))
    Late.apply(y).backward()
    assert seen == ["later node", "end"]


def test_node_apply() -> None:
    """As `Function.apply`, the tensors' gradients included; under a functorch transform that function has the word."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, word: str) -> torch.Tensor:
            ctx.word = word
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            assert ctx.word == "kept"
            return gradient * 2, None

    apply = private.node_apply(Twice)
    x = torch.ones(2, requires_grad=True)
    apply(x, "kept").sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(lambda row: apply(row, "kept"))(x)


def test_unflatten() -> None:
    flat, like = torch.arange(10.0), [torch.empty(2, 3), torch.empty(0), torch.empty(4)]
    views = private.unflatten(flat, like)
    assert [tuple(view.shape) for view in views] == [(2, 3), (0,), (4,)]
    assert torch.equal(torch.cat([view.flatten() for view in views]), flat)
    assert views[2].data_ptr() == flat.data_ptr() + 6 * flat.element_size()


def test_inside_ddp() -> None:
    seen: list[bool] = []

    class Asks(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(private.inside_ddp())
            return super().forward(x)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(Asks(2, 2))(torch.ones(1, 2))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [True]
    assert not private.inside_ddp()


@pytest.mark.gpu
def test_end_allocate_to_pool() -> None:
    """Ends what a begin opened; on what is not open it raises RuntimeError, which the recovery counts on."""
    device = torch.device("cuda", 0)
    pool = torch.cuda.MemPool()
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool.id)
    private.end_allocate_to_pool(device, pool.id)
    with pytest.raises(RuntimeError):
        private.end_allocate_to_pool(device, pool.id)


@pytest.mark.gpu
def test_current_raw_stream() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert private.current_raw_stream(0) == side.cuda_stream
    assert private.current_raw_stream(0) == torch.cuda.current_stream(0).cuda_stream


def test_process_group_of_a_collective(tmp_path: Path) -> None:
    """Found in what a collective dispatches, the same object each time."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[object] = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(private.process_group(value) for value in args if private.is_process_group(value))
            return func(*args, **(kwargs or {}))

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        with See():
            dist.all_reduce(torch.ones(2))
            dist.broadcast(torch.ones(2), 0)
        assert len(seen) == 2
        assert seen[0] is seen[1] is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_patched_function_apply() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    bound, seen = Double.apply, []

    def handle(kind: type, run: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        seen.append(kind)
        return run(*args, **kwargs)  # type: ignore[operator]

    with private.patched_function_apply(handle):
        x = torch.ones(2, requires_grad=True)
        assert torch.equal(bound(x), x * 2) and torch.equal(Double.apply(x), x * 2)
    Double.apply(torch.ones(1))
    assert seen == [Double, Double]
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def test_patched_checkpoint() -> None:
    import functools

    from torch.utils import checkpoint

    bound = functools.partial(checkpoint.checkpoint, use_reentrant=False)
    calls = []

    def handle(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        function, *_, x = args
        calls.append((function, x))
        return args, kwargs

    x = torch.ones(2, requires_grad=True)
    with private.patched_checkpoint(handle):
        bound(torch.sin, x).sum().backward()
    assert calls == [(torch.sin, x)]
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_not_capturing_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    asked = torch.cuda.is_current_stream_capturing
    with private.not_capturing_for_users(threading.get_ident()):
        assert torch.cuda.is_current_stream_capturing() is False
        scope: dict[str, object] = {"__name__": "torch.somewhere", "torch": torch}
        exec("answer = torch.cuda.is_current_stream_capturing()", scope)
        assert scope["answer"] is True
    with private.not_capturing_for_users(-1):
        assert torch.cuda.is_current_stream_capturing() is True
    assert torch.cuda.is_current_stream_capturing is asked


def test_top_modes() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    assert private.top_function_mode() is None and private.top_dispatch_mode() is None
    with TorchDispatchMode() as dispatch, TorchFunctionMode() as outer:  # type: ignore[no-untyped-call]
        assert private.top_function_mode() is outer and private.top_dispatch_mode() is dispatch
        with TorchFunctionMode() as inner:
            assert private.top_function_mode() is inner


def test_modes_come_off_and_back() -> None:
    function, dispatch = _Calls(), _Modes()
    assert private.modes() == []
    with function, dispatch:
        assert private.modes() == [function, dispatch]
        with pytest.raises(KeyError), private.without_modes():
            assert private.modes() == []
            raise KeyError
        assert private.modes() == [function, dispatch]
    assert private.modes() == []


def test_compiler_stance() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    frozen = partial(private.compiler_stance, "fail_on_recompile")
    with pytest.raises(RuntimeError) as caught, frozen():
        compiled(torch.ones(2))
    assert private.is_refused_compilation(caught.value)
    assert not private.is_refused_compilation(RuntimeError("another"))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with frozen():
        compiled(torch.ones(2))
    with torch.compiler.set_stance("force_eager"), frozen():
        compiled(torch.ones(2, 3, dtype=torch.float64))


def test_saves_through_hooks() -> None:
    assert not private.saves_through_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private.saves_through_hooks()


def test_is_transformed() -> None:
    seen = []
    torch.vmap(lambda x: seen.append(private.is_transformed(x)) or x)(torch.ones(2))
    assert seen == [True] and not private.is_transformed(torch.ones(2))


def test_storage_reference_keeps_the_key() -> None:
    x = torch.ones(1000)
    key, reference = private.storage_key(x), private.StorageKey(x)
    assert not reference.is_gone()
    del x
    assert reference.is_gone()
    others = [torch.ones(1000) for _ in range(50)]
    assert all(private.storage_key(other) != key for other in others)
    del reference


def test_memoryless() -> None:
    made = private.memoryless(
        (2, 3), (1, 2), torch.float64, torch.device("cpu"), True, lambda name: KeyError(f"{name} was used")
    )
    assert isinstance(made, torch.Tensor)
    assert (tuple(made.shape), made.stride(), made.dtype, made.requires_grad) == ((2, 3), (1, 2), torch.float64, True)
    assert (made.device.type, made.dim(), made.numel(), made.size(1)) == ("cpu", 2, 6, 3)
    for use in (lambda: made + 1, lambda: torch.stack([made, made]), lambda: made.sum().item(), lambda: made.detach()):
        with pytest.raises(KeyError, match="was used"):
            use()
