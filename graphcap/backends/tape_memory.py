"""Memory as the tape sees it: storages by address, what was in them before, who still holds them, poison.

Terms: a storage is *born* in the capture whose operator made it and *outside* for every other capture; it is *dead*
when only the tape still refers to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from graphcap import _torch_private as private
from graphcap.errors import ReplayError

_NOT_ALL_ONES_NAN = tuple(
    getattr(torch, name) for name in ("float8_e4m3fnuz", "float8_e5m2fnuz") if hasattr(torch, name)
)


class Memory:
    """One storage, held alive by the tape. Everything done to its bytes here bumps no version counter but its own."""

    __slots__ = ("bytes", "address", "born", "dtype", "poisoned", "host", "owner", "__weakref__")

    def __init__(self, tensor: torch.Tensor, born: bool, owner: Memory | None = None) -> None:
        storage = tensor.untyped_storage()
        # The only reference of the tape to the storage: a tensor, so that `is_dead` can count the others.
        self.bytes = all_bytes(storage)
        self.address = storage.data_ptr()
        self.born = born
        self.dtype = tensor.dtype  # as what it was written last; decides the poison
        self.poisoned = False  # holds poison (or something computed from it), not a value
        self.host = False  # would be host memory if the tape were a GPU
        self.owner = owner  # whose memory this is, where two storage objects share an address

    @property
    def holds_poison(self) -> bool:
        return self.poisoned or (self.owner is not None and self.owner.poisoned)

    def is_dead(self, lone: tuple[int, int]) -> bool:
        """Whether nobody but the tape refers to the storage; `lone` is `_torch_private.lone_storage_holders()`."""
        cpp, python = private.storage_holders(self.bytes)
        return cpp <= lone[0] and python <= lone[1]

    def poison(self) -> None:
        """NaN for floating and complex numbers, 0 for everything else. Call it with the user's modes neutralised."""
        self.bytes.fill_(poison_byte(self.dtype))
        self.poisoned = True

    def moved(self) -> bool:
        """Whether the storage was resized or given other memory since it was recorded."""
        # Asked of the storage: a tensor without elements says 0.
        return self.bytes.untyped_storage().data_ptr() != self.address

    def follow(self) -> None:
        """A storage that was born in the running capture was grown there: this is its memory from now on."""
        storage = self.bytes.untyped_storage()
        self.bytes, self.address = all_bytes(storage), storage.data_ptr()

    def put_back(self, before: torch.Tensor) -> None:
        """Write the bytes of an earlier time, in the size that the storage had then."""
        storage = self.bytes.untyped_storage()
        if storage.nbytes() != before.numel():
            storage.resize_(before.numel())
        if not torch.equal(self.bytes, before):
            self.bytes.copy_(before)


def all_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of the whole storage with its own version counter."""
    # Not an inference tensor, whatever mode the user records under: those can't be written outside of it.
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,))


def poison_byte(dtype: torch.dtype) -> int:
    """The byte that, repeated, is NaN in `dtype`, or 0 where `dtype` has no NaN."""
    if dtype in _NOT_ALL_ONES_NAN:
        return 0x80
    return 0xFF if dtype.is_floating_point or dtype.is_complex else 0


class Registry:
    """The memory known to one backend, by storage object and by address; it keeps nothing alive."""

    def __init__(self) -> None:
        self._by_storage: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._by_address: WeakValueDictionary[int, Memory] = WeakValueDictionary()

    def find(self, tensor: torch.Tensor) -> Memory | None:
        return self._by_storage.get(private.storage_key(tensor))

    def add(self, tensor: torch.Tensor, born: bool) -> Memory:
        # A second storage object on known memory (a proxy made from an address) shares its fate and keeps it alive.
        address = tensor.untyped_storage().data_ptr()
        owner = self._by_address.get(address) if address else None
        memory = Memory(tensor, born, owner)
        self._by_storage[private.storage_key(tensor)] = memory
        if owner is None and address:
            self._by_address[address] = memory
        return memory


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor described by where it is, holding no reference to it."""

    memory: Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    conjugate: bool
    negative: bool

    @staticmethod
    def of(tensor: torch.Tensor, memory: Memory) -> Slot:
        return Slot(
            memory,
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            # A kernel may look at it (depthwise convolution picks its algorithm so), hence the copy must say the same.
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def build(self) -> torch.Tensor:
        """A view on the recorded memory with its own version counter. It does not hold the storage, so that the tape's
        views never look like somebody who still needs it; `Memory` does."""
        memory = self.memory
        if memory.moved():
            raise ReplayError(moved_message(memory))
        storage = private.storage_on_address(memory.address, memory.bytes.numel(), memory.bytes.device)
        view = torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)
        if self.requires_grad:
            view.requires_grad_(True)
        private.set_conjugate_and_negative(view, self.conjugate, self.negative)
        return view

    @property
    def key(self) -> tuple[Any, ...]:
        return (
            id(self.memory),
            self.dtype,
            self.size,
            self.stride,
            self.offset,
            self.requires_grad,
            self.conjugate,
            self.negative,
        )


def moved_message(memory: Memory) -> str:
    return (
        f"a storage of {memory.bytes.numel()} bytes that the graph reads was resized, freed or moved after the "
        "capture. A graph reads memory by address: keep the storage as it was at capture, or capture again"
    )


class Snapshot:
    """The outside storages of one capture as they were when it first touched them."""

    def __init__(self) -> None:
        self._before: list[tuple[Memory, torch.Tensor]] = []

    def take(self, memory: Memory) -> None:
        # Every outside storage, since some operators write arguments that their schema calls read-only
        # (native_batch_norm's running statistics).
        self._before.append((memory, memory.bytes.clone()))

    def restore(self) -> None:
        """Put back what changed, last touched first: two storage objects may overlap in memory."""
        for memory, before in reversed(self._before):
            memory.put_back(before)
        self._before.clear()
