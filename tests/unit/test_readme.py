"""README's examples run, and each number that it claims names the file that it comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    """The ``python`` blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def sections(text: str) -> dict[str, str]:
    """Text of each second-level section by its heading."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def unsourced(text: str, root: Path) -> list[str]:
    """Tables of the section "Measured" that no line names an existing result file for."""
    problems = []
    tables = re.findall(r"(?:^\|.*\n)+(?:(?!^\|).*\n?)*", sections(text).get("Measured", ""), re.MULTILINE)
    for table in tables:
        names = re.findall(r"benchmarks/results/[\w.+-]+\.json", table)
        if not names:
            problems.append(f"no result file for: {table.splitlines()[0]}")
        problems += [f"{name} does not exist" for name in names if not (root / name).is_file()]
    return problems


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACTOFFLOAD_PATH", str(tmp_path))
    namespace: dict[str, Any] = {"__name__": "readme"}
    examples = blocks(README)
    exec(compile(examples[0], "README.md, first example", "exec"), namespace)
    assert namespace["offloader"].statistics().nvme_written_bytes > 0
    assert "moved" in capsys.readouterr().out
    for number, example in enumerate(examples[1:], start=2):
        exec(compile(example, f"README.md, example {number}", "exec"), namespace)
    namespace["offloader"].close()
    assert list(tmp_path.iterdir()) == []


def test_the_first_example_is_short() -> None:
    assert len([line for line in blocks(README)[0].splitlines() if line.strip()]) <= 11


def test_measured_numbers_name_their_files() -> None:
    assert unsourced(README, ROOT) == []
    assert "|" in sections(README)["Measured"], "the section Measured has no table"


def test_the_check_of_sources_fails_on_a_bad_sample(tmp_path: Path) -> None:
    table = "## Measured\n\n| a |\n| --- |\n| 1 |\n\nSource: `benchmarks/results/x.json`.\n"
    assert unsourced(table, tmp_path) == ["benchmarks/results/x.json does not exist"]
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/x.json").write_text("{}", encoding="utf-8")
    assert unsourced(table, tmp_path) == []
    assert unsourced(table.replace("Source: `benchmarks/results/x.json`.", ""), tmp_path)


def test_every_option_of_the_knobs_table_exists_and_none_is_missing() -> None:
    from dataclasses import fields

    from actoffload import OffloadConfig

    knobs = sections(README)["Knobs, in the order in which they are needed"]
    cells = re.findall(r"^\| (`.*?) \|", knobs, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    options = {field.name for field in fields(OffloadConfig)}
    assert options == named
