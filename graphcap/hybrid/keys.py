"""Published keys: the names under which a model's weights stand in a checkpoint, whatever module holds them here.

They are those of Megatron-LM's hybrid and GPT models (its indexed form, one index per layer and no layer axis), and the
tensors are laid out as there: a group's members share `decoder.layers.<logical index>.`, so a model of `[*-]` groups and
a GPT of as many layers have the same keys. Experts have one key each, so that any number of ranks can share them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from graphcap.errors import StateError
from graphcap.hybrid.attention import AttentionLayer
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.gpt import GPTModel
from graphcap.hybrid.layers import HybridLayer, MLPLayer
from graphcap.hybrid.mamba import MambaLayer
from graphcap.hybrid.model import HybridChunk, HybridModel
from graphcap.hybrid.moe import MoELayer
from graphcap.hybrid.quantized_states import StatePiece

EXTRA_STATE: Final = re.compile(r"\._extra_state(/shard_[\d._]+)?$")
"""Entries of quantised modules, which hold bytes; with the suffix that Megatron's sharded objects get."""

OUTPUT_EXTRA_STATE: Final = "output_layer._extra_state"


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _conv_taps(tensor: Tensor) -> Tensor:
    """[channels, taps] as conv1d has it: [channels, 1, taps]."""
    return tensor.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one key stands for: a parameter, or a part of it.

    view: a parameter-shaped tensor (the weight, or a state of the optimizer) -> the view that is meant. rows: None, or
    the order in which the view's rows are published, int64 [rows].
    """

    parameter: nn.Parameter
    view: Callable[[Tensor], Tensor] = _itself
    rows: Tensor | None = None

    def published(self, tensor: Tensor | None = None) -> Tensor:
        """The published form of a parameter-shaped tensor (default: of the parameter), on its device."""
        seen = self.view((self.parameter if tensor is None else tensor).detach())
        return seen.contiguous() if self.rows is None else seen.index_select(0, self.rows.to(seen.device))

    def write(self, tensor: Tensor, published: Tensor) -> None:
        """The inverse: into `tensor`, in place."""
        seen = self.view(tensor.detach())
        value = published.to(seen.device)
        if self.rows is None:
            seen.copy_(value)
        else:
            seen.index_copy_(0, self.rows.to(seen.device), value)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view(self.parameter.detach()).shape)


Pieces = dict[str, Piece]
Holder = HybridChunk | GPTModel


def transformer_sharded_keys(config: HybridConfig) -> bool:
    """Whether the model publishes the keys of a transformer: `decoder.final_layernorm`, and no extra state of the
    output layer. So it does if its main pattern has a group anywhere; the whole pattern and not a stage's share of it
    is asked, so that all stages agree."""
    return config.layers.grouped


def pieces_of(holder: Holder) -> Pieces:
    """Every parameter of a model, a chunk or a GPT twin by its published keys."""
    if isinstance(holder, GPTModel):
        found = _gpt_pieces(holder)
    else:
        found = _hybrid_pieces(holder)
    pieces: Pieces = {}
    for key, piece in found:
        if key in pieces and pieces[key].parameter is not piece.parameter:
            raise StateError(f"two parameters would be published as {key}: expected one key for each")
        pieces[key] = piece
    known = {id(piece.parameter) for piece in pieces.values()}
    unnamed = [name for name, parameter in holder.named_parameters() if id(parameter) not in known]
    if unnamed:
        raise StateError(f"no published key is known for {', '.join(unnamed)}: a checkpoint would lose them")
    return pieces


def expected_pieces(config: HybridConfig) -> Pieces:
    """The pieces of the whole model of `config`, all experts included, without memory (on the meta device)."""
    return pieces_of(_on_meta(config))


def expected_states(config: HybridConfig) -> frozenset[str]:
    """The keys of the quantised layers' states in the whole model, all experts included."""
    return frozenset(states_of(_on_meta(config))) if config.quantization is not None else frozenset()


def _on_meta(config: HybridConfig) -> HybridModel:
    if config.quantization == "te":  # the same keys, on a device that Transformer Engine does not know
        config = replace(config, quantization="reference", recipe=None)
    with torch.device("meta"):
        return HybridModel(config)


def states_of(holder: Holder) -> dict[str, StatePiece]:
    """The states of a model's quantised layers by their published keys: `<key of the weight>._extra_state`, one per
    weight, so that experts can be shared by any number of ranks."""
    if isinstance(holder, GPTModel) or holder.quantization is None:
        return {}
    keys = {id(piece.parameter): key for key, piece in pieces_of(holder).items()}
    found = {}
    for layer in holder.all_physical_layers():
        quantization = layer.context.quantization
        state = None if quantization is None else quantization.state(layer)
        for owner in () if state is None else state.owners(layer):
            weights = [*owner.parameters()]
            for place, weight in enumerate(weights):
                key = f"{keys[id(weight)].removesuffix('.weight')}._extra_state"
                found[key] = StatePiece(owner, state, place, len(weights))
    return found


def extra_state_keys(config: HybridConfig) -> tuple[str, ...]:
    """Entries that hold nothing here, but which readers of a flat hybrid model's checkpoint expect."""
    return () if transformer_sharded_keys(config) else (OUTPUT_EXTRA_STATE,)


def _hybrid_pieces(chunk: HybridChunk) -> Iterator[tuple[str, Piece]]:
    if chunk.embedding is not None:
        yield "embedding.word_embeddings.weight", _named(chunk.embedding, "weight")
    for layer in chunk.physical_layers():
        yield from layer_pieces(layer, f"decoder.layers.{layer.logical_index}.")
    if chunk.decoder.final_norm is not None:
        name = "final_layernorm" if transformer_sharded_keys(chunk.config) else "final_norm"
        yield f"decoder.{name}.weight", Piece(chunk.decoder.final_norm.weight)
    for depth in chunk.mtp.depths() if chunk.mtp is not None else ():
        prefix = f"mtp.layers.{depth.depth - 1}."
        for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
            yield f"{prefix}{name}.weight", _named(depth, f"{name}.weight")
        for layer in depth.physical_layers():
            yield from layer_pieces(layer, f"{prefix}mtp_model_layer.layers.{layer.logical_index}.")
    yield from _output(chunk.config, chunk.output_layer)


def _gpt_pieces(model: GPTModel) -> Iterator[tuple[str, Piece]]:
    yield "embedding.word_embeddings.weight", _named(model.embedding, "weight")
    for index, layer in enumerate(model.gpt_layers()):
        for half in (layer.self_attention, layer.mlp):
            yield from layer_pieces(half, f"decoder.layers.{index}.")
    yield "decoder.final_layernorm.weight", Piece(model.final_layernorm.weight)
    yield from _output(model.config, model.output_layer)


def _output(config: HybridConfig, output_layer: nn.Linear | None) -> Iterator[tuple[str, Piece]]:
    """Tied to the embedding it has no key of its own."""
    if output_layer is not None:
        yield (
            "embedding.word_embeddings.weight" if config.tie_embeddings else "output_layer.weight",
            _named(output_layer, "weight"),
        )


def layer_pieces(layer: HybridLayer, prefix: str) -> Iterator[tuple[str, Piece]]:
    """The pieces of one layer, whose keys start with `prefix`."""
    kind = {MambaLayer: _mamba, AttentionLayer: _attention, MLPLayer: _mlp, MoELayer: _moe}[type(layer)]
    return ((f"{prefix}{name}", piece) for name, piece in kind(layer))


def _mamba(layer: HybridLayer) -> Iterable[tuple[str, Piece]]:
    yield "mixer.in_proj.layer_norm_weight", _named(layer, "norm.weight")
    yield "mixer.in_proj.weight", _named(layer, "in_proj.weight")  # rows: gate, x, B, C, dt, as there
    yield "mixer.conv1d.weight", Piece(layer.get_parameter("conv_weight"), _conv_taps)
    yield "mixer.conv1d.bias", _named(layer, "conv_bias")
    for name in ("A_log", "D", "dt_bias"):
        yield f"mixer.{name}", _named(layer, name)
    yield "mixer.norm.weight", _named(layer, "gated_norm.weight")
    yield "mixer.out_proj.weight", _named(layer, "out_proj.weight")


def _attention(layer: HybridLayer) -> Iterable[tuple[str, Piece]]:
    yield "self_attention.linear_qkv.layer_norm_weight", _named(layer, "norm.weight")
    qkv = layer.get_parameter("qkv.weight")
    yield "self_attention.linear_qkv.weight", Piece(qkv, rows=_qkv_rows(layer.config))
    yield "self_attention.linear_proj.weight", _named(layer, "out_proj.weight")


def _qkv_rows(config: HybridConfig) -> Tensor:
    """Here: all queries, all keys, all values. Published: for each key head its queries, the key, the value."""
    size, shared = config.head_dim, config.heads // config.kv_heads
    rows: list[int] = []
    for head in range(config.kv_heads):
        first = config.heads + head
        for block in (*range(head * shared, (head + 1) * shared), first, first + config.kv_heads):
            rows += range(block * size, (block + 1) * size)
    return torch.tensor(rows, device="cpu")


def _mlp(layer: HybridLayer) -> Iterable[tuple[str, Piece]]:
    yield "mlp.linear_fc1.layer_norm_weight", _named(layer, "norm.weight")
    yield from _swiglu(layer.get_submodule("mlp"), "mlp.")


def _moe(layer: HybridLayer) -> Iterable[tuple[str, Piece]]:
    assert isinstance(layer, MoELayer)
    yield "pre_mlp_layernorm.weight", _named(layer, "norm.weight")
    yield "mlp.router.weight", _named(layer, "router_weight")
    if layer.shared_mlp is not None:
        yield from _swiglu(layer.shared_mlp, "mlp.shared_experts.")
    for place, number in enumerate(layer.parallel.share(layer.config.experts)):
        prefix = f"mlp.experts.experts.{number}."
        if layer.config.expert_gemm == "grouped":
            yield f"{prefix}linear_fc1.weight", Piece(layer.grouped.gate_up, _Transposed(place))
            yield f"{prefix}linear_fc2.weight", Piece(layer.grouped.down, _Transposed(place))
        elif layer.te_grouped:
            yield f"{prefix}linear_fc1.weight", _named(layer.te_experts, f"gate_up.weight{place}")
            yield f"{prefix}linear_fc2.weight", _named(layer.te_experts, f"down.weight{place}")
        else:
            yield from _swiglu(layer.expert_mlps.get_submodule(str(number)), prefix)


@dataclass(frozen=True, slots=True)
class _Transposed:
    """One expert of a stacked weight [experts, inputs, outputs], as a linear layer has it: [outputs, inputs]."""

    place: int

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor[self.place].t()


def _swiglu(module: nn.Module, prefix: str) -> Iterable[tuple[str, Piece]]:
    yield f"{prefix}linear_fc1.weight", _named(module, "gate_up.weight")  # gate above up, as there
    yield f"{prefix}linear_fc2.weight", _named(module, "down.weight")


def _named(module: nn.Module, name: str) -> Piece:
    return Piece(module.get_parameter(name))
