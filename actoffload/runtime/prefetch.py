"""What is brought back before backward asks for it: along the tape that it follows, then along the next one's."""

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
"""Where copies go together, the window is filled up as soon as less than this share of it is on its way."""

LATE_S = 1e-4
"""A step whose compute streams waited no longer had what it wanted in time."""
SHORTER = 0.95
"""The window is widened again where the waits were shorter by this factor since the last time."""


def first_window(config: OffloadConfig, *, on_cpu: bool) -> Window:
    """How far ahead of backward to fetch at first, of CPU tensors or an accelerator's."""
    first = CPU_PREFETCH_BYTES if on_cpu else DEVICE_PREFETCH_BYTES
    return Window(config.size("prefetch_bytes", first), fixed=config.prefetch_bytes is not None)


class Prefetch:
    """Bring back what backward will ask for within the next so many bytes. The caller holds the store's lock.

    Args:
        shared: its budget bounds what is fetched ahead.
        tiers: by device type.
        window: how far ahead to fetch.
        phases: which forward or backward comes next.
    """

    def __init__(self, shared: Shared, tiers: Mapping[str, Tier], window: Window, phases: Phases) -> None:
        self.window = window
        self.phases = phases
        self.orders = LearnedOrders()
        self._late_s = float("inf")
        """What compute streams waited in the step for which the window was widened last, while they wait in each."""
        self._shared = shared
        self._tiers = tiers
        self._refill_below = REFILL_BELOW if any(tier.gathers for tier in tiers.values()) else 1.0

    def begin_forward(self) -> None:
        """Fetch further ahead where compute streams waited for it, as long as that helps.

        And again, half as far, where there was no memory.

        The host's own waits have widened the window one by one: those of a stream are known once they are over.
        """
        late_s, self._shared.late_s = self._shared.late_s, 0.0
        if late_s <= LATE_S:
            self._late_s = float("inf")
        elif late_s < SHORTER * self._late_s:  # a full link makes it wait as long, however far ahead is fetched
            self._late_s = late_s
            self.window.waited()
        if self._shared.no_memory_ahead:
            self._shared.no_memory_ahead = False
            self.window.halve()

    def expect(self, hint: Hint) -> None:
        """A phase is about to begin; the first bytes of a backward are fetched at once."""
        tape = self.phases.hint(hint)
        if tape is not None and not tape.in_backward:
            self._fetch(tape, self._ahead(tape))

    def reach(self, record: Record | KeptPlace, round_: int) -> None:
        """Backward has reached a record; ``round_`` is how often this handle was unpacked before."""
        tape = record.tape
        if tape is None:
            return
        if not tape.in_backward:
            self.phases.begin_backward(tape)
            self._tiers[record.kind].count_alive()
        if round_ > record.round:
            tape.rewind()
        self._shared.events += tape.advance(record.index, self.orders)

    def given(self, record: Record, waited_s: float) -> None:
        """Backward has a record that had moved; count what it waits for as it begins, and how much that is."""
        tape, accounts = record.tape, self._shared.accounts
        if tape.is_first:
            accounts.first_wait_s += waited_s
            accounts.first_bytes = max(accounts.first_bytes, tape.bytes_up_to(record.index))
        tape.given_bytes += record.nbytes

    def during_backward(self, tape: Tape[Record]) -> None:
        """Fill the window along the tape that backward walks, and what is left of it along the next backward's."""
        if not tape.exhausted:
            self._fill(tape, self._ahead(tape))
        if tape.exhausted and not tape.idle(self.phases.changes):
            self._fetch_next(tape, tape.left_bytes)

    def during_forward(self, tape: Tape[Record]) -> None:
        """Near the end of a forward: fill the window along the tape whose backward comes next, if it is another."""
        changes = self.phases.changes
        if tape.idle(changes):
            return
        expected = self.phases.expected_bytes(tape)
        most = max(self.window.nbytes, 2 * self._shared.largest_moved_bytes)
        if not expected or tape.total_bytes + most < expected:
            tape.idle_until(changes, expected - most if expected else FOR_EVER)
            return
        other = self._next_backward(tape)
        if other is None:
            tape.idle_until(changes, FOR_EVER)
        elif tape.total_bytes + self._ahead(other) >= expected:
            self._fetch(other, self._ahead(other))

    def after_forward(self, tape: Tape[Record]) -> None:
        """A forward has ended: fetch what the backward that comes next, of another one, will want first."""
        self.begin_copies()
        self._fetch_next(tape)

    def learn(self, tape: Tape[Record]) -> None:
        """The last record of a tape was released: remember the order in which backward walked it."""
        order = tape.learned() if tape.live == 0 else None
        if order is not None:
            self.orders.put(tape.signature, order)

    def _ahead(self, tape: Tape[Record]) -> int:
        ahead, spare = self.window.over(tape.total_bytes), self._shared.spare_bytes
        return max(ahead if spare is None else min(ahead, spare), 2 * self._shared.largest_moved_bytes)

    def _fetch_next(self, tape: Tape[Record], left_bytes: int = 0) -> None:
        """Fetch what the next backward, of another tape, wants first, less what is left of the one that runs."""
        other = self._next_backward(tape)
        if other is None:
            tape.idle_until(self.phases.changes, FOR_EVER)
        elif self._ahead(other) > left_bytes:
            self._fetch(other, self._ahead(other) - left_bytes)

    def _next_backward(self, tape: Tape[Record]) -> Tape[Record] | None:
        """The tape that is walked next, if it is another one, not begun, and complete."""
        follows = self.phases.follows()
        if follows is None:
            return None
        direction, other = follows
        if direction != "backward" or other is tape or other is None or other.in_backward or other.built:
            return None
        return other

    def _fetch(self, tape: Tape[Record], nbytes: int) -> None:
        tape.prepare(self.orders)
        self._fill(tape, nbytes)

    def _fill(self, tape: Tape[Record], nbytes: int) -> None:
        if tape.fetch_ahead(nbytes, self._bring, self._refill_below):
            self.begin_copies()

    def begin_copies(self) -> None:
        """Begin the copies that wait for others to go with them: no others come for now."""
        for tier in self._tiers.values():
            tier.begin_copies()

    def _bring(self, record: Record, early: bool) -> int | None:
        """Begin to bring a record back; return the bytes that makes, or None when it is too early or there is no room.

        Args:
            record: what backward will ask for.
            early: it is so far ahead that only what is on the device already is looked at.
        """
        shared, on_device = self._shared, record.on_device
        limited = shared.budget.limit_bytes is not None
        if (on_device and record.stays and not limited) or record.original() is not None:
            return 0  # it takes nothing and gives nothing
        if not on_device and (early or shared.stopped or shared.no_memory_ahead):
            return None
        if record.state is State.FETCHING and not limited:
            record.wanted = True
            return record.nbytes  # it comes with another
        # What is still on its way out takes no more memory when it stays, but the room that it would have given.
        if not shared.budget.has_room_early(0 if on_device else record.nbytes):
            return None
        try:
            brought = self._tiers[record.kind].fetch(record, urgent=False)
        except torch.OutOfMemoryError:  # it is only early: what backward needs now is there
            brought, shared.no_memory_ahead = False, True
        record.wanted = True  # after: the tier counts what it forwards when it is first wanted
        return (0 if on_device else record.nbytes) if brought else None
