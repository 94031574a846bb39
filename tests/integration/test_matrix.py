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
