"""Storage engines: how bytes get between memory and the spool file."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Final

from ...errors import ConfigError, EngineUnavailableError
from .aiofiles import AiofilesEngine
from .base import OTHER_BYTES, SpoolFile, StorageEngine, try_transfers
from .gds import GdsEngine
from .memory import MemoryEngine
from .posix import PosixEngine
from .uring import UringEngine

_CLASSES: Final[dict[str, type[StorageEngine]]] = {
    cls.default_name: cls for cls in (PosixEngine, UringEngine, AiofilesEngine, GdsEngine, MemoryEngine)
}
ENGINES: Final[tuple[str, ...]] = tuple(_CLASSES)
"""Names that ``create_engine`` knows."""

AUTO_ORDER: Final[tuple[str, ...]] = ("posix", "uring", "aiofiles")
"""The engines that ``auto`` tries, best first."""
BEHIND_A_DEVICE: Final[tuple[str, ...]] = ("uring", "posix", "aiofiles")
"""Likewise for large transfers beside a training thread that runs Python: one thread keeps all of them under way."""

EngineFactory = Callable[[SpoolFile], StorageEngine]

_PROBE_BYTES = 64 << 10


def create_engine(name: str, file: SpoolFile, *, threads: int | None = None) -> StorageEngine:
    """Create the engine called ``name`` (one of ``ENGINES``) on ``file``.

    Raises:
        ConfigError: There is no such engine.
        EngineUnavailableError: It cannot run here.
    """
    cls = _CLASSES.get(name)
    if cls is None:
        raise ConfigError("engine", name, f"choose one of {', '.join(('auto', *ENGINES))}")
    return cls(file, threads=threads)


def choose_engine(
    file: SpoolFile, order: Sequence[str] | None = None, *, threads: int | None = None
) -> tuple[StorageEngine, str]:
    """Return the first engine of an order that moves bytes to the file and back, and the reason for it.

    Overwrites the first bytes of the file: only for a file that holds nothing yet. ``order`` None: ``AUTO_ORDER``.

    Raises:
        EngineUnavailableError: None of them does; the message has every engine's error.
    """
    failures: list[str] = []
    for name in order or AUTO_ORDER:
        try:
            engine = create_engine(name, file, threads=threads)
        except EngineUnavailableError as exc:
            failures.append(f"{name}: {exc}")
            continue
        problem = probe_engine(engine)
        if problem is None:
            how = "O_DIRECT" if engine.capabilities.direct else "through the page cache"
            skipped = f"; not {'; not '.join(failures)}" if failures else ""
            return engine, f"{name}: a write and a read of {_PROBE_BYTES} bytes came back equal, {how}{skipped}"
        engine.abort()
        failures.append(f"{name}: {problem}")
    raise EngineUnavailableError(f"engine='auto': no engine works in {file.path}: {'; '.join(failures)}")


def probe_engine(engine: StorageEngine) -> str | None:
    """Write bytes at offset 0 and read them back; return a description of the failure, or None."""
    pattern = bytes(range(256)) * (_PROBE_BYTES // 256)
    with mmap.mmap(-1, 2 * _PROBE_BYTES) as memory:  # page-aligned, as a direct transfer needs it
        memory[:_PROBE_BYTES] = pattern
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(anchor)
        del anchor  # else the mapping could not be closed
        problem = try_transfers(engine, address, _PROBE_BYTES, 0)
        if problem is None and memory[_PROBE_BYTES:] != pattern:
            problem = OTHER_BYTES
        return problem


__all__ = [
    "AUTO_ORDER",
    "BEHIND_A_DEVICE",
    "ENGINES",
    "EngineFactory",
    "choose_engine",
    "create_engine",
    "probe_engine",
]
