"""A count of the optimizers' steps in this process, which separates steps from micro-batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable

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


# Weakly: the hook is for the whole process, and must not keep the run of a dropped offloader.
_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


class Watcher:
    """Calls a function at the end of each optimizer's step, when all gradients and states exist."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        _watchers.add(self)


@skipped
def _stepped(*_: object) -> None:
    if not torch.compiler.is_compiling():
        _steps[0] += 1
        for watcher in tuple(_watchers):  # a copy: another thread may add one
            watcher.function()
