"""The table of docs/integrations.md: the frameworks that train bit for bit alike, and the ways to switch us on.

    pytest tests/integration --junitxml results.xml
    python -m tests.integration.matrix results.xml

A test that proves one cell is marked with it: ``@pytest.mark.proves("TRL", checkpointing=True, way="env")``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
WAYS = ("flag", "env", "code")
NOT_OFFERED = {
    "Accelerate": {"flag"},
    "Megatron-core": {"env", "code"},
    "Lightning": {"flag", "env"},
    "torchtitan": {"code"},
}
"""The ways that a framework does not have."""
BEGIN = "| framework |"

Cell = tuple[str, bool, str]
"""Framework, whether its checkpointing is on, way."""
PROVED = pytest.StashKey[set[Cell]]()
"""The cells that have a test, in CI or with ``--thorough``."""


def cells(item: Any) -> list[Cell]:
    """The cells that a test proves when it passes."""

    def of(framework: str, *, checkpointing: bool, way: str) -> Cell:
        assert way in WAYS, way
        return framework, checkpointing, way

    return [of(*mark.args, **mark.kwargs) for mark in item.iter_markers("proves")]


def passed(files: Iterable[str]) -> set[Cell]:
    """The cells that the passed tests prove, from pytest's JUnit files."""
    found: set[Cell] = set()
    for case in (case for file in files for case in ElementTree.parse(file).iter("testcase")):
        if not {child.tag for child in case} & {"failure", "error", "skipped"}:
            properties = (p.attrib for p in case.iter("property") if p.attrib["name"] == "proves")
            for framework, checkpointing, way in (p["value"].split("|") for p in properties):
                found.add((framework, checkpointing == "True", way))
    return found


def render(proved: set[Cell]) -> list[str]:
    """The lines of the table: a row for each framework, a column for each way."""
    frameworks = sorted({*NOT_OFFERED, *(framework for framework, _, _ in proved)}, key=str.lower)
    lines = [f"{BEGIN} {' | '.join(WAYS)} |", "| --- " * (1 + len(WAYS)) + "|"]
    for framework in frameworks:
        words = [_word(proved, framework, way) for way in WAYS]
        lines.append(f"| {framework} | {' | '.join(words)} |")
    return lines


def _word(proved: set[Cell], framework: str, way: str) -> str:
    if way in NOT_OFFERED.get(framework.partition(",")[0], ()):
        return "–"
    shown = (framework, False, way) in proved, (framework, True, way) in proved
    return {(True, True): "both", (True, False): "without", (False, True): "with"}.get(shown, "not tested")


def written() -> list[str]:
    """The lines of the table in the page."""
    parts = PAGE.read_text(encoding="utf-8").split("\n\n")
    return next(part for part in parts if part.startswith(BEGIN)).split("\n")


def main(files: list[str]) -> None:
    """Write the cells that a run proves into the page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace("\n".join(written()), "\n".join(render(passed(files)))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
