"""The overlapped schedule against the plain one, what it issues, and what it must not do. One process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcap import Order, Phase, Step
from graphcap.errors import PlanError, ReplayOrderError, StateError
from graphcap.hybrid import HybridConfig, HybridModel, HybridOutput
from graphcap.hybrid.overlap import OverlapSchedule, SchedulePlan
from graphcap.hybrid.overlap_pipeline import overlapped_pairs
from graphcap.hybrid.recompute import DiscardedOutput
from graphcap.hybrid.schedule_nodes import Slot
from graphcap.hybrid.schedule_units import build_unit, group_layers
from tests.hybrid.overlap_twin import COVERING, OTHERS, PATTERNS, Case, batches_of, model_of, plain_step, run_beside_twin

# ------------------------------------------------------------------------------------------------------------ equality


def test_the_cases_are_a_pairwise_covering_set() -> None:
    """All combinations are in one list or the other; every pair of two columns' values occurs in the covering one."""
    columns = (PATTERNS, *[(False, True)] * 4)
    rows = {astuple(case) for case in COVERING}
    for (i, left), (j, right) in combinations(enumerate(columns), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(left, right)), (i, j)
    assert 10 <= len(rows) == len(COVERING) <= 12
    others = {astuple(case) for case in OTHERS}
    assert len(OTHERS) == len(others)
    assert not others & rows
    assert others | rows == set(product(*columns))


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_overlap_is_the_plain_schedule(case: Case) -> None:
    run_beside_twin(case, 20, early_release=case.shared, regroup=case.delay)


@pytest.mark.parametrize("case", [COVERING[i] for i in (1, 5, 7)], ids=str)
def test_graphs_under_overlap(case: Case) -> None:
    schedule = run_beside_twin(case, 20, graphs=True, early_release=case.shared, regroup=case.delay)
    assert schedule.graphs is not None
    stats = schedule.graphs.graphed.stats
    units = sum(unit.pre is not None for unit in schedule.units[0])
    assert (stats.replays, dict(stats.eager)) == (20 * 3 * units, {})


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_overlap_100_iterations(case: Case, graphs: bool) -> None:
    run_beside_twin(case, 100, graphs=graphs)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_overlap_other_combinations(case: Case) -> None:
    for graphs in (False, True):
        run_beside_twin(case, 5, graphs=graphs, delayed_twin=True)


def test_router_losses_and_their_tracker() -> None:
    case = Case("[*E]E", shared=True, delay=True, norm=False, mtp=True)
    schedule = run_beside_twin(case, 5, aux_loss=0.01, z_loss=0.01)
    report = schedule.chunks[0].tracker.report()  # type: ignore[union-attr]
    assert report.aux_loss.records == 5 * 3 * 3
    assert report.mtp_loss.records == 5 * 3


@pytest.mark.parametrize("pattern", ["[*E]/*E/*E", "/*E", "M-/M-E"])
def test_mtp_depths_are_units(pattern: str) -> None:
    run_beside_twin(Case(pattern, shared=False, delay=True, norm=True), 3)


def test_units_of_mtp() -> None:
    schedule = OverlapSchedule(model_of(Case("[*E]/M-E/M-E", False, False, False)))
    units = schedule.units[0]
    assert [unit.text for unit in units] == ["*E", "M-", "E", "M-", "E"]
    first, last = units[1], units[2]
    assert first.slots[0] is not None
    assert (first.slots[0].reads, first.slots[0].makes) == (("hidden", "ahead_1"), ("hidden", "hidden_0"))
    assert last.slots[4] is not None
    assert last.slots[4].makes == ("hidden", "hidden_1")
    assert units[3].slots[0] is not None
    assert units[3].slots[0].makes == ("hidden",)  # the final norm runs once, in the first depth


def test_forward_step_gives_a_plan_or_the_output() -> None:
    schedule = OverlapSchedule(model_of(Case("[*E]", False, False, False)))
    (tokens, labels), *_ = batches_of(0)
    output = schedule.forward_step(0, tokens, labels)
    plan = schedule.forward_step(0, tokens, labels, return_schedule_plan=True)
    assert isinstance(plan, SchedulePlan)
    assert schedule.trace == []
    schedule.run(plan, None)
    assert plan.output is not None
    assert isinstance(output, HybridOutput)
    assert torch.equal(plan.output.loss, output.loss)  # type: ignore[arg-type]
    assert torch.equal(plan.output.logits, output.logits)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, graphs: bool) -> None:
    run_beside_twin(Case("[M*E]*-", shared=True, delay=True, norm=dtype is torch.bfloat16), 5, graphs=graphs, dtype=dtype)


def test_grouped_experts() -> None:
    case = Case("[*E]E", shared=False, delay=True, norm=False)
    values = {"dtype": torch.bfloat16, "expert_gemm": "grouped", "expert_ffn": 16}
    torch.manual_seed(0)
    config = HybridConfig(pattern=case.pattern, vocab=64, hidden=16, head_dim=4, init_std=0.1, **values)  # type: ignore[arg-type]
    torch.manual_seed(1)
    first = HybridModel(config)
    torch.manual_seed(1)
    second = HybridModel(config)
    batches = batches_of(0)
    losses = OverlapSchedule(first, delay_wgrad=True).step(batches)
    for (tokens, labels), loss in zip(batches, losses, strict=True):
        output = second(tokens, labels)
        (output.loss * (1 / 3)).backward()
        assert torch.equal(output.loss, loss)
    for (name, mine), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        assert torch.equal(mine.grad, theirs.grad), name


def test_a_dense_model_has_a_schedule_too() -> None:
    schedule = run_beside_twin(Case("M[*-]-M", shared=False, delay=True, norm=False), 5)
    assert {issued.stream for issued in schedule.trace} == {"compute"}


# --------------------------------------------------------------------------------------------------------------- trace


def issued_by(schedule: OverlapSchedule, microbatches: int = 2) -> list[str]:
    schedule.clear_trace()
    schedule.step(batches_of(0)[:microbatches])
    return [str(issued) for issued in schedule.trace]


def test_order_of_one_unit() -> None:
    """Section 2.4 of the reference, with the head and the embedding of 2.5 around it."""
    schedule = OverlapSchedule(model_of(Case("[*E]", True, True, False)), delay_wgrad=True)
    alone = [
        "fwd 0:0 pre_process (compute)",
        "fwd 0:0 0.pre_dispatch (compute)",
        "fwd 0:0 0.dispatch (comm)",
        "fwd 0:0 0.mlp (compute)",
        "fwd 0:0 0.combine (comm)",
        "fwd 0:0 post_process (compute)",
    ]
    together = [
        "fwd 0:1 pre_process (compute)",
        "bwd 0:0 post_process (compute)",
        "bwd 0:0 0.combine (comm)",
        "fwd 0:1 0.pre_dispatch (compute)",
        "bwd 0:0 0.mlp (compute)",
        "fwd 0:1 0.dispatch (comm)",
        "dw 0:0 0.mlp (compute)",
        "bwd 0:0 0.dispatch (comm)",
        "fwd 0:1 0.mlp (compute)",
        "fwd 0:1 0.combine (comm)",
        "bwd 0:0 0.pre_dispatch (compute)",
        "dw 0:0 0.pre_dispatch (compute)",
        "fwd 0:1 post_process (compute)",
        "bwd 0:0 pre_process (compute)",
    ]
    rest = [
        "bwd 0:1 post_process (compute)",
        "bwd 0:1 0.combine (comm)",
        "bwd 0:1 0.mlp (compute)",
        "dw 0:1 0.mlp (compute)",
        "bwd 0:1 0.dispatch (comm)",
        "bwd 0:1 0.pre_dispatch (compute)",
        "dw 0:1 0.pre_dispatch (compute)",
        "bwd 0:1 pre_process (compute)",
    ]
    assert issued_by(schedule) == [*alone, *together, *rest]


def test_early_release_moves_slot_1_s_backward() -> None:
    case = Case("[*E]", False, False, False)
    late = issued_by(OverlapSchedule(model_of(case)))
    early = issued_by(OverlapSchedule(model_of(case), early_release=True))
    moved = "bwd 0:0 0.pre_dispatch (compute)"
    assert [line for line in late if line != moved] == [line for line in early if line != moved]
    assert late[late.index(moved) - 1] == "fwd 0:1 0.combine (comm)"
    assert early[early.index(moved) - 1] == "bwd 0:0 0.dispatch (comm)"


def test_a_dense_unit_beside_an_moe_unit() -> None:
    schedule = OverlapSchedule(model_of(Case("[*-][*E]", False, True, False)), delay_wgrad=True)
    lines = issued_by(schedule)
    start = lines.index("fwd 0:1 0.pre_dispatch (compute)")
    assert lines[start - 1 : start + 6] == [
        "bwd 0:0 1.combine (comm)",
        "fwd 0:1 0.pre_dispatch (compute)",
        "bwd 0:0 1.mlp (compute)",
        "dw 0:0 1.mlp (compute)",
        "bwd 0:0 1.dispatch (comm)",
        "fwd 0:1 0.mlp (compute)",
        "bwd 0:0 1.pre_dispatch (compute)",
    ]
    assert not [line for line in lines if "0.dispatch" in line or "0.combine" in line]


def test_weight_gradient_graphs_hold_the_products_alone() -> None:
    """A product per linear layer, and what brings the matrices into form; the backward is not run a second time. Each
    parameter's hooks run once per microbatch, as without graphs."""
    torch.manual_seed(0)
    model = HybridModel(HybridConfig(pattern="[M*E]", vocab=64, hidden=32, expert_ffn=16, shared_ffn=16, max_sequence=16))
    schedule = OverlapSchedule(model, delay_wgrad=True)
    tokens = torch.randint(0, 64, (3, 2, 8), generator=torch.Generator().manual_seed(1))
    schedule.capture_graphs(tokens[0], 3, backend="tape")
    told: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: told.update({name: told.get(name, 0) + 1}))
    schedule.step([(batch, batch) for batch in tokens])
    assert set(told) == {name for name, p in model.named_parameters() if p.grad is not None}
    assert {count for name, count in told.items() if ".experts." not in name} == {3}
    assert schedule.graphs is not None
    (part,) = schedule.graphs.graphed._runner.capture.sets[0][0].parts
    assert part is not None
    (backward,), (weights,) = part.backward[Phase.B], part.backward[Phase.W]
    linear = 2 + 2 + 2  # of Mamba, attention, the shared expert
    assert 0 < weights.graph.operations <= 3 * linear < backward.graph.operations / 5


def test_graphs_are_captured_in_the_order_in_which_they_are_issued() -> None:
    """Which is Order.ep_overlap: each unit a chunk."""
    schedule = OverlapSchedule(model_of(Case("[*E][*E]", False, True, False)), delay_wgrad=True)
    schedule.capture_graphs(batches_of(0)[0][0], 4, backend="tape")
    assert schedule.graphs is not None
    expected = Order.ep_overlap(Order.forward_backward(4), (2,), delay_wgrad=True)
    base = Order.one_f_one_b(0, 1, 4)
    assert list(base) == list(Order.forward_backward(4))
    assert list(schedule.graphs.graphed.plan.order) == list(expected)


def test_units() -> None:
    def texts(pattern: str, regroup: bool) -> list[str]:
        layers = list(model_of(Case(pattern, False, False, False)).decoder.layers)
        return [build_unit(unit).text for unit in group_layers(layers, regroup=regroup)]

    assert texts("M*E-", False) == ["M", "*", "E", "-"]
    assert texts("M*E-*", True) == ["M*E", "-", "*"]
    assert texts("M[*E]M-", True) == ["M", "*E", "M-"]
    with pytest.raises(PlanError, match="must be the last layer"):
        layers = list(model_of(Case("E*", False, False, False)).decoder.layers)
        build_unit(layers)  # type: ignore[arg-type]


def test_pairs_have_one_more_warm_up_forward() -> None:
    def text(order: Order) -> str:
        return " ".join("+".join(str(step) for step in pair if step is not None) for pair in overlapped_pairs(order))

    assert text(Order.one_f_one_b(1, 2, 3)) == "0F0 0F1+0B0 0F2+0B1 0B2"
    assert text(Order.one_f_one_b(0, 2, 3)) == "0F0 0F1 0F2+0B0 0B1 0B2"
    assert text(Order.interleaved(1, 2, 2, 2)) == "0F0 0F1 1F0 1F1+1B0 1B1 0B0 0B1"
    with pytest.raises(PlanError, match="expected forwards, then B and F in turn"):
        overlapped_pairs(Order([Step.parse(s) for s in ("0F0", "0I0", "0W0")]))


# -------------------------------------------------------------------------------------------------------------- misuse


def test_shared_expert_s_weight_gradient_in_slot_3_is_an_error() -> None:
    """Its forward, and hence its input gradient, belongs to slot 1, whose backward comes later."""
    schedule = OverlapSchedule(model_of(Case("[*E]", True, True, False)), delay_wgrad=True)
    (unit,) = schedule.units[0]
    moe = unit.tail
    mlp = unit.slots[2]
    assert mlp is not None
    assert moe is not None
    slots = (*unit.slots[:2], replace(mlp, dw=moe.backward_dw), *unit.slots[3:])
    schedule.units = ((replace(unit, slots=slots),),)
    with pytest.raises(StateError, match="its queue is empty"):
        schedule.step(batches_of(0))


def with_slot(schedule: OverlapSchedule, place: int, slot: Slot) -> None:
    (unit,) = schedule.units[0]
    slots = list(unit.slots)
    slots[place] = slot
    schedule.units = ((replace(unit, slots=tuple(slots)),),)


def test_freeing_what_a_backward_reads_is_detected() -> None:
    """At home the experts' input is not copied by a sort: their backward reads it."""
    schedule = OverlapSchedule(model_of(Case("[*E]", False, False, False)))
    mlp = schedule.units[0][0].slots[2]
    assert mlp is not None
    with_slot(schedule, 2, replace(mlp, frees=("received",)))
    with pytest.raises(StateError, match="is to free its input 'received'"):
        schedule.step(batches_of(0))


def test_reading_what_was_freed_is_detected() -> None:
    schedule = OverlapSchedule(model_of(Case("[*E]", False, False, False)))
    back = schedule.units[0][0].slots[3]
    assert back is not None
    dispatch = schedule.units[0][0].slots[1]
    assert dispatch is not None

    def keep_a_copy(rows: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, object]:
        received, layout = dispatch.run(rows.clone(), counts)
        return received, layout

    wrong = replace(dispatch, run=keep_a_copy, reads=("rows", "counts", "weights"), frees=("rows",))
    with_slot(schedule, 1, wrong)
    with_slot(schedule, 3, replace(back, run=lambda *v: back.run(*v[:-1]), reads=(*back.reads, "rows")))
    with pytest.raises(StateError, match="reads 'rows', whose memory was freed"):
        schedule.step(batches_of(0))


def test_what_the_policy_frees_is_freed() -> None:
    schedule = OverlapSchedule(model_of(Case("[*E]", False, False, False)))
    freed: list[int] = []
    back = schedule.units[0][0].slots[3]
    assert back is not None

    def watching(made: Tensor, *rest: object) -> Tensor:
        watching.storages.append(made.untyped_storage())  # type: ignore[attr-defined]
        return back.run(made, *rest)

    watching.storages = []  # type: ignore[attr-defined]
    with_slot(schedule, 3, replace(back, run=watching))
    schedule.step(batches_of(0))
    freed += [storage.nbytes() for storage in watching.storages]  # type: ignore[attr-defined]
    assert freed == [0, 0, 0]


@pytest.mark.parametrize("checked", [True, False])
def test_a_second_recompute_hook_in_combine_is_an_error(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's bug: combine reuses the helper that hooks the layer's output, and attention's gradients are corrupted.

    Without the check the norm is computed twice, the first time in the communication stream's slot: its memory is then of
    that stream's share, though its readers, slot 1's backward, run on the compute stream and nobody tells the allocator.
    On a CPU, which has one stream, the values are still right: the corruption is one of streams alone."""
    schedule = OverlapSchedule(model_of(Case("[*E]", False, False, True)))
    moe = schedule.units[0][0].tail
    slots = schedule.units[0][0].slots
    experts, back = slots[2], slots[3]
    assert experts is not None
    assert back is not None
    kept: list[object] = []

    def remember(received: Tensor, layout: object) -> Tensor:
        kept.append(moe._discarded)  # type: ignore[union-attr]
        return experts.run(received, layout)

    def hooked_again(*values: object) -> Tensor:
        out: Tensor = back.run(*values)
        kept.pop().discard(out)  # type: ignore[attr-defined]
        return out

    with_slot(schedule, 2, replace(experts, run=remember))
    with_slot(schedule, 3, replace(back, run=hooked_again))
    if checked:
        with pytest.raises(StateError, match="exactly one hook belongs to it"):
            schedule.step(batches_of(0))
        return
    streams = streams_of_recomputations(schedule, monkeypatch)
    schedule.step(batches_of(0))
    assert streams == ["comm", "compute"] * 3
    monkeypatch.undo()
    twin = model_of(Case("[*E]", False, False, True))
    plain_step(twin, batches_of(0), False)
    for mine, theirs in zip(schedule.chunks[0].parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or theirs.grad is None or torch.equal(mine.grad, theirs.grad)


def streams_of_recomputations(schedule: OverlapSchedule, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stream that is current whenever a norm is computed again, from now on, whoever asks and however often."""
    now: list[str] = []
    seen: list[str] = []
    on, recompute = schedule.streams.on, DiscardedOutput.recompute

    @contextmanager
    def noting(name: Any, event: Any) -> Iterator[None]:
        now.append(name)
        with on(name, event):
            yield
        now.pop()

    def unchecked(self: DiscardedOutput, grad: Tensor) -> None:
        seen.append(now[-1] if now else "no slot")
        self._fired = False
        recompute(self, grad)

    monkeypatch.setattr(schedule.streams, "on", noting)
    monkeypatch.setattr(DiscardedOutput, "recompute", unchecked)
    return seen


def test_the_norm_is_computed_again_once_on_its_readers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = OverlapSchedule(model_of(Case("[*E]", True, True, True)), delay_wgrad=True)
    streams = streams_of_recomputations(schedule, monkeypatch)
    schedule.step(batches_of(0))
    assert streams == ["compute"] * 3


def test_after_an_error_the_next_step_is_right() -> None:
    case = Case("[*E]", True, True, False)
    schedule = OverlapSchedule(model_of(case), delay_wgrad=True)
    good = schedule.units
    mlp = good[0][0].slots[2]
    assert mlp is not None

    def fail(*_: object) -> None:
        raise KeyError("planted")

    with_slot(schedule, 2, replace(mlp, dw=fail))
    with pytest.raises(KeyError):
        schedule.step(batches_of(0))
    schedule.units = good
    schedule.chunks[0].zero_grad()
    losses = schedule.step(batches_of(0))
    twin = OverlapSchedule(model_of(case), delay_wgrad=True)
    assert all(map(torch.equal, losses, twin.step(batches_of(0))))
    for (name, mine), theirs in zip(
        schedule.chunks[0].named_parameters(), twin.chunks[0].parameters(), strict=True
    ):
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        assert torch.equal(mine.grad, theirs.grad), name


def test_a_backward_runs_once_and_after_its_forward() -> None:
    schedule = OverlapSchedule(model_of(Case("*E", False, False, False)))
    (tokens, labels), *_ = batches_of(0)
    plan = schedule.build_schedule_plan(0, tokens, labels)
    with pytest.raises(ReplayOrderError, match="its forward did not run"):
        schedule.run(None, plan)
    schedule.run(plan, None)
    schedule.run(None, plan)
    with pytest.raises(ReplayOrderError, match="has run already"):
        schedule.run(None, plan)


def test_what_can_t_be_overlapped() -> None:
    with pytest.raises(PlanError, match="tie_embeddings=True"):
        OverlapSchedule(HybridModel(HybridConfig(pattern="*E", tie_embeddings=True)))
    with pytest.raises(PlanError, match="recompute='layer'"):
        OverlapSchedule(HybridModel(HybridConfig(pattern="*E", recompute="layer")))
    schedule = OverlapSchedule(model_of(Case("*E", False, False, False)))
    with pytest.raises(PlanError, match="no microbatches"):
        schedule.step([])
    with pytest.raises(PlanError, match="needs labels"):
        schedule.build_schedule_plan(0, batches_of(0)[0][0], None)
    first, last = HybridModel(HybridConfig(pattern="*E")).chunks(2)
    chunks = OverlapSchedule((first, last))
    with pytest.raises(PlanError, match="use PipelineOverlap"):
        chunks.step(batches_of(0))
