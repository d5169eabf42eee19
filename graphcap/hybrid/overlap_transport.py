"""What pipeline ranks send each other: hidden states, their gradients, and one shared weight's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

_ENDS_TAG = 1 << 30  # above those of all messages between stages


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk of a pipeline rank stands in the chain of all chunks: stage = chunk * pp_size + pp_rank."""

    pp_rank: int
    pp_size: int
    chunks: int

    def stage(self, chunk: int) -> int:
        return chunk * self.pp_size + self.pp_rank

    def rank_of(self, stage: int) -> int:
        return stage % self.pp_size

    @property
    def stages(self) -> int:
        return self.chunks * self.pp_size


@dataclass(frozen=True, slots=True)
class Edge:
    """A way that messages take, of hidden states or of their gradients, from one pipeline rank to another. They are
    received in the order in which they are sent: a chunk's microbatches run in one order on all ranks."""

    sender: int
    receiver: int
    gradient: bool


LANES: Final = ((False, False), (True, False), (False, True), (True, True))
"""Kinds of edges, (of gradients, between the last rank and the first): of one kind, two ranks have one edge at most."""


def edges_of(place: Place) -> list[Edge]:
    """Every edge of the pipeline, in the same order on every rank; from the last rank back to the first only where a rank
    has several chunks."""
    steps = [(rank, (rank + 1) % place.pp_size) for rank in range(place.pp_size)]
    if place.chunks == 1:
        steps.pop()
    return [edge for a, b in steps for edge in (Edge(a, b, False), Edge(b, a, True))]


class Lines:
    """How messages of one edge find each other.

    by_order: no two edges share a communicator, and messages need no tags. NCCL has none, and runs what two ranks send each
    other on one communicator one after the other, so that ranks that first send to each other would wait forever; on its
    own a message waits for nothing but those sent before it the same way, which the receiver asks for first. NCCL has a
    communicator per pair of ranks of a process group, so there is a group for each kind of edge: `LANES`. All ranks of the
    default group make them together, those of other pipelines too, and send one message on each edge in one order: NCCL
    joins two ranks at their first message, for which the host waits. Else: the default group, and tags.
    """

    def __init__(self, place: Place, ranks: Sequence[int], device: torch.device, *, by_order: bool) -> None:
        self.place, self.ranks, self.by_order = place, tuple(ranks), by_order
        self.groups: dict[tuple[bool, bool], dist.ProcessGroup] = {}
        if not by_order:
            return
        pipelines: list[tuple[int, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(pipelines, self.ranks)
        for pipeline in sorted(set(pipelines)):
            for lane in LANES:
                group = dist.new_group(list(pipeline))
                if pipeline == self.ranks:
                    self.groups[lane] = group
        for edge in edges_of(place):
            self._first_message(edge, torch.zeros(1, device=device))

    def _first_message(self, edge: Edge, word: Tensor) -> None:
        group = self._group(edge)
        if edge.sender == self.place.pp_rank:
            dist.send(word, self.ranks[edge.receiver], group=group)
        elif edge.receiver == self.place.pp_rank:
            dist.recv(word, self.ranks[edge.sender], group=group)

    def _group(self, edge: Edge) -> dist.ProcessGroup | None:
        """None: the default group."""
        first, last = (edge.receiver, edge.sender) if not edge.gradient else (edge.sender, edge.receiver)
        return self.groups.get((edge.gradient, (first, last) == (0, self.place.pp_size - 1)))

    def isend(self, tensor: Tensor, receiver: int, gradient: bool, tag: int) -> dist.Work | None:
        edge = Edge(self.place.pp_rank, receiver, gradient)
        return dist.isend(tensor, self.ranks[receiver], group=self._group(edge), tag=0 if self.by_order else tag)

    def recv(self, buffer: Tensor, sender: int, gradient: bool, tag: int) -> None:
        edge = Edge(sender, self.place.pp_rank, gradient)
        dist.recv(buffer, self.ranks[sender], group=self._group(edge), tag=0 if self.by_order else tag)

    def sum_over_ends(self, tensor: Tensor) -> Tensor:
        """Of the first and the last rank, which call it alike: what the first has plus what the last has."""
        first = self.place.pp_rank == 0
        other = self.ranks[-1 if first else 0]
        mine, theirs = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        group, tag = (self.groups[LANES[0]], 0) if self.by_order else (None, _ENDS_TAG)
        if first:
            dist.send(mine, other, group=group, tag=tag)
            dist.recv(theirs, other, group=group, tag=tag)
        else:
            dist.recv(theirs, other, group=group, tag=tag)
            dist.send(mine, other, group=group, tag=tag)
        return mine + theirs if first else theirs + mine


class Transport:
    """Hidden states and their gradients between neighbouring stages, of one step. Sends do not wait."""

    def __init__(self, lines: Lines, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.lines, self.shape, self.dtype, self.device = lines, tuple(shape), dtype, device
        self._pending: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, to_stage: int, gradient: bool, tag: int) -> None:
        while self._pending and self._pending[0][0].is_completed():
            self._pending.pop(0)[0].wait()  # an error of its own is raised here
        tensor = tensor.contiguous()
        work = self.lines.isend(tensor, self.lines.place.rank_of(to_stage), gradient, tag)
        assert work is not None  # None: this rank is not in the group
        self._pending.append((work, tensor))

    def receive(self, from_stage: int, gradient: bool, tag: int) -> Tensor:
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.lines.recv(buffer, self.lines.place.rank_of(from_stage), gradient, tag)
        return buffer

    def finish(self) -> None:
        """Wait until everything sent has left, so that its memory may go."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
