"""Orders by property: what check() accepts and refuses, the signed form, orders across ranks, the flat index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graphcap.errors import OrderError
from graphcap.order import Counts, Order, Step, ep_flat_index, flat_index


@st.composite
def valid_orders(draw: st.DrawFn, training: bool = True) -> Order:
    """Any order that a schedule may use: per microbatch F then B or I W, all of them interleaved at random."""
    chunks, mbs = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    lives = {
        key: draw(st.sampled_from(["FB", "FIW"])) if training else "F" for key in product(range(chunks), range(mbs))
    }
    turns = draw(st.permutations([key for key, phases in lives.items() for _ in phases]))
    done: Counter[tuple[int, int]] = Counter()
    steps = []
    for chunk, mb in turns:
        steps.append(Step(lives[chunk, mb][done[chunk, mb]], chunk, mb))
        done[chunk, mb] += 1
    layers = draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks))
    return Order(steps, layers_per_chunk=layers, training=training)


@st.composite
def base_orders(draw: st.DrawFn) -> Order:
    """Megatron-LM's orders before any expansion: no pipeline, 1F1B, interleaved; uneven layers."""
    size, chunks, mbs = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    chunks = 1 if size == 1 else chunks
    layers = draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks))
    rank, group = draw(st.integers(0, size - 1)), draw(st.none() | st.integers(1, 7))
    return Order.interleaved(rank, size, chunks, mbs, group, layers_per_chunk=layers)


def megatron_orders() -> st.SearchStrategy[Order]:
    """Every kind of order that Megatron-LM makes: as above, or expanded for EP overlap, with delayed wgrad or not."""
    expanded = st.builds(lambda base, wgrad: Order.ep_overlap(base, delay_wgrad=wgrad), base_orders(), st.booleans())
    return base_orders() | expanded


def mutated(order: Order, steps: list[Step]) -> Order:
    """`steps` under the counts of `order`, so that a microbatch that vanished is still asked for."""
    counts = {"chunks": order.chunks, "microbatches": order.microbatches}
    return Order(steps, **counts, layers_per_chunk=order.layers_per_chunk, training=order.training)


def refused_at(order: Order) -> int:
    """The position that the arrow of check()'s error points at; the text around the arrow must agree with the order."""
    with pytest.raises(OrderError) as caught:
        order.check()
    line, arrow = str(caught.value).splitlines()[-2:]
    column = arrow.index("^")
    assert arrow.strip() == "^" and line[column - 1] == " " and line[column] != " "
    before, after = line[:column].split(), line[column:].split()
    texts = [str(step) for step in order]
    # The window is found in the order by its text, from its start if it has no dots in front.
    candidates = range(len(texts) + 1) if before[:1] == ["..."] else [len(before)]
    before = [text for text in before if text != "..."]
    after = [text for text in after if text not in ("...", "(end)")]
    fits = [
        at
        for at in candidates
        if texts[at - len(before) : at] == before and texts[at : at + len(after)] == after and len(before) <= at
    ]
    assert len(fits) == 1, (line, fits)
    if fits[0] < len(texts):
        assert f"step {texts[fits[0]]} at position {fits[0]} " in str(caught.value)
    return fits[0]


# --------------------------------------------------------------------------------------------------------------- check


@given(valid_orders() | valid_orders(training=False) | megatron_orders())
def test_check_accepts_valid_orders(order: Order) -> None:
    assert order.check() is order
    assert Order.parse(str(order), layers_per_chunk=order.layers_per_chunk, training=order.training) == order


@given(valid_orders() | megatron_orders(), st.data())
def test_check_refuses_a_dropped_step(order: Order, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(order) - 1))
    gone = order[at]
    rest = [*order[:at], *order[at + 1 :]]
    same = [i for i, step in enumerate(rest) if (step.chunk, step.microbatch) == (gone.chunk, gone.microbatch)]
    # A cause that is gone shows at its effect; an end that is gone, at the last step that is left.
    expected = next((i for i in same if i >= at), same[-1])
    assert refused_at(mutated(order, rest)) == expected


@given(valid_orders() | valid_orders(training=False) | megatron_orders(), st.data())
def test_check_refuses_a_doubled_step(order: Order, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(order) - 1))
    again = data.draw(st.integers(at + 1, len(order)))
    steps = [*order[:again], order[at], *order[again:]]
    assert refused_at(mutated(order, steps)) == again


@given(valid_orders() | megatron_orders(), st.data())
def test_check_refuses_a_step_moved_before_its_cause(order: Order, data: st.DataObject) -> None:
    effects = [i for i, step in enumerate(order) if step.phase != "F"]
    at = data.draw(st.sampled_from(effects))
    moved = order[at]
    cause = Step("I" if moved.phase == "W" else "F", moved.chunk, moved.microbatch)
    target = data.draw(st.integers(0, order.index(cause)))
    steps = [*order[:target], moved, *order[target:at], *order[at + 1 :]]
    assert refused_at(mutated(order, steps)) == target


@given(valid_orders(training=False), st.data())
def test_check_of_an_order_without_training(order: Order, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(order) - 1))
    if len(order) > 1:
        assert refused_at(mutated(order, [*order[:at], *order[at + 1 :]])) == len(order) - 1  # "(end)": never runs
    backward = Step(data.draw(st.sampled_from("BIW")), order[at].chunk, order[at].microbatch)
    assert refused_at(mutated(order, [*order[: at + 1], backward, *order[at + 1 :]])) == at + 1


# ---------------------------------------------------------------------------------------------------------- signed form


@given(megatron_orders())
def test_signed_form_never_fails_for_megatron(order: Order) -> None:
    signed = order.to_signed()
    assert Order.from_signed(signed, layers_per_chunk=order.layers_per_chunk) == order
    assert all(isinstance(value, int) != (value % 1 == 0.5) for value in signed)


def fits_signed_form(order: Order) -> bool:
    """Per chunk: forwards, backwards (B and I together) and W each in ascending microbatches, and split ones first."""
    for chunk in range(order.chunks):
        mine = [step for step in order if step.chunk == chunk]
        for phases in ("F", "BI", "W"):
            mbs = [step.microbatch for step in mine if step.phase in phases]
            if mbs != list(range(len(mbs))):
                return False
    return True


@st.composite
def nearly_first_in_first_out(draw: st.DrawFn) -> Order:
    """Valid orders whose forwards and backwards ascend; which microbatches split, and when each W runs, is free."""
    chunks, mbs = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    split = {key: draw(st.booleans()) for key in product(range(chunks), range(mbs))}
    if draw(st.booleans()):  # else hardly any order would have its split microbatches first
        split = {(chunk, mb): mb < mbs - 1 for chunk, mb in split}
    steps: list[Step] = []
    started, ended, waiting = Counter[int](), Counter[int](), set[tuple[int, int]]()
    while len(steps) < sum(2 + both for both in split.values()):
        ready = [Step("F", chunk, started[chunk]) for chunk in range(chunks) if started[chunk] < mbs]
        for chunk in range(chunks):
            if ended[chunk] < started[chunk]:
                ready.append(Step("I" if split[chunk, ended[chunk]] else "B", chunk, ended[chunk]))
        ready += [Step("W", *key) for key in sorted(waiting)]
        step = draw(st.sampled_from(ready))
        steps.append(step)
        started[step.chunk] += step.phase == "F"
        ended[step.chunk] += step.phase in "IB"
        if step.phase in "IW":
            waiting ^= {(step.chunk, step.microbatch)}
    return Order(steps).check()


@given(valid_orders() | valid_orders(training=False) | nearly_first_in_first_out())
def test_signed_form_is_kept_or_refused(order: Order) -> None:
    fits = fits_signed_form(order)
    if fits:
        back = Order.from_signed(order.to_signed(), layers_per_chunk=order.layers_per_chunk, training=order.training)
        assert back == order
    else:
        with pytest.raises(OrderError, match="signed form cannot express"):
            order.to_signed()


# ------------------------------------------------------------------------------------------- pipelines across the ranks


def runs_to_the_end(orders: list[Order]) -> bool:
    """All ranks run their orders; a step waits for what the neighbour stages send. False: they wait for each other."""
    ranks, last = len(orders), len(orders) * orders[0].chunks - 1
    position = [0] * ranks
    done: set[tuple[bool, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                step = order[position[rank]]
                forward, stage = step.phase == "F", step.chunk * ranks + rank
                source = stage - 1 if forward else stage + 1
                if 0 <= source <= last and (forward, source, step.microbatch) not in done:
                    break
                done.add((forward, stage, step.microbatch))
                position[rank] += 1
                moved = True
    return position == [len(order) for order in orders]


@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 12), st.integers(0, 4))
def test_interleaved_ranks_fit_together(size: int, chunks: int, mbs: int, more: int) -> None:
    """Under the limits of Megatron's run time no rank waits forever."""
    group = size + more
    assume(mbs % group == 0 or mbs % group >= size or mbs < group)
    orders = [Order.interleaved(rank, size, chunks, mbs, group).check() for rank in range(size)]
    assert runs_to_the_end(orders)


def test_the_pipeline_simulation_can_fail() -> None:
    """A last group shorter than the pipeline makes ranks wait forever (the limit that `interleaved` documents)."""
    assert not runs_to_the_end([Order.interleaved(rank, 4, 3, 5, 4).check() for rank in range(4)])


@pytest.mark.parametrize("make", [lambda rank, size, mbs: Order.gpipe(mbs), Order.one_f_one_b])
@pytest.mark.parametrize(("size", "mbs"), [(1, 1), (2, 1), (2, 4), (4, 2), (4, 9)])
def test_plain_ranks_fit_together(make: Callable[[int, int, int], Order], size: int, mbs: int) -> None:
    assert runs_to_the_end([make(rank, size, mbs).check() for rank in range(size)])


@given(base_orders())
def test_ep_overlap_keeps_the_order_of_the_base(base: Order) -> None:
    """Per layer the base's order of microbatches; inside a chunk forwards ascend and backwards descend, W after I."""
    fine = Order.ep_overlap(base, delay_wgrad=True).check()
    for chunk, depth in enumerate(base.layers_per_chunk):
        start = sum(base.layers_per_chunk[:chunk])
        ids = list(range(start, start + depth))
        for phase, coarse, layers in (("F", "F", ids), ("I", "B", ids[::-1]), ("W", "B", ids[::-1])):
            found = [(step.microbatch, step.chunk) for step in fine if step.phase == phase and step.chunk in ids]
            mbs = [step.microbatch for step in base if step.phase == coarse and step.chunk == chunk]
            assert found == [(mb, layer) for mb in mbs for layer in layers]


# ---------------------------------------------------------------------------------------------------------- flat index


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 6))
def test_flat_index_is_a_bijection(layers: list[int], mbs: int) -> None:
    counts = Counts(tuple(layers), mbs)
    where = [(c, mb, la) for c, depth in enumerate(layers) for mb in range(mbs) for la in range(depth)]
    # Listed as (chunk, microbatch, layer) the plain index counts up; as (chunk, layer, microbatch), the EP one.
    assert [flat_index(counts, *at) for at in where] == list(range(sum(layers) * mbs))
    by_layer = sorted(where, key=lambda at: (at[0], at[2], at[1]))
    assert [ep_flat_index(counts, *at) for at in by_layer] == list(range(sum(layers) * mbs))


@given(base_orders())
def test_ep_flat_index_is_the_plain_one_of_the_expanded_order(base: Order) -> None:
    fine = Order.ep_overlap(base)
    assert fine.layers_per_chunk == (1,) * sum(base.layers_per_chunk) and fine.microbatches == base.microbatches
    for chunk, depth in enumerate(base.layers_per_chunk):
        for mb, layer in product(range(base.microbatches), range(depth)):
            own_chunk = sum(base.layers_per_chunk[:chunk]) + layer
            assert base.ep_flat_index(chunk, mb, layer) == fine.flat_index(own_chunk, mb)
