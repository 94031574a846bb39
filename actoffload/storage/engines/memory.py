"""An engine with memory in place of a file: for tests, and for experiments without a disk."""

from __future__ import annotations

import threading
from typing import ClassVar

from .base import EngineCapabilities, IoKind, SpoolFile
from .queued import QueuedEngine

_CHUNK_BYTES = 1 << 20


class MemoryEngine(QueuedEngine):
    """Copies to and from chunks of memory in one thread (several would only share one memory bus).

    Behaves as a file: it ends behind the last byte written, holes read as zeros, a transfer may be short.

    Args:
        file: Only its path (for messages) and its alignment are used.
        threads: Worker threads; None: 1.
    """

    default_name: ClassVar[str] = "memory"

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        count = 1 if threads is None else threads
        capabilities = EngineCapabilities(
            self.default_name, direct=False, alignment=file.alignment, needs_file=False, threads=count, vectored=True
        )
        super().__init__(file, capabilities)
        self._chunks: dict[int, memoryview] = {}
        self._size_bytes = 0
        self._size_lock = threading.Lock()
        self.start_threads(count)

    def peek(self, offset: int, length: int) -> bytes:
        """Return bytes as they lie here, past the queues: for tests."""
        found = bytearray(max(0, min(length, self._size_bytes - offset)))
        self._copy(IoKind.READ, memoryview(found), offset)
        return bytes(found)

    def poke(self, offset: int, data: bytes) -> None:
        """Overwrite bytes past the queues: for tests."""
        self._copy(IoKind.WRITE, memoryview(data), offset)
        self._size_bytes = max(self._size_bytes, offset + len(data))

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        done = 0
        for view in views:
            if kind is IoKind.READ:
                view = view[: max(0, self._size_bytes - offset - done)]
            self._copy(kind, view, offset + done)
            done += len(view)
        if kind is IoKind.WRITE:
            with self._size_lock:
                self._size_bytes = max(self._size_bytes, offset + done)
        return done

    def _copy(self, kind: IoKind, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            index, start = divmod(offset + done, _CHUNK_BYTES)
            count = min(len(view) - done, _CHUNK_BYTES - start)
            memory, chunk = view[done : done + count], self._chunk(index)[start : start + count]
            if kind is IoKind.READ:
                memory[:] = chunk
            else:
                chunk[:] = memory
            done += count

    def _chunk(self, index: int) -> memoryview:
        chunk = self._chunks.get(index)
        return chunk if chunk is not None else self._chunks.setdefault(index, memoryview(bytearray(_CHUNK_BYTES)))
