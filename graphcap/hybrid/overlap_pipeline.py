"""Overlapped schedules over pipeline ranks: 1F1B and interleaved 1F1B, with one more warm-up forward than the plain ones,
so that the forward and the backward of a step belong to different microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphcap import Order, Phase, Step
from graphcap.errors import PlanError
from graphcap.hybrid.overlap import Batch, OverlapSchedule, SchedulePlan
from graphcap.hybrid.overlap_transport import Lines, Place, Transport

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


@dataclass(slots=True)
class PipelineOverlap:
    """One pipeline rank's overlapped 1F1B (one chunk a rank) or interleaved 1F1B (several).

    schedule: an OverlapSchedule of this rank's chunks, in order. The chunk of the first stage takes tokens, that of the
    last stage labels. ranks: global rank of each pipeline rank; None: 0, 1, ...
    by_order: messages find each other by the order in which they are sent, on process groups of their own (as NCCL needs
    it), not by tags; None: on a GPU. The first step then makes the groups: all ranks of the default group must run one.

    The embedding that MTP on the last stage reads is the first stage's weight: every step adds both ranks' gradients of
    it to `.grad` on both, so that the two copies stay one.
    """

    schedule: OverlapSchedule
    pp_rank: int
    pp_size: int
    ranks: Sequence[int] | None = None
    by_order: bool | None = None
    pairs: list[Pair] = field(default_factory=list)
    _lines: Lines | None = None

    def order(self, microbatches: int) -> Order:
        """The base order of this rank."""
        chunks = len(self.schedule.chunks)
        if chunks == 1:
            return Order.one_f_one_b(self.pp_rank, self.pp_size, microbatches)
        return Order.interleaved(self.pp_rank, self.pp_size, chunks, microbatches)

    def capture_graphs(self, tokens: Tensor, microbatches: int, *, backend: str = "auto", **options: Any) -> None:
        """As `OverlapSchedule.capture_graphs`: slot 1 of every unit of this rank's chunks, under the order in which this
        rank's steps issue them. tokens: of one microbatch, int64 [batch, sequence], on every rank. A rank whose layers have
        no such slot (`-` alone) records nothing."""
        runs = [(_of(forward), _of(backward)) for forward, backward in overlapped_pairs(self.order(microbatches))]
        self.schedule.record_graphs(tokens, runs, backend, options)

    def step(self, batches: Sequence[Batch], *, scale: float | None = None) -> list[Tensor]:
        """Forward and backward of all microbatches; every rank is given the same batches. Gradients are added to `.grad`.
        Returns the losses on the rank of the last stage, nothing on the others. scale: as in OverlapSchedule.step."""
        if not batches:
            raise PlanError("step() of no microbatches")
        factor = 1 / len(batches) if scale is None else scale
        config, device = self.schedule.chunks[0].config, self.schedule.streams.device
        shape = (*batches[0][0].shape, config.hidden)
        lines = self._connected()
        run = _Run(self.schedule, lines.place, Transport(lines, shape, config.dtype, device), len(batches))
        self.pairs = overlapped_pairs(self.order(len(batches)))
        with self._one_embedding(lines):
            with self.schedule.training():
                for forward, backward in self.pairs:
                    run.pair(forward, backward, batches, factor)
            run.transport.finish()
            self.schedule.streams.join()
        return run.losses

    def _connected(self) -> Lines:
        if self._lines is None:
            ranks = tuple(range(self.pp_size)) if self.ranks is None else tuple(self.ranks)
            place = Place(self.pp_rank, self.pp_size, len(self.schedule.chunks))
            device = self.schedule.streams.device
            by_order = device.type == "cuda" if self.by_order is None else self.by_order
            self._lines = Lines(place, ranks, device, by_order=by_order)
        return self._lines

    @contextmanager
    def _one_embedding(self, lines: Lines) -> Iterator[None]:
        """Around a step: its gradient of a weight that both ends of the pipeline have becomes the sum of both."""
        chunks = self.schedule.chunks
        last = self.pp_rank == self.pp_size - 1
        holds = self.pp_size > 1 and bool(chunks[0].config.layers.mtp) and (self.pp_rank == 0 or last)
        embedding: nn.Embedding | None = chunks[-1 if last else 0].embedding if holds else None
        if embedding is None:
            yield
            return
        weight = embedding.weight
        before, weight.grad = weight.grad, None  # its own, not the sum of an earlier step
        try:
            yield
        except BaseException:
            weight.grad = before
            raise
        if not weight.requires_grad:
            return
        total = lines.sum_over_ends(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        weight.grad = total if before is None else before.add_(total)


def _of(step: Step | None) -> tuple[int, int] | None:
    return None if step is None else (step.chunk, step.microbatch)


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
        return self.transport.receive(stage - 1, False, self._tag(plan, stage, False))

    def _send(self, plan: SchedulePlan, output: Tensor) -> None:
        stage = self.place.stage(plan.chunk) + 1
        self.transport.send(output, stage, False, self._tag(plan, stage, False))

    def _receive_grad(self, plan: SchedulePlan) -> Tensor:
        stage = self.place.stage(plan.chunk)
        return self.transport.receive(stage + 1, True, self._tag(plan, stage, True))

    def _send_grad(self, plan: SchedulePlan, grad: Tensor) -> None:
        stage = self.place.stage(plan.chunk) - 1
        self.transport.send(grad, stage, True, self._tag(plan, stage, True))
