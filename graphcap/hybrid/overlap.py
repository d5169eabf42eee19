"""Expert-parallel overlap: the forward of one microbatch interleaved with the backward of another, unit by unit, so that
the all-to-alls of one hide behind the matrix products of the other (Megatron-LM calls it combined 1F1B).

    schedule = OverlapSchedule(model, delay_wgrad=True)
    losses = schedule.step([(tokens, labels), ...])        # forwards and backwards of one optimizer step

Losses, gradients and weights equal those of `model(tokens, labels).loss.backward()` per microbatch, bit for bit. On a
CPU there are no streams: the same things are issued in the same order, which `schedule.trace` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphcap.errors import PlanError, ReplayOrderError
from graphcap.hybrid.model import HybridChunk, HybridOutput
from graphcap.hybrid.overlap_graphs import GraphNode, PreDispatchGraphs
from graphcap.hybrid.schedule_nodes import Issued, Node, Slot, Streams, Value, Watch
from graphcap.hybrid.schedule_units import Unit, chunk_units
from graphcap.hybrid.wgrad import discard_outstanding, set_delayed

Batch = tuple[Tensor, Tensor]
Microbatch = tuple[int, int]
"""(chunk, microbatch)."""


@dataclass(slots=True)
class UnitRun:
    """One unit of one microbatch: the nodes of its slots, and the values between them by name."""

    place: int
    nodes: dict[str, Node | GraphNode]
    note: Callable[[str, int, str, str], None]
    values: dict[str, Value] = field(default_factory=dict)

    def forward(self, slot: str) -> None:
        node = self.nodes.get(slot)
        if node is None:
            return
        self.note("fwd", self.place, slot, node.slot.stream)
        made = node.forward([self.values[label] for label in node.slot.reads])
        self.values.update(zip(node.slot.makes, made, strict=True))

    def backward(self, slot: str) -> None:
        node = self.nodes.get(slot)
        if node is not None:
            self.note("bwd", self.place, slot, node.slot.stream)
            node.backward()

    def backward_dw(self, slot: str) -> None:
        node = self.nodes.get(slot)
        if node is not None and node.backward_dw():
            self.note("dw", self.place, slot, node.slot.stream)


@dataclass(slots=True)
class SchedulePlan:
    """One microbatch of one chunk, ready to be run slot by slot: see `OverlapSchedule.build_schedule_plan`.

    output: the loss and logits of the last chunk's forward, once it has run. last: where the microbatch is now.
    across: values that later units or the head read, of MTP: `ahead_<depth>`, embeddings, and `hidden_<depth>`.
    """

    chunk: int
    microbatch: int
    is_first: bool
    pre: Node | None
    units: list[UnitRun]
    post: Node | None
    event: torch.cuda.Event | None
    first: Value = field(default_factory=lambda: Value(None))
    entry: Value = field(default_factory=lambda: Value(None))
    last: Value = field(default_factory=lambda: Value(None))
    across: dict[str, Value] = field(default_factory=dict)
    output: HybridOutput | None = None
    scaled: Value | None = None
    done: bool = False


def run_units(forward: UnitRun | None, backward: UnitRun | None, *, early_release: bool, keep_dw: bool = False) -> None:
    """A unit of the newer microbatch with one of the older one, either of which may be missing.

    The order in which the host issues them: communication of one side always has computation of the other beside it.
    `dispatch`'s backward waits for the experts' input gradients but not for their weight gradients, which hide it.
    early_release: slot 1's backward right after dispatch's, before the other side's experts allocate. keep_dw: leave
    slot 1's weight gradients to the caller.
    """
    f, b = forward, backward
    if b is not None:
        b.backward("mtp_post")
        b.backward("combine")
    if f is not None:
        f.forward("pre_dispatch")
    if b is not None:
        b.backward("mlp")
    if f is not None:
        f.forward("dispatch")
    if b is not None:
        b.backward_dw("mlp")
        b.backward("dispatch")
        if early_release:
            b.backward("pre_dispatch")
    if f is not None:
        f.forward("mlp")
        f.forward("combine")
    if b is not None and not early_release:
        b.backward("pre_dispatch")
    if f is not None:
        f.forward("mtp_post")
    if b is not None and not keep_dw:
        b.backward_dw("pre_dispatch")


def run_all_units(
    f_units: Sequence[UnitRun],
    b_units: Sequence[UnitRun],
    *,
    early_release: bool,
    enter: Callable[[UnitRun], None] = lambda _: None,
    leave: Callable[[UnitRun], None] = lambda _: None,
) -> None:
    """The units of a forward with those of a backward (in its own order, the last unit first), then what is left over of
    either. The slot 1 weight gradients of the backward's last unit are the caller's. enter, leave: around a forward unit."""
    kept = b_units[-1] if b_units else None
    paired = min(len(f_units), len(b_units))
    for f_unit, b_unit in zip(f_units, b_units, strict=False):
        enter(f_unit)
        run_units(f_unit, b_unit, early_release=early_release, keep_dw=b_unit is kept)
        leave(f_unit)
    for b_unit in b_units[paired:]:
        run_units(None, b_unit, early_release=early_release, keep_dw=b_unit is kept)
    for f_unit in f_units[paired:]:
        enter(f_unit)
        run_units(f_unit, None, early_release=early_release)
        leave(f_unit)


class OverlapSchedule:
    """Runs a model, or the chunks of one pipeline rank, in overlapped order.

    model: a HybridModel, or this rank's HybridChunks in order. delay_wgrad: weight gradients of slots 1 and 3 run by
    themselves, behind the communication. early_release: slot 1's backward earlier, which lowers the memory's peak.
    regroup: layers of a flat pattern share units as if there were brackets. graphs: slot 1 as CUDA graphs, or graphs of
    the CPU tape: a `PreDispatchGraphs`, see `capture_graphs`.
    trace: what was issued since `clear_trace()`, as `Issued` records.

    PlanError for what can't be overlapped: tied embeddings (a weight with gradients from two nodes would add them up in
    another order than eager) and recompute="layer".
    """

    def __init__(
        self,
        model: HybridChunk | Sequence[HybridChunk],
        *,
        delay_wgrad: bool = False,
        early_release: bool = False,
        regroup: bool = False,
    ) -> None:
        self.chunks = (model,) if isinstance(model, HybridChunk) else tuple(model)
        if not self.chunks:
            raise PlanError("OverlapSchedule: no chunks")
        if self.chunks[0].config.quantization is not None:
            raise PlanError(
                f"quantization={self.chunks[0].config.quantization!r} and an overlapped schedule: it interleaves "
                "the slots of two microbatches, whose amaxes would be collected and reduced in another order than eager. "
                "Run the chunks under an Order (graphcap.capture), or overlap without quantization"
            )
        if self.chunks[0].config.tie_embeddings:
            raise PlanError(
                "tie_embeddings=True and an overlapped schedule: the embedding and the output layer are two nodes, whose "
                "gradients would be added in another order than eager adds them. Untie them"
            )
        self.delay_wgrad, self.early_release, self.regroup = delay_wgrad, early_release, regroup
        self.trace: list[Issued] = []
        self.graphs: PreDispatchGraphs | None = None
        # A stage may be empty: then what it hands on lies where new tensors do.
        devices = (parameter.device for chunk in self.chunks for parameter in chunk.parameters())
        self.streams = Streams(next(devices, torch.empty(0).device))
        self._watched: set[int] = set()
        self.units = self._units(pre_graphed=False)

    def _units(self, *, pre_graphed: bool) -> tuple[tuple[Unit, ...], ...]:
        return tuple(chunk_units(chunk, regroup=self.regroup, pre_graphed=pre_graphed) for chunk in self.chunks)

    def clear_trace(self) -> None:
        self.trace.clear()

    # --------------------------------------------------------------------------------------------------------- plans

    def build_schedule_plan(
        self, microbatch: int, tokens: Tensor | None, labels: Tensor | None, *, chunk: int = 0, scale: float = 1.0
    ) -> SchedulePlan:
        """The plan of one microbatch through one chunk; nothing runs yet. tokens: int64 [batch, sequence], of the first
        chunk (None for a later one, whose input `run` is given); labels: as tokens, of the last chunk. scale: the
        backward is that of loss * scale."""
        module, event = self.chunks[chunk], self.streams.event()
        if event is not None:
            event.record()  # the inputs stand before it
        watch = None
        if chunk not in self._watched:
            self._watched.add(chunk)
            watch = Watch()

        def node(slot: Slot, place: str) -> Node:
            title = f"chunk {chunk}, microbatch {microbatch}, {place}{slot.name}"
            return Node(slot, title, self.streams, event, self.delay_wgrad, watch)

        def note(action: Any, place: int | None, slot: str, stream: Any) -> None:
            self.trace.append(Issued(action, chunk, microbatch, place, slot, stream))

        units = []
        for place, unit in enumerate(self.units[chunk]):
            nodes: dict[str, Node | GraphNode] = {
                slot.name: node(slot, f"unit {place} ({unit.text}), ") for slot in unit.slots if slot is not None
            }
            if self.graphs is not None and "pre_dispatch" in nodes:
                slot_1 = nodes["pre_dispatch"].slot
                nodes["pre_dispatch"] = self.graphs.node(slot_1, chunk, place, microbatch, self.streams, event)
            units.append(UnitRun(place, nodes, note))
        first = is_first(module)
        pre = None
        if module.embedding is not None:
            if tokens is None:
                raise PlanError("build_schedule_plan: the first chunk, and the last one of a model with MTP, need tokens")
            pre = node(_embedding(module, first), "")
        post = None
        if module.output_layer is not None:
            if labels is None:
                raise PlanError("build_schedule_plan: the last chunk needs labels")
            post = node(_head(module, tokens, labels, scale), "")
        plan = SchedulePlan(chunk, microbatch, first, pre, units, post, event)
        plan.first = Value(tokens)
        return plan

    def forward_step(
        self, microbatch: int, tokens: Tensor, labels: Tensor, *, return_schedule_plan: bool = False, scale: float = 1.0
    ) -> SchedulePlan | HybridOutput:
        """What a training loop calls per microbatch: the model's output, or (return_schedule_plan) the plan that `run`
        takes, of which nothing has run. Of a whole model."""
        if return_schedule_plan:
            return self.build_schedule_plan(microbatch, tokens, labels, scale=scale)
        output: HybridOutput = self.chunks[0](tokens, labels)
        return output

    # ----------------------------------------------------------------------------------------------------------- runs

    def run(
        self,
        forward: SchedulePlan | None,
        backward: SchedulePlan | None,
        *,
        receive: Callable[[SchedulePlan], Tensor] | None = None,
        receive_grad: Callable[[SchedulePlan], Tensor] | None = None,
        send: Callable[[SchedulePlan, Tensor], None] | None = None,
        send_grad: Callable[[SchedulePlan, Tensor], None] | None = None,
    ) -> None:
        """One forward and one backward of different microbatches, or either alone.

        The callables speak with the pipeline's neighbours: `receive(plan)` gives the input of a chunk that is not the
        first, `receive_grad(plan)` the gradient of the output of one that is not the last; `send` and `send_grad` take
        them the other way. A forward's output is sent on the communication stream, a gradient on the compute stream;
        slot 1's last weight gradients come behind them.
        """
        f, b = forward, backward
        if f is not None:
            self._begin_forward(f, receive)
        if b is not None:
            self._begin_backward(b, receive_grad)
        f_units = f.units if f is not None else []
        b_units = b.units[::-1] if b is not None else []
        run_all_units(
            f_units,
            b_units,
            early_release=self.early_release,
            enter=lambda unit: self._enter(f, unit),
            leave=lambda unit: self._leave(f, unit),
        )
        if f is not None and f.post is None and send is not None:
            self._note(f, "send", "output", "comm")
            with self.streams.on("comm", f.event):
                send(f, f.last.content.detach())
        if b is not None and not b.is_first and send_grad is not None:
            assert b.entry.grad is not None
            self._note(b, "send", "grad", "compute")
            send_grad(b, b.entry.grad)
        if b_units:
            b_units[-1].backward_dw("pre_dispatch")
        if f is not None and f.post is not None:
            self._post_process(f)
        if b is not None:
            self._end_backward(b)

    def step(self, batches: Sequence[Batch], *, scale: float | None = None) -> list[Tensor]:
        """Forward and backward of all microbatches, without a pipeline: the first forward alone, then each backward with
        the next forward, the last backward alone. Gradients are added to `.grad`; scale: of each loss, 1 / microbatches
        if it is not given. Returns the microbatches' losses, unscaled and detached. Call it before `optimizer.step()`."""
        if len(self.chunks) != 1:
            raise PlanError(f"step() runs one chunk that is a whole model, not {len(self.chunks)}: use PipelineOverlap")
        if not batches:
            raise PlanError("step() of no microbatches")
        factor = 1 / len(batches) if scale is None else scale
        losses: list[Tensor] = []
        with self.training():
            older: SchedulePlan | None = None
            for microbatch, (tokens, labels) in enumerate(batches):
                newer = self.build_schedule_plan(microbatch, tokens, labels, scale=factor)
                self.run(newer, older)
                older = newer
                assert newer.output is not None
                assert newer.output.loss is not None
                losses.append(newer.output.loss)
            self.run(None, older)
        self.streams.join()
        return losses

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around all runs of one optimizer step: weight gradients are delayed as asked for, and none is left behind."""
        self._delay(self.delay_wgrad)
        try:
            yield
        except BaseException:
            for chunk in self.chunks:
                discard_outstanding(chunk)
            if self.graphs is not None:
                self.graphs.reset()
            self._delay(False)
            raise
        self._delay(False)

    def _delay(self, delayed: bool) -> None:
        if not delayed:
            for chunk in self.chunks:
                set_delayed(chunk, False)
            return
        for unit in (unit for units in self.units for unit in units):
            unit.delay(True)

    # ---------------------------------------------------------------------------------------------------- graphs

    def capture_graphs(self, tokens: Tensor, microbatches: int, *, backend: str = "auto", **options: Any) -> None:
        """Record slot 1 of every unit (attention, Mamba, norm, router, sort, shared expert) as graphs, with graphs of
        their own for weight gradients where those are delayed. Steps then need exactly `microbatches` microbatches of
        the shape of `tokens`. Under recompute="norm" no graph keeps the norm's output for its backward. With a pipeline:
        `PipelineOverlap.capture_graphs`. options: those of `graphcap.capture`.

        PlanError where no unit has a slot 1, and for chunks of a pipeline; errors of `graphcap.capture`."""
        if len(self.chunks) != 1:
            raise PlanError(
                f"capture_graphs() takes one chunk that is a whole model, not {len(self.chunks)}: use "
                "PipelineOverlap.capture_graphs"
            )
        runs: list[Microbatch | None] = [(0, microbatch) for microbatch in range(microbatches)]
        if not self.record_graphs(tokens, list(zip([*runs, None], [None, *runs], strict=True)), backend, options):
            raise PlanError(f"no unit of {self.chunks[0].config.pattern!r} has a slot 1: there is nothing to record")

    def record_graphs(
        self,
        tokens: Tensor,
        runs: Sequence[tuple[Microbatch | None, Microbatch | None]],
        backend: str,
        options: dict[str, Any],
    ) -> bool:
        """`capture_graphs` for the runs of one step, each the (chunk, microbatch) of its forward and of its backward, in
        order. False, and no change, if no chunk has a unit with a slot 1."""
        units = self._units(pre_graphed=True)
        if not any(unit.pre is not None for chunk in units for unit in chunk):
            return False
        config = self.chunks[0].config
        sample = torch.linspace(-1, 1, config.hidden, dtype=config.dtype, device=tokens.device)
        sample = sample.expand(*tokens.shape, config.hidden).clone()
        issued = self._pre_dispatch_steps(runs, units)
        with self._recorded_delayed(units):
            self.graphs = PreDispatchGraphs(units, issued, sample, self.delay_wgrad, backend, options)
        self.units = units
        return True

    @contextmanager
    def _recorded_delayed(self, units: Sequence[Sequence[Unit]]) -> Iterator[None]:
        """Inside, slot 1 puts its weight gradients off as it does in steps: a graph of its own then holds their products
        alone. (Autograd's split of a backward would run all of it a second time for them.)"""
        slots = [unit.pre for of_chunk in units for unit in of_chunk if unit.pre is not None]
        for pre in slots:
            pre.delay(self.delay_wgrad)
        try:
            yield
        finally:
            for pre in slots:
                pre.delay(False)

    def _pre_dispatch_steps(
        self,
        runs: Sequence[tuple[Microbatch | None, Microbatch | None]],
        units: Sequence[Sequence[Unit]],
    ) -> list[tuple[str, int, int, int]]:
        """(F | B | I | W, chunk, unit, microbatch) of slot 1, in the order in which `runs` issues them: runs without
        content."""
        issued: list[tuple[str, int, int, int]] = []
        phases = {"fwd": "F", "bwd": "I" if self.delay_wgrad else "B", "dw": "W"}

        def dry(of: Microbatch | None) -> list[UnitRun]:
            if of is None:
                return []
            chunk, microbatch = of

            def note(action: str, place: int, _: str, __: str) -> None:
                issued.append((phases[action], chunk, place, microbatch))

            return [
                UnitRun(place, {} if unit.pre is None else {"pre_dispatch": _Dry(self.delay_wgrad)}, note)  # type: ignore[dict-item]
                for place, unit in enumerate(units[chunk])
            ]

        for forward, backward in runs:
            b_units = dry(backward)[::-1]
            run_all_units(dry(forward), b_units, early_release=self.early_release)
            if b_units:
                b_units[-1].backward_dw("pre_dispatch")
        return issued

    # ------------------------------------------------------------------------------------------------------- inside

    def _note(self, plan: SchedulePlan, action: Any, slot: str, stream: Any) -> None:
        self.trace.append(Issued(action, plan.chunk, plan.microbatch, None, slot, stream))

    def _begin_forward(self, plan: SchedulePlan, receive: Callable[[SchedulePlan], Tensor] | None) -> None:
        if plan.pre is not None:
            self._note(plan, "fwd", "pre_process", "compute")
            made = plan.pre.forward([plan.first])
            plan.across = dict(zip(plan.pre.slot.makes, made, strict=True))
        if plan.is_first:
            plan.last = plan.across.pop("hidden")
        else:
            if receive is None:
                raise PlanError("run(): a chunk that is not the first needs `receive`")
            self._note(plan, "recv", "input", "compute")
            plan.last = Value(receive(plan).detach().requires_grad_())
        plan.entry = plan.last

    @staticmethod
    def _enter(plan: SchedulePlan | None, unit: UnitRun) -> None:
        assert plan is not None
        unit.values = {**plan.across, "hidden": plan.last}

    @staticmethod
    def _leave(plan: SchedulePlan | None, unit: UnitRun) -> None:
        assert plan is not None
        plan.last = unit.values["hidden"]
        plan.across.update((name, value) for name, value in unit.values.items() if name.startswith("hidden_"))
        unit.values = {}

    def _post_process(self, plan: SchedulePlan) -> None:
        assert plan.post is not None
        self._note(plan, "fwd", "post_process", "compute")
        given = {**plan.across, "hidden": plan.last}
        scaled, loss, logits = plan.post.forward([given[name] for name in plan.post.slot.reads])
        plan.scaled = scaled
        plan.output = HybridOutput(loss.content.detach(), logits.content.detach())

    def _begin_backward(self, plan: SchedulePlan, receive_grad: Callable[[SchedulePlan], Tensor] | None) -> None:
        if plan.done or plan.last.content is None:
            state = "has run already" if plan.done else "its forward did not run"
            raise ReplayOrderError(f"backward of chunk {plan.chunk}, microbatch {plan.microbatch}: {state}")
        plan.done = True
        if plan.post is not None:
            assert plan.scaled is not None
            self._note(plan, "bwd", "post_process", "compute")
            plan.scaled.grad = torch.ones_like(plan.scaled.content)
            plan.post.backward()
        else:
            if receive_grad is None:
                raise PlanError("run(): the backward of a chunk that is not the last needs `receive_grad`")
            self._note(plan, "recv", "grad", "compute")
            plan.last.add_grad(receive_grad(plan), "compute", self.streams)

    def _end_backward(self, plan: SchedulePlan) -> None:
        if plan.pre is not None:
            self._note(plan, "bwd", "pre_process", "compute")
            plan.pre.backward()
        plan.units, plan.last, plan.entry, plan.scaled, plan.across = [], Value(None), Value(None), None, {}


class _Dry:
    """Stands in for a node while the steps are listed."""

    def __init__(self, delayed: bool) -> None:
        self.delayed = delayed
        self.slot = Slot("pre_dispatch", "compute", lambda: None, (), ())

    def forward(self, inputs: Sequence[Value]) -> tuple[Value, ...]:
        return ()

    def backward(self) -> None:
        return None

    def backward_dw(self) -> bool:
        return self.delayed


def is_first(chunk: HybridChunk) -> bool:
    """Whether the chunk begins with tokens; with MTP the last one has an embedding too, of its own use."""
    return chunk.inputs.startswith("tokens")


def _embedding(chunk: HybridChunk, first: bool) -> Slot:
    """The embeddings of the tokens and, for MTP, of those ahead: one node, so that the weight's gradients are added up
    as eager adds them."""
    ahead = () if chunk.mtp is None else tuple(f"ahead_{depth.depth}" for depth in chunk.mtp.depths())

    def run(tokens: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = [chunk.embed(tokens)] if first else []
        if ahead:
            later = chunk.embed_ahead(tokens)
            made += later if isinstance(later, tuple) else (later,)
        return tuple(made) if len(made) > 1 else made[0]

    return Slot("pre_process", "compute", run, ("tokens",), (*(("hidden",) if first else ()), *ahead))


def _head(chunk: HybridChunk, tokens: Tensor | None, labels: Tensor, scale: float) -> Slot:
    """The loss as a node of its own."""
    depths = 0 if chunk.mtp is None else len(list(chunk.mtp.depths()))

    def run(*hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if depths:
            output = chunk.mtp_head(chunk.join(*hidden), labels, None, tokens, None, None)
        else:
            output = chunk.head(hidden[0], labels)
        assert output.loss is not None
        return output.loss * scale, output.loss, output.logits

    reads = tuple(f"hidden_{depth}" for depth in range(depths + 1)) if depths else ("hidden",)
    return Slot("post_process", "compute", run, reads, ("scaled", "loss", "logits"))
