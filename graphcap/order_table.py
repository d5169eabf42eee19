"""An order as a table for people: each step, its microbatch's live range, its slots. Used by ``graphcap order``."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from graphcap._schedules import whole
from graphcap.errors import OrderError
from graphcap.order import Order, SlotMap, Step, assign_slots

_NAMED: dict[str, Callable[[int, int, int, int, int], Order]] = {
    "gpipe": lambda pp, rank, mbs, chunks, layers: Order.gpipe(mbs, layers_per_chunk=layers),
    "1f1b": lambda pp, rank, mbs, chunks, layers: Order.one_f_one_b(rank, pp, mbs, layers_per_chunk=layers),
    "interleaved": lambda pp, rank, mbs, chunks, layers: Order.interleaved(
        rank, pp, chunks, mbs, layers_per_chunk=layers
    ),
}
_ONE_CHUNK = ("gpipe", "1f1b")
_NEED_TORCH = ("loopedbfs", "interleaved-zb", "zbv", "dualpipev")

SCHEDULES: tuple[str, ...] = tuple(_NAMED)


@dataclass(frozen=True, slots=True)
class Row:
    """One step at `position`; its microbatch's buffers live from `first` to `last`, in one slot per layer."""

    position: int
    step: Step
    first: int
    last: int
    slots: tuple[int, ...]


def named(schedule: str, *, pp: int, rank: int, microbatches: int, chunks: int | None = None, layers: int = 1) -> Order:
    """The order of rank `rank` of `pp` under a schedule named as on the command line, `layers` layers in every chunk.

    `chunks` per rank, for schedules with several (default 2); gpipe and 1f1b have one, and refuse more. Raises OrderError
    for an unknown name and for those that need torch's schedule classes.
    """
    if schedule in _NEED_TORCH:
        raise OrderError(
            f"schedule {schedule!r} needs torch's schedule classes, which arrive with the torch pipelining adapter: "
            f"use one of {', '.join(SCHEDULES)} until then, or Order.parse."
        )
    if schedule not in _NAMED:
        raise OrderError(f"schedule is {schedule!r}: pass one of {', '.join(SCHEDULES)}.")
    # Checked here and not only in the constructors: gpipe is the same on every rank, yet rank 7 of 2 is a mistake.
    pp = whole("pp", pp, 1)
    rank = whole("rank", rank, 0, pp)
    if schedule in _ONE_CHUNK and chunks not in (None, 1):
        raise OrderError(f"chunks is {chunks}, but {schedule} has one chunk per rank: leave it out, or use interleaved.")
    return _NAMED[schedule](pp, rank, microbatches, 2 if chunks is None else chunks, layers)


def rows(order: Order) -> tuple[Row, ...]:
    """One record per step, in order; checks the order."""
    return _rows(assign_slots(order))


def render(order: Order) -> Table:
    """The rows as a rich table; its caption counts slots (input sets) against the number without sharing."""
    slot_map = assign_slots(order)
    slots, inputs = _counted(slot_map.count, "slot"), _counted(len(slot_map), "input set")
    table = Table(caption=f"{slots} for {inputs}\n{_counted(slot_map.graphs, 'forward graph')}", caption_justify="left")
    table.add_column("position", justify="right")
    table.add_column("step")
    table.add_column("live", justify="right")
    table.add_column("slots")
    for row in _rows(slot_map):
        live = f"{row.first}-{row.last}"
        table.add_row(str(row.position), str(row.step), live, " ".join(map(str, row.slots)))
    return table


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _rows(slot_map: SlotMap) -> tuple[Row, ...]:
    order = slot_map.order
    out = []
    for position, step in enumerate(order):
        layers = range(order.layers_per_chunk[step.chunk])
        uses = [slot_map.uses[order.flat_index(step.chunk, step.microbatch, layer)] for layer in layers]
        out.append(Row(position, step, uses[0].first, uses[0].last, tuple(use.slot for use in uses)))
    return tuple(out)
