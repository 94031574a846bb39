"""The count of optimizers' steps, and the runs that look as each one ends."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from actoffload.runtime import optimizer_steps


class _Run:
    def __init__(self) -> None:
        self.steps = 0

    def optimizer_stepped(self) -> None:
        self.steps += 1


def test_another_threads_run_may_begin_at_any_moment_of_an_optimizers_step() -> None:
    optimizer_steps.optimizer_steps()
    runs = [_Run(), _Run()]
    optimizer_steps.watchers.update(dict.fromkeys(runs))
    added: list[_Run] = []

    def begin_another(frame: FrameType, event: str, argument: object) -> Any:
        added.append(_Run())
        optimizer_steps.watchers[added[-1]] = None
        return begin_another

    before = sys.gettrace()
    sys.settrace(begin_another)  # before each line, as another thread may
    try:
        optimizer_steps._stepped()
    finally:
        sys.settrace(before)
    assert [run.steps for run in runs] == [1, 1]
    assert len(added) > 5
