"""The whole model and its pipeline chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.errors import PatternError, PlanError
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.grammar import pattern_error
from graphcap.hybrid.layers import HybridLayer, RMSNorm, linear, normal
from graphcap.hybrid.stack import LayerGroup, build_layers
from graphcap.partial_layer import GRAPHED, Part, PartialLayer, nested

IGNORED_LABEL = -100
"""Tokens with this label do not count in the loss."""


class HybridOutput(NamedTuple):
    """loss: float32 scalar (float64 in a float64 model), None without labels. logits: [batch, sequence, vocab], in
    config.dtype."""

    loss: Tensor | None
    logits: Tensor


class LogicalLayers(nn.Module):
    """Logical layers by their index in the whole model, which a chunk's first layer keeps. Iterates over the layers."""

    def __init__(self, layers: Mapping[int, HybridLayer | LayerGroup]) -> None:
        super().__init__()
        for index, layer in layers.items():
            self.add_module(str(index), layer)

    def __getitem__(self, index: int) -> HybridLayer | LayerGroup:
        layer = self._modules[str(index)]
        assert isinstance(layer, HybridLayer | LayerGroup)
        return layer

    def __iter__(self) -> Iterator[HybridLayer | LayerGroup]:
        return (self[int(index)] for index in self._modules)

    def __len__(self) -> int:
        return len(self._modules)


class Decoder(nn.Module):
    """Names only: `layers.<logical index>`, the same in a model and in its chunks, and `final_norm` if it has one."""

    def __init__(self, layers: Mapping[int, HybridLayer | LayerGroup], final_norm: RMSNorm | None) -> None:
        super().__init__()
        self.layers = LogicalLayers(layers)
        self.final_norm = final_norm


class HybridChunk(PartialLayer):
    """A run of logical layers, with the embedding in front if it is the first chunk and the head behind if the last.

    Takes `tokens` (int64 [batch, sequence]) if first, else `hidden`; gives `hidden` ([batch, sequence, hidden]) or, if
    last, a HybridOutput; the last one also takes `labels` (int64 [batch, sequence], already shifted: the token that
    comes next; -100 does not count), which may be left out. Parameters have the names they have in the whole model.
    """

    def __init__(
        self,
        config: HybridConfig,
        layers: Mapping[int, HybridLayer | LayerGroup],
        *,
        embedding: nn.Embedding | None,
        final_norm: RMSNorm | None,
        output_layer: nn.Linear | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.decoder = Decoder(layers, final_norm)
        self.output_layer = output_layer
        parts = [nested(f"decoder.layers.{index}", "hidden -> hidden") for index in layers]
        self.inputs = self.outputs = "hidden"
        if embedding is not None:
            self.inputs = "tokens"
            parts.insert(0, GRAPHED("embed", "tokens -> hidden"))
        if output_layer is not None:
            self.inputs += ", labels=None"
            self.outputs = "output"
            parts.append(GRAPHED("head", "hidden, labels -> output"))
        self._parts = tuple(parts)

    def parts(self) -> Sequence[Part]:
        return self._parts

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [batch, sequence] -> hidden."""
        assert self.embedding is not None
        hidden: Tensor = self.embedding(tokens)
        return hidden

    def head(self, hidden: Tensor, labels: Tensor | None) -> HybridOutput:
        """Final norm, output layer and, with labels, the mean cross entropy over the tokens that count, in float32."""
        assert self.decoder.final_norm is not None
        assert self.output_layer is not None
        logits = self.output_layer(self.decoder.final_norm(hidden))
        if labels is None:
            return HybridOutput(None, logits)
        exact = logits.to(self.config.exact_dtype).flatten(0, -2)
        return HybridOutput(F.cross_entropy(exact, labels.flatten(), ignore_index=IGNORED_LABEL), logits)

    def physical_layers(self) -> Iterator[HybridLayer]:
        """The layers in order, groups opened."""
        return (layer for layer in self.decoder.modules() if isinstance(layer, HybridLayer))


class HybridModel(HybridChunk):
    """A hybrid Mamba-2 / attention / MLP / MoE language model: embedding, the layers of `config.pattern`, RMSNorm,
    output layer. `model(tokens, labels=None)` gives a HybridOutput; see `HybridChunk` for shapes.

    Weights are random, drawn in the order of the layers: after the same `torch.manual_seed`, a pattern with and without
    brackets gives the same weights. Built on the default device (`with torch.device("cuda"):`).
    """

    def __init__(self, config: HybridConfig) -> None:
        pattern = config.layers
        if pattern.mtp:
            why = "MTP layers are not built yet: expected a pattern without '/'"
            raise pattern_error(pattern.text, pattern.text.index("/"), why)
        embedding = nn.Embedding(config.vocab, config.hidden, device="meta")
        embedding.weight = normal((config.vocab, config.hidden), config)
        layers = dict(enumerate(build_layers(pattern.items, config)))
        output_layer = linear(config.hidden, config.vocab, config)
        if config.tie_embeddings:
            output_layer.weight = embedding.weight
        super().__init__(
            config,
            layers,
            embedding=embedding,
            final_norm=RMSNorm(config.hidden, config),
            output_layer=output_layer,
        )

    def chunks(self, n: int | None = None) -> tuple[HybridChunk, ...]:
        """This model in `n` pieces that share its modules: called one after the other they compute what it computes.

        A pattern with pipes says where to cut: one chunk per segment, and `n` may be left out. Otherwise the logical
        layers are shared out evenly. PatternError, a PlanError, if they can't be.
        """
        pattern = self.config.layers
        if n is not None and (type(n) is not int or n < 1):
            raise PlanError(f"chunks({n!r}): expected a whole number of at least 1")
        if len(pattern.segments) > 1 or n is None:
            if n not in (None, len(pattern.segments)):
                raise self._refused(n, f"its pipes make {len(pattern.segments)}")
            sizes = [len(segment) for segment in pattern.segments]
        elif pattern.logical_layers % n:
            raise self._refused(n, f"its {pattern.logical_layers} items can't be shared out evenly; put pipes")
        else:
            sizes = [pattern.logical_layers // n] * n
        return tuple(self._chunk(sum(sizes[:i]), size, i == 0, i == len(sizes) - 1) for i, size in enumerate(sizes))

    def _chunk(self, start: int, size: int, first: bool, last: bool) -> HybridChunk:
        layers = {index: self.decoder.layers[index] for index in range(start, start + size)}
        return HybridChunk(
            self.config,
            layers,
            embedding=self.embedding if first else None,
            final_norm=self.decoder.final_norm if last else None,
            output_layer=self.output_layer if last else None,
        )

    def _refused(self, n: int | None, why: str) -> PatternError:
        text = self.config.pattern
        return pattern_error(text, max(0, text.find("|")), f"chunks({n}) does not fit the pattern: {why}")

