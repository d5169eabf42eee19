"""Every private name of torch that graphcap leans on: one function a name, tested in tests/unit/test_torch_private.py.

Nothing else in the core may name `torch._C`, `torch._subclasses` or an underscored attribute of a public torch object.
Written for torch 2.11 to 2.14; a name that moves is mended here and nowhere else.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch.utils import _python_dispatch

# --- storages ---------------------------------------------------------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> int:
    """The address of the tensor's StorageImpl: equal exactly for tensors that share one storage object."""
    return int(tensor.untyped_storage()._cdata)


def storage_holders(tensor: torch.Tensor) -> tuple[int, int]:
    """(C++ references, Python references) to the tensor's storage, to be compared with `lone_storage_holders()`.

    The plain numbers mean little: they depend on how this torch version preserves the Python object of a storage.
    """
    key = tensor.untyped_storage()._cdata
    python = sys.getrefcount(tensor.untyped_storage())
    return torch._C._storage_Use_Count(key), python


def lone_storage_holders() -> tuple[int, int]:
    """What `storage_holders` says about a tensor that is the only one on its storage."""
    return storage_holders(torch.empty(1, dtype=torch.uint8, device="cpu"))


def storage_on_address(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage object on memory that somebody else owns: it keeps nothing alive and frees nothing."""
    make = cast(Callable[[int, torch.device, int], torch.UntypedStorage], torch._C._construct_storage_from_data_pointer)
    return make(address, device, nbytes)


def set_conjugate_and_negative(tensor: torch.Tensor, conjugate: bool, negative: bool) -> None:
    """Set the lazy conjugate and negative bits of a view that was rebuilt from its storage."""
    if conjugate:
        torch._C._set_conj(tensor, True)
    if negative:
        torch._C._set_neg(tensor, True)


def generator_key(generator: torch.Generator) -> int:
    """The address of the generator itself: each dispatched operator sees a new Python object for it."""
    return int(generator._cdata)  # type: ignore[attr-defined]


# --- tensors without memory -------------------------------------------------------------------------------------------


class _Memoryless(torch.Tensor):
    """A wrapper around nothing; `used` makes the error that any operator on it raises."""

    used: Callable[[str], Exception]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stack: list[Any] = [*args, *(kwargs or {}).values()]
        while stack:
            item = stack.pop()
            if isinstance(item, _Memoryless):
                raise item.used(str(func))
            if isinstance(item, list | tuple):
                stack += item
        raise AssertionError(f"{func} was dispatched to a tensor without memory that is not among its arguments")


def memoryless(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    used: Callable[[str], Exception],
) -> torch.Tensor:
    """A tensor that answers for its shape, strides, dtype and device; any operator on it raises `used(name)`."""
    make = torch.Tensor._make_wrapper_subclass
    made: torch.Tensor = make(_Memoryless, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad)
    made.used = used  # type: ignore[attr-defined]
    return made


# --- dispatch ---------------------------------------------------------------------------------------------------------


@contextmanager
def neutral_dispatch() -> Iterator[None]:
    """Run operators as kernels only: no autograd, autocast, inference mode, dispatch or function mode of the caller's.
    For code that may be called from inside autograd or under any context of the user's. Versions still count."""
    with ExitStack() as stack:
        stack.enter_context(_python_dispatch._disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        yield


@cache
def is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether the operator is only a recipe of others (it reaches a dispatch mode whole under inference mode).

    Some, such as silu_backward, have a recipe and a kernel of their own as well: those run their kernel.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    own_kernel = has(func._name, "CPU") or has(func._name, "CUDA")
    return bool(has(func._name, "CompositeImplicitAutograd")) and not own_kernel


def overrides_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the tensor is of a class that answers operators itself (wrapper subclasses, fake tensors, DTensor)."""
    handler = type(tensor).__torch_dispatch__
    return handler is not torch._C._disabled_torch_dispatch_impl


def in_functorch_transform() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) is active on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def fake_mode() -> AbstractContextManager[Any]:
    """A FakeTensorMode: operators inside compute shapes, dtypes and strides, no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def to_fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The fake counterpart of `tensor` in a mode that `fake_mode` gave."""
    return cast(torch.Tensor, mode.from_tensor(tensor, static_shapes=True))


def after_backward(callback: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that is running; call it from inside an autograd node."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_number() -> int:
    """A number that is the running backward pass's alone; call it from inside one."""
    number: int = torch._C._current_graph_task_id()
    return number


def node_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the look at every argument for a dead functorch wrapper, which costs as much as the rest
    where a node has many parameters. Under a functorch transform it is `function.apply` itself, which refuses."""
    bare: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active

    def apply(*args: Any) -> Any:
        return function.apply(*args) if transformed() else bare(*args)  # type: ignore[no-untyped-call]

    return apply


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous views of `flat`, one after the other with the shapes of `like`, made in one call."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, list(like)))


def inside_ddp() -> bool:
    """Whether a DistributedDataParallel is calling the module that it wraps."""
    active = cast(Callable[[], object], torch.nn.parallel.DistributedDataParallel._get_active_ddp_module)
    return active() is not None


def python_nodes(roots: Sequence[torch.Tensor]) -> list[Any]:
    """The autograd nodes reachable from `roots` that run a user's Python (torch.autograd.Function)."""
    found: list[Any] = []
    seen: set[Any] = set()
    todo: list[Any] = [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.append(node)
        todo.extend(parent for parent, _ in node.next_functions)
    return found


# --- tracing ----------------------------------------------------------------------------------------------------------


@contextmanager
def patched_function_apply(handle: Callable[..., Any]) -> Iterator[None]:
    """`handle(cls, run, args, kwargs)` is called in place of every torch.autograd.Function.apply, also through a reference
    bound at import: it reaches `_SingleLevelFunction` by super(). A TorchFunctionMode does not see these calls."""
    base: Any = torch.autograd.function._SingleLevelFunction

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return handle(cls, super(base, cls).apply, args, kwargs)

    had = base.__dict__.get("apply")
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if had is None:
            del base.apply
        else:
            base.apply = had


@contextmanager
def patched_checkpoint(
    handle: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]],
) -> Iterator[None]:
    """Every non-reentrant checkpoint gets the arguments that `handle(args, kwargs)` returns: it keeps them for its
    recomputation. (`checkpoint` itself may be bound in a functools.partial; it looks this one up at each call.)"""
    from torch.utils import checkpoint

    begin = checkpoint._checkpoint_without_reentrant_generator

    def replaced(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = handle(args, kwargs)
        return begin(*args, **kwargs)

    checkpoint._checkpoint_without_reentrant_generator = replaced
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = begin


@contextmanager
def not_capturing_for_users(thread: int) -> Iterator[None]:
    """Code outside torch that asks `torch.cuda.is_current_stream_capturing()` on this thread hears False: models take
    another branch while they are captured, and warm-up must have run the same one."""
    asked = torch.cuda.is_current_stream_capturing

    def answer() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if threading.get_ident() == thread and caller != "torch" and not caller.startswith("torch."):
            return False
        return bool(asked())

    torch.cuda.is_current_stream_capturing = answer
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def top_function_mode() -> Any:
    """The innermost TorchFunctionMode of this thread, or None."""
    from torch.overrides import _get_current_function_mode

    return _get_current_function_mode()  # type: ignore[no-untyped-call]


def top_dispatch_mode() -> Any:
    """The innermost TorchDispatchMode of this thread, or None."""
    return _python_dispatch._get_current_dispatch_mode()


def modes() -> list[Any]:
    """Every function mode and dispatch mode of this thread."""
    from torch.overrides import _get_current_function_mode_stack

    dispatch = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    return [*_get_current_function_mode_stack(), *dispatch]  # type: ignore[no-untyped-call]


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, this thread has no function mode and no dispatch mode."""
    from torch import overrides

    taken: list[Any] = []
    try:
        while overrides._get_current_function_mode() is not None:  # type: ignore[no-untyped-call]
            taken.append(overrides._pop_mode())  # type: ignore[no-untyped-call]
        with _python_dispatch._disable_current_modes():
            yield
    finally:
        for mode in reversed(taken):
            overrides._push_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def compiler_stance(stance: str) -> Iterator[None]:
    """torch.compiler.set_stance for a while, unless the user has set one: theirs stays."""
    from torch._dynamo import eval_frame

    if eval_frame._stance.stance != "default":
        yield
        return
    with torch.compiler.set_stance(stance):
        yield


@contextmanager
def before_compiled(decide: Callable[[str, bool], bool]) -> Iterator[None]:
    """Inside, `decide(name, is_plain)` is asked before a function made by torch.compile runs; False has it run uncompiled,
    and Dynamo not hear of it. is_plain: its backend is one that runs the traced operators as they are."""
    from torch._dynamo import eval_frame

    frames: Any = eval_frame
    original = frames._callback_from_stance

    def asked(callback: Any) -> Any:
        found = original(callback)
        if found is None or found is False:
            return found
        backend, names = callback, ""
        while backend is not None:
            names += getattr(backend, "__name__", "")
            backend = _wrapped_backend(backend)
        function = sys._getframe(1).f_locals.get("fn")
        name = getattr(function, "__qualname__", None) or type(function).__name__
        return found if decide(name, "eager" in names) else None

    frames._callback_from_stance = asked
    try:
        yield
    finally:
        frames._callback_from_stance = original


def _wrapped_backend(backend: Any) -> Any:
    """What a wrapper of Dynamo's holds (until 2.11 or so `_torchdynamo_orig_callable`), or None."""
    return getattr(backend, "_torchdynamo_orig_backend", getattr(backend, "_torchdynamo_orig_callable", None))


def is_refused_compilation(error: BaseException) -> bool:
    """Whether an error is what Dynamo raises instead of compiling, under the stance "fail_on_recompile"."""
    return "fail_on_recompile" in str(error)


def saves_through_hooks() -> bool:
    """Whether saved-tensor hooks are active: a non-reentrant checkpoint, save_on_cpu, or the user's own."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether it is a wrapper of a functorch transform (vmap, grad), which has no storage of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class StorageKey:
    """A weak reference to a storage. As long as it exists, no other storage can get the same key."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def is_gone(self) -> bool:
        """Whether nobody holds the storage any more."""
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]


# --- CUDA -------------------------------------------------------------------------------------------------------------


def end_allocate_to_pool(device: torch.device, pool: tuple[int, int]) -> None:
    """Stop routing this device's allocations into a graph's pool (left on when a capture is invalidated)."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(index, pool)


def current_raw_stream(device_index: int) -> int:
    """The driver's handle of the current stream, without the object around it (2 us less at every replay)."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))


# --- distributed ------------------------------------------------------------------------------------------------------


def is_process_group(value: object) -> bool:
    """Whether an argument of a c10d operator is a boxed process group."""
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in cast(Any, value)._type().name()


def process_group(value: object) -> torch.distributed.ProcessGroup:
    """The process group inside a boxed one; the same object at every call."""
    return cast(torch.distributed.ProcessGroup, cast(Any, torch.distributed.ProcessGroup).unbox(value))
