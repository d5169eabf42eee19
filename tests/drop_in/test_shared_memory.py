"""Memory that graph sets use in turn: weak aliases of any form, and only where turns are taken."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphcap
from graphcap import _capture, _shared_memory
from graphcap import _torch_private as private
from graphcap.testing import deterministic
from tests.drop_in.chains import assert_chain_equal, captured

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
)
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "a part": lambda t: t[1:, ::2],
    "expanded": lambda t: t[:1].expand(5, 4),
    "scalar": lambda t: t[2, 3],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weak_alias_keeps_everything_but_the_memory(dtype: torch.dtype, form: str) -> None:
    base = torch.arange(12).reshape(3, 4).to(dtype).clone()
    tensor = FORMS[form](base)
    alias = _shared_memory.weak_alias(tensor)
    assert (alias.shape, alias.stride(), alias.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert alias.data_ptr() == tensor.data_ptr()
    assert torch.equal(alias.float() if dtype.itemsize == 1 else alias, tensor.float() if dtype.itemsize == 1 else tensor)
    del tensor
    assert private.storage_holders(base)[0] == private.storage_holders(torch.empty(1))[0]
    assert not alias.untyped_storage().resizable()


def test_a_weak_alias_of_a_conjugate() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    assert torch.equal(_shared_memory.weak_alias(tensor), torch.tensor([1 - 2j]))


TURNS = "0F0 0B0 1F0 1B0 0F1 0B1 1F1 1B1"  # two chunks that are never under way together


def plan_of(order: str, **options: Any) -> graphcap.CapturePlan:
    plan: graphcap.CapturePlan = captured(graphcap.Order.parse(order), [1, 1], **options)[1][0].plan
    return plan


def test_the_plan_says_who_shares_and_what_it_saves() -> None:
    with deterministic("cpu"):
        shared = plan_of(TURNS, _reuse_graph_input_output_buffers=True)
        apart = plan_of(TURNS)
    assert (shared.slots, apart.slots) == (1, 4)
    assert shared.static_bytes * 4 == apart.static_bytes == shared.static_bytes + shared.shared_bytes
    assert apart.shared_bytes == 0
    assert "saved by sharing)" in str(shared) and "slot 0: 0F0, 1F0, 0F1, 1F1" in str(shared)
    assert "saved" not in str(apart)


def test_gradients_that_are_handed_out_as_they_are_stay_apart() -> None:
    """clone_param_grads_on_return=False: valid until the next backward of the slot, whoever's forward comes first."""
    with deterministic("cpu"):
        layers, made = captured(
            graphcap.Order.parse(TURNS),
            [1, 1],
            _reuse_graph_input_output_buffers=True,
            clone_param_grads_on_return=False,
        )
        made[0](torch.ones(3, 4)).sum().backward()
        kept = layers[0].linear.weight.grad  # type: ignore[union-attr]
        copied = kept.clone()  # type: ignore[operator]
        made[2](torch.ones(3, 4))
        assert torch.equal(kept, copied)  # type: ignore[arg-type]


def test_one_pool_for_two_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape imitates a pool: what two microbatches in flight would do to each other shows as a difference."""
    order = graphcap.Order.parse("0F0 0F1 0B0 0F2 0B1 0B2")
    options: dict[str, Any] = {"_reuse_graph_input_output_buffers": True}
    with deterministic("cpu"):
        assert_chain_equal(order, [2], **options)
        one: dict[int, Any] = {}

        class OnePool(dict[int, Any]):
            def __contains__(self, key: object) -> bool:
                return bool(one)

            def __getitem__(self, key: int) -> Any:
                return one[0]

            def __setitem__(self, key: int, value: Any) -> None:
                one[0] = value

            def values(self) -> Any:
                return one.values()

        init = _capture.Recorder.__init__

        def patched(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.pools = OnePool()

        monkeypatch.setattr(_capture.Recorder, "__init__", patched)
        with pytest.raises(AssertionError):
            assert_chain_equal(order, [2], **options)


def test_nothing_holds_the_samples_after_capture() -> None:
    """Whoever drops the sample arguments has their memory back; so has what eager parts made in warm-up."""
    layer = torch.nn.Linear(4, 4)
    sample = torch.ones(3, 4, requires_grad=True)
    held = weakref.ref(sample)
    (made,) = graphcap.make_graphed_callables((layer,), ((sample,),), backend="tape")
    del sample
    gc.collect()
    assert held() is None
    assert made(torch.ones(3, 4)).sum().item() != 0


def test_layers_of_a_chunk_take_turns_where_gradients_arrive() -> None:
    """A chain of layers of one form has one buffer per microbatch in flight for arriving gradients, not one per layer."""
    with deterministic("cpu"):
        order = graphcap.Order.one_f_one_b(0, 2, 4)
        calls = captured(order, [3])[1]
    sets = [graph_set for unit_sets in calls[0]._runner.capture.sets for graph_set in unit_sets]
    arriving = {g.data_ptr() for graph_set in sets for part in graph_set.parts if part for g in part.grad_outputs}
    assert len(sets) == 3 * 4
    assert len(arriving) == len({calls[0].plan.pool_of(graph_set.slot) for graph_set in sets}) < len(sets)
