"""The whole model and its pipeline chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.errors import PatternError, PlanError
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.grammar import pattern_error
from graphcap.hybrid.layers import HybridLayer, RMSNorm, linear, normal, static_part
from graphcap.hybrid.moe import MoELayer
from graphcap.hybrid.mtp import IGNORED_LABEL, MTPBlock, check_labels, depth_targets, masked, mean_cross_entropy, roll_left
from graphcap.hybrid.quantization import Quantization, read_states
from graphcap.hybrid.stack import LayerGroup, build_layers
from graphcap.hybrid.tracker import MTP_LOSS, LayerTracker, attach_loss
from graphcap.hybrid.wgrad import DelayedLinear
from graphcap.partial_layer import GRAPHED, Part, PartialLayer, nested

OutputProcessor = Callable[..., Any]
"""Called in place of the output layer; see `HybridChunk.postprocess`."""


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
    last, a HybridOutput. The last one also takes, all of which may be left out:
    labels: int64 [batch, sequence], already shifted: the token that comes next; -100 does not count;
    loss_mask: bool [batch, sequence], False does not count either;
    tokens: as the first chunk got them, if there are MTP layers and it is not the first chunk itself;
    output_processor, output_processor_context: see `postprocess`.
    Where the config quantises, all take is_first_microbatch (bool; matters if weights are cached) and run inside
    `autocast()`.
    Parameters have the names they have in the whole model.
    """

    def __init__(
        self,
        config: HybridConfig,
        layers: Mapping[int, HybridLayer | LayerGroup],
        *,
        embedding: nn.Embedding | None,
        final_norm: RMSNorm | None,
        output_layer: DelayedLinear | None,
        mtp: MTPBlock | None = None,
        tracker: LayerTracker | None = None,
        first: bool | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """first: whether the chunk starts with the embedding; None: if it has one. MTP layers need one as well."""
        super().__init__()
        first = embedding is not None if first is None else first
        self.config = config
        self.tracker = tracker
        self.quantization = quantization
        self.embedding = embedding
        self.decoder = Decoder(layers, final_norm)
        self.mtp = mtp
        self.output_layer = output_layer
        parts = [nested(f"decoder.layers.{index}", f"hidden{config.first_microbatch} -> hidden") for index in layers]
        self.inputs = self.outputs = "hidden"
        if first:
            self.inputs = "tokens"
            parts.insert(0, GRAPHED("embed", "tokens -> hidden"))
        if output_layer is not None:
            self.inputs += ", labels=None, loss_mask=None"
            self.inputs += ", tokens=None" if mtp is not None and not first else ""
            self.inputs += ", output_processor=None, output_processor_context=None"
            self.outputs = "output"
        self.inputs += config.first_microbatch_input
        self._parts = tuple(parts)

    def _ending(self) -> list[Part]:
        """What comes behind the decoder's layers. The final norm runs once: in "head", or if there are MTP layers, which
        read normed states, in front of them; that the decoder may be empty changes nothing."""
        if self.output_layer is None:
            return []
        delayed = self.output_layer.delayed
        given = "labels, loss_mask, {}output_processor, output_processor_context -> output"
        if self.mtp is None:
            return [static_part("head", "hidden, " + given.format(""), delayed=delayed)]
        depths = range(1, len(self.mtp.layers) + 1)
        ahead = ", ".join(f"embedded_{depth}" for depth in depths)
        first = self.config.first_microbatch
        pieces = ", ".join(f"hidden_{depth}" for depth in (0, *depths))
        steps = [
            nested(f"mtp.layers.{depth - 1}", f"hidden_{depth - 1}, embedded_{depth}{first} -> hidden_{depth}")
            for depth in depths
        ]
        return [
            GRAPHED("normed", "hidden -> hidden_0"),
            GRAPHED("embed_ahead", f"tokens -> {ahead}"),
            *steps,
            GRAPHED("join", f"{pieces} -> hidden"),
            static_part("mtp_head", "hidden, " + given.format("tokens, "), delayed=delayed),
        ]

    def parts(self) -> Sequence[Part]:
        return (*self._parts, *self._ending())

    # ------------------------------------------------------------------------------------------ delayed weight gradients

    @property
    def delay_refused(self) -> str | None:
        """Why `delayed_wgrad` can't delay the weight gradients of this chunk; None: it can."""
        if self.output_layer is None or self.embedding is None or self.output_layer.weight is not self.embedding.weight:
            return None
        return (
            "tie_embeddings=True and delayed weight gradients: a backward adds the output layer's gradient of the weight to "
            "the embedding's first, and then both to .grad, which adding one of them later does not equal. Untie them, or "
            "delay those of the layers alone: delayed_wgrad(model.decoder)"
        )

    def need_backward_dw(self) -> bool:
        """False: `backward_dw` passes the call on to modules below, and has no work of its own."""
        return False

    def backward_dw(self) -> None:
        """The delayed weight gradients of one backward through the whole chunk: output layer, MTP depths (in training mode),
        layers, the last first. Where an output_processor runs the output layer another number of times than once, call
        `backward_dw` of the parts instead."""
        depths = list(self.mtp.depths()) if self.mtp is not None and self.training else []
        if self.output_layer is not None:
            self.output_layer.backward_dw(1 + len(depths))
        for part in (*reversed(depths), *reversed(list(self.decoder.layers))):
            part.backward_dw()

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [batch, sequence] -> hidden."""
        assert self.embedding is not None
        hidden: Tensor = self.embedding(tokens)
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm."""
        assert self.decoder.final_norm is not None
        out: Tensor = self.decoder.final_norm(hidden)
        return out

    def embed_ahead(self, tokens: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        """The embeddings of the tokens 1, 2, ... places ahead, one per MTP depth; token 0 behind the end."""
        assert self.mtp is not None
        if tokens is None:
            raise PlanError("the last chunk of a model with MTP layers needs tokens=..., the ids that the first one got")
        made = tuple(self.embed(roll_left(tokens, depth.depth, 0)) for depth in self.mtp.depths())
        return made if len(made) > 1 else made[0]

    def join(self, *pieces: Tensor) -> Tensor:
        """The decoder's normed states and those of every MTP depth, one after the other along the sequence. In evaluation
        the depths have no loss and get no gradient (one of zeros would still move weights, by decay and momentum)."""
        decoded, *ahead = pieces
        if not self.training:
            ahead = [piece.detach() for piece in ahead]
        return torch.cat((decoded, *ahead), dim=1)

    def head(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        output_processor: OutputProcessor | None = None,
        output_processor_context: Any = None,
    ) -> Any:
        """The end of a model without MTP layers, final norm included."""
        if self.mtp is not None:
            raise PlanError("head() of a model with MTP layers would leave them out: they end in normed ... mtp_head")
        return self.postprocess(
            self.normed(hidden),
            chunks=1,
            labels=labels,
            loss_mask=loss_mask,
            output_processor=output_processor,
            output_processor_context=output_processor_context,
        )

    def mtp_head(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        tokens: Tensor | None,
        output_processor: OutputProcessor | None,
        output_processor_context: Any,
    ) -> Any:
        """The end of a model whose MTP layers have run."""
        assert self.mtp is not None
        return self.postprocess(
            hidden,
            chunks=1 + len(self.mtp.layers),
            labels=labels,
            loss_mask=loss_mask,
            tokens=tokens,
            output_processor=output_processor,
            output_processor_context=output_processor_context,
        )

    def postprocess(
        self,
        hidden: Tensor,
        *,
        chunks: int,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        output_processor: OutputProcessor | None = None,
        output_processor_context: Any = None,
    ) -> Any:
        """MTP losses, output layer and, with labels, the mean cross entropy over the tokens that count, in float32.

        hidden: [batch, chunks * sequence, hidden], normed. chunks: 1, or 1 + the MTP depths if those have run: said by
        the caller, since it can't be told from the shape, nor from the model (inference skips its MTP layers).
        output_processor: gets the decoder's states, with the MTP losses attached, instead of the output layer, and what
        it returns is the output. It is called with the keywords hidden_states, output_layer, output_weight, labels,
        loss_mask, input_ids, context (the `output_processor_context`), compute_language_model_loss, scale_logits and
        config. In a captured model it is recorded as the rest is, and belongs to the arguments that may not change.
        """
        if hidden.shape[1] % chunks:
            raise PlanError(f"hidden has {hidden.shape[1]} tokens, which are no {chunks} chunks of one length")
        if labels is not None:
            check_labels(labels, hidden.shape[0], hidden.shape[1] // chunks)
        if chunks > 1:
            hidden = self._attach_mtp_losses(hidden, chunks, labels, loss_mask, tokens)
        assert self.output_layer is not None
        if output_processor is not None:
            return output_processor(
                hidden_states=hidden,
                output_layer=self.output_layer,
                output_weight=self.output_layer.weight,
                labels=labels,
                loss_mask=loss_mask,
                input_ids=tokens,
                context=output_processor_context,
                compute_language_model_loss=self.language_model_loss,
                scale_logits=_as_they_are,
                config=self.config,
            )
        logits = self.output_layer(hidden)
        if labels is None:
            return HybridOutput(None, logits)
        return HybridOutput(self.language_model_loss(masked(labels, loss_mask), logits), logits)

    def language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Mean cross entropy over the tokens whose label is not -100, in at least float32."""
        exact = logits.to(self.config.exact_dtype).flatten(0, -2)
        return F.cross_entropy(exact, labels.flatten(), ignore_index=IGNORED_LABEL)

    def _attach_mtp_losses(
        self, hidden: Tensor, chunks: int, labels: Tensor | None, loss_mask: Tensor | None, tokens: Tensor | None
    ) -> Tensor:
        """The decoder's share of `hidden`; in training mode with the loss of every depth attached and tracked."""
        decoded, *ahead = hidden.chunk(chunks, dim=1)
        if not self.training:
            return decoded
        assert self.output_layer is not None
        for depth, piece in enumerate(ahead, start=1):
            targets = depth_targets(depth, labels, loss_mask, tokens)
            loss = mean_cross_entropy(self.output_layer(piece), targets, self.config.exact_dtype)
            scale = None if self.tracker is None else self.tracker.loss_scale
            decoded = attach_loss(decoded, self.config.mtp_loss / len(ahead) * loss, scale)
            if self.tracker is not None:
                self.tracker.record(MTP_LOSS, self.tracker.slot(0, depth), loss)
        return decoded

    def autocast(self) -> AbstractContextManager[None]:
        """The region in which quantised layers run, graphed or not: around every forward. Leaving the outermost one
        reduces forward amaxes. Without quantisation it does nothing."""
        return nullcontext() if self.quantization is None else self.quantization.autocast()

    def quantized_states(self) -> dict[str, dict[str, Tensor]]:
        """Copies of all scales and amax histories, by `layers.<physical number>.<linear layer>.`, in MTP layers with
        `mtp.<depth>.` in front; empty without quantisation, and for what has not run yet in Transformer Engine."""
        found: dict[str, dict[str, Tensor]] = {}
        for layer in self.all_physical_layers():
            found |= read_states(layer, layer.context)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy whose quantised layers have a manager of their own: the first thing that is copied. StateError for modules
        of Transformer Engine that have run."""
        if self.quantization is not None:
            self.quantization.check_copy(self)
        copy.deepcopy(self.quantization, memo)
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return made

    def physical_layers(self) -> Iterator[HybridLayer]:
        """The layers of the main stack in order, groups opened."""
        return (layer for layer in self.decoder.modules() if isinstance(layer, HybridLayer))

    def all_physical_layers(self) -> Iterator[HybridLayer]:
        """The same, and then those of the MTP depths."""
        yield from self.physical_layers()
        for depth in self.mtp.depths() if self.mtp is not None else ():
            yield from depth.physical_layers()


def _as_they_are(logits: Tensor) -> Tensor:
    """This family does not scale its logits."""
    return logits


class HybridModel(HybridChunk):
    """A hybrid Mamba-2 / attention / MLP / MoE language model: embedding, the layers of `config.pattern`, RMSNorm,
    output layer. `model(tokens, labels=None)` gives a HybridOutput; see `HybridChunk` for shapes. `model.tracker`
    gathers what routers and MTP layers report.

    Weights are random, drawn in the order of the layers, MTP last: after the same `torch.manual_seed`, a pattern with
    and without brackets gives the same weights. Built on the default device (`with torch.device("cuda"):`).
    """

    tracker: LayerTracker

    def __init__(self, config: HybridConfig) -> None:
        pattern = config.layers
        embedding = nn.Embedding(config.vocab, config.hidden, device="meta")
        embedding.weight = normal((config.vocab, config.hidden), config)
        quantization = Quantization.of(config)
        layers = dict(enumerate(build_layers(pattern.items, config, quantization=quantization)))
        output_layer = linear(config.hidden, config.vocab, config)
        if config.tie_embeddings:
            output_layer.weight = embedding.weight
        super().__init__(
            config,
            layers,
            embedding=embedding,
            final_norm=RMSNorm(config.hidden, config),
            output_layer=output_layer,
            mtp=MTPBlock(config, quantization) if pattern.mtp else None,
            tracker=LayerTracker.of(config),
            quantization=quantization,
        )
        for layer in self.physical_layers():
            self._track(layer, None)
        for depth in self.mtp.depths() if self.mtp is not None else ():
            for layer in depth.physical_layers():
                self._track(layer, depth.depth)

    def _track(self, layer: HybridLayer, mtp_depth: int | None) -> None:
        if isinstance(layer, MoELayer):
            layer.tracker, layer.slot = self.tracker, self.tracker.slot(layer.layer_number, mtp_depth)

    def chunks(self, n: int | None = None) -> tuple[HybridChunk, ...]:
        """This model in `n` pieces that share its modules: called one after the other they compute what it computes.

        They start in the model's mode, training or evaluation, and are set to another one each (`chunk.eval()`).
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
        chunk = HybridChunk(
            self.config,
            layers,
            embedding=self.embedding if first or (last and self.mtp is not None) else None,
            final_norm=self.decoder.final_norm if last else None,
            output_layer=self.output_layer if last else None,
            mtp=self.mtp if last else None,
            tracker=self.tracker,
            first=first,
            quantization=self.quantization,
        )
        for own in (chunk, chunk.decoder, chunk.decoder.layers):  # what it does not share with the model
            own.training = self.training
        return chunk

    def _refused(self, n: int | None, why: str) -> PatternError:
        text = self.config.pattern
        return pattern_error(text, max(0, text.find("|")), f"chunks({n}) does not fit the pattern: {why}")
