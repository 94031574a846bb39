"""The beginning of a run, the memory that it found and needs beside saved tensors, and its optimizer steps."""

from __future__ import annotations

import copy
from typing import NamedTuple

from ..events import now
from ..locks import Mailbox
from ..memory.process_memory import rss_bytes
from ..tiers.accounts import Accounts
from ..tiers.tiers import Tiers
from .optimizer_steps import optimizer_steps, watchers

BLOCK_SIZE = 512
"""PyTorch's allocators give each tensor a multiple of this many bytes."""


class Beside(NamedTuple):
    """The bytes on the device beside resident saved tensors in a step.

    Attributes:
        nbytes: the most, but for the forwards of checkpointed regions and for the turn.
        began_bytes: all bytes on the device as the step began.
        in_forward: by the place of a region, how many more there were in its forward, if there were. The number of
            regions stands for the turn, from the forward of the last region until backward reaches one: a loss takes
            memory that no region's backward needs.
    """

    nbytes: int
    began_bytes: int
    in_forward: dict[int, int]


class RunSoFar:
    """A store's run. The caller holds the store's lock.

    Attributes:
        memory_before: `Tiers.memory` as the first forward began.
        process_before_bytes: the resident memory of the process then.
        first_step: the time at which the first step ended, and its counts; it allocates memory that all steps use.
        beside: the memory beside saved tensors in the last recorded step.
        taken_bytes: bytes beside saved tensors that count as resident, for the forwards of regions; ``given_back``: the
            bytes of those forwards that have ended since the last look, as finalizers append them.
        passed_bytes: the most bytes on the device in the forwards and backwards of the last step, if that was a new
            peak; else 0, as an allocator reports the highest peak alone.
        states_bytes: the most bytes on the device as an optimizer's step ended: parameters, gradients and states.
        peak_beside_bytes: the bytes on the device at its peak in the running step, less the most saved bytes of the
            step; None in steps whose peak is not measured.
    """

    def __init__(self, accounts: Accounts) -> None:
        self.memory_before = (0, 0)
        self.process_before_bytes = 0
        self.first_step: tuple[float, Accounts] | None = None
        self.beside = Beside(0, 0, {})
        self.passed_bytes = self.states_bytes = self.taken_bytes = 0
        self.given_back: Mailbox[int] = Mailbox()
        self.peak_beside_bytes: int | None = None
        self._forwards_now: dict[int, int] = {}
        self._turn: int | None = None
        self._turn_now = 0
        self._resets = False
        self._beside_now = self._began_now = self._resident_bytes = self._held_bytes = 0
        self._most_bytes = 0
        self._accounts = accounts
        self._began_s: float | None = None
        self._optimizer_steps = self._first_optimizer_steps = optimizer_steps()
        self._microbatches_stepped = self._microbatches_of_step = 0
        self._tiers: Tiers | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the step that begins now has all memory that a step has: optimizer states, accumulated gradients.

        If a step has several micro-batches, the first one begins without gradients. The optimizer's step before it may
        have been counted already, as each call of `Offloader.statistics` counts it.
        """
        steps, accounts = optimizer_steps(), self._accounts
        uncounted = steps > self._optimizer_steps
        since = accounts.microbatches - self._microbatches_stepped
        # Of the last step alone: one skipped optimizer step, as by a gradient scaler, is no accumulation.
        accumulates = (since if uncounted else self._microbatches_of_step) > 1
        return steps > self._first_optimizer_steps and not (accumulates and (uncounted or not since))

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

    def count_optimizer_steps(self) -> None:
        """Count one step if any optimizer has stepped since a forward saved a tensor; several may step in turn."""
        accounts, before = self._accounts, self._optimizer_steps
        self._optimizer_steps = optimizer_steps()
        if self._optimizer_steps > before and accounts.microbatches > self._microbatches_stepped:
            accounts.optimizer_steps += 1
            self._microbatches_of_step = accounts.microbatches - self._microbatches_stepped
            self._microbatches_stepped = accounts.microbatches

    # -- the device's memory beside saved tensors ---------------------------------------------------------------------

    def begin_looking(self, tiers: Tiers, *, apart: bool) -> None:
        """Begin to look at memory in this step; ``apart``: without the peaks of earlier steps, and by its parts."""
        if apart:
            tiers.reset_peak()
        memory = tiers.in_use()
        self._forwards_now, self._turn, self._turn_now = {}, None, 0
        self._accounts.count_deferred()
        self.taken_bytes -= sum(self.given_back.drain())
        if memory is not None:
            self._began_now, self._most_bytes = memory
            self._resets = apart and memory[0] == memory[1]  # else nobody can reset the peak: a process's, say
            self._held_bytes = self._accounts.recomputed_bytes
            self._resident_bytes = self._accounts.resident_bytes - self._held_bytes - self.taken_bytes
            self._beside_now = self.passed_bytes = 0

    def measure_peak(self, tiers: Tiers, *, wanted: bool) -> None:
        """Have `backward_ends` measure the peak of the step that begins, if it is ``wanted``."""
        self.peak_beside_bytes = 0 if wanted else None
        if wanted:
            tiers.reset_peak()
            memory = tiers.in_use()
            self._most_bytes = 0 if memory is None else memory[1]  # a lower peak than earlier ones counts as new

    def look_at_memory(self, tiers: Tiers, place: int | None = None, *, born: int = 0, used: int = 0) -> None:
        """Note the bytes beside saved tensors on the device, now and at a peak since the last look. In few steps only.

        After the forward of a region, at ``place``, they count apart, and so do those of the turn, unless the
        allocator's peak cannot begin anew at each look: that peak would then hide what the rest of the step needs.

        Between two looks the allocator may have passed its peak. Saved tensors come and move in hooks alone, at whose
        ends this looks, and die at any time. So until this hook the resident bytes were at most those of the last look
        and the ``born`` bytes, which were there before their save. A simulator counts the same deaths no earlier, so
        the rest of the peak was beside saved tensors. Likewise all bytes count that a recomputation has held at either
        look, as a plan counts them until backward has left the region. At the turn, bytes that backward has just taken
        and that are ``used``, although their record is evicted, count as resident: most plans keep what a loss needs.
        """
        memory = tiers.in_use()
        if memory is None:
            return
        (allocated, most), accounts = memory, self._accounts
        accounts.count_deferred()
        self.taken_bytes -= sum(self.given_back.drain())
        held = accounts.recomputed_bytes
        resident = accounts.resident_bytes - held - self.taken_bytes + (used if self._turn is not None else 0)
        beside = allocated - resident - held
        if most > self._most_bytes:
            beside = max(beside, most - self._resident_bytes - born - max(held, self._held_bytes))
            self._most_bytes, self.passed_bytes = most, max(self.passed_bytes, most)
        if self._resets:
            self._most_bytes = allocated
            if most > allocated:
                tiers.reset_peak()
        if place is None and self._turn is not None and self._resets:
            self._turn_now = max(self._turn_now, beside)
        elif place is not None and self._resets:
            self._forwards_now[place] = max(self._forwards_now.get(place, 0), beside)
        else:
            self._beside_now = max(self._beside_now, beside)
        self._resident_bytes, self._held_bytes = resident, held

    def region_begins(self) -> None:
        """No turn has begun: another region's forward begins, or backward ends without having reached a region."""
        self._beside_now = max(self._beside_now, self._turn_now)
        self._turn, self._turn_now = None, 0

    def turn_begins(self, regions: int) -> None:
        """From now on the bytes count for the turn after so many regions, unless another region begins."""
        self._turn = regions

    def turn_ends(self) -> None:
        """Backward has reached a region."""
        if self._turn is not None and self._turn_now:
            self._forwards_now[self._turn] = max(self._turn_now, self._forwards_now.get(self._turn, 0))
        self._turn, self._turn_now = None, 0

    def backward_ends(self, tiers: Tiers, *, recorded: bool) -> None:
        """Look once more as a backward has ended, and set `beside` if the step was recorded."""
        self.look_at_memory(tiers)
        self.region_begins()
        memory = None if self.peak_beside_bytes is None else tiers.in_use()
        if self.peak_beside_bytes is not None and memory is not None:
            self.peak_beside_bytes = max(self.peak_beside_bytes, memory[1] - self._accounts.step_peak_bytes)
        if recorded and self._beside_now:
            most = self._beside_now
            more = {place: nbytes - most for place, nbytes in self._forwards_now.items() if nbytes > most}
            self.beside = Beside(most, self._began_now, more)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first forward began."""
        return 0.0 if self._began_s is None else now() - self._began_s
