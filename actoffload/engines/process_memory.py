"""Checksums of this process's memory, read through the kernel: it says so where memory is gone, a load would crash."""

from __future__ import annotations

import ctypes
import os
import zlib

_CHUNK_BYTES = 1 << 20
_MEMORY = "/proc/self/mem"


def crc32(address: int, length: int) -> int:
    """The CRC-32 of ``length`` bytes at ``address``.

    Raises:
        OSError: the memory is not there (any more). Where there is no ``/proc``, the process would end instead.
    """
    try:
        memory = os.open(_MEMORY, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return zlib.crc32((ctypes.c_char * length).from_address(address))
    found = 0
    buffer = memoryview(bytearray(min(length, _CHUNK_BYTES)))
    try:
        while length > 0:
            count = os.preadv(memory, [buffer[: min(length, _CHUNK_BYTES)]], address)
            if count == 0:
                raise OSError(f"the memory at {address:#x} cannot be read")
            found = zlib.crc32(buffer[:count], found)
            address += count
            length -= count
    finally:
        os.close(memory)
    return found


__all__ = ["crc32"]
