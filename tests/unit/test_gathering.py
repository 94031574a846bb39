"""Small requests that wait and lie beside each other go to the disk in one call; each has its own bytes and end."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actoffload.storage.engines.base import (
    IoKind,
    IoRequest,
    RequestState,
    SpoolFile,
)
from actoffload.storage.engines.posix import PosixEngine
from actoffload.storage.engines.queued import GATHERED_BYTES, first_bytes
from actoffload.storage.spool_files import open_arena
from actoffload.testing.engine_suite import (
    Memory,
    peek_file,
    poke_file,
    random_bytes,
)

WAIT_S = 60.0
BLOCK = 4096


class WatchedEngine(PosixEngine):
    """Holds its calls until ``go`` is set, notes the sizes of their ranges, and does to them what it is told."""

    def __init__(self, file: SpoolFile, *, threads: int = 1) -> None:
        self.go = threading.Event()
        self.entered = threading.Semaphore(0)
        self.calls: list[tuple[IoKind, list[int]]] = []
        self.harm: Callable[[list[memoryview], int], list[memoryview]] = lambda views, offset: views
        super().__init__(file, threads=threads)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        self.entered.release()
        assert self.go.wait(WAIT_S)
        self.calls.append((kind, [len(view) for view in views]))
        return super()._transfer_once(kind, self.harm(views, offset), offset)

    def put(self, *requests: IoRequest) -> None:
        """Queue all of them before a thread can take the first."""
        with self._wake:
            for request in requests:
                self._queue(request).append(request)
            self._wake.notify_all()

    def run(self, *requests: IoRequest) -> list[list[int]]:
        """Queue them, carry them out and wait; the ranges of the calls."""
        self.put(*requests)
        self.go.set()
        for request in requests:
            assert request.wait(WAIT_S)
        return [ranges for _, ranges in self.calls]


@pytest.fixture
def make_engine(file: SpoolFile) -> Iterator[Callable[..., WatchedEngine]]:
    made: list[WatchedEngine] = []

    def make(threads: int = 1) -> WatchedEngine:
        made.append(WatchedEngine(file, threads=threads))
        return made[-1]

    yield make
    for engine in made:
        engine.go.set()
        engine.abort()


def blocks(count: int, *, nbytes: int = BLOCK) -> list[Memory]:
    """Memory for so many requests, each with other bytes."""
    found = [Memory(nbytes) for _ in range(count)]
    for seed, memory in enumerate(found):
        memory.data = random_bytes(nbytes, seed)
    return found


def side_by_side(kind: IoKind, memories: list[Memory], first: int = 0, **more: Any) -> list[IoRequest]:
    """A request for each, one behind the other in the file."""
    return [
        IoRequest(kind, memory.address, memory.nbytes, first + index * memory.nbytes, **more)
        for index, memory in enumerate(memories)
    ]


def expected(memories: list[Memory]) -> bytes:
    return b"".join(memory.data for memory in memories)


def test_reads_from_the_last_to_the_first_too(make_engine: Callable[..., WatchedEngine], file: SpoolFile) -> None:
    data = random_bytes(8 * BLOCK, 1)
    poke_file(file, 0, data)
    memories = [Memory(BLOCK) for _ in range(8)]
    assert make_engine().run(*reversed(side_by_side(IoKind.READ, memories))) == [[BLOCK] * 8]
    assert expected(memories) == data


def test_only_up_to_a_size_and_only_what_is_beside(make_engine: Callable[..., WatchedEngine], file: SpoolFile) -> None:
    large, apart, far = blocks(3, nbytes=GATHERED_BYTES // 2), blocks(2), blocks(1)
    places = ((large, 0), (apart, 4 * GATHERED_BYTES), (far, 8 * GATHERED_BYTES))
    requests = [request for memories, first in places for request in side_by_side(IoKind.WRITE, memories, first)]
    calls = make_engine().run(*requests)
    assert {request.state for request in requests} == {RequestState.DONE}
    assert calls == [[GATHERED_BYTES // 2] * 2, [GATHERED_BYTES // 2], [BLOCK] * 2, [BLOCK]]


def test_threads_that_wait_get_their_share(make_engine: Callable[..., WatchedEngine]) -> None:
    engine, memories = make_engine(threads=2), blocks(8)
    requests = side_by_side(IoKind.WRITE, memories)
    deadline_s = time.monotonic() + WAIT_S
    while engine._idle_workers < 2:
        assert time.monotonic() < deadline_s
    engine.put(*requests)
    for _ in range(2):
        assert engine.entered.acquire(timeout=WAIT_S)
    engine.go.set()
    assert all(request.wait(WAIT_S) for request in requests)
    assert [len(ranges) for _, ranges in engine.calls] == [4, 4]


def test_what_has_something_to_wait_for_goes_alone(make_engine: Callable[..., WatchedEngine]) -> None:
    memories = blocks(6)
    requests = side_by_side(IoKind.WRITE, memories)
    requests[2].before = lambda: None
    assert make_engine().run(*requests) == [[BLOCK] * 2, [BLOCK], [BLOCK] * 3]


def test_what_was_written_before_the_disk_was_full_is_not_written_again(
    make_engine: Callable[..., WatchedEngine], file: SpoolFile
) -> None:
    def full_at_2(views: list[memoryview], offset: int) -> list[memoryview]:
        if offset >= 2 * BLOCK:
            raise OSError(errno.ENOSPC, "full")
        return first_bytes(views, 2 * BLOCK - offset)

    engine = make_engine()
    engine.harm = full_at_2
    memories = blocks(4)
    requests = side_by_side(IoKind.WRITE, memories)
    calls = engine.run(*requests)
    assert [request.state is RequestState.FAILED for request in requests] == [False, False, True, True]
    assert calls == [[BLOCK] * 4, [BLOCK] * 2, [BLOCK], [BLOCK]]
    assert engine.written_bytes == 2 * BLOCK
    assert peek_file(file, 0, 2 * BLOCK) == expected(memories[:2])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_waits_each_request_moves_its_own_bytes(data: st.DataObject, tmp_path_factory: Any) -> None:
    places = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=16))
    kinds = [data.draw(st.sampled_from(IoKind)) for _ in places]
    taken_back = data.draw(st.sets(st.integers(0, len(places) - 1)))
    live: dict[int, int] = {}  # as the spool orders them: of two at one place, the first was taken back
    for number, place in enumerate(places):
        if number not in taken_back:
            taken_back |= {live[place]} if place in live else set()
            live[place] = number
    most = BLOCK * data.draw(st.integers(1, 16))
    broken = data.draw(st.sets(st.integers(0, 15), max_size=2))

    def harm(views: list[memoryview], offset: int) -> list[memoryview]:
        first = offset // BLOCK
        if broken.intersection(range(first, first + sum(map(len, views)) // BLOCK)):
            raise OSError(errno.EIO, "broken")
        return first_bytes(views, most)

    file = open_arena(str(tmp_path_factory.mktemp("arena")))
    engine = WatchedEngine(file, threads=data.draw(st.integers(1, 3)))
    try:
        stored = random_bytes(16 * BLOCK, 100)
        poke_file(file, 0, stored)
        engine.harm = harm
        memories = blocks(len(places))
        held = [memory.data for memory in memories]
        requests = [
            IoRequest(kind, memory.address, BLOCK, place * BLOCK)
            for kind, memory, place in zip(kinds, memories, places, strict=True)
        ]
        for number in taken_back:
            assert requests[number].cancel()
        engine.run(*requests)
        for number, request in enumerate(requests):
            ended = RequestState.FAILED if places[number] in broken else RequestState.DONE
            assert request.state is (RequestState.CANCELLED if number in taken_back else ended)
        for number, memory in enumerate(memories):
            place = places[number]
            read = kinds[number] is IoKind.READ and requests[number].state is RequestState.DONE
            assert memory.data == (stored[place * BLOCK : (place + 1) * BLOCK] if read else held[number])
        for place in range(16):
            writer = live.get(place, -1)
            wrote = writer >= 0 and kinds[writer] is IoKind.WRITE and place not in broken
            found = held[writer] if wrote else stored[place * BLOCK : (place + 1) * BLOCK]
            assert peek_file(file, place * BLOCK, BLOCK) == found
    finally:
        engine.abort()
        os.close(file.fd)
