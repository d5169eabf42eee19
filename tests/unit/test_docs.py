"""Documentation is true: its Python runs, block after block, and what it shows as printed is what is printed."""

from __future__ import annotations

import inspect
import re
from itertools import accumulate
from pathlib import Path

import pytest
import torch

import graphcap
from graphcap.cli import main
from graphcap.order import assign_slots

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = ("guides/hybrid.md", "footguns.md")  # tests/hybrid/test_guide.py, tests/test_footguns.py
PAGES = sorted(
    page
    for page in (path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    if page not in ELSEWHERE and not page.startswith("_build")
)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run_blocks(text: str) -> None:
    scope: dict[str, object] = {"__name__": "documentation"}
    for code in blocks(text, "python"):
        exec(compile(code, "<documentation>", "exec"), scope)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str) -> None:
    run_blocks((DOCS / page).read_text(encoding="utf-8"))


def test_the_quickstart_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks((DOCS / "quickstart.md").read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert "equal over 20 steps\n" in printed
    assert "chunk 0: argument 0: expected shape [8, 16], got [9, 16]. Call it as it was captured, " in printed


def test_the_plan_shown_in_how_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    run_blocks(text)
    (shown,) = (block for block in blocks(text, "text") if "graphed parts" in block)
    size = r"[\d.]+ KiB"
    assert re.sub(size, "#", shown) in re.sub(size, "#", capsys.readouterr().out)


def test_the_plan_shown_to_who_comes_from_transformer_engine(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "guides/coming-from-transformer-engine.md").read_text(encoding="utf-8")
    run_blocks(text)
    (shown,) = blocks(text, "text")
    assert capsys.readouterr().out == shown


def test_the_guides_name_every_argument() -> None:
    arguments = inspect.signature(graphcap.make_graphed_callables).parameters
    te = (DOCS / "guides/coming-from-transformer-engine.md").read_text(encoding="utf-8")
    assert [name for name in arguments if f"`{name}`" not in te] == []
    torchs = (DOCS / "guides/coming-from-torch-cuda.md").read_text(encoding="utf-8")
    known = inspect.signature(torch.cuda.make_graphed_callables).parameters
    assert [name for name in known if f"`{name}`" not in torchs] == []


def test_arguments_and_strides_are_as_the_quickstart_says() -> None:
    def add(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return x + labels

    tokens = torch.zeros(4, 9)
    x, y = tokens[:, :-1].contiguous(), torch.ones(4, 8)
    graphed = graphcap.capture(add, (x,), {"labels": y}, backend="tape")
    assert torch.equal(graphed(x, labels=y), y)
    with pytest.raises(graphcap.InputMismatch):
        graphed(x, y)
    with pytest.raises(graphcap.InputMismatch, match="stride"):
        graphed(tokens[:, :-1], labels=y)


def test_the_slots_that_orders_and_readme_count(capsys: pytest.CaptureFixture[str]) -> None:
    order = graphcap.Order.interleaved(0, 2, 2, 4)
    assert assign_slots(order).count == 5  # inputs alike, as on the command line
    text = (DOCS / "guides" / "orders.md").read_text(encoding="utf-8")
    assert "(6, not 5, in the example below" in text
    run_blocks(text)
    assert "4 graphed parts, 2 breaks, 6 slots, " in capsys.readouterr().out
    in_flight = [[step.phase == "F" or -1 for step in order if step.chunk == chunk] for chunk in range(2)]
    assert [max(accumulate(changes)) for changes in in_flight] == [4, 2]


def test_the_error_and_the_table_shown_in_orders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / "guides" / "orders.md").read_text(encoding="utf-8")
    error, table = blocks(text, "text")
    run_blocks(text)
    assert error in capsys.readouterr().out
    (command,) = re.findall(r"^\$ graphcap (order .*)$", text, flags=re.MULTILINE)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command.split()) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == table.splitlines()


def test_links_lead_somewhere() -> None:
    for path in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
