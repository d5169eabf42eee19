"""The guide is true: its examples run, and the error it shows is the error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphcap.errors import PatternError
from graphcap.hybrid import Pattern

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "hybrid.md").read_text(encoding="utf-8")


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL):
        exec(code, scope)
    printed = capsys.readouterr().out
    assert "[*E]\n4 3\n" in printed
    assert float(printed.splitlines()[-1].split()[0]) < 4


def test_the_error_shown() -> None:
    (shown,) = re.findall(r"```text\n(.*?)\n```", GUIDE, flags=re.DOTALL)
    with pytest.raises(PatternError) as caught:
        Pattern.parse("[*-M]")
    assert str(caught.value) == shown
