"""Steps without hooks: nothing moves, and the hooks of what stays would take too much of a step.

A step rests only if its one call of a model is like the one before: the same module with as many trained parameters, in
the same mode, and arguments of the same shapes, types and plain values. Another call keeps its hooks, as it may need
more memory. A step that saves something all the same ends the rest of its shape for good.
"""

from __future__ import annotations

from ..planning.constants import HOOKS_S, NO_LOSS
from ..runtime.store import ActivationStore
from .shapes import Shape


def may_rest(store: ActivationStore, shape: Shape, tensors: int, step_s: float) -> bool:
    """Whether steps of a shape may run without hooks for a while.

    Args:
        store: holds what the hooks save.
        shape: the steps; no number bounds what they save.
        tensors: how many a step saves.
        step_s: how long it is.
    """
    if tensors * HOOKS_S <= NO_LOSS * step_s:
        return False
    plan, profile, config = shape.plan, shape.profile, store.shared.config
    if plan is not None and (plan.offloaded_bytes or shape.regions):
        return False
    if profile is not None and profile.forwards > 1:
        return False  # only handles tell where a step ends
    return not (config.is_limited or config.strict) and store.trace is None  # these look at each tensor
