"""`E`: a mixture of experts whose expert part breaks the graph, and the row permutation it is built on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap.errors import PlanError
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.expert_parallel import ALONE, ExpertParallel, Layout, agree, send, send_back
from graphcap.hybrid.layers import HybridLayer, SwiGLU, exactly, normal
from graphcap.hybrid.quantization import TeExperts
from graphcap.hybrid.recompute import DiscardedOutput, is_recomputing, not_kept
from graphcap.hybrid.tracker import LayerTracker, attach_loss, router_losses
from graphcap.hybrid.wgrad import WgradQueue, autocast_dtype, grouped_product, set_delayed
from graphcap.partial_layer import EAGER, Part

Routed = tuple[Tensor, Tensor]
Sorted = tuple[Tensor, Tensor, Tensor, Tensor]

_REASON = "rows per expert depend on the data"


class MoELayer(HybridLayer):
    """Each token visits the `top_k` of `experts` SwiGLUs that a float32 router gives the highest probability; their
    results are added, weighted by those probabilities, renormalised to sum 1 (with top_k=1 the probability as it is, as
    in Fedus et al. 2021, "Switch transformers"). No token is dropped. With `shared_ffn`, one more SwiGLU serves every
    token, unweighted.

    A schedule runs it by its callables: `normalise`, `shared`, `route`, `preprocess` | `dispatch` | `experts` |
    `collect`, `combine`. Called as a layer: the first four and `combine` have static shapes, tokens * top_k rows in all,
    and are graphed; `exchange` (dispatch, experts, collect) is eager: how many rows an expert gets is known from the
    data alone. An expert without rows is not run: the gradients of its weights stay None.

    `parallel` says which experts live on this rank: see `shard_experts`.

    In training mode the router's losses (see `HybridConfig`) hang on its weights, and `tracker`, if there is one, adds up
    what they were at `slot`.
    """

    symbol = "E"

    def __init__(self, config: HybridConfig, layer_number: int = 1, logical_index: int = 0, **shared: Any) -> None:
        super().__init__(config, layer_number, logical_index, **shared)
        self.parallel = ALONE
        self.tracker: LayerTracker | None = None
        self.slot = layer_number - 1
        self.router_weight = normal((config.experts, config.hidden), config, dtype=config.exact_dtype)
        if config.expert_gemm == "grouped":
            self.grouped = GroupedSwiGLU(config.experts, config.expert_ffn, config)
        else:
            self._make_experts(config)
        self.shared_mlp = SwiGLU(config.shared_ffn, config, self.context) if config.shared_ffn else None
        self.outstanding = WgradQueue(f"the experts of layer {layer_number}")
        self._discarded: DiscardedOutput | None = None

    def _make_experts(self, config: HybridConfig) -> None:
        """Transformer Engine's grouped products, or one SwiGLU per expert; the same weights after the same seed."""
        context, numbers = self.context, range(config.experts)
        if not self.te_grouped:
            self.expert_mlps = ExpertMLPs({i: SwiGLU(config.expert_ffn, config, context) for i in numbers})
            return
        inner, hidden = config.expert_ffn, config.hidden
        up_and_down = [
            (normal((2 * inner, hidden), config), normal((hidden, inner), config, std=config.residual_std)) for _ in numbers
        ]
        self.te_experts = TeExperts([up for up, _ in up_and_down], [down for _, down in up_and_down])

    @property
    def te_grouped(self) -> bool:
        """Whether the routed experts are te.GroupedLinear."""
        quantization = self.context.quantization
        return quantization is not None and quantization.manager is None

    def plain_parts(self) -> Sequence[Part]:
        first = self.config.first_microbatch
        front = self._discarding if self.config.recompute == "norm" else self.static
        shared = (front("shared", f"normed{first} -> shared"),) if self.shared_mlp is not None else ()
        added = ", shared" if shared else ""
        return (
            front("normalise", "hidden -> normed"),
            *shared,
            front("route", "normed -> weights, chosen"),
            front("preprocess", "normed, chosen -> rows, counts, order, inverse"),
            EAGER("exchange", f"rows, counts{first} -> routed", reason=_REASON),
            self.static("combine", f"routed, weights, order, inverse, hidden{added} -> hidden"),
        )

    @staticmethod
    def _discarding(method: str, signature: str) -> Part:
        return EAGER(method, signature, reason="the norm's output is discarded and computed again")

    def straight(self, hidden: Tensor) -> Tensor:
        rows, counts, *kept = self.before_dispatch(hidden)
        return self.combine(self.exchange(rows, counts), *kept)

    # ------------------------------------------------------------------------------------------ before the rows travel

    def before_dispatch(
        self, hidden: Tensor, router_weight: Tensor | None = None, *, in_graph: bool = False
    ) -> tuple[Tensor, ...]:
        """`normalise`, `shared`, `route`, `preprocess`: rows, counts, weights, order, inverse, hidden and, if there is
        a shared expert, its result. router_weight: this layer's own, by a caller that holds it itself, as a captured
        slot of a schedule does (a graph reads a parameter from the captured module). in_graph: a graph holds all of this,
        so that recompute="norm" keeps the norm's output out of what autograd saves; freeing it is not up to `experts`."""
        if in_graph and self.config.recompute == "norm" and torch.is_grad_enabled():
            self._discarded = None
            with not_kept(self.norm.normed, hidden, self.norm.weight) as normed:
                return self._prepared(hidden, normed.flatten(0, 1), router_weight)
        return self._prepared(hidden, self.normalise(hidden), router_weight)

    def _prepared(self, hidden: Tensor, normed: Tensor, router_weight: Tensor | None) -> tuple[Tensor, ...]:
        shared = () if self.shared_mlp is None else (self.shared(normed),)
        weights, chosen = self.route(normed, router_weight)
        rows, counts, order, inverse = self.preprocess(normed, chosen)
        return (rows, counts, weights, order, inverse, hidden, *shared)

    def normalise(self, hidden: Tensor) -> Tensor:
        """hidden: [batch, sequence, hidden] -> [tokens, hidden], read by all that follows."""
        self._discarded = None
        if self.config.recompute == "norm" and torch.is_grad_enabled():
            self._discarded = DiscardedOutput(self.norm, (self.norm.weight,))
            return self._discarded(hidden).flatten(0, 1)
        normed: Tensor = self.norm(hidden)
        return normed.flatten(0, 1)

    def shared(self, normed: Tensor, first: bool | None = None) -> Tensor:
        """What every token gets: [tokens, hidden]."""
        assert self.shared_mlp is not None
        self.context.require_region(self)
        out: Tensor = self.shared_mlp(normed, first)
        return out

    def route(self, normed: Tensor, router_weight: Tensor | None = None) -> Routed:
        """The router: weights [tokens, top_k], in at least float32, and chosen, int64 [tokens, top_k]."""
        config = self.config
        router_weight = self.router_weight if router_weight is None else router_weight
        with exactly(normed):
            logits = F.linear(normed.to(config.exact_dtype), router_weight)
        probs = torch.softmax(logits, dim=-1)
        # Only the choice is taken from topk: the backward of its values is a scatter, that of the product below is not.
        chosen = probs.detach().topk(config.top_k, dim=-1).indices
        picked = (probs.unsqueeze(1) * self._visits(chosen)).sum(-1)
        # One choice renormalised would always weigh 1, and the router would get no gradient.
        weights = picked / picked.sum(-1, keepdim=True) if config.top_k > 1 else picked
        return (self._track(logits, probs, chosen, weights) if self.training else weights), chosen

    def _track(self, logits: Tensor, probs: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`weights` with the router's losses attached; values and counts go to the tracker. All on the device."""
        counts = self._visits(chosen).sum((0, 1))
        tracker = None if is_recomputing() else self.tracker  # what was counted is not counted again
        for metric, coefficient, loss in router_losses(self.config, logits, probs, counts):
            scale = None if self.tracker is None else self.tracker.loss_scale
            weights = attach_loss(weights, coefficient * loss, scale)
            if tracker is not None:
                tracker.record(metric, self.slot, loss)
        if tracker is not None and self.config.router_statistics:
            tracker.record_rows(self.slot, counts)
        return weights

    def preprocess(self, normed: Tensor, chosen: Tensor) -> Sorted:
        """With T tokens and k = top_k, returns

        rows: [T * k, hidden], normed tokens, sorted by expert, within an expert by token;
        counts: int64 [experts], rows per expert;
        order, inverse: int64 [T * k]; row r is choice `order[r]` of all T * k, choice i is row `inverse[i]`.
        """
        order = torch.argsort(chosen.flatten(), stable=True)
        inverse = torch.argsort(order)
        rows = permute_rows(normed, order, inverse, self.config.top_k)
        return rows, self._visits(chosen).sum((0, 1)), order, inverse

    def _visits(self, chosen: Tensor) -> Tensor:
        """bool [tokens, top_k, experts]."""
        return chosen.unsqueeze(-1) == torch.arange(self.config.experts, device=chosen.device)

    # ---------------------------------------------------------------------------------------- where shapes depend on data

    def exchange(self, rows: Tensor, counts: Tensor, first: bool | None = None) -> Tensor:
        """To the experts and back: [T * k, hidden] to the same, rows in the order of `preprocess`."""
        received, layout = self.dispatch(rows, counts)
        return self.collect(self.experts(received, layout, first), layout)

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Layout]:
        """Rows to the ranks of their experts: received [R, hidden], by rank that sent them, then by expert."""
        anchor = None if rows.requires_grad else next(self._trained_weights(), None)
        layout = agree(counts, self.parallel, trained=rows.requires_grad or anchor is not None)
        return send(rows, layout, anchor), layout

    def experts(self, received: Tensor, layout: Layout, first: bool | None = None) -> Tensor:
        """Each expert of this rank on its rows: [R, hidden] to the same, in the same order."""
        self.context.require_region(self)
        made = self._computed(received, layout, first)
        if self._discarded is not None:
            self._discarded.discard(made)
            self._discarded = None
        return made

    def _computed(self, received: Tensor, layout: Layout, first: bool | None) -> Tensor:
        if layout.per_expert is None:
            counts = layout.counts[0]
            per_expert = None if self.config.expert_gemm == "grouped" else counts.tolist()
            return self._by_expert(received, counts, per_expert, first)
        ranks, experts = layout.counts.shape
        if experts == 1 or layout.rows == 0:
            return self._by_expert(received, layout.counts.sum(0), layout.per_expert, first)
        numbers = torch.arange(experts, device=received.device).repeat(ranks)
        numbers = numbers.repeat_interleave(layout.counts.flatten(), output_size=layout.rows)
        order = torch.argsort(numbers, stable=True)
        inverse = torch.argsort(order)
        rows = permute_rows(received, order, inverse, 1)
        made = self._by_expert(rows, layout.counts.sum(0), layout.per_expert, first)
        return permute_rows(made, inverse, order, 1)

    def _by_expert(self, rows: Tensor, counts: Tensor, per_expert: Sequence[int] | None, first: bool | None) -> Tensor:
        """Rows sorted by expert; counts per expert of this rank, on the device and (for the loop) on the host."""
        if self.config.expert_gemm == "grouped":
            done: Tensor = self.grouped(rows, counts)
            return self._noting(done, (self.grouped,))
        assert per_expert is not None
        if self.te_grouped:
            computed: Tensor = self.te_experts(rows, per_expert, first)
            return computed
        for mlp in self.expert_mlps:  # also those without rows
            self.context.register(mlp)
        pieces = torch.split(rows, list(per_expert))
        ran = [(mlp, piece) for mlp, piece in zip(self.expert_mlps, pieces, strict=True) if piece.shape[0]]
        if ran:
            made = torch.cat([mlp(piece, first) for mlp, piece in ran])
        else:  # of the dtype that other ranks' experts give, which their rows come back in
            autocast = None if self.context.quantization is not None else autocast_dtype(rows)
            made = rows.to(autocast or rows.dtype)
        return self._noting(made, tuple(mlp for mlp, _ in ran))

    def collect(self, made: Tensor, layout: Layout) -> Tensor:
        """Results back to the ranks that sent the rows: the inverse of `dispatch`."""
        return send_back(made, layout)

    # ------------------------------------------------------------------------------------------------------ afterwards

    def combine(
        self,
        routed: Tensor,
        weights: Tensor,
        order: Tensor,
        inverse: Tensor,
        hidden: Tensor,
        shared: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each token's `top_k` results, and the shared expert's, added to `hidden`."""
        choices = permute_rows(routed, inverse, order, 1).view(*weights.shape, routed.shape[-1])
        # sum over the axis k of a dense tensor: the same order in every run, where index_add would use atomics.
        mixed = (choices.to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
        if shared is not None:
            mixed = mixed + shared
        return hidden + mixed.view_as(hidden)

    # ------------------------------------------------------------------------------------------ delayed weight gradients

    def _noting(self, made: Tensor, ran: tuple[SwiGLU | GroupedSwiGLU, ...]) -> Tensor:
        """Delayed: the backward notes which experts had rows, for `experts_backward_dw`."""
        if self.delayed and made.requires_grad and any(True for _ in self._trained_weights()):

            def compute() -> None:
                for mlp in reversed(ran):
                    mlp.backward_dw()

            made.register_hook(lambda _: self.outstanding.push(compute))  # type: ignore[no-untyped-call]
        return made

    @property
    def routed_experts(self) -> GroupedSwiGLU | ExpertMLPs | TeExperts:
        """The experts of this rank."""
        if self.te_grouped:
            return self.te_experts
        return self.grouped if self.config.expert_gemm == "grouped" else self.expert_mlps

    def _trained_weights(self) -> Iterator[nn.Parameter]:
        """The weights of this rank's experts that are not frozen."""
        return (weight for weight in self.routed_experts.parameters() if weight.requires_grad)

    def need_backward_dw(self) -> bool:
        """False: `backward_dw` passes the call on to modules below. PlanError, to `graphcap.capture` which asks this, while
        weight gradients are delayed."""
        if self.delayed:
            raise PlanError(
                f"capture of layer {self.layer_number} ('E') with delayed weight gradients: which experts have any depends "
                "on the data, and a capture runs those of the sample. Capture without delayed_wgrad, or under an overlapped "
                "schedule: OverlapSchedule(model, delay_wgrad=True).capture_graphs(...)"
            )
        return False

    def delay_experts(self, delayed: bool) -> None:
        """Delay the routed experts' weight gradients, or don't; those of the shared expert stay as they are."""
        set_delayed(self.routed_experts, delayed)
        self.delayed = delayed

    def backward_dw(self) -> None:
        """The delayed weight gradients of one backward: routed experts, then shared."""
        self.experts_backward_dw()
        self.shared_backward_dw()

    def experts_backward_dw(self) -> None:
        """Of the routed experts that had rows: after the backward of `experts`."""
        if self.delayed and any(True for _ in self._trained_weights()):
            self.outstanding.run_next()

    def shared_backward_dw(self) -> None:
        """Of the shared expert: after the backward of what comes before dispatch, where its input gradient is computed."""
        if self.shared_mlp is not None:
            self.shared_mlp.backward_dw()


class ExpertMLPs(nn.Module):
    """Experts by their number in the whole layer, so that names are the same however many ranks share them. Iterates
    over the experts of this rank."""

    def __init__(self, experts: Mapping[int, SwiGLU]) -> None:
        super().__init__()
        for number, expert in experts.items():
            self.add_module(str(number), expert)

    def __iter__(self) -> Iterator[SwiGLU]:
        return (expert for expert in self._modules.values() if isinstance(expert, SwiGLU))

    def __len__(self) -> int:
        return len(self._modules)

    def keep(self, numbers: range) -> None:
        """Drop the experts that live on other ranks."""
        for name in [name for name in self._modules if int(name) not in numbers]:
            del self._modules[name]


def shard_experts(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Keep, in every MoE layer of `model`, the experts of this rank of `group` (default: the default process group; one
    rank if there is none). `experts / ranks` neighbours each; PlanError if that does not divide. Names stay those of the
    whole model: `expert_mlps.<number in the layer>`; the stacked weights of expert_gemm="grouped" become this rank's
    slice. All ranks must have built the model from the same seed. Gradients of the experts are those of the rows of all
    ranks; all other gradients are this rank's alone. Returns `model`."""
    parallel = ExpertParallel.of(group)
    for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
        if layer.parallel != ALONE:
            ranks = layer.parallel.size
            raise PlanError(f"layer {layer.layer_number}: its experts are shared out already, over {ranks} ranks")
        share = parallel.share(layer.config.experts)
        layer.parallel = parallel
        layer.routed_experts.keep(share)
    return model


class GroupedSwiGLU(nn.Module):
    """All experts' SwiGLUs in two grouped matrix products; rows of an expert lie together, in the experts' order.

    Every row belongs to an expert, so no row of the outputs is left unwritten (grouped_mm leaves rows behind the last
    offset as they are). An expert without rows gets a gradient of zeros here, where the loop leaves None.
    """

    def __init__(self, experts: int, inner: int, config: HybridConfig) -> None:
        super().__init__()
        self.gate_up = normal((experts, config.hidden, 2 * inner), config)
        self.down = normal((experts, inner, config.hidden), config, std=config.residual_std)
        self.delayed = False
        self.outstanding = WgradQueue(f"the grouped product of {experts} experts")

    def keep(self, numbers: range) -> None:
        """Drop the experts that live on other ranks."""
        for name in ("gate_up", "down"):
            whole = getattr(self, name)
            share = whole.detach()[numbers.start : numbers.stop].clone()
            setattr(self, name, nn.Parameter(share, requires_grad=whole.requires_grad))

    def need_backward_dw(self) -> bool:
        """Whether a backward leaves work of this module's own to `backward_dw`; asked by `graphcap.capture`."""
        return self.delayed

    def backward_dw(self) -> None:
        """The delayed weight gradients of one backward: those of `down` and `gate_up`."""
        if self.delayed:
            for _ in range(self.down.requires_grad + self.gate_up.requires_grad):
                self.outstanding.run_next()

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [R, hidden] bfloat16; counts: int64 [experts], their sum is R."""
        ends = counts.cumsum(0).to(torch.int32)
        queue = self.outstanding if self.delayed else None
        gate, up = grouped_product(rows, self.gate_up, ends, queue).chunk(2, dim=-1)
        return grouped_product(F.silu(gate) * up, self.down, ends, queue)


def permute_rows(x: Tensor, source: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """out[r] = x[source[r] // copies]: every row of `x` comes `copies` times, in the order of `source`.

    x: [rows, width]; source: int64 [rows * copies], a permutation; inverse: its inverse. Nothing is checked, since a
    check would read the device. The gradient is deterministic, other than that of indexing: see `_PermuteRows`.
    """
    out: Tensor = _PermuteRows.apply(x, source, inverse, copies)  # type: ignore[no-untyped-call]
    return out


class _PermuteRows(torch.autograd.Function):
    """The backward of x[index] adds gradients where rows repeat: by atomics (no fixed order) or, in deterministic mode,
    after a sort. Here the inverse permutation is at hand, so it is a gather, and then a sum over the copies of each row
    in their own order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, source if copies == 1 else source // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (inverse,) = ctx.saved_tensors
        grad = grads[0].index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.view(grad.shape[0] // ctx.copies, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None
