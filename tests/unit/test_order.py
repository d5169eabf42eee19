"""Steps and orders by example: text, signed form, golden rows of named schedules, what check() refuses, flat index."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from graphcap.errors import OrderError, PlanError
from graphcap.order import Counts, Order, Phase, Step, assign_slots, ep_flat_index, flat_index
from graphcap.order_table import SCHEDULES, named

GOLDEN = Path(__file__).parent / "golden" / "orders.txt"


def golden_rows() -> list[tuple[str, str, str]]:
    lines = [line.strip() for line in GOLDEN.read_text().splitlines()]
    rows = [tuple(part.strip() for part in line.split("|")) for line in lines if line and not line.startswith("#")]
    assert len(rows) >= 20 and all(len(row) == 3 for row in rows)
    return rows  # type: ignore[return-value]


def build(case: str) -> Order:
    """The order that a case of the golden file names."""
    words = case.split()
    values = dict(word.split("=") for word in words if "=" in word)
    rank, size, chunks, mbs = (int(values[key]) for key in "rPCM")
    layers = tuple(map(int, values["L"].split(","))) if "L" in values else None
    group = int(values["g"]) if "g" in values else None
    if chunks == 1:
        base = Order.one_f_one_b(rank, size, mbs, layers_per_chunk=layers)
    else:
        base = Order.interleaved(rank, size, chunks, mbs, group, layers_per_chunk=layers)
    return Order.ep_overlap(base, layers, "wgrad" in words) if "ep" in words else base


def signed_text(order: Order) -> str:
    return " ".join(map(str, order.to_signed()))


@pytest.mark.parametrize(("case", "input_sets", "signed"), golden_rows())
def test_golden_orders(case: str, input_sets: str, signed: str) -> None:
    order = build(case).check()
    assert signed_text(order) == signed
    back = Order.from_signed([float(word) for word in signed.split()], layers_per_chunk=order.layers_per_chunk)
    assert back == order
    if input_sets != "-":
        assert assign_slots(order).count == int(input_sets)


def test_steps_of_the_worked_example() -> None:
    """P2 C2 M4 g2 rank 0, position by position as the reference notes list it."""
    assert str(Order.interleaved(0, 2, 2, 4, 2)) == (
        "0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0 1F3 0B1 1B2 1B3 0B2 0B3"
    )  # fmt: skip


def test_ep_overlap_docstring_example() -> None:
    """Chunk 1 runs one microbatch and chunk 0 two, a fragment of an order: check() would refuse it."""
    base = Order.from_signed([1, 2, -2, 1, -1, -1])
    assert signed_text(Order.ep_overlap(base, (1, 2), True)) == "1 2 3 1 -3 -3.5 -2 -2.5 -1 -1.5 -1 -1.5"


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (Order.forward_backward(3), "0F0 0B0 0F1 0B1 0F2 0B2"),
        (Order.forward_only(2), "0F0 0F1"),
        (Order.forward_only(2, chunks=2), "0F0 1F0 0F1 1F1"),
        (Order.local(2, 2), "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"),
        (Order.gpipe(3), "0F0 0F1 0F2 0B0 0B1 0B2"),
        (Order.gpipe(2, chunks=2), "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"),
        (Order.one_f_one_b(0, 3, 4), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        (Order.one_f_one_b(0, 8, 2), "0F0 0F1 0B0 0B1"),  # fewer microbatches than warm-up forwards
        (Order.interleaved(1, 2, 2, 1), "0F0 1F0 1B0 0B0"),
        (Order.ep_overlap(Order.forward_only(2), 2), "0F0 1F0 0F1 1F1"),
        (Order.ep_overlap(Order.gpipe(1, layers_per_chunk=2)), "0F0 1F0 1B0 0B0"),
    ],
)
def test_named_orders(order: Order, text: str) -> None:
    assert str(order.check()) == text
    assert Order.parse(text, training=order.training).steps == order.steps


def test_named_orders_take_layers() -> None:
    assert Order.forward_backward(2, layers_per_chunk=3).layers_per_chunk == (3,)
    assert Order.forward_only(2, layers_per_chunk=[3]).layers_per_chunk == (3,)
    assert Order.local(2, 2, layers_per_chunk=(1, 2)).layers_per_chunk == (1, 2)
    assert Order.gpipe(2, 2, layers_per_chunk=2).layers_per_chunk == (2, 2)
    assert Order.one_f_one_b(0, 2, 2, layers_per_chunk=2).layers_per_chunk == (2,)
    assert Order.interleaved(0, 2, 2, 2, layers_per_chunk=(3, 1)).layers_per_chunk == (3, 1)
    assert Order.ep_overlap(Order.interleaved(0, 2, 2, 2, layers_per_chunk=(3, 1))).layers_per_chunk == (1, 1, 1, 1)
    assert not Order.forward_only(1).training
    assert not Order.ep_overlap(Order.forward_only(1)).training
    assert Order.gpipe(1).training


# ------------------------------------------------------------------------------------------------------------ the types


def test_step_text_and_value() -> None:
    step = Step.parse("12W345")
    assert step == Step("W", 12, 345) == Step(Phase.W, chunk=12, microbatch=345)
    assert str(step) == "12W345" and repr(step) == "Step('12W345')" and f"{step}" == "12W345"
    assert step.phase is Phase.W and isinstance(Step("F", 0, 0).phase, Phase)
    assert len({step, Step.parse("12W345"), Step.parse("12I345")}) == 2
    assert Step.of("0F1") == Step("F", 0, 1) and Step.of(step) is step
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.chunk = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "text", ["", "0F", "F0", "0X0", "0f0", "-1F0", "0F0 ", "0F0 0F1", "0F1.5", "0F\u0661", "0FF0", 7]
)
def test_step_parse_refuses(text: str) -> None:
    with pytest.raises(OrderError, match="is not a step: write chunk"):
        Step.parse(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("X", 0, 0), "phase is 'X'"),
        (("", 0, 0), "phase is ''"),
        ((None, 0, 0), "phase is None"),
        (("F", -1, 0), "chunk of a step is -1"),
        (("F", 0, -1), "microbatch of a step is -1"),
        (("F", 0, 1.0), "1.0 .float.: pass a whole number"),
        (("F", True, 0), "True .bool."),
        (("F", "0", 0), "'0' .str."),
    ],
)
def test_step_refuses(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(OrderError, match=words):
        Step(*arguments)


def test_order_is_an_immutable_sequence() -> None:
    order = Order.parse("0F0 0F1\n 0B0, 0B1")
    assert len(order) == 4 and list(order)[1] == order[1] == Step("F", 0, 1) and order[-1] == Step("B", 0, 1)
    assert order[1:3] == (Step("F", 0, 1), Step("B", 0, 0))
    assert Step("B", 0, 0) in order and order.index(Step("B", 0, 0)) == 2
    assert (order.chunks, order.microbatches, order.layers_per_chunk, order.training) == (1, 2, (1,), True)
    assert repr(order) == (
        "Order('0F0 0F1 0B0 0B1', chunks=1, microbatches=2, layers_per_chunk=(1,), training=True)"
    )  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        order.chunks = 3  # type: ignore[misc]
    assert order.check() is order


def test_order_equality_covers_every_field() -> None:
    text = "0F0 0F1 0B0 0B1"
    order = Order.parse(text)
    same = Order.gpipe(2)
    assert order == same and hash(order) == hash(same)
    for copied in (pickle.loads(pickle.dumps(order)), copy.deepcopy(order)):
        assert copied == order and hash(copied) == hash(order)
    others = [
        Order.parse(text, layers_per_chunk=2),
        Order.parse(text, training=False),
        Order(order.steps, chunks=2),
        Order(order.steps, microbatches=3),
        Order.parse("0F0 0F1 0B1 0B0"),
    ]
    assert len({order, *others}) == 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Order.parse(""), "has no steps"),
        (lambda: Order.parse("0F0 nonsense"), "'nonsense' is not a step"),
        (lambda: Order.parse(["0F0"]), "pass a str"),  # type: ignore[arg-type]
        (lambda: Order.parse("0F0 0B0", layers_per_chunk=(1, 1)), "one number per chunk, the order has 1 chunk"),
        (lambda: Order.parse("0F0 0B0", layers_per_chunk=()), "one number per chunk"),
        (lambda: Order.parse("0F0 0B0", layers_per_chunk=0), "layers_per_chunk is 0"),
        (lambda: Order.parse("0F0 1F0", layers_per_chunk=(1, -2)), r"layers_per_chunk\[1\] is -2"),
        (lambda: Order.parse("0F0 0B0", layers_per_chunk=1.0), "layers_per_chunk is 1.0"),  # type: ignore[arg-type]
        (lambda: Order.parse("0F0 0B0", layers_per_chunk="1"), "layers_per_chunk is '1'"),  # type: ignore[arg-type]
        (lambda: Order.parse("0F0 0B0", training=1), "training is 1"),  # type: ignore[arg-type]
        (lambda: Order(["0F0"], chunks=0), "chunks is 0"),
        (lambda: Order(["0F0"], microbatches=True), "microbatches is True"),
        (lambda: Order(["0F0", "1F0"], chunks=1), "(?s)1F0 at position 1 lies outside.*\n    0F0 1F0\n        \\^"),
        (lambda: Order(["0F0", "0F1"], microbatches=1), "0F1 at position 1 lies outside"),
        (lambda: Order.forward_backward(0), "microbatches is 0"),
        (lambda: Order.forward_only(-1), "microbatches is -1"),
        (lambda: Order.local(0, 1), "chunks is 0"),
        (lambda: Order.local(1, 2.0), "microbatches is 2.0"),  # type: ignore[arg-type]
        (lambda: Order.gpipe("4"), "microbatches is '4'"),  # type: ignore[arg-type]
        (lambda: Order.gpipe(1, 0), "chunks is 0"),
        (lambda: Order.one_f_one_b(2, 2, 4), "pp_rank is 2: pass a whole number from 0 to 1"),
        (lambda: Order.one_f_one_b(-1, 2, 4), "pp_rank is -1"),
        (lambda: Order.one_f_one_b(0, 0, 4), "pp_size is 0"),
        (lambda: Order.one_f_one_b(0, 1, 0), "microbatches is 0"),
        (lambda: Order.interleaved(0, 1, 2, 4), r"Use Order.local\(chunks=2, microbatches=4\)"),
        (lambda: Order.interleaved(0, 2, 0, 4), "chunks is 0"),
        (lambda: Order.interleaved(0, 2, 2, 4, 0), "group_size is 0"),
        (lambda: Order.interleaved(0, 2, 2, 4, 1.5), "group_size is 1.5"),  # type: ignore[arg-type]
        (lambda: Order.interleaved(0, 2, 2, 4, layers_per_chunk=(1,)), "one number per chunk"),
        (lambda: Order.ep_overlap(Order.gpipe(2), (1, 1)), "one number per chunk"),
        (lambda: Order.ep_overlap(Order.gpipe(2), 0), "layers_per_chunk is 0"),
        (lambda: Order.ep_overlap(Order.gpipe(2), 1, 1), "delay_wgrad is 1"),  # type: ignore[arg-type]
        (lambda: Order.ep_overlap(4), "base_order is 4: pass an Order"),  # type: ignore[arg-type]
        (lambda: Order.ep_overlap(Order.parse("0F0 0I0 0W0")), "(?s)0I0.*half a backward.*\n        \\^"),
        (lambda: Order.ep_overlap(Order.parse("0F0 0B0 0F1 0F2 0B1 0B2")), "0F2 at position 3.*no partner"),
        (lambda: Order.ep_overlap(Order.parse("0F0 0F1 0B0 0B1 0F2 0B2")), "0B1 at position 3.*no partner"),
    ],
)
def test_bad_parameters(make: Callable[[], Order], words: str) -> None:
    with pytest.raises(OrderError, match=words) as caught:
        make()
    assert isinstance(caught.value, PlanError) and isinstance(caught.value, ValueError)


# ---------------------------------------------------------------------------------------------------------- signed form


def test_signed_form_is_ints_but_for_half_steps() -> None:
    signed = Order.parse("0F0 0F1 0I0 0W0 0B1").to_signed()
    assert signed == [1, 1, -1, -1.5, -1]
    assert [type(value) for value in signed] == [int, int, int, float, int]
    assert str(Order.from_signed([1, 1, -1.0, -1.5, -1])) == "0F0 0F1 0I0 0W0 0B1"


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.5, -1.25, float("nan"), float("inf"), True, "1", None])
def test_signed_form_refuses(value: float) -> None:
    with pytest.raises(OrderError, match="at position 1 of the signed order means no step"):
        Order.from_signed([1, value, -1])


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("0F0 0F1 0B1 0B0", "0B1"),  # LoopedBFS and GPipe of some frameworks: last in, first out
        ("0F0 0F1 0B0 0I1 0W1", "0B0"),  # DualPipeV: a full backward before a split one
        ("0F1 0F0 0B0 0B1", "0F1"),
    ],
)
def test_to_signed_refuses_what_it_would_garble(text: str, bad: str) -> None:
    order = Order.parse(text).check()
    with pytest.raises(OrderError, match="the signed form cannot express this order") as caught:
        order.to_signed()
    line, arrow = str(caught.value).splitlines()[-2:]
    assert line[arrow.index("^") :].split()[0] == bad


# --------------------------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize(
    ("text", "training", "words", "line", "arrow"),
    [
        ("0F0 0B0 0B1 0F1", True, "expected 0F1 earlier", "0F0 0B0 0B1 0F1", "        ^"),
        ("0F0 0F1 0B0", True, "expected 0B1 or 0I1 later", "0F0 0F1 0B0", "    ^"),
        ("0F0 0I0", True, "expected 0W0 later", "0F0 0I0", "    ^"),
        ("0F0 0F1 0I0", True, "step 0F1 at position 1 of the order ends", "0F0 0F1 0I0", "    ^"),  # the earlier of two
        ("0F0 0W0 0I0", True, "has no 0I0 before it", "0F0 0W0 0I0", "    ^"),
        ("0F0 0B0 0W0", True, "has no 0I0 before it", "0F0 0B0 0W0", "        ^"),
        ("0F0 0I0 0B0", True, "cannot follow 0I0: expected 0W0", "0F0 0I0 0B0", "        ^"),
        ("0F0 0B0 0I0", True, "cannot follow 0B0: expected no further", "0F0 0B0 0I0", "        ^"),
        ("0F0 0F0 0B0", True, "a second time: expected 0B0 or 0I0", "0F0 0F0 0B0", "    ^"),
        ("0F0 0B0 0B0", True, "a second time: expected no further", "0F0 0B0 0B0", "        ^"),
        ("0F0", True, "training=False", "0F0", "^"),
        ("0F0 0B0", False, "not for training: drop it, or pass training=True", "0F0 0B0", "    ^"),
        ("0F0 0F0", False, "a second time", "0F0 0F0", "    ^"),
        ("0F1 0B1", True, "expected 0F0", "0F1 0B1 (end)", "        ^"),
        ("0F0 1F0 1F1", False, "microbatch 1 of chunk 0 never runs", "0F0 1F0 1F1 (end)", "            ^"),
    ],
)
def test_check_points_at_the_bad_step(text: str, training: bool, words: str, line: str, arrow: str) -> None:
    order = Order.parse(text, training=training)
    with pytest.raises(OrderError, match=words) as caught:
        order.check()
    assert str(caught.value).splitlines()[1:] == ["    " + line, "    " + arrow]


def test_check_shows_a_window_of_a_long_order() -> None:
    steps = [str(step) for step in Order.one_f_one_b(0, 4, 200)]
    steps[200] = "0F0"
    with pytest.raises(OrderError, match="0F0 at position 200 of the order runs a second time") as caught:
        Order(steps).check()
    _, line, arrow = str(caught.value).splitlines()
    assert line == "    ... " + " ".join(steps[192:209]) + " ..." and len(line) <= 120
    assert line[: arrow.index("^")].split() == ["...", *steps[192:200]]


# ---------------------------------------------------------------------------------------------------------- flat index


def test_flat_index_tables_of_the_reference() -> None:
    """L=[2,2], M=4: section 3.6 of the reference notes."""
    order = Order.interleaved(0, 2, 2, 4, layers_per_chunk=2)
    plain = [[order.flat_index(c, mb, la) for mb in range(4) for la in range(2)] for c in range(2)]
    assert plain == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
    overlap = [[order.ep_flat_index(c, mb, la) for mb in range(4)] for c in range(2) for la in range(2)]
    assert overlap == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("index", [flat_index, ep_flat_index])
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ((2, 0, 0), "chunk is 2: pass a whole number from 0 to 1"),
        ((-1, 0, 0), "chunk is -1"),
        ((0, 4, 0), "microbatch is 4"),
        ((0, -1, 0), "microbatch is -1"),
        ((0, 0, 1), "layer of chunk 0 is 1"),
        ((1, 0, 2), "layer of chunk 1 is 2"),
        ((1, 0, -1), "layer of chunk 1 is -1"),
        ((0, 0.0, 0), "microbatch is 0.0"),
    ],
)
def test_flat_index_does_not_wrap(index: Callable[..., int], where: tuple[int, int, int], words: str) -> None:
    with pytest.raises(OrderError, match=words):
        index(Counts((1, 2), 4), *where)


def test_counts_are_checked() -> None:
    assert Counts([1, 2], 4).layers_per_chunk == (1, 2)  # type: ignore[arg-type]
    for layers, mbs in (((), 4), ((0,), 4), ((1,), 0)):
        with pytest.raises(OrderError):
            Counts(layers, mbs)


# --------------------------------------------------------------------------------------------------- command line names


def test_named_schedules() -> None:
    assert named("gpipe", pp=2, rank=1, microbatches=3) == Order.gpipe(3)
    assert named("1f1b", pp=4, rank=1, microbatches=8, layers=2) == Order.one_f_one_b(1, 4, 8, layers_per_chunk=2)
    assert named("interleaved", pp=2, rank=0, microbatches=4) == Order.interleaved(0, 2, 2, 4)
    assert named("interleaved", pp=2, rank=0, microbatches=6, chunks=3, layers=2) == Order.interleaved(
        0, 2, 3, 6, layers_per_chunk=2
    )


def test_schedules_that_need_torch_say_so() -> None:
    assert SCHEDULES == ("gpipe", "1f1b", "interleaved")  # what --help lists: none of those below
    for schedule in ("loopedbfs", "interleaved-zb", "zbv", "dualpipev"):
        with pytest.raises(OrderError, match="torch pipelining adapter"):
            named(schedule, pp=2, rank=0, microbatches=4)


@pytest.mark.parametrize(
    ("schedule", "rank", "words"),
    [("zb1", 0, "pass one of gpipe, 1f1b"), ("gpipe", 2, "rank is 2"), ("1f1b", -1, "-1")],
)
def test_named_refuses(schedule: str, rank: int, words: str) -> None:
    with pytest.raises(OrderError, match=words):
        named(schedule, pp=2, rank=rank, microbatches=4)
