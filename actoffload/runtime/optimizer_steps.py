"""How often the optimizers of this process have stepped: it tells micro-batches from steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .untraced import skipped

_steps: list[int] = []
"""Empty until somebody asks, then one number."""


def optimizer_steps() -> int:
    """Steps of any ``torch.optim.Optimizer`` since this was called first."""
    if not _steps:
        _steps.append(0)
        register_optimizer_step_post_hook(_stepped)
    return _steps[0]


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


class Watcher:
    """Has a function called at each end of an optimizer's step, when gradients and states are all there."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        _watchers.add(self)


@skipped
def _stepped(*_: object) -> None:
    if not torch.compiler.is_compiling():
        _steps[0] += 1
        for watcher in tuple(_watchers):
            watcher.function()
