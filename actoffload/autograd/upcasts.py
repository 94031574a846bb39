"""``codec``: of a float32 tensor that was cast from bfloat16, autograd saves the bfloat16 numbers.

Models in bfloat16 compute norms and adapters in float32, and save what they cast. A bfloat16 number is the upper half
of its float32, so the half that is saved gives back every bit, NaNs included. The half takes the tensor's place from
the save on: it moves, stays and is planned like any other saved storage.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import StateError
from ..tiers.device_tier import CAPTURED
from ..tiers.record import Record, State
from ..tiers.storage_ref import StorageRef
from .handles import Handle, check_version, empty, present, version_probe, view_in
from .originals import Checked, Original, Originals, source_of

if TYPE_CHECKING:
    from ..runtime.store import ActivationStore
    from ..runtime.tape import Tape

LOWER = 0 if sys.byteorder == "little" else 1
"""Which 16 bits of a float32 a bfloat16 lacks."""


class Half:
    """The bfloat16 numbers of one float32 storage, for the handles of all views that one stream saves.

    Args:
        original: the float32 storage.
        record: of the numbers, which the original's stream has made.
    """

    __slots__ = ("__weakref__", "_wide", "original", "record")

    def __init__(self, original: Original, record: Record) -> None:
        self._wide: tuple[StorageRef, Any] | None = None
        self.original = original
        self.record = record

    def peek(self, store: ActivationStore, *, fetch: bool) -> torch.UntypedStorage | None:
        """Return a storage with all bytes of the float32 tensor; see `present`."""
        wide = self.original.storage()
        found = present(self.record, store, fetch=fetch) if wide is None else None
        if found is None:
            return wide
        numbers = empty(torch.bfloat16, self.record.device).detach()
        return numbers.set_(found[0], 0, (self.record.nbytes // 2,), (1,)).to(torch.float32).untyped_storage()

    def widened(self, storage: torch.UntypedStorage, store: ActivationStore) -> torch.UntypedStorage:
        """Return a storage with all bytes of the float32 tensor, safe to use on the current stream.

        ``storage``: the numbers.
        """
        record, tier = self.record, store.tiers.by_device[self.record.kind]
        numbers = empty(torch.bfloat16, record.device).detach()
        numbers.set_(storage, 0, (record.nbytes // 2,), (1,))
        stream = tier.stream_of(record.device)
        if stream != self.original.stream:
            assert tier.copies is not None, "only an accelerator has streams"
            tier.copies.device.used_on(numbers, stream)
        # A storage that another stream widens may not be there yet when this stream reads it.
        wide = self._wide[0].lock() if self._wide is not None and self._wide[1] == stream else None
        if wide is None:
            with store.shared.lock:
                tier.make_room(self.original.nbytes)
            with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
                wide = tier.with_room(lambda: numbers.to(torch.float32)).untyped_storage()
            self._wide = StorageRef(wide), stream
        return wide


class Upcast(Handle):
    """The handle of one saved view of a float32 tensor that was cast from bfloat16."""

    __slots__ = ("_half", "_upcasts")

    def __init__(self, upcasts: Upcasts, half: Half, alias: Tensor) -> None:
        self._half = half
        self._upcasts = upcasts
        super().__init__(upcasts.store, half.record, alias, False, False)

    def unpack(self) -> Tensor:
        """Return the saved view, bit for bit.

        Raises:
            SavedTensorModifiedError: it was changed in place.
            StorageReadError: it could not be read back.
        """
        half, record, store = self._half, self.record, self.store
        if self.probe._version != self.version:
            check_version(self.probe._version, self.version, self.dtype, self.shape, record.module)
        wide = half.original.storage()
        if wide is not None:  # with its present contents, which plain PyTorch would read
            self.round = store.passed(record, self.round)
            self._upcasts.held.add((record.index, record.nbytes))
            return view_in(self, wide, 0)
        if store.tiers.by_device[record.kind].capturing(record.device.index):
            raise StateError(CAPTURED)  # no copy of the flag may be enqueued
        storage, _, self.round = store.obtain(record, self.round)
        try:
            wide = half.widened(storage, store)
            self._upcasts.originals.used(record.kind, half.original.stream)
        except BaseException as error:
            store.abort_if_interrupted(error)
            raise
        return view_in(self, wide, 0)

    def peek(self, fetch: bool) -> Tensor | None:
        """As of any `Handle`."""
        wide = self._half.peek(self.store, fetch=fetch) if self.probe._version == self.version else None
        return None if wide is None else view_in(self, wide, 0)


class Upcasts:
    """Finds the float32 tensors that were cast from bfloat16, and saves their halves.

    Args:
        originals: reads the graph, and has the store that takes the halves.

    Attributes:
        held: places on a tape, and bytes, of halves that were of no use: the program held the float32 tensor as well.
    """

    def __init__(self, originals: Originals) -> None:
        self.originals = originals
        self.store = originals.store
        self.held: set[tuple[int, int]] = set()
        self._checked = Checked()
        self._halves: weakref.WeakValueDictionary[int, Half] = weakref.WeakValueDictionary()
        """By the number of the float32 storage."""

    def handle_of(self, tensor: Tensor, tape: Tape[Record], names: tuple[str | None, str | None]) -> Upcast | None:
        """Return the handle of a plain float32 tensor, or None unless it was cast from bfloat16 and not changed since.

        Args:
            tensor: is about to be saved, and may move.
            tape: of the forward that saves it.
            names: of the module that runs, and of the tensor, where they are known.
        """
        number, tier = tensor.untyped_storage()._cdata, self.store.tiers.by_device[tensor.device.type]
        stream = tier.stream_of(tensor.device)
        half = None if tensor._version or tensor.is_neg() else self._halves.get(number)
        again = half is not None and half.original.has_bytes_of(tensor, stream)
        if half is None or not again or not self._hold_again(half.record, names[1]):
            if number in self.store.identities.records:  # it has been saved whole, outside of the regions that run once
                return None
            if (len(tape.records), tensor.untyped_storage().nbytes() // 2) in self.held or not self.can_halve(tensor):
                return None
            numbers = self._numbers(tensor, stream, (names[0], len(tape.regions), tensor.dim()))
            if numbers is None:
                return None
            record = self.store.admit(numbers, (0, numbers.nbytes), numbers.untyped_storage(), tape, names)
            with self.store.shared.lock:
                self.store.shared.accounts.halved_bytes += record.nbytes
            version_probe(numbers)  # the record alone holds the memory
            half = self._halves[number] = Half(self.originals.original(tensor, stream), record)
        if tier.copies is not None:
            # Plain PyTorch holds the memory until backward. Here the stream that owns it may use it again once the
            # program has dropped the tensor, while this stream still reads it.
            tier.copies.device.used_on(tensor, stream)
        return Upcast(self, half, tensor.detach())

    def can_halve(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor is a view of a float32 tensor that was cast from bfloat16, and not changed."""
        found = source_of(self.originals.node_of(tensor)) if tensor.dtype is torch.float32 else None
        return found is not None and found[1].dtype is torch.bfloat16

    def _hold_again(self, record: Record, name: str | None) -> bool:
        """Count one more handle of a record; return False if it was released with its last one."""
        accounts = self.store.shared.accounts
        with self.store.shared.lock:
            if record.state is State.RELEASED:
                return False
            accounts.packed_tensors += 1
            accounts.packed_bytes += record.nbytes
            accounts.deduplicated_bytes += record.nbytes
            record.add_handle()
            if name is not None and record.name is None:
                self.store.decision.names.named_late(record, name)
            return True

    def _numbers(self, tensor: Tensor, stream: Any, key: tuple[Any, ...]) -> Tensor | None:
        """Return the upper halves of a tensor's storage; None if a lower half is not zero.

        An accelerator's host waits to learn that in the first forward that has ``key``. Later it learns it before
        backward returns.
        """
        if self._checked.differs(key):
            return None
        storage, tier = tensor.untyped_storage(), self.store.tiers.by_device[tensor.device.type]
        with self.store.shared.lock:
            tier.make_room(storage.nbytes() // 2)
        flat = empty(torch.int16, tensor.device).detach().set_(storage, 0, (storage.nbytes() // 2,), (1,))
        lower, upper = flat[LOWER::2], flat[1 - LOWER :: 2]
        forward = self.store.shared.accounts.steps
        if tier.copies is None:
            if torch.count_nonzero(lower):
                return None
        elif self._checked.before(key, forward):
            self.originals.note(stream, lower.any())
        else:
            differs = self.originals.read(lower.any(), stream)
            self._checked.note(key, forward, not differs)
            if differs:
                return None
        whole = tensor if tensor._base is None else tensor._base
        # Not a view of the clone: its base would hold the memory.
        numbers = empty(torch.bfloat16, tensor.device).detach()
        return numbers.set_(upper.clone().untyped_storage(), 0, whole.shape, whole.stride())
