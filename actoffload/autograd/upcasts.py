"""``codec="exact"``: of a float32 tensor that was cast from bfloat16, autograd saves the bfloat16 numbers.

Models in bfloat16 compute norms and adapters in float32, and save what they cast. A bfloat16 number is the upper half
of its float32, so the half that is saved gives back every bit, NaNs included. The half takes the tensor's place from
the save on: it moves, stays and is planned like any other saved storage.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import SavedTensorModifiedError, StateError
from ..locks import renewed_in_child
from ..runtime.backward_end import BackwardEnd
from ..runtime.identity import same_counter
from ..tiers.device_tier import CAPTURED
from ..tiers.record import Record, State
from ..tiers.storage_ref import StorageRef
from .handles import Handle, check_version, empty, version_probe, view_in

if TYPE_CHECKING:
    from ..runtime.store import ActivationStore
    from ..runtime.tape import Tape

MOST = 5_000
"""So many nodes are read at most while saved tensors are alive. To read one gives it a Python object, and PyTorch
frees a chain of such nodes recursively: one of 20,000 is freed, one of 60,000 ends the process (a stack of 8 MiB)."""
LOWER = 0 if sys.byteorder == "little" else 1
"""Which 16 bits of a float32 a bfloat16 lacks."""
_checking = renewed_in_child(threading.Lock())
CHANGED = (
    'with codec="exact" a float32 tensor is saved as the bfloat16 tensor that it was cast from, but one had been '
    "changed in between, and no version counter showed it (a change through .data, or by a kernel of the program's "
    "own): the gradients of this backward are wrong. Set codec='none'"
)


class Half:
    """The bfloat16 numbers of one float32 storage, for the handles of all views that one stream saves.

    Args:
        tensor: the float32 tensor that was saved first.
        record: of the numbers.
        stream: that has made them; None on the CPU.
    """

    __slots__ = ("__weakref__", "_address", "_identity", "_probe", "_thread", "_wide", "record", "stream")

    def __init__(self, tensor: Tensor, record: Record, stream: Any) -> None:
        storage = tensor.untyped_storage()
        self._identity = StorageRef(storage)  # pins the storage's number, by which `Upcasts` knows it
        self._address = storage.data_ptr()
        self._probe = version_probe(tensor.detach())
        self._thread = threading.get_ident()
        self._wide: tuple[StorageRef, Any] | None = None
        self.record = record
        self.stream = stream

    @property
    def nbytes(self) -> int:
        """The bytes of the float32 storage."""
        return 2 * self.record.nbytes

    def has_bytes_of(self, tensor: Tensor, stream: Any) -> bool:
        """Return whether these are the bytes of a tensor of version 0, in a storage with this half's number."""
        return (
            self.stream == stream  # another one has not waited for the kernels that make the half
            and self._address == tensor.untyped_storage().data_ptr()  # else it was resized and has moved: other bytes
            and self._thread == threading.get_ident()  # another thread might see the bump of `same_counter`
            and same_counter(self._probe, tensor)
        )

    def original(self) -> torch.UntypedStorage | None:
        """Return the float32 storage if the program still holds it, and its owner has not freed it for now."""
        storage = self._identity.lock()
        return storage if storage is not None and storage.nbytes() >= self.nbytes else None

    def widened(self, storage: torch.UntypedStorage, store: ActivationStore) -> torch.UntypedStorage:
        """Return a storage with all bytes of the float32 tensor, safe to use on the current stream.

        ``storage``: the numbers.
        """
        record, tier = self.record, store.tiers.by_device[self.record.kind]
        numbers = empty(torch.bfloat16, record.device).detach()
        numbers.set_(storage, 0, (record.nbytes // 2,), (1,))
        stream = tier.stream_of(record.device)
        if stream != self.stream:
            assert tier.copies is not None, "only an accelerator has streams"
            tier.copies.device.used_on(numbers, stream)
        # A storage that another stream widens may not be there yet when this stream reads it.
        wide = self._wide[0].lock() if self._wide is not None and self._wide[1] == stream else None
        if wide is None:
            with store.shared.lock:
                tier.make_room(self.nbytes)
            with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
                wide = numbers.to(torch.float32).untyped_storage()
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
        wide = half.original()
        if wide is not None:  # with its present contents, which plain PyTorch would read
            self.round = store.passed(record, self.round)
            self._upcasts.held.add((record.index, record.nbytes))
            return view_in(self, wide, 0)
        if store.tiers.by_device[record.kind].capturing(record.device.index):
            raise StateError(CAPTURED)  # no copy of the flag may be enqueued
        storage, _, self.round = store.obtain(record, self.round)
        try:
            wide = half.widened(storage, store)
            self._upcasts.note_use(half)
        except BaseException as error:
            store.abort_if_interrupted(error)
            raise
        return view_in(self, wide, 0)


class Upcasts:
    """Finds the float32 tensors that were cast from bfloat16, and saves their halves.

    Args:
        store: takes the halves.

    Attributes:
        held: places on a tape, and bytes, of halves that were of no use: the program held the float32 tensor as well.
    """

    def __init__(self, store: ActivationStore) -> None:
        self.store = store
        self.held: set[tuple[int, int]] = set()
        self._halves: weakref.WeakValueDictionary[int, Half] = weakref.WeakValueDictionary()
        """By the number of the float32 storage."""
        self._nodes = 0
        """How many nodes have been read since the last moment at which no saved tensor was alive."""
        self._changed: dict[Any, Tensor] = {}
        """For each stream, whether a tensor had been changed: two streams must not write to one flag at once."""
        self._flags: list[tuple[Any, Any, Tensor]] = []
        """Copies of such flags to the host: the device, the event after the copy, and the copy."""
        self._unused: list[Tensor] = []
        """Page-locked memory for such copies."""
        self._failed = False
        """A tensor had been changed, and one saved before that may be alive: no backward of these may return."""
        self._backward_end = BackwardEnd(self._check)

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
        if half is None or not half.has_bytes_of(tensor, stream) or not self._hold_again(half.record, names[1]):
            if (len(tape.records), tensor.untyped_storage().nbytes() // 2) in self.held or not self.can_halve(tensor):
                return None
            numbers = self._numbers(tensor, stream)
            if numbers is None:
                return None
            record = self.store.admit(numbers, (0, numbers.nbytes), numbers.untyped_storage(), tape, names)
            with self.store.shared.lock:
                self.store.shared.accounts.halved_bytes += record.nbytes
            version_probe(numbers)  # the record alone holds the memory
            half = self._halves[number] = Half(tensor, record, stream)
        if tier.copies is not None:
            # Plain PyTorch holds the memory until backward. Here the stream that owns it may use it again once the
            # program has dropped the tensor, while this stream still reads it.
            tier.copies.device.used_on(tensor, stream)
        return Upcast(self, half, tensor.detach())

    def can_halve(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor is a view of a float32 tensor that was cast from bfloat16, and not changed."""
        whole = tensor if tensor._base is None else tensor._base
        if not tensor.dtype == whole.dtype == torch.float32 or whole._version or tensor._version or tensor.is_neg():
            return False
        # A mode of the program would see our kernels, and its second run of a region would lack them.
        if whole.nbytes != whole.untyped_storage().nbytes() or torch._C._len_torch_dispatch_stack():
            return False
        if not self.store.shared.accounts.live_records:
            self._nodes, self._failed = 0, False
        self._nodes += 1
        return self._nodes <= MOST and _is_cast(whole)

    def _hold_again(self, record: Record, name: str | None) -> bool:
        """Count one more handle of a record; return False if it was released with its last one."""
        accounts = self.store.shared.accounts
        with self.store.shared.lock:
            if record.state is State.RELEASED:
                return False
            accounts.packed_tensors += 1
            accounts.packed_bytes += record.nbytes
            accounts.deduplicated_bytes += record.nbytes
            record.handles += 1
            record.waiting += 1
            if name is not None and record.name is None:
                self.store.decision.named_late(record, name)
            return True

    def _numbers(self, tensor: Tensor, stream: Any) -> Tensor | None:
        """Return the upper halves of a tensor's storage; None on the CPU if a lower half is not zero.

        An accelerator's host cannot wait to learn that, but learns it before backward returns.
        """
        storage, tier = tensor.untyped_storage(), self.store.tiers.by_device[tensor.device.type]
        with self.store.shared.lock:
            tier.make_room(storage.nbytes() // 2)
        flat = empty(torch.int16, tensor.device).detach().set_(storage, 0, (storage.nbytes() // 2,), (1,))
        lower, upper = flat[LOWER::2], flat[1 - LOWER :: 2]
        if tier.copies is None:
            if torch.count_nonzero(lower):
                return None
        else:
            changed = lower.any()
            before = self._changed.get(stream)
            self._changed[stream] = changed if before is None else before.logical_or_(changed)
        whole = tensor if tensor._base is None else tensor._base
        # Not a view of the clone: its base would hold the memory.
        numbers = empty(torch.bfloat16, tensor.device).detach()
        return numbers.set_(upper.clone().untyped_storage(), 0, whole.shape, whole.stride())

    def note_use(self, half: Half) -> None:
        """Note that backward uses a half: before it returns, it learns whether the tensor had been changed.

        Raises:
            SavedTensorModifiedError: it had, and the program reads the saved tensor outside of backward.
        """
        copies = self.store.tiers.by_device[half.record.kind].copies
        changed = self._changed.pop(half.stream, None)
        if copies is not None and not copies.inert and changed is not None:
            host = self._unused.pop() if self._unused else torch.zeros((), dtype=torch.bool, device="cpu").pin_memory()
            self._flags.append((copies.device, copies.copy_flag(changed, half.stream, host), host))
        if (self._flags or self._failed) and not self._backward_end.expect():
            self._check()

    def _check(self) -> None:
        """Wait for the copies of the flags: the device has work until backward's end, so it does not wait.

        Raises:
            SavedTensorModifiedError: a tensor had been changed.
        """
        try:
            with _checking:  # a backward of another thread may have taken this one's flags, and must know first
                flags, self._flags = self._flags, []
                for device, event, host in flags:
                    device.synchronize(event)
                    self._failed |= bool(host.item())
                    self._unused.append(host)
        except BaseException as error:
            self.store.abort_if_interrupted(error)
            raise
        if self._failed:
            raise SavedTensorModifiedError(CHANGED)


def _is_cast(tensor: Tensor) -> bool:
    """Return whether a tensor is the result of a cast from bfloat16."""
    node = tensor.grad_fn
    if type(node).__name__ != "ToCopyBackward0" or type(node).__module__ != "builtins":
        return False
    source, number = node.next_functions[0]  # type: ignore[union-attr]
    metadata = getattr(source, "_input_metadata", ())
    return len(metadata) > number and metadata[number].dtype is torch.bfloat16
