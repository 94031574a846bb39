"""Makes an offloader do as a plan says: what moves, how far ahead is read, which checkpointed regions run once."""

from __future__ import annotations

from ..planning.plan import Plan
from ..runtime.store import ActivationStore


class Following:
    """Follows one plan at a time, from the next forward on.

    Args:
        store: does as the plan says.

    Attributes:
        placement: says what stays.
    """

    def __init__(self, store: ActivationStore) -> None:
        self.placement = store.decision
        self._regions = store.regions
        self.plan: Plan | None = None
        self._largest_bytes = 0
        self._shared, self._tiers, self._prefetch = store.shared, store.tiers, store.prefetch

    def follow(self, plan: Plan | None, *, borrowed: bool = False) -> None:
        """Do as a plan says; None: as before the first plan.

        Args:
            plan: the plan.
            borrowed: it was made for larger inputs, and is followed by place alone.
        """
        self.plan = plan
        self._shared.largest_moved_bytes = 0  # what moved before there was this plan says nothing of what it moves
        budget = self._shared.budget
        self._largest_bytes = max(self._largest_bytes, budget.largest_bytes)
        if plan is None:  # the next forward may save what an earlier one of larger inputs did
            budget.largest_bytes = self._largest_bytes
        else:
            budget.largest_bytes = max((entry.nbytes for entry in plan.entries), default=0)
        self.placement.follow(plan, borrowed=borrowed)
        self._shared.reporter.planned("no plan" if plan is None else plan.summary())
        if plan is None or plan.prefetch_bytes is None:
            self._prefetch.window.start_over()
        else:
            self._prefetch.window.follow(plan.prefetch_bytes)
        for tier in self._tiers.by_device.values():
            tier.expect_pending(None if plan is None else plan.pending_bytes)
        self._regions.follow(frozenset(() if plan is None else plan.once))
