"""What an operator would return, without its values: for kernels that refuse the poison of an earlier capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphcap import _torch_private as private
from graphcap.backends.tape_memory import poison_byte


def fake_outputs(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> Any:
    """Poisoned results of the right shapes and strides; arguments that the operator writes are handed back as they are.

    Raises `error`, the kernel's own, where shapes alone already fail: then it was no matter of values.
    """
    mode = private.fake_mode()
    originals: dict[int, torch.Tensor] = {}

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        twin = private.to_fake(mode, leaf)
        originals[id(twin)] = leaf
        return twin

    with private.neutral_dispatch():
        try:
            fakes = pytree.tree_map(fake, (args, dict(kwargs)))
            with mode:
                outputs = func(*fakes[0], **fakes[1])
        except Exception as fake_error:
            error.add_note(f"graphcap: shapes alone fail as well ({type(fake_error).__name__}: {fake_error})")
            raise error from fake_error
        return pytree.tree_map(lambda leaf: _real(leaf, originals), outputs)


def _real(leaf: Any, originals: Mapping[int, torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if id(leaf) in originals:
        return originals[id(leaf)]
    real = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")
    storage = real.untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).fill_(poison_byte(real.dtype))
    return real
