"""Sphinx configuration: `make docs`."""

from __future__ import annotations

import importlib.metadata

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

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
