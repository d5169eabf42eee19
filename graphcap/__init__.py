"""graphcap: CUDA graph capture for models that can't be captured whole.

    graphed = graphcap.capture(model, (x,))     # records the static parts
    loss = graphed(x).loss                      # replays them; dynamic parts run as before
    loss.backward()

The graphed model computes what the eager model computes, bit for bit; or it says why not.
"""

import importlib
from types import ModuleType

from graphcap._graphed import Graphed
from graphcap._plan import CapturePlan
from graphcap._planned import ModelPlan, PlannedPart, plan
from graphcap._runner import Stats, disabled
from graphcap.config import CaptureConfig
from graphcap.errors import (
    ArgumentError,
    BucketError,
    CaptureError,
    ClosedError,
    CutError,
    DeviceError,
    ForbiddenOpError,
    GraphcapError,
    HookError,
    InFlightError,
    InputMismatch,
    ModuleError,
    OrderError,
    PatternError,
    PlanError,
    ReplayError,
    ReplayOrderError,
    SampleError,
    StateError,
    WarmupError,
)
from graphcap.make_graphed import capture, make_graphed_callables
from graphcap.order import Order, Phase, Step
from graphcap.partial_layer import EAGER, GRAPHED, PartialLayer, nested

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> ModuleType:
    """`graphcap.testing` and `graphcap.hybrid` without an import of their own, loaded when first asked for."""
    if name in ("testing", "hybrid"):
        return importlib.import_module(f"graphcap.{name}")
    raise AttributeError(f"module 'graphcap' has no attribute {name!r}")


__all__ = [
    "EAGER",
    "GRAPHED",
    "ArgumentError",
    "BucketError",
    "CaptureConfig",
    "CaptureError",
    "CapturePlan",
    "ClosedError",
    "CutError",
    "DeviceError",
    "ForbiddenOpError",
    "GraphcapError",
    "Graphed",
    "HookError",
    "InFlightError",
    "InputMismatch",
    "ModelPlan",
    "ModuleError",
    "Order",
    "OrderError",
    "PartialLayer",
    "PatternError",
    "Phase",
    "PlannedPart",
    "PlanError",
    "ReplayError",
    "ReplayOrderError",
    "SampleError",
    "StateError",
    "Stats",
    "Step",
    "WarmupError",
    "capture",
    "disabled",
    "make_graphed_callables",
    "nested",
    "plan",
]
