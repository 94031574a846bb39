"""How Sphinx builds the pages: `make docs`, where a warning is an error."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

from actoffload.version import __version__

project = "actoffload"
author = "actoffload developers"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["upstream"]
html_theme = "furo"
html_title = "actoffload"
html_static_path = ["static"]
html_css_files = ["site.css"]

# The notebook is run at each build: a cell that raises fails it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600

myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autoclass_content = "class"

PICTURE = re.compile(
    r'<picture><source [^>]*srcset="(?P<dark>[^"]+)">'
    r'\s*<img src="(?P<light>[^"]+)" alt="(?P<alt>[^"]+)"></picture>'
)
"""GitHub's way to show one picture on light pages and one on dark ones."""
OPTION = re.compile(r"(\w+) = ")
INTERNAL = re.compile(r"^Attributes:\n +config: the options")
"""Paragraphs of docstrings for people who change the class."""


def show_pictures(app: Any, docname: str, source: list[str]) -> None:
    """Write both pictures in the theme's way: its switch chooses one."""
    both = r"![\g<alt>](\g<light>){.only-light}"
    both += r"![\g<alt>](\g<dark>){.only-dark}"
    source[0] = PICTURE.sub(both, source[0])


def anchor_options(app: Any, document: Any) -> None:
    """Give each option an anchor; a link to one that is not there warns."""
    if app.env.docname != "configuration":
        return
    slugs = app.env.metadata["configuration"]["myst_slugs"]
    for item in document.findall(nodes.list_item):
        if found := OPTION.match(item.astext()):
            item["ids"].append(found[1])
            slugs[found[1]] = (None, found[1], found[1])


def hide_internals(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Leave out the paragraphs that are not for users."""
    paragraphs = "\n".join(lines).split("\n\n")
    kept = [text for text in paragraphs if not INTERNAL.search(text)]
    lines[:] = [*"\n\n".join(kept).split("\n"), ""]


def setup(app: Any) -> None:
    """Install what is above; Sphinx calls it."""
    app.connect("source-read", show_pictures)
    app.connect("doctree-read", anchor_options)
    # Before napoleon, which rewrites the sections.
    app.connect("autodoc-process-docstring", hide_internals, priority=400)
