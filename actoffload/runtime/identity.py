"""The identity of a saved storage: its live records, and the version of the tensor that each of them was saved from.

A weak reference to its ``StorageImpl`` identifies a storage. While the reference lives, PyTorch cannot allocate another
``StorageImpl`` at that address. So a map by address that holds the reference never takes a storage for a dead one. An
address alone proves nothing: freed addresses are reused within microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..tiers.record import Record
from .kept_place import KeptPlace, PlaceRef


class Counter(NamedTuple):
    """The version counter of a wrapper subclass: a tensor without memory that shares it, and its value at the save."""

    probe: Tensor
    version: int

    def same(self, other: Counter) -> bool:
        """Return whether both belong to one tensor (or its views), which was not changed in between."""
        return self.version == other.version and same_counter(self.probe, other.probe)


class Version(NamedTuple):
    """One version of a saved storage: its record, and the facts that tell it from other versions."""

    record: Record
    probe: Tensor  # an alias that shares the version counter of the saved tensor
    version: int  # of the saved tensor
    thread: int  # that saved it
    counters: tuple[Counter, ...]  # of the wrapper subclasses around it, see `IdentityMap.find`


class IdentityMap:
    """The live records by (storage, version, span), and the storages that a plan keeps without a record.

    Attributes:
        records: by the storage's number.
        kept: likewise, those that a plan keeps; until their death is counted.
    """

    def __init__(self) -> None:
        self.records: dict[int, list[Version]] = {}
        self.kept: dict[int, PlaceRef] = {}

    def find(
        self, storage: torch.UntypedStorage, tensor: Tensor, span: tuple[int, int], counters: tuple[Counter, ...] = ()
    ) -> Record | None:
        """Return a record of the tensor's storage at this version whose bytes include ``span``, or None.

        ``counters`` belong to the wrapper subclasses around the tensor, outermost first: an in-place change of a
        DTensor bumps its own version, not its local tensor's.
        """
        for known in self.records.get(storage._cdata, ()):
            record, saved = known.record, known.record.saved
            if (
                known.version == tensor._version
                and saved.begin <= span[0]
                and span[1] <= saved.begin + record.nbytes
                and saved.address == storage.data_ptr()  # else it was resized and has moved: other bytes
                and known.thread == threading.get_ident()  # another thread might see the bump of `same_counter`
                and same_counter(known.probe, tensor)
                and len(known.counters) == len(counters)
                and all(map(Counter.same, known.counters, counters))
            ):
                return record
        return None

    def find_kept(self, storage: torch.UntypedStorage, tensor: Tensor) -> KeptPlace | None:
        """Return the place of a storage that a plan keeps at the tensor's version, or None."""
        known = self.kept.get(storage._cdata)
        place = None if known is None else known()
        # The same comparisons as in `find`, for the same reasons. A place stands for a whole storage, so each span lies
        # in it. A storage that was freed and has grown at its old address counts as a duplicate; no bit depends on it.
        if (
            place is not None
            and place.version == tensor._version
            and place.address == storage.data_ptr()
            and place.thread == threading.get_ident()
            and same_counter(place.alias, tensor)
        ):
            return place
        return None

    def add_kept(self, place: KeptPlace, number: int, died: Callable[[PlaceRef], None]) -> None:
        """Add the place of a storage with this number that is not listed; ``died`` receives its death."""
        reference = PlaceRef(place, died)
        reference.tape, reference.index = place.tape, place.index
        reference.nbytes, reference.number = place.nbytes, number
        self.kept[number] = reference

    def remove_kept(self, reference: PlaceRef) -> None:
        """Remove a storage whose place has died, unless another one has its number already."""
        if self.kept.get(reference.number) is reference:
            del self.kept[reference.number]

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the storage is saved as it is, in any version: it has a record, or a plan keeps it."""
        known = self.kept.get(storage._cdata)
        return storage._cdata in self.records or (known is not None and known() is not None)

    def add(self, record: Record, tensor: Tensor, counters: tuple[Counter, ...] = ()) -> None:
        """Add a record on the device.

        ``tensor`` is held until `remove`. That costs no memory: its handle makes it a `version_probe`, unless the
        record stays, which holds the memory anyway. ``counters`` hold none either.
        """
        version = Version(record, tensor, tensor._version, threading.get_ident(), counters)
        # The record has pinned the number: only while its reference lives does no other storage get this one.
        number = record.saved.identity.cdata
        self.records[number] = [*self.records.get(number, ()), version]

    def remove(self, record: Record) -> None:
        """Remove a record."""
        number = record.saved.identity.cdata
        known = self.records.get(number, [])
        if len(known) > 1:
            self.records[number] = [other for other in known if other.record is not record]
        elif known:
            del self.records[number]  # with the probe, which holds the storage if the record stays


class Compiled:
    """The part of `same_counter` that the compiled hooks do, once they are loaded.

    They hold the GIL throughout. Without them a thread that unpacks meanwhile may see the bump, and raise.
    """

    same_counter: Callable[[Tensor, Tensor], bool | None] = staticmethod(lambda one, other: None)


def same_counter(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same version share their version counter.

    Views and aliases do. The outputs of ``unsafe_chunk`` (which GRU cells change in place one by one) and of ``.data``
    share a storage, but each counts its own changes, so that equal versions prove nothing about the bytes.
    """
    shared = Compiled.same_counter(one, other)
    if shared is not None:
        return shared
    version = one._version
    if other._version != version:
        return False
    set_version = torch._C._autograd._unsafe_set_version_counter
    # PyTorch does not expose the counter's identity. A bump of one version shows in the other only if they share it.
    try:
        # Inside of `try`: an interrupt that arrives as the call returns must not leave the version too high.
        set_version((one,), (version + 1,))
        return other._version != version
    finally:
        set_version((one,), (version,))
