"""An engine with memory in place of a file: for tests, and for experiments without a disk."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from typing import ClassVar

from ...errors import EngineUnavailableError
from .base import SpoolFile
from .posix import PosixEngine


class MemoryEngine(PosixEngine):
    """Copies to and from an anonymous file in memory, in one thread (several would only share one memory bus).

    Args:
        file: Only its path (for messages) and its alignment are used.
        threads: Worker threads; None: 1.

    Raises:
        EngineUnavailableError: This system has no such files.
    """

    default_name: ClassVar[str] = "memory"

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        if not hasattr(os, "memfd_create"):
            raise EngineUnavailableError("engine='memory': this system has no files in memory; use 'posix'")
        fd = os.memfd_create("actoffload")
        # Not in `close`: tests look at the memory after that. Not at exit, when queued requests may still use it.
        weakref.finalize(self, os.close, fd).atexit = False
        super().__init__(replace(file, fd=fd, direct=False), threads=1 if threads is None else threads)
        self._capabilities = replace(self._capabilities, needs_file=False)

    def peek(self, offset: int, length: int) -> bytes:
        """Return bytes as they lie here, past the queues: for tests."""
        return os.pread(self._file.fd, length, offset)

    def poke(self, offset: int, data: bytes) -> None:
        """Overwrite bytes past the queues: for tests."""
        os.pwrite(self._file.fd, data, offset)
