"""The offloader's lock: its release empties the mailbox, and an interrupt leaves it free."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

import pytest

from actoffload.locks import Claim, DrainingLock, Mailbox
from tests.harness import WAIT_S


def test_no_frame_of_python_s_runs_between_the_acquisition_and_the_block() -> None:
    """An interrupt is raised as such a frame begins or goes on, and the lock would stay locked."""
    lock = DrainingLock()
    frames: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if not event.startswith("c_"):
            frames.append(f"{frame.f_code.co_name} {event}")

    sys.setprofile(note)
    try:
        with lock:
            assert frames == []
    finally:
        sys.setprofile(None)
    assert any("__exit__" in frame for frame in frames), "the profiler saw nothing"


def test_an_interrupt_leaves_it_free_or_to_be_abandoned() -> None:
    lock = DrainingLock()
    owner = _Owner()
    lock.after_release = weakref.WeakMethod(owner.after)

    armed = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False  # the handling of this interrupt is not interrupted
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    ends = time.monotonic() + 0.5
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while time.monotonic() < ends:
            try:
                armed = True
                for _ in range(100):
                    with lock:
                        lock.noted.append(None)
                armed = False
            except KeyboardInterrupt:
                interrupts += 1
                lock.abandon()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts
    lock.abandon()
    assert in_another_thread(lambda: lock.acquire(timeout=WAIT_S))


def test_abandon_releases_only_locks_of_this_thread() -> None:
    lock = DrainingLock()
    lock.abandon()
    with lock:
        in_another_thread(lock.abandon)
        assert lock.owned()
        assert not in_another_thread(lambda: lock.acquire(blocking=False))
    assert lock.acquire()
    assert lock.acquire()
    lock.abandon()
    assert not lock.owned()
    assert in_another_thread(lambda: lock.acquire(blocking=False))


def test_an_interrupt_in_a_wait_comes_out_of_the_block_as_it_is() -> None:
    """`threading.Condition.wait` has released the lock, and an interrupt arrives before it has it again."""
    lock = DrainingLock()

    def wait() -> None:
        with lock:
            lock.release()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert not lock.owned()


def test_run_if_free_calls_only_if_the_lock_is_free() -> None:
    lock = DrainingLock()
    assert lock.run_if_free(lock.owned) is True
    assert not lock.owned()
    with lock:
        assert lock.run_if_free(lock.owned) is None, "not even for the thread that holds it"
        assert in_another_thread(lambda: lock.run_if_free(lock.owned)) is None
        assert lock.owned()

    def fail() -> bool:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        lock.run_if_free(fail)
    assert not lock.owned()


def test_release_empties_the_mailbox() -> None:
    owner = _Owner()
    lock = DrainingLock(owner.noted)
    with lock:
        owner.noted.append("nobody is notified")
    lock.after_release = weakref.WeakMethod(owner.after)
    with lock:
        pass
    assert owner.reported == ["nobody is notified"]
    with lock:
        owner.noted.append("more")
        assert owner.reported == ["nobody is notified"]
    assert owner.reported == ["nobody is notified", "more"]
    with lock:
        with lock:
            owner.noted.append("inside")
        assert owner.noted, "the lock is still held"
    assert not owner.noted
    owner.noted.append("left")
    del owner
    with lock:
        pass
    assert list(lock.noted) == ["left"]


def test_a_mailbox_also_yields_items_that_come_while_it_is_emptied() -> None:
    mailbox = Mailbox([3])
    found = []
    for item in mailbox.drain():
        found.append(item)
        if item:
            mailbox.append(item - 1)
    assert found == [3, 2, 1, 0]
    assert not mailbox


def test_deferred_work_waits_until_the_lock_is_free() -> None:
    owner = _Owner()
    lock = DrainingLock(owner.noted)

    def work() -> bool:
        assert lock.owned()
        owner.after()
        return True

    owner.noted.append(1)
    lock.deliver(work)
    assert owner.reported == [1]
    with lock:
        owner.noted.append(2)
        lock.deliver(work)
        in_another_thread(lambda: lock.deliver(work))
        assert owner.reported == [1], "a finalizer interrupts a thread amid a change"
    lock.deliver(work)
    assert owner.reported == [1, 2]


def test_a_claim_is_of_the_first_alone() -> None:
    claim, first, second = Claim(), object(), object()
    assert not claim.is_by(first)
    assert [claim.take(first), claim.take(second), claim.take(first)] == [True, False, True]
    assert (claim.is_by(first), claim.is_by(second)) == (True, False)


T = TypeVar("T")


def in_another_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(WAIT_S)


class _Owner:
    def __init__(self) -> None:
        self.noted: Mailbox[Any] = Mailbox()
        self.reported: list[Any] = []

    def after(self) -> None:
        self.reported += self.noted.drain()
