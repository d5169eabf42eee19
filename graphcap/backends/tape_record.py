"""Recording and replaying: a dispatch mode writes down each operator and where its tensors are.

While recording, kernels run on real values, as nothing can look at them (host reads are refused before they run). What
the record keeps is a description without references, so that a storage that only the tape knows can be recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap import _torch_private as private
from graphcap.backends.refusal_modes import Gate
from graphcap.backends.tape_fake import fake_outputs
from graphcap.backends.tape_memory import Memory, Registry, Slot, Snapshot
from graphcap.backends.tape_refusals import tensors_in
from graphcap.errors import ReplayError

# They hand out memory and write nothing: a replay leaves in it whatever is there, as a graph does.
_UNINITIALISED = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


@dataclass(frozen=True, slots=True)
class Record:
    """One operator: `arguments` are the flattened (args, kwargs) with tensors as Slots; `outputs` one Slot (or None for
    what is no tensor) per flattened result."""

    func: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    structure: pytree.TreeSpec
    outputs: tuple[Slot | None, ...]
    grad_mode: bool


class TapeView:
    """Every tensor is on the device, but for constants that a GPU would hold in host memory."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def is_host(self, tensor: torch.Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or private.overrides_dispatch(tensor):
            return False
        memory = self._registry.find(tensor)
        return memory is not None and memory.host

    def on_device(self, device: object) -> bool:
        return True


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs, checks and writes down the operators of one capture."""

    supports_higher_order_operators = True  # to refuse them in our words

    def __init__(self, registry: Registry, gate: Gate) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate = gate
        self.records: list[Record] = []
        self.born: list[Memory] = []
        self.outside: list[Memory] = []
        self._registry = registry
        self._touched: dict[int, Memory] = {}
        self._snapshot = Snapshot()
        self._random_state = torch.default_generator.get_state()

    # --- recording ---

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            self.gate.higher_order(func)
        if private.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if only_shapes(args, kwargs):
            return func(*args, **kwargs)
        self._admit(func, args, kwargs)
        self.gate.operator(func, args, kwargs)
        self._refuse_host_operand(func, args, kwargs)
        self._refuse_set_seed(func)
        sources = [self._memory(tensor) for tensor in tensors_in(args, kwargs)]
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if not any(memory.holds_poison for memory in sources):
                raise
            # The kernel refuses poison (a probability that is NaN, a division by 0); real values come at the replay.
            result = fake_outputs(func, args, kwargs, error)
        self._random_state = torch.default_generator.get_state()
        self._write_down(func, args, kwargs, sources, result)
        return result

    def _refuse_set_seed(self, func: torch._ops.OpOverload) -> None:
        """Python that sets the random state does not run at a replay (CUDA raises when a seed is set in a capture)."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if not torch.equal(torch.default_generator.get_state(), self._random_state):
            self.gate.refuse(
                str(func),
                "the random state was set inside the capture (manual_seed, set_rng_state, fork_rng), which no replay does",
                "draw the numbers outside and pass them in, or make it an EAGER part",
            )

    def _admit(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse tensors that the tape can't describe by address, and what would change the size of outside memory."""
        tensors = list(tensors_in(args, kwargs))
        for tensor in tensors:
            if private.overrides_dispatch(tensor):
                self.gate.refuse(
                    str(func),
                    f"an argument is a {type(tensor).__name__}, a tensor subclass that answers operators itself",
                    "capture on plain tensors (DTensor: .to_local(), nested: .values()), or make it an EAGER part",
                )
            if tensor.device.type != "cpu":
                self.gate.refuse(
                    str(func),
                    f"an argument is on {tensor.device}, but this tape records on the CPU",
                    "put every tensor of the captured part on one device",
                )
            if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
                kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
                self.gate.refuse(
                    str(func),
                    f"an argument is {kind}: such tensors have no fixed memory",
                    "use dense tensors, or make it an EAGER part",
                )
        self._refuse_resize(func, args, kwargs)

    def _refuse_resize(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if func._schema.name not in ("aten::resize_", "aten::resize_as_") or not args:
            return
        target: torch.Tensor = args[0]
        shape: Any = args[1] if len(args) > 1 else kwargs.get("size", kwargs.get("the_template"))
        size = shape.size() if isinstance(shape, torch.Tensor) else torch.Size(shape)
        needed = (size.numel() + target.storage_offset()) * target.element_size()
        if needed > target.untyped_storage().nbytes() and not self._is_born(target):
            self.gate.refuse(
                str(func),
                "it would move memory from outside the capture, and a graph reads memory by address",
                "make the tensor as large as needed before the capture",
            )

    def _refuse_host_operand(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        tensors = list(tensors_in(args, kwargs))
        host = [tensor for tensor in tensors if self.gate.view.is_host(tensor)]
        if len(host) < len(tensors) and any(tensor.dim() > 0 for tensor in host):
            self.gate.refuse(
                str(func),
                "a tensor made from host data meets tensors of the device",
                "make it before the capture (a buffer), or on the device with arange, full, zeros",
            )

    def _is_born(self, tensor: torch.Tensor) -> bool:
        memory = self._touched.get(private.storage_key(tensor))
        return memory is not None and memory.born and memory in self.born

    def _memory(self, tensor: torch.Tensor) -> Memory:
        """The memory of an argument; the first touch of an outside storage keeps what is in it."""
        key = private.storage_key(tensor)
        memory = self._touched.get(key)
        if memory is None:
            with private.neutral_dispatch():  # other modes, of the user's, may lie under this one
                memory = self._registry.find(tensor) or self._registry.add(tensor, born=False)
                self._snapshot.take(memory)
            self._touched[key] = memory
            self.outside.append(memory)
        return memory

    def _result_memory(self, tensor: torch.Tensor) -> Memory:
        key = private.storage_key(tensor)
        memory = self._touched.get(key)
        if memory is not None:
            return memory
        if self._registry.find(tensor) is not None:
            return self._memory(tensor)
        with private.neutral_dispatch():
            memory = self._registry.add(tensor, born=True)
        self._touched[key] = memory
        self.born.append(memory)
        return memory

    def _write_down(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        sources: Sequence[Memory],
        result: Any,
    ) -> None:
        results = pytree.tree_leaves(result)
        if only_shapes(results):
            return
        made = [self._result_memory(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in results]
        tainted = any(memory.holds_poison for memory in sources)
        host = bool(sources) and all(memory.host for memory in sources)
        for memory, leaf in zip(made, results, strict=True):
            if memory is not None and memory not in sources:
                memory.dtype, memory.poisoned, memory.host = leaf.dtype, tainted, host
        if func._schema.name == "aten::lift_fresh":
            for memory in sources:
                memory.host = True
        for tensor in written_arguments(func, args, kwargs):
            memory = self._memory(tensor)
            memory.dtype = tensor.dtype
            memory.poisoned = memory.poisoned or tainted
            if memory.moved():
                self._follow(func, memory)
        if not needs_replay(func):
            return
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        self.records.append(
            Record(
                func,
                tuple(self._describe(leaf) for leaf in leaves),
                structure,
                tuple(
                    Slot.of(leaf, memory) if memory is not None else None
                    for leaf, memory in zip(results, made, strict=True)
                ),
                torch.is_grad_enabled(),
            )
        )

    def _describe(self, leaf: Any) -> Any:
        return Slot.of(leaf, self._memory(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    def _follow(self, func: torch._ops.OpOverload, memory: Memory) -> None:
        """An out= argument was grown by the kernel: fine for memory born here, for outside memory it is too late."""
        if memory in self.born:
            memory.follow()
            return
        self.gate.refuse(
            str(func),
            "it resized memory from outside the capture, and a graph reads memory by address",
            "give an out= tensor of the right size",
        )

    # --- closing ---

    def restore(self) -> None:
        """Outside memory as it was before the capture."""
        self._snapshot.restore()
        for memory in self.outside:
            # Written with something computed from poison, and now restored.
            memory.poisoned = memory.poisoned and memory.born

    def poison(self) -> None:
        for memory in self.born:
            memory.poison()


def written_arguments(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterable[torch.Tensor]:
    """The tensors that the schema says are written."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def only_shapes(*trees: Any) -> bool:
    """Whether all tensors in there are on the meta device: they have no memory, so there is nothing to record."""
    tensors = list(tensors_in(*trees))
    return bool(tensors) and all(tensor.is_meta and not private.overrides_dispatch(tensor) for tensor in tensors)


def needs_replay(func: torch._ops.OpOverload) -> bool:
    """Whether the operator computes something. Views and changes of shape are in the descriptions already."""
    schema = func._schema
    if schema.name in _UNINITIALISED or torch.Tag.inplace_view in func.tags:
        return False
    writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments)
    is_view = bool(schema.returns) and all(ret.alias_info is not None for ret in schema.returns)
    return writes or not is_view


class Program:
    """The records of one graph, bound to views on their memory; bound once, at the first replay."""

    def __init__(self, records: Sequence[Record]) -> None:
        views: dict[tuple[Any, ...], torch.Tensor] = {}

        def bind(leaf: Any) -> Any:
            if not isinstance(leaf, Slot):
                return leaf
            if leaf.key not in views:
                views[leaf.key] = leaf.build()
            return views[leaf.key]

        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], bool, list[Any]]] = []
        for record in records:
            args, kwargs = pytree.tree_unflatten([bind(leaf) for leaf in record.arguments], record.structure)
            self._steps.append((record.func, args, kwargs, record.grad_mode, [bind(slot) for slot in record.outputs]))

    def run(self) -> None:
        for func, args, kwargs, grad_mode, outputs in self._steps:
            try:
                # Kernels may look at it to choose their algorithm; nothing differentiates below autograd.
                with torch.set_grad_enabled(grad_mode):
                    result = func(*args, **kwargs)
            except Exception as error:
                error.add_note(f"graphcap: raised by {func}, which a graph of the tape replayed on the values it found")
                raise
            with torch.no_grad():
                _store(func, result, outputs)


def _store(func: Callable[..., Any], result: Any, outputs: Sequence[torch.Tensor | None]) -> None:
    results = pytree.tree_leaves(result)
    for value, target in zip(results, outputs, strict=True):
        if target is None or value.data_ptr() == target.data_ptr():
            continue
        if value.size() != target.size():
            raise ReplayError(
                f"{func} made a tensor of shape {tuple(value.size())} where the capture had {tuple(target.size())}: "
                "its shape depends on values, and nothing refused it. Make it an EAGER part and report the operator"
            )
        # Expanded results have several indices on one element; write each element once.
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.size(dim) > 1:
                target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        target.copy_(value)
