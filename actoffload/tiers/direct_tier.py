"""Records of an accelerator's tensors that an engine moves between device memory and disk by itself.

Such an engine knows no streams. So the kernels that produce a tensor must have run before it is written, and the
kernels that used memory before must have run before it is filled. One thread waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..events import EventKind, now
from ..policy import KeepReason
from ..storage.spool import Spool
from ..storage.transfers import Transfer
from .copy_streams import CopyStreams
from .record import Record, State
from .shared import Shared
from .tier import Tier


class DirectTier(Tier):
    """Device ↔ NVMe, past host memory, by engines that take device memory."""

    copies: CopyStreams
    spool: Spool

    def __init__(self, shared: Shared, spool: Spool, copies: CopyStreams) -> None:
        super().__init__(shared, spool, copies)
        self._ahead: dict[Record, None] = {}
        """Records whose read has begun or ended, and that backward has not used yet."""

    # -- out ----------------------------------------------------------------------------------------------------------

    def offload(self, record: Record) -> KeepReason | None:
        limit = max(self._pending_limit_bytes, 2 * record.nbytes)
        if self.shared.budget.limit_bytes is None and self.shared.pending_bytes + record.nbytes > limit:
            return KeepReason.PRESSURE
        extent = self.allocate(record, record.nbytes)
        if extent is None:
            return KeepReason.DEGRADED
        wait = self._work_so_far(record)
        self._used_here(record, record.flat())
        on_done = partial(self._written, now())
        address = record.saved.address + record.saved.begin
        transfer = self.spool.write(
            extent, address, record.nbytes, on_done=on_done, keepalive=record.data, held=True, records=(record,)
        )
        record.to(State.SPILLING)
        self.shared.pending_bytes += record.nbytes
        self._copied_in_place.append(record)
        self.begun(transfer, wait)
        return None

    def _work_so_far(self, record: Record) -> Callable[[], None]:
        """Return a wait for all work of the current stream, which has made the bytes, or has used the memory."""
        device = self.copies.device
        return partial(device.synchronize, device.record(device.current_stream(record.saved.device.index or 0)))

    def _used_here(self, record: Record, tensor: Tensor) -> None:
        """Report to the allocator that the current stream uses memory, which may belong to another stream."""
        self.copies.device.used_on(tensor, self.copies.device.current_stream(record.saved.device.index or 0))

    def _written(self, since_s: float, transfer: Transfer) -> None:
        with self.shared.lock:
            for record in self.ended(transfer):
                if self.resized(record):
                    self.stay(record)
                else:
                    self.leaves_memory(record, since_s, transfer)

    # -- back ---------------------------------------------------------------------------------------------------------

    def _read(self, record: Record, urgent: bool) -> bool:
        """See `Tier`. If it is urgent, records that were read ahead, or are leaving, make room on the device."""
        while record.state is State.SPILLED:
            try:
                self._begin_read(record)
            except torch.OutOfMemoryError:
                if not urgent or not self.release_ahead():
                    raise
        return True

    def release_ahead(self) -> bool:
        self.shared.budget.no_memory_ahead = True
        ahead = [one for one in self._ahead if one.state is State.RESIDENT]
        for one in ahead:
            del self._ahead[one]
            self.evict(one)
        if not ahead:
            self.shared.begin_all()
            if self.shared.pending_bytes == 0 or self.shared.stopped:
                return False
            self.shared.changed.wait()  # the end of a write releases memory
        return True

    def _begin_read(self, record: Record) -> None:
        tensor = self.copies.device.empty(record.nbytes, record.saved.device.index or 0)
        wait = self._work_so_far(record)
        on_done = partial(self._arrived, tensor, now())
        assert record.disk is not None, "a spilled record is on disk"
        extent, address = record.disk.extent, tensor.data_ptr()
        transfer = self.spool.read(
            extent, address, record.nbytes, on_done=on_done, keepalive=tensor, held=True, records=(record,)
        )
        record.to(State.FETCHING)
        self._ahead[record] = None
        self.count_resident(record)
        self.begun(transfer, wait)

    def _arrived(self, tensor: Tensor, since_s: float, transfer: Transfer) -> None:
        with self.shared.lock:
            for record in self.ended(transfer):
                if transfer.error is not None:
                    self.remove_resident(record)
                    record.to(State.SPILLED)
                else:
                    self.add_resident(record, tensor.untyped_storage())
                    record.to(State.RESIDENT)
                    self.shared.reporter.event(EventKind.READ, record, since_s=since_s)

    def ready(self, record: Record) -> torch.UntypedStorage | None:
        if record.state is State.FETCHING:
            return None
        self._ahead.pop(record, None)
        if record.data is not None and record.on_disk:  # perhaps filled for another stream
            self._used_here(record, record.flat())
        return record.data

    # -- the end ------------------------------------------------------------------------------------------------------

    def release(self, record: Record) -> None:
        self._ahead.pop(record, None)
        super().release(record)

    def abandon(self) -> None:
        super().abandon()
        self._ahead.clear()
