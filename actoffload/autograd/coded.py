"""Coded storages: in place of a storage of the program's, autograd saves its code, which takes fewer bytes.

The code is a storage of this library. It takes the tensor's place from the save on: it moves, stays and is planned like
any other saved storage.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import StateError
from ..runtime.tape import Tape
from ..tiers.device_tier import CAPTURED
from ..tiers.record import Record, State
from ..tiers.storage_ref import StorageRef
from .handles import Handle, check_version, empty, present, version_probe, view_in
from .originals import Original, Originals


class CodedStorage:
    """One storage, for the handles of all its views that one stream saves.

    Args:
        form: of the code.
        original: the program's storage.
        record: of the code, which the original's stream has made.
    """

    __slots__ = ("__weakref__", "_decoded", "form", "original", "record")

    def __init__(self, form: Form, original: Original, record: Record) -> None:
        self._decoded: tuple[StorageRef, Any] | None = None
        self.form = form
        self.original = original
        self.record = record

    def code_in(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the code, which a storage has, as flat bytes."""
        return empty(torch.uint8, self.record.saved.device).detach().set_(storage, 0, (self.record.nbytes,), (1,))

    def decoded(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a storage with all bytes of the tensor, safe to use on the current stream.

        ``storage``: the code.
        """
        form, device = self.form, self.record.saved.device
        tier, code = form.store.tiers.by_device[self.record.kind], self.code_in(storage)
        stream = tier.stream_of(device)
        if stream != self.original.stream:
            assert tier.copies is not None, "only an accelerator has streams"
            tier.copies.device.used_on(code, stream)
        # A storage that another stream decodes may not be there yet when this stream reads it.
        decoded = self._decoded  # read once: another thread may decode it on its stream meanwhile
        found = decoded[0].lock() if decoded is not None and decoded[1] == stream else None
        if found is None:
            form.make_room(device, self.original.nbytes)
            with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
                found = tier.with_room(lambda: form.decode(code, self.original)).untyped_storage()
            self._decoded = StorageRef(found), stream
        return found


class Coded(Handle):
    """The handle of one saved view of a coded storage."""

    __slots__ = ("coded",)

    def __init__(self, coded: CodedStorage, alias: Tensor) -> None:
        self.coded = coded
        super().__init__(coded.form.store, coded.record, alias, False, False)

    def unpack(self) -> Tensor:
        """As of any `Handle`. The view has every bit if the form is exact."""
        coded, record, store = self.coded, self.record, self.store
        if self.probe._version != self.version:
            check_version(self.probe._version, self.version, self.dtype, self.shape, record.saved.module)
        found = coded.original.storage()
        if found is not None:  # with its present contents, which plain PyTorch would read
            self.round = store.passed(record, self.round)
            coded.form.held.add((record.index, coded.original.nbytes))
            return view_in(self, found, 0)
        if store.tiers.by_device[record.kind].capturing(record.saved.device.index):
            # A copy of the flag must not be enqueued, and a replay would read the code where it lay.
            raise StateError(CAPTURED)
        storage, self.round = store.obtain(record, self.round)
        try:
            found = coded.decoded(storage)
            if coded.form.exact:
                coded.form.originals.used(record.kind, coded.original.stream)
        except BaseException as error:
            store.abort_if_interrupted(error)
            raise
        return view_in(self, found, 0)

    def peek(self, fetch: bool) -> Tensor | None:
        """As of any `Handle`."""
        if self.probe._version != self.version:
            return None
        coded, found = self.coded, self.coded.original.storage()
        if found is None:
            code = present(self.record, self.store, fetch=fetch)
            if code is None:
                return None
            found = coded.form.decode(coded.code_in(code), coded.original).untyped_storage()
        return view_in(self, found, 0)


class Form(ABC):
    """Saves the codes of storages: the base of each kind of code.

    Args:
        originals: has the store that takes them.

    Attributes:
        exact: whether decoding returns every bit.
        held: places on a tape, and bytes, of tensors whose codes were of no use: the program held the tensor as well.
    """

    exact: bool

    def __init__(self, originals: Originals) -> None:
        self.originals = originals
        self.store = originals.store
        self.held: set[tuple[int, int]] = set()
        self._known: weakref.WeakValueDictionary[int, CodedStorage] = weakref.WeakValueDictionary()
        """By the number of the program's storage."""

    @abstractmethod
    def code_bytes(self, tensor: Tensor) -> int:
        """Return the size of the code of a plain tensor's storage; 0 if this form does not apply to it."""

    @abstractmethod
    def encode(self, tensor: Tensor, stream: Any, key: tuple[Any, ...]) -> Tensor | None:
        """Return the code of a tensor's storage, with a storage of its own; None if the tensor turns out to have none.

        Args:
            tensor: has a code by `code_bytes`.
            stream: the current one.
            key: of the module that saves it.
        """

    @abstractmethod
    def decode(self, code: Tensor, original: Original) -> Tensor:
        """Return a new tensor with the bytes of the original storage, from its code as a flat uint8 tensor."""

    def make_room(self, device: torch.device, nbytes: int) -> None:
        """Make room on a device for bytes that this library is about to make."""
        with self.store.shared.lock:
            self.store.tiers.by_device[device.type].make_room(nbytes)

    def handle_of(self, tensor: Tensor, tape: Tape[Record], names: tuple[str | None, str | None]) -> Coded | None:
        """Return the handle of a plain tensor, or None if the form does not apply to it; see `Codec.handle_of`."""
        storage, tier = tensor.untyped_storage(), self.store.tiers.by_device[tensor.device.type]
        stream = tier.stream_of(tensor.device)
        coded = None if tensor.is_neg() else self._known.get(storage._cdata)
        again = coded is not None and coded.original.has_bytes_of(tensor, stream)
        if coded is None or not again or not self._hold_again(coded.record, names[1]):
            if self.store.identities.has(storage):  # it has been saved whole, in another place
                return None
            if (len(tape.records), storage.nbytes()) in self.held or not self.code_bytes(tensor):
                return None
            code = self.encode(tensor, stream, (names[0], len(tape.regions), tensor.dim()))
            if code is None:
                return None
            record = self.store.admit(code, (0, code.nbytes), code.untyped_storage(), tape, names)
            with self.store.shared.lock:
                self.store.shared.accounts.count_coded(storage.nbytes() - record.nbytes, exact=self.exact)
            version_probe(code)  # the record alone holds the memory
            coded = CodedStorage(self, self.originals.original(tensor, stream), record)
            self._known[storage._cdata] = coded
        if tier.copies is not None:
            # Plain PyTorch holds the memory until backward. Here the stream that owns it may use it again once the
            # program has dropped the tensor, while this stream still reads it.
            tier.copies.device.used_on(tensor, stream)
        return Coded(coded, tensor.detach())

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
            if name is not None and record.saved.name is None:
                self.store.decision.names.named_late(record, name)
            return True
