"""The running counts of an activation store, guarded by its lock, and the frozen `Statistics` made from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..locks import Mailbox
from .statistics import Statistics

MANY_DEFERRED = 4096
"""This many deferred entries are counted at once: nothing else may take the lock for long, and they would pile up."""

Deferred = int | tuple[str, int, bool]
"""A tensor that stays without a record: the reason, its bytes, and whether it is an activation; or the bytes of such an
activation that died. Without a reason its storage was counted before."""


@dataclass(slots=True)
class Accounts:
    """Counts in bytes unless named otherwise. The caller holds the store's lock.

    Fields with the same name as in `Statistics` are documented there. Tensors that stay without a record are only
    appended to ``deferred``, which needs no lock, also in a finalizer. They are counted, in order, before any peak can
    be passed.
    """

    deferred: Mailbox[Deferred] = field(default_factory=Mailbox)
    steps: int = 0
    unhooked: int = 0
    microbatches: int = 0
    optimizer_steps: int = 0
    packed_tensors: int = 0
    packed_bytes: int = 0
    deduplicated_bytes: int = 0
    halved_bytes: int = 0
    fp8_bytes: int = 0
    derived_bytes: int = 0
    moved_bytes: int = 0
    kept_bytes: Counter[str] = field(default_factory=Counter)
    forwarded_bytes: int = 0
    cancelled_bytes: int = 0
    late_bytes: int = 0  # the part of the forwarded bytes that was still on the device: its write had not ended
    resident_bytes: int = 0
    resident_by_module: Counter[str | None] | None = None  # of records, while tracing is on
    resident_peak_bytes: int = 0
    step_peak_bytes: int = 0  # as `resident_peak_bytes`, in the step that runs
    plan_peak_bytes: int = 0  # in the steps before it that ran under the same plan
    recomputed_bytes: int = 0  # resident bytes that recomputations hold until backward has used them
    recompute_peak_bytes: int = 0
    baseline_bytes: int = 0
    baseline_peak_bytes: int = 0
    pack_wait_s: float = 0.0
    unpack_wait_s: float = 0.0
    at_once_bytes: int = 0  # the most that one autograd node saved, where that was most of a forward
    refused_bytes: int = 0  # stayed because host memory was short
    degraded_bytes: int = 0  # stayed because a write or an allocation failed
    hooks_s: float = 0.0
    """Host time of hooks that moved records, in the steps that were watched; without waits."""
    idle_s: float = 0.0
    """The part of it before a moment at which an accelerator had caught up with the host."""
    live_records: int = 0
    degraded: Counter[str] = field(default_factory=Counter)

    def begin_step(self) -> None:
        """Nothing of the step before is alive: its peak counts for the plan that it ran under."""
        self.plan_peak_bytes = max(self.plan_peak_bytes, self.step_peak_bytes)
        self.step_peak_bytes = self.resident_bytes

    def begin_plan(self) -> None:
        """Another plan is followed from the step on that begins now."""
        self.plan_peak_bytes = 0
        self.step_peak_bytes = self.resident_bytes

    def count_coded(self, nbytes: int, *, exact: bool) -> None:
        """Count the bytes that the code of a storage takes less than the storage."""
        if exact:
            self.halved_bytes += nbytes
        else:
            self.fp8_bytes += nbytes

    def add_record(self, nbytes: int) -> None:
        """Count a storage that autograd saves: a run without offloading would hold it from now on."""
        self.live_records += 1
        if self.deferred:
            self.count_deferred()
        self.baseline_bytes += nbytes
        if self.baseline_bytes > self.baseline_peak_bytes:
            self.baseline_peak_bytes = self.baseline_bytes

    def remove_record(self, nbytes: int) -> None:
        """Count the death of the last handle on a storage."""
        self.live_records -= 1
        if self.deferred:
            self.count_deferred()
        self.baseline_bytes -= nbytes

    def add_resident(self, nbytes: int) -> None:
        """Count bytes that are on the device from now on."""
        if self.deferred:
            self.count_deferred()
        resident = self.resident_bytes = self.resident_bytes + nbytes
        if resident > self.resident_peak_bytes:
            self.resident_peak_bytes = resident
        if resident > self.step_peak_bytes:
            self.step_peak_bytes = resident

    def remove_resident(self, nbytes: int) -> None:
        """Count bytes that are no longer held on the device."""
        if self.deferred:
            self.count_deferred()
        self.resident_bytes -= nbytes

    def resident_at_once(self, nbytes: int) -> None:
        """Count bytes that are on the device at once, also bytes that this library has released."""
        self.resident_peak_bytes = max(self.resident_peak_bytes, nbytes)

    def recomputed(self, nbytes: int) -> None:
        """Count the bytes that recomputations hold now. With nothing moved they would hold as many."""
        self.remove_resident(self.recomputed_bytes)
        self.baseline_bytes += nbytes - self.recomputed_bytes
        self.baseline_peak_bytes = max(self.baseline_peak_bytes, self.baseline_bytes)
        self.recomputed_bytes = nbytes
        self.recompute_peak_bytes = max(self.recompute_peak_bytes, nbytes)
        self.add_resident(nbytes)

    def stays_after_all(self, nbytes: int, reason: str) -> None:
        """Count bytes that were to move, and were counted so, as kept."""
        self.moved_bytes -= nbytes
        self.kept_bytes[reason] += nbytes

    def count_deferred(self) -> None:
        """Count the tensors that stay without a record, and their deaths."""
        by_reason = self.kept_bytes
        tensors = packed = more = most = 0  # `more`: bytes above those when this call began, and the `most` of them
        for entry in self.deferred.drain():
            if isinstance(entry, int):
                more -= entry
                continue
            reason, nbytes, is_activation = entry
            if reason:
                by_reason[reason] += nbytes
            else:
                self.deduplicated_bytes += nbytes
            tensors += 1
            packed += nbytes
            if is_activation:
                more += nbytes
                if more > most:
                    most = more
        self.packed_tensors += tensors
        self.packed_bytes += packed
        self.baseline_peak_bytes = max(self.baseline_peak_bytes, self.baseline_bytes + most)
        self.resident_peak_bytes = max(self.resident_peak_bytes, self.resident_bytes + most)
        self.step_peak_bytes = max(self.step_peak_bytes, self.resident_bytes + most)
        self.baseline_bytes += more
        self.resident_bytes += more

    def freeze(self, **elsewhere: int) -> Statistics:
        """Return the counts as `Statistics`; ``elsewhere``: counts of pools, copies and engines."""
        ours = {name: getattr(self, name) for name in self.__slots__ if name in Statistics.__dataclass_fields__}
        counts: dict[str, Any] = {
            "kept_bytes": dict(self.kept_bytes),
            "degraded": dict(self.degraded),
            "plan_peak_bytes": max(self.plan_peak_bytes, self.step_peak_bytes),
            **elsewhere,
        }
        return Statistics(**{**ours, **counts})
