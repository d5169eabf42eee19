"""The errors of graphcap.

    GraphcapError
    ├── PlanError (ValueError)            found before the device is touched
    │   ├── OrderError                    an order, a step, a count
    │   ├── CutError (RuntimeError)       a callable that can't be cut into parts as asked
    │   ├── PatternError                  a hybrid layer pattern
    │   ├── BucketError                   a dynamic policy
    │   ├── SampleError (TypeError)       sample arguments that can't be captured
    │   ├── ArgumentError (TypeError)     another argument of the wrong type
    │   └── ModuleError (RuntimeError, AssertionError)   a module that can't be captured as it is
    │       └── HookError                 hooks that capture would silence
    ├── CaptureError (RuntimeError)       found while warming up or recording; nothing is left behind
    │   ├── ForbiddenOpError              an operation that a graph can't hold
    │   └── WarmupError                   the warm-up runs failed or disagreed with each other
    ├── ReplayError (RuntimeError)        found at a call of the graphed object
    │   ├── InputMismatch (TypeError, ValueError)   what came is not what was captured
    │   ├── InFlightError                 the static buffers are still needed by an earlier forward
    │   ├── ReplayOrderError              a step out of its order
    │   └── ClosedError                   a call after close()
    ├── StateError (RuntimeError)         quantisation state, checkpoints, parameters that moved
    └── DeviceError (RuntimeError)        tensors on the wrong or on several devices

After a PlanError nothing has been touched. After a CaptureError everything is as before the call, and the same process
can capture again. After a ReplayError of the checks nothing has run; an InputMismatch found behind an eager part frees
the slot, and the next step is right.
Each class also derives from the builtin that torch or Transformer Engine raises at that place.
"""

from __future__ import annotations


class GraphcapError(Exception):
    """Base of every error that graphcap raises on purpose."""


class PlanError(GraphcapError, ValueError):
    """The request can't be planned; nothing has been touched."""


class OrderError(PlanError):
    """An order, a step or a count that makes no sense."""


class CutError(PlanError, RuntimeError):
    """A callable that can't be cut into graphed and eager parts as asked."""


class PatternError(PlanError):
    """A hybrid layer pattern that can't be read."""


class BucketError(PlanError):
    """A policy for dynamic shapes that makes no sense."""


class SampleError(PlanError, TypeError):
    """Sample arguments that can't be captured."""


class ArgumentError(PlanError, TypeError):
    """An argument, samples apart, of the wrong type."""


class ModuleError(PlanError, RuntimeError, AssertionError):
    """A module that can't be captured as it is. (TE raises RuntimeError at these places, torch AssertionError.)"""


class HookError(ModuleError):
    """Hooks that a captured module would silently skip."""


class CaptureError(GraphcapError, RuntimeError):
    """Recording failed; the state is as before the call."""


class ForbiddenOpError(CaptureError):
    """An operation that a graph can't hold (a host read, a data-dependent shape, a host-device copy)."""


class WarmupError(CaptureError):
    """The warm-up runs failed, or did not agree with each other."""


class ReplayError(GraphcapError, RuntimeError):
    """A call of the graphed object that can't be served."""


class InputMismatch(ReplayError, TypeError, ValueError):
    """An argument, mode or output differs from what was captured."""


class InFlightError(ReplayError):
    """The static buffers are still needed by an earlier forward."""


class ReplayOrderError(ReplayError):
    """A step that is not the next one of the order."""


class ClosedError(ReplayError):
    """The graphed object was closed."""


class StateError(GraphcapError, RuntimeError):
    """State that graphs depend on is not what they were captured with."""


class DeviceError(GraphcapError, RuntimeError):
    """Tensors on the wrong device, or on several."""
