"""Build the documentation: ``sphinx-build -W -b html docs docs/_build``."""

from __future__ import annotations

import re
from typing import Any

import jobrunner

project = "jobrunner"
author = "The jobrunner authors"
project_copyright = author
version = release = jobrunner.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

html_theme = "sphinx_book_theme"
html_theme_options = {"navbar_persistent": []}
html_title = "jobrunner"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True


def _link_within(app: Any, name: str, source: list[str]) -> None:
    """Link to the pages that include files which lie outside of `docs`."""
    source[0] = re.sub(
        r"\]\(((?:\.\./)*)\.\./(?:SECURITY|CONTRIBUTING|CHANGELOG)\.md",
        r"](\1project.md",
        source[0],
    )


def _returned(function: Any) -> str | None:
    """The type of what a function returns, as its source has it."""
    returned = getattr(function, "__annotations__", {}).get("return")
    if returned in (None, "None"):
        return None
    return str(returned).replace("PublicPosition", "int | Position")


def _show_returned(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: Any
) -> tuple[str | None, str | None] | None:
    """Show the type of what functions return; docstrings have those of parameters."""
    if what not in ("function", "method"):
        return None
    return signature, _returned(obj)


def _show_type(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Begin the text on a property by its type."""
    returned = _returned(obj.fget) if what == "property" else None
    if returned and lines:
        lines[0] = f"``{returned}``: {lines[0]}"


def setup(app: Any) -> None:
    """Have Sphinx call these functions."""
    app.connect("source-read", _link_within)
    app.connect("autodoc-process-signature", _show_returned)
    app.connect("autodoc-process-docstring", _show_type, priority=900)
