"""The sizes of a hybrid model: one frozen record, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from graphcap.errors import PlanError
from graphcap.fp8_meta import QuantSpec
from graphcap.fp8_reference import RefRecipe
from graphcap.hybrid.pattern import Pattern

Attention = Literal["math", "sdpa"]
ExpertGemm = Literal["loop", "grouped"]
Recompute = Literal["none", "norm", "layer"]
Quantizer = Literal["reference", "te"]

_COUNTS: Final = (
    *("vocab", "hidden", "heads", "kv_heads", "head_dim", "ffn", "experts", "top_k", "expert_ffn"),
    *("mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups", "mamba_conv", "mamba_chunk", "max_sequence"),
)
QUANTIZATION_FIELDS: Final = ("quantization", "recipe", "amax_group", "cache_weights", "high_precision_layers")
_POSITIVE: Final = ("rope_base", "norm_eps", "init_std")
_COEFFICIENTS: Final = ("aux_loss", "z_loss", "mtp_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """Sizes and choices of a `HybridModel`; the defaults run in milliseconds on a CPU. PlanError (for the
    pattern PatternError, which is one) for what can't be.

    vocab: token ids, 256 for bytes. hidden: width of the residual stream. pattern: the layers, see `Pattern`.
    heads, kv_heads, head_dim: attention; `heads` queries share `kv_heads` keys and values evenly.
    ffn: inner width of the dense SwiGLU. experts, top_k, expert_ffn: of the MoE layers, each expert a SwiGLU.
    mamba_heads * mamba_head_dim is the inner width of Mamba-2 (its expansion, 2 * hidden as a rule); mamba_state: state
    size per channel; mamba_groups: heads of a group share B and C; mamba_conv: taps of the causal convolution;
    mamba_chunk: tokens that the scan treats as one block of matrix products.
    rope_base: base of the rotary frequencies. norm_eps: added to the mean square. max_sequence: longest input, tokens.
    tie_embeddings: the output layer uses the embedding's weight.
    attention: "math" is plain matrix products and a softmax, which repeat themselves bit for bit; "sdpa" is
    `scaled_dot_product_attention` with whatever kernel torch picks.
    shared_ffn: inner width of the SwiGLU that every token visits beside its experts; 0: there is none.
    recompute: "none"; "layer" keeps of every layer only its input and computes the rest again in the backward;
    "norm" does so for the norm in front of the experts alone, whose output is freed once they have run (a graph can't
    hold either, so these layers, or this norm and what reads it, are eager parts).
    expert_gemm: "loop" runs one expert after the other on as many rows as it got, counts read on the host; "grouped" runs
    all experts in two `torch.nn.functional.grouped_mm`, counts read on the device (bfloat16, widths in multiples of 8).
    aux_loss, z_loss: coefficients of the routers' load-balancing loss and z loss, which train in training mode without
    being part of the output's loss; router_statistics: count the rows per expert. mtp_loss: coefficient of the mean over
    the MTP depths' losses. What they come to stands in the model's `LayerTracker`.
    quantization: the linear layers of `M`, `*`, `-` and `E` (experts and shared expert too; not the router) in FP8, by
    "reference" (`graphcap.fp8_reference`, any device) or "te" (Transformer Engine, a GPU; widths and tokens of a microbatch
    in multiples of 16); None: in `dtype`. Such a model runs inside `model.autocast()`. recipe: a RefRecipe, or one of
    Transformer Engine's; None: the framework's default. amax_group: the process group over which amaxes are reduced; None:
    the default one. cache_weights: quantised weights are kept over the microbatches of a step, and every call says
    `is_first_microbatch`. high_precision_layers: physical numbers of main-stack layers that stay in `dtype`. With
    quantisation there is no recomputation, and `expert_gemm` stays "loop" ("te" runs its own grouped products).
    dtype: of weights and activations; the router, A_log, D, dt_bias and the scan stay in float32 (float64 in float64).
    init_std: standard deviation of the weights; projections into the residual get init_std / sqrt(number of layers).
    """

    vocab: int = 256
    hidden: int = 32
    pattern: str = "M[*E]M[*-]"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 64
    experts: int = 4
    top_k: int = 2
    expert_ffn: int = 32
    shared_ffn: int = 0
    recompute: Recompute = "none"
    mamba_heads: int = 8
    mamba_head_dim: int = 8
    mamba_state: int = 16
    mamba_groups: int = 2
    mamba_conv: int = 4
    mamba_chunk: int = 16
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    max_sequence: int = 256
    tie_embeddings: bool = False
    attention: Attention = "math"
    expert_gemm: ExpertGemm = "loop"
    aux_loss: float = 0.0
    z_loss: float = 0.0
    router_statistics: bool = False
    mtp_loss: float = 0.1
    quantization: Quantizer | None = None
    recipe: Any = None
    amax_group: Any = None
    cache_weights: bool = False
    high_precision_layers: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            self._check(name, "a whole number of at least 1", type(value) is int and value >= 1)
        for name in _POSITIVE:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            self._check(name, "a finite number above 0", number and 0 < value < float("inf"))
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            self._check(name, "a finite number, 0 or above", number and 0 <= value < float("inf"))
        self._check("router_statistics", "True or False", isinstance(self.router_statistics, bool))
        floats = (torch.bfloat16, torch.float32, torch.float64)
        self._check("dtype", "torch.bfloat16, torch.float32 or torch.float64", self.dtype in floats)
        self._check("attention", "'math' or 'sdpa'", self.attention in ("math", "sdpa"))
        self._check("shared_ffn", "a whole number of at least 0", type(self.shared_ffn) is int and self.shared_ffn >= 0)
        self._check("recompute", "'none', 'norm' or 'layer'", self.recompute in ("none", "norm", "layer"))
        self._check("expert_gemm", "'loop' or 'grouped'", self.expert_gemm in ("loop", "grouped"))
        if self.expert_gemm == "grouped":  # rows of 16 bytes, as CUTLASS wants them
            self._check("dtype", "torch.bfloat16 with expert_gemm='grouped'", self.dtype is torch.bfloat16)
            self._check("hidden", "a multiple of 8 with expert_gemm='grouped'", self.hidden % 8 == 0)
            self._check("expert_ffn", "a multiple of 8 with expert_gemm='grouped'", self.expert_ffn % 8 == 0)
        self._check("tie_embeddings", "True or False", isinstance(self.tie_embeddings, bool))
        self._check("kv_heads", f"a divisor of heads={self.heads}", self.heads % self.kv_heads == 0)
        self._check("head_dim", "an even number: rope turns pairs", self.head_dim % 2 == 0)
        self._check("top_k", f"at most experts={self.experts}", self.top_k <= self.experts)
        groups = f"a divisor of mamba_heads={self.mamba_heads}"
        self._check("mamba_groups", groups, self.mamba_heads % self.mamba_groups == 0)
        Pattern.parse(self.pattern)
        self._check_quantization()

    def _check_quantization(self) -> None:
        self._check("quantization", "None, 'reference' or 'te'", self.quantization in (None, "reference", "te"))
        self._check("cache_weights", "True or False", isinstance(self.cache_weights, bool))
        if self.quantization is None:
            for name, empty in zip(QUANTIZATION_FIELDS[1:], (None, None, False, ()), strict=True):
                self._check(name, f"{empty!r} without quantization", getattr(self, name) == empty)
            return
        numbers, layers = self.high_precision_layers, range(1, self.layers.physical_layers + 1)
        fits = isinstance(numbers, tuple) and all(type(number) is int and number in layers for number in numbers)
        self._check("high_precision_layers", f"a tuple of physical layer numbers, 1 to {len(layers)}", fits)
        again = "'none' with quantization: a forward that is computed again would collect its amaxes twice"
        self._check("recompute", again, self.recompute == "none")
        self._check("expert_gemm", "'loop' with quantization", self.expert_gemm == "loop")
        if self.quantization == "reference":
            known = self.recipe is None or isinstance(self.recipe, RefRecipe)
            self._check("recipe", "a RefRecipe with quantization='reference'", known)
            return
        self._check("dtype", "bfloat16 or float32 with quantization='te'", self.dtype is not torch.float64)
        for name, width in self._widths().items():
            self._check(name, f"{width} (a width of a product) a multiple of 16 with quantization='te'", width % 16 == 0)

    def _widths(self) -> dict[str, int]:
        """Of the products of each layer kind that the pattern has, by the field that a message can blame."""
        pattern = self.layers
        symbols = {layer.symbol for layer in pattern.layers} | set("".join(map(str, pattern.mtp or ())))
        found = {"hidden": self.hidden}
        if "*" in symbols:
            found["heads"] = self.heads * self.head_dim
            found["kv_heads"] = (self.heads + 2 * self.kv_heads) * self.head_dim
        if "-" in symbols:
            found["ffn"] = self.ffn
        if "E" in symbols:
            found |= {"expert_ffn": self.expert_ffn, "shared_ffn": self.shared_ffn}
        if "M" in symbols:
            projected = 2 * self.mamba_inner + 2 * self.mamba_groups * self.mamba_state + self.mamba_heads
            found |= {"mamba_head_dim": self.mamba_inner, "mamba_heads": projected}
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridConfig:
        """Itself: nothing in it changes, and a process group can't be copied."""
        return self

    @property
    def quant_spec(self) -> QuantSpec:
        """What `graphcap.capture(..., quantization=)` takes for a model of this config."""
        if self.quantization is None:
            return QuantSpec(enabled=False)
        recipe = RefRecipe() if self.recipe is None and self.quantization == "reference" else self.recipe
        return QuantSpec(recipe=recipe, group=self.amax_group, cache_weights=self.cache_weights)

    @property
    def first_microbatch(self) -> str:
        """What quantised models read besides, in the signature of a part: whether weights have changed."""
        return "" if self.quantization is None else ", is_first_microbatch"

    @property
    def first_microbatch_input(self) -> str:
        """The same among a layer's inputs, where it may be left out."""
        return f"{self.first_microbatch}=None" if self.first_microbatch else ""

    def _check(self, name: str, expected: str, holds: bool) -> None:
        if not holds:
            raise PlanError(f"HybridConfig({name}={getattr(self, name)!r}): expected {expected}")

    @classmethod
    def large(cls, pattern: str = "M[*E]" * 8, *, dtype: torch.dtype = torch.bfloat16) -> HybridConfig:
        """A real size, for a GPU: hidden 2048, 128 experts of which a token visits 8; 0.6e9 parameters per `E`."""
        return cls(
            pattern=pattern,
            vocab=131_072,
            hidden=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            ffn=8192,
            experts=128,
            top_k=8,
            expert_ffn=768,
            mamba_heads=64,
            mamba_head_dim=64,
            mamba_state=128,
            mamba_groups=8,
            mamba_chunk=128,
            rope_base=1_000_000.0,
            max_sequence=8192,
            dtype=dtype,
        )

    @property
    def layers(self) -> Pattern:
        """The pattern, parsed."""
        return Pattern.parse(self.pattern)

    @property
    def mamba_inner(self) -> int:
        """Inner width of a Mamba layer."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def exact_dtype(self) -> torch.dtype:
        """Of what is too delicate for bfloat16: router, scan, softmax, loss. At least float32."""
        return exact_dtype(self.dtype)

    @property
    def residual_std(self) -> float:
        """Standard deviation of the projections into the residual: the sum over all layers keeps its size."""
        return self.init_std / math.sqrt(max(1, self.layers.physical_layers))


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32. Not torch.promote_types: that is an operator, and a recorder would see it."""
    return torch.float64 if dtype == torch.float64 else torch.float32
