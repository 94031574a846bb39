"""Steps without hooks: nothing moves, and the hooks of the tensors that stay would take too much of a step.

A step rests only if it calls a model once, and this forward has the last signature known before the rest. A forward
with another signature may need more memory, so its hooks stay. A step that saves a tensor through hooks during a rest
ends all rests of its shape.
"""

from __future__ import annotations

from ..planning.constants import HOOKS_S, NO_LOSS
from ..runtime.store import ActivationStore
from .shapes import Shape


def may_rest(store: ActivationStore, shape: Shape, tensors: int, step_s: float) -> bool:
    """Whether steps of a shape may run without hooks for a while.

    Args:
        store: its trace, and its option ``fp8``, need the hooks.
        shape: the steps; no number bounds the bytes that they save.
        tensors: how many a step saves.
        step_s: the length of a step.
    """
    if tensors * HOOKS_S <= NO_LOSS * step_s or store.shared.config.fp8:
        return False  # with `fp8` hooks make tensors smaller that stay, too
    if not shape.nothing_moves or (shape.profile is not None and shape.profile.forwards > 1):
        return False  # with several forwards alive at once, only handles show where a step ends
    return store.trace is None  # a trace has to show each tensor
