"""How often the optimizers of this process have stepped: it tells micro-batches from steps."""

from __future__ import annotations

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


@skipped
def _stepped(*_: object) -> None:
    if not torch.compiler.is_compiling():
        _steps[0] += 1
