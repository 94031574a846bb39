"""For tests of storage and memory: write an extent, read it back; io_uring where the system has it; forked children."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable

import pytest

from actoffload.errors import EngineUnavailableError
from actoffload.storage.engines.base import IoKind, IoRequest, SpoolFile, StorageEngine
from actoffload.storage.engines.uring import UringEngine
from actoffload.storage.spool import Extent, Spool
from actoffload.testing.engine_suite import WAIT_S, Memory

MIB = 1 << 20
BLOCK = 4096
MakeSpool = Callable[..., Spool]


def put(spool: Spool, data: bytes) -> Extent:
    memory = Memory(len(data))
    memory.data = data
    extent = spool.allocate(len(data))
    transfer = spool.write(extent, memory.address, len(data), keepalive=memory)
    assert transfer.wait(WAIT_S)
    assert transfer.error is None
    return extent


def get(spool: Spool, extent: Extent, length: int) -> bytes:
    memory = Memory(length, fill=0xEE)
    transfer = spool.read(extent, memory.address, length, keepalive=memory)
    assert transfer.wait(WAIT_S)
    assert transfer.error is None
    return memory.data


def move(engine: StorageEngine, kind: IoKind, memory: Memory, offset: int = 0) -> IoRequest:
    request = IoRequest(kind, memory.address, memory.nbytes, offset)
    engine.submit(request)
    assert request.wait(WAIT_S)
    return request


def make_uring(file: SpoolFile, threads: int | None = None) -> UringEngine:
    """The engine; skips where the system has no io_uring."""
    try:
        return UringEngine(file, threads=threads)
    except EngineUnavailableError as exc:
        pytest.skip(str(exc))


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child, which an alarm ends if it hangs; returns its exit code (120: it raised)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(int(WAIT_S))
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(120)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
