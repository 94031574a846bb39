"""Memory at a known address, and an arena's bytes as they lie in the file: what tests of engines look at."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

from ..engines.base import SpoolFile
from ..memory import map_private


class Memory:
    """Page-aligned memory with a known address, of the kind that tensors and the host pool have.

    Args:
        nbytes: Its size in bytes.
        fill: The byte it is filled with at first.
    """

    def __init__(self, nbytes: int, fill: int = 0) -> None:
        self.nbytes = nbytes
        self._map = map_private(nbytes)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.data = bytes([fill]) * nbytes

    @property
    def data(self) -> bytes:
        """What it holds."""
        return self._map[:]

    @data.setter
    def data(self, value: bytes) -> None:
        self._map[: len(value)] = value


def random_bytes(nbytes: int, seed: int) -> bytes:
    """Returns reproducible bytes without structure."""
    return random.Random(seed).randbytes(nbytes)


def peek_file(file: SpoolFile, offset: int, length: int) -> bytes:
    """Returns bytes of an arena as they lie in the file, past every engine."""
    with _reopened(file) as fd:
        return os.pread(fd, length, offset)


def poke_file(file: SpoolFile, offset: int, data: bytes) -> None:
    """Overwrites bytes of an arena, past every engine."""
    with _reopened(file) as fd:
        os.pwrite(fd, data, offset)
        os.fsync(fd)


@contextmanager
def _reopened(file: SpoolFile) -> Iterator[int]:
    """Opens the file again without ``O_DIRECT``, so that any length will do."""
    if file.reopen_path is None:
        yield file.fd
        return
    fd = os.open(file.reopen_path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


__all__ = ["Memory", "peek_file", "poke_file", "random_bytes"]
