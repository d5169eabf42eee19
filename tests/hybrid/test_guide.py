"""The guide is true: its examples run, and the error it shows is the error."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from graphcap.cli import main
from graphcap.errors import PatternError
from graphcap.hybrid import HybridConfig, HybridModel, Pattern, save

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "hybrid.md").read_text(encoding="utf-8")


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL):
        exec(code, scope)
    printed = capsys.readouterr().out
    assert "[*E]\n4 3\n" in printed
    (loss,) = re.findall(r"^(\d\.\d+) torch.Size", printed, flags=re.MULTILINE)
    assert float(loss) < 4
    attention = "layers.1.in_proj layers.1.out_proj layers.2.out_proj layers.2.qkv"
    names = f"{attention} layers.3 layers.4.mlp.down layers.4.mlp.gate_up"
    for shown in ("10 [2, 5, 8, 9]", "256 rows went to the experts of layer 3", names):
        assert f"{shown}\n" in printed
        assert f"`{shown}`" in GUIDE


def test_the_conversion_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command as it stands there, and what it printed."""
    (console,) = re.findall(r"```console\n\$ graphcap (.*?)\n(.*?)\n```", GUIDE, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    save(HybridModel(HybridConfig(pattern="*-*-")), "flat")
    assert main(shlex.split(console[0])) == 0
    assert capsys.readouterr().out.strip() == console[1]


def test_the_fp8_demo_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, bytes, times and counts of operations apart; the last digits of losses depend on the processor."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "fp8.md").read_text(encoding="utf-8")
    (console,) = re.findall(r"```console\n\$ graphcap (demo .*?)\n(.*?)```", guide, flags=re.DOTALL)
    assert main(shlex.split(console[0])) == 0
    printed = capsys.readouterr().out
    assert _words(printed) == _words(console[1])
    losses = [[float(number) for number in re.findall(r"\d\.\d{7}", text)] for text in (printed, console[1])]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)


def _words(text: str) -> list[str]:
    text = re.sub(r"torch \d\S+", "torch", text)
    text = re.sub(r"[\d.]+ (KiB|MiB|ms|operations)", r"# \1", text)
    return [re.sub(r"\d+\.\d+", "#", line).rstrip() for line in text.splitlines()]


def test_the_error_shown() -> None:
    (shown,) = re.findall(r"```text\n(.*?)\n```", GUIDE, flags=re.DOTALL)
    with pytest.raises(PatternError) as caught:
        Pattern.parse("[*-M]")
    assert str(caught.value) == shown
