"""A ring of the kernel's io_uring: requests in, results out, in a few system calls without a library in between.

The package ``liburing`` is not used: its calls keep the interpreter's lock while they wait, and take no addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Final

from ...errors import EngineUnavailableError
from .base import Range

# System calls that are this young have the same number on every architecture.
_SETUP, _ENTER, _REGISTER = 425, 426, 427
_REGISTER_FILES, _REGISTER_ENABLE_RINGS = 2, 12
_ENTER_GETEVENTS = 1
_OFF_SQ_RING, _OFF_SQES = 0, 0x10000000
_NEEDED_FEATURES = 1 << 0 | 1 << 1  # one mapping for both queues; no result is ever dropped
_OP_READV, _OP_WRITEV, _OP_READ = 1, 2, 22
_SQE_FIXED_FILE = 1
_MADV_DONTFORK = 10
_DISABLED, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 6, 1 << 12, 1 << 13

OWN_THREAD: Final = _DISABLED | _SINGLE_ISSUER | _DEFER_TASKRUN
"""Results appear only inside the one thread's own system calls (Linux 6.1), so that reading them needs no barrier."""
ANY_THREAD: Final = _DISABLED
"""Results may appear at any time (Linux 5.10): only where loads are not reordered, as there are no barriers here."""
_ORDERED_LOADS = frozenset({"x86_64", "AMD64", "i686", "i386"})

Vectors = ctypes.Array[ctypes.c_size_t]
"""Of ``struct iovec``: addresses and lengths in turns."""
_SQE = struct.Struct("=BBHiQQIIQ24x")
_CQE = struct.Struct("=QiI")

_HINTS = {
    errno.ENOSYS: "the kernel has no io_uring, or a sandbox hides it",
    errno.EPERM: "forbidden here: the sysctl kernel.io_uring_disabled or a container's seccomp profile",
    errno.EACCES: "forbidden here: a security policy",
    errno.ENOMEM: "not enough locked memory allowed: raise `ulimit -l`",
    errno.EINVAL: "needs Linux 5.10 (6.1 on other processors than x86)",
}


# struct io_uring_params is 30 words; the index of each field.
_Parameters = ctypes.c_uint32 * 30
_SQ_ENTRIES, _CQ_ENTRIES, _FLAGS, _FEATURES = 0, 1, 2, 5
_SQ_HEAD, _SQ_TAIL, _SQ_MASK, _SQ_ARRAY = 10, 11, 12, 16
_CQ_HEAD, _CQ_TAIL, _CQ_MASK, _CQES = 20, 21, 22, 25


class Ring:
    """Submissions and results of one file. All methods but the constructor and ``close`` are for one thread.

    Args:
        fd: Descriptor of the file that every transfer is for.
        entries: Requests that are submitted or under way at once, at most.

    Raises:
        EngineUnavailableError: The system has no io_uring, or does not let this process have one.
    """

    def __init__(self, fd: int, entries: int) -> None:
        if sys.platform != "linux":
            raise EngineUnavailableError("engine='uring': io_uring is Linux's; use 'posix'")
        self._libc, self._system = _libc()
        self._fd = -1
        parameters = self._set_up(entries)
        self._maps: list[tuple[int, int]] = []
        try:
            if parameters[_FEATURES] & _NEEDED_FEATURES != _NEEDED_FEATURES:
                raise EngineUnavailableError("engine='uring': needs Linux 5.10; use 'posix'")
            files = ctypes.c_int32(fd)
            self._register("register a file", _REGISTER_FILES, ctypes.addressof(files), 1)
            self._map(parameters)
        except BaseException:
            self.close()
            raise

    def enable(self) -> None:
        """Start the ring; only the calling thread uses it from now on."""
        self._register("enable the ring", _REGISTER_ENABLE_RINGS, 0, 0)

    @staticmethod
    def vectors(ranges: Sequence[Range]) -> Vectors:
        """Ranges of memory, for `read` and `write`: to be held until the result is there."""
        return (ctypes.c_size_t * (2 * len(ranges)))(*itertools.chain.from_iterable(ranges))

    def read(self, tag: int, vectors: Vectors, offset: int) -> None:
        """Add a read of the file into memory, which runs with the next `enter`; its result has ``tag``."""
        self._add(_OP_READV, _SQE_FIXED_FILE, 0, tag, ctypes.addressof(vectors), len(vectors) // 2, offset)

    def write(self, tag: int, vectors: Vectors, offset: int) -> None:
        """Add a write of memory to the file; as ``read``."""
        self._add(_OP_WRITEV, _SQE_FIXED_FILE, 0, tag, ctypes.addressof(vectors), len(vectors) // 2, offset)

    def read_other(self, tag: int, fd: int, address: int, length: int) -> None:
        """Add a read of another descriptor at its own position."""
        self._add(_OP_READ, 0, fd, tag, address, length, (1 << 64) - 1)

    def enter(self) -> None:
        """Submit the added entries and wait for at least one result, without the interpreter's lock.

        Returns early when a signal comes.

        Raises:
            OSError: The ring is of no use any more.
        """
        words = self._words
        count = (words[self._sq_tail] - words[self._sq_head]) & 0xFFFFFFFF
        if self._system(_ENTER, self._fd, count, 1, _ENTER_GETEVENTS, 0, 0) < 0:
            number = ctypes.get_errno()
            if number not in {errno.EINTR, errno.EAGAIN, errno.EBUSY}:
                raise OSError(number, f"io_uring_enter: {os.strerror(number)}")

    def results(self) -> list[tuple[int, int]]:
        """Take the results so far: for each the tag, and a byte count or a negative ``errno``."""
        words, cqes, mask = self._words, self._cqes, self._cq_mask
        head, tail = words[self._cq_head], words[self._cq_tail]
        count = (tail - head) & 0xFFFFFFFF
        found = [_CQE.unpack_from(cqes, ((head + index) & mask) * _CQE.size)[:2] for index in range(count)]
        words[self._cq_head] = tail
        return found

    def close(self) -> None:
        """Free it. Idempotent; nothing may be under way."""
        for address, length in self._maps:
            self._libc.munmap(address, length)
        self.forget()

    def forget(self) -> None:
        """In a forked child, which does not have the mappings: closes the descriptor. Idempotent."""
        self._maps = []
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _set_up(self, entries: int) -> ctypes.Array[ctypes.c_uint32]:
        number = errno.EINVAL
        for flags in (OWN_THREAD, ANY_THREAD) if platform.machine() in _ORDERED_LOADS else (OWN_THREAD,):
            parameters = _Parameters()
            parameters[_FLAGS] = flags
            self._fd = self._system(_SETUP, entries, ctypes.addressof(parameters), 0, 0, 0, 0)
            if self._fd >= 0:
                return parameters
            number = ctypes.get_errno()
            if number != errno.EINVAL:
                break
        raise _unavailable("set up a ring", number)

    def _map(self, parameters: ctypes.Array[ctypes.c_uint32]) -> None:
        entries, array, cqes = parameters[_SQ_ENTRIES], parameters[_SQ_ARRAY], parameters[_CQES]
        nbytes = max(array + 4 * entries, cqes + _CQE.size * parameters[_CQ_ENTRIES])
        rings = self._map_one(nbytes + -nbytes % 4, _OFF_SQ_RING)
        self._words = words = rings.cast("I")
        self._sqes = self._map_one(_SQE.size * entries, _OFF_SQES)
        self._cqes = rings[cqes:]
        self._sq_head, self._sq_tail = parameters[_SQ_HEAD] // 4, parameters[_SQ_TAIL] // 4
        self._cq_head, self._cq_tail = parameters[_CQ_HEAD] // 4, parameters[_CQ_TAIL] // 4
        self._sq_mask, self._cq_mask = words[parameters[_SQ_MASK] // 4], words[parameters[_CQ_MASK] // 4]
        for index in range(entries):  # every place of the queue is for the entry of the same number
            words[array // 4 + index] = index

    def _map_one(self, nbytes: int, offset: int) -> memoryview:
        # Not the module mmap: it would keep a duplicate of the descriptor, which a forked child could not close.
        address = self._libc.mmap(
            None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE, self._fd, offset
        )
        if address == ctypes.c_void_p(-1).value:
            raise _unavailable("map a ring", ctypes.get_errno())
        self._maps.append((address, nbytes))
        self._libc.madvise(address, nbytes, _MADV_DONTFORK)  # else a child would keep the ring, and thus the file
        return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

    def _add(self, operation: int, flags: int, fd: int, tag: int, address: int, length: int, offset: int) -> None:
        words = self._words
        tail = words[self._sq_tail]
        entry = (tail & self._sq_mask) * _SQE.size
        _SQE.pack_into(self._sqes, entry, operation, flags, 0, fd, offset, address, length, 0, tag)
        words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF  # last of all: after an error the kernel does not see it

    def _register(self, what: str, operation: int, address: int, count: int) -> None:
        if self._system(_REGISTER, self._fd, operation, address, count, 0, 0) < 0:
            raise _unavailable(what, ctypes.get_errno())


def _libc() -> tuple[ctypes.CDLL, Callable[..., int]]:
    """The C library and its ``syscall`` with six arguments; both run without the interpreter's lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    system = ctypes.CFUNCTYPE(ctypes.c_long, *(ctypes.c_long,) * 7, use_errno=True)(("syscall", libc))
    libc.mmap.restype = ctypes.c_void_p
    word = ctypes.c_void_p
    libc.mmap.argtypes = (word, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (word, ctypes.c_size_t)
    libc.madvise.argtypes = (word, ctypes.c_size_t, ctypes.c_int)
    return libc, system


def _unavailable(what: str, number: int) -> EngineUnavailableError:
    reason = _HINTS.get(number, os.strerror(number))
    name = errno.errorcode.get(number, number)
    return EngineUnavailableError(f"engine='uring': io_uring cannot {what}: {reason} ({name}); use 'posix'")
