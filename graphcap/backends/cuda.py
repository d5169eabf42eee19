"""CUDA graphs: the only module that names torch.cuda graphs. Nothing runs at import.

It drives `capture_begin`/`capture_end` itself: `torch.cuda.graph` synchronises the device and empties both caches for
every graph, here a session pays once. All captures of a backend happen on one side stream, since the segments of a pool
belong to a stream. `capture_error_mode="thread_local"`: "global" fails when any other thread (a data loader) allocates.

Host reads are refused before they run, through the same table as on the tape. The engine carries the caller's modes to
its device thread (`at::ThreadLocalState`), so this holds in a recorded backward too; what gets past the table (a kernel
launcher of an extension that synchronises) invalidates the capture, and `_recover` puts the process back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch

from graphcap import _torch_private as private
from graphcap.backends.base import Backend, Event, Graph, Pool
from graphcap.backends.refusal_modes import CallGate, Gate, OperatorGate, default_generator
from graphcap.backends.scopes import exclusive_capture, frozen_gc, is_capturing
from graphcap.errors import CaptureError, DeviceError, ForbiddenOpError, ReplayError

_POOL: TypeAlias = Any  # torch.cuda._POOL_HANDLE, two ints; only named in stubs

# Parts of torch's and the driver's messages that mean: this can't be captured (not: your model is wrong).
_CAPTURE_MESSAGES = (
    "capturing",  # operation not permitted when stream is capturing
    "during capture",  # operation failed due to a previous error during capture
    "cudaErrorStreamCapture",
    "uncaptured work",
    "CUDA graph",
    "capture mode",  # a generator that was not registered
)


class CudaGraph(Graph):
    """Owns one `torch.cuda.CUDAGraph`; its memory dies with it, or with `reset()`."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._ready = False
        self._operations: int | None = None  # None: not known

    def finish(self) -> None:
        """Make it launchable, once the capture ended well."""
        assert self._graph is not None
        self._operations = count_nodes(self._graph.raw_cuda_graph())
        with quiet_about_empty_graphs():
            self._graph.instantiate()
        self._ready = True

    def replay(self) -> None:
        if self._graph is None or not self._ready:
            state = "reset" if self._graph is None else "recording"
            raise ReplayError(f"this graph is {state}: it can be replayed after its capture and before reset()")
        if is_capturing():
            raise CaptureError("a graph can't be replayed inside a capture: replay it before or after")
        self._graph.replay()

    def reset(self) -> None:
        graph, self._graph, self._ready = self._graph, None, False
        if graph is not None:
            graph.reset()

    @property
    def operations(self) -> int:
        return self._operations or 0

    @property
    def empty(self) -> bool:
        return self._ready and self._operations == 0


class CudaPool(Pool):
    """A private pool of the caching allocator, kept by an own tiny graph: the allocator forgets a pool that no graph
    uses, and asserts when a later capture names it again."""

    def __init__(self, handle: _POOL) -> None:
        self._handle = handle
        self._pin: torch.cuda.CUDAGraph | None = None

    @property
    def handle(self) -> _POOL:
        return self._handle

    def poison(self) -> None:
        return None  # recording computed nothing

    def renew(self) -> None:
        """Later captures go to another pool; the graphs recorded so far keep the memory of the old one."""
        self._handle = torch.cuda.graph_pool_handle()
        self._pin = None

    def pin(self, device: torch.device) -> None:
        """Before the first capture, on the capture stream."""
        if self._pin is not None:
            return
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        try:
            torch.zeros(1, device=device)  # an empty graph would be warned about
        finally:
            graph.capture_end()
        self._pin = graph


class CudaEvent(Event):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaView:
    """Where tensors are; the tape imitates this one."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def on_device(self, device: object) -> bool:
        if device is None:
            return torch.get_default_device().type == "cuda"
        if isinstance(device, int):
            return True
        return torch.device(device).type == "cuda"  # type: ignore[call-overload, no-any-return]


class CudaBackend(Backend):
    """Records on one GPU. Make it with the device that the tensors are on."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        super().__init__(torch.device("cuda", index))
        self._stream: torch.cuda.Stream | None = None
        self._in_session = False
        self._warmed_up = False  # nothing has been recorded in the running session yet

    def new_pool(self, handle: object | None = None) -> CudaPool:
        if handle is None:
            with torch.cuda.device(self.device):
                handle = torch.cuda.graph_pool_handle()
        assert isinstance(handle, tuple)
        return CudaPool(handle)

    @contextmanager
    def session(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.device))
            states = self.generator_states()
            stack.callback(self.restore_generator_states, states)
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            stack.enter_context(frozen_gc())
            stack.enter_context(self._on_side_stream())
            stack.callback(setattr, self, "_in_session", self._in_session)
            self._in_session = self._warmed_up = True
            yield

    @contextmanager
    def capture(self, pool: Pool, generators: Iterable[torch.Generator] = ()) -> Iterator[Graph]:
        assert isinstance(pool, CudaPool)
        known = tuple(generators)
        with ExitStack() as stack:
            stack.enter_context(exclusive_capture())
            stack.enter_context(torch.cuda.device(self.device))
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("a capture inside a capture: the current stream is capturing already")
            if not self._in_session:
                stack.enter_context(frozen_gc())
                stack.enter_context(self._on_side_stream())
            if self._warmed_up:  # what warm-up leaves in the caches can't be used in a pool, so it would be there twice
                self._warmed_up = False
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            pool.pin(self.device)
            yield from self._record(pool, known)

    def _record(self, pool: CudaPool, generators: tuple[torch.Generator, ...]) -> Iterator[Graph]:
        """One capture on the current stream; at the single `yield` the user's code runs."""
        gate = Gate(CudaView(), generators)
        raw = torch.cuda.CUDAGraph(keep_graph=True)
        own = default_generator(self.device)
        # Cloned before anything else: what a failed capture leaves in a generator raises at every later draw.
        on_gpu = [generator for generator in generators if generator.device.type == "cuda"]
        clones = [(generator, generator.clone_state()) for generator in unique((own, *on_gpu))]
        for generator, _ in clones[1:]:
            raw.register_generator_state(generator)
        graph = CudaGraph(raw)
        failure: BaseException | None = None
        try:
            raw.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        except Exception as error:
            self._recover(pool, clones)
            raise CaptureError(f"the capture could not begin: {error}") from error
        try:
            with CallGate(gate), OperatorGate(gate):
                yield graph
        except BaseException as error:
            failure = error
        try:
            with quiet_about_empty_graphs():
                raw.capture_end()
        except Exception as error:
            self._recover(pool, clones)
            failure = failure or error
        if failure is None and gate.refused is None:
            try:
                graph.finish()
                return
            except Exception as error:
                failure = error
        graph.reset()
        try:
            raise_failure(failure, gate.refused)
        finally:
            # An error holds its frames, and they hold the tensors: no cycle may keep them.
            gate.refused = failure = None

    def _recover(self, pool: CudaPool, clones: list[tuple[torch.Generator, torch.Generator]]) -> None:
        """After an invalidated capture: allocations leave the pool, generators work again."""
        try:
            private.end_allocate_to_pool(self.device, pool.handle)
        except RuntimeError:
            pass  # capture_end had got past this before it failed: nothing is open any more
        # The pinned-memory allocator is left recording to the pool as well (torch < 2.12), and nothing in Python ends
        # that: no capture can begin in this pool again, so the next one gets another.
        pool.renew()
        try:
            self._heal([generator for generator, _ in clones])
        except RuntimeError:
            # Works as well (found on an H200), but graphs captured earlier stay tied to the old state: manual_seed would
            # not reach them any more. Hence only where healing fails.
            for generator, clone in clones:
                generator.graphsafe_set_state(clone)
            return
        for generator, clone in clones:
            generator.set_state(clone.get_state())

    def _heal(self, generators: list[torch.Generator]) -> None:
        """End the capturing mode in which a failed capture leaves generators: the end of a good capture does it."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in generators[1:]:  # the first is the default one, which every graph registers by itself
            graph.register_generator_state(generator)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            torch.zeros(1, device=self.device)
        finally:
            graph.capture_end()
        graph.reset()
        for generator in generators:
            torch.rand(1, device=self.device, generator=generator)  # raises where it is still in capturing mode

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side = self._stream
        side.wait_stream(outer)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            outer.wait_stream(side)

    def allocated(self, pool: Pool) -> int:
        return int(torch.cuda.memory_allocated(self.device))  # private pools included

    def generator_states(self) -> object:
        # The CPU's too: Python code of a warm-up may draw from it.
        return (torch.default_generator.get_state(), torch.cuda.get_rng_state(self.device))

    def restore_generator_states(self, states: object) -> None:
        assert isinstance(states, tuple)
        torch.default_generator.set_state(states[0])
        torch.cuda.set_rng_state(states[1], self.device)

    def stream_key(self) -> object:
        return (self.device.index, private.current_raw_stream(self.device.index))

    def wait_stream(self, key: object) -> None:
        assert isinstance(key, tuple)
        other: Any = torch.cuda.ExternalStream(key[1], device=self.device)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(self.device).wait_stream(other)

    @contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        if not isinstance(stream, torch.cuda.Stream):
            raise DeviceError(f"cuda_graph_stream is {stream!r}: expected a torch.cuda.Stream")
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def wait_event(self, event: object) -> None:
        if not isinstance(event, torch.cuda.Event):
            raise DeviceError(f"cuda_graph_event is {event!r}: expected a torch.cuda.Event that the graph records")
        torch.cuda.current_stream(self.device).wait_event(event)

    def record_event(self) -> CudaEvent:
        return CudaEvent(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def raise_failure(failure: BaseException | None, refused: ForbiddenOpError | None) -> None:
    """Raise what the capture's failure means, the original chained. A refusal wins, also one that the user caught."""
    if refused is not None:
        if failure is None or failure is refused:
            raise refused
        raise refused from failure
    assert failure is not None
    if isinstance(failure, CaptureError) or not isinstance(failure, RuntimeError):
        raise failure
    if isinstance(failure, torch.OutOfMemoryError):
        raise CaptureError(
            f"out of memory while recording: {failure}. Static buffers live as long as the graphs: capture fewer "
            "slots or smaller samples, or free memory (torch.cuda.empty_cache()) before"
        ) from failure
    if any(part in str(failure) for part in _CAPTURE_MESSAGES):
        raise ForbiddenOpError(
            "the recording was invalidated by something that a graph can't hold and that no operator announced (an "
            f"extension that synchronises, work of another stream, a host read in C++): {failure}. Make the part that "
            "does it an EAGER part; CUDA_LAUNCH_BLOCKING and this traceback's chain help to find it"
        ) from failure
    raise failure


def unique(generators: Iterable[torch.Generator]) -> list[torch.Generator]:
    """Without repetitions, in order; the default one may be handed in by the user as well."""
    return list({private.generator_key(generator): generator for generator in generators}.values())


@contextmanager
def quiet_about_empty_graphs() -> Iterator[None]:
    """torch warns about them; a stretch of views alone is one, and is left out at replay."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


def count_nodes(raw_graph: int) -> int | None:
    """The nodes of a cudaGraph_t; None where cuda-bindings is missing or the driver can't tell."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    answer: Any = runtime.cudaGraphGetNodes(raw_graph, 0)
    return int(answer[-1]) if int(answer[0]) == 0 else None
