"""Modules, recipes and training loops of the Transformer Engine tests. TE is imported inside: it is absent without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphcap import make_graphed_callables

BF16 = torch.bfloat16
# A length that is a multiple of 128: TE then takes the same attention backend whether or not a capture is in progress.
SIZE, FFN, HEADS, LENGTH, BATCH = 128, 256, 4, 128, 2
KINDS = (
    "linear",
    "layernorm_linear",
    "layernorm_mlp",
    "layernorm_mlp_checkpoint",
    "mha",
    "transformer",
    "grouped_linear",
    "linear_op",
)
RECIPES = ("delayed", "current", "block")


def recipe(name: str, **changes: Any) -> Any:
    from transformer_engine.common import recipe as recipes

    if name == "delayed":
        return recipes.DelayedScaling(**{"amax_history_len": 4, "amax_compute_algo": "most_recent", **changes})
    if name == "current":
        return recipes.Float8CurrentScaling(**changes)
    assert name == "block"
    return recipes.Float8BlockScaling(**changes)


def attention_backend() -> str:
    """The attention backend that Transformer Engine chose last, in words."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends as chosen

    if chosen["use_flash_attention"]:
        return f"flash {chosen['flash_attention_backend']}"
    return f"fused {int(chosen['fused_attention_backend'])}" if chosen["use_fused_attention"] else "unfused"


def choose_attention_again() -> None:
    """TE keeps its last choice; it reads the environment only when it chooses."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends as chosen

    chosen["backend_selection_requires_update"] = True


def autocast(found: Any, group: Any = None) -> Any:
    import transformer_engine.pytorch as te

    if found is None:
        return nullcontext()
    return te.autocast(enabled=True, recipe=found, amax_reduction_group=group)


def layer(kind: str, dtype: torch.dtype = BF16, **more: Any) -> nn.Module:
    """One TE layer of a kind that maps [LENGTH, BATCH, SIZE] to the same shape."""
    import transformer_engine.pytorch as te
    import transformer_engine.pytorch.ops as te_ops

    options = {"params_dtype": dtype, **more}
    if kind == "linear":
        return te.Linear(SIZE, SIZE, **options)
    if kind == "layernorm_linear":
        return te.LayerNormLinear(SIZE, SIZE, **options)
    if kind == "layernorm_mlp":
        return te.LayerNormMLP(SIZE, FFN, **options)
    if kind == "layernorm_mlp_checkpoint":
        return te.LayerNormMLP(SIZE, FFN, checkpoint=True, **options)
    if kind in ("checkpoint", "checkpoint_reentrant"):
        return Checkpointed(kind == "checkpoint_reentrant", **options)
    if kind == "mha":
        return te.MultiheadAttention(SIZE, HEADS, attention_dropout=0.0, fuse_qkv_params=True, **options)
    if kind == "transformer":
        return te.TransformerLayer(
            SIZE, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **options
        )
    if kind == "grouped_linear":
        return Grouped(**options)
    assert kind == "linear_op"
    return te_ops.Sequential(te_ops.Linear(SIZE, SIZE, dtype=dtype))


class Grouped(nn.Module):
    """te.GroupedLinear with splits that the host knows, so that it can be in a graph."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.experts = te.GroupedLinear(2, SIZE, SIZE, bias=False, **options)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        rows = x.view(-1, SIZE)
        half = rows.shape[0] // 2
        return self.experts(rows, [half, rows.shape[0] - half], is_first_microbatch=is_first_microbatch).view_as(x)


class Checkpointed(nn.Module):
    """A TE layer under TE's own activation checkpoint."""

    def __init__(self, reentrant: bool, **options: Any) -> None:
        super().__init__()
        self.inner, self.reentrant = layer("layernorm_mlp", **_renamed(options)), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        made: torch.Tensor = te.checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return made


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": options["params_dtype"], **{k: v for k, v in options.items() if k != "params_dtype"}}


class Stack(nn.Sequential):
    """Layers one after the other, each with the same keywords."""

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:  # type: ignore[override]
        for module in self:
            x = module(x, **more)
        return x


def drawn(seed: int, dtype: torch.dtype = BF16, requires_grad: bool = True) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn(LENGTH, BATCH, SIZE, device="cuda", dtype=dtype, generator=generator)
    return made.requires_grad_(requires_grad)


def owners(module: nn.Module) -> list[nn.Module]:
    """The modules with low-precision state, whether or not it is there yet."""
    return [m for m in module.modules() if "fp8_meta" in vars(m) or "_fp8_metas" in vars(m)]


def scaling(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every scale and amax history under a module, by name, as copies: read without graphcap."""
    found = {}
    for number, owner in enumerate(owners(module)):
        metas = [vars(owner).get("fp8_meta"), *(vars(owner).get("_fp8_metas") or {}).values()]
        for meta in metas:
            for key in ("scaling_fwd", "scaling_bwd"):
                state = (meta or {}).get(key)
                for name in ("scale", "amax_history"):
                    value = getattr(state, name, None)
                    if isinstance(value, torch.Tensor):
                        found[f"{number} {type(owner).__name__}.{key}.{name}"] = value.detach().clone()
    return found


@dataclass(frozen=True)
class Run:
    """What a training run left: tensors by name, in the order in which they came."""

    tensors: dict[str, torch.Tensor]

    def differs(self, other: Run) -> list[str]:
        """The names under which two runs are not bit for bit alike (or that one of them lacks)."""
        names = list(dict.fromkeys([*self.tensors, *other.tensors]))
        return [
            name
            for name in names
            if name not in self.tensors or name not in other.tensors or not _same(self.tensors[name], other.tensors[name])
        ]

    def require_alive(self) -> None:
        """A comparison of NaN, of zero gradients or of untouched scales proves nothing."""
        for name, tensor in self.tensors.items():
            assert tensor.isfinite().all(), f"{name} is not finite: the comparison proves nothing"
        gradients = [t for name, t in self.tensors.items() if " grad " in name]
        assert any(bool(t.any()) for t in gradients), "every gradient is zero"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in high precision of what may be a quantised tensor."""
    dequantize = getattr(tensor, "dequantize", None)
    if type(tensor).__module__.startswith("transformer_engine") and dequantize is not None:
        return dequantize().detach().clone()
    return tensor.detach().clone()


@dataclass(frozen=True)
class Case:
    """One setting of a training run: what is built, under which recipe, whether weights are cached or kept quantised."""

    kind: str
    recipe: str | None = None
    caching: bool = False
    primary: bool = False
    dtype: torch.dtype = BF16
    layers: int = 2

    def __str__(self) -> str:
        words = [self.kind, self.recipe or "none", "cached" if self.caching else "", "primary" if self.primary else ""]
        return "-".join(word for word in (*words, str(self.dtype).removeprefix("torch.")) if word)


@contextmanager
def primary_weights(case: Case, found: Any) -> Iterator[None]:
    import transformer_engine.pytorch as te

    with te.quantized_model_init(enabled=case.primary, recipe=found) if found is not None else nullcontext():
        yield


def train(case: Case, mode: str, steps: int = 3, microbatches: int = 2) -> Run:
    """Train a stack eagerly ("none"), with one graph for all layers ("whole") or one graph per layer ("each")."""
    torch.manual_seed(11)
    found = None if case.recipe is None else recipe(case.recipe)
    with primary_weights(case, found):
        layers = [layer(case.kind, case.dtype) for _ in range(case.layers)]
        for module in layers:
            for parameter in module.parameters():
                parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        model = graphed(layers, mode, case, found)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tensors: dict[str, torch.Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad(set_to_none=False)
        for microbatch in range(microbatches):
            seed = 100 * step + microbatch
            x, cotangent = drawn(seed, case.dtype), drawn(seed + 50, case.dtype, requires_grad=False)
            more = {"is_first_microbatch": microbatch == 0} if case.caching else {}
            with autocast(found):
                y = model(x, **more)
            y.backward(cotangent)
            assert x.grad is not None
            tensors[f"{step}.{microbatch} output"] = plain(y)
            tensors[f"{step}.{microbatch} input grad "] = plain(x.grad)
            for name, value in scaling(model).items():
                tensors[f"{step}.{microbatch} {name}"] = value
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            tensors[f"{step} grad {name}"] = plain(parameter.grad)
        optimizer.step()
        for name, parameter in model.named_parameters():
            tensors[f"{step} weight {name}"] = plain(parameter)
    return Run(tensors)


def graphed(layers: Sequence[nn.Module], mode: str, case: Case, found: Any) -> nn.Module:
    """The stack of layers behind graphs, or without."""
    options = {
        "num_warmup_iters": 3,
        "enabled": found is not None,
        "recipe": found,
        "cache_quantized_params": case.caching,
    }
    sample = torch.ones(LENGTH, BATCH, SIZE, device="cuda", dtype=case.dtype, requires_grad=True)
    if mode == "each":
        return Stack(*(make_graphed_callables(module, (sample,), **options) for module in layers))
    if mode == "whole":
        whole = nn.Sequential(*layers)
        return make_graphed_callables(whole, (sample,), **options)
    assert mode == "none"
    return Stack(*layers)


Build = Callable[[], nn.Module]
