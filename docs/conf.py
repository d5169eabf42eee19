"""Sphinx configuration: `make docs`."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

project = "graphcap"
author = "the graphcap authors"
copyright = "2026, the graphcap authors"
release = importlib.metadata.version("graphcap")
version = ".".join(release.split(".")[:2])

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"graphcap {release}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_inherit_docstrings = False  # torch's docstrings link into torch's documentation
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


# Docstrings are written to be read as they stand: lines such as "name: text", continued by indentation, and indented
# examples. Here they become lists and literal blocks.


def _as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    made: list[str] = []
    for paragraph in paragraphs:
        rows = paragraph.split("\n")
        if rows[0].startswith("    ") and not (made and made[-1].startswith(("::", ".."))):
            made.append("::\n\n" + paragraph)
        else:
            made.append(_entries(rows))
    lines[:] = [*"\n\n".join(made).split("\n"), ""]


def _entries(rows: list[str]) -> str:
    """Rows in which a name and a colon begin an entry, as a list; other rows as they are."""
    if not any(_ENTRY.match(row) for row in rows[1:]) and not any(row.startswith("    ") for row in rows[1:]):
        return "\n".join(rows)
    joined: list[str] = []
    for row in rows:
        begins = not joined or (not row.startswith(" ") and (_ENTRY.match(row) or joined[-1].rstrip().endswith(".")))
        if begins:
            joined.append(row)
        else:
            joined[-1] += " " + row.strip()
    return "\n\n".join(_ENTRY.sub(r"* **\1**: ", row) for row in joined)


_ENTRY = re.compile(r"^([a-z_]+(?:\([a-z_]*\))?(?:, [a-z_]+(?:\([a-z_]*\))?)*): ")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_rst)
