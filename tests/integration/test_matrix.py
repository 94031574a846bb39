"""A test proves each cell of the table of docs/integrations.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import matrix


def test_each_cell_of_the_table_has_a_test(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    files = {file for file in Path(__file__).parent.glob("test_*.py") if "proves(" in file.read_text(encoding="utf-8")}
    if request.config.option.keyword or request.config.option.markexpr or not files <= {item.path for item in items}:
        pytest.skip("not all tests of this folder were chosen")
    assert matrix.written() == matrix.render(request.config.stash[matrix.PROVED])


def test_only_cells_of_passed_tests_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(f"Before.\n\n{matrix.BEGIN} a |\n| old |\n\nAfter.\n")
    shown = '<properties><property name="proves" value="{}"/></properties>'
    cases = [shown.format("TRL|True|env"), shown.format("TRL|False|env") + "<failure/>", "<skipped/>"]
    (tmp_path / "results.xml").write_text("".join(["<s>", *(f"<testcase>{case}</testcase>" for case in cases), "</s>"]))
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    matrix.main([str(tmp_path / "results.xml")])
    lines = matrix.written()[2:]
    assert dict(line.strip("| ").split(" | ", 1) for line in lines) == {
        "Accelerate": "– | not tested | not tested",
        "Lightning": "– | – | not tested",
        "Megatron-core": "not tested | – | –",
        "torchtitan": "not tested | not tested | –",
        "TRL": "not tested | with | not tested",
    }
    assert (tmp_path / "page.md").read_text().endswith("\n\nAfter.\n")
