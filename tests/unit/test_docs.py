"""The pages as a reader sees them: nothing is cut, every link has a target, pictures and figures come from files.

`make docs` builds the site; this test reads the sources alone, so that it is fast.
"""

from __future__ import annotations

import doctest
import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from statistics import median

import pytest

import actoffload
from benchmarks import pictures
from tests import figures, pages

ROOT = pages.ROOT
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "upstream" not in path.parts)]
SITE = [path for path in PAGES if DOCS in path.parents]
MOST_COLUMNS = 76
"""The width of a block of code that the site shows without scrolling."""
OUTPUT = ("text", "{eval-rst}", "{toctree}", "prose")
"""Kinds of blocks that are no code: the style sheet wraps their lines."""
GROUPS = ("Start", "Use", "Understand", "Project")
MOST_LINES_OF_A_FRAMEWORK = 45
NOTEBOOKS = {path.stem for path in DOCS.glob("*.ipynb")}
"""`make docs` runs them; a cell that raises is an error."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# -- widths -----------------------------------------------------------------------------------------------------------


def code_lines() -> Iterator[tuple[str, str]]:
    """The lines of code of README and the site, and where each stands."""
    for name, kind, text in pages.pieces():
        if kind not in OUTPUT and name.startswith(("README", "docs/")) and "upstream" not in name:
            yield from ((name, line) for line in text.splitlines())
    for name in (f"docs/{notebook}.ipynb" for notebook in NOTEBOOKS):
        for cell in json.loads(text_of(name))["cells"]:
            if cell["cell_type"] == "code":
                yield from ((name, line) for line in "".join(cell["source"]).splitlines())


def test_no_line_of_code_is_cut() -> None:
    lines = list(code_lines())
    assert len(lines) > 150
    assert [place for place in lines if len(place[1]) > MOST_COLUMNS] == []


# -- links, anchors, groups -------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors of a page: its headings, as GitHub and the site spell them, and the options of the configuration."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    found = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return found | options() if path.name == "configuration.md" else found


def options() -> set[str]:
    """The options that have an entry of their own, as docs/conf.py finds them."""
    return set(re.findall(r"^- `(\w+) = ", text_of("docs/configuration.md"), re.MULTILINE))


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
        links += re.findall(r'(?:src|srcset)="([^"]+)"', text)
        for link in links:
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{named(page)}: {link}")
    assert wrong == []


def test_every_option_has_an_anchor() -> None:
    assert options() == {field.name for field in fields(actoffload.OffloadConfig)}
    assert 'OPTION = re.compile(r"(\\w+) = ")' in text_of("docs/conf.py")


def entries(page: Path) -> list[tuple[str, str]]:
    """The pages of the tables of contents of a page, each with its group."""
    found = []
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        caption = re.search(r"^:caption: (.+)$", block, re.MULTILINE)
        lines = [line for line in block.splitlines() if line and not line.startswith(":")]
        found += [(caption[1] if caption else "", line) for line in lines]
    return found


def test_every_page_is_in_one_group() -> None:
    found = entries(DOCS / "index.md")
    assert tuple(dict.fromkeys(group for group, _ in found)) == GROUPS
    found += entries(DOCS / "integrations.md")
    there = {str(path.relative_to(DOCS).with_suffix("")) for path in SITE} | NOTEBOOKS
    assert Counter(name for _, name in found) == Counter(there - {"index"})


@pytest.mark.parametrize("page", sorted((DOCS / "frameworks").glob("*.md")), ids=named)
def test_the_page_of_a_framework_is_short_and_complete(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert max(len(part.splitlines()) for part in re.split(r"^## ", text, flags=re.M)) <= MOST_LINES_OF_A_FRAMEWORK
    assert re.search(r"^```(python|bash)$", text, re.MULTILINE), "a line to type"
    assert f"(frameworks/{page.name})" in text_of("docs/integrations.md")


def test_the_api_page_has_every_public_name() -> None:
    page = text_of("docs/api.md")
    shown = set(re.findall(r"auto(?:class|function):: (\w+)", page))
    assert shown == set(actoffload.__all__) - {"__version__", "errors", "schedules"}
    assert "automodule:: actoffload.errors" in page
    assert "automodule:: actoffload.schedules" in page
    assert "autodoc_default_options" not in text_of("docs/conf.py"), "it would show all members of all classes"
    internal = {"abort", "forked", "note_inputs", "stage", "traced", "use"}
    offloader = re.search(r"autoclass:: Offloader.*\n +:members: (.+)", page)
    assert offloader is not None
    assert internal & set(offloader[1].split(", ")) == set()


# -- pictures ---------------------------------------------------------------------------------------------------------


EACH_PICTURE = pytest.mark.parametrize(
    ("file", "text"), list(pictures.draw()), ids=lambda item: getattr(item, "name", "text")
)


@EACH_PICTURE
def test_a_picture_is_the_one_of_its_file(file: Path, text: str) -> None:
    assert file.read_text(encoding="utf-8") == text, "run `python -m benchmarks.pictures`"


@EACH_PICTURE
def test_a_picture_is_read_at_its_width(file: Path, text: str) -> None:
    """Letters of 14 pixels, a little over half as wide as high, lie inside the picture and on no other text."""
    size = re.search(r'viewBox="0 0 (\d+) (\d+)".*font-size="(\d+)"', text)
    assert size is not None
    width, height, font = map(int, size.groups())
    assert width == 736
    assert font >= 13
    boxes: list[tuple[float, float, float, str]] = []
    for x, y, anchor, label in re.findall(r'<text x="(\S+)" y="(\S+)" text-anchor="(\w+)"[^>]*>([^<]+)</text>', text):
        long = 0.55 * font * len(label)
        left = float(x) - {"start": 0, "middle": long / 2, "end": long}[anchor]
        assert left >= -1, label
        assert left + long <= width + 1, label
        assert font - 2 <= float(y) <= height, label
        boxes.append((left, left + long, float(y), label))
    for number, (left, right, row, label) in enumerate(boxes):
        for other_left, other_right, other_row, other in boxes[number + 1 :]:
            apart = right <= other_left or other_right <= left or abs(row - other_row) >= font
            assert apart, f"{label!r} lies on {other!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if "<img " in page.read_text(encoding="utf-8")], ids=named)
def test_pictures_have_a_light_and_a_dark_one_and_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = re.findall(
        r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="(\S+)-dark\.(\w+)">'
        r'\s*<img src="(\S+)-light\.(\w+)" alt="([^"]+)"></picture>',
        text,
    )
    assert len(found) == text.count("<img ")
    for dark, dark_kind, light, light_kind, alt in found:
        assert (dark, dark_kind) == (light, light_kind)
        assert len(alt) > 20


def test_every_picture_is_used() -> None:
    used = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert [path.name for path in (DOCS / "images").iterdir() if path.name not in used] == []


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_the_tables_come_from_the_files(name: str) -> None:
    text = text_of(name)
    rows = figures.h200_rows() + figures.cpu_rows()
    assert len(rows) == 13
    assert [row for row in rows if row not in text.splitlines()] == []
    assert [file for file in (figures.H200, *figures.CPU) if file not in text] == []


def test_the_first_screen_has_measured_figures_and_gaps() -> None:
    points = figures.load(figures.H100)["points"]
    rows = {p["mode"]: p["result"] for p in points if p["case"]["name"].startswith("llama, 8k")}
    freed = 1 - rows["default"]["activation_peak_bytes"] / rows["keep"]["activation_peak_bytes"]
    steps = {mode: run["steps"] for mode, run in figures.load(figures.H100_STEPS)["runs"][1]["llama"].items()}
    done_ms = {mode: median(step[3] for step in taken[-5:]) for mode, taken in steps.items()}
    shorter = 1 - done_ms["llama-checkpointed_ours_at_equal_memory"] / done_ms["llama-recompute"]
    first = " ".join(text_of("README.md").partition("| you have |")[0].split())
    assert f"the default frees {freed:.0%}".replace("%", " %") in first
    assert f"for {rows['default']['ratio'] - 1:.0%} more time".replace("%", " %") in first
    assert f"checkpointed layers take {shorter:.0%} less time in the same memory".replace("%", " %") in first
    assert "consumer GPUs, several GPUs, NCCL were not measured" in first


# -- the examples in docstrings are true -------------------------------------------------------------------------------


EXAMPLES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "actoffload").rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert (failed, attempted > 0) == (0, True)
