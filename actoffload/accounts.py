"""The running counts of an offloader, guarded by its lock, and the frozen `Statistics` made from them."""

from __future__ import annotations

from collections import Counter, deque

from . import native_hooks
from .statistics import Statistics

MANY_NOTES = 4096
"""So many notes are worked off at once, so that they do not pile up where nothing else takes the lock."""

RECORD = 2

Note = int | tuple[str, int, int]
"""A tensor that stays: the reason, its bytes, and 0 for what is no activation, 1 for one, `RECORD` for one that has a
record; or the bytes of an activation that died, negative where it had a record."""


class Accounts:
    """Counts in bytes unless named otherwise. The caller holds the offloader's lock.

    Tensors that stay without a record are only noted by those who save or drop them, which is one atomic list operation
    and needs no lock, also in a finalizer. What was noted is worked off, in order, before any peak can be passed.
    """

    __slots__ = (
        "baseline_bytes",
        "baseline_peak_bytes",
        "cancelled_bytes",
        "deduplicated_bytes",
        "degraded",
        "forwarded_bytes",
        "kept_bytes",
        "live_records",
        "moved_bytes",
        "notes",
        "pack_wait_s",
        "packed_bytes",
        "packed_tensors",
        "recomputed_bytes",
        "resident_bytes",
        "resident_peak_bytes",
        "step_peak_bytes",
        "steps",
        "unpack_wait_s",
    )

    def __init__(self) -> None:
        self.notes: deque[Note] = deque()
        self.steps = 0
        self.packed_tensors = 0
        self.packed_bytes = 0
        self.deduplicated_bytes = 0
        self.moved_bytes = 0
        self.kept_bytes: Counter[str] = Counter()
        self.forwarded_bytes = 0
        self.cancelled_bytes = 0
        self.resident_bytes = 0
        self.resident_peak_bytes = 0
        self.step_peak_bytes = 0
        """As ``resident_peak_bytes``, since it was last set back."""
        self.recomputed_bytes = 0
        """Of the resident bytes, those that a recomputed block holds until its backward is over."""
        self.baseline_bytes = 0
        self.baseline_peak_bytes = 0
        self.pack_wait_s = 0.0
        self.unpack_wait_s = 0.0
        self.live_records = 0
        self.degraded: Counter[str] = Counter()

    def born(self, nbytes: int) -> None:
        """Autograd saved new bytes."""
        self.live_records += 1
        self.saved(nbytes)

    def died(self, nbytes: int) -> None:
        """The last handle on bytes died."""
        self.live_records -= 1
        if self.notes:
            self.settle()
        self.baseline_bytes -= nbytes

    def saved(self, nbytes: int) -> None:
        """Bytes that a run without offloading would hold from now on."""
        if self.notes:
            self.settle()
        self.baseline_bytes += nbytes
        if self.baseline_bytes > self.baseline_peak_bytes:
            self.baseline_peak_bytes = self.baseline_bytes

    def came(self, nbytes: int) -> None:
        """Bytes are on the device from now on."""
        if self.notes:
            self.settle()
        resident = self.resident_bytes = self.resident_bytes + nbytes
        if resident > self.resident_peak_bytes:
            self.resident_peak_bytes = resident
        if resident > self.step_peak_bytes:
            self.step_peak_bytes = resident

    def settle(self) -> None:
        """Work off what was noted."""
        native = native_hooks.loaded()
        if native is not None:
            native.settle(self)
        else:
            self._settle()

    def _settle(self) -> None:
        notes, by_reason = self.notes, self.kept_bytes
        saved = saved_peak = self.baseline_bytes
        held = held_peak = self.resident_bytes
        tensors = packed = records = 0
        try:
            while notes:
                note = notes[0]
                # An interrupt comes after a call: what is counted below is taken off before the next one.
                if isinstance(note, int):
                    saved -= abs(note)
                    held -= abs(note)
                    records -= note < 0
                    notes.popleft()
                    continue
                reason, nbytes, kind = note
                tensors += 1
                packed += nbytes
                saved += nbytes * (kind > 0)
                held += nbytes * (kind > 0)
                records += kind == RECORD
                notes.popleft()
                saved_peak = max(saved_peak, saved)
                held_peak = max(held_peak, held)
                by_reason[reason] += nbytes
        finally:  # an interrupt: what was worked off is counted
            self.packed_tensors += tensors
            self.packed_bytes += packed
            self.live_records += records
            self.baseline_bytes, self.resident_bytes = saved, held
            self.baseline_peak_bytes = max(self.baseline_peak_bytes, saved_peak)
            self.resident_peak_bytes = max(self.resident_peak_bytes, held_peak)
            self.step_peak_bytes = max(self.step_peak_bytes, held_peak)

    def at_once(self, nbytes: int) -> None:
        """So many bytes are on the device at once, also those that this library has let go of."""
        self.resident_peak_bytes = max(self.resident_peak_bytes, nbytes)

    def left(self, nbytes: int) -> None:
        """Bytes are no longer held on the device."""
        if self.notes:
            self.settle()
        self.resident_bytes -= nbytes

    def recomputed(self, nbytes: int) -> None:
        """A block that was recomputed holds so many bytes, and those before it hold none any more."""
        self.left(self.recomputed_bytes)
        self.recomputed_bytes = nbytes
        self.came(nbytes)

    def freeze(self, **elsewhere: int) -> Statistics:
        """The counts as `Statistics`; ``elsewhere`` are those that pools, copies and engines count themselves."""
        return Statistics(
            steps=self.steps,
            packed_tensors=self.packed_tensors,
            packed_bytes=self.packed_bytes,
            deduplicated_bytes=self.deduplicated_bytes,
            kept_bytes=dict(self.kept_bytes),
            forwarded_bytes=self.forwarded_bytes,
            cancelled_bytes=self.cancelled_bytes,
            resident_peak_bytes=self.resident_peak_bytes,
            baseline_peak_bytes=self.baseline_peak_bytes,
            pack_wait_s=self.pack_wait_s,
            unpack_wait_s=self.unpack_wait_s,
            live_records=self.live_records,
            degraded=dict(self.degraded),
            **elsewhere,
        )
