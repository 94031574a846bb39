"""What is brought back before backward asks for it: along the tape that it walks, then along the next one's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .phases import Hint, Phases
from .record import Record, State
from .schedule import FOR_EVER, LearnedOrders, Tape, Window
from .tiers import Core, Mover


class Prefetch:
    """Brings back what backward will ask for within the next so many bytes. The caller holds the offloader's lock.

    Args:
        core: shared with the movers; its budget bounds what is fetched ahead.
        movers: by device type.
        window: how far ahead to fetch.
        phases: which forward or backward comes next.
    """

    def __init__(self, core: Core, movers: Mapping[str, Mover], window: Window, phases: Phases[Tape[Record]]) -> None:
        self.window = window
        self.phases = phases
        self.orders = LearnedOrders()
        self._core = core
        self._movers = movers

    def expect(self, hint: Hint) -> None:
        """A phase is about to begin; the first bytes of a backward are fetched at once."""
        tape = self.phases.hint(hint)
        if tape is not None and not tape.in_backward:
            self._fetch(tape, self._ahead(tape))

    def walk(self, record: Record, round_: int) -> None:
        """Backward has reached a record; ``round_`` is how often this handle was unpacked before."""
        tape = record.tape
        if tape is None:
            return
        if not tape.in_backward:
            self.phases.begin_backward(tape)
        if round_ > record.round:
            tape.rewind()
        tape.advance(record.index, self.orders)

    def during_backward(self, tape: Tape[Record]) -> None:
        """Fill the window along the tape that backward walks, and what is left of it along the next backward's."""
        if not tape.exhausted:
            tape.fetch_ahead(self._ahead(tape), self._bring)
        if tape.exhausted and not tape.idle(self.phases.changes):
            self._fetch_next(tape, tape.left_bytes)

    def during_forward(self, tape: Tape[Record]) -> None:
        """Near the end of a forward: fill the window along the tape whose backward comes next, if it is another."""
        changes = self.phases.changes
        if tape.idle(changes):
            return
        expected = self.phases.expected_bytes(tape)
        most = max(self.window.nbytes, 2 * self._core.largest_moved_bytes)
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
        self._fetch_next(tape)

    def learn(self, tape: Tape[Record]) -> None:
        """The last record of a tape was released: remember the order in which backward walked it."""
        order = tape.learned() if tape.live == 0 else None
        if order is not None:
            self.orders.put(tape.signature, order)

    def _ahead(self, tape: Tape[Record]) -> int:
        return max(self.window.over(tape.total_bytes), 2 * self._core.largest_moved_bytes)

    def _fetch_next(self, tape: Tape[Record], left_bytes: int = 0) -> None:
        """Fetch what the next backward, of another tape, wants first, less what is left of the one that runs."""
        other = self._next_backward(tape)
        if other is None:
            tape.idle_until(self.phases.changes, FOR_EVER)
        elif self._ahead(other) > left_bytes:
            self._fetch(other, self._ahead(other) - left_bytes)

    def _next_backward(self, tape: Tape[Record]) -> Tape[Record] | None:
        """The tape that is walked next, if it is another one and not begun."""
        follows = self.phases.follows()
        if follows is None:
            return None
        direction, other = follows
        return None if direction != "backward" or other is tape or other is None or other.in_backward else other

    def _fetch(self, tape: Tape[Record], nbytes: int) -> None:
        tape.prepare(self.orders)
        tape.fetch_ahead(nbytes, self._bring)

    def _bring(self, record: Record, early: bool) -> int | None:
        near = record.data is not None
        if near and record.stays and self._core.device_budget is None:
            return 0  # it takes nothing and gives nothing
        if early and not near:
            return None
        if not near and self._core.inert:
            return None  # nothing is begun any more, and what is near is handed out all the same
        if record.state is State.FETCHING and self._core.device_budget is None:
            record.wanted = True
            return record.nbytes  # it comes with another
        # What is still on its way out takes no more memory when it stays, but the room that it would have given.
        if not self._core.has_room_ahead(0 if near else record.nbytes):
            return None
        try:
            brought = self._movers[record.kind].bring(record, urgent=False)
        except torch.OutOfMemoryError:
            brought = False  # it is only early: what backward needs now is there
        record.wanted = True  # after: the mover counts what it forwards when it is first wanted
        return (0 if near else record.nbytes) if brought else None
