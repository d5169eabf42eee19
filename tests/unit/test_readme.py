"""The README is true: its example runs, and what it shows as printed is what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from graphcap.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def shown(after: str) -> str:
    """The first block of printed text behind a heading."""
    found = re.search(r"```text\n(.*?)```", README[README.index(after) :], flags=re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_runs_and_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert sum(line.strip() != "" for line in code.splitlines()) < 26
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert _words(capsys.readouterr().out) == _words(shown("## An example"))


def test_the_demo_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, bytes, times and counts of operations apart; the last digits of losses depend on the processor."""
    assert main(["demo", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert _words(printed) == _words(shown("## The demo"))
    assert _losses(printed) == pytest.approx(_losses(shown("## The demo")), abs=0.05)


def _words(text: str) -> list[str]:
    text = re.sub(r"torch \S+", "torch", text)
    text = re.sub(r"[\d.]+ (KiB|MiB|ms|operations)", r"# \1", text)
    return [re.sub(r"\d+\.\d+", "#", line).rstrip() for line in text.splitlines()]


def _losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d\.\d{7}", text)]


def test_the_commands_stand_there() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test", "docs"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)


def test_what_is_said_to_be_missing_is_missing() -> None:
    import graphcap

    layer, sample = torch.nn.Linear(2, 2), (torch.zeros(1, 2),)
    with pytest.raises(TypeError, match="recompute"):
        graphcap.capture(layer, sample, recompute="full")  # type: ignore[call-arg]
