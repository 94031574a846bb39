"""The condition on the offloader's lock wakes whoever waits, and costs nothing where nobody does."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
import weakref
from collections import deque
from types import FrameType
from typing import Any

import pytest

from actoffload.locks import Changed, new_lock
from tests.harness import WAIT_S

IN_C = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
)


def test_notify_all_wakes_every_thread_that_waits(either: str) -> None:
    changed = Changed(new_lock())
    waiting, woken = threading.Semaphore(0), []

    def work(number: int) -> None:
        with changed:
            waiting.release()
            woken.append((number, changed.wait(WAIT_S)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert waiting.acquire(timeout=WAIT_S)
    with changed:  # the last one that announced itself has let go of the lock by waiting
        changed.notify_all()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(woken) == [(0, True), (1, True), (2, True)]


def test_no_frame_of_python_s_runs_between_the_acquisition_and_the_block(either: str) -> None:
    """An interrupt is raised as such a frame begins or goes on, and the lock would stay locked."""
    lock = new_lock()
    frames: list[tuple[str, str, bool]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is not here:
            frames.append((frame.f_code.co_name, event, lock.locked()))

    here = sys._getframe().f_code
    sys.setprofile(note)
    try:
        with lock:
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
    assert [name for name, event, locked in frames if locked and not event.startswith("c_")] == []
    assert frames or either == "C", "the profiler saw nothing"
    assert not lock.locked()


@IN_C
def test_in_c_none_runs_on_the_way_out_either(native: Any) -> None:
    lock = new_lock()
    frames: list[str] = []
    here = sys._getframe().f_code

    def note(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is not here:
            frames.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        with lock:
            assert lock.locked()
    finally:
        sys.setprofile(None)
    assert frames == []
    assert not lock.locked()


@IN_C
def test_an_interrupt_at_any_time_leaves_the_lock_free(native: Any) -> None:
    lock = new_lock()
    owner = _Owner()
    lock.after_release = weakref.WeakMethod(owner.after)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    ends = time.monotonic() + 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        while time.monotonic() < ends:
            try:
                for _ in range(100):
                    with lock:
                        lock.noted.append(None)
                    assert not lock.locked()
            except KeyboardInterrupt:
                interrupts += 1
    except KeyboardInterrupt:
        interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts
    assert lock.acquire(timeout=WAIT_S)
    lock.release_only()


def test_it_is_used_as_any_lock_is(either: str) -> None:
    lock = new_lock()
    assert lock.acquire()
    assert lock.locked()
    assert not lock.acquire(blocking=False)
    assert not lock.acquire(timeout=0.01)
    assert lock.locked()
    lock.release()
    assert not lock.locked()
    with pytest.raises(RuntimeError):
        lock.release()
    assert not lock.locked()
    with pytest.raises(TypeError):
        lock.acquire("long")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    assert not lock.locked()


def test_something_is_done_unless_somebody_holds_it(either: str) -> None:
    lock = new_lock()
    assert lock.run_if_free(lock.locked) is True
    assert not lock.locked()
    with lock:
        assert lock.run_if_free(lock.locked) is None
        assert lock.locked()

    def fail() -> bool:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        lock.run_if_free(fail)
    assert not lock.locked()
    with lock:
        pass


def test_what_was_noted_is_worked_off_as_it_is_given_back(either: str) -> None:
    owner = _Owner()
    lock = new_lock(noted=owner.noted)
    with lock:
        owner.noted.append("nobody is told")
    lock.after_release = weakref.WeakMethod(owner.after)
    with lock:
        pass
    assert owner.told == ["nobody is told"]
    with lock:
        owner.noted.append("more")
        assert owner.told == ["nobody is told"]
    assert owner.told == ["nobody is told", "more"]
    assert lock.acquire()
    owner.noted.append("left")
    lock.release_only()
    assert owner.noted, "the owner's own way out calls nobody"
    del owner
    with lock:
        pass
    assert list(lock.noted) == ["left"]


class _Owner:
    def __init__(self) -> None:
        self.noted: deque[Any] = deque()
        self.told: list[Any] = []

    def after(self) -> None:
        while self.noted:
            self.told.append(self.noted.popleft())


def test_nobody_waits_nothing_happens(either: str) -> None:
    changed = Changed(new_lock())
    with changed:
        changed.notify_all()
        assert not changed.wait(0.01), "what came before it does not wake it"
        changed.notify_all()
