"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from tests.integration import matrix
from tests.integration.processes import Chosen

# pytest rewrites asserts in test modules only by default; these two hold the checks of many tests.
pytest.register_assert_rewrite("tests.integration.compiled", "tests.integration.evidence")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Write into the results the cells of the table of docs/integrations.md that each test proves.

    The cells of cases that run with ``--thorough`` alone are known, too: these are still among the items.
    """
    config.stash[matrix.PROVED] = {cell for item in items for cell in matrix.cells(item)}
    for item in items:
        item.user_properties += [("proves", "|".join(map(str, cell))) for cell in matrix.cells(item)]


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> Chosen:
    """The values that a parameter has in those tests of this file that run: other programs need not start."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return lambda name: {case[name] for case in cases if name in case}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler with an empty cache of graphs and counters at zero."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
