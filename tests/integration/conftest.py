"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from tests.integration import matrix

# So that what fails in these modules, which hold no tests, is explained too.
pytest.register_assert_rewrite("tests.integration.compiled", "tests.integration.evidence")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write into the results which cell of the table of docs/integrations.md each test shows."""
    for item in items:
        item.user_properties += [("proves", "|".join(map(str, cell))) for cell in matrix.cells(item)]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler that remembers no graph and has counted nothing."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
