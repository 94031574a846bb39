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


watchers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""Runs that look at the end of each optimizer's step. Weak: the hook is the process's, and must keep no dropped run."""


@skipped
def _stepped(*_: object) -> None:
    if not torch.compiler.is_compiling():
        _steps[0] += 1
        # Copied by one atomic operation, as another thread may add one; to iterate runs Python code for each.
        for ref in watchers.keyrefs():
            if (watcher := ref()) is not None:
                watcher.optimizer_stepped()
