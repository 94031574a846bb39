"""How tests have C or Python do the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from actoffload.native_hooks import _Process
from actoffload.native_known import known

TOLD: dict[str, Any] = {**known(), "base": type("Other", (), {"layout": 1})}
"""What the module is set up with, but that its tensors are of no kind that it knows."""


@contextmanager
def in_python() -> Iterator[None]:
    """What is made meanwhile is made in Python, as where there is no compiler."""
    before = _Process.module, _Process.reason
    _Process.module, _Process.reason = None, "switched off by a test"
    try:
        yield
    finally:
        _Process.module, _Process.reason = before
