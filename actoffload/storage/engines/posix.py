"""The engine that is always there: threads that call ``preadv`` and ``pwritev``, directly or through the page cache."""

from __future__ import annotations

import os
from typing import ClassVar

from .base import EngineCapabilities, IoKind, SpoolFile
from .queued import QueuedEngine, default_threads

_HAS_VECTORED = hasattr(os, "preadv") and hasattr(os, "pwritev")


class PosixEngine(QueuedEngine):
    """Positional reads and writes in worker threads; the interpreter's lock is not held during the system call.

    Args:
        file: The file to work on; with ``O_DIRECT`` when ``file.direct``.
        threads: Worker threads; None: up to 4.
    """

    default_name: ClassVar[str] = "posix"

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        count = default_threads(threads)
        super().__init__(
            file,
            EngineCapabilities(
                self.default_name, direct=file.direct, alignment=file.alignment, threads=count, vectored=True
            ),
        )
        self.start_threads(count)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        fd = self._file.fd
        if kind is IoKind.WRITE:
            return os.pwritev(fd, views, offset) if _HAS_VECTORED else os.pwrite(fd, views[0], offset)
        if _HAS_VECTORED:
            return os.preadv(fd, views, offset)
        data = os.pread(fd, len(views[0]), offset)
        views[0][: len(data)] = data
        return len(data)
