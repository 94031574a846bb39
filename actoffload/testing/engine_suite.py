"""The conformance suite of storage engines: a class of tests to inherit, and helpers for memory and file contents.

    class TestMyEngine(StorageEngineTests):
        def make_engine(self, file, threads=None):
            return MyEngine(file, threads=threads)

``peek`` and ``poke`` access the file without the engine: an engine that only agrees with itself must not pass.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..errors import OffloaderClosedError, StorageReadError
from ..memory.process_memory import map_private
from ..storage.engines import probe_engine
from ..storage.engines.base import IoKind, IoRequest, Range, RequestState, SpoolFile, StorageEngine
from ..storage.spool_files import open_arena

WAIT_S = 60.0
"""A test that waits longer has hung."""
BLOCK = 4096
Submit = Callable[[str], IoRequest]


class Memory:
    """Page-aligned memory with a known address, like the memory of tensors and of the host pool.

    Args:
        nbytes: Its size in bytes.
        fill: The byte that fills it at first.
    """

    def __init__(self, nbytes: int, fill: int = 0) -> None:
        self.nbytes = nbytes
        self._map = map_private(nbytes)
        # The anchor exports the buffer, so that the mapping cannot be closed while its address is in use.
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.data = bytes([fill]) * nbytes

    @property
    def data(self) -> bytes:
        """Its content."""
        return self._map[:]

    @data.setter
    def data(self, value: bytes) -> None:
        self._map[: len(value)] = value


def random_bytes(nbytes: int, seed: int) -> bytes:
    """Return reproducible bytes without structure."""
    return random.Random(seed).randbytes(nbytes)


def peek_file(file: SpoolFile, offset: int, length: int) -> bytes:
    """Return bytes of an arena from the file itself, without an engine."""
    with _reopened(file) as fd:
        return os.pread(fd, length, offset)


def poke_file(file: SpoolFile, offset: int, data: bytes) -> None:
    """Overwrite bytes of an arena in the file itself, without an engine."""
    with _reopened(file) as fd:
        os.pwrite(fd, data, offset)
        os.fsync(fd)  # the engine may read past the page cache (`O_DIRECT`)


@contextmanager
def _reopened(file: SpoolFile) -> Iterator[int]:
    """Open the file again without ``O_DIRECT``, which would demand aligned lengths."""
    if file.reopen_path is None:  # without `/proc` the unlinked file cannot be opened again
        yield file.fd
        return
    fd = os.open(file.reopen_path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


class StorageEngineTests:
    """The conformance suite. A subclass implements ``make_engine``, and may replace ``peek`` and ``poke``."""

    def make_engine(self, file: SpoolFile, threads: int | None = None) -> StorageEngine:
        """Make the engine under test."""
        raise NotImplementedError

    def peek(self, engine: StorageEngine, file: SpoolFile, offset: int, length: int) -> bytes:
        """Return bytes of the file without the engine."""
        return peek_file(file, offset, length)

    def poke(self, engine: StorageEngine, file: SpoolFile, offset: int, data: bytes) -> None:
        """Change bytes of the file without the engine."""
        poke_file(file, offset, data)

    @pytest.fixture
    def file(self, tmp_path: Path) -> Iterator[SpoolFile]:
        """An empty arena."""
        file = open_arena(str(tmp_path))
        yield file
        os.close(file.fd)

    @pytest.fixture
    def engine(self, file: SpoolFile) -> Iterator[StorageEngine]:
        """The engine under test with one thread."""
        engine = self.make_engine(file, threads=1)
        yield engine
        engine.abort()  # not `close`, which would wait for requests that a failed test has left behind

    def run(self, engine: StorageEngine, request: IoRequest) -> IoRequest:
        """Submit a request and wait for it."""
        engine.submit(request)
        assert request.wait(WAIT_S)
        return request

    def transfer(self, engine: StorageEngine, kind: IoKind, memory: Memory, offset: int) -> IoRequest:
        """Move all of ``memory`` and wait for it."""
        return self.run(engine, IoRequest(kind, memory.address, memory.nbytes, offset))

    @contextmanager
    def blocked(self, engine: StorageEngine, order: list[str], fill: int = 0) -> Iterator[Submit]:
        """Keep the engine's only thread busy inside the block, so that requests submitted there stay queued.

        Yields a function that submits a one-block request by name, a read if the name begins with "r". A request that
        has run adds its name to ``order``.
        """
        running, go_on, memory = threading.Event(), threading.Event(), Memory(BLOCK, fill)

        def before() -> None:
            running.set()
            assert go_on.wait(WAIT_S)

        def submit(name: str) -> IoRequest:
            kind = IoKind.READ if name.startswith("r") else IoKind.WRITE
            request = IoRequest(kind, memory.address, BLOCK, 0, on_done=lambda _: order.append(name))
            engine.submit(request)
            return request

        # Its block of the file is one that no request of a test uses.
        blocker = IoRequest(IoKind.WRITE, memory.address, BLOCK, 7 * BLOCK, before=before)
        engine.submit(blocker)
        assert running.wait(WAIT_S)  # else the engine could take a request of the block first
        try:
            yield submit
        finally:
            go_on.set()
            assert blocker.wait(WAIT_S)

    # -- transfers ----------------------------------------------------------------------------------------------------

    def test_capabilities_are_sane(self, engine: StorageEngine, file: SpoolFile) -> None:
        capabilities = engine.capabilities
        assert capabilities.name
        assert capabilities.threads >= 1
        assert capabilities.alignment in {1, 512, 1024, 2048, 4096}
        assert not capabilities.direct or file.direct

    def test_write_lands_at_its_offset(self, engine: StorageEngine, file: SpoolFile) -> None:
        memory = Memory(3 * BLOCK)
        memory.data = random_bytes(3 * BLOCK, 1)
        request = self.transfer(engine, IoKind.WRITE, memory, 2 * BLOCK)
        assert not request.cancel(), "it is final"
        assert (request.state, request.error) == (RequestState.DONE, None)
        assert self.peek(engine, file, 2 * BLOCK, 3 * BLOCK) == memory.data

    def test_read_brings_what_is_in_the_file(self, engine: StorageEngine, file: SpoolFile) -> None:
        data = random_bytes(4 * BLOCK, 2)
        self.poke(engine, file, 0, data)
        memory = Memory(2 * BLOCK, fill=0xAA)
        assert self.transfer(engine, IoKind.READ, memory, BLOCK).error is None
        assert memory.data == data[BLOCK : 3 * BLOCK]

    def test_transfer_larger_than_any_internal_block(self, engine: StorageEngine) -> None:
        # No multiple of a round size, so that an engine that splits a transfer has a short last piece.
        source, target = Memory((3 << 20) + BLOCK), Memory((3 << 20) + BLOCK)
        source.data = random_bytes(source.nbytes, 3)
        self.transfer(engine, IoKind.WRITE, source, 5 * BLOCK)
        assert self.transfer(engine, IoKind.READ, target, 5 * BLOCK).error is None
        assert target.data == source.data

    def test_transfer_touches_nothing_around_it(self, engine: StorageEngine, file: SpoolFile) -> None:
        self.poke(engine, file, 0, b"\x11" * (4 * BLOCK))
        self.transfer(engine, IoKind.WRITE, Memory(BLOCK, fill=0x22), BLOCK)
        found = self.peek(engine, file, 0, 4 * BLOCK)
        assert found == b"\x11" * BLOCK + b"\x22" * BLOCK + b"\x11" * (2 * BLOCK)
        memory = Memory(3 * BLOCK, fill=0x33)
        self.run(engine, IoRequest(IoKind.READ, memory.address + BLOCK, BLOCK, 0))
        assert memory.data == b"\x33" * BLOCK + b"\x11" * BLOCK + b"\x33" * BLOCK

    @pytest.mark.parametrize("sizes", [(1, 1), (1, 3, 2), (1,) * 40, (1, 300, 1)])
    def test_memory_in_several_ranges(self, engine: StorageEngine, file: SpoolFile, sizes: tuple[int, ...]) -> None:
        if not engine.capabilities.vectored:
            pytest.skip("this engine takes one range")
        # Shuffled, because ranges need not ascend in memory.
        order = random.Random(6).sample(range(len(sizes)), len(sizes))
        sources = [Memory(count * BLOCK) for count in sizes]
        for place, source in enumerate(sources):
            source.data = random_bytes(source.nbytes, 10 + place)
        expected = b"".join(sources[place].data for place in order)
        outward = [(sources[place].address, sources[place].nbytes) for place in order]
        self._move_ranges(engine, IoKind.WRITE, outward, 3 * BLOCK)
        assert self.peek(engine, file, 3 * BLOCK, len(expected)) == expected
        # One block more at each end shows whether a read goes beyond its range.
        targets = [Memory((count + 2) * BLOCK, fill=0x77) for count in sizes]
        inward = [(targets[place].address + BLOCK, sources[place].nbytes) for place in order]
        self._move_ranges(engine, IoKind.READ, inward, 3 * BLOCK)
        edge = b"\x77" * BLOCK
        assert [target.data for target in targets] == [edge + source.data + edge for source in sources]

    def _move_ranges(self, engine: StorageEngine, kind: IoKind, ranges: list[Range], offset: int) -> None:
        length = sum(nbytes for _, nbytes in ranges)
        assert self.run(engine, IoRequest(kind, ranges[0][0], length, offset, ranges=ranges)).error is None

    def test_reading_past_the_end_fails_and_is_never_zeros(self, engine: StorageEngine, file: SpoolFile) -> None:
        self.poke(engine, file, 0, b"\x44" * BLOCK)
        request = self.transfer(engine, IoKind.READ, Memory(2 * BLOCK), 0)
        assert request.state is RequestState.FAILED
        assert isinstance(request.error, StorageReadError)
        assert request.error.errno == errno.EIO
        assert request.error.filename == file.path
        assert f"offset 0 failed: the file ends after {BLOCK} bytes" in str(request.error)

    def test_many_transfers_at_once(self, file: SpoolFile) -> None:
        engine = self.make_engine(file, threads=3)
        sources = [Memory(BLOCK, fill=index) for index in range(60)]
        targets = [Memory(BLOCK, fill=0xEE) for _ in sources]
        for kind, memories in ((IoKind.WRITE, sources), (IoKind.READ, targets)):
            requests = [IoRequest(kind, memory.address, BLOCK, index * BLOCK) for index, memory in enumerate(memories)]
            for request in requests:
                engine.submit(request)
            assert all(request.wait(WAIT_S) for request in requests)
            assert [request.error for request in requests] == [None] * len(requests)
        engine.close()
        assert [target.data for target in targets] == [source.data for source in sources]

    # -- callbacks, order, cancelling ---------------------------------------------------------------------------------

    def test_before_runs_first_and_in_another_thread(self, engine: StorageEngine, file: SpoolFile) -> None:
        memory, threads = Memory(BLOCK), []

        def before() -> None:
            threads.append(threading.current_thread())
            memory.data = b"\x55" * BLOCK

        self.run(engine, IoRequest(IoKind.WRITE, memory.address, BLOCK, 0, before=before))
        assert self.peek(engine, file, 0, BLOCK) == b"\x55" * BLOCK
        assert threads != [threading.current_thread()]

    def test_an_error_of_before_fails_the_request_only(self, engine: StorageEngine, file: SpoolFile) -> None:
        memory, problem, done = Memory(BLOCK), KeyError("before"), threading.Event()

        def before() -> None:
            raise problem

        request = IoRequest(IoKind.WRITE, memory.address, BLOCK, 0, before=before, on_done=lambda _: done.set())
        engine.submit(request)
        assert done.wait(WAIT_S)
        assert (request.state, request.error) == (RequestState.FAILED, problem)
        assert self.transfer(engine, IoKind.WRITE, memory, 0).state is RequestState.DONE

    def test_on_done_comes_once_with_the_final_request(self, engine: StorageEngine) -> None:
        memory, seen = Memory(BLOCK), []
        request = IoRequest(
            IoKind.WRITE, memory.address, BLOCK, 0, on_done=lambda r: seen.append((r, r.state, threading.get_ident()))
        )
        engine.submit(request)
        engine.close()
        assert [(r, state) for r, state, _ in seen] == [(request, RequestState.DONE)]
        assert seen[0][2] != threading.get_ident()

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_raising_on_done_is_reported_and_survived(
        self, engine: StorageEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reported: list[threading.ExceptHookArgs] = []
        monkeypatch.setattr(threading, "excepthook", reported.append)
        memory = Memory(BLOCK)

        def on_done(request: IoRequest) -> None:
            raise KeyError("on_done")

        engine.submit(IoRequest(IoKind.WRITE, memory.address, BLOCK, 0, on_done=on_done))
        assert self.transfer(engine, IoKind.WRITE, memory, 0).state is RequestState.DONE
        assert [args.exc_type for args in reported] == [KeyError]

    def test_reads_before_writes_first_in_first_out(self, engine: StorageEngine, file: SpoolFile) -> None:
        self.poke(engine, file, 0, bytes(8 * BLOCK))
        order: list[str] = []
        with self.blocked(engine, order) as submit:
            for name in ("w1", "r1", "w2", "r2"):
                submit(name)
        engine.close()
        assert order == ["r1", "r2", "w1", "w2"]

    def test_promote_moves_to_the_front_of_its_queue(self, engine: StorageEngine, file: SpoolFile) -> None:
        self.poke(engine, file, 0, bytes(8 * BLOCK))
        order: list[str] = []
        with self.blocked(engine, order) as submit:
            requests = {name: submit(name) for name in ("w1", "w2", "r1", "r2", "r3")}
            engine.promote(requests["r3"])
            engine.promote(requests["w2"])
        engine.close()
        engine.promote(requests["r3"])
        assert order == ["r3", "r1", "r2", "w2", "w1"]

    def test_cancelled_requests_never_run(self, engine: StorageEngine, file: SpoolFile) -> None:
        self.poke(engine, file, 0, b"\x66" * (8 * BLOCK))
        order: list[str] = []
        with self.blocked(engine, order, fill=0x66) as submit:
            write = submit("w")
            read = submit("r")
            assert write.cancel()
            assert read.cancel()
            assert write.cancel(), "as after an interrupt"
            assert write.wait(0)
        engine.close()
        assert order == []
        assert [write.state, read.state] == [RequestState.CANCELLED] * 2
        assert self.peek(engine, file, 0, 8 * BLOCK) == b"\x66" * (8 * BLOCK)

    def test_cancel_wakes_a_waiting_thread(self, engine: StorageEngine) -> None:
        with self.blocked(engine, []) as submit:
            request = submit("w")
            waiter = threading.Thread(target=request.wait)
            waiter.start()
            assert not request.wait(0)
            assert request.cancel()
            waiter.join(WAIT_S)
            assert not waiter.is_alive()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def test_close_finishes_what_is_queued(self, engine: StorageEngine, file: SpoolFile) -> None:
        memory = Memory(BLOCK, fill=0x77)
        requests = [IoRequest(IoKind.WRITE, memory.address, BLOCK, index * BLOCK) for index in range(20)]
        for request in requests:
            engine.submit(request)
        engine.close()
        engine.close()
        assert {request.state for request in requests} == {RequestState.DONE}
        assert self.peek(engine, file, 0, 20 * BLOCK) == b"\x77" * (20 * BLOCK)
        with pytest.raises(OffloaderClosedError):
            engine.submit(IoRequest(IoKind.WRITE, memory.address, BLOCK, 0))
        engine.abort()

    def test_abort_waits_for_what_runs_and_cancels_the_rest(self, engine: StorageEngine) -> None:
        order: list[str] = []
        with self.blocked(engine, order) as submit:
            queued = [submit("w"), submit("r")]
            aborter = threading.Thread(target=engine.abort)
            aborter.start()
            assert all(request.wait(WAIT_S) for request in queued)
            assert aborter.is_alive()  # the blocked request still runs
        aborter.join(WAIT_S)
        assert not aborter.is_alive()
        assert [request.state for request in queued] == [RequestState.CANCELLED] * 2
        assert order == []

    def test_close_leaves_no_thread(self, file: SpoolFile) -> None:
        before = set(threading.enumerate())
        engine = self.make_engine(file, threads=3)
        self.transfer(engine, IoKind.WRITE, Memory(BLOCK), 0)
        engine.close()
        assert set(threading.enumerate()) <= before

    def test_a_request_that_is_over_keeps_no_callback_alive(self, engine: StorageEngine) -> None:
        class Token:
            def on_done(self, request: IoRequest) -> None:
                finished.set()

        def request_of(token: Token) -> IoRequest:
            return IoRequest(IoKind.WRITE, memory.address, BLOCK, 0, on_done=token.on_done)

        memory, finished, tokens = Memory(BLOCK), threading.Event(), [Token(), Token()]
        dead = [weakref.ref(token) for token in tokens]
        ended = request_of(tokens[0])
        engine.submit(ended)
        assert finished.wait(WAIT_S)
        with self.blocked(engine, []):  # the engine's only thread has let the first request go by now
            cancelled = request_of(tokens[1])
            engine.submit(cancelled)
            assert cancelled.cancel()
            tokens.clear()
            gc.collect()  # cycles may hold the tokens for longer, which is no leak
            assert [ref() for ref in dead] == [None, None]  # although this test still holds the requests
        assert (ended.state, cancelled.state) == (RequestState.DONE, RequestState.CANCELLED)

    def test_the_probe_accepts_it(self, engine: StorageEngine) -> None:
        assert probe_engine(engine) is None


__all__ = ["Memory", "StorageEngineTests", "peek_file", "poke_file", "random_bytes"]
