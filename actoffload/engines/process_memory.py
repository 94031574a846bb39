"""Checksums of this process's memory, read through the kernel: it says so where memory is gone, a load would crash."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Sequence

from .base import Range

_CHUNK_BYTES = 1 << 20
_MEMORY = "/proc/self/mem"


def crc32(ranges: Sequence[Range]) -> int:
    """The CRC-32 of the bytes in some ranges of memory, one behind the other.

    Raises:
        OSError: the memory is not there (any more). Where there is no ``/proc``, the process would end instead.
    """
    found = 0
    try:
        memory = os.open(_MEMORY, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        for address, length in ranges:
            found = zlib.crc32((ctypes.c_char * length).from_address(address), found)
        return found
    buffer = memoryview(bytearray(min(max(length for _, length in ranges), _CHUNK_BYTES)))
    try:
        for address, length in ranges:
            found = _add(found, memory, buffer, address, length)
    finally:
        os.close(memory)
    return found


def _add(found: int, memory: int, buffer: memoryview, address: int, length: int) -> int:
    while length > 0:
        count = os.preadv(memory, [buffer[: min(length, len(buffer))]], address)
        if count == 0:
            raise OSError(f"the memory at {address:#x} cannot be read")
        found = zlib.crc32(buffer[:count], found)
        address += count
        length -= count
    return found


__all__ = ["crc32"]
