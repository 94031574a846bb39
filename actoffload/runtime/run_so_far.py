"""The run so far: its beginning, the memory that it found, its first step, and the optimizers' steps.

A count of the optimizers' steps in this process separates steps from micro-batches.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..events import now
from ..memory.process_memory import rss_bytes
from ..tiers.accelerator import Event
from ..tiers.accounts import Accounts
from ..tiers.tiers import Tiers
from .memory_beside import MemoryBeside
from .untraced import skipped

_steps: list[int] = []
"""Empty until the first query, then one number."""


def optimizer_steps() -> int:
    """Return the steps of all ``torch.optim.Optimizer`` since the first call."""
    if not _steps:
        _steps.append(0)
        register_optimizer_step_post_hook(_stepped)
    return _steps[0]


watchers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""Runs that look at the end of each optimizer's step. Weak: the hook is the process's, and must keep no dropped run."""


@skipped
def _stepped(*_: object) -> None:
    if not torch.compiler.is_compiling():
        _steps[0] += 1
        # Copied by one atomic operation, as another thread may add one; to iterate runs Python code for each.
        for ref in watchers.keyrefs():
            if (watcher := ref()) is not None:
                watcher.optimizer_stepped()


class OptimizerSteps:
    """The optimizer's steps of one store, and the micro-batches of each. The caller holds the store's lock."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._counted = self._first = optimizer_steps()
        self._microbatches = 0
        """The number when the last step was counted; `_of_last_step`: how many that step had."""
        self._of_last_step = 0

    @property
    def settled(self) -> bool:
        """Whether the step that begins now has all memory that a step has: optimizer states, accumulated gradients.

        If a step has several micro-batches, the first one begins without gradients. The optimizer's step before it may
        have been counted already, as each call of `Offloader.statistics` counts it.
        """
        steps = optimizer_steps()
        uncounted = steps > self._counted
        since = self._accounts.microbatches - self._microbatches
        # Of the last step alone: one skipped optimizer step, as by a gradient scaler, is no accumulation.
        accumulates = (since if uncounted else self._of_last_step) > 1
        return steps > self._first and not (accumulates and (uncounted or not since))

    def count(self) -> None:
        """Count one step if any optimizer has stepped since a forward saved a tensor; several may step in turn."""
        accounts, before = self._accounts, self._counted
        self._counted = optimizer_steps()
        if self._counted > before and accounts.microbatches > self._microbatches:
            accounts.optimizer_steps += 1
            self._of_last_step = accounts.microbatches - self._microbatches
            self._microbatches = accounts.microbatches


class RunSoFar:
    """A store's run. The caller holds the store's lock."""

    def __init__(self, accounts: Accounts) -> None:
        self.memory_before = (0, 0)  # `Tiers.memory` as the first forward began
        self.process_before_bytes = 0  # the resident memory of the process then
        self.states_bytes = 0
        """The most bytes on the device as an optimizer's step ended: parameters, gradients and states."""
        self.first_step: tuple[float, Accounts] | None = None
        """When the first step ended, which allocates memory that all steps use, and its counts."""
        self.optimizer = OptimizerSteps(accounts)
        self.beside = MemoryBeside(accounts)
        self.times_backward = False
        self.backward_ended: tuple[float, Event | None] | None = None
        """When the last backward ended, by the host's clock and on the device, if ``times_backward``."""
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
