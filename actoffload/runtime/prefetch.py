"""Prefetch of the records that backward needs next: along the tape that it walks, then along the next tape."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..config import OffloadConfig
from ..tiers.record import Record, State
from ..tiers.shared import Shared
from ..tiers.tier import Tier
from .kept_place import KeptPlace
from .pipeline import Hint, Phases
from .tape import FOR_EVER, LearnedOrders, Tape, Window

CPU_PREFETCH_BYTES = 64 << 20
DEVICE_PREFETCH_BYTES = 128 << 20
REFILL_BELOW = 3 / 4
"""If a tier batches its copies, the window is refilled once less than this share of it is under way."""

LATE_S = 1e-4
"""A step whose compute streams waited no longer than this had its records in time."""
SHORTER = 0.95
"""The window grows again only if the last growth cut the waits to less than this share."""


def first_window(config: OffloadConfig, *, on_cpu: bool) -> Window:
    """Return the first window, for CPU tensors or for an accelerator's."""
    first = CPU_PREFETCH_BYTES if on_cpu else DEVICE_PREFETCH_BYTES
    return Window(config.size("prefetch_bytes", first), fixed=config.prefetch_bytes is not None)


class Prefetch:
    """Fetch the records that backward needs within the window. The caller holds the store's lock."""

    def __init__(self, shared: Shared, tiers: Mapping[str, Tier], window: Window, phases: Phases) -> None:
        self.window = window
        self.phases = phases
        self.orders = LearnedOrders()
        self._late_s = float("inf")
        """Seconds that compute streams waited in the step after which the window grew last; infinite after no wait."""
        self._shared = shared
        self._tiers = tiers
        self._refill_below = REFILL_BELOW if any(tier.gathers for tier in tiers.values()) else 1.0

    def begin_forward(self) -> None:
        """Widen the window if compute streams waited, as long as that helps; halve it if the device had no memory.

        Each wait of the host has widened the window at once. A stream's waits are known only after the step.
        """
        late_s, self._shared.late_s = self._shared.late_s, 0.0
        if late_s <= LATE_S:
            self._late_s = float("inf")
        elif late_s < SHORTER * self._late_s:  # else the link is full, and a wider window would not shorten the waits
            self._late_s = late_s
            self.window.waited()
        if self._shared.budget.no_memory_ahead:
            self._shared.budget.no_memory_ahead = False
            self.window.halve()

    def expect(self, hint: Hint) -> None:
        """Note the phase that is about to begin; fetch the first records of a backward at once."""
        tape = self.phases.hint(hint)
        if tape is not None and not tape.in_backward:
            self._fetch(tape, self._ahead(tape))

    def reach(self, record: Record | KeptPlace, round_: int) -> None:
        """Note that backward has reached a record; ``round_`` is how often this handle was unpacked before."""
        tape = record.tape
        if not tape.in_backward:
            self.phases.begin_backward(tape)
            self._tiers[record.kind].count_alive()  # now: the forward has ended, and its local variables are gone
        if round_ > record.round:  # this handle was unpacked in this round, so backward has begun again
            tape.walk.rewind()
        self._shared.events += tape.advance(record.index, self.orders)

    def during_backward(self, tape: Tape[Record]) -> None:
        """Fill the window along the tape that backward walks, and the rest of it along the next backward's tape."""
        if not tape.walk.exhausted:
            self._fill(tape, self._ahead(tape))
        if tape.walk.exhausted and not self._is_idle(tape):
            self._fetch_next(tape, tape.walk.left_bytes)

    def during_forward(self, tape: Tape[Record]) -> None:
        """Near the end of a forward, fill the window along the tape of the next backward, if that is another tape."""
        if self._is_idle(tape):  # each save comes here, so the answer "nothing to do" is kept until it may change
            return
        expected = self.phases.expected_bytes(tape)
        most = max(self.window.nbytes, 2 * self._shared.largest_moved_bytes)
        if not expected or tape.total_bytes + most < expected:
            tape.walk.idle = self.phases.changes, expected - most if expected else FOR_EVER
            return
        other = self._next_backward(tape)
        if other is not None and tape.total_bytes + self._ahead(other) >= expected:
            self._fetch(other, self._ahead(other))

    def after_forward(self, tape: Tape[Record]) -> None:
        """At the end of a forward, fetch the first records of the next backward, if that is of another tape."""
        self.begin_copies()  # no save of this forward fills the batch any more
        self._fetch_next(tape)

    def learn(self, tape: Tape[Record]) -> None:
        """Store the order in which backward walked a tape, as all its records are released."""
        if tape.in_backward:
            self.orders.put(tape.signature, tuple(tape.walk.seen))

    def _ahead(self, tape: Tape[Record]) -> int:
        ahead, spare = self.window.over(tape.total_bytes), self._shared.budget.spare_bytes
        return max(ahead if spare is None else min(ahead, spare), 2 * self._shared.largest_moved_bytes)

    def _fetch_next(self, tape: Tape[Record], left_bytes: int = 0) -> None:
        """Fetch the first records of the next backward, in the part of the window that the running one leaves."""
        other = self._next_backward(tape)
        if other is not None and self._ahead(other) > left_bytes:
            self._fetch(other, self._ahead(other) - left_bytes)

    def _is_idle(self, tape: Tape[Record]) -> bool:
        changes, nbytes = tape.walk.idle
        return changes == self.phases.changes and tape.total_bytes < nbytes

    def _next_backward(self, tape: Tape[Record]) -> Tape[Record] | None:
        """Return the tape of the next backward, if it is complete, not begun, and not ``tape``."""
        direction, other = self.phases.follows() or ("forward", None)
        # A tape that a graph-building backward saves (`built`) is fetched only once its own backward begins.
        if direction == "forward" or other is tape or other is None or other.in_backward or other.built:
            tape.walk.idle = self.phases.changes, FOR_EVER
            return None
        return other

    def _fetch(self, tape: Tape[Record], nbytes: int) -> None:
        tape.prepare(self.orders)  # its backward has not begun, so no order is chosen yet
        self._fill(tape, nbytes)

    def _fill(self, tape: Tape[Record], nbytes: int) -> None:
        if tape.walk.fetch_ahead(tape.records, nbytes, self._bring, self._refill_below):
            self.begin_copies()

    def begin_copies(self) -> None:
        """Begin the copies that wait in a batch, as no more records join it for now."""
        for tier in self._tiers.values():
            tier.begin_copies()

    def _bring(self, record: Record, early: bool) -> int | None:
        """Begin to fetch a record; return the bytes that this brings, or None if it is too early or there is no room.

        ``early``: it is so far ahead that it is taken only if it is still on the device.
        """
        shared, on_device = self._shared, record.on_device
        limited = shared.budget.limit_bytes is not None
        if (on_device and record.stays and not limited) or record.original() is not None:
            return 0  # taking it neither uses room nor withholds any
        if not on_device and (early or shared.stopped or shared.budget.no_memory_ahead):
            return None
        if record.state is State.FETCHING and not limited:
            return record.nbytes  # the read of another record brings it
        # A record on its way out takes no memory if it stays after all, but its room is not freed: hence 0 bytes.
        if not shared.budget.has_room_early(0 if on_device else record.nbytes, record):
            return None
        try:
            brought = self._tiers[record.kind].fetch(record, urgent=False)
        except torch.OutOfMemoryError:  # no harm to the step: backward does not need this record yet
            brought, shared.budget.no_memory_ahead = False, True
        return (0 if on_device else record.nbytes) if brought else None
