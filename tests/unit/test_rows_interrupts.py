"""Interrupts while rows, and what goes alone, are filled, begun and fetched."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Any

import pytest
import torch

from actoffload import Offloader
from actoffload.record import State
from actoffload.row_tier import SMALL_BYTES
from tests.harness import (
    WAIT_S,
    MakeOffloader,
    assert_empty,
    forget_failed_backward,
    same_bits,
    spool_statistics,
)
from tests.unit.rows import FULL, NBYTES, Save, Saved, activations, states


def interrupted(function: Any, *, late: bool) -> Any:
    """A function at whose beginning, or after whose end, an interrupt comes."""

    def one(*args: Any, **options: Any) -> Any:
        if late:
            function(*args, **options)
        raise KeyboardInterrupt

    return one


def engines_rest(offloader: Offloader) -> None:
    """Wait until every transfer has ended, also for those who would be told of it."""
    deadline_s = time.monotonic() + WAIT_S
    while spool_statistics(offloader).busy_extents and time.monotonic() < deadline_s:
        time.sleep(0.001)
    time.sleep(0.05)  # what is told of it waits for a lock at most


@pytest.mark.parametrize("late", [False, True], ids=["at its beginning", "when it is under way"])
@pytest.mark.parametrize("nbytes", [NBYTES, 2 * SMALL_BYTES])
def test_an_interrupt_while_something_is_fetched_leaves_it_on_disk(
    nbytes: int, late: bool, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(FULL, nbytes))
    offloader.synchronize()
    spool = offloader.tiers.spool
    assert spool is not None
    with monkeypatch.context() as patched:
        patched.setattr(spool, "read_ranges", interrupted(spool.read_ranges, late=late))
        with pytest.raises(KeyboardInterrupt):
            saved.check(FULL - 1, again=True)
    engines_rest(offloader)
    assert states(offloader) == [State.SPILLED] * FULL
    assert offloader.core.accounts.resident_bytes == 0
    for index in reversed(range(FULL)):
        saved.check(index)
    forget_failed_backward()
    assert_empty(offloader)


@pytest.mark.parametrize("count", [1, FULL - 1])
def test_an_interrupt_when_a_write_is_under_way_leaves_it_in_memory(
    count: int, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(count))
    spool = offloader.tiers.spool
    assert spool is not None
    with monkeypatch.context() as patched:
        patched.setattr(spool, "write_ranges", interrupted(spool.write_ranges, late=True))
        with pytest.raises(KeyboardInterrupt):
            offloader.synchronize()
    engines_rest(offloader)
    assert states(offloader) == [State.RESIDENT] * count
    assert offloader.core.pending_bytes == 0
    for index in reversed(range(count)):
        saved.check(index)
    assert_empty(offloader)


OURS = ("rows.py", "row_tier.py", "cpu_tier.py", "record.py", "spool.py", "arena.py", "extents.py")
"""Where rows, and those that go alone, are begun."""


def test_an_interrupt_at_any_function_while_writes_are_begun(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    for at in itertools.count(1):
        calls = 0

        def interrupt(frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            if event == "call" and frame.f_code.co_filename.endswith(OURS):
                calls += 1
                if calls == at:  # noqa: B023 - it is over before the next
                    raise KeyboardInterrupt

        tensors = [*activations(2), *activations(1, SMALL_BYTES), *activations(FULL - 2)]
        handles: list[Any] = []
        x = torch.ones(1, requires_grad=True)
        sys.setprofile(interrupt)
        try:
            with offloader:
                graphs = [Save.apply(x, tensor, handles.append) for tensor in tensors]
        except KeyboardInterrupt:
            graphs = []
        finally:
            sys.setprofile(None)
        done = calls < at
        waiting = threading.Thread(target=offloader.synchronize, daemon=True)
        waiting.start()
        waiting.join(WAIT_S)
        assert not waiting.is_alive(), f"interrupted at call {at}"
        assert offloader.core.pending_bytes == 0, f"interrupted at call {at}"
        for graph, tensor in reversed(list(zip(graphs, tensors, strict=False))):
            graph.backward()
            assert same_bits(handles.pop(), tensor)
        graph = None
        del graphs, x
        assert offloader.statistics().live_records == 0, f"interrupted at call {at}"
        if done:
            break
    assert at > 60
    assert_empty(offloader)


@pytest.mark.parametrize("last", ["allocate", "write_ranges"])
def test_an_interrupt_while_a_row_is_begun_leaves_all_of_it_in_memory(
    last: str, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(FULL - 1))
    spool = offloader.tiers.spool
    assert spool is not None

    with monkeypatch.context() as patched:
        patched.setattr(spool, last, interrupted(getattr(spool, last), late=False))
        with pytest.raises(KeyboardInterrupt):
            offloader.synchronize()
    assert offloader.core.pending_bytes == 0
    assert states(offloader) == [State.RESIDENT] * (FULL - 1)
    for index in reversed(range(FULL - 1)):
        saved.check(index)
    assert_empty(offloader)


class Interrupting(tuple[Any, ...]):
    """The pieces of an extent, as they are when an interrupt comes just after it was taken."""

    __slots__ = ()

    def __len__(self) -> int:
        raise KeyboardInterrupt


def test_an_interrupt_between_taking_room_and_using_it(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(FULL - 1))
    spool = offloader.tiers.spool
    assert spool is not None
    allocate = spool.allocate

    def interrupted(nbytes: int) -> Any:
        extent = allocate(nbytes)
        extent.segments = Interrupting(extent.segments)
        return extent

    with monkeypatch.context() as patched:
        patched.setattr(spool, "allocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offloader.synchronize()
    assert offloader.core.pending_bytes == 0
    assert spool_statistics(offloader).allocated_bytes == 0
    for index in reversed(range(FULL - 1)):
        saved.check(index)
    assert_empty(offloader)
