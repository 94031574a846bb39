"""Weak sets of storages, and the modules that own some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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

    def sweep(self) -> None:
        """Remove the storages that have died."""
        # From a copy, and with a default: other threads add and sweep without a lock.
        for cdata in [c for c, (ref, _) in list(self.by_number.items()) if ref.gone()]:
            self.by_number.pop(cdata, None)
        self._sweep_at = max(1024, 2 * len(self.by_number))


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
