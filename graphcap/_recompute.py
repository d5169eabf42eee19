"""`CaptureConfig(recompute="part")`: a backward graph that begins with the part's forward, so that no activation is kept.

The forward graph is recorded as always, and what autograd saved in it is dropped; its memory goes back to the pool. A
backward graph then holds the part's forward once more, from the same static inputs, and its differentiation. Both draw the
same random numbers: the generators are set back to where they stood before the forward's replay. On CUDA a replay hands the
default generator's seed and offset to the graph in device memory, in stream order, and counts on from offset 0 within the
graph, so the state that the host sets before a replay is the state that the kernels see
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, ATen/cuda/CUDAGeneratorImpl.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphcap import _torch_private as private
from graphcap.backends.base import Backend
from graphcap.backends.tape_record import written_arguments
from graphcap.backends.tape_refusals import tensors_in
from graphcap.errors import CutError, ReplayError

Versions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Remembered:
    """Of one forward: the generators before it, and how often what it reads had been changed by then."""

    states: object
    versions: Versions


@dataclass(frozen=True, slots=True)
class Again:
    """How the backward graphs of one part are replayed. reads: parameters, buffers and whatever else lies outside the graph
    and is read again. The generators are set back for every part: an extension's kernel may draw without saying so."""

    part: str
    backend: Backend
    reads: tuple[torch.Tensor, ...]

    def remember(self) -> Remembered:
        """Before the forward of a microbatch is replayed."""
        return Remembered(self.backend.generator_states(), versions_of(self.reads))

    def replay(self, launch: Callable[[], None], then: Remembered) -> None:
        """Launch a backward graph with the random numbers of that forward; the generators are as before afterwards."""
        require_unchanged(self.part, self.reads, then.versions)
        now = self.backend.generator_states()
        self.backend.restore_generator_states(then.states)
        try:
            launch()
        finally:
            self.backend.restore_generator_states(now)


def versions_of(tensors: Sequence[torch.Tensor]) -> Versions:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def require_unchanged(part: str, tensors: Sequence[torch.Tensor], before: Versions) -> None:
    now = versions_of(tensors)
    if now == before:
        return
    number = next(i for i, (a, b) in enumerate(zip(now, before, strict=True)) if a != b)
    raise ReplayError(
        f"part {part}: a parameter or buffer of shape {list(tensors[number].shape)} that it reads was changed between its "
        "forward and its backward, which recomputes the forward from it: run the backward first (optimizer steps come after "
        "the last backward), or capture without recompute"
    )


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at a part's second forward while it is recorded, and notes what it reads from outside. Refuses what two runs do
    not repeat: writes to memory that stays, and generators that nobody sets back."""

    def __init__(self, part: str, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = part
        self.reads: dict[int, torch.Tensor] = {}
        self._inputs = {private.storage_key(tensor) for tensor in inputs}
        self._born: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse_generator(func, args, kwargs)
        for tensor in self._written(func, args, kwargs):
            if private.storage_key(tensor) not in self._born:
                raise CutError(
                    f"part {self.part} changes a tensor of shape {list(tensor.shape)} that stays (a buffer, such as the "
                    f"running statistics of a BatchNorm) in {func}: recompute='part' would change it twice. Let an EAGER "
                    "part do it, or capture without recompute"
                )
        for tensor in tensors_in(args, kwargs):
            key = private.storage_key(tensor)
            if key not in self._born and key not in self._inputs and key not in self.reads:
                # Itself, or what it is a view of: a detached one made in here would count versions of its own.
                self.reads[key] = tensor if tensor._base is None else tensor._base
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            key = private.storage_key(tensor)
            if key not in self._inputs and key not in self.reads:
                self._born.add(key)
        return result

    def _refuse_generator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise CutError(
                f"part {self.part} draws from a generator of its own in {func}: recompute='part' sets back the default "
                "generator only. Draw from the default one, outside of the part, or capture without recompute"
            )

    @staticmethod
    def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        yield from written_arguments(func, args, kwargs)
        name = func._schema.name
        if "batch_norm" in name and "backward" not in name:  # their schema calls the running statistics read-only
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            if named.get("training"):
                yield from tensors_in((named.get("running_mean"), named.get("running_var")))


class EagerWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at an eager part in warm-up. draws: from a generator that torch's checkpoint would not set back; reads: the
    storages that it reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False
        self.reads: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.draws = self.draws or any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
        self.reads.update(private.storage_key(tensor) for tensor in tensors_in(args, kwargs) if _is_dense(tensor))
        return func(*args, **kwargs)

    def of(self, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Those of them that were read."""
        return tuple(t for t in tensors if _is_dense(t) and private.storage_key(t) in self.reads)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not private.overrides_dispatch(tensor) and not private.is_transformed(tensor)


def run_checkpointed(
    part: str, run: Callable[..., list[Any]], values: Sequence[Any], state: Sequence[torch.Tensor]
) -> list[Any]:
    """Run an eager part under torch's checkpoint; `state`: the parameters and buffers that it may read.

    The non-reentrant form: it takes any structure, returns the very tensors that the part made, keeps the autograd graph
    that eager has (so input gradients and weight gradients can be asked for one after the other), and restores the random
    state for its recomputation. The reentrant one needs a tensor argument that requires grad and refuses autograd.grad.
    """
    before: list[Versions] = []

    def once_or_again(*given: Any) -> list[Any]:
        if before:
            require_unchanged(part, state, before[0])
        else:
            before.append(versions_of(state))
        return run(*given)

    made: list[Any] = checkpoint(once_or_again, *values, use_reentrant=False)
    return made
