"""How tests have C or Python do the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from actoffload.native_hooks import _Process

TOLD: dict[str, Any] = {
    "base": type("Other", (), {"layout": 1}), "storage": 1, "tensor": 1, "parameter": 1, "strided": 1, "regions": [],
    "task_id": 1, "check_version": 1, "unpack": 1, "static": "", "small": "", "sequence_number": 1, "set_version": 1,
    "resident": 1, "released": 1, "keeps_graph": 1, "replaced": 1, "own_counter": 1, "make_lock": 1, "make_deque": 1,
    "many": 8, "record": 2, "span_alignment": 512,
}  # fmt: skip
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
