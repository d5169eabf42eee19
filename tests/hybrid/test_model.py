"""The whole model: causal, trainable, the same with groups and without, whole and in chunks, as parts or a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap.errors import PlanError
from graphcap.hybrid import HybridChunk, HybridConfig, HybridModel, HybridOutput, LayerGroup
from graphcap.partial_layer import EAGER, GRAPHED, PartialLayer, flatten

ALL = "M[*E]M[*-]"


def model_of(pattern: str = ALL, seed: int = 3, **values: Any) -> HybridModel:
    torch.manual_seed(seed)
    return HybridModel(HybridConfig(pattern=pattern, **values))


@pytest.fixture
def strict() -> Iterator[None]:
    """Strict deterministic mode, which also fills memory that nobody has written with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def batch(tokens: int = 21, rows: int = 2) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 256, (rows, tokens + 1), generator=torch.Generator().manual_seed(7))
    return ids[:, :-1], ids[:, 1:]


def results(model: nn.Module, output: HybridOutput) -> list[Tensor | None]:
    """Loss, logits and every parameter's gradient, in the order of the layers."""
    assert output.loss is not None
    wanted = list(model.parameters())
    return [output.loss, output.logits, *torch.autograd.grad(output.loss, wanted, allow_unused=True)]


def assert_same_bits(first: list[Tensor | None], second: list[Tensor | None]) -> None:
    assert sum(value is not None for value in first) > 3
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        assert a is None or (bool(torch.isfinite(a).all()) and bool(a.count_nonzero()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["math", "sdpa"])
@pytest.mark.usefixtures("strict")
def test_repeats_itself(dtype: torch.dtype, attention: str) -> None:
    model = model_of(dtype=dtype, attention=attention)
    tokens, labels = batch()
    first = results(model, model(tokens, labels))
    assert first[0] is not None
    assert first[0].dtype == torch.float32
    assert first[1] is not None
    assert (first[1].dtype, first[1].shape) == (dtype, (2, 21, 256))
    assert_same_bits(first, results(model, model(tokens, labels)))


def test_output() -> None:
    model = model_of()
    tokens, labels = batch()
    assert model(tokens).loss is None
    output = model(tokens, labels=labels)
    leaves, _ = torch.utils._pytree.tree_flatten(output)
    assert [leaf is value for leaf, value in zip(leaves, output, strict=True)] == [True, True]
    expected = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    assert torch.equal(output.loss, expected)
    ignored = labels.clone()
    ignored[:, 5:] = -100
    part = nn.functional.cross_entropy(output.logits[:, :5].flatten(0, 1), labels[:, :5].flatten())
    torch.testing.assert_close(model(tokens, ignored).loss, part)


@pytest.mark.parametrize("pattern", ["M", "*", "-", "E", ALL])
@pytest.mark.parametrize("changed", [1, 10, 20])
def test_causal(pattern: str, changed: int) -> None:
    """A later token moves no earlier output, and it does move its own."""
    model = model_of(pattern, dtype=torch.float64, mamba_chunk=8, init_std=0.2)
    tokens, _ = batch()
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens).logits, model(other).logits
    torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(after[:, changed], before[:, changed])


@pytest.mark.parametrize("grouped", ["M[*E]M[*-]", "[M*E][M*-]", "[M][*]E[M*-]"])
def test_group_adds_no_arithmetic(grouped: str) -> None:
    model = model_of(grouped)
    flat = model_of(str(model.config.layers.flat()), seed=4)
    with torch.no_grad():
        for mine, theirs in zip(flat.parameters(), model.parameters(), strict=True):
            assert mine.shape == theirs.shape
            mine.copy_(theirs)
    tokens, labels = batch()
    assert_same_bits(results(model, model(tokens, labels)), results(flat, flat(tokens, labels)))
    assert [l.layer_number for l in model.physical_layers()] == [l.layer_number for l in flat.physical_layers()]


def test_same_seed_same_weights_with_and_without_groups() -> None:
    grouped, flat = model_of("[M*E]-"), model_of("M*E-")
    assert all(torch.equal(a, b) for a, b in zip(grouped.parameters(), flat.parameters(), strict=True))


def test_numbers_and_names() -> None:
    model = model_of("M[M*E]-")
    assert [(l.symbol, l.layer_number, l.logical_index) for l in model.physical_layers()] == [
        ("M", 1, 0),
        ("M", 2, 1),
        ("*", 3, 1),
        ("E", 4, 1),
        ("-", 5, 2),
    ]
    assert len(model.decoder.layers) == 3
    assert isinstance(model.decoder.layers[1], LayerGroup)
    assert model.decoder.layers[1].logical_index == 1
    names = set(model.state_dict())
    assert {"decoder.layers.0.in_proj.weight", "decoder.layers.1.layers.1.qkv.weight"} <= names
    assert "decoder.layers.2.mlp.down.weight" in names
    assert "'M', layer_number=2, logical_index=1" in repr(model)
    assert not any("rope" in name for name in names)  # the tables follow from the config


# --------------------------------------------------------------------------------------------------------------- chunks


def run_chunks(chunks: tuple[HybridChunk, ...], tokens: Tensor, labels: Tensor) -> HybridOutput:
    value = tokens
    for chunk in chunks[:-1]:
        value = chunk(value)
    output = chunks[-1](value, labels)
    assert isinstance(output, HybridOutput)
    return output


@pytest.mark.parametrize(
    ("pattern", "n", "sizes"),
    [
        (ALL, 1, [4]),
        (ALL, 2, [2, 2]),
        (ALL, 4, [1, 1, 1, 1]),
        ("M[*E]|M|[*-]", None, [2, 1, 1]),
        ("M*||E", 3, [2, 0, 1]),
        ("|M-", None, [0, 2]),
        ("M-|", None, [2, 0]),
    ],
)
@pytest.mark.parametrize("tie", [False, True])
def test_chunks_make_up_the_model(pattern: str, n: int | None, sizes: list[int], tie: bool) -> None:
    model = model_of(pattern, tie_embeddings=tie)
    chunks = model.chunks(n)
    assert [len(chunk.decoder.layers) for chunk in chunks] == sizes
    tokens, labels = batch()
    assert_same_bits(results(model, model(tokens, labels)), results(model, run_chunks(chunks, tokens, labels)))
    mine = dict(model.named_parameters(remove_duplicate=False))
    theirs = [item for chunk in chunks for item in chunk.named_parameters(remove_duplicate=False)]
    assert {name for name, _ in theirs} == set(mine)
    assert all(mine[name] is weight for name, weight in theirs)
    assert chunks[-1](run_hidden(chunks, tokens)).loss is None


@pytest.mark.parametrize("pattern", ["M[*E]|-/*E", "[*E]-|*"])
def test_chunks_are_in_the_model_s_mode(pattern: str) -> None:
    """In evaluation nothing is attached, nothing recorded, and MTP layers have no gradient."""
    model = model_of(pattern, aux_loss=0.5).eval()
    chunks = model.chunks()
    assert not any(module.training for chunk in chunks for module in chunk.modules())
    tokens, labels = batch()
    ahead = {} if model.mtp is None else {"tokens": tokens}
    chunks[-1](chunks[0](tokens), labels, **ahead).loss.backward()
    in_pieces = {name: p.grad for name, p in model.named_parameters()}
    assert not model.tracker.records.any()
    model.zero_grad(set_to_none=True)
    model(tokens, labels).loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (in_pieces[name] is None)
        assert p.grad is None or torch.equal(p.grad, in_pieces[name])  # type: ignore[arg-type]
        assert not name.startswith("mtp.") or p.grad is None


def run_hidden(chunks: tuple[HybridChunk, ...], tokens: Tensor) -> Tensor:
    value = tokens
    for chunk in chunks[:-1]:
        value = chunk(value)
    return value


@pytest.mark.parametrize(
    ("pattern", "n", "words"),
    [(ALL, 3, "4 items can't be shared out"), ("M|M", 3, "its pipes make 2"), (ALL, 0, "chunks\\(0\\)")],
)
def test_chunks_refused(pattern: str, n: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        model_of(pattern).chunks(n)


# ---------------------------------------------------------------------------------------------------------------- parts


def test_parts() -> None:
    program = flatten((model_of("M[*E]-"),))
    assert [(call.kind, call.name.removeprefix("0.decoder.layers.")) for call in program.calls] == [
        (GRAPHED, "0.embed"),
        (GRAPHED, "0.whole"),
        (GRAPHED, "1.layers.0.whole"),
        (GRAPHED, "1.layers.1.normalise"),
        (GRAPHED, "1.layers.1.route"),
        (GRAPHED, "1.layers.1.preprocess"),
        (EAGER, "1.layers.1.exchange"),
        (GRAPHED, "1.layers.1.combine"),
        (GRAPHED, "2.whole"),
        (GRAPHED, "0.head"),
    ]
    assert [call.reason for call in program.calls if call.kind is EAGER] == ["rows per expert depend on the data"]


class StaticOnly(TorchDispatchMode):
    """Refuses what no graph can hold: operators whose result's shape, or the host, depends on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape):
            assert tag not in func.tags, func
        # These have no fixed order of adding on CUDA, or strict deterministic mode refuses them there.
        unordered = ("index_add", "scatter_add", "index_put", "cumsum", "bincount", "gather_backward", "promote_types")
        assert not any(name in str(func) for name in unordered), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphed_parts_are_static(dtype: torch.dtype) -> None:
    """Forward and backward of every graphed part; the values are those of the model."""
    model = model_of(dtype=dtype)
    tokens, labels = batch()
    program = flatten((model,))
    values = program.bind((tokens, labels), {})
    for call in program.calls:
        read = [
            value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value
            for value in (values[name] for name in call.reads)
        ]
        if call.kind is EAGER:
            made = call.run(*read)
        else:
            with StaticOnly():
                made = call.run(*read)
                flat = [t for t in torch.utils._pytree.tree_leaves(made) if t.requires_grad]
                torch.autograd.backward(flat, [torch.ones_like(t) for t in flat])
        values.update(zip(call.makes, made if len(call.makes) > 1 else (made,), strict=True))
    expected = model(tokens, labels)
    output = values[program.outputs[0]]
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(output.logits, expected.logits)


def test_every_layer_is_a_partial_layer() -> None:
    model = model_of("M[*E]-")
    assert all(isinstance(layer, PartialLayer) for layer in [model, *model.decoder.layers, *model.physical_layers()])


def test_meta_device() -> None:
    """The default device is honoured: a model too large for this machine can be looked at."""
    with torch.device("meta"):
        model = HybridModel(HybridConfig.large())
    assert all(weight.is_meta for weight in model.parameters())
    assert all(buffer.is_meta for buffer in model.buffers())


# ------------------------------------------------------------------------------------------------------------- training


def test_learns_bytes() -> None:
    model = model_of(init_std=0.05)
    data = torch.tensor(list(b"the graphed model computes what the eager model computes, bit for bit. " * 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(20):
        window = data[step : step + 129].view(1, -1)
        optimizer.zero_grad()
        loss = model(window[:, :-1], window[:, 1:]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.5, abs=0.3)  # ln 256: it knows nothing
    assert losses[-1] < 0.7 * losses[0]


def test_experts_are_skipped_and_counts_move() -> None:
    """What makes the experts part eager does happen: rows per expert differ from batch to batch, some are 0."""
    model = model_of("E", experts=16, init_std=0.2)
    (layer,) = model.physical_layers()
    seen = set()
    for seed in range(3):
        tokens = torch.randint(0, 256, (1, 6), generator=torch.Generator().manual_seed(seed))
        seen.add(tuple(layer.before_dispatch(model.embed(tokens))[1].tolist()))  # type: ignore[operator]
    assert len(seen) == 3
    assert all(0 in counts for counts in seen)
