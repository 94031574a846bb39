"""When a run began, what memory it found, and how many optimizer steps it has made."""

from __future__ import annotations

import copy

from ..events import now
from ..memory.process_memory import rss_bytes
from ..tiers.accounts import Accounts
from ..tiers.tiers import Tiers
from .optimizer_steps import optimizer_steps


class RunSoFar:
    """A store's run. The caller holds the store's lock.

    Attributes:
        memory_before: as `Tiers.memory` was when the first forward began.
        process_before_bytes: the resident memory of the process then.
        first_step: when the second step began, and what was counted by then: the first one allocates what all use.
        other_bytes: what the device's allocator had at its peak in the last recorded step beside saved tensors and what
            is alive between steps: gradients and temporaries.
    """

    def __init__(self, accounts: Accounts) -> None:
        self.memory_before = (0, 0)
        self.process_before_bytes = 0
        self.first_step: tuple[float, Accounts] | None = None
        self.other_bytes = 0
        self._beside_bytes = 0
        self._accounts = accounts
        self._began_s: float | None = None
        self._optimizer_steps = optimizer_steps()
        self._microbatches_stepped = 0

    def forward_begins(self, tiers: Tiers, *, first: bool) -> None:
        """A forward begins; ``first``: nothing is alive, so that a step begins with it."""
        accounts = self._accounts
        if self._began_s is None:
            self._began_s, self.process_before_bytes = now(), rss_bytes()
            self.memory_before = tiers.memory()
        elif self.first_step is None and accounts.packed_tensors and (first or accounts.optimizer_steps):
            self.first_step = now(), copy.copy(accounts)

    def count_optimizer_steps(self) -> None:
        """Count one step where an optimizer has stepped since a forward saved something; several may step in turn."""
        accounts, before = self._accounts, self._optimizer_steps
        self._optimizer_steps = optimizer_steps()
        if self._optimizer_steps > before and accounts.microbatches > self._microbatches_stepped:
            accounts.optimizer_steps += 1
            self._microbatches_stepped = accounts.microbatches

    def look_at_memory(self, tiers: Tiers) -> None:
        """Note what the device has beside saved tensors now. A step is recorded, so this happens in few steps."""
        memory = tiers.allocated_bytes
        if memory is not None:  # a plan fits itself into the memory of an accelerator alone
            self._beside_bytes = max(self._beside_bytes, memory[0] - self._accounts.resident_bytes)

    def recorded_backward_ends(self, tiers: Tiers) -> None:
        """Learn `other_bytes` of the step that is recorded."""
        if tiers.allocated_bytes is None:
            return
        allocated, most = tiers.allocated_bytes
        # A peak from before the first forward, as of loading the model, says nothing of a step.
        own_peak = most if most > self.memory_before[1] else 0
        beside = max(own_peak - self._accounts.step_peak_bytes, self._beside_bytes)
        self.other_bytes, self._beside_bytes = max(0, beside - allocated), 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first forward began."""
        return 0.0 if self._began_s is None else now() - self._began_s
