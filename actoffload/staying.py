"""The counts of saved tensors that stay without a record: no lock on the way of those who save or drop one."""

from __future__ import annotations

from collections import deque

from .accounts import Accounts

MANY = 4096
"""So many notes are worked off at once, so that they do not pile up where nothing else takes the lock."""

Note = int | tuple[str, int, bool]
"""Bytes of an activation that died; or a tensor that stays: the reason, its bytes, whether it is an activation."""


class Staying:
    """Notes of tensors that stay, in the order in which they came and died.

    A note is one atomic list operation, safe in a finalizer too. Whoever holds the offloader's lock works them off
    before it looks at the counts or changes them.

    Args:
        accounts: where they are counted.
    """

    def __init__(self, accounts: Accounts) -> None:
        self.notes: deque[Note] = deque()
        self._accounts = accounts

    def settle(self) -> None:
        """Work off what was noted. The caller holds the offloader's lock."""
        accounts, notes = self._accounts, self.notes
        by_reason = accounts.kept_bytes
        saved = saved_peak = accounts.baseline_bytes
        held = held_peak = accounts.resident_bytes
        tensors = packed = 0
        while notes:
            note = notes.popleft()
            if isinstance(note, int):
                saved -= note
                held -= note
                continue
            reason, nbytes, activation = note
            tensors += 1
            packed += nbytes
            by_reason[reason] += nbytes
            if activation:
                saved += nbytes
                held += nbytes
                saved_peak = max(saved_peak, saved)
                held_peak = max(held_peak, held)
        accounts.packed_tensors += tensors
        accounts.packed_bytes += packed
        accounts.baseline_bytes, accounts.resident_bytes = saved, held
        accounts.peaked(saved_peak, held_peak)
