"""Step lists of the named schedules, and the signed-number form of Transformer Engine (TE) and Megatron-LM.

Everything here works on plain triples (phase letter, chunk, microbatch), all counted from 0. ``graphcap.order`` turns
them into ``Step`` and ``Order``.

Symbols: P pipeline size, r rank, C chunks of one rank, M microbatches, g group size, W warm-up forwards (those before
the first forward/backward pair).
"""

import math
import numbers
from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest

from graphcap.errors import OrderError

Triple = tuple[str, int, int]


def whole(name: str, value: object, least: int, below: int | None = None) -> int:
    """`value` as an int in [least, below); raises OrderError otherwise. bool is refused: it is nearly always a slip."""
    if type(value) is int and value >= least and (below is None or value < below):
        return value
    allowed = f"a whole number of at least {least}" if below is None else f"a whole number from {least} to {below - 1}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OrderError(f"{name} is {value!r} ({type(value).__name__}): pass {allowed}.")
    number = int(value)
    if number < least or (below is not None and number >= below):
        raise OrderError(f"{name} is {number}: pass {allowed}.")
    return number


# ---------------------------------------------------------------------------------------------------- named schedules


def forward_only(chunks: int, microbatches: int) -> list[Triple]:
    """Per microbatch the forwards of all chunks, first to last."""
    return [("F", chunk, mb) for mb in range(microbatches) for chunk in range(chunks)]


def local(chunks: int, microbatches: int) -> list[Triple]:
    """Per microbatch: forwards first to last chunk, then backwards last to first."""
    steps: list[Triple] = []
    for mb in range(microbatches):
        steps += [("F", chunk, mb) for chunk in range(chunks)]
        steps += [("B", chunk, mb) for chunk in reversed(range(chunks))]
    return steps


def gpipe(chunks: int, microbatches: int) -> list[Triple]:
    """All forwards, chunk by chunk, then all backwards from the last chunk; within a chunk, microbatches ascend."""
    steps: list[Triple] = [("F", chunk, mb) for chunk in range(chunks) for mb in range(microbatches)]
    return steps + [("B", chunk, mb) for chunk in reversed(range(chunks)) for mb in range(microbatches)]


def warmup_count(pp_rank: int, pp_size: int, chunks: int, microbatches: int, group_size: int) -> int:
    """W, the forwards before the first forward/backward pair (Megatron-LM schedules.py, get_pp_rank_microbatches)."""
    behind = pp_size - pp_rank - 1
    # Interleaved: all chunks but the last run a whole group first, and each later rank adds a way there and a way back.
    count = behind if chunks == 1 else 2 * behind + (chunks - 1) * group_size
    return min(count, microbatches * chunks)


def schedule_table(chunks: int, microbatches: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of forwards (Megatron-LM schedules.py, get_schedule_table).

    A group of `group_size` microbatches passes chunk 0, then chunk 1, ...; the last group may be shorter.
    """
    table = []
    for start in range(0, microbatches, group_size):
        group = range(start, min(start + group_size, microbatches))
        table += [(mb, chunk) for chunk in range(chunks) for mb in group]
    return table


def interleaved(pp_rank: int, pp_size: int, chunks: int, microbatches: int, group_size: int) -> list[Triple]:
    """Interleaved 1F1B; plain 1F1B with one chunk (Megatron-LM cuda_graphs.py, convert_schedule_table_to_order)."""
    table = schedule_table(chunks, microbatches, group_size)
    warmup = warmup_count(pp_rank, pp_size, chunks, microbatches, group_size)
    forwards: list[Triple] = [("F", chunk, mb) for mb, chunk in table]
    # The same table read with mirrored chunks: where a forward visits chunk 0, the backward visits the last one.
    backwards: list[Triple] = [("B", chunks - 1 - chunk, mb) for mb, chunk in table]
    steps = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        steps += [forward, backward]
    return steps + backwards[len(table) - warmup :]


def ep_overlap(steps: Sequence[Triple], layers: Sequence[int], delay_wgrad: bool) -> list[Triple]:
    """Every layer becomes its own chunk (Megatron-LM cuda_graphs.py, get_overlap_moe_expert_parallel_comm_order).

    `steps`: forwards; then (backward, forward) pairs; then backwards (the caller has checked this). Inside a pair the
    layers are zipped by position: the forward of one microbatch hides the communication of the other's backward.
    """
    bases = [0, *accumulate(layers)]

    def forward(step: Triple) -> list[Triple]:
        return [("F", bases[step[1]] + layer, step[2]) for layer in range(layers[step[1]])]

    def backward(step: Triple) -> list[list[Triple]]:
        """One group per layer, deepest first: its full backward, or input gradients and then weight gradients."""
        phases = "IW" if delay_wgrad else "B"
        deepest_first = reversed(range(layers[step[1]]))
        return [[(phase, bases[step[1]] + layer, step[2]) for phase in phases] for layer in deepest_first]

    first_backward = next((i for i, step in enumerate(steps) if step[0] != "F"), len(steps))
    pairs_end = max((i + 1 for i, step in enumerate(steps) if step[0] == "F"), default=0)
    out = [fine for step in steps[:first_backward] for fine in forward(step)]
    for i in range(first_backward, pairs_end, 2):
        groups = backward(steps[i])
        # The last layer's weight gradient is not waited for by any other layer: it goes behind the remaining forwards.
        postponed = groups[-1][1:]
        groups[-1] = groups[-1][:1]
        for ahead, group in zip_longest(forward(steps[i + 1]), groups):
            out += [ahead] if ahead else []
            out += group or []
        out += postponed
    for step in steps[max(first_backward, pairs_end) :]:
        out += [fine for group in backward(step) for fine in group]
    return out


# -------------------------------------------------------------------------------------------------------- signed form


def encode_signed(steps: Iterable[Triple]) -> tuple[int | float, ...]:
    """+(chunk+1) for F, -(chunk+1) for B and I, -(chunk+1)-0.5 for W. The microbatch is lost: decoding counts anew."""
    out: list[int | float] = []
    for phase, chunk, _ in steps:
        number = chunk + 1
        out.append(number if phase == "F" else -number - 0.5 if phase == "W" else -number)
    return tuple(out)


def decode_signed(values: Iterable[object]) -> list[Triple]:
    """The k-th occurrence of a value is microbatch k; -c is I for exactly the microbatches that have a half step."""
    coded = [_phase_and_chunk(position, value) for position, value in enumerate(values)]
    delayed: dict[int, int] = {}
    for phase, chunk in coded:
        if phase == "W":
            delayed[chunk] = delayed.get(chunk, 0) + 1
    seen: dict[tuple[str, int], int] = {}
    steps: list[Triple] = []
    for phase, chunk in coded:
        mb = seen.get((phase, chunk), 0)
        seen[phase, chunk] = mb + 1
        steps.append(("I" if phase == "B" and mb < delayed.get(chunk, 0) else phase, chunk, mb))
    return steps


def _phase_and_chunk(position: int, value: object) -> tuple[str, int]:
    """One signed number as (F, B or W, chunk)."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        number = float(value)
        if number.is_integer() and number != 0:
            return ("F", int(number) - 1) if number > 0 else ("B", int(-number) - 1)
        if number <= -1.5 and (number - 0.5).is_integer():
            return "W", int(-number - 0.5) - 1
    raise OrderError(
        f"value {value!r} at position {position} of the signed order means no step: "
        "pass c for the forward of chunk c (counted from 1), -c for its backward, -c-0.5 for its weight gradient."
    )
