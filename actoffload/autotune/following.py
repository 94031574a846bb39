"""Makes an offloader do as a plan says: what moves, how far ahead is read, which blocks are recomputed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn

from ..errors import ConfigError
from ..planning.plan import Plan
from ..runtime.store import ActivationStore
from .recompute import Recompute, RecomputeMeter


class Following:
    """Follows one plan at a time, from the next forward on.

    Args:
        store: does as the plan says.
        blocks: the blocks of the models by name, as they are known at any time.
        meter: counts what recomputed blocks hold.

    Attributes:
        placement: says what stays.
    """

    def __init__(self, store: ActivationStore, blocks: Mapping[str, nn.Module], meter: RecomputeMeter) -> None:
        self.placement = store.decision
        self.blocks = blocks
        self.recompute = Recompute(meter)
        self.plan: Plan | None = None
        self._largest_bytes = 0
        self._shared, self._tiers, self._prefetch, self._regions = (
            store.shared, store.tiers, store.prefetch, store.regions,
        )  # fmt: skip
        # Dropped without close(): the model is as it was.
        weakref.finalize(self, self.recompute.undo).atexit = False

    def follow(self, plan: Plan | None, once: frozenset[int] | None = None) -> None:
        """Do as a plan says; None: as before the first one. ``once``: the regions that run once, else the plan's."""
        self.plan = plan
        if once is None:
            once = frozenset(() if plan is None else plan.once)
        self._regions.follow(once)
        self._shared.largest_moved_bytes = 0  # what moved before there was this plan says nothing of what it moves
        self._shared.budget.recompute_bytes = 0 if plan is None else plan.recompute_bytes
        budget = self._shared.budget
        self._largest_bytes = max(self._largest_bytes, budget.largest_bytes)
        if plan is None:  # the next forward may save what an earlier one of larger inputs did
            budget.largest_bytes = self._largest_bytes
        else:
            budget.largest_bytes = max((entry.nbytes for entry in plan.entries), default=0)
        self.placement.follow(plan)
        self._shared.reporter.planned("no plan" if plan is None else plan.summary())
        if plan is None or plan.prefetch_bytes is None:
            self._prefetch.window.start_over()
        else:
            self._prefetch.window.follow(plan.prefetch_bytes)
        for tier in self._tiers.by_device.values():
            tier.expect_pending(None if plan is None else plan.pending_bytes)
        self.blocks_changed()

    def blocks_changed(self) -> None:
        """Recompute those of the plan's blocks that are known now, and leave others as they were."""
        names = () if self.plan is None else self.plan.recompute
        arguments = {} if self.plan is None else dict(zip(names, self.plan.arguments, strict=False))
        self.recompute.follow(self.blocks, names, arguments)

    def check(self) -> None:
        """A step begins under a plan that the user gave.

        Raises:
            ConfigError: a block that it recomputes is not there.
        """
        assert self.plan is not None, "the user gave one"
        told = f"a plan of {len(self.plan.entries)} storages"
        missing = sorted(set(self.plan.recompute) - self.recompute.names)
        if missing:
            known = f"they have {', '.join(sorted(self.blocks)[:3])}, ..." if self.blocks else "give model="
            raise ConfigError("policy", told, f"it recomputes {missing[0]!r}, which is no block of the models: {known}")
