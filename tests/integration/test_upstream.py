"""The blocks of Python about frameworks run; notes in docs/upstream are short and name a release of constraints.txt."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from tests import pages
from tests.integration.processes import ROOT, launch
from tests.programs import FRAMEWORKS

NOTES = {file.stem: file.read_text(encoding="utf-8") for file in (ROOT / "docs/upstream").glob("*.md")}
RUN = ("deepspeed", "transformers", "trl")
"""Notes with code that this file runs; test_torchtitan.py runs the code of its note."""
BLOCKS = [name for name in pages.BLOCKS if re.match(r"docs/(frameworks/(?!megatron|recipes)|remat)", name)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of one process that ran the code of every note."""
    for package in (*RUN, "torch_remat"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    place = tmp_path_factory.mktemp("upstream")
    answer: dict[str, Any] = launch(
        "tests.integration.workers.upstream", 1, place, env={"ACTOFFLOAD_PATH": str(place)}, modules=FRAMEWORKS
    )[0]
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("note", RUN)
def test_the_shim_moves_and_changes_no_loss(found: dict[str, Any], note: str) -> None:
    assert len(found[note]["losses"]) == 3
    assert found[note]["losses"] == found[note]["plain"]
    assert found[note]["moved"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_puts_a_model_inside(found: dict[str, Any], block: str) -> None:
    assert found[block] > 0


@pytest.mark.parametrize("note", NOTES)
def test_a_note_is_short_and_names_the_version(note: str) -> None:
    assert len(NOTES[note].splitlines()) <= 42
    assert max(map(len, NOTES[note].splitlines())) <= 120
    (version,) = re.findall(rf"^{note}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"({version})" in NOTES[note]
    assert "```diff" in NOTES[note]


def test_there_is_a_note_for_each() -> None:
    assert set(NOTES) == {*RUN, "torchtitan"}
