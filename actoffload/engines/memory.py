"""An engine whose file is memory: for tests, and for trying things without a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .. import native_hooks
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
        self.start_threads(count)

    def peek(self, offset: int, length: int) -> bytes:
        """Returns bytes as they lie here, past the queues: for tests."""
        return bytes(
            self._chunk(position // _CHUNK_BYTES)[position % _CHUNK_BYTES]
            for position in range(offset, min(offset + length, self._size_bytes))
        )

    def poke(self, offset: int, data: bytes) -> None:
        """Overwrites bytes past the queues: for tests."""
        for position, byte in enumerate(data, offset):
            self._chunk(position // _CHUNK_BYTES)[position % _CHUNK_BYTES] = byte
        self._size_bytes = max(self._size_bytes, offset + len(data))

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        length = sum([len(view) for view in views])
        if kind is IoKind.READ:
            length = max(0, min(length, self._size_bytes - offset))
        parts, done = [], 0
        for view in views:
            begin, end = done, min(done + len(view), length)
            while done < end:
                index, start = divmod(offset + done, _CHUNK_BYTES)
                count = min(end - done, _CHUNK_BYTES - start)
                memory, chunk = view[done - begin : done - begin + count], self._chunk(index)[start : start + count]
                parts.append((memory, chunk) if kind is IoKind.READ else (chunk, memory))
                done += count
        _copy(parts)
        if kind is IoKind.WRITE:
            with self._counter_lock:
                self._size_bytes = max(self._size_bytes, offset + done)
        return done

    def _chunk(self, index: int) -> memoryview:
        chunk = self._chunks.get(index)
        return chunk if chunk is not None else self._chunks.setdefault(index, memoryview(bytearray(_CHUNK_BYTES)))


def _copy(parts: Sequence[tuple[memoryview, memoryview]]) -> None:
    """Copies each part, to and from; in C with one turn at the interpreter's lock for all of them."""
    native = native_hooks.loaded()
    if native is not None:
        native.copy(parts)
        return
    for to, source in parts:
        to[:] = source


__all__ = ["MemoryEngine"]
