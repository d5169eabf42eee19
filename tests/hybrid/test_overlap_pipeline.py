"""What pipeline ranks send each other under an overlapped schedule: nobody waits forever, and messages of one way are
received in the order in which they are sent, which is all that NCCL can tell them apart by."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from graphcap import CaptureConfig, Order
from graphcap.errors import PlanError
from graphcap.hybrid.overlap import OverlapSchedule
from graphcap.hybrid.overlap_pipeline import PipelineOverlap, overlapped_pairs
from graphcap.hybrid.overlap_transport import LANES, Edge, Lines, Place, edges_of
from tests.hybrid.overlap_twin import Case, model_of

Message = tuple[int, int]
"""(stage that it goes to, microbatch)."""

SIZES = [(p, v, p * groups) for p, v, groups in product((2, 3, 4), (1, 2, 3), (1, 2, 3))] + [(4, 1, 3), (3, 1, 5)]


class Rank:
    """Runs its pairs as `OverlapSchedule.run` does: both inputs, then the output, then the gradient."""

    def __init__(self, place: Place, microbatches: int) -> None:
        self.place = place
        if place.chunks == 1:
            order = Order.one_f_one_b(place.pp_rank, place.pp_size, microbatches)
        else:
            order = Order.interleaved(place.pp_rank, place.pp_size, place.chunks, microbatches)
        self.todo: list[tuple[str, Edge, Message]] = []
        last = place.stages - 1
        for forward, backward in overlapped_pairs(order):
            f = None if forward is None else (place.stage(forward.chunk), forward.microbatch)
            b = None if backward is None else (place.stage(backward.chunk), backward.microbatch)
            if f is not None and f[0] > 0:
                self._add("recv", False, f[0] - 1, f)
            if b is not None and b[0] < last:
                self._add("recv", True, b[0] + 1, b)
            if f is not None and f[0] < last:
                self._add("send", False, f[0] + 1, (f[0] + 1, f[1]))
            if b is not None and b[0] > 0:
                self._add("send", True, b[0] - 1, (b[0] - 1, b[1]))

    def _add(self, what: str, gradient: bool, other_stage: int, message: Message) -> None:
        here, other = self.place.pp_rank, self.place.rank_of(other_stage)
        ends = (here, other) if what == "send" else (other, here)
        self.todo.append((what, Edge(*ends, gradient), message))


@pytest.mark.parametrize(("pp_size", "chunks", "microbatches"), SIZES)
def test_messages_arrive_in_order_and_nobody_waits_forever(pp_size: int, chunks: int, microbatches: int) -> None:
    places = [Place(rank, pp_size, chunks) for rank in range(pp_size)]
    ranks = [Rank(place, microbatches) for place in places]
    known = edges_of(places[0])
    assert all(edges_of(place) == known for place in places)
    assert len(set(known)) == len(known)
    wires: dict[Edge, list[Message]] = {edge: [] for edge in known}
    used = set()
    while any(rank.todo for rank in ranks):
        moved = False
        for rank in ranks:
            while rank.todo:
                what, edge, message = rank.todo[0]
                if what == "recv" and not wires[edge]:
                    break
                if what == "send":
                    wires[edge].append(message)
                else:
                    assert wires[edge].pop(0) == message, (edge, message)
                used.add(edge)
                rank.todo.pop(0)
                moved = True
        assert moved, [rank.todo[:1] for rank in ranks]
    assert used == set(known)
    assert not any(wires.values())


@pytest.mark.parametrize(
    ("pattern", "layers", "rank", "microbatches", "delay"),
    [
        ("[*E][E]|[*E]E", (2,), 0, 3, True),
        ("[*E]|E|E|[M*E]", (1, 1), 0, 2, False),
        ("[*E]|E|E|[M*E]", (1, 1), 1, 2, True),
    ],
)
def test_graphs_are_recorded_in_the_order_of_issue(
    pattern: str, layers: tuple[int, ...], rank: int, microbatches: int, delay: bool
) -> None:
    """Which is Order.ep_overlap of the rank's base order: each unit a chunk, each chunk's units in a row."""
    model = model_of(Case(pattern, shared=False, delay=delay, norm=False))
    schedule = OverlapSchedule(model.chunks()[rank::2], delay_wgrad=delay)
    pipeline = PipelineOverlap(schedule, rank, 2)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    pipeline.capture_graphs(tokens, microbatches, backend="tape", config=CaptureConfig(warmup=1))
    assert schedule.graphs is not None
    expected = Order.ep_overlap(pipeline.order(microbatches), layers, delay_wgrad=delay)
    assert list(schedule.graphs.graphed.plan.order) == list(expected)


def test_what_has_no_slot_1_has_no_graphs() -> None:
    model = model_of(Case("-|[*E]", shared=False, delay=False, norm=False))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    schedule = OverlapSchedule(model.chunks()[0])
    PipelineOverlap(schedule, 0, 2).capture_graphs(tokens, 4, backend="tape")
    assert schedule.graphs is None
    dense = OverlapSchedule(model_of(Case("--", shared=False, delay=False, norm=False)))
    with pytest.raises(PlanError, match="no unit of '--' has a slot 1"):
        dense.capture_graphs(tokens, 4, backend="tape")
    with pytest.raises(PlanError, match=r"use PipelineOverlap\.capture_graphs"):
        OverlapSchedule(model.chunks()).capture_graphs(tokens, 4, backend="tape")
    with pytest.raises(PlanError, match="no microbatches"):
        PipelineOverlap(schedule, 0, 2).step([])


def test_edges() -> None:
    assert edges_of(Place(0, 1, 1)) == []
    assert edges_of(Place(0, 2, 1)) == [Edge(0, 1, False), Edge(1, 0, True)]
    there_and_back = [Edge(0, 1, False), Edge(1, 0, True), Edge(1, 0, False), Edge(0, 1, True)]
    assert edges_of(Place(1, 2, 2)) == there_and_back
    assert len(edges_of(Place(0, 4, 1))) == 6
    assert len(edges_of(Place(0, 4, 2))) == 8


@pytest.mark.parametrize("pp_size", [2, 3, 4, 5])
def test_no_two_edges_share_a_communicator(pp_size: int) -> None:
    """A process group's communicators are one per pair of ranks, and a lane is a process group."""
    place = Place(0, pp_size, 2)
    lines = Lines(place, range(pp_size), torch.device("cpu"), by_order=False)
    lines.groups = {lane: lane for lane in LANES}  # type: ignore[misc]
    found = [(lines._group(edge), frozenset((edge.sender, edge.receiver))) for edge in edges_of(place)]
    assert len(found) == len(set(found)) == 2 * pp_size
    assert all(lane in LANES for lane, _ in found)
