"""Overlapped schedules over pipeline ranks: 1F1B and interleaved 1F1B, with one more warm-up forward than the plain ones,
so that the forward and the backward of a step belong to different microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from graphcap import Order, Phase, Step
from graphcap.errors import PlanError
from graphcap.hybrid.overlap import Batch, OverlapSchedule, SchedulePlan

Pair = tuple[Step | None, Step | None]


def overlapped_pairs(order: Order) -> list[Pair]:
    """The runs of a base order (1F1B or interleaved, phases F and B): (forward, backward) that run together.

    Its warm-up forwards, and the one that would pair with the first backward, run alone; then every backward runs with
    the forward that follows it; the rest run alone. PlanError for an order of another form.
    """
    steps = list(order)
    first = next((place for place, step in enumerate(steps) if step.phase is not Phase.F), len(steps))
    pairs: list[Pair] = [(step, None) for step in steps[:first]]
    place = first
    while place < len(steps):
        backward = steps[place]
        ahead = steps[place + 1] if place + 1 < len(steps) else None
        if backward.phase is not Phase.B:
            raise PlanError(f"step {backward} of {order}: expected forwards, then B and F in turn, then B")
        if ahead is not None and ahead.phase is Phase.F:
            if (ahead.chunk, ahead.microbatch) == (backward.chunk, backward.microbatch):
                raise PlanError(f"{ahead} right after {backward} in {order}: they belong to one microbatch")
            pairs.append((ahead, backward))
            place += 2
        else:
            pairs.append((None, backward))
            place += 1
    return pairs


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


class Transport:
    """Hidden states and their gradients between neighbouring stages, by send and receive of torch.distributed. A message
    is tagged with its stage and microbatch; sends do not wait. `ranks`: global rank of each pipeline rank."""

    def __init__(self, place: Place, ranks: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> None:
        self.place, self.ranks, self.shape, self.dtype = place, tuple(ranks), tuple(shape), dtype
        self._own: dict[int, Tensor] = {}
        self._pending: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensor: Tensor, to_stage: int, tag: int) -> None:
        rank = self.place.rank_of(to_stage)
        tensor = tensor.contiguous()
        if rank == self.place.pp_rank:
            self._own[tag] = tensor
        else:
            self._pending.append((dist.isend(tensor, self.ranks[rank], tag=tag), tensor))

    def receive(self, from_stage: int, tag: int, device: torch.device) -> Tensor:
        rank = self.place.rank_of(from_stage)
        if rank == self.place.pp_rank:
            return self._own.pop(tag)
        buffer = torch.empty(self.shape, dtype=self.dtype, device=device)
        dist.recv(buffer, self.ranks[rank], tag=tag)
        return buffer

    def finish(self) -> None:
        """Wait until everything sent has left, so that its memory may go."""
        for work, _ in self._pending:
            if work is not None:
                work.wait()
        self._pending.clear()


@dataclass(slots=True)
class PipelineOverlap:
    """One pipeline rank's overlapped 1F1B (one chunk a rank) or interleaved 1F1B (several).

    schedule: an OverlapSchedule of this rank's chunks, in order. The chunk of the first stage takes tokens, that of the
    last stage labels. ranks: global rank of each pipeline rank; None: 0, 1, ...
    """

    schedule: OverlapSchedule
    pp_rank: int
    pp_size: int
    ranks: Sequence[int] | None = None
    pairs: list[Pair] = field(default_factory=list)

    def order(self, microbatches: int) -> Order:
        """The base order of this rank."""
        chunks = len(self.schedule.chunks)
        if chunks == 1:
            return Order.one_f_one_b(self.pp_rank, self.pp_size, microbatches)
        return Order.interleaved(self.pp_rank, self.pp_size, chunks, microbatches)

    def step(self, batches: Sequence[Batch], *, scale: float | None = None) -> list[Tensor]:
        """Forward and backward of all microbatches; every rank is given the same batches. Gradients are added to `.grad`.
        Returns the losses on the rank of the last stage, nothing on the others. scale: as in OverlapSchedule.step."""
        factor = 1 / len(batches) if scale is None else scale
        chunks = len(self.schedule.chunks)
        place = Place(self.pp_rank, self.pp_size, chunks)
        config = self.schedule.chunks[0].config
        shape = (*batches[0][0].shape, config.hidden)
        ranks = tuple(range(self.pp_size)) if self.ranks is None else tuple(self.ranks)
        run = _Run(self.schedule, place, Transport(place, ranks, shape, config.dtype), len(batches))
        self.pairs = overlapped_pairs(self.order(len(batches)))
        with self.schedule.training():
            for forward, backward in self.pairs:
                run.pair(forward, backward, batches, factor)
        run.transport.finish()
        self.schedule.streams.join()
        return run.losses


class _Run:
    """The plans of one step that wait for their backward, and the neighbours."""

    def __init__(self, schedule: OverlapSchedule, place: Place, transport: Transport, microbatches: int) -> None:
        self.schedule, self.place, self.transport, self.microbatches = schedule, place, transport, microbatches
        self.waiting: dict[tuple[int, int], SchedulePlan] = {}
        self.losses: list[Tensor] = []

    def pair(self, forward: Step | None, backward: Step | None, batches: Sequence[Batch], scale: float) -> None:
        newer = older = None
        if forward is not None:
            tokens, labels = batches[forward.microbatch]
            newer = self.schedule.build_schedule_plan(
                forward.microbatch, tokens, labels, chunk=forward.chunk, scale=scale
            )
            self.waiting[forward.chunk, forward.microbatch] = newer
        if backward is not None:
            older = self.waiting.pop((backward.chunk, backward.microbatch))
        self.schedule.run(
            newer,
            older,
            receive=self._receive,
            receive_grad=self._receive_grad,
            send=self._send,
            send_grad=self._send_grad,
        )
        if newer is not None and newer.output is not None and newer.output.loss is not None:
            self.losses.append(newer.output.loss)

    def _tag(self, plan: SchedulePlan, into_stage: int, gradient: bool) -> int:
        return (into_stage * self.microbatches + plan.microbatch) * 2 + gradient

    def _receive(self, plan: SchedulePlan) -> Tensor:
        stage = self.place.stage(plan.chunk)
        return self.transport.receive(stage - 1, self._tag(plan, stage, False), self.schedule.streams.device)

    def _send(self, plan: SchedulePlan, output: Tensor) -> None:
        stage = self.place.stage(plan.chunk) + 1
        self.transport.send(output, stage, self._tag(plan, stage, False))

    def _receive_grad(self, plan: SchedulePlan) -> Tensor:
        stage = self.place.stage(plan.chunk)
        return self.transport.receive(stage + 1, self._tag(plan, stage, True), self.schedule.streams.device)

    def _send_grad(self, plan: SchedulePlan, grad: Tensor) -> None:
        stage = self.place.stage(plan.chunk) - 1
        self.transport.send(grad, stage, self._tag(plan, stage, True))
