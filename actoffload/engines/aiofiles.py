"""The portable engine: the third-party ``aiofiles`` on one asyncio loop, through the page cache."""

from __future__ import annotations

import asyncio
import errno
import importlib
import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from ..errors import EngineUnavailableError
from .base import EngineCapabilities, IoKind, IoRequest, SpoolFile
from .queued import Cursor, QueuedEngine, default_threads


class AiofilesEngine(QueuedEngine):
    """Seek-then-transfer on several handles of the same file, driven by one event loop in one thread.

    Args:
        file: The file; reopened without ``O_DIRECT`` where it has a ``reopen_path``. Without one, a single duplicate of
            the descriptor is used (duplicates share one position, so there is nothing to gain from more).
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
        self._raw = [_reopen(file) for _ in range(count)]
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="actoffload-aiofiles-io")
        self._loop = asyncio.new_event_loop()
        self._idle: list[Any] = [wrap(raw, loop=self._loop, executor=self._executor) for raw in self._raw]
        self._tasks: set[asyncio.Task[None]] = set()
        self._released = threading.Lock()  # held for ever by the close() that gave the handles back
        self.start_threads(1)

    def close(self) -> None:
        """See ``StorageEngine``."""
        super().close()
        if not self._released.acquire(blocking=False):
            return
        with self._mutex:  # against a second close(), which may be about to wake the loop
            self._loop.close()
        self._executor.shutdown()
        for raw in self._raw:
            raw.close()

    def after_fork_in_child(self) -> None:
        """See ``StorageEngine``."""
        for raw in self._raw:
            raw.close()

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _notify(self) -> None:
        self._loop.call_soon_threadsafe(self._pump)

    def _notify_all(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pump)

    def _pump(self) -> None:
        """Starts a task for each request that finds an idle handle; in the loop's thread."""
        while self._idle:
            with self._mutex:
                request = self._pop()
                finished = request is None and self._closing
            if request is None:
                if finished and not self._tasks:
                    self._loop.stop()
                return
            task = self._loop.create_task(self._serve_with(request, self._idle.pop()))
            self._tasks.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pump()

    async def _serve_with(self, request: IoRequest, handle: Any) -> None:
        error: BaseException | None = None
        try:
            if request.before is not None:  # it may wait for a device: not in the loop's thread
                await self._loop.run_in_executor(self._executor, request.before)
            cursor = Cursor([request], self._file, self._capabilities.alignment)
            while not cursor.finished:
                try:
                    await handle.seek(cursor.offset)
                    moved = await self._transfer_with(handle, request.kind, cursor.views[0])
                except OSError as exc:
                    cursor.fail(exc)
                    continue
                cursor.advance(moved)
                self._count(request.kind, moved)
        except BaseException as exc:  # whatever it was, it belongs to the request and not to the loop
            error = exc
        self._idle.append(handle)
        request.finish(error)

    async def _transfer_with(self, handle: Any, kind: IoKind, view: memoryview) -> int:
        moved: int | None = await (handle.readinto(view) if kind is IoKind.READ else handle.write(view))
        if moved is None:  # a raw file's way to say EAGAIN
            raise BlockingIOError(errno.EAGAIN, "would block")
        return moved

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        raise NotImplementedError("this engine transfers on its loop")


def _reopen(file: SpoolFile) -> io.FileIO:
    if file.reopen_path:
        return io.FileIO(file.reopen_path, "r+")
    return io.FileIO(os.dup(file.fd), "r+")


__all__ = ["AiofilesEngine"]
