"""Whole models of transformers, unmodified, cut at their experts and at whatever else reads the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap.testing import compare, deterministic

transformers = pytest.importorskip("transformers")

VOCABULARY = 64


def mixtral(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
        output_router_logits=True,
    )
    return _built(transformers.MixtralForCausalLM, config, dtype)


def qwen3_moe(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        use_cache=False,
    )
    return _built(transformers.Qwen3MoeForCausalLM, config, dtype)


def granite(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        shared_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
        max_position_embeddings=64,
        use_cache=False,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
    )
    return _built(transformers.GraniteMoeHybridForCausalLM, config, dtype)


def _built(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model: nn.Module = kind(config).to(dtype)
    return model.train()


def tokens(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    drawn = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(index))
    return (), {"input_ids": drawn, "labels": drawn}


def padded(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same with an attention mask: the second sequence begins with padding, another length at every step."""
    args, kwargs = tokens(index)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, : 1 + index % 7] = 0
    return args, {**kwargs, "attention_mask": mask}


MODELS = {"mixtral": (mixtral, 2), "qwen3_moe": (qwen3_moe, 2), "granite": (granite, 2)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 20), (torch.bfloat16, 6)], ids=["fp32", "bf16"])
def test_equal_to_eager(name: str, dtype: torch.dtype, steps: int) -> None:
    build, _ = MODELS[name]
    with deterministic("cpu"):
        verdict = compare(
            lambda: build(dtype), tokens, steps=steps, backend="tape", break_at=("*.experts", "auto")
        )
    assert verdict, str(verdict)


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_eager_with_padding(name: str) -> None:
    build, _ = MODELS[name]
    with deterministic("cpu"):
        verdict = compare(build, padded, steps=20, backend="tape", break_at=("*.experts", "auto"))
    assert verdict, str(verdict)


@pytest.mark.parametrize("inputs", [tokens, padded])
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_more_than_experts(name: str, inputs: Any) -> None:
    """The mask is made in a plain function that reads the host; it runs before all graphs and costs none."""
    build, experts = MODELS[name]
    args, kwargs = inputs(0)
    plan = graphcap.capture(build(), args, kwargs, backend="tape", break_at=("*.experts", "auto")).plan
    assert (len(plan.breaks), plan.graphs) == (experts, experts + 1), str(plan)
    assert all(part.name.endswith("experts") for part in plan.breaks)
    assert all(part.reason for part in plan.breaks)
    # Which of the functions read the host depends on the arguments: position ids are asked whether sequences are packed,
    # a given mask whether it hides anything.
    hoisted = {
        ("granite", tokens): [],
        ("granite", padded): ["transformers.masking_utils.create_recurrent_attention_mask"],
    }
    packed = ["transformers.masking_utils.create_causal_mask"] if inputs is tokens else []
    assert [part.name for part in plan.hoisted] == hoisted.get((name, inputs), packed)
