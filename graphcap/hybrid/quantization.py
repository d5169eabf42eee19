"""FP8 for the linear layers of the hybrid model: what the quantised layers of one model share, the context of each
physical layer, and the linear layers themselves.

"reference" is `graphcap.fp8_reference`, plain torch on any device. "te" is Transformer Engine, imported when the first
quantised layer is built: te.Linear, and for the routed experts te.GroupedLinear with splits that the host knows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcap import fp8_meta
from graphcap.errors import DeviceError, PlanError, StateError
from graphcap.fp8_meta import QuantizedState
from graphcap.fp8_reference import RefFp8Linear, RefManager
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.wgrad import DelayedLinear

ALIGNMENT = 16
"""FP8 products take rows in multiples of this; Transformer Engine's experts are padded to it."""

_NO_DELAY = (
    "weight gradients can't be delayed with quantization='te': Transformer Engine settles that when a module is built. "
    "Use quantization='reference', or leave weight gradients to the backward"
)


class Quantization:
    """What all quantised layers of one model share. A copied model has one of its own.

    manager: of the reference's state; None with "te", whose state is the process's. spec: under what the layers run.
    """

    def __init__(self, config: HybridConfig) -> None:
        self.config = config
        self.spec = config.quant_spec
        self.manager = RefManager() if config.quantization == "reference" else None

    @classmethod
    def of(cls, config: HybridConfig) -> Quantization | None:
        """None for a config without quantisation."""
        return None if config.quantization is None else cls(config)

    def state(self, module: nn.Module) -> QuantizedState | None:
        """Whoever keeps the state of the quantised layers under `module`; None where there are none."""
        own: Any = self.manager
        found: QuantizedState | None = own if own is not None else fp8_meta.find([module])
        return found

    def autocast(self) -> AbstractContextManager[None]:
        """The region in which quantised layers run; leaving it reduces forward amaxes."""
        if self.manager is not None:
            return self.manager.autocast(self.spec)
        te = transformer_engine()
        region: AbstractContextManager[None] = te.autocast(
            enabled=True, recipe=self.spec.recipe, amax_reduction_group=self.spec.group
        )
        return region

    def check_copy(self, model: nn.Module) -> None:
        """StateError where a copy of `model` would keep scales that nothing updates."""
        state = self.state(model) if self.manager is None else None
        if state is not None and any(map(state.is_registered, state.owners(model))):
            raise StateError(
                "a copy of a model whose Transformer Engine modules have run: they note where they are registered for "
                "reductions, and copies would take over the note but not the place. Build twice from one seed, or copy first"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantization:
        made = Quantization(self.config)
        if self.manager is not None:
            memo[id(self.manager)] = made.manager  # else the copied layers would stay with the old manager
        return made


@dataclass(frozen=True, slots=True)
class LayerContext:
    """How the linear layers of one physical layer compute. It goes by the physical number: brackets change nothing.

    mtp_depth: None in the main stack, else the depth, in which layers are numbered from 1 again. quantization: None for a
    layer in high precision.
    """

    layer_number: int
    mtp_depth: int | None = None
    quantization: Quantization | None = None

    @classmethod
    def of(
        cls, config: HybridConfig, layer_number: int, quantization: Quantization | None, mtp_depth: int | None
    ) -> LayerContext:
        """quantization: the model's; None: the layer is built by itself, and has its own."""
        if mtp_depth is None and layer_number in config.high_precision_layers:
            return cls(layer_number, mtp_depth)
        return cls(layer_number, mtp_depth, quantization or Quantization.of(config))

    @property
    def name(self) -> str:
        """In the names of states: `layers.<physical number>`, `mtp.<depth>.layers.<number>`."""
        inside = "" if self.mtp_depth is None else f"mtp.{self.mtp_depth}."
        return f"{inside}layers.{self.layer_number}"

    def require_region(self, layer: nn.Module) -> None:
        """StateError outside of an autocast region, where quantised layers would silently compute in high precision."""
        if self.quantization is None:
            return
        state = self.quantization.state(layer)
        if state is not None and not state.current().active:
            raise StateError(
                f"{self.name} ({type(layer).__name__}) is quantised and runs outside of an autocast region: call the model "
                "inside `with model.autocast():`, and capture it with quantization=model.config.quant_spec"
            )

    def register(self, module: nn.Module) -> None:
        """The reference's layers under `module` take part in reductions from here on, in this order, run or not: the ranks
        of a group must agree on what they reduce, and which experts get rows differs from rank to rank."""
        manager = None if self.quantization is None else self.quantization.manager
        if manager is not None:
            for owner in manager.owners(module):
                manager.prepare(owner, manager.current())

    def linear(self, weight: nn.Parameter) -> nn.Module:
        """y = x W^T for a weight [outputs, inputs], called with (x, is_first_microbatch)."""
        outputs, inputs = weight.shape
        if self.quantization is None:
            return DelayedLinear(inputs, outputs, weight)
        if self.quantization.manager is not None:
            return ReferenceLinear(weight, self.quantization)
        return _te_linear(weight)


class ReferenceLinear(RefFp8Linear):
    """The reference's linear layer on a given weight; weight gradients are delayed by `delayed_wgrad`."""

    def __init__(self, weight: nn.Parameter, quantization: Quantization) -> None:
        outputs, inputs = weight.shape
        assert quantization.manager is not None
        rows = quantization.spec.recipe.history_len
        # On meta first: its own initialisation would draw random numbers only to be overwritten.
        super().__init__(inputs, outputs, quantization.manager, history_len=rows, device="meta")
        self.weight = weight
        for name, buffer in list(self.named_buffers()):
            fill = 1.0 if name.startswith("scale") else 0.0
            setattr(self, name, torch.full(buffer.shape, fill, dtype=buffer.dtype, device=weight.device))

    @property
    def delayed(self) -> bool:
        """Whether weight gradients wait for `backward_dw`; see wgrad.py."""
        return self.delay_wgrad

    @delayed.setter
    def delayed(self, delayed: bool) -> None:
        self.delay_wgrad = delayed


class TeExperts(nn.Module):
    """All experts' SwiGLUs in two te.GroupedLinear; rows of an expert lie together and are padded to multiples of 16.

    `gate_up.weight<i>`, `down.weight<i>`: of expert i of this rank, [2 * inner, hidden] and [hidden, inner]. An expert
    without rows gets a gradient of zeros.
    """

    def __init__(self, gate_up: Sequence[nn.Parameter], down: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.gate_up, self.down = _te_grouped(gate_up), _te_grouped(down)
        self._set_padding(len(gate_up))

    def _set_padding(self, experts: int) -> None:
        te = transformer_engine()
        self.experts = experts
        self.pad, self.unpad = te.Fp8Padding(experts, ALIGNMENT), te.Fp8Unpadding(experts, ALIGNMENT)

    def keep(self, numbers: range) -> None:
        """Drop the experts that live on other ranks."""
        for name in ("gate_up", "down"):
            module = getattr(self, name)
            setattr(self, name, _te_grouped([getattr(module, f"weight{number}") for number in numbers]))
        self._set_padding(len(numbers))

    def forward(self, rows: Tensor, counts: Sequence[int], first: bool | None = None) -> Tensor:
        """rows: [R, hidden]; counts: rows per expert, on the host; their sum is R. Without any row the products run on rows
        of zeros: the modules must take part in the reductions of their group, which ranks with rows wait in."""
        if rows.shape[0] == 0:
            padding = [ALIGNMENT] + [0] * (self.experts - 1)
            return self.forward(F.pad(rows, (0, 0, 0, ALIGNMENT)), padding, first)[:0]
        splits = list(counts)
        padded, sizes = self.pad(rows, splits)
        gate, up = self.gate_up(padded, sizes, is_first_microbatch=first).chunk(2, dim=-1)
        made: Tensor = self.unpad(self.down(F.silu(gate) * up, sizes, is_first_microbatch=first), splits)
        return made


def transformer_engine() -> Any:
    """transformer_engine.pytorch; PlanError where it can't be loaded."""
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries
        raise PlanError(
            f"quantization='te' needs Transformer Engine, which can't be loaded here ({error}): install "
            "transformer-engine[pytorch] on a machine with a GPU, or use quantization='reference'"
        ) from error


def _te_linear(weight: nn.Parameter) -> nn.Module:
    te = transformer_engine()
    outputs, inputs = weight.shape
    made: nn.Module = te.Linear(inputs, outputs, bias=False, init_method=_leave, **_kind(weight))
    with torch.no_grad():
        made.get_parameter("weight").copy_(weight)
    made.delay_refused = _NO_DELAY  # type: ignore[assignment]
    return made


def _te_grouped(weights: Sequence[nn.Parameter]) -> nn.Module:
    te = transformer_engine()
    outputs, inputs = weights[0].shape
    made: nn.Module = te.GroupedLinear(len(weights), inputs, outputs, bias=False, init_method=_leave, **_kind(weights[0]))
    with torch.no_grad():
        for number, weight in enumerate(weights):
            made.get_parameter(f"weight{number}").copy_(weight)
    made.delay_refused = _NO_DELAY  # type: ignore[assignment]
    return made


def _kind(weight: nn.Parameter) -> dict[str, Any]:
    if weight.device.type != "cuda":
        raise DeviceError(
            f"quantization='te' on {weight.device}: Transformer Engine needs a GPU. Build the model under "
            "`with torch.device('cuda'):`, or use quantization='reference'"
        )
    return {"params_dtype": weight.dtype, "device": weight.device}


def _leave(weight: Tensor) -> Tensor:
    """In place of an initialisation, which would draw random numbers only to be overwritten."""
    return weight


def read_states(layer: nn.Module, context: LayerContext) -> Mapping[str, dict[str, Tensor]]:
    """Copies of scales and histories, by `<name of the context>.<linear layer>`."""
    state = None if context.quantization is None else context.quantization.state(layer)
    if state is None:
        return {}
    owners = set(state.owners(layer))
    named = ((name, module) for name, module in layer.named_modules() if module in owners)
    return {f"{context.name}.{name}": state.read(owner) for name, owner in named}
