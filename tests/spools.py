"""What the tests of the spool share: data put into an extent, and got back; io_uring, if it is here."""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from actoffload.engines.base import SpoolFile
from actoffload.engines.uring import UringEngine
from actoffload.errors import EngineUnavailableError
from actoffload.spool import Extent, Spool
from actoffload.testing.behind import Memory
from actoffload.testing.engine_suite import WAIT_S

MIB = 1 << 20
BLOCK = 4096
CAP_IPC_LOCK = 14
MakeSpool = Callable[..., Spool]


def put(spool: Spool, data: bytes) -> Extent:
    """Writes data into a new extent and waits for it."""
    memory = Memory(len(data))
    memory.data = data
    extent = spool.allocate(len(data))
    transfer = spool.write(extent, memory.address, len(data), keepalive=memory)
    assert transfer.wait(WAIT_S)
    assert transfer.error is None
    return extent


def get(spool: Spool, extent: Extent, length: int) -> bytes:
    """Reads from an extent and waits for it."""
    memory = Memory(length, fill=0xEE)
    transfer = spool.read(extent, memory.address, length, keepalive=memory)
    assert transfer.wait(WAIT_S)
    assert transfer.error is None
    return memory.data


def make_uring(file: SpoolFile, threads: int | None = None) -> UringEngine:
    """The engine; skips where the system has no io_uring."""
    try:
        return UringEngine(file, threads=threads)
    except EngineUnavailableError as exc:
        pytest.skip(str(exc))


def needs_registration(nbytes: int = MIB) -> None:
    """Skip where the system cannot register so much memory; what it says of ours is no reason: it may be our fault."""
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = Path("/proc/self/status").read_text(encoding="ascii") if version >= (5, 13) else ""
    capabilities = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff")), 0)
    limited = soft >= 0 and not capabilities >> CAP_IPC_LOCK & 1
    if version < (5, 13) or (limited and soft < nbytes):
        pytest.skip(f"needs Linux 5.13 and `ulimit -l` of {nbytes >> 10} KiB")
