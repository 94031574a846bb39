"""The identity of storages: a tensor's storage, the bytes of it that a view needs, and the storages that never move.

A weak reference to its ``StorageImpl`` identifies a storage. While the reference lives, PyTorch cannot allocate another
``StorageImpl`` at that address. So a map by address that holds the reference never takes a storage for a dead one. An
address alone proves nothing: freed addresses are reused within microseconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..tiers.record import Record
from ..tiers.storage_ref import StorageRef

SPAN_ALIGNMENT = 512
"""Spans begin at multiples of this many bytes, so that a restored view has its old address modulo 512."""


def byte_span(tensor: Tensor, storage_bytes: int) -> tuple[int, int]:
    """Return the bytes ``[begin, end)`` of its storage that a strided view needs, widened to be worth one move.

    A view that spans half of its storage or more stands for the whole storage, so that its other views (query, key and
    value of a fused projection) share one copy. A smaller view stands for its own span, from a multiple of 512 on.

    Args:
        tensor: any strided tensor with at least one element.
        storage_bytes: the size of its storage.
    """
    itemsize = tensor.element_size()
    begin = int(tensor.storage_offset()) * itemsize
    reach = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        reach += (int(size) - 1) * int(stride)
    end = begin + reach * itemsize
    if 2 * (end - begin) >= storage_bytes:
        return 0, storage_bytes
    begin -= begin % SPAN_ALIGNMENT
    return begin, min(storage_bytes, -(-end // SPAN_ALIGNMENT) * SPAN_ALIGNMENT)


class Counter(NamedTuple):
    """The version counter of a wrapper subclass: a tensor without memory that shares it, and its value at the save."""

    probe: Tensor
    version: int

    def same(self, other: Counter) -> bool:
        """Return whether both belong to one tensor (or its views), which was not changed in between."""
        return self.version == other.version and same_counter(self.probe, other.probe)


def own_counter(tensor: Tensor) -> tuple[Counter, ...]:
    """Return a counter of its own for a tensor that may be the local tensor of a DTensor, or a view of it; else ().

    An in-place change of the DTensor bumps the DTensor's version alone, so local tensors of equal versions may differ.
    A tensor that is taken out of a DTensor is a view of its local tensor, which has no history. (Never read ``grad_fn``
    here: a graph whose nodes have Python objects is freed recursively, and a deep one ends the process.)
    """
    base = tensor._base
    if base is None or "torch.distributed.tensor" not in sys.modules:
        return ()
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    # PyTorch marks a view that a Function made, and `to_local` is a Function: such a view may be of a DTensor.
    autograd = torch._C._autograd
    plain = base.requires_grad and autograd._get_creation_meta(tensor) == autograd.CreationMeta.DEFAULT
    return () if plain else (Counter(torch.empty(0), 0),)


class Version(NamedTuple):
    """One version of a saved storage: its record, and the facts that tell it from other versions."""

    record: Record
    probe: Tensor  # an alias that shares the version counter of the saved tensor
    version: int  # of the saved tensor
    thread: int  # that saved it
    counters: tuple[Counter, ...]  # of the wrapper subclasses around it, see `IdentityMap.find`


class IdentityMap:
    """The live records by (storage, version, span)."""

    def __init__(self) -> None:
        self.records: dict[int, list[Version]] = {}
        """By the storage's number."""

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


def same_counter(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same version share their version counter.

    Views and aliases do. The outputs of ``unsafe_chunk`` (which GRU cells change in place one by one) and of ``.data``
    share a storage, but each counts its own changes, so that equal versions prove nothing about the bytes.
    """
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


class StorageSet:
    """A weak map from storages to notes: parameters, buffers, inputs, tensors marked with ``keep``."""

    def __init__(self) -> None:
        self.by_number: dict[int, tuple[StorageRef, str]] = {}
        """The notes by ``storage._cdata``; no other storage gets that number while the reference lives."""
        self._sweep_at = 1024

    def add(self, tensor: Tensor, note: str) -> None:
        """Add the storage of a tensor, or of each inner tensor of a wrapper subclass; an earlier note stays."""
        # First, as each forward adds every parameter and buffer: mostly their storages are known.
        try:
            known = type(tensor) in PLAIN_TYPES and tensor.untyped_storage()._cdata in self.by_number
        except RuntimeError:  # a sparse tensor, or one of `torch.func`, has none
            known = False
        if known:
            return
        for storage in storages(tensor):
            if storage._cdata not in self.by_number and storage.nbytes():
                ref = StorageRef(storage)
                self.by_number[ref.cdata] = (ref, note)
        if len(self.by_number) > self._sweep_at:
            self.sweep()

    def replace(self, tensor: Tensor, note: str) -> None:
        """Add as `add` does, in place of an earlier note."""
        for storage in storages(tensor):
            self.by_number.pop(storage._cdata, None)
        self.add(tensor, note)

    def get(self, storage: torch.UntypedStorage) -> str | None:
        """Return the note of a storage, or None."""
        entry = self.by_number.get(storage._cdata)
        return None if entry is None else entry[1]

    def sweep(self) -> None:
        """Remove the storages that have died."""
        # From a copy, and with a default: other threads add and sweep without a lock.
        for cdata in [c for c, (ref, _) in list(self.by_number.items()) if ref.gone()]:
            self.by_number.pop(cdata, None)
        self._sweep_at = max(1024, 2 * len(self.by_number))

    def __len__(self) -> int:
        return len(self.by_number)


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a wrapper subclass (DTensor, NF4, jagged, ...), or the tensor itself."""
    if type(tensor) in PLAIN_TYPES or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in inner_names(tensor):
        yield from inner_tensors(getattr(tensor, name))


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor and its inner tensors; a sparse, meta or lazy tensor has none."""
    for inner in inner_tensors(tensor):
        if is_lazy(inner):
            continue
        with contextlib.suppress(NotImplementedError, RuntimeError):
            yield inner.untyped_storage()


def inner_names(tensor: Any) -> list[str]:
    """Return the names of a wrapper subclass's inner tensors; a DTensor also lists its mesh, which is left out."""
    return [name for name in tensor.__tensor_flatten__()[0] if isinstance(getattr(tensor, name), Tensor)]


PLAIN_TYPES = frozenset({Tensor, nn.Parameter, nn.Buffer})


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a saved tensor is a parameter, another leaf that requires grad, or a view of either.

    A Linear saves ``weight.t()``, which is no ``Parameter``, but its ``_base`` is. The local tensor of a DTensor that
    holds an activation looks like such a leaf, but its base is no leaf.
    """
    base = tensor._base
    wanted = tensor.requires_grad
    if base is None:
        return (wanted and tensor.is_leaf) or _says_parameter(tensor)
    if base.is_leaf and (base.requires_grad or (wanted and tensor.is_leaf)):
        return True
    return _says_parameter(base)


def _says_parameter(tensor: Tensor) -> bool:
    """Return ``isinstance(tensor, nn.Parameter)``, without that slow call for a plain tensor."""
    kind = type(tensor)
    return kind is not Tensor and (kind is nn.Parameter or isinstance(tensor, nn.Parameter))


class ModuleOwners:
    """The modules whose parameters and buffers never move, from ``model=`` or found among the live objects."""

    def __init__(self) -> None:
        # Weakly: the offloader may outlive a model, and must not keep its parameters.
        self._owners: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._managed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._sharded: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
        self._gathered: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        # The inner dict, as `len` of the weak one is a Python function, and each saved tensor queries it.
        self.sharded: dict[Any, Any] = self._sharded.data  # type: ignore[attr-defined]
        """The modules with a sharded parameter that `note_gathered` has not yet found gathered."""

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Add the modules that own a parameter or buffer directly."""
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        for module in modules:
            if module._parameters or module._buffers:
                self._owners.add(module)
            if isinstance(module, fsdp) and module not in self._managed:
                self._managed.update(module.modules())

    def note_storages(self, notes: StorageSet) -> None:
        """Note the present storage of each parameter and buffer; ``.to()`` and resharding replace them."""
        any_managed = len(self._managed) > 0
        for module in list(self._owners):
            managed = any_managed and module in self._managed
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    notes.add(parameter, "parameter")
                    dimensions = _mesh_dimensions(parameter) if managed else 0
                    if dimensions and name not in self._gathered.get(module, ()):
                        self._sharded.setdefault(module, {})[name] = dimensions
            for buffer in module._buffers.values():
                if buffer is not None:
                    notes.add(buffer, "buffer")

    def note_gathered(self, notes: StorageSet) -> bool:
        """Note the parameters that ``fully_shard`` has gathered for the first time; return whether there were any.

        A gathered parameter has a storage of its own, which appears in the middle of a forward. FSDP frees and fills it
        again for the rest of training, and saved views of it must show that. So it must never move.
        """
        found = False
        for module, meshes in list(self._sharded.items()):  # a copy, as entries are removed below
            for name, dimensions in list(meshes.items()):
                parameter = module._parameters.get(name)
                if parameter is not None and _mesh_dimensions(parameter) < dimensions:
                    notes.add(parameter, "parameter")
                    self._gathered.setdefault(module, set()).add(name)
                    meshes.pop(name, None)  # another thread may have popped it
                    found = True
            if not meshes:
                self._sharded.pop(module, None)
        return found


def _mesh_dimensions(parameter: Tensor) -> int:
    """Return the number of mesh dimensions that a parameter is laid out over; gathering removes FSDP's dimensions."""
    mesh = getattr(parameter, "device_mesh", None)
    return int(mesh.ndim) if mesh is not None else 0


def modules_of(model: nn.Module) -> Iterable[nn.Module]:
    """Return the modules of ``model.modules()``, in a part of its time: that has a generator for each level."""
    found, waiting = {model: None}, [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and module not in found:
                found[module] = None
                waiting.append(module)
    return found


def live_modules() -> list[nn.Module]:
    """Return every ``nn.Module`` alive in the process, whose buffers stay if the user passes no ``model=``."""
    import gc

    kinds: set[type] = set()
    waiting: list[type] = [nn.Module]
    while waiting:
        kind = waiting.pop()
        if kind not in kinds:
            kinds.add(kind)
            waiting += type.__subclasses__(kind)
    # By type, as a process has hundreds of thousands of objects, and `isinstance` is slower. A module that another
    # thread is making, or that the cyclic collector has cleared, has no `_buffers` and owns nothing.
    found: list[Any] = [o for o in gc.get_objects() if type(o) in kinds and "_buffers" in o.__dict__]
    return found
