"""The io_uring engine: how seldom it calls the kernel, what it makes of odd results, and where there is no io_uring."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actoffload.engines import choose_engine, create_engine
from actoffload.engines import ring as ring_module
from actoffload.engines import uring as uring_module
from actoffload.engines.base import IoKind, IoRequest, RequestState, SpoolFile
from actoffload.engines.ring import Ring
from actoffload.engines.uring import UringEngine
from actoffload.errors import EngineUnavailableError, StorageReadError, StorageWriteError
from actoffload.testing.behind import Memory, peek_file, random_bytes
from actoffload.testing.engine_suite import BLOCK, WAIT_S
from tests.spools import make_uring

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def engine(file: SpoolFile) -> Iterator[UringEngine]:
    engine = make_uring(file)
    yield engine
    engine.abort()


def move(engine: UringEngine, kind: IoKind, memory: Memory, offset: int = 0) -> IoRequest:
    request = IoRequest(kind, memory.address, memory.nbytes, offset)
    engine.submit(request)
    assert request.wait(WAIT_S)
    return request


class Results:
    """Replaces results of transfers as they come out of the ring; ``change`` gets the tag and the real result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
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

        def add(ring: Ring, tag: int, address: int, length: int, offset: int, *place: Any, real: Any = real) -> None:
            offsets.append(offset)
            real(ring, tag, address, length, offset, *place)

        monkeypatch.setattr(Ring, name, add)
    Results(monkeypatch, lambda tag, result: result - 100 if result > BLOCK else result)
    source, target = Memory(3 * BLOCK), Memory(3 * BLOCK)
    source.data = random_bytes(source.nbytes, 1)
    assert move(engine, IoKind.WRITE, source, BLOCK).error is None
    assert move(engine, IoKind.READ, target, BLOCK).error is None
    assert target.data == source.data == peek_file(file, BLOCK, 3 * BLOCK)
    assert len(offsets) > 2
    assert all(offset % file.alignment == 0 for offset in offsets)


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_what_is_only_for_now_is_tried_again(engine: UringEngine, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    seen: set[int] = set()

    def once(tag: int, result: int) -> int:
        first = not seen
        seen.add(tag)
        return -number if first else result

    Results(monkeypatch, once)
    assert move(engine, IoKind.WRITE, Memory(BLOCK)).error is None
    assert len(seen) == 2
    assert engine.written_bytes == BLOCK


def test_what_never_gets_better_fails(engine: UringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actoffload.engines.queued._MAX_STALLS", 3)
    Results(monkeypatch, lambda tag, result: -errno.EAGAIN)
    error = move(engine, IoKind.WRITE, Memory(BLOCK)).error
    assert isinstance(error, StorageWriteError)
    assert "no progress in 4 attempts" in str(error)


@pytest.mark.parametrize(("kind", "cls"), [(IoKind.READ, StorageReadError), (IoKind.WRITE, StorageWriteError)])
def test_an_error_names_place_and_cause_and_only_its_own_request_fails(
    engine: UringEngine, file: SpoolFile, monkeypatch: pytest.MonkeyPatch, kind: IoKind, cls: type[OSError]
) -> None:
    with monkeypatch.context() as patch:
        Results(patch, lambda tag, result: -errno.ENOSPC)
        error = move(engine, kind, Memory(BLOCK), 2 * BLOCK).error
    assert isinstance(error, cls)
    assert (error.errno, error.filename) == (errno.ENOSPC, file.path)
    assert f"{kind.value} of {BLOCK} bytes at offset {2 * BLOCK} failed" in str(error)
    assert engine.written_bytes == engine.read_bytes == 0
    assert move(engine, IoKind.WRITE, Memory(BLOCK)).error is None


def test_memory_that_is_gone_is_an_error_and_no_crash(engine: UringEngine) -> None:
    request = IoRequest(IoKind.WRITE, 1 << 46, BLOCK, 0)  # nothing is mapped there
    engine.submit(request)
    assert request.wait(WAIT_S)
    assert isinstance(request.error, StorageWriteError)
    assert request.error.errno == errno.EFAULT


# -- few turns, bounded, reads not held up ----------------------------------------------------------------------------


class Gate:
    """Lets the reaper go to the kernel only when it is open, and notes how much each turn submits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.turns: list[int] = []
        real = Ring.enter

        def enter(ring: Ring) -> None:
            assert self.is_open.wait(WAIT_S)
            words: Any = ring._words
            self.turns.append(words[ring._sq_tail] - words[ring._sq_head])
            real(ring)

        monkeypatch.setattr(Ring, "enter", enter)


def test_all_that_waits_is_given_to_the_kernel_in_one_call(file: SpoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, memory = Gate(monkeypatch), Memory(BLOCK)
    engine = make_uring(file)
    requests = [IoRequest(IoKind.WRITE, memory.address, BLOCK, index * BLOCK) for index in range(100)]
    for request in requests:
        engine.submit(request)
    gate.is_open.set()
    engine.close()
    assert {request.state for request in requests} == {RequestState.DONE}
    assert max(gate.turns) >= 100


@pytest.mark.parametrize(("depth", "window_bytes"), [(5, 1 << 30), (64, 3 * BLOCK)])
def test_depth_and_bytes_under_way_are_bounded(
    file: SpoolFile, monkeypatch: pytest.MonkeyPatch, depth: int, window_bytes: int
) -> None:
    monkeypatch.setattr(uring_module, "WINDOW_BYTES", window_bytes)
    gate, memory, most = Gate(monkeypatch), Memory(BLOCK), [0, 0]
    engine = make_uring(file, threads=depth)
    assert engine.capabilities.threads == depth
    real = engine._start_some

    def start_some() -> bool:
        found = real()
        started = [request for request, *_ in engine._flights.values()]
        most[:] = max(most[0], len(started)), max(most[1], sum(request.length for request in started))
        return found

    monkeypatch.setattr(engine, "_start_some", start_some)
    requests = [IoRequest(IoKind.WRITE, memory.address, BLOCK, index * BLOCK) for index in range(50)]
    for request in requests:
        engine.submit(request)
    gate.is_open.set()
    engine.close()
    assert {request.state for request in requests} == {RequestState.DONE}
    assert most == ([5, 5 * BLOCK] if depth == 5 else [3, 3 * BLOCK])


def test_one_larger_than_the_window_goes_alone(
    engine: UringEngine, file: SpoolFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring_module, "WINDOW_BYTES", BLOCK)
    memory = Memory(4 * BLOCK, fill=7)
    assert move(engine, IoKind.WRITE, memory).error is None
    assert peek_file(file, 0, 4 * BLOCK) == memory.data


def test_a_before_that_waits_holds_up_no_read_and_leaves_what_is_behind_it_cancellable(
    engine: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring_module, "PREPARED_BYTES", 2 * BLOCK)
    memory, go_on, running = Memory(BLOCK), threading.Event(), threading.Event()
    assert move(engine, IoKind.WRITE, memory).error is None

    def before() -> None:
        running.set()
        assert go_on.wait(WAIT_S)

    writes = [IoRequest(IoKind.WRITE, memory.address, BLOCK, 0, before=before) for _ in range(5)]
    for write in writes:
        engine.submit(write)
    assert running.wait(WAIT_S)
    assert move(engine, IoKind.READ, memory).error is None
    assert [write.cancel() for write in writes] == [False, False, True, True, True]
    go_on.set()
    assert all(write.wait(WAIT_S) for write in writes)
    assert [write.state for write in writes] == [RequestState.DONE] * 2 + [RequestState.CANCELLED] * 3


def test_many_threads_that_wait_for_each_transfer_are_never_forgotten(engine: UringEngine) -> None:
    """Each submits and waits in turn, so that the engine sleeps and is woken all the time."""
    failures: list[BaseException] = []

    def work(index: int) -> None:
        source, target = Memory(BLOCK), Memory(BLOCK)
        try:
            for turn in range(100):
                source.data = bytes([(index * 31 + turn) % 256]) * BLOCK
                assert move(engine, IoKind.WRITE, source, index * BLOCK).error is None
                assert move(engine, IoKind.READ, target, index * BLOCK).error is None
                assert target.data == source.data
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


# -- errors of our own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [1, 2])
def test_an_error_before_the_kernel_has_it_is_that_of_the_request(
    engine: UringEngine, monkeypatch: pytest.MonkeyPatch, ranges: int
) -> None:
    memory = Memory(2 * BLOCK)
    real = Ring._add

    def add(ring: Ring, operation: int, flags: int, *rest: int) -> None:
        if flags:  # a transfer, and not the bell
            raise MemoryError("in this test")
        real(ring, operation, flags, *rest)

    parts = ((memory.address, BLOCK), (memory.address + BLOCK, BLOCK))
    first = IoRequest(IoKind.WRITE, memory.address, 2 * BLOCK, 0, ranges=parts if ranges == 2 else ())
    with monkeypatch.context() as patch:
        patch.setattr(Ring, "_add", add)
        engine.submit(first)
        assert first.wait(WAIT_S)
    assert isinstance(first.error, MemoryError)
    assert engine._flights == {}
    assert move(engine, IoKind.WRITE, memory).error is None


def test_what_the_kernel_may_touch_is_held_before_it_has_it(
    engine: UringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    real = Ring._add

    def add(ring: Ring, operation: int, flags: int, fd: int, tag: int, *rest: int) -> None:
        if flags:
            held.append(tag in engine._flights)
        real(ring, operation, flags, fd, tag, *rest)

    monkeypatch.setattr(Ring, "_add", add)
    memory = Memory(2 * BLOCK)
    assert move(engine, IoKind.WRITE, memory).error is None
    parts = ((memory.address, BLOCK), (memory.address + BLOCK, BLOCK))
    request = IoRequest(IoKind.READ, memory.address, 2 * BLOCK, 0, ranges=parts)
    engine.submit(request)
    assert request.wait(WAIT_S)
    assert held == [True, True]


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("make_places", MemoryError("in this test")),
        ("eventfd", MemoryError("in this test")),
        ("actoffload-uring-0 began", KeyboardInterrupt()),
        ("actoffload-uring-before", RuntimeError("can't start new thread")),
        ("actoffload-uring-0", RuntimeError("can't start new thread")),
    ],
)
def test_an_engine_that_cannot_be_made_leaves_nothing_behind(
    file: SpoolFile, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    make_uring(file).close()
    gc.collect()
    files, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    real = threading.Thread.start

    def make_places(ring: Ring, count: int) -> None:
        if step == "make_places":
            raise error

    def start(thread: threading.Thread) -> None:
        if thread.name == step:
            raise error
        real(thread)
        if f"{thread.name} began" == step:
            raise error

    def eventfd(count: int) -> int:
        if step == "eventfd":
            raise error
        return real_eventfd(count)

    real_eventfd = os.eventfd
    monkeypatch.setattr(os, "eventfd", eventfd)
    monkeypatch.setattr(Ring, "make_places", make_places)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(type(error)):
        UringEngine(file)
    deadline_s = time.monotonic() + WAIT_S
    while set(threading.enumerate()) - threads and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= files


def test_a_reaper_that_begins_late_leaves_a_ring_that_is_gone_alone(
    file: SpoolFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt may come when its thread is made and does not run yet."""
    late: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "actoffload-uring-0":
            late.append(thread)
            raise KeyboardInterrupt
        real(thread)

    make_uring(file).close()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            UringEngine(file)
    monkeypatch.setattr(Ring, "enable", lambda ring: pytest.fail("the ring is gone"))
    late[0].run()


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


def test_a_broken_ring_fails_every_request_and_hangs_nothing(file: SpoolFile) -> None:
    engine = make_uring(file)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, engine._ring._fd)  # as if somebody had closed descriptors that are not his
    os.close(null)
    os.eventfd_write(engine._bell, 1)  # it sleeps in the kernel, on the ring that it had
    errors = [move(engine, kind, Memory(BLOCK)).error for kind in (IoKind.WRITE, IoKind.WRITE, IoKind.READ)]
    engine.close()
    assert isinstance(errors[1], StorageWriteError)
    assert isinstance(errors[2], StorageReadError)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_depth_below_one_is_refused(file: SpoolFile, threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads={threads}"):
        UringEngine(file, threads=threads)


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
def test_it_says_why_there_is_no_io_uring_and_auto_goes_on(
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
    monkeypatch.setattr("actoffload.engines.AUTO_ORDER", ("uring", "posix"))
    engine, why = choose_engine(file, threads=1)
    engine.close()
    assert engine.capabilities.name == "posix"
    assert "not uring: " in why
    assert reason in why


def test_other_systems_have_none(file: SpoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EngineUnavailableError, match="io_uring is Linux's"):
        create_engine("uring", file)


def test_a_kernel_without_the_newer_flags_still_does_where_loads_are_ordered(
    file: SpoolFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_uring(file).close()
    monkeypatch.setattr(ring_module, "OWN_THREAD", 1 << 31)  # no kernel knows it
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(EngineUnavailableError, match=r"6\.1 on other processors"):
        create_engine("uring", file)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    engine = UringEngine(file)
    assert engine._ring.flags == ring_module.ANY_THREAD
    assert move(engine, IoKind.WRITE, Memory(BLOCK)).error is None
    engine.close()


FORBIDDEN = """
import ctypes, os, struct, sys, types
sys.modules["actoffload"] = types.ModuleType("actoffload")  # storage needs no torch, which takes seconds to import
sys.modules["actoffload"].__path__ = [os.path.join(sys.argv[1], "actoffload")]
# A seccomp filter as containers have it: the system call io_uring_setup (425) fails with EPERM.
steps = struct.pack("HBBIHBBIHBBIHBBI", 0x20, 0, 0, 0, 0x15, 0, 1, 425, 6, 0, 0, 0x00050001, 6, 0, 0, 0x7FFF0000)
steps = ctypes.create_string_buffer(steps, len(steps))
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(steps))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) != 0:
    print("no seccomp here")
    raise SystemExit
from actoffload import engines
from actoffload.spool import Spool
engines.AUTO_ORDER = ("uring", "posix")
spool = Spool([sys.argv[2]], grow_bytes=1 << 20)
print(spool.engine_name, spool.engine_reason)
spool.close()
"""


def test_in_a_container_that_forbids_it_auto_says_so_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORBIDDEN, str(ROOT), str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert found.returncode == 0, found.stderr
    if found.stdout.startswith("no seccomp"):
        pytest.skip("this system has no seccomp filters")
    assert found.stdout.startswith("posix ")
    assert "not uring" in found.stdout
    assert "seccomp" in found.stdout


def test_an_error_of_the_moment_neither_ends_the_reaper_nor_loses_a_request(
    engine: UringEngine, file: SpoolFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = engine._ring.enter, [0]

    def enter() -> None:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise OSError(errno.ENOMEM, "no memory just now")
        real()

    monkeypatch.setattr(engine._ring, "enter", enter)
    for _ in range(8):
        request = move(engine, IoKind.WRITE, Memory(BLOCK))
        assert request.state is RequestState.DONE
        assert request.error is None
    assert calls[0] >= 3
    assert all(thread.is_alive() for thread in engine._threads)


def test_a_completion_that_comes_after_its_request_has_failed_is_nobodys(engine: UringEngine) -> None:
    """The ring broke, its requests failed, and the kernel ends one of them all the same."""
    engine._landed(1 << 40, BLOCK)
    assert move(engine, IoKind.WRITE, Memory(BLOCK)).state is RequestState.DONE
