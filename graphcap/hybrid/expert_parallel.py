"""Expert parallelism: each rank of a group holds a share of every layer's experts, and rows travel to them and back by
an uneven all-to-all. NCCL or gloo; a group of one rank needs no process group at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphcap.errors import PlanError, StateError
from graphcap.hybrid.first_order import refuse_create_graph


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The ranks that share the experts. group: None stands for the default group, and is not touched where size is 1."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> ExpertParallel:
        """All ranks of `group` (default: the default group); one rank where torch.distributed is not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """A copied model lives on the same ranks; a process group can't be copied."""
        return self

    def share(self, experts: int) -> range:
        """The experts of this rank: `experts / size` neighbours. PlanError if they can't be shared out evenly."""
        if experts % self.size:
            raise PlanError(f"{experts} experts can't be shared out evenly over {self.size} ranks: expected a multiple")
        each = experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)


ALONE = ExpertParallel()


@dataclass(frozen=True, slots=True)
class Layout:
    """Who sends how many rows to whom in one dispatch: host numbers, which the way back and both backwards use again.

    sent, received: rows per rank of the group. counts: int64 [ranks, local experts] on the tensors' device, rows that
    each rank sent for each expert of this one. per_expert: rows of each local expert, on the host; None where the rows
    stayed at home and nothing was read.
    """

    parallel: ExpertParallel
    sent: tuple[int, ...]
    received: tuple[int, ...]
    counts: Tensor
    per_expert: tuple[int, ...] | None

    @property
    def rows(self) -> int:
        """Rows that this rank received; 0 is told apart from unknown by `per_expert`."""
        return sum(self.received)


_ANSWERS = ("under no_grad", "no gradient wanted, neither of its rows nor of its experts", "trains")


def agree(counts: Tensor, parallel: ExpertParallel, *, trained: bool = False) -> Layout:
    """Tell every rank how many rows come to it. counts: int64 [experts], rows of this rank for each expert of the group.
    trained: whether a gradient is wanted, of this rank's rows or experts. Reads the device once. StateError, on all ranks,
    where some train and others do not: every rank's backward takes part in the others', which would wait forever."""
    if parallel.size == 1:
        return Layout(parallel, (), (), counts.view(1, -1), None)
    said = torch.is_grad_enabled() * (1 + trained)
    mine = torch.cat((counts.view(parallel.size, -1), counts.new_full((parallel.size, 1), said)), dim=1)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=parallel.group)
    outgoing, incoming = torch.stack((mine, theirs)).tolist()
    answers = [row.pop() for row in incoming]
    if len(set(answers)) > 1:
        found = ", ".join(f"rank {rank}: {_ANSWERS[answer]}" for rank, answer in enumerate(answers))
        raise StateError(
            f"ranks that share experts differ in what they train ({found}), but every rank's backward takes part in the "
            "others': let all run under no_grad or none, and freeze experts so that each rank has some to train, or none has"
        )
    return Layout(
        parallel,
        tuple(sum(row[:-1]) for row in outgoing),
        tuple(map(sum, incoming)),
        theirs[:, :-1],
        tuple(map(sum, zip(*incoming, strict=True))),
    )


def send(rows: Tensor, layout: Layout, anchor: Tensor | None = None) -> Tensor:
    """rows [sum(sent), width], sorted by rank -> [sum(received), width], sorted by the rank that they come from.

    anchor: a weight that is trained behind the exchange, for rows that want no gradient. With everything frozen in front
    of the experts, a rank's results want one only if its experts had rows; a backward that not all ranks run would wait
    forever. By the anchor, whose own gradient is None, they always want one."""
    return _exchanged(rows, layout.sent, layout.received, layout.parallel, anchor)


def send_back(rows: Tensor, layout: Layout) -> Tensor:
    """The inverse of `send`."""
    return _exchanged(rows, layout.received, layout.sent, layout.parallel)


def _exchanged(
    rows: Tensor,
    sent: tuple[int, ...],
    received: tuple[int, ...],
    parallel: ExpertParallel,
    anchor: Tensor | None = None,
) -> Tensor:
    if parallel.size == 1:
        return rows
    out: Tensor = _AllToAll.apply(rows, sent, received, parallel.group, anchor)  # type: ignore[no-untyped-call]
    return out


class _AllToAll(torch.autograd.Function):
    """Keeps the splits and no tensor: the rows sent may be freed as soon as the exchange is done."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        group: dist.ProcessGroup | None,
        anchor: Tensor | None,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_create_graph("experts on several ranks (shard_experts)")
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None, None


def _all_to_all(rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup | None) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
