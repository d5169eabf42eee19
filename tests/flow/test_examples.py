"""The scripts in examples/ run and say what they should. (Those with Transformer Engine: tests/gpu/te.)"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.filterwarnings("ignore:all tensors are on the CPU")
@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.py")) if not path.name.startswith("te_")])
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    if name == "moe_layer.py":
        assert "3 graphed parts, 2 breaks" in printed
        assert "equal over 20 steps" in printed
    else:
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
        assert len(losses) == 3
        assert losses[2] < losses[0]
