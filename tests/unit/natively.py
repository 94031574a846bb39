"""How tests have C or Python do the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from actoffload.native_hooks import _Process
from actoffload.native_known import known


class _Elsewhere(Tensor):
    """A tensor that says that it lies elsewhere than it does."""

    _cdata = 16


TOLD: dict[str, Any] = {**known(), "samples": [torch.ones(1).as_subclass(_Elsewhere)]}
"""What the module is set up with, but that PyTorch's objects are not laid out as it knows them."""


@contextmanager
def in_python() -> Iterator[None]:
    """What is made meanwhile is made in Python, as where there is no compiler."""
    before = _Process.module, _Process.reason
    _Process.module, _Process.reason = None, "switched off by a test"
    try:
        yield
    finally:
        _Process.module, _Process.reason = before
