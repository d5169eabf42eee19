"""The tracker: which slot, which numbers, and that graphs add up what eager adds up."""

from __future__ import annotations

import copy

import pytest
import torch

from graphcap import PlanError, capture
from graphcap.hybrid import HybridConfig, HybridModel, LayerTracker, MoELayer
from graphcap.hybrid.overlap import OverlapSchedule
from tests.hybrid import overlap_twin
from tests.hybrid.side_by_side import train


def model_of(pattern: str, **values: object) -> HybridModel:
    torch.manual_seed(1)
    return HybridModel(HybridConfig(pattern=pattern, max_sequence=32, init_std=0.2, **values))  # type: ignore[arg-type]


def batch(rows: int = 2, tokens: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (rows, tokens + 1), generator=torch.Generator().manual_seed(7))
    return ids[:, :-1], ids[:, 1:]


# layers, depths, a layer's number in its stack, its depth, the index
SLOTS = [
    (8, 2, 5, 1, 8),  # the reference's case: its rule by the layer's number was out of range here
    (8, 2, 5, 2, 9),
    (4, 1, 2, 1, 4),
    (4, 3, 2, 1, 4),
    (4, 3, 2, 3, 6),
    (8, 2, 1, None, 0),
    (8, 2, 8, None, 7),
]


@pytest.mark.parametrize(("layers", "depths", "number", "depth", "index"), SLOTS)
def test_slot(layers: int, depths: int, number: int, depth: int | None, index: int) -> None:
    tracker = LayerTracker(layers, depths)
    assert tracker.slot(number, depth) == index
    tracker.record("z_loss", tracker.slot(number, depth), torch.tensor(3.0))
    expected = [0.0] * (layers + depths)
    expected[index] = 3.0
    report = tracker.report()
    assert list(report.z_loss.per_slot) == expected
    assert (report.z_loss.mean, report.z_loss.records, report.aux_loss.records) == (3.0, 1, 0)


@pytest.mark.parametrize(("number", "depth"), [(0, None), (9, None), (1, 0), (1, 3)])
def test_slot_refused(number: int, depth: int | None) -> None:
    with pytest.raises(PlanError, match="expected 1 to"):
        LayerTracker(8, 2).slot(number, depth)


def test_unknown_metric() -> None:
    with pytest.raises(PlanError, match="metric 'loss': expected one of aux_loss, z_loss, mtp_loss"):
        LayerTracker(1).record("loss", 0, torch.tensor(1.0))


def test_every_layer_has_its_slot() -> None:
    """Eight layers, two depths: ten slots, 8 and 9 by depth, whatever the layers of a depth are numbered."""
    model = model_of("M[*E]M[*E]*E/*E/*E")
    assert model.tracker.sums.shape == (3, 10)
    main = {l.layer_number: l.slot for l in model.physical_layers() if isinstance(l, MoELayer)}
    assert main == {3: 2, 6: 5, 8: 7}
    assert model.mtp is not None
    inner = [(l.layer_number, l.slot) for d in model.mtp.depths() for l in d.physical_layers() if isinstance(l, MoELayer)]
    assert inner == [(2, 8), (2, 9)]
    for chunk in model_of("M[*E]|E/*E").chunks():
        assert chunk.tracker is not None
        assert chunk.tracker.sums.shape == (3, 5)


def test_numbers() -> None:
    """Against the formulas, written out token by token."""
    model = model_of("E", aux_loss=0.01, z_loss=0.001, router_statistics=True)
    (layer,) = (l for l in model.physical_layers() if isinstance(l, MoELayer))
    tokens, labels = batch()
    model(tokens, labels)
    with torch.no_grad():
        logits = layer.norm(model.embed(tokens)).flatten(0, 1) @ layer.router_weight.T
    probs, count = logits.softmax(-1), [0] * 4
    for row in probs.tolist():
        for expert in sorted(range(4), key=lambda e: -row[e])[:2]:
            count[expert] += 1
    aux = 4 * sum(c / 64 * float(probs[:, e].mean()) for e, c in enumerate(count))
    report = model.tracker.report()
    assert report.rows == (tuple(count),)
    assert report.aux_loss.per_slot[0] == pytest.approx(aux, rel=1e-5)
    assert report.z_loss.mean == pytest.approx(float(logits.exp().sum(-1).log().square().mean()), rel=1e-5)
    model(tokens, labels)  # the divisor is what was recorded
    again = model.tracker.report()
    assert again.aux_loss.records == 2
    assert again.aux_loss.mean == pytest.approx(aux, rel=1e-5)
    model.tracker.reset()
    assert model.tracker.report().aux_loss == model.tracker.report().mtp_loss
    assert model.tracker.report().rows == ((0, 0, 0, 0),)


def test_contributors() -> None:
    """Main `E` layers and those of every depth, times the microbatches."""
    model = model_of("E*E/*E/*E", aux_loss=0.01)
    for _ in range(3):
        model(*batch())
    report = model.tracker.report()
    assert report.aux_loss.records == (2 + 2) * 3
    assert [value > 0 for value in report.aux_loss.per_slot] == [True, False, True, True, True]
    assert report.mtp_loss.records == 2 * 3
    assert [value > 0 for value in report.mtp_loss.per_slot] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_attached_losses_train(scale: float) -> None:
    """Their gradients are those of coefficient * scale * loss added to the output's loss, which itself stays the same."""
    tokens, labels = batch()
    plain = model_of("[*E]")
    model = copy.deepcopy(plain)
    for part in model.modules():  # the config is one record for all
        if hasattr(part, "config"):
            part.config = HybridConfig(pattern="[*E]", max_sequence=32, aux_loss=0.5, z_loss=0.25)
    model.tracker.loss_scale.fill_(scale)
    output = model(tokens, labels)
    assert torch.equal(output.loss, plain(tokens, labels).loss)

    def wanted(of: HybridModel) -> list[torch.nn.Parameter]:
        return [p for name, p in of.named_parameters() if ".expert_mlps." not in name]  # some get no token

    got = torch.autograd.grad(output.loss, wanted(model))

    sums = []
    for part in plain.modules():
        if isinstance(part, MoELayer):
            part.register_forward_pre_hook(lambda layer, args: sums.append((layer, args[0])))
    loss = plain(tokens, labels).loss
    ((layer, hidden),) = sums
    logits = layer.normalise(hidden) @ layer.router_weight.T
    probs = logits.softmax(-1)
    _, chosen = layer.route(layer.normalise(hidden))
    share = torch.nn.functional.one_hot(chosen, 4).float().mean((0, 1))
    aux, z = 4 * (share * probs.mean(0)).sum(), logits.logsumexp(-1).square().mean()
    expected = torch.autograd.grad(loss + scale * (0.5 * aux + 0.25 * z), wanted(plain))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    without = torch.autograd.grad(plain(tokens, labels).loss, wanted(plain))
    assert any(not torch.allclose(a, b) for a, b in zip(got, without, strict=True))


def test_evaluation_records_nothing() -> None:
    model = model_of("E/*E", aux_loss=0.1, z_loss=0.1, router_statistics=True).eval()
    model(*batch())
    report = model.tracker.report()
    assert (report.aux_loss.records, report.z_loss.records, report.mtp_loss.records) == (0, 0, 0)
    assert not any(map(any, report.rows))


@pytest.mark.parametrize("recompute", ["none", "layer", "norm"])
def test_recomputation_counts_once(recompute: str) -> None:
    model = model_of("[*E]", aux_loss=0.1, router_statistics=True, recompute=recompute)
    model(*batch())[0].backward()
    report = model.tracker.report()
    assert report.aux_loss.records == 1
    assert sum(report.rows[1]) == 2 * 2 * 16


def test_capture_leaves_it_and_replay_adds() -> None:
    model = model_of("[*E]", aux_loss=0.1, z_loss=0.1, router_statistics=True)
    twin = copy.deepcopy(model)
    tokens, labels = batch()
    model.tracker.record("aux_loss", 1, torch.tensor(2.0))
    twin.tracker.record("aux_loss", 1, torch.tensor(2.0))
    graphed = capture(model, (tokens, labels), backend="tape")
    assert model.tracker.report() == twin.tracker.report()
    for _ in range(3):
        graphed(tokens, labels).loss.backward()
        twin(tokens, labels).loss.backward()
    assert model.tracker.report() == twin.tracker.report()
    assert model.tracker.report().aux_loss.records == 4
    model.tracker.reset()
    twin.tracker.reset()
    graphed(tokens, labels)
    twin(tokens, labels)
    assert model.tracker.report() == twin.tracker.report()


LOSSES = {"aux_loss": 0.02, "z_loss": 0.01, "router_statistics": True}


@pytest.mark.parametrize(("pattern", "chunks"), [("[M*E]*E", 1), ("[*E]|*E", 2)])
def test_graphs_on_equals_graphs_off(pattern: str, chunks: int) -> None:
    """20 steps; the tracker is a buffer, so it is compared after every one."""
    sizes = {"hidden": 16, "head_dim": 4, "mamba_head_dim": 4, "expert_ffn": 16, "max_sequence": 24}
    model = train(HybridConfig(pattern=pattern, **sizes, **LOSSES), chunks=chunks)  # type: ignore[arg-type]
    microbatches = 4 if chunks > 1 else 2
    report = model.tracker.report()
    assert report.aux_loss.records == 2 * 20 * microbatches
    assert sum(map(sum, report.rows)) == 2 * 20 * microbatches * 24 * 2


@pytest.mark.parametrize("graphs", [False, True])
def test_overlapped_schedule(graphs: bool) -> None:
    """Slot 1 holds the router: what it attaches trains, and what it records is counted once, with graphs as without."""
    case = overlap_twin.Case("[*E]E", shared=False, delay=False, norm=False)
    model = overlap_twin.model_of(case, **LOSSES)
    twin = copy.deepcopy(model)
    for tracker in (model.tracker, twin.tracker):
        tracker.loss_scale.fill_(1 / overlap_twin.MICROBATCHES)  # as the main loss is scaled
    schedule = OverlapSchedule(model)
    if graphs:
        schedule.capture_graphs(overlap_twin.batches_of(0)[0][0], overlap_twin.MICROBATCHES, backend="tape")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, twin)]
    for step in range(5):
        batches = overlap_twin.batches_of(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        schedule.step(batches)
        overlap_twin.plain_step(twin, batches, False)
        for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
        assert model.tracker.report() == twin.tracker.report()
    assert model.tracker.report().aux_loss.records == 2 * 5 * overlap_twin.MICROBATCHES
