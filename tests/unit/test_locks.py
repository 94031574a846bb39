"""The condition on the offloader's lock wakes whoever waits, and costs nothing where nobody does."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from actoffload.locks import Changed, DrainingLock
from tests.harness import WAIT_S


def test_notify_all_wakes_every_thread_that_waits() -> None:
    changed = Changed(DrainingLock())
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


def test_no_frame_of_python_s_runs_between_the_acquisition_and_the_block() -> None:
    """An interrupt is raised as such a frame begins or goes on, and the lock would stay locked."""
    lock = DrainingLock()
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
    assert frames, "the profiler saw nothing"
    assert not lock.locked()


def test_nobody_waits_nothing_happens() -> None:
    changed = Changed(DrainingLock())
    with changed:
        changed.notify_all()
        assert not changed.wait(0.01), "what came before it does not wake it"
        changed.notify_all()
