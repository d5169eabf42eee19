"""Live ranges and slots: nothing overlaps, equal signatures only, the counts of the design, few graphs; the table."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from graphcap.errors import OrderError
from graphcap.order import LiveRange, Order, SlotMap, Step, assign_slots, live_ranges
from graphcap.order_table import Row, render, rows

GOLDEN = Path(__file__).parent / "golden"


def warm_up(rank: int, size: int, chunks: int, group: int) -> int:
    """W as the design states it, written out once more so that the tests do not ask the code under test."""
    if chunks == 1:
        return size - rank - 1
    return 2 * (size - rank - 1) + (chunks - 1) * group


def assert_proper(slots: SlotMap, signature: Callable[[int, int, int], Hashable] = lambda *_: None) -> None:
    """No two lives in a slot overlap, signatures agree, ranges are the order's own, and no slot is superfluous."""
    order = slots.order
    first = {(step.chunk, step.microbatch): i for i, step in reversed(list(enumerate(order)))}
    last = {(step.chunk, step.microbatch): i for i, step in enumerate(order)}
    assert len(slots) == len({(u.chunk, u.microbatch, u.layer) for u in slots})
    assert len(slots) == sum(order.layers_per_chunk) * order.microbatches
    for use in slots:
        key = (use.chunk, use.microbatch)
        assert (use.first, use.last) == (first[key], last[key])
        assert slots.slot_of(use.chunk, use.microbatch, use.layer) == use.slot
    assert {use.slot for use in slots} == set(range(slots.count))
    for slot in range(slots.count):
        sharers = slots.sharers(slot)
        assert all(one.last < two.first for one, two in pairwise(sharers))
        assert len({signature(use.chunk, use.microbatch, use.layer) for use in sharers}) == 1
    # The least possible: per signature, as many as are live at once at the worst moment.
    live: dict[Hashable, Counter[int]] = defaultdict(Counter)
    for use in slots:
        for position in range(use.first, use.last + 1):
            live[signature(use.chunk, use.microbatch, use.layer)][position] += 1
    assert slots.count == sum(max(counter.values()) for counter in live.values())


# ---------------------------------------------------------------------------------------------------------- live ranges


def test_live_ranges_end_where_buffers_are_read_last() -> None:
    order = Order.parse("0F0 0F1 0I0 0B1 0W0")
    assert live_ranges(order) == (LiveRange(0, 0, 0, 4), LiveRange(0, 1, 1, 3))
    assert live_ranges(Order.forward_only(2)) == (LiveRange(0, 0, 0, 0), LiveRange(0, 1, 1, 1))


def test_only_checked_orders_have_lives() -> None:
    for function in (live_ranges, assign_slots, rows, render):
        with pytest.raises(OrderError, match="expected 0B0 or 0I0"):
            function(Order.parse("0F0"))


def test_a_delayed_weight_gradient_keeps_its_slot() -> None:
    """TE and Megatron free at the dgrad; the W still reads the input, so a forward between must not get its buffers."""
    order = Order.parse("0F0 0I0 0F1 0W0 0I1 0W1")
    slots = assign_slots(order)
    assert slots.count == 2 and slots.slot_of(0, 0) != slots.slot_of(0, 1)
    assert assign_slots(Order.parse("0F0 0I0 0W0 0F1 0I1 0W1")).count == 1


# ---------------------------------------------------------------------------------------------------------------- slots


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Per microbatch F, then B or I W; random interleavings, one to three layers a chunk."""
    chunks, mbs = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    lives = {key: draw(st.sampled_from(["FB", "FIW"])) for key in product(range(chunks), range(mbs))}
    turns = draw(st.permutations([key for key, phases in lives.items() for _ in phases]))
    done: Counter[tuple[int, int]] = Counter()
    steps = []
    for chunk, mb in turns:
        steps.append(Step(lives[chunk, mb][done[chunk, mb]], chunk, mb))
        done[chunk, mb] += 1
    return Order(steps, layers_per_chunk=draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks)))


@given(orders(), st.integers(1, 3), st.integers(0, 5))
def test_slots_never_overlap_in_life(order: Order, shapes: int, salt: int) -> None:
    assert_proper(assign_slots(order))

    def signature(chunk: int, microbatch: int, layer: int) -> Hashable:
        return "shape", (chunk * 5 + microbatch * 3 + layer * salt) % shapes

    assert_proper(assign_slots(order, signature), signature)
    table = {
        (c, mb, la): signature(c, mb, la)
        for c, depth in enumerate(order.layers_per_chunk)
        for mb, la in product(range(order.microbatches), range(depth))
    }
    assert assign_slots(order, table) == assign_slots(order, signature)


CASES = [
    (rank, size, chunks, group)
    for size in range(1, 5)
    for chunks in range(1, 4)
    for group in (size, size + 1)
    for rank in range(size)
    if (size > 1 or chunks == 1) and (chunks > 1 or group == size)
]


@pytest.mark.parametrize(("rank", "size", "chunks", "group"), CASES)
def test_slot_counts_of_the_design(rank: int, size: int, chunks: int, group: int) -> None:
    warm = warm_up(rank, size, chunks, group)
    for mbs, layers in product((1, 4, 7, 12), (1, 2, 3)):
        base = Order.interleaved(rank, size, chunks, mbs, group, layers_per_chunk=layers)
        plain = assign_slots(base)
        assert plain.count == min(warm + 1, mbs * chunks) * layers, (mbs, layers)
        for delay_wgrad in (False, True):
            overlap = assign_slots(Order.ep_overlap(base, layers, delay_wgrad))
            assert overlap.count == min((warm + 1) * layers + 1, mbs * chunks * layers), (mbs, layers, delay_wgrad)
        if mbs == 7:
            assert_proper(plain)
            assert_proper(overlap)


@pytest.mark.parametrize(("rank", "chunks", "layers"), [(0, 1, 1), (0, 2, 1), (1, 2, 2)])
def test_slot_counts_do_not_depend_on_many_microbatches(rank: int, chunks: int, layers: int) -> None:
    plain, overlap, graphs = set(), set(), set()
    for mbs in (16, 64, 256):
        order = Order.interleaved(rank, 2, chunks, mbs, layers_per_chunk=layers)
        slots = assign_slots(order)
        plain.add(slots.count)
        graphs.add(slots.graphs)
        overlap.add(assign_slots(Order.ep_overlap(order, layers, True)).count)
    warm = warm_up(rank, 2, chunks, 2)
    assert plain == {(warm + 1) * layers} and overlap == {(warm + 1) * layers + 1}
    assert len(graphs) == 1


def test_forwards_alone_need_one_slot_per_layer() -> None:
    slots = assign_slots(Order.forward_only(5, chunks=2, layers_per_chunk=(1, 3)))
    assert slots.count == 3
    assert_proper(slots)


def test_a_layer_goes_back_to_a_slot_that_it_had() -> None:
    """First freed first would swap the two chunks' slots at every microbatch and need four graphs."""
    slots = assign_slots(Order.local(2, 6))
    assert slots.count == 2 and slots.graphs == 2
    assert {slots.slot_of(0, mb) for mb in range(6)} == {0} and {slots.slot_of(1, mb) for mb in range(6)} == {1}
    deep = assign_slots(Order.local(2, 4, layers_per_chunk=(2, 3)))
    assert deep.count == deep.graphs == 5


def test_a_newcomer_gets_the_slot_that_was_freed_first() -> None:
    slots = assign_slots(Order.parse("0F0 1F0 1B0 0B0 2F0 2B0"))
    assert (slots.slot_of(0, 0), slots.slot_of(1, 0), slots.slot_of(2, 0)) == (0, 1, 1)


def test_signatures_keep_chunks_apart() -> None:
    order = Order.local(2, 3)
    one_after_the_other = Order.parse("0F0 0B0 1F0 1B0")
    assert assign_slots(one_after_the_other).count == 1
    assert assign_slots(one_after_the_other, lambda chunk, mb, layer: chunk).count == 2
    assert assign_slots(order, lambda chunk, mb, layer: mb).count == 6


def test_slot_map_questions() -> None:
    slots = assign_slots(Order.interleaved(0, 2, 2, 4, 2, layers_per_chunk=(1, 2)))
    assert [(u.chunk, u.microbatch, u.layer) for u in slots][:5] == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 2, 0),
        (0, 3, 0),
        (1, 0, 0),
    ]
    assert slots.count_for(0) == len({slots.slot_of(0, mb) for mb in range(4)})
    assert slots.count_for(1) == len({slots.slot_of(1, mb, la) for mb in range(4) for la in range(2)})
    assert slots.count_for(1, 1) == len({slots.slot_of(1, mb, 1) for mb in range(4)})
    assert slots.graphs == slots.count_for(0) + slots.count_for(1, 0) + slots.count_for(1, 1)
    assert sum(len(slots.sharers(slot)) for slot in range(slots.count)) == len(slots) == 12
    with pytest.raises(dataclasses.FrozenInstanceError):
        slots.count = 1  # type: ignore[misc]


def test_slot_map_refuses() -> None:
    slots = assign_slots(Order.local(2, 2))
    for wrong in (
        lambda: slots.slot_of(0, 2),
        lambda: slots.slot_of(0, -1),
        lambda: slots.slot_of(2, 0),
        lambda: slots.slot_of(0, 0, 1),
        lambda: slots.sharers(2),
        lambda: slots.sharers(-1),
        lambda: slots.count_for(2),
        lambda: slots.count_for(0, 1),
    ):
        with pytest.raises(OrderError, match="pass a whole number from 0 to"):
            wrong()
    with pytest.raises(OrderError, match=r"no entry for .* = \(1, 0, 0\)"):
        assign_slots(Order.local(2, 1), {(0, 0, 0): "a"})
    with pytest.raises(OrderError, match="pass something hashable"):
        assign_slots(Order.local(1, 1), lambda *_: ([],))


# ---------------------------------------------------------------------------------------------------------------- table


def test_rows() -> None:
    assert rows(Order.parse("0F0 0I0 0F1 0W0 0B1", layers_per_chunk=2)) == (
        Row(0, Step("F", 0, 0), 0, 3, (0, 1)),
        Row(1, Step("I", 0, 0), 0, 3, (0, 1)),
        Row(2, Step("F", 0, 1), 2, 4, (2, 3)),
        Row(3, Step("W", 0, 0), 0, 3, (0, 1)),
        Row(4, Step("B", 0, 1), 2, 4, (2, 3)),
    )


def test_table_text() -> None:
    """Golden: a diff a person can read. Regenerate by hand from the failure's output, after reading it."""
    text = io.StringIO()
    Console(file=text, width=80, color_system=None, legacy_windows=False).print(
        render(Order.interleaved(0, 2, 2, 4, 2))
    )
    shown = "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
    assert shown == (GOLDEN / "order_table.txt").read_text()
