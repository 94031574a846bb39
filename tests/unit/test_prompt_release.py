"""A handle that dies while somebody holds the offloader's lock is worked off as soon as the lock is given back.

The lock is held for as long as the test wants by a trace sink or a policy that stops inside it. What is left of the
dead handles is then looked at without calling the offloader, whose methods would work them off themselves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import OffloadConfig, Offloader
from actoffload.events import EventKind, TraceEvent
from actoffload.policy import Decision, TensorFacts
from actoffload.testing.fakedevice import FakeDevice
from actoffload.testing.faults import GateEngine
from tests.harness import WAIT_S, no_garbage_collection, only_engine, pool_bytes, spool_statistics

NUMEL = 256 << 10
RECORD_BYTES = 4 * NUMEL
SIMULATED = pytest.mark.parametrize("simulated", [False, True], ids=["cpu", "simulated device"])


class Stop:
    """A place at which a thread stops, once, until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._go = threading.Event(), threading.Event()

    def here(self) -> None:
        if not self._reached.is_set():
            self._reached.set()
            assert self._go.wait(WAIT_S)

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """In here the thread stands still."""
        try:
            assert self._reached.wait(WAIT_S), "nothing came to the place where it was to stop"
            yield
        finally:
            self._go.set()


class StopAt(Stop):
    """A sink that stops, under the offloader's lock, at the first event of a kind with so many bytes."""

    def __init__(self, kind: EventKind, nbytes: int = RECORD_BYTES, detail: str | None = None) -> None:
        super().__init__()
        self._what = kind, nbytes
        self._detail = detail

    def __call__(self, event: TraceEvent) -> None:
        if (event.kind, event.nbytes) == self._what and self._detail in (None, event.detail):
            self.here()


class StopAtTheSecond(Stop):
    """A policy: the first storage moves; at the second it stops, under the offloader's lock, and that one stays."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def decide(self, facts: TensorFacts) -> Decision:
        self.seen += 1
        if self.seen == 1:
            return Decision.OFFLOAD
        self.here()
        return Decision.KEEP


Make = Callable[..., tuple[Offloader, contextlib.AbstractContextManager[Any]]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes an offloader, for the CPU or the simulated device, and what to run programs in."""
    made: list[Offloader] = []

    def one(simulated: bool, **options: Any) -> tuple[Offloader, contextlib.AbstractContextManager[Any]]:
        fields: dict[str, Any] = {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "keep_last_bytes": 0}
        device = FakeDevice("lazy") if simulated else None
        made.append(Offloader(OffloadConfig(**(fields | options)), accelerator=device))
        return made[-1], device or contextlib.nullcontext()

    with no_garbage_collection():
        yield one
    for offloader in made:
        offloader.abort()


def _input() -> Tensor:
    return torch.linspace(-1, 1, NUMEL).requires_grad_()


def _saved_once(x: Tensor) -> Tensor:
    """A graph with one saved storage."""
    return (x * 1.0).sin().sum()


def _becomes(count: Callable[[], int], wanted: int) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while count() != wanted and time.monotonic() < deadline_s:
        time.sleep(0.002)
    return count() == wanted


def _assert_released(offloader: Offloader, inside: object = None, *, left: int = 0, slots: int = 0) -> None:
    """So many records live, with so many host slots, and no other holds anything. Works off no dead handles itself."""
    accounts = offloader.core.accounts
    assert _becomes(lambda: accounts.live_records, left), f"{accounts.live_records} records live"
    assert accounts.baseline_bytes == left * RECORD_BYTES
    assert accounts.resident_bytes <= left * RECORD_BYTES
    assert len(offloader._identities) == left
    if offloader.tiers.spool is not None:
        assert _becomes(lambda: spool_statistics(offloader).allocated_bytes, 0)
    if isinstance(inside, FakeDevice):
        inside.finish()  # a slot goes back after its copies
    assert _becomes(lambda: pool_bytes(offloader), slots * RECORD_BYTES)


def _gate(offloader: Offloader) -> GateEngine:
    engine = only_engine(offloader)
    assert isinstance(engine, GateEngine)
    return engine


@contextlib.contextmanager
def _elsewhere(work: Callable[[], object], stop: Stop) -> Iterator[None]:
    """Let another thread run ``work`` up to where it stops, and to its end after the block."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with stop.reached():
            yield
    finally:
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert failed == []


@SIMULATED
def test_dead_while_a_write_ends(make: Make, simulated: bool) -> None:
    stop = StopAt(EventKind.WRITE, detail="to disk" if simulated else "")
    offloader, inside = make(simulated, engine=GateEngine, trace=stop)
    with inside:
        with offloader:
            loss = _saved_once(_input())
        with offloader.core.lock:  # the device's write begins with this: `synchronize` would also wait
            offloader.tiers.movers["cpu"].flush()
        _gate(offloader).open()
        with stop.reached():
            del loss
            assert offloader.core.lock.locked()
            assert offloader.core.accounts.live_records == 1
        _assert_released(offloader, inside)


@SIMULATED
def test_dead_while_a_read_ends(make: Make, simulated: bool) -> None:
    """Backward unpacks the small result, which fetches the other storage ahead, and goes no further."""
    stop = StopAt(EventKind.READ, detail="from disk" if simulated else "")
    offloader, inside = make(simulated, engine=GateEngine, trace=stop)
    gate = _gate(offloader)
    gate.open()
    with inside:
        with offloader:
            middle = (_input() * 1.0).sin()
            loss = middle[: NUMEL // 2].exp().sum()
        offloader.synchronize()
        gate.shut()
        gate.release()  # for the small one
        torch.autograd.grad(loss, middle)
        gate.open()
        with stop.reached():
            del loss, middle
            assert offloader.core.lock.locked()
            assert offloader.core.accounts.live_records > 0
        _assert_released(offloader, inside)


@SIMULATED
def test_dead_while_another_thread_packs(make: Make, simulated: bool) -> None:
    stop = StopAtTheSecond()  # the second storage stays: no write of it ends and does the work
    target = {"target": "host"} if simulated else {"engine": GateEngine}
    offloader, inside = make(simulated, policy=stop, **target)
    alive: list[Tensor] = []

    def pack() -> None:
        with offloader:
            alive.append(_saved_once(_input()))

    with inside:
        with offloader:
            loss = _saved_once(_input())
        with _elsewhere(pack, stop):
            del loss
            assert offloader.core.lock.locked()
            assert offloader.core.accounts.live_records == 2
        assert alive
        _assert_released(offloader, inside, left=1)


@SIMULATED
def test_dead_while_another_thread_unpacks(make: Make, simulated: bool) -> None:
    stop = StopAt(EventKind.FORWARD, nbytes=RECORD_BYTES)  # its copy or write has not ended: it is still there
    target = {"target": "host"} if simulated else {"engine": GateEngine}
    offloader, inside = make(simulated, trace=stop, **target)
    x = _input()

    def unpack() -> None:
        torch.autograd.grad(loss, x, retain_graph=True)  # frees no handle of its own

    with inside:
        with offloader:
            loss = _saved_once(x)
        with offloader:
            other = _saved_once(_input())
        with _elsewhere(unpack, stop):
            del other
            assert offloader.core.lock.locked()
            assert offloader.core.accounts.live_records == 2
        _assert_released(offloader, inside, left=1, slots=int(simulated))


def test_dead_in_the_thread_that_holds_the_lock(make: Make) -> None:
    """A finalizer may run inside an engine's completion itself."""
    graph: list[Tensor] = []
    done = threading.Event()

    def sink(event: TraceEvent) -> None:
        if event.kind is EventKind.WRITE:
            graph.clear()
            done.set()

    offloader, _ = make(False, engine=GateEngine, trace=sink)
    with offloader:
        graph.append(_saved_once(_input()))
    _gate(offloader).open()
    assert done.wait(WAIT_S)
    _assert_released(offloader)
