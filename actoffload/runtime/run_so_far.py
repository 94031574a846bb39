"""When a run began, what memory it found and needs beside saved tensors, and how many optimizer steps it has made."""

from __future__ import annotations

import copy
import weakref

from ..events import now
from ..memory.process_memory import rss_bytes
from ..tiers.accounts import Accounts
from ..tiers.tiers import Tiers
from .optimizer_steps import Watcher, optimizer_steps


class RunSoFar:
    """A store's run. The caller holds the store's lock.

    It has more than fifteen attributes: what the run found at first, and what looks at memory have shown.

    Attributes:
        memory_before: as `Tiers.memory` was when the first forward began.
        process_before_bytes: the resident memory of the process then.
        first_step: when the second step began, and what was counted by then: the first one allocates what all use.
        beside_bytes: the most that the device had beside resident saved tensors, in the last recorded step.
        began_bytes: what it had as that step began.
        passed_bytes: the most that it had in the forwards and backwards of the step that runs or ran last, where that
            was more than ever before; else 0, as an allocator says the highest peak alone.
        states_bytes: the most that it had as an optimizer's step ended: parameters, gradients and states.
    """

    def __init__(self, accounts: Accounts) -> None:
        self.memory_before = (0, 0)
        self.process_before_bytes = 0
        self.first_step: tuple[float, Accounts] | None = None
        self.beside_bytes = self.began_bytes = self.passed_bytes = self.states_bytes = 0
        self._beside_now = self._began_now = self._resident_bytes = self._held_bytes = 0
        self._most_bytes = 0
        self._accounts = accounts
        self._began_s: float | None = None
        self._optimizer_steps = self._first_optimizer_steps = optimizer_steps()
        self._microbatches_stepped = 0
        self._watcher: Watcher | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the step that begins now has all that any has: optimizer states, and gradients if they accumulate.

        Where several micro-batches go into a step, the first one after the optimizer's step begins without gradients.
        That step may have been counted already: whoever asks for statistics has it counted.
        """
        steps, accounts = optimizer_steps(), self._accounts
        uncounted = steps > self._optimizer_steps
        begins = uncounted or accounts.microbatches == self._microbatches_stepped
        accumulates = accounts.microbatches > accounts.optimizer_steps + uncounted
        return steps > self._first_optimizer_steps and not (accumulates and begins)

    def forward_begins(self, tiers: Tiers, *, first: bool) -> None:
        """A forward begins; ``first``: nothing is alive, so that a step begins with it."""
        accounts = self._accounts
        if self._began_s is None:
            self._began_s, self.process_before_bytes = now(), rss_bytes()
            self.memory_before = tiers.memory()
            if tiers.shared.config.device_memory is not None:
                self._watch_states(tiers)
        elif self.first_step is None and accounts.packed_tensors and (first or accounts.optimizer_steps):
            self.first_step = now(), copy.copy(accounts)

    def _watch_states(self, tiers: Tiers) -> None:
        mine, theirs = weakref.ref(self), weakref.ref(tiers)

        def look() -> None:
            run, tiers = mine(), theirs()
            memory = None if run is None or tiers is None else tiers.in_use()
            if run is not None and memory is not None:
                run.states_bytes = max(run.states_bytes, memory[0])

        self._watcher = Watcher(look)

    def count_optimizer_steps(self) -> None:
        """Count one step where an optimizer has stepped since a forward saved something; several may step in turn."""
        accounts, before = self._accounts, self._optimizer_steps
        self._optimizer_steps = optimizer_steps()
        if self._optimizer_steps > before and accounts.microbatches > self._microbatches_stepped:
            accounts.optimizer_steps += 1
            self._microbatches_stepped = accounts.microbatches

    # -- what the device has beside saved tensors ---------------------------------------------------------------------

    def begin_looking(self, tiers: Tiers, *, recorded: bool) -> None:
        """A step begins in which memory is looked at: highest peaks from before it say nothing of it."""
        if recorded and tiers.shared.config.device_memory is not None:
            tiers.reset_peak()
        memory = tiers.in_use()
        if memory is not None:
            self._began_now, self._most_bytes = memory
            self._held_bytes = self._accounts.recomputed_bytes
            self._resident_bytes = self._accounts.resident_bytes - self._held_bytes
            self._beside_now = self.passed_bytes = 0

    def look_at_memory(self, tiers: Tiers) -> None:
        """Note what the device has beside saved tensors now, and had since the last look. In few steps: it takes time.

        Between two looks the allocator may have passed its highest peak: then at least the lesser of what was resident
        at both was a part of it. But of what a recomputation holds the greater, as a plan counts all of it until
        backward has left the region.
        """
        memory = tiers.in_use()
        if memory is None:
            return
        (allocated, most), accounts = memory, self._accounts
        held, resident = accounts.recomputed_bytes, accounts.resident_bytes - accounts.recomputed_bytes
        beside = allocated - resident - held
        if most > self._most_bytes:
            beside = max(beside, most - min(resident, self._resident_bytes) - max(held, self._held_bytes))
            self._most_bytes = self.passed_bytes = most
        self._beside_now = max(self._beside_now, beside)
        self._resident_bytes, self._held_bytes = resident, held

    def backward_ends(self, tiers: Tiers, *, recorded: bool) -> None:
        """A backward has ended: look once more, and learn `beside_bytes` if the step was recorded."""
        self.look_at_memory(tiers)
        if recorded and self._beside_now:
            self.beside_bytes, self.began_bytes = self._beside_now, self._began_now

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first forward began."""
        return 0.0 if self._began_s is None else now() - self._began_s
