"""The memory on the device beside saved tensors, which a plan has to leave room for."""

from __future__ import annotations

from typing import NamedTuple

from ..locks import Mailbox
from ..tiers.accounts import Accounts
from ..tiers.tiers import Tiers

BLOCK_SIZE = 512
"""PyTorch's allocators give each tensor a multiple of this many bytes."""


class Beside(NamedTuple):
    """The bytes on the device beside resident saved tensors in a step."""

    nbytes: int  # the most, but for the forwards of checkpointed regions and for the turn
    began_bytes: int  # all bytes on the device as the step began
    in_forward: dict[int, int]
    """By the place of a region, how many more there were in its forward, if there were. The number of regions stands
    for the turn, from the last region's forward until backward reaches one: a loss takes memory that no region's
    backward needs."""


class Parts:
    """The most bytes beside saved tensors in a step, by its parts: forwards of regions, the turn, and the rest.

    ``apart``: the parts count apart; otherwise all bytes count as the rest.
    """

    def __init__(self, began_bytes: int = 0, *, apart: bool = False) -> None:
        self.apart = apart
        self.turn: int | None = None  # the regions before it, while it lasts
        self._began_bytes = began_bytes
        self._most = self._turn_most = 0
        self._in_forward: dict[int, int] = {}

    def add(self, nbytes: int, place: int | None) -> None:
        """Count bytes after the forward of the region at ``place``, or at the present point of the step."""
        if place is not None and self.apart:
            self._in_forward[place] = max(self._in_forward.get(place, 0), nbytes)
        elif self.turn is not None and self.apart:
            self._turn_most = max(self._turn_most, nbytes)
        else:
            self._most = max(self._most, nbytes)

    def region_begins(self) -> None:
        """No turn has begun: another region's forward begins."""
        self._most = max(self._most, self._turn_most)
        self.turn, self._turn_most = None, 0

    def turn_begins(self, regions: int) -> None:
        """From now on the bytes count for the turn after so many regions, unless another region begins."""
        self.turn = regions

    def turn_ends(self) -> None:
        """Backward has reached a region."""
        if self.turn is not None and self._turn_most:
            self._in_forward[self.turn] = max(self._turn_most, self._in_forward.get(self.turn, 0))
        self.turn, self._turn_most = None, 0

    def result(self) -> Beside | None:
        """Return the bytes of the step; None if there were none outside of the parts."""
        more = {place: nbytes - self._most for place, nbytes in self._in_forward.items() if nbytes > self._most}
        return Beside(self._most, self._began_bytes, more) if self._most else None


class MemoryBeside:
    """Measures the memory beside saved tensors in the steps of a store. The caller holds the store's lock."""

    def __init__(self, accounts: Accounts) -> None:
        self.recorded = Beside(0, 0, {})  # in the last recorded step
        self.parts = Parts()  # of the running step
        self.taken_bytes = 0  # count as resident, for the forwards of regions
        self.given_back: Mailbox[int] = Mailbox()
        """The bytes of those forwards that have ended since the last look, as finalizers append them."""
        self.passed_bytes = 0
        """The most bytes on the device in the forwards and backwards of the last step, if that was a new peak; else 0,
        as an allocator reports the highest peak alone."""
        self.at_peak_bytes: int | None = None
        """The bytes on the device at its peak in the running step, less the most saved bytes of the step; None in steps
        whose peak is not measured."""
        self._accounts = accounts
        self._resident_bytes = self._held_bytes = self._most_bytes = 0  # as the last look has found them

    def begin_step(self, tiers: Tiers, *, apart: bool) -> None:
        """Begin to look at memory in this step; ``apart``: without the peaks of earlier steps, and by its parts."""
        if apart:
            tiers.reset_peak()
        memory = tiers.in_use()
        self._count_ended()
        self.parts = Parts()
        if memory is not None:
            began, self._most_bytes = memory
            # Unequal where the peak cannot be reset, as a process's.
            self.parts = Parts(began, apart=apart and memory[0] == memory[1])
            self._held_bytes = self._accounts.recomputed_bytes
            self._resident_bytes = self._accounts.resident_bytes - self._held_bytes - self.taken_bytes
            self.passed_bytes = 0

    def measure_peak(self, tiers: Tiers, *, wanted: bool) -> None:
        """Have `backward_ends` measure the peak of the step that begins, if it is ``wanted``."""
        self.at_peak_bytes = 0 if wanted else None
        if wanted:
            tiers.reset_peak()
            memory = tiers.in_use()
            self._most_bytes = 0 if memory is None else memory[1]  # a lower peak than earlier ones counts as new

    def look(self, tiers: Tiers, place: int | None = None, *, born: int = 0, used: int = 0) -> None:
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
        self._count_ended()
        held = accounts.recomputed_bytes
        resident = accounts.resident_bytes - held - self.taken_bytes + (used if self.parts.turn is not None else 0)
        beside = allocated - resident - held
        if most > self._most_bytes:
            beside = max(beside, most - self._resident_bytes - born - max(held, self._held_bytes))
            self._most_bytes, self.passed_bytes = most, max(self.passed_bytes, most)
        if self.parts.apart:
            self._most_bytes = allocated
            if most > allocated:
                tiers.reset_peak()
        self.parts.add(beside, place)
        self._resident_bytes, self._held_bytes = resident, held

    def backward_ends(self, tiers: Tiers, *, recorded: bool) -> None:
        """Look once more as a backward has ended, and set `recorded` if the step was."""
        self.look(tiers)
        if self.at_peak_bytes is not None and (memory := tiers.in_use()) is not None:
            self.at_peak_bytes = max(self.at_peak_bytes, memory[1] - self._accounts.step_peak_bytes)
        if recorded:
            self.recorded = self.parts.result() or self.recorded

    def _count_ended(self) -> None:
        self._accounts.count_deferred()
        self.taken_bytes -= sum(self.given_back.drain())
