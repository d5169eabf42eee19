"""Multi-token prediction: what each depth sees and predicts, the final norm once, labels without labels, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphcap import PlanError, capture
from graphcap.hybrid import GPTModel, HybridChunk, HybridConfig, HybridModel, HybridOutput
from graphcap.hybrid.mtp import depth_targets, roll_left
from tests.hybrid.side_by_side import train


def model_of(pattern: str, **values: Any) -> HybridModel:
    torch.manual_seed(1)
    return HybridModel(HybridConfig(pattern=pattern, max_sequence=32, init_std=0.2, **values))


def batch(rows: int = 2, tokens: int = 16) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 256, (rows, tokens + 1), generator=torch.Generator().manual_seed(7))
    return ids[:, :-1], ids[:, 1:]


def decoded(model: HybridModel, tokens: Tensor) -> Tensor:
    """The decoder's normed states, module by module."""
    hidden = model.embed(tokens)
    for layer in model.decoder.layers:
        hidden = layer(hidden)
    return model.normed(hidden)


def depth_losses(model: HybridModel, tokens: Tensor, labels: Tensor) -> list[Tensor]:
    """Every depth's loss, by slices instead of rolled and masked tensors."""
    assert model.mtp is not None
    assert model.output_layer is not None
    hidden, losses = decoded(model, tokens), []
    for d, depth in enumerate(model.mtp.depths(), start=1):
        ahead = torch.cat((tokens[:, d:], torch.zeros_like(tokens[:, :d])), dim=1)
        hidden = depth(hidden, model.embed(ahead))
        logits = model.output_layer(hidden[:, :-d])
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels[:, d:].flatten()))
    return losses


@pytest.mark.parametrize("pattern", ["M*/*E", "[*E]/M-/M-", "M/*E*E/*E*E/*E*E", "/*-"])
def test_losses_and_gradients(pattern: str) -> None:
    """Attached: gradients are those of loss + 0.1 * mean of the depths' losses; the output's loss is the main one."""
    model = model_of(pattern)
    tokens, labels = batch()
    output = model(tokens, labels)
    main = F.cross_entropy(model.output_layer(decoded(model, tokens)).flatten(0, 1), labels.flatten())
    assert torch.equal(output.loss, main)
    wanted = [p for name, p in model.named_parameters() if ".expert_mlps." not in name]
    got = torch.autograd.grad(output.loss, wanted)
    report = model.tracker.report()
    losses = depth_losses(model, tokens, labels)
    depth_count, layers = len(losses), model.config.layers.physical_layers
    assert report.mtp_loss.per_slot[layers:] == pytest.approx([x.item() for x in losses], rel=1e-5)
    expected = torch.autograd.grad(main + 0.1 / depth_count * sum(losses), wanted)
    for a, b in zip(got, expected, strict=True):
        assert bool(a.count_nonzero())
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_without_labels() -> None:
    """Reinforcement learning: labels are the tokens rolled left, the mask goes with them, and any loss on the logits
    trains the MTP layers too."""
    tokens, _ = batch()
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    own = model_of("M*/*-/*-")
    output = own(tokens, loss_mask=mask)
    assert output.loss is None
    output.logits.square().mean().backward()
    gradient = own.get_parameter("mtp.layers.1.eh_proj.weight").grad
    assert gradient is not None
    assert bool(gradient.count_nonzero())
    given = model_of("M*/*-/*-")
    labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], -100)), dim=1)
    given(tokens, labels, mask)
    assert own.tracker.report().mtp_loss == given.tracker.report().mtp_loss
    other = model_of("M*/*-/*-")
    other(tokens)
    assert other.tracker.report().mtp_loss != own.tracker.report().mtp_loss


def test_targets() -> None:
    """By hand: token t at depth d predicts tokens[t + 1 + d], if the mask of the place it is taken from says so."""
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    none = -100
    assert depth_targets(1, None, None, tokens).tolist() == [[12, 13, 14, none, none]]
    assert depth_targets(2, None, None, tokens).tolist() == [[13, 14, none, none, none]]
    mask = torch.tensor([[True, True, False, True, True]])
    assert depth_targets(1, None, mask, tokens).tolist() == [[12, none, 14, none, none]]
    labels = torch.tensor([[11, 12, none, 14, 15]])
    assert depth_targets(1, labels, None, tokens).tolist() == [[12, none, 14, 15, none]]
    assert depth_targets(2, labels, mask, tokens).tolist() == [[none, 14, 15, none, none]]
    assert depth_targets(9, labels, None, tokens).tolist() == [[none] * 5]
    assert roll_left(tokens, 2, 0).tolist() == [[12, 13, 14, 0, 0]]


def test_mask_of_the_main_loss() -> None:
    model = model_of("M*")
    tokens, labels = batch()
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :5] = True
    ignored = labels.masked_fill(~mask, -100)
    assert torch.equal(model(tokens, labels, mask).loss, model(tokens, ignored).loss)


@pytest.mark.parametrize("pattern", ["M", "M/-"])
@pytest.mark.parametrize(
    "mask", [torch.ones(2, 16), torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool)]
)
def test_a_mask_that_is_none(pattern: str, mask: Tensor) -> None:
    """Numbers, as other libraries have them, or of another shape: which tokens count would be a guess."""
    with pytest.raises(
        PlanError, match=r"loss_mask: torch\.\w+ of shape \[2, \d+\]: expected torch.bool of the labels' shape"
    ):
        model_of(pattern)(*batch(), mask)


@pytest.mark.parametrize("pattern", ["M", "M/-", "[*-]"])
@pytest.mark.parametrize(
    "change", [lambda t: t.t(), lambda t: t[:, :-1], lambda t: t.flatten()], ids=["turned", "short", "flat"]
)
def test_labels_of_another_shape(pattern: str, change: Callable[[Tensor], Tensor]) -> None:
    """Turned ones have as many numbers, and would be other tokens' labels."""
    config = HybridConfig(pattern=pattern)
    tokens = torch.arange(12).view(3, 4)
    models = [HybridModel(config), *([GPTModel(config)] if pattern == "[*-]" else [])]
    for model in models:
        with pytest.raises(PlanError, match=r"expected that of the tokens, \[batch, sequence\] = \[3, 4\]"):
            model(tokens, change(tokens))


def test_a_sequence_shorter_than_the_depth() -> None:
    model = model_of("M/*-/*-")
    tokens, labels = batch(tokens=2)
    model(tokens, labels).loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert model.tracker.report().mtp_loss.per_slot[2] == 0.0


# ------------------------------------------------------------------------------------------------- the final norm, once


@pytest.mark.parametrize("pattern", ["M*", "M*/*-", "", "/*-", "/M/M", "M|", "M|/*-", "M|*/*-"])
def test_final_norm_runs_once(pattern: str) -> None:
    """Behind the last layer; behind an empty decoder, in front of the MTP layers; behind an empty decoder without."""
    model = model_of(pattern)
    seen: list[Tensor] = []
    model.decoder.final_norm.register_forward_hook(lambda module, args, out: seen.append(out))  # type: ignore[union-attr]
    tokens, labels = batch()
    given = {} if model.mtp is None else {"tokens": tokens}
    whole = model(tokens, labels)
    assert len(seen) == 1
    chunks = model.chunks()
    value: Any = tokens
    for chunk in chunks[:-1]:
        value = chunk(value)
    last = chunks[-1](value, labels, **(given if len(chunks) > 1 else {}))
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(whole.loss, last.loss)
    with torch.no_grad():
        expected = model.output_layer(seen[0])  # type: ignore[misc]
    assert torch.equal(whole.logits, expected)


def test_mtp_reads_normed_states() -> None:
    model = model_of("/*-")
    seen: list[Tensor] = []
    model.get_submodule("mtp.layers.0.hnorm").register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens, labels = batch()
    model(tokens, labels)
    assert torch.equal(seen[0], model.normed(model.embed(tokens)))


# -------------------------------------------------------------------------------- postprocess: chunks, output_processor


def test_chunks_are_said_and_not_guessed() -> None:
    """The same states, as one chunk and as two: the shape alone would not tell."""
    model = model_of("M/*-")
    tokens, labels = batch()
    states = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(2))
    assert model.postprocess(states, chunks=1).logits.shape == (2, 32, 256)
    split = model.postprocess(states, chunks=2, labels=labels, tokens=tokens)
    assert split.logits.shape == (2, 16, 256)
    assert torch.equal(split.logits, model.postprocess(states[:, :16], chunks=1).logits)
    assert model.tracker.report().mtp_loss.records == 1
    with pytest.raises(PlanError, match="are no 3 chunks"):
        model.postprocess(states, chunks=3, labels=labels, tokens=tokens)


def test_head_does_not_leave_mtp_out() -> None:
    """A schedule that knows no MTP would otherwise train without it, and say nothing."""
    model = model_of("M/*-")
    with pytest.raises(PlanError, match="would leave them out"):
        model.head(torch.zeros(1, 4, 32))


def test_the_last_chunk_needs_tokens() -> None:
    first, last = model_of("M|*/*-").chunks()
    tokens, labels = batch()
    with pytest.raises(PlanError, match="needs tokens="):
        last(first(tokens), labels)


@pytest.mark.parametrize("pattern", ["M*", "M*/*-"])
def test_output_processor(pattern: str) -> None:
    model = model_of(pattern)
    tokens, labels = batch()
    context, result = {"scale": 2.0}, object()
    calls: list[dict[str, Any]] = []

    def processor(**given: Any) -> object:
        calls.append(given)
        return result

    assert model(tokens, labels, output_processor=processor, output_processor_context=context) is result
    (given,) = calls
    assert given["context"] is context
    assert given["config"] is model.config
    assert given["output_layer"] is model.output_layer
    assert given["output_weight"] is model.output_layer.weight  # type: ignore[union-attr]
    assert torch.equal(given["labels"], labels)
    assert torch.equal(given["hidden_states"], decoded(model, tokens))
    logits = given["scale_logits"](given["output_layer"](given["hidden_states"]))
    assert torch.equal(given["compute_language_model_loss"](labels, logits), model(tokens, labels).loss)
    assert set(given) == {
        *("hidden_states", "output_layer", "output_weight", "labels", "loss_mask", "input_ids", "context"),
        *("compute_language_model_loss", "scale_logits", "config"),
    }


def test_output_processor_keeps_the_mtp_losses() -> None:
    """The early return comes after the MTP block: what is computed from the states trains the MTP layers."""
    model = model_of("M*/*-")
    tokens, labels = batch()
    made = model(tokens, labels, output_processor=lambda **given: given["hidden_states"].square().mean())
    made.backward()
    assert bool(model.get_parameter("mtp.layers.0.eh_proj.weight").grad.count_nonzero())  # type: ignore[union-attr]


def scaled_loss(**given: Any) -> HybridOutput:
    logits = given["output_layer"](given["hidden_states"]) * given["context"]
    return HybridOutput(given["compute_language_model_loss"](given["labels"], logits), logits)


def test_output_processor_in_a_graph() -> None:
    """Its context's tensors are inputs of the graph, it itself a constant that may not change."""
    model = model_of("[*E]/*-")
    tokens, labels = batch()
    named = {"output_processor": scaled_loss, "output_processor_context": torch.tensor(2.0)}
    graphed = capture(model, (tokens, labels), named, backend="tape")
    for factor in (2.0, 0.5):
        named["output_processor_context"] = torch.tensor(factor)
        assert torch.equal(graphed(tokens, labels, **named).loss, model(tokens, labels, **named).loss)
    with pytest.raises(ValueError, match="output_processor"):
        graphed(tokens, labels, output_processor=lambda **given: given, output_processor_context=torch.tensor(1.0))


# --------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize(
    ("pattern", "chunks", "more"),
    [
        ("[M*E]/*E", 1, {"aux_loss": 0.02, "z_loss": 0.01, "router_statistics": True}),
        ("[*E]|[*-]/*E/*E", 2, {"aux_loss": 0.02, "z_loss": 0.01}),
        ("*-|/*E", 2, {"tie_embeddings": True, "z_loss": 0.01}),
    ],
)
def test_graphs_on_equals_graphs_off(pattern: str, chunks: int, more: dict[str, Any]) -> None:
    sizes = {"hidden": 16, "head_dim": 4, "mamba_head_dim": 4, "ffn": 32, "expert_ffn": 16, "max_sequence": 24}
    model = train(HybridConfig(pattern=pattern, **sizes, **more), chunks=chunks)
    assert model.tracker.report().mtp_loss.records == 20 * (4 if chunks > 1 else 2) * model.config.layers.mtp_depth


def test_without_labels_in_a_graph() -> None:
    model = model_of("[*E]/*E")
    tokens, _ = batch()
    mask = torch.ones_like(tokens, dtype=torch.bool)
    graphed = capture(model, (tokens,), {"loss_mask": mask}, backend="tape")
    mask[:, 3:7] = False
    graphed(tokens, loss_mask=mask).logits.square().mean().backward()
    graphs = {name: p.grad for name, p in model.named_parameters()}
    assert graphs["mtp.layers.0.eh_proj.weight"] is not None
    for p in model.parameters():
        p.grad = None
    model(tokens, loss_mask=mask).logits.square().mean().backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (graphs[name] is None)
        assert p.grad is None or torch.equal(p.grad, graphs[name])


def test_names_and_numbers() -> None:
    model = model_of("M[*E]/*E/*E")
    names = set(model.state_dict())
    assert {"mtp.layers.0.eh_proj.weight", "mtp.layers.1.mtp_model_layer.layers.1.router_weight"} <= names
    assert not any("tracker" in name for name in names)
    last: HybridChunk = model.chunks(2)[-1]
    assert {name for name, _ in last.named_parameters() if name.startswith("mtp.")} == {
        name for name in names if name.startswith("mtp.")
    }
