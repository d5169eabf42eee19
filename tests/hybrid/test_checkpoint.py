"""Checkpoints: the published keys, who can read whose, the optimizer's state, and that nothing is half loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcap import PatternError, PlanError, StateError, capture
from graphcap.hybrid import GPTModel, HybridConfig, HybridModel, MoELayer, convert, load, save
from graphcap.hybrid.checkpoint import CONFIG_FILE, read, read_config, read_metadata, write
from graphcap.hybrid.keys import expected_pieces, pieces_of

SIZES: dict[str, Any] = {"vocab": 64, "hidden": 16, "head_dim": 4, "mamba_head_dim": 4, "ffn": 24, "expert_ffn": 16}
GOLDEN = (Path(__file__).parent / "golden" / "converted_keys.txt").read_text(encoding="utf-8").split()


def config_of(pattern: str, **values: Any) -> HybridConfig:
    return HybridConfig(pattern=pattern, max_sequence=32, init_std=0.2, **(SIZES | values))


def model_of(pattern: str, seed: int = 1, **values: Any) -> HybridModel:
    torch.manual_seed(seed)
    return HybridModel(config_of(pattern, **values))


def gpt_of(pattern: str, seed: int = 1) -> GPTModel:
    torch.manual_seed(seed)
    return GPTModel(config_of(pattern))


def batch(seed: int = 7) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def adam(model: nn.Module, **values: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **values)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(*batch(seed)).loss.backward()
    optimizer.step()


def assert_same(first: nn.Module, second: nn.Module) -> None:
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)


def keys_in(folder: Path) -> set[str]:
    return set(read_metadata(folder).state_dict_metadata)


# ----------------------------------------------------------------------------------------------------------------- keys

# pattern, keys that are there, keys that are not
KEYS = [
    (
        "*-",
        ["decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.1.mlp.linear_fc1.weight"],
        ["decoder.final_layernorm.weight"],
    ),
    ("*-", ["decoder.final_norm.weight", "output_layer._extra_state"], ["decoder.layers.0.mlp.linear_fc1.weight"]),
    (
        "[*-]",
        ["decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"],
        ["decoder.layers.1.mlp.linear_fc1.weight"],
    ),
    ("[*-]", ["decoder.final_layernorm.weight"], ["decoder.final_norm.weight", "output_layer._extra_state"]),
    (
        "M[M*]-",
        [
            *("decoder.layers.0.mixer.in_proj.weight", "decoder.layers.1.mixer.in_proj.weight"),
            *("decoder.layers.1.self_attention.linear_proj.weight", "decoder.layers.2.mlp.linear_fc2.weight"),
        ],
        ["decoder.layers.3.mlp.linear_fc2.weight"],
    ),
    ("[*-][*-]|[*E][*E]", ["decoder.layers.2.mlp.router.weight"], ["decoder.layers.4.mlp.router.weight"]),
    ("[*E]", ["decoder.layers.0.pre_mlp_layernorm.weight"], ["decoder.layers.1.pre_mlp_layernorm.weight"]),
    ("*E", ["decoder.layers.1.pre_mlp_layernorm.weight"], ["decoder.layers.0.pre_mlp_layernorm.weight"]),
    (
        "M/*E/*E",
        ["mtp.layers.1.mtp_model_layer.layers.1.mlp.router.weight", "mtp.layers.0.eh_proj.weight"],
        ["mtp.layers.2.eh_proj.weight"],
    ),
]


@pytest.mark.parametrize(("pattern", "there", "absent"), KEYS)
def test_keys(pattern: str, there: list[str], absent: list[str], tmp_path: Path) -> None:
    save(model_of(pattern), tmp_path)
    keys = keys_in(tmp_path)
    assert set(there) <= keys
    assert not keys & set(absent)


def test_local_names_follow_the_modules() -> None:
    assert "decoder.layers.0.layers.1.mlp.gate_up.weight" in dict(model_of("[*-]").named_parameters())


@pytest.mark.parametrize("pattern", ["[*-]|*-", "*-|[*-]", "*-|*-"])
def test_every_stage_asks_the_whole_pattern(pattern: str) -> None:
    """Also a stage without a group publishes a transformer's keys, if another one has a group."""
    last = model_of(pattern).chunks()[-1]
    name = "decoder.final_layernorm.weight" if "[" in pattern else "decoder.final_norm.weight"
    assert name in pieces_of(last)


def test_what_is_expected_is_what_is_there() -> None:
    """Shapes, dtypes and keys of the model on the meta device, and no random number is drawn for it."""
    before = torch.random.get_rng_state()
    model = model_of("M[*E]-/*E", dtype=torch.bfloat16, shared_ffn=8)
    torch.random.set_rng_state(before)
    expected = expected_pieces(model.config)
    assert torch.equal(torch.random.get_rng_state(), before)
    mine = pieces_of(model)
    assert {k: (p.shape, p.parameter.dtype) for k, p in mine.items()} == {
        k: (p.shape, p.parameter.dtype) for k, p in expected.items()
    }


def test_layout_of_queries_keys_and_values() -> None:
    """For each key head: its queries, the key, the value."""
    model = model_of("*", heads=4, kv_heads=2, head_dim=2)
    weight = model.get_parameter("decoder.layers.0.qkv.weight")
    q, k, v = weight.detach().split((8, 4, 4))
    expected = torch.cat((q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]))
    piece = pieces_of(model)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert torch.equal(piece.published(), expected)
    back = torch.zeros_like(weight)
    piece.write(back, expected)
    assert torch.equal(back, weight)


@pytest.mark.parametrize("pattern", ["[MM*E]", "[**-]", "[M*M]"])
def test_colliding_patterns_are_no_patterns(pattern: str) -> None:
    with pytest.raises(PatternError, match="checkpoint keys"):
        config_of(pattern)


# ---------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("M*-E", {}),
        ("M[*E]|[*-]/*E/*E", {"shared_ffn": 8}),
        ("[M*-]", {"tie_embeddings": True}),
        ("[*E]", {"expert_gemm": "grouped", "dtype": torch.bfloat16}),
        ("", {}),
    ],
)
def test_round_trip(pattern: str, values: dict[str, Any], tmp_path: Path) -> None:
    saved, loaded = model_of(pattern, **values), model_of(pattern, seed=2, **values)
    save(saved, tmp_path)
    load(loaded, tmp_path)
    assert_same(saved, loaded)
    assert read_config(tmp_path) == saved.config


def test_stages_and_models_read_each_other(tmp_path: Path) -> None:
    model = model_of("M[*E]|M-|*-/*-")
    save(list(model.chunks()), tmp_path / "stages")
    save(model, tmp_path / "whole")
    assert keys_in(tmp_path / "stages") == keys_in(tmp_path / "whole")
    other = model_of("M[*E]|M-|*-/*-", seed=2)
    for chunk in other.chunks():  # as three ranks would, each for itself
        load(chunk, tmp_path / "whole")
    assert_same(model, other)
    whole = model_of("M[*E]|M-|*-/*-", seed=3)
    load(whole, tmp_path / "stages")
    assert_same(model, whole)


@pytest.mark.parametrize("pattern", ["[*-][*-]", "[*E][*E]", "[*-][*E]", "[*-]|[*E]"])
def test_cross_load(pattern: str, tmp_path: Path) -> None:
    """Save; GPT -> hybrid; hybrid -> GPT: keys both ways, values, forward."""
    hybrid, gpt = model_of(pattern), gpt_of(pattern, seed=2)
    save(hybrid, tmp_path / "hybrid")
    save(gpt, tmp_path / "gpt")
    assert keys_in(tmp_path / "hybrid") == keys_in(tmp_path / "gpt")
    from_gpt, from_hybrid = model_of(pattern, seed=3), gpt_of(pattern, seed=4)
    load(from_gpt, tmp_path / "gpt")
    load(from_hybrid, tmp_path / "hybrid")
    tokens, labels = batch()
    for mine, theirs in ((gpt, from_gpt), (hybrid, from_hybrid)):
        a, b = pieces_of(mine), pieces_of(theirs)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key].published(), b[key].published()) for key in a)
        assert torch.equal(mine(tokens, labels).loss, theirs(tokens, labels).loss)
        assert torch.equal(mine(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("pattern", ["*-", "[*-]M", "[M*-]", "[*-]/*-", ""])
def test_no_gpt(pattern: str) -> None:
    with pytest.raises(PatternError, match="one \\[\\*-\\] or \\[\\*E\\] per layer"):
        gpt_of(pattern)


def test_old_and_converted_checkpoints(tmp_path: Path) -> None:
    """A flat model's keys as they have always been, and a converter's output, which has weights alone."""
    model, other = model_of("M*-"), model_of("M*-", seed=2)
    pieces = pieces_of(model)
    assert set(pieces) == set(GOLDEN)
    write({key: pieces[key].published() for key in GOLDEN}, tmp_path / "converted", None)
    load(other, tmp_path / "converted")
    assert_same(model, other)
    save(model, tmp_path / "flat")
    assert keys_in(tmp_path / "flat") == {*GOLDEN, "output_layer._extra_state"}


@pytest.mark.parametrize("empty", [b"", None, torch.empty(0, dtype=torch.uint8)])
def test_extra_state_that_holds_nothing(empty: Any, tmp_path: Path) -> None:
    model = model_of("*-")
    entries = {key: piece.published() for key, piece in pieces_of(model).items()}
    write(entries | {"decoder.layers.1.mlp.linear_fc1._extra_state/shard_0_1": empty}, tmp_path, None)
    load(model_of("*-", seed=2), tmp_path)


def test_extra_state_that_holds_something(tmp_path: Path) -> None:
    model = model_of("*-")
    entries = {key: piece.published() for key, piece in pieces_of(model).items()}
    write(entries | {"decoder.layers.1.mlp.linear_fc1._extra_state": torch.ones(3)}, tmp_path, None)
    with pytest.raises(StateError, match=r"linear_fc1\._extra_state holds the state of a quantised module"):
        load(model, tmp_path)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_all_differences_at_once_and_nothing_written(tmp_path: Path) -> None:
    model = model_of("*-")
    entries: dict[str, Any] = {key: piece.published() for key, piece in pieces_of(model).items()}
    del entries["decoder.layers.1.mlp.linear_fc2.weight"]
    entries["decoder.final_norm.weight"] = torch.ones(17)
    entries["output_layer.weight"] = entries["output_layer.weight"].to(torch.bfloat16)
    entries["decoder.layers.7.mixer.D"] = torch.ones(8)
    write(entries, tmp_path, None)
    target = model_of("*-", seed=2)
    before = copy.deepcopy(target)
    with pytest.raises(StateError) as caught:
        load(target, tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert sorted(map(str.strip, lines)) == [
        "decoder.final_norm.weight: shape [17] in the checkpoint, [16] in the model",
        "missing: decoder.layers.1.mlp.linear_fc2.weight [16, 24]",
        "output_layer.weight: torch.bfloat16 in the checkpoint, torch.float32 in the model",
        "unexpected: decoder.layers.7.mixer.D",
    ]
    assert_same(before, target)


@pytest.mark.parametrize("how", ["cut", "noise", "gone"])
def test_a_damaged_file_leaves_the_model(how: str, tmp_path: Path) -> None:
    model = model_of("*-")
    save(model, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    if how == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "noise":
        file.write_bytes(bytes(file.stat().st_size))
    else:
        file.unlink()
    target = model_of("*-", seed=2)
    before = copy.deepcopy(target)
    with pytest.raises(StateError, match="nothing has been loaded"):
        load(target, tmp_path)
    assert_same(before, target)


def test_no_pickled_code_is_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    entries: dict[str, Any] = {key: piece.published() for key, piece in pieces_of(model_of("*-")).items()}
    write(entries | {"output_layer._extra_state": Touch(ran)}, tmp_path / "planted", None)
    with pytest.raises(StateError, match="could not be read"):
        load(model_of("*-"), tmp_path / "planted")
    assert not ran.exists()


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


DAMAGED = {"empty": b"", "text": b"garbage bytes", "bytes": bytes(range(256)), "other": b"}.", "class": b"cnot_there\nX\n."}


@pytest.mark.parametrize("metadata", [None, *DAMAGED.values()], ids=["none", *DAMAGED])
def test_no_checkpoint(metadata: bytes | None, tmp_path: Path) -> None:
    if metadata is not None:
        (tmp_path / ".metadata").write_bytes(metadata)
    for attempt in (lambda: load(model_of("*-"), tmp_path), lambda: convert(tmp_path, tmp_path / "b", "[*-]", pattern="*-")):
        with pytest.raises(StateError, match="no checkpoint that can be read"):
            attempt()


def test_not_over_another_one(tmp_path: Path) -> None:
    save(model_of("*-"), tmp_path)
    with pytest.raises(StateError, match="holds a checkpoint already"):
        save(model_of("*-", seed=2), tmp_path)


def test_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="expected a HybridModel"):
        save(nn.Linear(2, 2), tmp_path)


# ------------------------------------------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize("gemm", ["loop", "grouped"])
def test_training_goes_on_where_it_stopped(gemm: str, tmp_path: Path) -> None:
    more = {"expert_gemm": "grouped", "dtype": torch.bfloat16} if gemm == "grouped" else {}
    model = model_of("M[*E]-/*-", experts=8, **more)
    optimizer = adam(model, lr=0.01)
    for seed in range(3):
        step(model, optimizer, seed)
    save(model, tmp_path, optimizer)
    other = model_of("M[*E]-/*-", seed=2, experts=8, **more)
    theirs = adam(other, lr=1.0)
    step(other, theirs, 9)  # state that must go, also that of experts which the saved model has none for
    load(other, tmp_path, theirs)
    assert theirs.param_groups[0]["lr"] == 0.01
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, theirs, seed)
    assert_same(model, other)


@pytest.mark.parametrize("to_gpt", [True, False])
@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("[*-][*-]", {}),
        ("[*E][*-]", {"shared_ffn": 8, "experts": 8}),
        ("[*E]", {"tie_embeddings": True}),
        ("[*E]|[*E]", {"expert_gemm": "grouped", "dtype": torch.bfloat16}),
    ],
)
def test_optimizer_state_crosses_to_the_gpt_and_back(
    pattern: str, values: dict[str, Any], to_gpt: bool, tmp_path: Path
) -> None:
    """Both ways; training goes on alike."""
    torch.manual_seed(2)
    models: list[nn.Module] = [model_of(pattern, **values), GPTModel(config_of(pattern, **values))]
    source, target = models if to_gpt else models[::-1]
    optimizer, theirs = adam(source), adam(target)
    for seed in (0, 1):
        step(source, optimizer, seed)
    save(source, tmp_path, optimizer)
    load(target, tmp_path, theirs)
    for seed in (2, 3):
        step(source, optimizer, seed)
        step(target, theirs, seed)
    a, b = pieces_of(source), pieces_of(target)  # type: ignore[arg-type]
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key].published(), b[key].published()) for key in a)


def test_optimizer_refusals(tmp_path: Path) -> None:
    model = model_of("*-")
    save(model, tmp_path / "weights")
    with pytest.raises(StateError, match="the checkpoint has no optimizer state"):
        load(model, tmp_path / "weights", adam(model))
    optimizer = adam(model)
    step(model, optimizer, 0)
    save(model, tmp_path / "both", optimizer)
    load(model, tmp_path / "both")  # weights alone
    with pytest.raises(StateError, match="of AdamW, expected SGD"):
        load(model, tmp_path / "both", torch.optim.SGD(model.parameters()))
    halves = [list(model.embedding.parameters()), list(model.decoder.parameters())]  # type: ignore[union-attr]
    groups = [{"params": part, "lr": 0.1} for part in halves]
    with pytest.raises(StateError, match="1 in the checkpoint, 2 in the optimizer"):
        load(model, tmp_path / "both", torch.optim.AdamW(groups))
    odd = torch.optim.Adafactor(model.parameters())
    step(model, odd, 1)
    with pytest.raises(StateError, match="can't be saved by key"):
        save(model, tmp_path / "odd", odd)


def two_groups(model: nn.Module, decoder_first: bool, **values: Any) -> torch.optim.Optimizer:
    inner = list(model.decoder.parameters())  # type: ignore[union-attr,operator]
    outer = [p for name, p in model.named_parameters() if not name.startswith("decoder.")]
    groups = [{"params": inner, "lr": 0.2}, {"params": outer, "lr": 0.1}]
    return torch.optim.AdamW(groups if decoder_first else groups[::-1], **values)


@pytest.mark.parametrize("twin", [False, True])
def test_parameters_stay_in_their_groups(twin: bool, tmp_path: Path) -> None:
    """A learning rate must not reach other parameters because the groups came in another order."""
    model = model_of("[*-]")
    optimizer = two_groups(model, True)
    step(model, optimizer, 0)
    save(model, tmp_path, optimizer)
    other: nn.Module = gpt_of("[*-]", seed=2) if twin else model_of("[*-]", seed=2)
    before = copy.deepcopy(other)
    with pytest.raises(
        StateError, match=r"output_layer\.weight is in group 1 in the checkpoint, in group 0 in the optimizer"
    ):
        load(other, tmp_path, two_groups(other, False))
    assert_same(before, other)
    theirs = two_groups(other, True)
    load(other, tmp_path, theirs)
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(other, theirs, seed)
    a, b = pieces_of(model), pieces_of(other)  # type: ignore[arg-type]
    assert all(torch.equal(a[key].published(), b[key].published()) for key in a)


def test_chunks_are_loaded_one_by_one_with_one_optimizer(tmp_path: Path) -> None:
    """Each load writes the state of its own parameters, and leaves that of others alone."""
    model, other = model_of("*E|*-"), model_of("*E|*-", seed=2)
    optimizer, theirs = adam(model), adam(other)
    step(model, optimizer, 0)
    save(model.chunks(), tmp_path, optimizer)
    for chunk in other.chunks():
        load(chunk, tmp_path, theirs)
    assert len(theirs.state) == len(optimizer.state) > 0
    step(model, optimizer, 1)
    step(other, theirs, 1)
    assert_same(model, other)


def test_state_that_would_be_lost(tmp_path: Path) -> None:
    """Of parameters that no key stands for, or hyperparameters that can't be read back."""
    model = model_of("*|-")
    extra = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([*model.parameters(), extra])
    step(model, optimizer, 0)
    save(model, tmp_path / "without state", optimizer)
    extra.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(StateError, match=r"state of 1 parameters .*shapes \[3\].* would be lost"):
        save(model, tmp_path / "lost", optimizer)
    with pytest.raises(StateError, match="save all chunks that it trains together"):
        save(model.chunks()[0], tmp_path / "lost", optimizer)
    optimizer = adam(model)
    optimizer.param_groups[0]["name"] = Path("decoder")
    with pytest.raises(StateError, match=r"AdamW's name=.*Path\('decoder'\) of parameter group 0 .* is not read back"):
        save(model, tmp_path / "lost", optimizer)
    assert not (tmp_path / "lost").exists()


def test_what_nobody_could_load_is_not_saved(tmp_path: Path) -> None:
    """A stage alone, where no rank holds the rest; two models' chunks; two chunks with a parameter each for one key."""
    model, other = model_of("*E|-/*E"), model_of("*E|-/*E", seed=2)
    for chunk, key in zip(model.chunks(), ("decoder.final_norm.weight", "decoder.layers.0"), strict=True):
        with pytest.raises(StateError, match=rf"keys of the model \('\*E\|-/\*E'\) are held by no rank .*{key}"):
            save(chunk, tmp_path / "stage")
    with pytest.raises(PlanError, match="chunks of several models"):
        save([model.chunks()[0], model_of("*E|-").chunks()[1]], tmp_path / "stage")
    mixed = [model.chunks()[0], other.chunks()[1]]  # the last one holds the embedding too, for MTP
    for use in (save, load):
        with pytest.raises(StateError, match=r"a parameter of their own for embedding\.word_embeddings\.weight"):
            use(mixed, tmp_path / "stage")
    assert not (tmp_path / "stage").exists()


@pytest.mark.parametrize(
    ("pattern", "here", "there"),
    [
        ("*-", {"heads": 4, "kv_heads": 2, "head_dim": 4}, {"heads": 8, "kv_heads": 4, "head_dim": 2}),
        ("M-", {"mamba_groups": 2, "mamba_state": 16}, {"mamba_groups": 1, "mamba_state": 32}),
        ("-/*", {"heads": 4, "kv_heads": 2, "head_dim": 4}, {"heads": 8, "kv_heads": 4, "head_dim": 2}),
    ],
)
def test_the_same_shapes_of_another_layout(
    pattern: str, here: dict[str, int], there: dict[str, int], tmp_path: Path
) -> None:
    """Rows of four heads read as those of eight are another model; every tensor would fit."""
    saved, model = model_of(pattern, **there), model_of(pattern, seed=2, **here)
    assert [p.shape for p in saved.parameters()] == [p.shape for p in model.parameters()]
    before = copy.deepcopy(model)
    save(saved, tmp_path)
    name, value = next(iter(here.items()))
    with pytest.raises(
        StateError, match=rf"hybrid_config.json: {name}={there[name]} of the checkpoint, {value} of the model"
    ):
        load(model, tmp_path)
    assert_same(model, before)
    load(model_of("-", **here), _saved(model_of("-", **there), tmp_path / "dense"))  # no layer that it says anything of
    (tmp_path / CONFIG_FILE).write_text("[1]")
    with pytest.raises(StateError, match="is not the config of a hybrid model: expected an object"):
        load(saved, tmp_path)
    (tmp_path / CONFIG_FILE).unlink()  # Megatron-LM writes none: then the tensors are all there is to judge by
    load(model, tmp_path)


def _saved(model: HybridModel, folder: Path) -> Path:
    save(model, folder)
    return folder


def test_steps_of_experts_that_differ_do_not_fit_stacked_experts(tmp_path: Path) -> None:
    """Single experts skip steps without tokens, a stacked weight can't."""
    values: dict[str, Any] = {"experts": 16, "dtype": torch.bfloat16}
    model = model_of("E", **values)
    optimizer = adam(model)
    for seed in range(2):
        step(model, optimizer, seed)
    (layer,) = (l for l in model.physical_layers() if isinstance(l, MoELayer))
    for index, (_, parameter) in enumerate(layer.expert_mlps.named_parameters()):
        optimizer.state[parameter].setdefault("step", torch.tensor(0.0)).fill_(float(index))
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[parameter].setdefault(name, torch.zeros_like(parameter))
    save(model, tmp_path, optimizer)
    stacked = model_of("E", seed=2, expert_gemm="grouped", **values)
    load(stacked, tmp_path)
    before = copy.deepcopy(stacked)
    with pytest.raises(StateError, match="Nothing has been loaded"):
        load(stacked, tmp_path, adam(stacked))
    assert_same(before, stacked)


def test_loop_and_stacked_experts_read_each_other(tmp_path: Path) -> None:
    loop = model_of("[*E]", dtype=torch.bfloat16)
    save(loop, tmp_path / "loop")
    stacked = model_of("[*E]", seed=2, expert_gemm="grouped", dtype=torch.bfloat16)
    load(stacked, tmp_path / "loop")
    save(stacked, tmp_path / "stacked")
    other = model_of("[*E]", seed=3, dtype=torch.bfloat16)
    load(other, tmp_path / "stacked")
    assert_same(loop, other)


# --------------------------------------------------------------------------------------------------------------- graphs


def test_a_captured_model_goes_on_with_what_was_loaded(tmp_path: Path) -> None:
    model, other = model_of("[*E]M"), model_of("[*E]M", seed=2)
    save(other, tmp_path / "other")
    graphed = capture(model, batch(), backend="tape")
    graphed(*batch()).loss.backward()
    load(graphed, tmp_path / "other")
    assert torch.equal(graphed(*batch()).loss, other(*batch()).loss)
    save(graphed, tmp_path / "graphed")
    assert keys_in(tmp_path / "graphed") == keys_in(tmp_path / "other")
    a = read(tmp_path / "graphed", ["output_layer.weight"])
    assert torch.equal(a["output_layer.weight"], other.get_parameter("output_layer.weight"))
