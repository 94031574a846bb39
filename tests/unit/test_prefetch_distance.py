"""What is needed last stays away while much is still near, and is back before backward asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Plan
from actoffload.planner import PlanEntry
from actoffload.record import State
from tests.harness import MakeOffloader

COUNT = 8
ELEMENTS = 128 * 1024  # each goes alone: rows come back as a whole
NBYTES = 4 * ELEMENTS


@pytest.mark.parametrize("said_by", ["user", "plan"])
@pytest.mark.parametrize(("window", "early"), [(2 * NBYTES, False), (COUNT * NBYTES, True)])
def test_a_record_behind_others_that_are_near(
    make_offloader: MakeOffloader, window: int, early: bool, said_by: str
) -> None:
    entries = tuple(PlanEntry(index=n, nbytes=NBYTES, action="keep" if n else "offload") for n in range(COUNT))
    if said_by == "user":
        offloader = make_offloader(policy=Plan(entries), prefetch_bytes=window)
    else:
        offloader = make_offloader(policy=Plan(entries, prefetch_bytes=window))
    h = torch.randn(ELEMENTS, requires_grad=True) * 1.0
    away: list[bool] = []
    with offloader:
        for _ in range(COUNT):
            h = h.sin()
            h.register_hook(lambda grad: note(grad))
        first = offloader._stack()[-1].tape.records[0]
    offloader.synchronize()
    assert first is not None
    assert first.state is State.SPILLED

    def note(grad: Tensor) -> Tensor:
        away.append(first.state is State.SPILLED)
        return grad

    h.sum().backward()
    # Hooks run before their node's backward: nothing was asked for at the first, the last record at the second.
    assert away[0]
    assert away[1] is not early
    assert not away[-1], "fetched before its own node asks for it"


def test_what_a_small_forward_saved_does_not_come_back_all_at_once(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all", min_bytes=1)
    h = torch.randn(ELEMENTS, requires_grad=True) * 1.0
    away: list[int] = []

    def note(grad: Tensor) -> Tensor:
        away.append(sum(record is not None and record.state is State.SPILLED for record in records))
        return grad

    with offloader:
        for _ in range(COUNT):
            h = h.sin()
            h.register_hook(note)
        records = list(offloader._stack()[-1].tape.records)
    offloader.synchronize()
    h.sum().backward()
    assert away[0] == COUNT
    assert away[1] >= COUNT // 2, "backward has reached the first of eight, and reads a quarter ahead"


@pytest.mark.parametrize(("first", "second", "fetched"), [(2, 16, 4), (16, 4, 2)])
def test_the_next_backward_is_fetched_by_its_own_size(
    make_offloader: MakeOffloader, first: int, second: int, fetched: int
) -> None:
    offloader = make_offloader(policy="all", min_bytes=1)
    outputs: dict[str, Tensor] = {}
    for name, count in (("second", second), ("first", first)):
        offloader.stage(name, "forward")
        with offloader:
            h = torch.randn(ELEMENTS, requires_grad=True) * 1.0
            for _ in range(count):
                h = h.sin()
            records = list(offloader._stack()[-1].tape.records)
        outputs[name] = h
        if name == "second":
            waiting = records
    offloader.synchronize()
    offloader.stage("first", "backward", next=("second", "backward"))
    outputs["first"].sum().backward()
    offloader.synchronize()
    away = sum(record is not None and record.state is State.SPILLED for record in waiting)
    assert second - away == fetched


@pytest.mark.parametrize(("first", "second", "fetched"), [(4, 16, 4), (16, 4, 2)])
def test_near_the_end_of_a_forward_too(make_offloader: MakeOffloader, first: int, second: int, fetched: int) -> None:
    offloader = make_offloader(policy="all", min_bytes=1)
    near: list[int] = []

    def forward(name: str, count: int, follows: tuple[str, str] | None = None) -> tuple[Tensor, list[Any]]:
        offloader.stage(name, "forward", next=follows)  # type: ignore[arg-type]
        with offloader:
            h = torch.randn(ELEMENTS, requires_grad=True) * 1.0
            for _ in range(count):
                h = h.sin()
                if follows:
                    near.append(sum(record.state is not State.SPILLED or record.wanted for record in waiting))
            return h, list(offloader._stack()[-1].tape.records)

    for step in range(2):  # the first one teaches how much each forward saves
        near.clear()
        old, waiting = forward("old", second)
        offloader.synchronize()
        new, _ = forward("new", first, ("old", "backward"))
        if step:
            begun = next(number for number, count in enumerate(near) if count)
            assert near[-1] == fetched
            assert first - begun - 1 <= fetched, "no earlier than the window of what is fetched reaches"
        for name, output in (("old", old), ("new", new)):
            offloader.stage(name, "backward")
            output.sum().backward()
