"""The engine that is always there: threads that call ``preadv`` and ``pwritev``, directly or through the page cache."""

from __future__ import annotations

import errno
import os
from typing import ClassVar

from .base import EngineCapabilities, IoKind, SpoolFile
from .queued import QueuedEngine, default_threads


class PosixEngine(QueuedEngine):
    """Positional reads and writes in up to 4 worker threads, without the interpreter's lock during the system call."""

    default_name: ClassVar[str] = "posix"

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        count = default_threads(threads)
        capabilities = EngineCapabilities(self.default_name, file.direct, file.alignment, threads=count, vectored=True)
        super().__init__(file, capabilities)
        self.start_threads(count)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        if not hasattr(os, "preadv"):
            raise OSError(errno.ENOSYS, "this system has no positional reads and writes: use engine='aiofiles'")
        return (os.preadv if kind is IoKind.READ else os.pwritev)(self._file.fd, views, offset)
