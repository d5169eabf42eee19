"""A Transformer Engine MoE layer in FP8: attention, router and shared expert in graphs, routed experts eager. Needs a GPU.

python examples/te_breaking_layer.py
"""

import torch
import transformer_engine.pytorch as te  # before any work: it must load its cuDNN before torch loads one
from torch import nn
from transformer_engine.common.recipe import DelayedScaling

import graphcap
from graphcap import EAGER, GRAPHED, nested
from graphcap.fp8_meta import QuantSpec
from graphcap.testing import deterministic

KEYS = ("scaling_fwd", "scaling_bwd")
# LENGTH: a multiple of 128, so that every cuDNN gives TE the same attention in eager calls and while it is captured.
WIDTH, HEADS, EXPERTS, LENGTH, BATCH, MICROBATCHES = 128, 4, 4, 128, 2, 3


class MoELayer(graphcap.PartialLayer):
    """hidden: bfloat16 [LENGTH, BATCH, WIDTH]. is_first_microbatch: whether weights have changed since the last call: what
    TE's modules cast by in eager code; in graphs a flag on the device decides, and the captured value means nothing."""

    inputs, outputs = "hidden, is_first_microbatch", "hidden"

    def __init__(self, width: int = WIDTH, heads: int = HEADS, experts: int = EXPERTS) -> None:
        super().__init__()
        kind = {"params_dtype": torch.bfloat16}
        self.qkv = te.LayerNormLinear(width, 3 * width, **kind)
        self.core = te.DotProductAttention(heads, width // heads, attention_dropout=0.0, attn_mask_type="causal")
        self.out = te.Linear(width, width, **kind)
        self.norm = nn.LayerNorm(width, device="cuda", dtype=torch.bfloat16)
        self.router = nn.Linear(width, experts, bias=False, device="cuda")  # float32: a choice must not be a rounding
        self.shared = te.LayerNormMLP(width, 2 * width, **kind)
        self.pad, self.unpad = te.Fp8Padding(experts, 16), te.Fp8Unpadding(experts, 16)  # FP8 products take 16 rows
        self.up = te.GroupedLinear(experts, width, 2 * width, bias=False, **kind)
        self.down = te.GroupedLinear(experts, 2 * width, width, bias=False, **kind)

    def parts(self):
        return (
            GRAPHED("attend", "hidden, is_first_microbatch -> attended"),
            GRAPHED("route", "attended, is_first_microbatch -> rows, counts, weight, back, residual"),
            EAGER("experts", "rows, counts, is_first_microbatch -> routed", reason="rows per expert depend on the data"),
            GRAPHED("combine", "routed, weight, back, residual -> hidden"),
        )

    def attend(self, hidden, is_first_microbatch):
        qkv = self.qkv(hidden, is_first_microbatch=is_first_microbatch)
        query, key, value = qkv.unflatten(-1, (3, HEADS, -1)).unbind(2)
        return hidden + self.out(self.core(query, key, value), is_first_microbatch=is_first_microbatch)

    def route(self, attended, is_first_microbatch):
        """The best expert of every token; tokens sorted by expert. Static shapes: one row per token."""
        tokens = self.norm(attended).flatten(0, 1)
        probs = self.router(tokens.float()).softmax(-1)
        expert = probs.detach().argmax(-1)
        chosen = expert.unsqueeze(-1) == torch.arange(probs.shape[-1], device=tokens.device)
        weight = (probs * chosen).sum(-1, keepdim=True).to(tokens.dtype)
        order = expert.argsort(stable=True)
        residual = attended + self.shared(attended, is_first_microbatch=is_first_microbatch)
        return tokens[order], chosen.sum(0), weight, order.argsort(), residual

    def experts(self, rows, counts, is_first_microbatch):
        splits = counts.tolist()  # a host read: this is why the part is eager
        padded, sizes = self.pad(rows, splits)
        inner = nn.functional.silu(self.up(padded, sizes, is_first_microbatch=is_first_microbatch))
        return self.unpad(self.down(inner, sizes, is_first_microbatch=is_first_microbatch), splits)

    def combine(self, routed, weight, back, residual):
        return residual + (routed[back] * weight).view_as(residual)


class Stack(graphcap.PartialLayer):
    inputs, outputs = "hidden, is_first_microbatch", "hidden"

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoELayer() for _ in range(layers))

    def parts(self):
        names = (f"layers.{number}" for number in range(len(self.layers)))
        return tuple(nested(name, "hidden, is_first_microbatch -> hidden") for name in names)


def build() -> Stack:
    torch.manual_seed(0)
    return Stack()


def train(model, recipe, steps: int) -> list[torch.Tensor]:
    """Steps of MICROBATCHES each: outputs, gradients, scales of the quantisers, in the order in which they appear. The
    target is the input turned round in the batch: a loss with a minimum, so that everything stays finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):
            generator = torch.Generator("cuda").manual_seed(step * MICROBATCHES + microbatch)
            x = torch.randn(LENGTH, BATCH, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
            with te.autocast(enabled=True, recipe=recipe):
                y = model(x.requires_grad_(), is_first_microbatch=microbatch == 0)
            nn.functional.mse_loss(y.float(), x.detach().flip(1).float()).backward()
            seen += [y.detach().clone(), x.grad]
            states = [m.fp8_meta[key] for m in model.modules() for key in KEYS if key in getattr(m, "fp8_meta", ())]
            seen += [tensor.clone() for state in states for tensor in (state.scale, state.amax_history)]
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return seen


def main() -> None:
    recipe = DelayedScaling(amax_history_len=8)
    with deterministic("cuda"):
        model = build()
        sample = torch.zeros(LENGTH, BATCH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        spec = QuantSpec(recipe=recipe, cache_weights=True)
        graphed = graphcap.capture(model, (sample,), {"is_first_microbatch": True}, quantization=spec)
        print(graphed.plan)
        with_graphs = train(graphed, recipe, steps=5)
        without = train(build(), recipe, steps=5)
        again = train(build(), recipe, steps=5)
    finite = sum(bool(tensor.isfinite().all()) for tensor in without)
    print(f"without graphs: {finite} of {len(without)} tensors are finite, {equal(without, again)} equal in a second run")
    print(f"{equal(with_graphs, without)} of {len(without)} tensors are bit for bit as without graphs")


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    return sum(torch.equal(x, y) for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
