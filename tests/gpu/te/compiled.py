"""Layers whose inner functions torch compiles (NVTE_TORCH_COMPILE=1): python -m tests.gpu.te.compiled

Run by test_te_modules in a process of its own, since TE reads the variable when it is imported and since Dynamo, once it has
met a dispatch mode, runs a function uncompiled for the rest of the process.
"""

from __future__ import annotations

import os

os.environ["NVTE_TORCH_COMPILE"] = "1"
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"

# isort: off
import transformer_engine.pytorch  # noqa: F401  first: it must load its cuDNN before torch loads another

# isort: on
import torch
from torch._dynamo.utils import counters
from transformer_engine.pytorch import jit

from tests.gpu.te.kit import Case, train


def main() -> None:
    assert hasattr(jit.bias_gelu_fused_, "__wrapped__"), "TE does not compile here"
    wrong = 0
    for case in (Case("layernorm_mlp"), Case("transformer"), Case("transformer", dtype=torch.float32)):
        first = train(case, "none")
        compiled = counters["stats"]["unique_graphs"]
        runs = {"eager": train(case, "none"), "each": train(case, "each"), "whole": train(case, "whole")}
        runs["eager after capture"] = train(case, "none")
        for name, run in runs.items():
            found = run.differs(first)
            wrong += bool(found)
            print(f"{case} {name}: {len(found)} of {len(first.tensors)} differ {found[:4]}")
        print(f"{case}: {compiled} graphs compiled before the captures, {counters['stats']['unique_graphs']} after")
        assert compiled > 0
    print("equal" if not wrong else "DIFFERS")


if __name__ == "__main__":
    main()
