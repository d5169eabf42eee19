"""One line per thing that a graph holds or can't hold, for both backends: the verdicts must be the same.

`row` names the entry of REFUSALS that must answer (None: captured). Every entry has at least one line.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Inputs:
    """x (4, 4) float, i (4,) long in 0..3, mask like x, v (4,) float, s 0-dim float; all on the device."""

    x: torch.Tensor
    i: torch.Tensor
    mask: torch.Tensor
    v: torch.Tensor
    s: torch.Tensor

    @staticmethod
    def on(device: torch.device) -> Inputs:
        x = torch.tensor(
            [[4.0, -1.0, 0.5, 2.0], [1.0, 5.0, -2.0, 0.25], [0.5, 1.0, 6.0, -1.0], [2.0, -0.5, 1.0, 7.0]],
            device=device,
        )
        i = torch.tensor([2, 0, 1, 1], device=device)
        return Inputs(x, i, x > 0, x[0].clone(), x[0, 0].clone())


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    run: Callable[[Inputs], object]
    row: str | None = None


def _read(name: str, run: Callable[[Inputs], object], row: str = "scalar read") -> Line:
    return Line(name, run, row)


LINES: tuple[Line, ...] = (
    Line("prod(0), with a gradient", lambda t: t.x.clone().requires_grad_(True).prod(0), "prod with a gradient"),
    Line("torch.prod, with a gradient", lambda t: torch.prod(t.x.clone().requires_grad_(True)), "prod with a gradient"),
    Line("cumprod, with a gradient", lambda t: t.x.clone().requires_grad_(True).cumprod(0), "prod with a gradient"),
    # --- captured ---
    Line("prod without a gradient", lambda t: t.x.prod(0)),
    Line("x[long]", lambda t: t.x[t.i]),
    Line("x[long] = tensor", lambda t: operator.setitem(t.x, t.i[:1], t.v)),
    Line("x[bool] = scalar", lambda t: operator.setitem(t.x, t.mask, 0.5)),
    Line("x[0] = scalar", lambda t: operator.setitem(t.x, 0, 0.5)),
    Line("x[0] = tensor", lambda t: operator.setitem(t.x, 0, t.v)),
    Line("masked_fill_", lambda t: t.x.masked_fill_(t.mask, 0.5)),
    Line("where", lambda t: torch.where(t.mask, t.x, -t.x)),
    Line("one_hot(i, n)", lambda t: F.one_hot(t.i, 4)),
    Line("repeat_interleave(output_size=)", lambda t: torch.repeat_interleave(t.x, t.i, 0, output_size=4)),
    Line("repeat_interleave(int)", lambda t: t.x.repeat_interleave(2, 0)),
    Line("multinomial", lambda t: torch.multinomial(t.x.abs(), 2)),
    Line("cumsum", lambda t: t.x.cumsum(0)),
    Line("topk", lambda t: t.x.topk(2)),
    Line("sort", lambda t: t.x.sort()),
    Line("scatter_add", lambda t: torch.zeros(4, device=t.x.device).scatter_add_(0, t.i, t.v)),
    Line("index_add", lambda t: torch.zeros_like(t.x).index_add_(0, t.i, t.x)),
    Line("embedding", lambda t: F.embedding(t.i, t.x)),
    Line("cross_entropy", lambda t: F.cross_entropy(t.x, t.i)),
    Line("inv_ex", lambda t: torch.linalg.inv_ex(t.x)),
    Line("cpu scalar operand", lambda t: t.x * torch.tensor(2.0)),
    Line("full", lambda t: torch.full((4,), 2.0, device=t.x.device)),
    Line("arange", lambda t: torch.arange(4, device=t.x.device) + t.i),
    Line(".to(dtype)", lambda t: t.x.to(torch.bfloat16)),
    Line(".to(x.device)", lambda t: t.x.to(t.x.device)),
    Line("shapes", lambda t: t.x.view(t.x.shape[0], -1) * len(t.x)),
    # --- refused ---
    _read("item", lambda t: t.s.item()),
    _read("bool", lambda t: bool(t.s)),
    _read("if", lambda t: 1 if t.s > 0 else 2),
    _read("int", lambda t: int(t.s)),
    _read("float", lambda t: float(t.s)),
    _read("complex", lambda t: complex(t.s)),
    _read("index", lambda t: [1, 2, 3, 4][t.i[0]]),
    _read("x[0-dim long]", lambda t: t.x[t.i[0]]),
    _read("is_nonzero", lambda t: torch.is_nonzero(t.s)),
    _read("tolist", lambda t: t.x.tolist(), "host copy of values"),
    _read("numpy", lambda t: t.x.numpy(), "host copy of values"),
    _read("np.asarray", lambda t: np.asarray(t.x), "host copy of values"),
    _read("dlpack", lambda t: torch.from_dlpack(t.x), "host copy of values"),
    _read("np.from_dlpack", lambda t: np.from_dlpack(t.x), "host copy of values"),
    _read("format", lambda t: f"{t.s:.2f}", "host copy of values"),
    _read("in", lambda t: 4.0 in t.x, "host copy of values"),
    _read("repr", lambda t: repr(t.x), "printing a tensor"),
    _read("str", lambda t: str(t.x), "printing a tensor"),
    _read("deepcopy", lambda t: copy.deepcopy(t.x), "copying the tensor object"),
    _read("equal", lambda t: torch.equal(t.x, t.x), "comparison on the host"),
    _read("allclose", lambda t: torch.allclose(t.x, t.x), "comparison on the host"),
    Line("to('cpu')", lambda t: t.x.to("cpu"), "move to the host"),
    Line("to(device='cpu')", lambda t: t.x.to(device="cpu"), "move to the host"),
    Line("cpu()", lambda t: t.x.cpu(), "cpu()"),
    Line("x[bool]", lambda t: t.x[t.mask], "x[mask]"),
    Line("x[:, bool]", lambda t: t.x[:, t.mask[0]], "x[mask]"),
    Line("x[bool] = tensor", lambda t: operator.setitem(t.x, t.mask[0], t.x[:2]), "x[mask] = tensor"),
    Line("x[bool] = device scalar", lambda t: operator.setitem(t.x, t.mask, t.s), "x[mask] = tensor"),
    Line("nonzero", lambda t: t.mask.nonzero(), "nonzero"),
    Line("where(mask)", lambda t: torch.where(t.mask), "nonzero"),
    Line("argwhere", lambda t: torch.argwhere(t.mask), "nonzero"),
    Line("masked_select", lambda t: torch.masked_select(t.x, t.mask), "masked_select"),
    Line("unique", lambda t: torch.unique(t.i), "unique"),
    Line("unique(dim)", lambda t: torch.unique(t.x, dim=0), "unique"),
    Line("unique_consecutive", lambda t: torch.unique_consecutive(t.i), "unique"),
    Line("bincount", lambda t: torch.bincount(t.i), "bincount"),
    Line("bincount(minlength=)", lambda t: torch.bincount(t.i, minlength=4), "bincount"),
    Line("histc()", lambda t: torch.histc(t.x, 4), "histc without a range"),
    Line("one_hot(i)", lambda t: F.one_hot(t.i), "one_hot without num_classes"),
    Line("repeat_interleave(tensor)", lambda t: torch.repeat_interleave(t.x, t.i, 0), "repeat_interleave(tensor)"),
    Line("tensor(list)", lambda t: torch.tensor([1.0, 2.0], device=t.x.device), "tensor from host data"),
    Line("tensor(scalar, device=)", lambda t: torch.tensor(1.0, device=t.x.device), "tensor from host data"),
    Line("as_tensor(list)", lambda t: torch.as_tensor([1, 2], device=t.x.device), "tensor from host data"),
    Line("as_tensor(numpy)", lambda t: torch.as_tensor(np.zeros(2), device=t.x.device), "tensor from host data"),
    Line("new_tensor", lambda t: t.x.new_tensor([1.0, 2.0]), "new_tensor from host data"),
    Line("v[0] = scalar", lambda t: operator.setitem(t.v, 0, 0.5), "copy between host and device"),
    Line("copy_(numpy)", lambda t: t.v.copy_(torch.from_numpy(np.zeros(4, "f"))), "copy between host and device"),
    Line(
        "from_numpy.to(device, dtype)",
        lambda t: torch.from_numpy(np.zeros(4)).to(t.x.device, torch.float32),
        "conversion between host and device",
    ),
    Line("x[numpy]", lambda t: t.x[torch.from_numpy(np.array([0, 1]))], "index from the host"),
    Line("inv", lambda t: torch.linalg.inv(t.x), "checked linear algebra"),
    Line("cholesky", lambda t: torch.linalg.cholesky(t.x @ t.x.t()), "checked linear algebra"),
    Line("solve", lambda t: torch.linalg.solve(t.x, t.v), "checked linear algebra"),
    Line("eig", lambda t: torch.linalg.eig(t.x), "eigenvalues and least squares on the host"),
    Line("pin_memory", lambda t: t.x.pin_memory(), "pinned memory"),
    Line("empty(pin_memory=)", lambda t: torch.empty(4, pin_memory=True), "pinned factory"),
)
