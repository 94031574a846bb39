"""A weak reference to a storage."""

from __future__ import annotations

from typing import Any

import torch

# `torch.multiprocessing.reductions.StorageWeakRef` calls the same functions, but through methods in Python.
_BASE: Any = torch._C.StorageBase
_free_weak_ref, expired = _BASE._free_weak_ref, _BASE._expired


class StorageRef:
    """A weak reference to a storage: it dies with the storage, and pins only its identity."""

    __slots__ = ("__weakref__", "_free", "cdata")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._free = _free_weak_ref  # the interpreter may clear this module before the last of these dies
        self.cdata: Any = storage._weak_ref()

    def __del__(self) -> None:
        cdata = getattr(self, "cdata", None)
        if cdata is not None:
            free = self._free
            del self.cdata  # no interrupt comes between this and the call, so that it is called once
            free(cdata)

    def gone(self) -> bool:
        """Whether the storage has died."""
        return expired(self.cdata)  # type: ignore[no-any-return]

    def held_by(self) -> int:
        """How many hold the storage: its tensors, and Python's objects for it as one."""
        return torch._C._storage_Use_Count(self.cdata)

    def lock(self) -> torch.UntypedStorage | None:
        """The storage, or None if it is gone."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.cdata)
        return storage
