"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

# So that what fails in these modules, which hold no tests, is explained too.
pytest.register_assert_rewrite("tests.integration.compiled", "tests.integration.evidence")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler that remembers no graph and has counted nothing."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
