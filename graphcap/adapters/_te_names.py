"""The names of Transformer Engine (TE) that the adapter touches: looked up once; one error names all that are missing.

TE keeps the state of low-precision training in classes and globals that are not public and were renamed between 2.11 and
2.20 (pytorch/quantization.py, pytorch/graph.py, pytorch/module/base.py). Every such name stands in this file.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphcap.errors import StateError

OLDEST, NEWEST = (2, 11), (2, 20)

# Our name of a process-wide field: TE's, where they are fields of `quantization_state` (2.15 and later), and where they
# are attributes of the manager's class (before).
FIELDS = {
    "enabled": ("fp8_enabled", "FP8_ENABLED"),
    "calibrating": ("fp8_calibration", "FP8_CALIBRATION"),
    "recipe": ("fp8_recipe", "FP8_RECIPE"),
    "group": ("fp8_distributed_group", "FP8_DISTRIBUTED_GROUP"),
    "first": ("is_first_fp8_module", "IS_FIRST_FP8_MODULE"),
    "depth": ("autocast_depth", "AUTOCAST_DEPTH"),
    "amaxes": ("global_amax_buffer", "global_amax_buffer"),
    "histories": ("global_amax_history_buffer", "global_amax_history_buffer"),
    "scales": ("global_scale_buffer", "global_scale_buffer"),
    "arguments": ("autocast_arguments", "autocast_arguments"),
    "stashes": ("fp8_tensors_recompute_buffer", "fp8_tensors_recompute_buffer"),
    "flag": ("skip_fp8_weight_update_tensor", "skip_fp8_weight_update_tensor"),
}

_MANAGER_VERBS = (
    "add_fp8_tensors_to_global_buffer",
    "reduce_and_update_fp8_tensors",
    "get_buffer_info",
    "is_first_fp8_module",
    "reset",
)
_MODULE_VERBS = ("prepare_forward", "init_fp8_metadata", "adjust_amax_history_length")


class Globals:
    """TE's process-wide fields under one set of names (the keys of FIELDS), read and written where TE has them now.

    `FP8GlobalStateManager.reset()` replaces the object that holds them, so it is looked up at every access.
    """

    def __init__(self, manager: Any) -> None:
        object.__setattr__(self, "_manager", manager)
        object.__setattr__(self, "_is_object", hasattr(manager, "quantization_state"))

    def _place(self, name: str) -> tuple[Any, str]:
        new, old = FIELDS[name]
        return (self._manager.quantization_state, new) if self._is_object else (self._manager, old)

    def __getattr__(self, name: str) -> Any:
        if name not in FIELDS:
            raise AttributeError(name)
        return getattr(*self._place(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in FIELDS:
            raise AttributeError(name)
        holder, field = self._place(name)
        setattr(holder, field, value)

    def missing(self) -> list[str]:
        places = [self._place(name) for name in FIELDS]
        return [field for holder, field in places if not hasattr(holder, field)]


@dataclass(frozen=True, slots=True)
class Names:
    """TE as the adapter sees it. `graph`: its module of that name, which holds the process-wide capture switch. `jit`: the
    module of the functions that TE has torch compile. `attention_backends`: the last choice of one, kept by TE."""

    version: tuple[int, int]
    manager: Any
    state: Globals
    base: Any
    operation: Any
    fuser: Any
    attention: Any
    autocast: Callable[..., Any]
    graph: Any
    checkpoint_first: list[bool]
    attention_utils: Any
    attention_backends: dict[str, Any]
    jit: Any

    @property
    def record_key(self) -> str:
        """The key in `fp8_meta` under which a module notes that, and where, it is registered."""
        return str(self.manager.get_buffer_info())


@functools.cache
def names() -> Names:
    """Everything at once. Raises StateError with the version found and the names that are missing."""
    version = installed_version()
    require_version(version)
    try:
        found = _look_up(version)
    except (ImportError, AttributeError) as error:
        raise StateError(_unknown(version, str(error))) from error
    missing = found.state.missing()
    missing += [name for name in _MANAGER_VERBS if not hasattr(found.manager, name)]
    missing += [name for name in _MODULE_VERBS if not hasattr(found.base, name)]
    missing += [name for name in ("get_attention_backend",) if not hasattr(found.attention_utils, name)]
    if missing:
        raise StateError(_unknown(version, f"it lacks {', '.join(missing)}"))
    return found


def installed_version() -> tuple[int, int]:
    """(major, minor) of the installed TE."""
    for package in ("transformer_engine", "transformer-engine", "transformer_engine_cu13", "transformer_engine_cu12"):
        try:
            return parse_version(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return parse_version(str(getattr(importlib.import_module("transformer_engine"), "__version__", "")))


def parse_version(text: str) -> tuple[int, int]:
    """"2.20.0.dev0+abc" -> (2, 20)."""
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        raise StateError(f"Transformer Engine says that its version is {text!r}: expected major.minor") from None


def require_version(version: tuple[int, int]) -> None:
    """Older than 2.11 is refused; newer than the newest that was tried is looked at name by name."""
    if version < OLDEST:
        raise StateError(
            f"Transformer Engine {version[0]}.{version[1]} is not supported: its low-precision state is laid out otherwise "
            f"than in {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}. Install one of these"
        )


def _unknown(version: tuple[int, int], what: str) -> str:
    tried = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    return (
        f"Transformer Engine {version[0]}.{version[1]} is not what graphcap knows ({tried}): {what}. Its low-precision "
        "state can't be kept across a capture. Install one of these versions"
    )


def _look_up(version: tuple[int, int]) -> Names:
    root = "transformer_engine.pytorch"

    def module(name: str) -> Any:
        return importlib.import_module(f"{root}.{name}" if name else root)

    manager = module("quantization").FP8GlobalStateManager
    attention = module("attention.dot_product_attention.dot_product_attention")
    return Names(
        version=version,
        manager=manager,
        state=Globals(manager),
        base=module("module.base").TransformerEngineBaseModule,
        operation=module("ops.op").BasicOperation,
        fuser=module("ops.fuser").OperationFuser,
        attention=attention.DotProductAttention,
        autocast=module("").autocast,
        graph=module("graph"),
        checkpoint_first=module("distributed").activation_recompute_forward._is_first_fp8_module,
        attention_utils=module("attention.dot_product_attention.utils"),
        attention_backends=attention._attention_backends,
        jit=module("jit"),
    )


def compiled_functions(jit: Any) -> dict[str, Callable[..., Any]]:
    """The functions of TE's that torch.compile makes (none with NVTE_TORCH_COMPILE=0), by their name in `jit`. TE calls
    them through plain functions of the same module, which look them up at each call."""
    return {
        name: value
        for name, value in vars(jit).items()
        if name.endswith("_") and not name.startswith("_") and callable(value) and hasattr(value, "__wrapped__")
    }
