"""graphcap convert: layers by occurrence, between patterns and to and from a GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcap import GraphcapError, PatternError, StateError
from graphcap.cli import main
from graphcap.hybrid import GPTModel, HybridConfig, HybridModel, convert, load, save
from graphcap.hybrid.checkpoint import CONFIG_FILE, read_config, read_metadata, write
from graphcap.hybrid.keys import pieces_of
from graphcap.hybrid.model import HybridChunk

SIZES: dict[str, Any] = {"vocab": 64, "hidden": 16, "head_dim": 4, "mamba_head_dim": 4, "ffn": 24, "expert_ffn": 16}


def config_of(pattern: str) -> HybridConfig:
    return HybridConfig(pattern=pattern, max_sequence=32, init_std=0.2, **SIZES)


def model_of(pattern: str, seed: int = 1) -> HybridModel:
    torch.manual_seed(seed)
    return HybridModel(config_of(pattern))


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(7))
    return ids[:, :-1], ids[:, 1:]


def saved(pattern: str, folder: Path, steps: int = 0) -> tuple[HybridChunk, torch.optim.Optimizer]:
    model = model_of(pattern)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(*batch()).loss.backward()
        optimizer.step()
    save(model, folder, optimizer if steps else None)
    return model, optimizer


@pytest.mark.parametrize(
    ("source", "target"),
    [("*-*-", "[*-][*-]"), ("[*-][*E]M", "*-*EM"), ("M*-M*-", "[M*-]|[M*-]"), ("M*E/*-/*-", "[M*E]/*-/*-")],
)
def test_other_groups(source: str, target: str, tmp_path: Path) -> None:
    """The same layers in other groups: the same model, with other keys; the optimizer goes along."""
    model, optimizer = saved(source, tmp_path / "a", steps=2)
    done = convert(tmp_path / "a", tmp_path / "b", target)
    assert (done.source, done.target, done.made) == (source, target, 0)
    other = model_of(target, seed=2)
    theirs = torch.optim.AdamW(other.parameters())
    load(other, tmp_path / "b", theirs)
    for one, opt in ((model, optimizer), (other, theirs)):
        opt.zero_grad()
        one(*batch()).loss.backward()
        opt.step()
    assert torch.equal(model(*batch()).loss, other(*batch()).loss)
    assert read_config(tmp_path / "b") == config_of(target)
    convert(tmp_path / "b", tmp_path / "c", source)  # and back
    a, c = (set(read_metadata(tmp_path / name).state_dict_metadata) for name in "ac")
    assert a == c


def test_groups_of_parameters_go_along(tmp_path: Path) -> None:
    """By key, so that they are known again whatever the layers are called."""

    def optimizer_of(model: torch.nn.Module, inner: int) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": [], "lr": 0.1}, {"params": [], "lr": 0.2}]
        for name, parameter in model.named_parameters():
            groups[inner if name.startswith("decoder.") else 1 - inner]["params"].append(parameter)
        return torch.optim.AdamW(groups)

    model = model_of("M*-")
    optimizer = optimizer_of(model, 0)
    model(*batch()).loss.backward()
    optimizer.step()
    save(model, tmp_path / "a", optimizer)
    convert(tmp_path / "a", tmp_path / "b", "[M*-]")
    other = model_of("[M*-]", seed=2)
    load(other, tmp_path / "b", optimizer_of(other, 0))
    wrong = (
        r"decoder\.layers\.0\.self_attention\.linear_proj\.weight is in group 0 .*\n.*final_layernorm\.weight is in group 0"
    )
    with pytest.raises(StateError, match=f"(?s){wrong}"):
        load(other, tmp_path / "b", optimizer_of(other, 1))


@pytest.mark.parametrize(("source", "gpt"), [("*-*-", "[*-][*-]"), ("*E*E", "[*E][*E]"), ("**--", "[*-][*-]")])
def test_gpt_by_occurrence(source: str, gpt: str, tmp_path: Path) -> None:
    model, _ = saved(source, tmp_path / "hybrid")
    assert main(["convert", str(tmp_path / "hybrid"), str(tmp_path / "gpt"), "--to", "gpt"]) == 0
    twin = GPTModel(config_of(gpt))
    load(twin, tmp_path / "gpt")
    mine, theirs = pieces_of(model), pieces_of(twin)
    for symbols, part in (("*", "self_attention.linear_qkv.weight"), ("-E", "mlp.")):
        places = [layer.logical for layer in model.config.layers.layers if layer.symbol in symbols]
        for index, place in enumerate(places):
            names = [key for key in mine if key.startswith(f"decoder.layers.{place}.{part}")]
            assert names
            for key in names:
                renamed = key.replace(f"layers.{place}.", f"layers.{index}.")
                assert torch.equal(mine[key].published(), theirs[renamed].published())
    if source != "**--":
        assert torch.equal(model(*batch()).loss, twin(*batch()).loss)
    save(twin, tmp_path / "twin")
    assert main(["convert", str(tmp_path / "twin"), str(tmp_path / "back"), "--to", source]) == 0
    back = model_of(source, seed=3)
    load(back, tmp_path / "back")
    assert torch.equal(model(*batch()).loss, back(*batch()).loss)


def test_mamba_is_dropped_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("M*-M", tmp_path / "a", steps=1)
    call = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "gpt"]
    assert main(call) == 2
    assert "M*-M has 2 Mamba layers, [*-] has 0: expected as many: pass drop_mamba (--drop-mamba)" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    assert main([*call, "--drop-mamba"]) == 0
    twin = GPTModel(config_of("[*-]"))
    load(twin, tmp_path / "b", torch.optim.AdamW(twin.parameters()))
    assert "M*-M -> [*-]: " in capsys.readouterr().out


def test_mamba_is_made_anew(tmp_path: Path) -> None:
    """Drawn with the seed and nothing else; the rest is the source's; training with its optimizer goes on."""
    saved("[*-]", tmp_path / "a", steps=1)
    before = torch.random.get_rng_state()
    assert convert(tmp_path / "a", tmp_path / "b", "M*-M", seed=4).made == 2 * 9
    assert torch.equal(torch.random.get_rng_state(), before)
    convert(tmp_path / "a", tmp_path / "c", "M*-M", seed=4)
    first, second = model_of("M*-M", seed=5), model_of("M*-M", seed=6)
    optimizer = torch.optim.AdamW(first.parameters())
    load(first, tmp_path / "b", optimizer)
    load(second, tmp_path / "c")
    assert torch.equal(first(*batch()).loss, second(*batch()).loss)
    assert bool(first.get_parameter("decoder.layers.0.in_proj.weight").count_nonzero())
    first(*batch()).loss.backward()
    optimizer.step()


def test_a_source_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM writes none: the pattern is given."""
    model, _ = saved("*-", tmp_path / "a")
    (tmp_path / "a" / CONFIG_FILE).unlink()
    call = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "gpt"]
    assert main(call) == 1
    assert "give the pattern" in capsys.readouterr().err
    assert main([*call, "--from", "*-"]) == 0
    twin = GPTModel(config_of("[*-]"))
    load(twin, tmp_path / "b")
    assert torch.equal(twin(*batch()).loss, model(*batch()).loss)
    with pytest.raises(StateError, match="sizes of new Mamba layers"):
        convert(tmp_path / "a", tmp_path / "c", "M*-", pattern="*-")


# source, target, words
REFUSED = [
    ("*-*-", "*-", "has 2 attention layers, .* has 1"),
    ("*-", "*E", "would turn from '-' into 'E'"),
    ("M*-", "MM*-", "has 1 Mamba layers, .* has 2"),
    ("*-/*-", "gpt", "MTP layers differ between hybrid and GPT"),
    ("*-/*-", "*-", "different MTP layers"),
    ("*-*E", "gpt", "all dense or all experts"),
    ("**-", "gpt", "2 attention layers and 1 MLPs"),
    ("*-", "[*-", "without ']'"),
]


@pytest.mark.parametrize(("source", "target", "words"), REFUSED)
def test_refused(source: str, target: str, words: str, tmp_path: Path) -> None:
    saved(source, tmp_path / "a")
    with pytest.raises(PatternError, match=words):
        convert(tmp_path / "a", tmp_path / "b", target)
    assert not (tmp_path / "b").exists()


# the checkpoint's pattern, the one that is claimed, what to convert to, words
WRONG = [
    ("M*-", "*-", "[*-]", "layer 0: M, expected nothing"),
    ("*-*-", "*-*-*-", "gpt", "layer 4: nothing, expected \\*; layer 5: nothing, expected -"),
    ("*E", "*-", "[*-]", "layer 1: E, expected -"),
    ("*-", "*E", "[*E]", "layer 1: -, expected E"),
    ("[*-]", "*-", "gpt", "layer 0: -, expected nothing; layer 1: nothing, expected -"),
    ("*-/*-", "*-", "gpt", "1 MTP depths, expected 0"),
    ("*-/*-", "*-/*-/*-", "[*-]/*-/*-", "1 MTP depths, expected 2"),
]


@pytest.mark.parametrize(("pattern", "claimed", "to", "words"), WRONG)
def test_wrong_pattern_of_the_source(pattern: str, claimed: str, to: str, words: str, tmp_path: Path) -> None:
    """Layers that the checkpoint has and the pattern has not, or the other way round, or of another kind."""
    saved(pattern, tmp_path / "a")
    with pytest.raises(StateError, match=f"{words}.*is that the pattern of this checkpoint"):
        convert(tmp_path / "a", tmp_path / "b", to, pattern=claimed)
    assert not (tmp_path / "b").exists()


def test_not_over_another_checkpoint(tmp_path: Path) -> None:
    saved("*-", tmp_path / "a")
    write({"x": torch.ones(1)}, tmp_path / "b", None)
    with pytest.raises(GraphcapError, match="holds a checkpoint already"):
        convert(tmp_path / "a", tmp_path / "b", "[*-]")
