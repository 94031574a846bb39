"""A count of the optimizers' steps in this process, which separates steps from micro-batches."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .untraced import skipped

_steps: list[int] = []
"""Empty until the first query, then one number."""


def optimizer_steps() -> int:
    """Return the steps of all ``torch.optim.Optimizer`` since the first call."""
    if not _steps:
        _steps.append(0)
        register_optimizer_step_post_hook(_stepped)
    return _steps[0]


watchers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Runs that look at the end of each optimizer's step. Weak: the hook is the process's, and must keep no dropped run."""


@skipped
def _stepped(*_: object) -> None:
    if not torch.compiler.is_compiling():
        _steps[0] += 1
        for watcher in tuple(watchers):  # a copy: another thread may add one
            watcher.optimizer_stepped()
