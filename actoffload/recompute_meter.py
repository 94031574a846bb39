"""Counts what recomputed blocks hold among the resident bytes, and makes room for it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .identity import StorageSet, is_parameter, storages
from .tiers import Core, Mover


class RecomputeMeter:
    """The `Meter` of an offloader's recomputed blocks.

    Args:
        core: holds the counts.
        movers: asked for room.
        notes: storages that are no activations.
    """

    def __init__(self, core: Core, movers: Iterable[Mover], notes: StorageSet) -> None:
        self._core = core
        self._movers = tuple(movers)
        self._notes = notes

    def recomputing(self) -> None:
        """A block is about to be recomputed: what it will hold needs room, as far as writes under way give any."""
        with self._core.lock:
            self._core.accounts.recomputed(0)  # backward is done with the one before
            for mover in self._movers:
                self._core.accounts.unpack_wait_s += mover.make_room(self._core.reserved_bytes)

    def recomputed(self, nbytes: int) -> None:
        """It holds so many bytes until backward asks for what another one needs."""
        with self._core.lock:
            self._core.accounts.recomputed(nbytes)
            self._core.reserved_bytes = max(self._core.reserved_bytes, nbytes)

    def is_static(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or lies in a storage that is noted."""
        return is_parameter(tensor) or any(self._notes.get(storage) is not None for storage in storages(tensor))
