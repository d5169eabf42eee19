"""Questions to an installed Transformer Engine on a GPU, answered in plain text: python -m tests.gpu.te.probe

What the adapter and the core build on (names, memory behind quantised weights, which attributes a forward changes, whether
a backward can run twice, which attention backend repeats itself), for a version that nobody has looked at yet.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

# isort: off
import transformer_engine.pytorch as te  # first: it must load its cuDNN before torch loads another

# isort: on
import torch
import transformer_engine
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

import graphcap
from graphcap import _guards
from graphcap.testing import deterministic

BF16 = torch.bfloat16


def ask(question: str, answer: Callable[[], Any]) -> None:
    print(f"\n== {question}", flush=True)
    try:
        found = answer()
        if found is not None:
            print(found)
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-3:]
        print(f"   !! {type(error).__name__}: {str(error)[:700]}")
        for frame in last:
            print(f"      {frame.filename.split('site/')[-1]}:{frame.lineno} {frame.name}: {frame.line}")
    finally:
        Manager.reset()
        gc.collect()
        torch.cuda.synchronize()


def delayed(**k: Any) -> Any:
    return recipes.DelayedScaling(**{"amax_history_len": 4, "amax_compute_algo": "most_recent", **k})


RECIPES = {"delayed": delayed, "current": recipes.Float8CurrentScaling, "block": recipes.Float8BlockScaling}


def x(rows: int = 64, width: int = 128, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda", dtype=dtype).requires_grad_()


def seq(dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(128, 2, 128, device="cuda", dtype=dtype).requires_grad_()


def modules(dtype: torch.dtype = BF16) -> dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]]:
    import transformer_engine.pytorch.ops as te_ops

    w = {"params_dtype": dtype}
    return {
        "Linear": (lambda: te.Linear(128, 128, **w), lambda: (x(dtype=dtype),)),
        "LayerNormLinear": (lambda: te.LayerNormLinear(128, 128, **w), lambda: (x(dtype=dtype),)),
        "LayerNormMLP": (lambda: te.LayerNormMLP(128, 256, **w), lambda: (x(dtype=dtype),)),
        "LayerNormMLP checkpoint": (lambda: te.LayerNormMLP(128, 256, checkpoint=True, **w), lambda: (x(dtype=dtype),)),
        "MultiheadAttention": (
            lambda: te.MultiheadAttention(128, 4, attention_dropout=0.0, fuse_qkv_params=True, **w),
            lambda: (seq(dtype),),
        ),
        "TransformerLayer": (
            lambda: te.TransformerLayer(
                128, 256, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **w
            ),
            lambda: (seq(dtype),),
        ),
        "GroupedLinear": (lambda: te.GroupedLinear(2, 128, 128, bias=False, **w), lambda: (x(dtype=dtype), [32, 32])),
        "ops.Sequential": (
            lambda: te_ops.Sequential(te_ops.Linear(128, 128, dtype=dtype)), lambda: (x(dtype=dtype),)
        ),
    }


def scope(name: str | None, **k: Any) -> Any:
    return nullcontext() if name is None else te.autocast(enabled=True, recipe=RECIPES[name](), **k)


def run(module: nn.Module, args: tuple[Any, ...], name: str | None, **k: Any) -> Any:
    with scope(name):
        y = module(*args, **k)
    y.backward(torch.ones_like(y))
    return y


# ------------------------------------------------------------------------------------------------------------ questions


def versions() -> str:
    free, total = torch.cuda.mem_get_info()
    found = f"torch {torch.__version__}, TE {transformer_engine.__version__}, python {sys.version.split()[0]}"
    return f"{found}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}, {free >> 20}/{total >> 20} MiB"


def adapter_names() -> str:
    from graphcap.adapters._te_names import names

    found = names()
    return f"version {found.version}, missing {found.state.missing()}, record {found.record_key!r}"


def quantised_weight(name: str) -> None:
    with te.quantized_model_init(enabled=True, recipe=RECIPES[name]()):
        m = te.Linear(128, 128, bias=False, params_dtype=BF16)
    w = m.weight
    print("type", type(w).__name__, "is Parameter", isinstance(w, nn.Parameter), "exactly", type(w) is nn.Parameter)
    print("data type", type(w.data).__name__, "detach", type(w.detach()).__name__, "layout", w.layout, "stride", w.stride())
    for what, get in {
        "data_ptr": lambda: w.data_ptr(),
        "untyped_storage": lambda: w.untyped_storage().data_ptr(),
        "_version": lambda: w._version,
        "nbytes": lambda: w.nbytes,
        "empty_like": lambda: type(torch.empty_like(w)).__name__,
        "zeros_like": lambda: type(torch.zeros_like(w)).__name__,
        "empty_like meta": lambda: type(torch.empty_like(w, device="meta")).__name__,
        "alias": lambda: type(nn.Parameter(w.detach())).__name__,
        "requires_grad_": lambda: w.requires_grad_(True).requires_grad,
    }.items():
        try:
            print("  ", what, get())
        except Exception as error:
            print("  ", what, "!!", type(error).__name__, str(error)[:150])
    print("   __dict__", {k: type(v).__name__ for k, v in vars(w).items()})

    def inner() -> dict[str, Any]:
        return {k: v.data_ptr() for k, v in vars(w).items() if isinstance(v, torch.Tensor)} | {
            "invalid": getattr(w, "_transpose_invalid", None), "usages": w.get_usages()
        }

    before = inner()
    run(m, (x(),), name)
    after = inner()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    optimizer.step()
    stepped = inner()
    run(m, (x(),), name)
    print("   fresh    ", before, "\n   forward  ", after, "\n   SGD step ", stepped, "\n   forward 2", inner())
    print("   grad type", type(w.grad).__name__, w.grad.dtype)


def changing_attributes(name: str | None) -> None:
    for kind, (make, args) in modules().items():
        Manager.reset()
        m = make()
        for first in (None, True, False):
            extra = {} if first is None or kind == "ops.Sequential" else {"is_first_microbatch": first}
            run(m, args(), name, **extra)
            before = _guards.plain_attributes([m])
            given = args()
            with scope(name):
                y = m(*given, **extra)
            after = _guards.plain_attributes([m])
            y.backward(torch.ones_like(y))
            seen = {}
            for key, (label, value) in after.items():
                if key not in before or before[key][1] != value:
                    owner = next((type(s).__name__ for s in m.modules() if id(s) == key[0]), "?")
                    seen[f"{owner}.{key[1]}{' (refused)' if label else ''}"] = str(value)[:60] if label else ""
            print(f"   {kind:24} first={first}: {seen or 'nothing'}")


def second_backward() -> None:
    for kind, (make, args) in modules().items():
        for name in (None, "delayed"):
            Manager.reset()
            m = make()
            with scope(name):
                y = m(*args())
            try:
                for _ in range(2):
                    seeds = [torch.ones_like(y)]
                    torch.autograd.grad([y], list(m.parameters()), seeds, retain_graph=True, allow_unused=True)
                print(f"   {kind:24} {name}: fine")
            except Exception as error:
                print(f"   {kind:24} {name}: {type(error).__name__} {str(error)[:100]}")


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_dispatch_mode() -> None:
    for kind, (make, args) in modules().items():
        for name in (None, "delayed", "current", "block"):
            if kind == "ops.Sequential" and name == "block":
                continue
            Manager.reset()
            m = make()
            try:
                with _Mode():
                    run(m, args(), name)
                print(f"   {kind:24} {name}: fine")
            except Exception as error:
                print(f"   {kind:24} {name}: {type(error).__name__} {str(error)[:120]}")


def attention_repeats() -> None:
    import transformer_engine.pytorch.attention.dot_product_attention as dpa

    for fused, unfused in (("1", "1"), ("0", "1")):
        os.environ |= {"NVTE_FUSED_ATTN": fused, "NVTE_UNFUSED_ATTN": unfused, "NVTE_FLASH_ATTN": "0"}
        for dtype in (BF16, torch.float32):
            dpa._attention_backends["backend_selection_requires_update"] = True
            found = []
            for _ in range(3):
                torch.manual_seed(1)
                m = te.MultiheadAttention(128, 4, attention_dropout=0.0, fuse_qkv_params=True, params_dtype=dtype)
                given = seq(dtype)
                y = run(m, (given,), None)
                found.append([y.detach(), given.grad, *(p.grad for p in m.parameters())])
            same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
            chosen = {k: v for k, v in dpa._attention_backends.items() if k.startswith("use") or k.startswith("fused")}
            print(f"   NVTE_FUSED_ATTN={fused} {dtype}: repeats itself {same}; {chosen}")
    for key in ("NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_FLASH_ATTN"):
        os.environ.pop(key, None)
    dpa._attention_backends["backend_selection_requires_update"] = True


def drop_in(capture: Any, what: str) -> None:
    """Three steps of two microbatches of the plain (BF16) drop-in against eager, for every kind of module."""
    for kind, (make, args) in modules().items():
        Manager.reset()
        sides = []
        try:
            for graphed in (False, True):
                torch.manual_seed(5)
                m = make()
                sample = args()
                if graphed:
                    capture(m, tuple(a for a in sample))
                optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
                out = []
                for step in range(3):
                    optimizer.zero_grad()
                    for microbatch in range(2):
                        torch.manual_seed(100 + 2 * step + microbatch)
                        given = args()
                        y = m(*given)
                        y.backward(torch.ones_like(y))
                        out += [y.detach().clone(), given[0].grad.clone()]
                    optimizer.step()
                sides.append([*out, *(p.detach().clone() for p in m.parameters())])
            same = [torch.equal(a, b) for a, b in zip(*sides, strict=True)]
            print(f"   {kind:24} {what}: {'equal' if all(same) else f'DIFFERS at {same.index(False)} of {len(same)}'}")
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"[{frame.filename.split('/')[-1]}:{frame.lineno}]"
            print(f"   {kind:24} {what}: {type(error).__name__} {str(error)[:400]} {where}")


def attention_choice() -> None:
    """The backend that TE takes in eager calls, and while it is told that a capture is in progress, by length."""
    from transformer_engine.pytorch import graph
    from transformer_engine.pytorch.utils import get_cudnn_version

    from tests.gpu.te.kit import attention_backend

    print("   cuDNN of TE", get_cudnn_version())
    for mask in ("no_mask", "causal", "padding"):
        for length in (32, 64, 96, 128, 192, 256):
            found = []
            for capturing in (False, True):
                m = te.DotProductAttention(4, 32, attention_dropout=0.0, attn_mask_type=mask)
                q = torch.randn(length, 2, 4, 32, device="cuda", dtype=BF16, requires_grad=True)
                more = {"max_seqlen_q": length, "max_seqlen_kv": length} if mask == "padding" else {}
                if mask == "padding":
                    ends = torch.tensor([0, length // 2, length], dtype=torch.int32, device="cuda")
                    more |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
                (graph.set_capture_start if capturing else graph.set_capture_end)()
                try:
                    m(q, q, q, **more)
                finally:
                    graph.set_capture_end()
                found.append(attention_backend())
            print(f"   {mask:8} length {length}: eager {found[0]}, capture {found[1]}")


def checkpoints() -> None:
    from tests.gpu.te.kit import Case, train

    for kind in ("checkpoint", "checkpoint_reentrant"):
        for name in (None, *RECIPES):
            Manager.reset()
            case = Case(kind, name)
            try:
                eager = train(case, "none")
                print(f"   {case} eager again: {train(case, 'none').differs(eager)[:3]}")
            except Exception as error:
                print(f"   {case} eager: {type(error).__name__} {str(error)[:300]}")
                continue
            for mode in ("whole", "each"):
                Manager.reset()
                try:
                    found = train(case, mode).differs(eager)
                    print(f"   {case} {mode}: {len(found)} of {len(eager.tensors)} differ {found[:4]}")
                except Exception as error:
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    where = f"[{frame.filename.split('/')[-1]}:{frame.lineno}]"
                    print(f"   {case} {mode}: {type(error).__name__} {str(error)[:500]} {where}")


def class_of_calls() -> None:
    """Which classes' prepare_forward is what the adapter replaces."""
    from graphcap.adapters._te_names import names

    base = names().base

    def below(kind: type) -> list[type]:
        return [kind, *(c for sub in kind.__subclasses__() for c in below(sub))]

    print("   own prepare_forward:", [c.__name__ for c in below(base) if "prepare_forward" in vars(c)])
    print("   own init_fp8_metadata:", [c.__name__ for c in below(base) if "init_fp8_metadata" in vars(c)])


def main() -> None:
    if sys.argv[1:]:  # the names of some questions
        for name in sys.argv[1:]:
            ask(name, globals()[name])
        return
    with deterministic("cuda"):
        ask("versions", versions)
        ask("names of the adapter", adapter_names)
        ask("who prepares forwards", class_of_calls)
        for name in RECIPES:
            ask(f"a quantised primary weight, {name}", lambda name=name: quantised_weight(name))
        for name in (None, "delayed", "current"):
            ask(f"attributes that a forward changes after the first, {name}", lambda name=name: changing_attributes(name))
        ask("a second backward through one forward", second_backward)
        ask("under a TorchDispatchMode", under_a_dispatch_mode)
        ask("attention against itself", attention_repeats)
        ask("attention, eager and captured", attention_choice)
        ask("TE's checkpoint", checkpoints)
        ask("TE's function against eager, BF16", lambda: drop_in(te.make_graphed_callables, "TE"))
        ask("the drop-in against eager, BF16", lambda: drop_in(graphcap.make_graphed_callables, "graphcap"))


if __name__ == "__main__":
    main()
