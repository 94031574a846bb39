"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from tests.integration import matrix

# pytest rewrites asserts in test modules only by default; these two hold the checks of many tests.
pytest.register_assert_rewrite("tests.integration.compiled", "tests.integration.evidence")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write into the results the cells of the table of docs/integrations.md that each test proves."""
    for item in items:
        item.user_properties += [("proves", "|".join(map(str, cell))) for cell in matrix.cells(item)]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler with an empty cache of graphs and counters at zero."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
