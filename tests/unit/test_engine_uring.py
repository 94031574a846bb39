"""The io_uring engine: few calls of the kernel, odd results, and systems without io_uring."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from actoffload.errors import EngineUnavailableError, StorageReadError, StorageWriteError
from actoffload.storage.engines import choose_engine, create_engine
from actoffload.storage.engines import ring as ring_module
from actoffload.storage.engines import uring as uring_module
from actoffload.storage.engines.base import IoKind, IoRequest, RequestState, SpoolFile
from actoffload.storage.engines.ring import Ring
from actoffload.storage.engines.uring import UringEngine
from actoffload.testing.engine_suite import BLOCK, WAIT_S, Memory, peek_file, random_bytes
from tests.harness import run_in_threads
from tests.spools import make_uring, move


@pytest.fixture
def engine(file: SpoolFile) -> Iterator[UringEngine]:
    engine = make_uring(file)
    yield engine
    engine.abort()


def change_results(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Replace results of transfers as they come out of the ring; ``change`` gets the tag and the real result."""
    real = Ring.results
    monkeypatch.setattr(
        Ring, "results", lambda ring: [(tag, change(tag, result) if tag else result) for tag, result in real(ring)]
    )


# -- results that are not simply all bytes ----------------------------------------------------------------------------


def test_a_short_transfer_goes_on_where_it_stopped_on_a_boundary(
    engine: UringEngine, file: SpoolFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    for name in ("read", "write"):
        real = getattr(Ring, name)

        def add(ring: Ring, tag: int, vectors: Any, offset: int, real: Any = real) -> None:
            offsets.append(offset)
            real(ring, tag, vectors, offset)

        monkeypatch.setattr(Ring, name, add)
    change_results(monkeypatch, lambda tag, result: result - 100 if result > BLOCK else result)
    source, target = Memory(3 * BLOCK), Memory(3 * BLOCK)
    source.data = random_bytes(source.nbytes, 1)
    assert move(engine, IoKind.WRITE, source, BLOCK).error is None
    assert move(engine, IoKind.READ, target, BLOCK).error is None
    assert target.data == source.data == peek_file(file, BLOCK, 3 * BLOCK)
    assert len(offsets) > 2
    assert all(offset % file.alignment == 0 for offset in offsets)


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_a_temporary_error_is_tried_again(engine: UringEngine, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    seen: set[int] = set()

    def once(tag: int, result: int) -> int:
        first = not seen
        seen.add(tag)
        return -number if first else result

    change_results(monkeypatch, once)
    assert move(engine, IoKind.WRITE, Memory(BLOCK)).error is None
    assert len(seen) == 2


@pytest.mark.parametrize(("kind", "cls"), [(IoKind.READ, StorageReadError), (IoKind.WRITE, StorageWriteError)])
def test_an_error_names_place_and_cause_and_only_its_own_request_fails(
    engine: UringEngine, file: SpoolFile, monkeypatch: pytest.MonkeyPatch, kind: IoKind, cls: type[OSError]
) -> None:
    with monkeypatch.context() as patch:
        change_results(patch, lambda tag, result: -errno.ENOSPC)
        error = move(engine, kind, Memory(BLOCK), 2 * BLOCK).error
    assert isinstance(error, cls)
    assert (error.errno, error.filename) == (errno.ENOSPC, file.path)
    assert f"{kind.value} of {BLOCK} bytes at offset {2 * BLOCK} failed" in str(error)
    assert move(engine, IoKind.WRITE, Memory(BLOCK)).error is None


def test_memory_that_is_gone_is_an_error_and_no_crash(engine: UringEngine) -> None:
    request = IoRequest(IoKind.WRITE, 1 << 46, BLOCK, 0)  # nothing is mapped there
    engine.submit(request)
    assert request.wait(WAIT_S)
    assert isinstance(request.error, StorageWriteError)
    assert request.error.errno == errno.EFAULT


# -- few turns, bounded, reads not held up ----------------------------------------------------------------------------


def test_a_request_larger_than_the_window_goes_alone(
    engine: UringEngine, file: SpoolFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring_module, "WINDOW_BYTES", BLOCK)
    memory = Memory(4 * BLOCK, fill=7)
    assert move(engine, IoKind.WRITE, memory).error is None
    assert peek_file(file, 0, 4 * BLOCK) == memory.data


def test_many_threads_that_wait_for_each_transfer_are_never_forgotten(engine: UringEngine) -> None:
    """Each submits and waits in turn, so that the engine sleeps and wakes all the time."""

    def work(index: int) -> None:
        source, target = Memory(BLOCK), Memory(BLOCK)
        for turn in range(100):
            source.data = bytes([(index * 31 + turn) % 256]) * BLOCK
            assert move(engine, IoKind.WRITE, source, index * BLOCK).error is None
            assert move(engine, IoKind.READ, target, index * BLOCK).error is None
            assert target.data == source.data

    run_in_threads(*(partial(work, index) for index in range(4)))


# -- errors of our own ------------------------------------------------------------------------------------------------


def test_an_error_before_the_system_call_fails_the_request(
    engine: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(ring: Ring, *arguments: object) -> None:
        raise MemoryError("in this test")

    memory = Memory(2 * BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(Ring, "write", fails)
        assert isinstance(move(engine, IoKind.WRITE, memory).error, MemoryError)
    assert move(engine, IoKind.WRITE, memory).error is None


# -- its end ----------------------------------------------------------------------------------------------------------


def test_close_gives_every_descriptor_back(file: SpoolFile) -> None:
    before = os.listdir("/proc/self/fd")
    engine = make_uring(file)
    during = os.listdir("/proc/self/fd")
    move(engine, IoKind.WRITE, Memory(BLOCK))
    engine.close()
    engine.close()
    assert len(during) == len(before) + 2
    assert os.listdir("/proc/self/fd") == before


def test_a_broken_ring_fails_every_request_and_hangs_nothing(engine: UringEngine) -> None:
    links = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    ring, eventfd = (next(int(fd) for fd, link in links.items() if name in link) for name in ("io_uring", "[eventfd]"))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, ring)  # as if other code had closed the wrong descriptors
    os.close(null)
    os.eventfd_write(eventfd, 1)  # its thread sleeps in the kernel, on the old ring
    errors = [move(engine, kind, Memory(BLOCK)).error for kind in (IoKind.WRITE, IoKind.WRITE, IoKind.READ)]
    engine.close()
    assert isinstance(errors[1], StorageWriteError)
    assert isinstance(errors[2], StorageReadError)


# -- where there is none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSYS, "the kernel has no io_uring"),
        (errno.EPERM, "seccomp"),
        (errno.ENOMEM, "ulimit -l"),
        (errno.EINVAL, "needs Linux"),
        (errno.EMFILE, os.strerror(errno.EMFILE)),
    ],
)
def test_the_error_names_why_io_uring_is_missing_and_auto_goes_on(
    file: SpoolFile, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    real = ring_module._libc

    def without() -> Any:
        def system(*arguments: int) -> int:
            ctypes.set_errno(number)
            return -1

        return real()[0], system

    monkeypatch.setattr(ring_module, "_libc", without)
    with pytest.raises(EngineUnavailableError, match=reason) as caught:
        create_engine("uring", file)
    assert errno.errorcode[number] in str(caught.value)
    monkeypatch.setattr("actoffload.storage.engines.AUTO_ORDER", ("uring", "posix"))
    engine, why = choose_engine(file, threads=1)
    engine.close()
    assert engine.capabilities.name == "posix"
    assert "not uring: " in why
    assert reason in why


def test_an_error_of_the_moment_neither_ends_the_thread_nor_loses_a_request(
    engine: UringEngine, file: SpoolFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Ring.enter, [0]

    def enter(ring: Ring) -> None:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise OSError(errno.ENOMEM, "no memory just now")
        real(ring)

    monkeypatch.setattr(Ring, "enter", enter)
    for _ in range(8):
        request = move(engine, IoKind.WRITE, Memory(BLOCK))
        assert request.state is RequestState.DONE
        assert request.error is None
    assert calls[0] >= 3
