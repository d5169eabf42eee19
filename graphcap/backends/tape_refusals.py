"""What a graph can't hold: one row per entry, the same rows for the tape and for CUDA.

PyTorch's tags (`data_dependent_output`, `dynamic_output_shape`) are wrong both ways, hence a table. A row is looked up
by the name of the operator (`aten::index`) or of the Python call (`tolist`), and then asked with the arguments,
*before* anything runs: a host read inside a CUDA capture invalidates it.

Measured on an H200 (torch 2.11.0+cu130): captured are `x[long]`, `x[bool] = scalar`, `one_hot(i, n)`,
`repeat_interleave(output_size=)`, `multinomial`, float `cumsum`; refused are `x[bool]`, `one_hot(i)`, `bincount`,
`torch.tensor(list, device=)`, `linalg.inv`, `.cpu()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch


class DeviceView(Protocol):
    """Where the backend sees a tensor. The tape's tensors are all on the CPU, but seen as if they were on a GPU."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor would be in host memory."""

    def on_device(self, device: object) -> bool:
        """Whether a factory called with this `device=` (None: not given) makes a device tensor."""


Test = Callable[[tuple[Any, ...], Mapping[str, Any], DeviceView], bool]


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row. `operators` and `calls` are the names it is looked up by; `test` (None: always) sees the arguments."""

    name: str
    reason: str
    cure: str
    operators: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    test: Test | None = None

    def matches(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
        return self.test is None or self.test(args, kwargs, view)


# --- tests on arguments -----------------------------------------------------------------------------------------------


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def tensors_in(*trees: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments (nested at most in lists, tuples, dicts); several times faster than pytree."""
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            yield tree
        elif isinstance(tree, list | tuple):
            yield from tensors_in(*tree)
        elif isinstance(tree, Mapping):
            yield from tensors_in(*tree.values())


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _reads_by_mask(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    return any(_is_mask(index) for index in argument(args, kwargs, 1, "indices", ()))


def _writes_rows_by_mask(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    indices = [index for index in argument(args, kwargs, 1, "indices", ()) if index is not None]
    if not any(_is_mask(index) for index in indices):
        return False
    # torch turns `x[mask] = host scalar` into masked_fill_; everything else counts the mask's ones on the host.
    values = argument(args, kwargs, 2, "values")
    is_fill = len(indices) == 1 and values.numel() == 1 and view.is_host(values)
    return not is_fill or bool(argument(args, kwargs, 3, "accumulate", False))


def _counts_repeats(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    return kwargs.get("output_size") is None


def _guesses_classes(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    return int(argument(args, kwargs, 1, "num_classes", -1)) <= 0


def _differentiates(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args, kwargs))


def _to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    # A torch.device is not enough on the tape: `.to(x.device)` is innocent and says torch.device("cpu") there.
    named = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device)]
    return any(_names_host(value, view) for value in named) and any(not view.is_host(t) for t in tensors_in(args[:1]))


def _names_host(value: str | torch.device, view: DeviceView) -> bool:
    return str(value).startswith("cpu") and (isinstance(value, str) or not view.on_device(value))


def _from_host_data(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    data = argument(args, kwargs, 0, "data", argument(args, kwargs, 0, "obj"))
    if isinstance(data, torch.Tensor):
        return view.is_host(data) and view.on_device(kwargs.get("device", data.device))
    is_scalar = isinstance(data, bool | int | float | complex)
    device = kwargs.get("device")
    return view.on_device(device) and not (is_scalar and device is None)


def _new_from_host_data(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    device = kwargs.get("device")
    data = argument(args, kwargs, 1, "data")
    return not isinstance(data, torch.Tensor) and (view.on_device(device) if device is not None else True)


def _crosses(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    target, source = args[0], argument(args, kwargs, 1, "src")
    if not isinstance(source, torch.Tensor) or view.is_host(target) == view.is_host(source):
        return False
    pinned = bool(argument(args, kwargs, 2, "non_blocking", False)) and _all_pinned(target, source)
    return not pinned


def _all_pinned(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_pinned() for tensor in tensors if tensor.device.type == "cpu")


def _converts_across(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    device = kwargs.get("device")
    return device is not None and view.is_host(args[0]) == view.on_device(device)


def _indexes_from_host(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    indices = [index for index in argument(args, kwargs, 1, "indices", ()) if isinstance(index, torch.Tensor)]
    return not view.is_host(args[0]) and any(view.is_host(index) for index in indices)


def _is_pinned_factory(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    return bool(kwargs.get("pin_memory"))


def _counts_host_bins(args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView) -> bool:
    return float(argument(args, kwargs, 2, "min", 0)) == float(argument(args, kwargs, 3, "max", 0))


# --- the table --------------------------------------------------------------------------------------------------------

_HOST_READ = "the host would wait for a value of the device, and a replay never goes back to Python"
_DYNAMIC = "the shape of the result depends on values, and the shapes of a graph are fixed"
_COPY = "it copies between host and device, and a graph must not wait for either"

_AS_BREAK = "move it into an EAGER part (break_at=...)"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "scalar read",
        _HOST_READ,
        f"keep the value on the device (torch.where, masks, 0-dim tensors), or {_AS_BREAK}",
        operators=("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero"),
        calls=("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero"),
    ),
    Refusal(
        "host copy of values",
        _HOST_READ,
        f"keep the values on the device, or {_AS_BREAK}",
        calls=("tolist", "numpy", "__array__", "__dlpack__", "__format__", "__contains__"),
    ),
    Refusal(
        "printing a tensor",
        _HOST_READ,
        "print shapes and dtypes instead, or print after the step",
        calls=("__repr__", "__str__"),
    ),
    Refusal(
        "copying the tensor object",
        "deepcopy reads the storage behind the operators, so the copy would never be replayed",
        "use .clone(), or copy before the capture",
        calls=("__deepcopy__",),
    ),
    Refusal(
        "prod with a gradient",
        "its backward counts the zeros on the host, and under a recorder torch takes another formula, with other last "
        "bits than eager",
        f"write it as exp(sum(log(x))) or as a chain of products, or {_AS_BREAK}",
        calls=("prod", "cumprod", "cumprod_"),
        test=_differentiates,
    ),
    Refusal(
        "comparison on the host",
        _HOST_READ,
        f"compare on the device (x == y), or {_AS_BREAK}",
        operators=("aten::equal",),
        calls=("equal", "allclose"),
    ),
    Refusal(
        "move to the host",
        _COPY,
        f"keep the tensor on the device, or {_AS_BREAK}",
        calls=("to",),
        test=_to_host,
    ),
    Refusal("cpu()", _COPY, f"keep the tensor on the device, or {_AS_BREAK}", calls=("cpu",)),
    Refusal(
        "x[mask]",
        _DYNAMIC,
        f"use torch.where or a multiplication by the mask, or {_AS_BREAK}",
        operators=("aten::index",),
        test=_reads_by_mask,
    ),
    Refusal(
        "x[mask] = tensor",
        "the mask's ones would be counted on the host",
        f"use torch.where(mask, value, x) or masked_fill_, or {_AS_BREAK}",
        operators=("aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"),
        test=_writes_rows_by_mask,
    ),
    Refusal(
        "nonzero",
        _DYNAMIC,
        f"use the mask itself, nonzero_static(size=...), or {_AS_BREAK}",
        operators=("aten::nonzero", "aten::nonzero_numpy", "aten::argwhere"),
    ),
    Refusal(
        "masked_select",
        _DYNAMIC,
        f"use torch.where or a multiplication by the mask, or {_AS_BREAK}",
        operators=("aten::masked_select",),
    ),
    Refusal(
        "unique",
        _DYNAMIC,
        _AS_BREAK,
        operators=("aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"),
    ),
    Refusal(
        "bincount",
        "the number of bins is read from the values, even with minlength=",
        "use zeros(n).scatter_add_(0, index, ones) or one_hot(index, n).sum(0)",
        operators=("aten::bincount",),
    ),
    Refusal(
        "histc without a range",
        "min and max are read from the values",
        "give min= and max=",
        operators=("aten::histc",),
        test=_counts_host_bins,
    ),
    Refusal(
        "one_hot without num_classes",
        "the number of classes is read from the values",
        "use one_hot(index, num_classes)",
        operators=("aten::one_hot",),
        calls=("one_hot",),
        test=_guesses_classes,
    ),
    Refusal(
        "repeat_interleave(tensor)",
        "the length of the result is the sum of the repeats",
        f"give output_size=, or {_AS_BREAK}",
        operators=("aten::repeat_interleave",),
        test=_counts_repeats,
    ),
    Refusal(
        "tensor from host data",
        _COPY,
        "make it before the capture (a buffer), or on the device with arange, full, zeros",
        calls=("tensor", "as_tensor", "asarray"),
        test=_from_host_data,
    ),
    Refusal(
        "new_tensor from host data",
        _COPY,
        "make it before the capture (a buffer), or on the device with new_full, new_zeros",
        calls=("new_tensor",),
        test=_new_from_host_data,
    ),
    Refusal(
        "copy between host and device",
        _COPY,
        "keep both on the device (a scalar: fill_), or copy before the replay",
        operators=("aten::copy_", "aten::copy"),
        test=_crosses,
    ),
    Refusal(
        "conversion between host and device",
        _COPY,
        f"keep the tensor on the device, or {_AS_BREAK}",
        operators=("aten::_to_copy",),
        test=_converts_across,
    ),
    Refusal(
        "index from the host",
        _COPY,
        "keep the index on the device (a buffer)",
        operators=("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
        test=_indexes_from_host,
    ),
    Refusal(
        "checked linear algebra",
        "its error check reads a flag on the host",
        "use the form without the check (inv_ex, cholesky_ex, solve_ex, lu_factor_ex)",
        operators=("aten::_linalg_check_errors",),
    ),
    Refusal(
        "eigenvalues and least squares on the host",
        "part of the algorithm runs on the host",
        _AS_BREAK,
        operators=("aten::linalg_eig", "aten::_linalg_eigvals", "aten::linalg_eigvals", "aten::linalg_lstsq"),
    ),
    Refusal(
        "pinned memory",
        "pinning is a host operation that a graph can't hold",
        "pin before the capture",
        operators=("aten::_pin_memory", "aten::pin_memory"),
        calls=("pin_memory",),
    ),
    Refusal(
        "pinned factory",
        "pinning is a host operation that a graph can't hold",
        "make the pinned tensor before the capture",
        calls=("empty", "zeros", "ones", "full", "rand", "randn", "arange", "empty_like", "zeros_like"),
        test=_is_pinned_factory,
    ),
)


def _index(names: str) -> dict[str, tuple[Refusal, ...]]:
    table: dict[str, list[Refusal]] = {}
    for row in REFUSALS:
        for name in getattr(row, names):
            table.setdefault(name, []).append(row)
    return {name: tuple(rows) for name, rows in table.items()}


_BY_OPERATOR = _index("operators")
_BY_CALL = _index("calls")

# Operators that no row names but whose tag says that their shape or host value depends on data.
_DYNAMIC_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_BY_TAG = Refusal("data-dependent operator", _DYNAMIC, _AS_BREAK)


@cache
def _rows_of(func: torch._ops.OpOverload) -> tuple[tuple[Refusal, ...], bool]:
    """The rows that may forbid an operator; whether its tags would where no row names it."""
    rows = _BY_OPERATOR.get(func._schema.name, ())
    return rows, not rows and any(tag in func.tags for tag in _DYNAMIC_TAGS)


def refused_operator(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView
) -> Refusal | None:
    """The row that forbids this dispatched operator, if any. What happens on the host alone is none of our business."""
    rows, is_tagged = _rows_of(func)
    if not rows and not is_tagged:
        return None
    if all(view.is_host(tensor) for tensor in tensors_in(args, kwargs)) and "device" not in kwargs:
        return None
    if is_tagged:
        return _BY_TAG
    return next((row for row in rows if row.matches(args, kwargs, view)), None)


def refused_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], view: DeviceView
) -> Refusal | None:
    """The row that forbids this Python-level call, if any."""
    rows = _BY_CALL.get(getattr(func, "__name__", ""), ())
    if not rows:
        return None
    tensors = list(tensors_in(args, kwargs))
    all_host = bool(tensors) and all(view.is_host(tensor) for tensor in tensors)
    return next((row for row in rows if not (all_host and row.test is None) and row.matches(args, kwargs, view)), None)
