"""Small programs drawn at random and cut at random: what they may hold, and what may come of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphcap.config import CaptureConfig
from graphcap.errors import CutError, GraphcapError
from graphcap.testing import compare, deterministic
from tests.cut.cases import WIDTH, Break, drawn
from tests.cut.cases_crossing import Twice

Op = tuple[str, int, int]
ROWS = 4
# Drawn evenly; what is written twice comes more often.
KINDS = (
    "linear", "tanh", "add", "mul", "view", "narrow", "expand", "t", "detach", "break", "break2", "add_", "mul_", "setitem",
    "view_add_", "dropout", "no_grad", "function", "clone", "cast", "contiguous", "cat", "bn", "output", "sub", "scale",
    "break", "unbind", "checkpoint", "autocast", "buffer", "where", "nested", "pair", "inner_break",
    "loop", "keyword", "odd_results", "in_break_buffer", "shared_break", "tied", "raw_parameter", "parameter_view", "frozen",
    "index", "mask", "masked_fill_", "copy_", "relu_", "chunk_add_", "alias_add_", "detached_add_", "reduce", "softmax",
    "double", "half", "autocast_break", "grad_island", "fresh_leaf", "drop_module", "transpose", "squeeze", "out",
    "scalar", "unused_break", "checkpoint_break", "embedding", "other", "nothing_out", "state_out", "data_add_", "broadcast",
    "swap", "foreach_", "split_break", "view_across", "index_put_", "einsum", "norm_", "outer", "closure",
)  # fmt: skip
IN_PLACE = frozenset(kind for kind in KINDS if kind.endswith("_") or kind == "setitem")


@dataclass(frozen=True)
class Plan:
    """What is run, and how it is captured."""

    ops: tuple[Op, ...]
    break_at: Any = "*brk*"
    options: dict[str, Any] = field(default_factory=dict)


class Pair(Break):
    """Returns its argument, a view of it, or new tensors."""

    def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Any:
        return super().forward(x), x[:, :], torch.tanh(y) * scale


class Odd(Break):
    """Keyword arguments, None, and results in containers."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None, pair: tuple[Tensor, Tensor] | None = None) -> Any:
        made = super().forward(x)
        if mask is not None:
            made = made * mask
        if pair is not None:
            made = made + pair[0] - pair[1]
        return {"made": made, "nothing": None, "list": [made * 2, x], "name": "odd"}


class Counting(Break):
    """Changes a buffer of its own and returns it, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.seen.mul_(0.5).add_(x.detach().float().mean(0))
        return super().forward(x), self.seen, self.seen[:]


class Outer(nn.Module):
    """A module that holds a break and may be one itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.brk = nn.Linear(WIDTH, WIDTH), Break()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        made = self.brk(torch.tanh(self.first(x)))
        made = self.drop(made)
        return made if y is None else made + y


BREAK_AT: tuple[Any, ...] = ("*brk*", "*brk*", "*brk*", "*brk*", "auto", ("brk", "auto"), ("*brk*", Outer), "brk", Break)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"config": {"grads": "accumulate"}},
    {"config": {"outputs": "alias", "grads": "alias"}},
    {"order": "0F0 0F1 0B0 0B1"},
    {"order": "0F0 0F1 0I0 0I1 0W0 0W1"},
    {"order": "0F0 0F1 0B1 0F2 0B0 0B2"},
    {"grad_mode": False},
    {"config": {"recompute": "part"}},
    {"config": {"recompute": "part", "grads": "accumulate"}, "order": "0F0 0F1 0I0 0I1 0W0 0W1"},
)


def drawn_plan(seed: int) -> Plan:
    """A program and how it is cut, a function of the seed."""
    source = random.Random(seed)
    ops = tuple(
        (source.choice(KINDS), source.randrange(8), source.randrange(8)) for _ in range(source.randint(2, 12))
    )
    return Plan(ops, source.choice(BREAK_AT), source.choice(OPTIONS))


class Program(nn.Module):
    """Interprets a list of operations over a growing list of tensors; numbers choose operands."""

    def __init__(self, ops: tuple[Op, ...]) -> None:
        super().__init__()
        self.ops = ops
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.linears[0].weight
        self.brk, self.brk2, self.odd_brk, self.count_brk, self.outer = Break(), Pair(), Odd(), Counting(), Outer()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop, self.relu = nn.Dropout(0.3), nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.0, WIDTH))
        self.frozen = nn.Parameter(torch.linspace(-1, 1, WIDTH), requires_grad=False)
        self.table = nn.Embedding(8, WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: Tensor, *, y: Tensor, ids: Tensor) -> Any:
        values = [x, y, self.linears[0](x)]
        self_outputs: list[Any] = []
        for place, (kind, a, b) in enumerate(self.ops):
            if place == len(self.ops) // 2:
                values.append(self.brk(full(values[-1]) * 0.5))
            u, v = values[-1 - a % len(values)], values[-1 - b % len(values)]
            if kind == "output":
                self_outputs.append(u)
            elif kind == "nothing_out":
                self_outputs.append({"none": None, "u": [u, (v, "text")]})
            elif kind == "state_out":
                self_outputs.append((self.state, self.scale, self.state[:], x)[b % 4])
            elif kind == "swap":
                values[-1], values[0] = values[0], values[-1]
            else:
                if b < 7 and any(u is t for t in (x, y, self.scale, self.frozen)) and kind in IN_PLACE:
                    u = u * 1  # mostly not what is refused anyway
                made = self.step(kind, u, v, b, ids)
                values += made if isinstance(made, tuple) else [] if made is None else [made]
        last = self.linears[1](sum(full(value) * 0.3 for value in values[-4:]))
        return last, self_outputs

    def step(self, kind: str, u: Tensor, v: Tensor, b: int, ids: Tensor) -> Any:
        for group in (_plain, _views, _breaks, _modes, _state, _more):
            table = group(self, u, v, b, ids)
            if kind in table:
                return table[kind]()
        made = _in_place(self, u, v, b, ids)[kind]()
        return u if made is None else made


def full(u: Tensor) -> Tensor:
    """A float32 batch: a view where it can be one."""
    return u.float().expand(ROWS, WIDTH)


def _plain(m: Program, u: Tensor, v: Tensor, b: int, ids: Tensor) -> dict[str, Any]:
    return {
        "linear": lambda: m.linears[b % 2](u.float()),
        "tanh": lambda: u.tanh(),
        "add": lambda: u + v,
        "mul": lambda: torch.tanh(u * v),
        "sub": lambda: u - v,
        "scale": lambda: u * 0.5,
        "detach": lambda: u.detach(),
        "clone": lambda: u.clone(),
        "contiguous": lambda: u.contiguous(),
        "cat": lambda: torch.cat([full(u)[:2], full(v)[2:]]),
        "bn": lambda: m.norm(full(u)),
        "function": lambda: Twice.apply(u, v),
        "dropout": lambda: F.dropout(u, 0.3),
        "drop_module": lambda: m.drop(u),
        "where": lambda: torch.where(u > 0, u, v * 0.5),
        "cast": lambda: u.to(torch.bfloat16).float(),
        "double": lambda: u.double() if b % 2 else u.double().sin().float(),
        "half": lambda: (u.to(torch.bfloat16) * v.to(torch.bfloat16)) if b % 2 else u.to(torch.bfloat16),
        "reduce": lambda: (u.mean(-1, keepdim=True), u.sum(0, keepdim=True), u.max(-1, keepdim=True).values, u.sum())[b % 4]
        * 0.1,
        "softmax": lambda: u.softmax(-1) if b % 2 else F.layer_norm(full(u), (WIDTH,), m.scale),
        "scalar": lambda: u * v.detach().abs().mean() if b % 2 else u * v.mean(),
        "einsum": lambda: torch.einsum("ij,kj->ik", full(u), full(v)) @ full(v) * 0.05,
        "out": lambda: torch.add(u.detach(), 0.5, out=torch.empty_like(u.detach())),
    }


def _views(m: Program, u: Tensor, v: Tensor, b: int, ids: Tensor) -> dict[str, Any]:
    return {
        "view": lambda: u.contiguous().view(-1)[:WIDTH] if b % 2 else u[..., :],
        "narrow": lambda: u[:1],
        "expand": lambda: u[:1].expand(ROWS, WIDTH) if u.dim() == 2 else u.expand(ROWS, WIDTH),
        "t": lambda: full(u).t().t(),
        "transpose": lambda: full(u).t().contiguous().t() if b % 2 else full(u).t().reshape(ROWS, WIDTH),
        "squeeze": lambda: u.unsqueeze(0).squeeze(0) if b % 2 else u[None, :][0],
        "unbind": lambda: tuple(row * 1 for row in full(u).unbind(0)[:2]) if b % 2 else full(u).unbind(0)[:2],
        "pair": lambda: (torch.stack([full(u), full(v)]).sum(0), u[..., ::2].repeat(1, 2)[..., :WIDTH]),
        "broadcast": lambda: torch.broadcast_tensors(u, full(v))[0],
        "view_across": lambda: (view := full(u)[1:3], m.brk(full(v) * 0.5), full(view[:1]) * 2)[1:],
    }


def _breaks(m: Program, u: Tensor, v: Tensor, b: int, ids: Tensor) -> dict[str, Any]:
    def loop() -> Tensor:
        made = full(u)
        for _ in range(1 + b % 3):
            made = m.brk(made * 0.5)
        return made

    def odd() -> Any:
        mask = (full(v) > 0).to(u.dtype) if b % 2 else None
        pair = (full(v) * 0.5, full(u)) if b % 3 == 0 else None
        made = m.odd_brk(full(u) * 0.5, mask=mask, pair=pair)
        assert made["nothing"] is None and made["name"] == "odd"
        return made["made"], made["list"][b % 2]

    def unused() -> Tensor:
        m.brk2(full(u) * 0.5, v)
        return u * 1

    return {
        "break": lambda: m.brk(full(u) * 0.5),
        "break2": lambda: m.brk2(full(u) * 0.5, v),
        "nested": lambda: m.brk2(full(u) * 0.5, {"v": [v, None]}["v"][0])[b % 3],
        "inner_break": lambda: _without_grad(lambda: m.brk2(full(u) * 0.5, v)),
        "loop": loop,
        "keyword": lambda: m.brk2(x, y=v, scale=0.5)[b % 3] if (x := full(u) * 0.5) is not None else None,
        "odd_results": odd,
        "in_break_buffer": lambda: m.count_brk(full(u) * 0.5)[: 1 + b % 3],
        "shared_break": lambda: m.brk.linear(u.float()),
        "unused_break": unused,
        "outer": lambda: m.outer(full(u), v if b % 2 else None),
        "split_break": lambda: (m.brk(h), h) if (h := full(u) * 0.5) is not None and b % 2 else m.brk(full(u).detach()),
    }


def _without_grad(run: Any) -> Any:
    with torch.no_grad():
        return run()


def _modes(m: Program, u: Tensor, v: Tensor, b: int, ids: Tensor) -> dict[str, Any]:
    def no_grad() -> Tensor:
        with torch.no_grad():
            return u * 0.3 if b % 2 else m.brk(full(u) * 0.5)

    def island() -> Tensor:
        with torch.no_grad():
            h = u * 0.5
            with torch.enable_grad():
                return h + m.linears[0](v.float()) if b % 2 else m.brk(full(h) + m.scale)

    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = m.linears[b % 2](full(u))
            return (m.brk(made * 0.5) if b % 3 == 0 else made).float()

    def autocast_break() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = m.brk(m.linears[0](full(u)))
            with torch.autocast("cpu", enabled=False):
                made = made.float() @ m.linears[1].weight
            return made + m.brk(made) if b % 2 else made

    def recompute() -> Tensor:
        return checkpoint(lambda t: torch.sin(t * 0.5) * v + m.linears[b % 2](t.float()), u, use_reentrant=b % 3 == 0)

    def recompute_break() -> Tensor:
        return checkpoint(lambda t: m.brk(torch.sin(t)) if b % 2 else torch.sin(t) * t, full(u), use_reentrant=False)

    return {
        "no_grad": no_grad,
        "grad_island": island,
        "autocast": autocast,
        "autocast_break": autocast_break,
        "checkpoint": recompute,
        "checkpoint_break": recompute_break,
    }


def _in_place(m: Program, u: Tensor, v: Tensor, b: int, ids: Tensor) -> dict[str, Any]:
    def add() -> None:
        u.add_(0.5 if b % 2 else v[..., :1].detach().sum() * 0.1)

    def mul() -> None:
        nonlocal u
        u *= 0.5

    def setitem() -> None:
        u[..., 0] = v.detach().sum() * 0.1

    def view_add() -> None:
        u[..., ::2].add_(0.1)

    def chunk_add() -> Tensor:
        h = u * 1 if b % 2 else u
        first, second = h.chunk(2, -1) if b % 4 == 1 else (h[..., :4], h[..., 4:])
        first.add_(0.25)
        return torch.cat([second, first], -1)

    def alias_add() -> Tensor:
        view = u[..., :4]
        u.mul_(0.5)
        return u * 1 + F.pad(view, (0, 4))

    def detached_add() -> None:
        u.detach().add_(0.1)

    def data_add() -> None:
        u.data.mul_(0.5)

    def masked() -> None:
        u.masked_fill_(v.detach()[..., :1] > 0, 0.5)

    def copy() -> None:
        u.copy_(v if v.shape == u.shape else full(v)[0])

    def index_put() -> None:
        u[..., 1:3] = v[..., :2].detach() if b % 2 else v[..., 1:3]

    def foreach() -> None:
        torch._foreach_mul_([u], 0.5)

    def norm() -> Tensor:
        return u.clone().div_(u.detach().norm() + 1).add_(v)

    return {
        "add_": add,
        "mul_": mul,
        "setitem": setitem,
        "view_add_": view_add,
        "chunk_add_": chunk_add,
        "alias_add_": alias_add,
        "detached_add_": detached_add,
        "data_add_": data_add,
        "masked_fill_": masked,
        "copy_": copy,
        "relu_": lambda: m.relu(u if b % 2 else u * 1),
        "index_put_": index_put,
        "foreach_": foreach,
        "norm_": norm,
    }


def _state(m: Program, u: Tensor, v: Tensor, b: int, ids: Tensor) -> dict[str, Any]:
    def buffer() -> Any:
        m.state.add_(0.1)
        return (u + m.state, m.state[:]) if b % 2 else u * m.state

    return {
        "buffer": buffer,
        "tied": lambda: m.tied(u.float()),
        "raw_parameter": lambda: u * m.scale if b % 2 else m.scale,
        "parameter_view": lambda: m.linears[b % 2].weight.t()[:ROWS] * u,
        "frozen": lambda: u * m.frozen if b % 2 else m.frozen.expand(ROWS, WIDTH),
        "other": lambda: u * (1 if m.training else 2),
    }


def _more(m: Program, u: Tensor, v: Tensor, b: int, ids: Tensor) -> dict[str, Any]:
    def fresh_leaf() -> Tensor:
        return u.detach().requires_grad_(True) * v if b % 2 else torch.ones(WIDTH) * u

    def closure() -> Tensor:
        held = {"u": u}
        return m.brk(full(v) * 0.5) + held["u"]

    return {
        "index": lambda: full(u)[full(v).argmax(0) % ROWS][:ROWS],
        "mask": lambda: u * (v > 0),
        "embedding": lambda: m.table(ids) + u,
        "fresh_leaf": fresh_leaf,
        "closure": closure,
    }


def batch(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.randint(0, 8, (ROWS,), generator=torch.Generator().manual_seed(index + 77))
    return (drawn(index),), {"y": drawn(index + 1000, grad=False), "ids": ids}


# Nothing to compare: the program does not train. Those words end a verdict that proves nothing.
HARMLESS = ("were zero in every step", "no parameter ever got", "weights never moved", "not finite")
# Eager itself fails; there is no gradient to give; a path through a changed saved tensor that eager never takes; a parameter
# that is also an output, so that its buffer is not the only gradient; a buffer that recompute finds changed.
EXPECTED = (
    "the eager run",
    "pass one gradient",
    "modified by an inplace operation",
    "another tensor than the buffer",
    "changed between its forward and its backward",
)


def judged(plan: Plan) -> str:
    """What came of it; AssertionError where graphed and eager differ, or where the error is not one of ours."""
    torch.manual_seed(3)
    options = dict(plan.options)
    if "config" in options:
        options["config"] = CaptureConfig(**options["config"])
    try:
        with deterministic("cpu"):
            verdict = compare(
                lambda: Program(plan.ops),
                batch,
                steps=3,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                expect_no_grads=plan.options.get("grad_mode") is False,
                backend="tape",
                break_at=plan.break_at,
                **options,
            )
    except CutError as error:
        return f"refused: {str(error).splitlines()[0]}"
    except (GraphcapError, RuntimeError, ValueError, IndexError) as error:
        if not any(words in str(error) for words in EXPECTED):
            raise AssertionError(f"{plan}: {type(error).__name__}: {error}") from error
        return f"eager fails: {str(error).splitlines()[0]}"
    if not verdict and not any(words in str(verdict) for words in HARMLESS):
        raise AssertionError(f"{plan}: {verdict}")
    return "equal" if verdict else f"proves nothing: {verdict}"
