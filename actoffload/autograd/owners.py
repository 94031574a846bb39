"""The storages that never move, and the modules that own them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..tiers.storage_ref import StorageRef
from .tensors import PLAIN_TYPES, storages


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
