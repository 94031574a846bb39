"""`make newest` takes hours: a stopped run costs no result, and the next one runs the files that have not passed."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness
from tests import versions


@pytest.mark.parametrize("there", [False, True])
def test_python_3_14_is_among_the_pairs_where_there_is_one(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if there else None)
    pairs = runpy.run_path(versions.__file__)["PAIRS"]
    assert ("2.14:3.14" in pairs) == there


def test_the_next_run_takes_the_files_that_have_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted((harness.ROOT / "tests" / "integration").glob("test_*.py"))
    broken, asked = {files[0].stem}, list[str]()

    def run_suite(folder: Path, interpreter: str, passed: list[str], path: str | None) -> dict[str, Any]:
        asked.append(name := Path(passed[0]).stem)
        return {"passed": 1, "skipped": 0, "failed": [name] if name in broken else [], "status": int(name in broken)}

    monkeypatch.setattr(versions, "_run_suite", run_suite)
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    for number, _ in enumerate(versions._run_files(tmp_path, "python")):
        if number == 1:
            break
    assert asked == [file.stem for file in files[:2]]
    asked.clear()
    broken.clear()
    *_, found = versions._run_files(tmp_path, "python")
    assert asked == [file.stem for file in (files[0], *files[2:])]
    assert versions._sum(found["frameworks"].values()) == {
        "passed": len(files),
        "skipped": 0,
        "failed": [],
        "status": 0,
    }
