"""A GPT twin of hybrid models: attention and MLP (or experts) in every layer, the tree of modules that transformers
usually have. It computes what a hybrid model of `[*-]` or `[*E]` groups computes, and publishes the same keys."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.errors import PlanError
from graphcap.hybrid.attention import AttentionLayer
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.grammar import pattern_error
from graphcap.hybrid.layers import HybridLayer, MLPLayer, RMSNorm, linear, normal
from graphcap.hybrid.model import HybridOutput
from graphcap.hybrid.moe import MoELayer
from graphcap.hybrid.mtp import IGNORED_LABEL, check_labels


class GPTLayer(nn.Module):
    """One layer: attention, then a dense MLP (`-`) or experts (`E`), each with its norm and residual."""

    def __init__(self, config: HybridConfig, symbol: str, index: int) -> None:
        super().__init__()
        self.self_attention = AttentionLayer(config, 2 * index + 1, index)
        self.mlp: HybridLayer = (MLPLayer if symbol == "-" else MoELayer)(config, 2 * index + 2, index)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.self_attention(hidden))
        return out


class GPTModel(nn.Module):
    """`model(tokens, labels=None)` as a `HybridModel`'s. config.pattern: one `[*-]` or `[*E]` per layer, at least one,
    no MTP; PatternError for others. Pipes mean nothing here: it is whole."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        if config.quantization is not None:
            raise PlanError(
                f"GPTModel with quantization={config.quantization!r}: its layers have no FP8 form. Use a HybridModel of the "
                "same pattern, or dataclasses.replace(config, quantization=None, ...)"
            )
        pattern = config.layers
        if pattern.mtp or not pattern.items or any(item not in (("*", "-"), ("*", "E")) for item in pattern.items):
            raise pattern_error(pattern.text, 0, "a GPT model has one [*-] or [*E] per layer and no MTP layers")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden, device="meta")
        self.embedding.weight = normal((config.vocab, config.hidden), config)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(GPTLayer(config, item[-1], i) for i, item in enumerate(pattern.items))
        self.output_layer = linear(config.hidden, config.vocab, config)
        if config.tie_embeddings:
            self.output_layer.weight = self.embedding.weight
        self.decoder.final_layernorm = RMSNorm(config.hidden, config)

    @property
    def final_layernorm(self) -> RMSNorm:
        norm = self.decoder.final_layernorm
        assert isinstance(norm, RMSNorm)
        return norm

    def gpt_layers(self) -> Iterator[GPTLayer]:
        """In order."""
        return (layer for layer in self.decoder.modules() if isinstance(layer, GPTLayer))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> HybridOutput:
        hidden: Tensor = self.embedding(tokens)
        for layer in self.gpt_layers():
            hidden = layer(hidden)
        logits: Tensor = self.output_layer(self.final_layernorm(hidden))
        if labels is None:
            return HybridOutput(None, logits)
        check_labels(labels, *tokens.shape)
        exact = logits.to(self.config.exact_dtype).flatten(0, -2)
        return HybridOutput(F.cross_entropy(exact, labels.flatten(), ignore_index=IGNORED_LABEL), logits)
