"""Steps and orders of one rank: text form, signed form, named schedules, check, flat index, live ranges and slots.

An order is data: capture walks it, replay is compared with it, and buffer lifetimes follow from it. No torch here.
"""

import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, overload

from graphcap import _schedules
from graphcap._schedules import Triple, whole
from graphcap.errors import OrderError


class Phase(StrEnum):
    """What a step does, in the letters of torch.distributed.pipelining."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients
    I = "I"  # noqa: E741  input gradients only; the letter is torch's
    W = "W"  # weight gradients only


Layers = int | Sequence[int] | None  # graphed layers: one number for every chunk, one per chunk, or None for 1 each

_STEP = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
_HIGHLIGHT_MARGIN = 8  # steps shown on each side of the bad one, so that the arrow stays on a line that does not wrap


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Step:
    """One phase of one microbatch on one chunk, both counted from 0. Text form ``{chunk}{phase}{microbatch}``: ``0F1``.

    The form is that of torch.distributed.pipelining, which numbers global stages where we number local chunks.
    """

    phase: Phase
    chunk: int
    microbatch: int

    def __init__(self, phase: Phase | str, chunk: int, microbatch: int) -> None:
        if phase not in _PHASES:
            raise OrderError(f"phase is {phase!r}: pass F (forward), B (backward), I (input) or W (weight gradients).")
        object.__setattr__(self, "phase", Phase(phase))
        object.__setattr__(self, "chunk", whole("chunk of a step", chunk, 0))
        object.__setattr__(self, "microbatch", whole("microbatch of a step", microbatch, 0))

    @classmethod
    def parse(cls, text: str) -> Self:
        """``Step.parse("0F1")`` is ``Step("F", 0, 1)``; raises OrderError on anything else."""
        match = _STEP.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise OrderError(f"{text!r} is not a step: write chunk, phase (F, B, I or W) and microbatch, such as 0F1.")
        return cls(match[2], int(match[1]), int(match[3]))

    @classmethod
    def of(cls, step: "Step | str") -> "Step":
        """A Step from itself or from its text: what functions that take either call."""
        return step if isinstance(step, Step) else cls.parse(step)

    def __str__(self) -> str:
        return f"{self.chunk}{self.phase}{self.microbatch}"

    def __repr__(self) -> str:
        return f"Step({str(self)!r})"


_PHASES = tuple(Phase)


@dataclass(frozen=True, slots=True)
class Counts:
    """What the flat index depends on: graphed layers of each chunk, and microbatches. An Order has both too."""

    layers_per_chunk: tuple[int, ...]
    microbatches: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers_per_chunk", _layer_counts(self.layers_per_chunk, len(self.layers_per_chunk)))
        object.__setattr__(self, "microbatches", whole("microbatches", self.microbatches, 1))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Order(Sequence[Step]):
    """The steps that one rank runs, in order; immutable, equal by value, hashable.

    `chunks` and `microbatches` default to the largest seen plus one, `layers_per_chunk` (one number for all chunks, or
    one per chunk) to 1. `training` says whether backwards are required or forbidden: ``check()`` holds the order to it,
    while the constructor itself only makes sure that every step lies within the counts.
    """

    steps: tuple[Step, ...]
    chunks: int
    microbatches: int
    layers_per_chunk: tuple[int, ...]
    training: bool

    def __init__(
        self,
        steps: Iterable[Step | str],
        *,
        chunks: int | None = None,
        microbatches: int | None = None,
        layers_per_chunk: Layers = None,
        training: bool = True,
    ) -> None:
        found = tuple(Step.of(step) for step in steps)
        if not found:
            raise OrderError("the order has no steps: an order needs at least one forward, such as 0F0.")
        if not isinstance(training, bool):
            raise OrderError(f"training is {training!r}: pass True (backwards required) or False (none allowed).")
        most_chunks = max(step.chunk for step in found) + 1
        most_mbs = max(step.microbatch for step in found) + 1
        chunks = most_chunks if chunks is None else whole("chunks", chunks, 1)
        microbatches = most_mbs if microbatches is None else whole("microbatches", microbatches, 1)
        for position, step in enumerate(found):
            if step.chunk >= chunks or step.microbatch >= microbatches:
                raise OrderError(
                    f"step {step} at position {position} lies outside the order's chunks={chunks} and "
                    f"microbatches={microbatches}: both are counted from 0.\n{_pointed(found, position)}"
                )
        object.__setattr__(self, "steps", found)
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "microbatches", microbatches)
        object.__setattr__(self, "layers_per_chunk", _layer_counts(layers_per_chunk, chunks))
        object.__setattr__(self, "training", training)

    # ------------------------------------------------------------------------------------------- text and signed forms

    @classmethod
    def parse(cls, text: str, *, layers_per_chunk: Layers = None, training: bool = True) -> "Order":
        """An order from its text, steps separated by white space or commas: ``Order.parse("0F0 0F1 0B0 0B1")``."""
        if not isinstance(text, str):
            raise OrderError(f"an order's text is {text!r} ({type(text).__name__}): pass a str such as '0F0 0B0'.")
        return cls(text.replace(",", " ").split(), layers_per_chunk=layers_per_chunk, training=training)

    @classmethod
    def from_signed(cls, values: Iterable[float], *, layers_per_chunk: Layers = None, training: bool = True) -> "Order":
        """An order from the numbers of TE's ``make_graphed_callables(_order=...)`` and of Megatron-LM.

        ``+c`` is the forward of chunk c-1, ``-c`` its backward, ``-c-0.5`` its weight gradient. The k-th occurrence of
        a value is microbatch k of that chunk; ``-c`` is ``I`` for exactly those microbatches that have a half step.
        """
        return _from_triples(_schedules.decode_signed(values), layers_per_chunk, training)

    def to_signed(self) -> list[int | float]:
        """The signed form (see `from_signed`): ints, and floats for the half steps alone.

        The form knows no microbatch, so backwards must come first in, first out per chunk, and the microbatches with
        ``I`` and ``W`` before those with ``B``. Raises OrderError where decoding would give another order.
        """
        signed = _schedules.encode_signed(_triples(self))
        for position, decoded in enumerate(_schedules.decode_signed(signed)):
            if Step(*decoded) != self.steps[position]:
                raise OrderError(
                    f"the signed form cannot express this order: {self.steps[position]} at position {position} would "
                    f"be read back as {Step(*decoded)}. Keep the Order or its text instead.\n{_pointed(self, position)}"
                )
        return list(signed)

    # ------------------------------------------------------------------------------------------------- named schedules

    @classmethod
    def forward_backward(cls, microbatches: int, *, layers_per_chunk: Layers = None) -> "Order":
        """One chunk, each forward followed by its backward: ``0F0 0B0 0F1 0B1 ...``. The order without a pipeline."""
        return cls.local(1, microbatches, layers_per_chunk=layers_per_chunk)

    @classmethod
    def forward_only(cls, microbatches: int, *, chunks: int = 1, layers_per_chunk: Layers = None) -> "Order":
        """Forwards without backwards (``training=False``); each microbatch goes through all chunks before the next."""
        steps = _schedules.forward_only(whole("chunks", chunks, 1), whole("microbatches", microbatches, 1))
        return _from_triples(steps, layers_per_chunk, training=False)

    @classmethod
    def local(cls, chunks: int, microbatches: int, *, layers_per_chunk: Layers = None) -> "Order":
        """All chunks of a chain in one process: per microbatch, forwards ascend and backwards descend the chunks."""
        steps = _schedules.local(whole("chunks", chunks, 1), whole("microbatches", microbatches, 1))
        return _from_triples(steps, layers_per_chunk)

    @classmethod
    def gpipe(cls, microbatches: int, chunks: int = 1, *, layers_per_chunk: Layers = None) -> "Order":
        """All forwards, then all backwards (Huang et al. 2019, GPipe); the same on every rank.

        Microbatches ascend in both halves, as in torch's ScheduleGPipe. With several chunks (a looped pipeline, or a
        chain in one process) forwards run chunk by chunk and backwards from the last chunk to the first.
        """
        steps = _schedules.gpipe(whole("chunks", chunks, 1), whole("microbatches", microbatches, 1))
        return _from_triples(steps, layers_per_chunk)

    @classmethod
    def one_f_one_b(cls, pp_rank: int, pp_size: int, microbatches: int, *, layers_per_chunk: Layers = None) -> "Order":
        """Plain 1F1B with one chunk: P-r-1 warm-up forwards, then a forward and a backward in turn.

        Source: Megatron-LM pipeline_parallel/schedules.py, forward_backward_pipelining_without_interleaving.
        """
        return cls.interleaved(pp_rank, pp_size, 1, microbatches, layers_per_chunk=layers_per_chunk)

    @classmethod
    def interleaved(
        cls,
        pp_rank: int,
        pp_size: int,
        chunks: int,
        microbatches: int,
        group_size: int | None = None,
        *,
        layers_per_chunk: Layers = None,
    ) -> "Order":
        """Interleaved 1F1B: `chunks` chunks per rank, `group_size` (default `pp_size`) microbatches of one in a row.

        Sources: Megatron-LM pipeline_parallel/schedules.py, get_pp_rank_microbatches and get_schedule_table. Megatron's
        runtime also asks for pp_size <= group_size <= microbatches and for no last group shorter than pp_size: outside
        of that ranks can wait for each other forever, which one rank's order cannot show. One chunk: plain 1F1B.
        """
        pp_size = whole("pp_size", pp_size, 1)
        pp_rank = whole("pp_rank", pp_rank, 0, pp_size)
        chunks = whole("chunks", chunks, 1)
        microbatches = whole("microbatches", microbatches, 1)
        group_size = pp_size if group_size is None else whole("group_size", group_size, 1)
        if pp_size == 1 and chunks > 1:
            raise OrderError(
                f"interleaved with pp_size=1 and chunks={chunks}: without a pipeline the last chunk's backward would "
                f"come before its forward. Use Order.local(chunks={chunks}, microbatches={microbatches})."
            )
        steps = _schedules.interleaved(pp_rank, pp_size, chunks, microbatches, group_size)
        return _from_triples(steps, layers_per_chunk)

    @classmethod
    def ep_overlap(cls, base_order: "Order", layers_per_chunk: Layers = None, delay_wgrad: bool = False) -> "Order":
        """`base_order` with every layer a chunk of its own, so that expert-parallel communication overlaps.

        `layers_per_chunk` defaults to the base order's. With `delay_wgrad` every ``B`` becomes ``I`` and ``W``; the
        ``W`` of a pair's last layer stands at the end of the pair. After its first backward the base must run
        (backward, forward) pairs up to its last forward; nothing else of it is checked here.
        Source: Megatron-LM cuda_graphs.py, get_overlap_moe_expert_parallel_comm_order.
        """
        if not isinstance(delay_wgrad, bool):
            raise OrderError(f"delay_wgrad is {delay_wgrad!r}: pass True or False.")
        if not isinstance(base_order, Order):
            raise OrderError(f"base_order is {base_order!r}: pass an Order, such as Order.one_f_one_b(0, 2, 4).")
        if layers_per_chunk is None:
            layers_per_chunk = base_order.layers_per_chunk
        layers = _layer_counts(layers_per_chunk, base_order.chunks)
        _check_pairs(base_order)
        steps = (Step(*triple) for triple in _schedules.ep_overlap(_triples(base_order), layers, delay_wgrad))
        mbs, training = base_order.microbatches, base_order.training
        return cls(steps, chunks=sum(layers), microbatches=mbs, training=training)

    # --------------------------------------------------------------------------------------------------- what is asked

    def check(self) -> Self:
        """The order itself if every microbatch of every chunk runs F and then, in training, B or I and W; each once.

        Raises OrderError, whose text shows the order with an arrow under the bad step. A microbatch that never finishes
        is shown at its last step; one that never runs, at the end of the order.
        """
        allowed_after = _TRAINING if self.training else _INFERENCE
        done: dict[tuple[int, int], str] = {}
        last: dict[tuple[int, int], int] = {}
        for position, step in enumerate(self.steps):
            key = (step.chunk, step.microbatch)
            so_far = done.get(key, "")
            if step.phase not in allowed_after[so_far]:
                raise OrderError(self._complaint(position, so_far, last.get(key, position), allowed_after[so_far]))
            done[key] = so_far + step.phase
            last[key] = position
        unfinished = [position for key, position in last.items() if allowed_after[done[key]]]
        if unfinished:
            raise OrderError(self._unfinished(min(unfinished), done))
        for chunk in range(self.chunks):
            for mb in range(self.microbatches):
                if (chunk, mb) not in done:
                    raise OrderError(
                        f"microbatch {mb} of chunk {chunk} never runs, though the order has chunks={self.chunks} and "
                        f"microbatches={self.microbatches}: expected {chunk}F{mb}.\n{_pointed(self, len(self))}"
                    )
        return self

    def flat_index(self, chunk: int, microbatch: int, layer: int = 0) -> int:
        """See the function `flat_index`."""
        return flat_index(self, chunk, microbatch, layer)

    def ep_flat_index(self, chunk: int, microbatch: int, layer: int = 0) -> int:
        """See the function `ep_flat_index`; this order is the base order."""
        return ep_flat_index(self, chunk, microbatch, layer)

    def _complaint(self, position: int, so_far: str, before: int, allowed: str) -> str:
        """Why the step at `position` cannot follow what its microbatch did `so_far` (its last step was at `before`)."""
        step = self.steps[position]
        expected = _listed(step, allowed) or "no further step of this microbatch"
        head = f"step {step} at position {position} of the order"
        if not self.training and step.phase != "F":
            why = "is a backward, but the order is not for training: drop it, or pass training=True"
        elif not so_far:
            why = f"comes before its forward: expected {expected} earlier in the order"
        elif step.phase in so_far:
            why = f"runs a second time: expected {expected}"
        elif step.phase == "W":
            why = f"has no {step.chunk}I{step.microbatch} before it: a W needs its I, and a B needs no W"
        else:
            why = f"cannot follow {self.steps[before]}: expected {expected}"
        return f"{head} {why}.\n{_pointed(self, position)}"

    def _unfinished(self, position: int, done: Mapping[tuple[int, int], str]) -> str:
        """The text for a microbatch whose last step stands at `position` though more must follow."""
        step = self.steps[position]
        expected = _listed(step, _TRAINING[done[step.chunk, step.microbatch]])
        forwards_only = all(other.phase == "F" for other in self.steps)
        hint = " An order without backwards needs training=False." if forwards_only else ""
        return (
            f"step {step} at position {position} of the order ends its microbatch too early: expected {expected} later "
            f"in the order.{hint}\n{_pointed(self, position)}"
        )

    # ------------------------------------------------------------------------------------------------------- a sequence

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, index: int | slice) -> Step | tuple[Step, ...]:
        return self.steps[index]

    def __str__(self) -> str:
        return " ".join(map(str, self.steps))

    def __repr__(self) -> str:
        return (
            f"Order({str(self)!r}, chunks={self.chunks}, microbatches={self.microbatches}, "
            f"layers_per_chunk={self.layers_per_chunk}, training={self.training})"
        )


# What a microbatch of a chunk may do next, by what it has done so far. Nothing more allowed means: finished.
_TRAINING = {"": "F", "F": "BI", "FI": "W", "FB": "", "FIW": ""}
_INFERENCE = {"": "F", "F": ""}


# ---------------------------------------------------------------------------------------------------------- flat index


def flat_index(order: Order | Counts, chunk: int, microbatch: int, layer: int = 0) -> int:
    """Position of (chunk, microbatch, layer) among samples, per-forward parameters and returned callables.

    ``sum(L[:chunk]) * M + microbatch * L[chunk] + layer`` (TE graph.py, Megatron-LM cuda_graphs.py): a bijection onto
    ``range(sum(L) * M)``. This is the one place that resolves it; out of range raises OrderError, nothing wraps around.
    """
    layers = _in_range(order, chunk, microbatch, layer)
    return sum(layers[:chunk]) * order.microbatches + microbatch * layers[chunk] + layer


def ep_flat_index(order: Order | Counts, chunk: int, microbatch: int, layer: int = 0) -> int:
    """``(sum(L[:chunk]) + layer) * M + microbatch``: flat index after `Order.ep_overlap`, in terms of the base order.

    Equals ``flat_index(expanded, sum(L[:chunk]) + layer, microbatch)``, since each layer is then a chunk.
    """
    layers = _in_range(order, chunk, microbatch, layer)
    return (sum(layers[:chunk]) + layer) * order.microbatches + microbatch


# ------------------------------------------------------------------------------------------------ live ranges and slots


@dataclass(frozen=True, slots=True)
class LiveRange:
    """From which to which position of the order the buffers of one microbatch of one chunk are needed, both ends in."""

    chunk: int
    microbatch: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SlotUse:
    """One live range of one layer, and the slot (set of static input buffers) that it lives in."""

    chunk: int
    microbatch: int
    layer: int
    first: int
    last: int
    slot: int


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Which slot each (chunk, microbatch, layer) uses; `uses` stands in the order of the flat index."""

    order: Order
    uses: tuple[SlotUse, ...]
    count: int

    def slot_of(self, chunk: int, microbatch: int, layer: int = 0) -> int:
        """The slot, from 0 to count - 1; raises OrderError out of range."""
        return self.uses[flat_index(self.order, chunk, microbatch, layer)].slot

    def count_for(self, chunk: int, layer: int | None = None) -> int:
        """How many slots the chunk (or one layer of it) uses; slots that it shares with other chunks count as well."""
        _in_range(self.order, chunk, 0, layer or 0)
        return len({use.slot for use in self.uses if use.chunk == chunk and layer in (None, use.layer)})

    @property
    def graphs(self) -> int:
        """The number of forward graphs: distinct (chunk, layer, slot)."""
        return len({(use.chunk, use.layer, use.slot) for use in self.uses})

    def sharers(self, slot: int) -> tuple[SlotUse, ...]:
        """Who uses `slot`, in the order of use."""
        slot = whole("slot", slot, 0, self.count)
        return tuple(sorted((use for use in self.uses if use.slot == slot), key=lambda use: use.first))

    def __iter__(self) -> Iterator[SlotUse]:
        return iter(self.uses)

    def __len__(self) -> int:
        return len(self.uses)


Signatures = Mapping[tuple[int, int, int], Hashable] | Callable[[int, int, int], Hashable]


def live_ranges(order: Order) -> tuple[LiveRange, ...]:
    """The live range of every (chunk, microbatch), by first position; checks the order.

    Buffers are taken at F and freed at the last step that reads them: B, or W, since a delayed weight gradient still
    reads the layer's input. Without training that is the F itself.
    """
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for position, step in enumerate(order.check()):
        first.setdefault((step.chunk, step.microbatch), position)
        last[step.chunk, step.microbatch] = position
    return tuple(LiveRange(chunk, mb, start, last[chunk, mb]) for (chunk, mb), start in first.items())


def assign_slots(order: Order, signatures: Signatures | None = None) -> SlotMap:
    """One slot for every live range of every layer; two share one only with equal signatures and disjoint lives.

    `signatures` gives something hashable for (chunk, microbatch, layer): shapes, dtypes, strides, device and
    requires_grad of its inputs. None: all equal. The greedy walk needs the fewest slots per signature, since it makes a
    new one only when all are live. Among the free ones it prefers a slot that this layer had before (no new graph),
    else the one that was freed first.
    """
    free: dict[Hashable, deque[int]] = {}
    had: set[tuple[int, int, int]] = set()
    uses: list[SlotUse] = []
    releases: dict[int, list[tuple[Hashable, int]]] = {}
    count = 0
    last = {(life.chunk, life.microbatch): life.last for life in live_ranges(order)}
    for position, step in enumerate(order):
        chunk, mb = step.chunk, step.microbatch
        for layer in range(order.layers_per_chunk[chunk]) if step.phase is Phase.F else ():
            signature = _signature(signatures, chunk, mb, layer)
            pool = free.setdefault(signature, deque())
            slot = next((slot for slot in pool if (chunk, layer, slot) in had), pool[0] if pool else count)
            if pool:
                pool.remove(slot)
            else:
                count += 1
            had.add((chunk, layer, slot))
            uses.append(SlotUse(chunk, mb, layer, position, last[chunk, mb], slot))
            releases.setdefault(last[chunk, mb], []).append((signature, slot))
        for signature, slot in releases.pop(position, ()):
            free[signature].append(slot)
    uses.sort(key=lambda use: flat_index(order, use.chunk, use.microbatch, use.layer))
    return SlotMap(order, tuple(uses), count)


# ------------------------------------------------------------------------------------------------------------- helpers


def _from_triples(triples: Iterable[Triple], layers_per_chunk: Layers = None, training: bool = True) -> Order:
    return Order((Step(*triple) for triple in triples), layers_per_chunk=layers_per_chunk, training=training)


def _triples(order: Order) -> list[Triple]:
    return [(step.phase.value, step.chunk, step.microbatch) for step in order]


def _layer_counts(layers: Layers, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk as a tuple; None is 1 each, one number is that many each."""
    if layers is None:
        return (1,) * chunks
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        return (whole("layers_per_chunk", layers, 1),) * chunks
    counts = tuple(whole(f"layers_per_chunk[{chunk}]", count, 1) for chunk, count in enumerate(layers))
    if len(counts) != chunks or not counts:
        raise OrderError(f"layers_per_chunk is {counts}: pass one number per chunk, the order has {chunks} chunks.")
    return counts


def _in_range(order: Order | Counts, chunk: int, microbatch: int, layer: int) -> tuple[int, ...]:
    """Layers per chunk, once all three indices are known to lie in range."""
    layers = order.layers_per_chunk
    whole("chunk", chunk, 0, len(layers))
    whole("microbatch", microbatch, 0, order.microbatches)
    whole(f"layer of chunk {chunk}", layer, 0, layers[chunk])
    return layers


def _signature(signatures: Signatures | None, chunk: int, microbatch: int, layer: int) -> Hashable:
    key = (chunk, microbatch, layer)
    if signatures is None:
        return None
    if isinstance(signatures, Mapping):
        if key not in signatures:
            raise OrderError(f"signatures has no entry for (chunk, microbatch, layer) = {key}: pass one for each.")
        found = signatures[key]
    else:
        found = signatures(*key)
    try:
        hash(found)
    except TypeError:
        raise OrderError(
            f"the signature of (chunk, microbatch, layer) = {key} is {found!r}: pass something hashable."
        ) from None
    return found


def _check_pairs(base: Order) -> None:
    """What EP overlap asks of its base: no half steps; after the first backward, B F pairs up to the last forward."""
    first_backward = next((i for i, step in enumerate(base) if step.phase != "F"), len(base))
    last_forward = max((i for i, step in enumerate(base) if step.phase == "F"), default=-1)
    for position, step in enumerate(base):
        if step.phase in "IW":
            why = "is half a backward: EP overlap splits the backwards itself (delay_wgrad=True)"
        elif first_backward <= position <= last_forward and step.phase != "BF"[(position - first_backward) % 2]:
            why = "has no partner: EP overlap needs one backward and one forward in turn up to the last forward"
        else:
            continue
        raise OrderError(
            f"step {step} at position {position} of the base order {why}. Pass an order such as "
            f"Order.one_f_one_b or Order.interleaved.\n{_pointed(base, position)}"
        )


def _listed(step: Step, phases: str) -> str:
    return " or ".join(f"{step.chunk}{phase}{step.microbatch}" for phase in phases)


def _pointed(steps: Sequence[Step], position: int) -> str:
    """Two lines: the order around `position` and an arrow under that step; `position` may be one past the end."""
    texts = [*map(str, steps), *(["(end)"] if position == len(steps) else [])]
    start, stop = max(0, position - _HIGHLIGHT_MARGIN), position + _HIGHLIGHT_MARGIN + 1
    before = ["..."] * (start > 0) + texts[start:position]
    after = texts[position:stop] + ["..."] * (stop < len(texts))
    indent = "    " + "".join(f"{text} " for text in before)
    return f"{indent}{' '.join(after)}\n{' ' * len(indent)}^"
