"""The demo job: equal under every schedule, and able to see a difference, a silent parameter and unmoved weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphcap import demo
from graphcap.cli import TAPE_TIMES, main

SMALL = ["demo", "--device", "cpu", "--backend", "tape", "--hidden", "16", "--tokens", "48"]


def call(text: str) -> int:
    return main([*SMALL, *text.split()])


@pytest.mark.parametrize(
    ("options", "replays"),
    [
        ("--steps 3", 3),
        ("--steps 2 --microbatches 2", 4),  # gradients add up over plain calls
        ("--steps 2 --schedule 1f1b", 8),
        ("--steps 2 --schedule interleaved --microbatches 4 --chunks 2", 16),
        ("--steps 2 --dtype bfloat16 --pattern M[*E]", 2),
    ],
)
def test_equal(options: str, replays: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(options) == 0
    printed = capsys.readouterr().out
    assert f"equal on all {options.split()[1]} steps" in printed
    assert f"{replays} calls replayed, 0 run eagerly" in printed
    assert "rows per expert depend on the data" in printed  # the plan names the reason of a break
    assert TAPE_TIMES in printed


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "demo.json"
    assert call(f"--steps 3 --json {file}") == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    result = found["result"]
    assert result["equal"]
    assert result["verdict"] == "equal on all 3 steps"
    losses = [(step["eager_loss"], step["graphed_loss"]) for step in result["steps"]]
    assert len(losses) == 3
    assert all(eager == graphed and math.isfinite(eager) for eager, graphed in losses)
    assert len(set(losses)) == 3
    assert found["capture"]["operations"] > 100
    assert found["capture"]["breaks"] == 2


def test_the_loss_falls() -> None:
    result = demo.run(demo.DemoSettings(steps=12, device="cpu", hidden=16, tokens=64, pattern="M[*E]"))
    assert result.equal
    assert result.steps[-1].graphed_loss < result.steps[0].graphed_loss - 0.2


def plant(monkeypatch: pytest.MonkeyPatch, what: str, then: Callable[[demo.Side, int], None]) -> None:
    """After `demo.<what>` ran on the first side of a pair (the graphed one, for `update`) a count is passed to `then`."""
    original, calls = getattr(demo, what), [0]

    def wrapped(side: demo.Side, *rest: object) -> object:
        given = original(side, *rest)
        then(side, calls[0])
        calls[0] += 1
        return given

    monkeypatch.setattr(demo, what, wrapped)


def test_a_planted_weight_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nudge(side: demo.Side, count: int) -> None:
        if count == 4:  # graphed, eager, graphed, eager, and now the graphed side of step 2
            with torch.no_grad():
                side.model.decoder.layers[1].get_parameter("layers.0.norm.weight")[3] += 1e-6

    plant(monkeypatch, "update", nudge)
    assert call("--steps 6") == 1
    printed = capsys.readouterr().out
    assert "first difference: step 2, weight decoder.layers.1.layers.0.norm.weight: 1 of 16 values differ" in printed
    assert "DIFFERENT" in printed
    assert "equal on all" not in printed
    assert "   3  " not in printed  # it stops there


def test_a_planted_gradient_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def scale(side: demo.Side, count: int) -> None:
        if count == 3:  # eager against eager twice, then the eager and the graphed side of step 0
            gradient = side.model.get_parameter("embedding.weight").grad
            assert gradient is not None
            gradient.mul_(1.0001)

    plant(monkeypatch, "run_pass", scale)
    assert call("--steps 4 --schedule 1f1b") == 1
    assert "first difference: step 0, gradient embedding.weight:" in capsys.readouterr().out


def set_eps(side: demo.Side) -> None:
    for module in side.model.modules():
        if hasattr(module, "eps"):
            module.eps = 0.1


def test_a_constant_that_differs_on_one_side_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, "update", lambda side, count: set_eps(side) if count == 1 else None)  # the eager side of step 0
    assert call("--steps 4") == 1
    assert "first difference: step 1, output loss of 0F0:" in capsys.readouterr().out


def test_a_constant_that_capture_froze_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides change a Python number, but the graph holds the old one: an error names it, and the exit code is 1."""
    plant(monkeypatch, "update", lambda side, count: set_eps(side))
    assert call("--steps 4") == 1
    told = capsys.readouterr().err
    assert "norm.eps was 1e-05 at capture and is 0.1 now" in told
    assert "Traceback" not in told


def test_eager_that_does_not_repeat_itself_is_no_judge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disturb(side: demo.Side, count: int) -> None:
        if count == 1:
            side.model.get_parameter("embedding.weight").grad.add_(1)

    plant(monkeypatch, "run_pass", disturb)
    assert call("--steps 4") == 1
    assert "eager differs from eager, so nothing can be judged bit for bit" in capsys.readouterr().out


def test_weights_that_never_move_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "update", lambda side: None)
    assert call("--steps 2") == 1
    assert "equal, but that proves little: the weights never moved" in capsys.readouterr().out


def test_a_parameter_without_gradient_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, "run_pass", lambda side, count: setattr(side.model.get_parameter("embedding.weight"), "grad", None))
    assert call("--steps 2") == 1
    assert "the gradients of embedding.weight were zero or None in every step" in capsys.readouterr().out


def test_experts_without_a_token_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--steps 1 --experts 12 --top-k 1 --tokens 4 --pattern ME") == 0
    assert "no token ever went to decoder.layers.1.expert_mlps " in capsys.readouterr().out
