"""Applies a plan to an offloader: which storages move, how far ahead it reads, which checkpointed regions run once."""

from __future__ import annotations

from ..planning.plan import Plan
from ..runtime.store import ActivationStore


class Following:
    """Follows one plan at a time, from the next forward of a store on."""

    def __init__(self, store: ActivationStore) -> None:
        self._store, self._largest_bytes = store, 0

    def follow(self, plan: Plan | None, once: frozenset[int] | None = None, *, coded: bool = False) -> None:
        """Follow a plan; None: as before the first one.

        ``once``: the regions that run once, by default the plan's; ``coded``: without a plan, as `Plan.coded`.
        """
        store, shared, budget = self._store, self._store.shared, self._store.shared.budget
        if once is None:
            once = frozenset(() if plan is None else plan.once)
        shared.coded = coded if plan is None else plan.coded  # first: regions reserve room for coded tensors
        store.regions.follow(once, (0, 0) if plan is None else (len(plan.entries), plan.baseline_peak_bytes or 0))
        shared.largest_moved_bytes = 0  # other storages may move under this plan
        self._largest_bytes = max(self._largest_bytes, budget.largest_bytes)
        if plan is None:  # the next forward may save as large a storage as an earlier one, of larger inputs, did
            budget.largest_bytes = self._largest_bytes
        else:
            budget.largest_bytes = max((entry.nbytes for entry in plan.entries), default=0)
        store.decision.follow(plan)
        shared.reporter.planned("no plan" if plan is None else plan.summary())
        if plan is None or plan.prefetch_bytes is None:
            store.prefetch.window.start_over()
        else:
            store.prefetch.window.follow(plan.prefetch_bytes)
        for tier in store.tiers.by_device.values():
            tier.expect_pending(None if plan is None else plan.pending_bytes)
