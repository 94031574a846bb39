"""The portable engine: the third-party package ``aiofiles``, through the page cache."""

from __future__ import annotations

import asyncio
import errno
import importlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from ...errors import EngineUnavailableError
from .base import EngineCapabilities, IoKind, SpoolFile
from .queued import QueuedEngine, default_threads


class AiofilesEngine(QueuedEngine):
    """Seek, then read or write: each worker thread with a file handle and an event loop of its own.

    Args:
        file: The file; opened again without ``O_DIRECT`` where it has a ``reopen_path``. Elsewhere one duplicate of
            the descriptor is used, as duplicates share one position.
        threads: Handles, thus transfers at the same time; None: up to 4.

    Raises:
        EngineUnavailableError: The package ``aiofiles`` is not installed.
    """

    default_name: ClassVar[str] = "aiofiles"

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        try:
            wrap = importlib.import_module("aiofiles.threadpool").wrap
        except ImportError as exc:
            raise EngineUnavailableError("engine='aiofiles': install the package aiofiles, or use 'posix'") from exc
        count = default_threads(threads) if file.reopen_path else 1
        alignment = 1 if file.reopen_path else file.alignment
        direct = file.direct and not file.reopen_path
        super().__init__(file, EngineCapabilities(self.default_name, direct, alignment, threads=count, vectored=True))
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="actoffload-aiofiles-io")
        self._files = [io.FileIO(file.reopen_path or os.dup(file.fd), "r+") for _ in range(count)]
        self._loops = [asyncio.new_event_loop() for _ in range(count)]
        self._idle = [
            (loop, wrap(raw, loop=loop, executor=self._executor))
            for loop, raw in zip(self._loops, self._files, strict=True)
        ]  # list operations are atomic, and each worker takes one
        self.start_threads(count)

    def close(self) -> None:
        super().close()
        self._executor.shutdown()
        for loop in self._loops:
            loop.close()
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        for raw in self._files:
            raw.close()

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        loop, handle = self._idle.pop()
        try:
            return loop.run_until_complete(_move(handle, kind, views[0], offset))
        finally:
            self._idle.append((loop, handle))


async def _move(handle: Any, kind: IoKind, view: memoryview, offset: int) -> int:
    await handle.seek(offset)
    moved: int | None = await (handle.readinto(view) if kind is IoKind.READ else handle.write(view))
    if moved is None:  # a raw file's way to say EAGAIN
        raise BlockingIOError(errno.EAGAIN, "would block")
    return moved
