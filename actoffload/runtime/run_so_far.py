"""The beginning of a run, the memory that it found, and what its steps have shown so far."""

from __future__ import annotations

import copy

from ..events import now
from ..memory.process_memory import rss_bytes
from ..tiers.accelerator import Event
from ..tiers.accounts import Accounts
from ..tiers.tiers import Tiers
from .memory_beside import MemoryBeside
from .optimizer_steps import OptimizerSteps, watchers


class RunSoFar:
    """A store's run. The caller holds the store's lock.

    Attributes:
        memory_before: `Tiers.memory` as the first forward began.
        process_before_bytes: the resident memory of the process then.
        first_step: the time at which the first step ended, and its counts; it allocates memory that all steps use.
        optimizer: its steps; ``beside``: the memory beside saved tensors.
        states_bytes: the most bytes on the device as an optimizer's step ended: parameters, gradients and states.
        backward_ended: when the last backward ended: by the host's clock, and on the device (`Tiers.moment`). It is
            noted only if ``times_backward``.
    """

    def __init__(self, accounts: Accounts) -> None:
        self.memory_before = (0, 0)
        self.process_before_bytes = self.states_bytes = 0
        self.first_step: tuple[float, Accounts] | None = None
        self.optimizer = OptimizerSteps(accounts)
        self.beside = MemoryBeside(accounts)
        self.times_backward = False
        self.backward_ended: tuple[float, Event | None] | None = None
        self._accounts = accounts
        self._began_s: float | None = None
        self._tiers: Tiers | None = None

    def forward_begins(self, tiers: Tiers, *, first: bool) -> None:
        """Note that a forward begins; ``first``: nothing is alive, so that a step begins with it."""
        accounts = self._accounts
        if self._began_s is None:
            self._began_s, self.process_before_bytes = now(), rss_bytes()
            self.memory_before = tiers.memory()
            if tiers.shared.config.device_memory is not None:
                self._tiers = tiers
                watchers[self] = None
        elif self.first_step is None and accounts.packed_tensors and (first or accounts.optimizer_steps):
            self.first_step = now(), copy.copy(accounts)

    def optimizer_stepped(self) -> None:
        """Look at the device as an optimizer's step ends."""
        memory = None if self._tiers is None else self._tiers.in_use()
        if memory is not None:
            self.states_bytes = max(self.states_bytes, memory[0])

    def backward_ends(self, tiers: Tiers) -> None:
        """Note that a backward has ended."""
        if self.times_backward:
            self.backward_ended = now(), tiers.moment()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first forward began."""
        return 0.0 if self._began_s is None else now() - self._began_s
