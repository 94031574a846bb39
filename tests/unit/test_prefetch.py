"""Prefetch in real steps: in the learned order, no further ahead than the window, and not too late."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Plan
from actoffload.planning.plan import PlanEntry
from actoffload.testing.faults import GateEngine
from tests.harness import (
    MakeOffloader,
    accounts_of,
    assert_empty,
    batch,
    only_engine,
    same_bits,
    tape_records,
    wait_until,
)
from tests.unit.saving import ReadsTwice, take_gradient, weight

COUNT = 8
ELEMENTS = 128 * 1024  # large enough that each is written alone
NBYTES = 4 * ELEMENTS


@pytest.mark.parametrize("inside", [True, False])
def test_the_order_seen_is_known_from_the_second_step(make_offloader: MakeOffloader, inside: bool) -> None:
    """Branches whose backward runs first-saved first: the guess (reverse) is wrong, the learned order right."""
    offloader = make_offloader(engine=partial(GateEngine, threads=1), prefetch_bytes="1GiB")
    engine = only_engine(offloader)
    engine.open()
    x = batch().requires_grad_()

    def fetched_ahead(expected: int) -> int:
        """Reads that backward of the first branch starts, without its own."""
        with offloader:
            y = x.clone()
            parts = [(y + n).sin().sum() for n in range(4)]
            offloader.synchronize()
            engine.started.clear()
            if inside:
                parts[0].backward()
        if not inside:
            parts[0].backward()
        wait_until(lambda: len(engine.started) > expected)
        found = len(engine.started) - 1
        for part in parts[1:]:
            part.backward()
        return found

    assert fetched_ahead(0) == 0  # by the first guess, the branch that was saved first comes last
    assert fetched_ahead(3) == 3
    assert_empty(offloader)


@pytest.mark.parametrize("twice", ["in one node", "by two backwards"])
def test_a_second_unpack_does_not_enlarge_the_window(make_offloader: MakeOffloader, twice: str) -> None:
    nbytes = 128 << 10
    offloader = make_offloader(prefetch_bytes=2 * nbytes, policy="all")
    w, x = weight(), weight(nbytes // 4 // 64)

    def forward(h: Tensor) -> Tensor:
        for _ in range(24):
            h = ReadsTwice.apply(h, w).tanh() if twice == "in one node" else (h * 1.0001).sin()
        return h.sum()

    forward(x).backward()
    expected = take_gradient(x)
    with offloader:
        loss = forward(x)
    offloader.synchronize()
    accounts = accounts_of(offloader)
    assert accounts.moved_bytes >= 23 * nbytes
    for round_ in range(2):
        accounts.resident_peak_bytes = 0
        loss.backward(retain_graph=True)
        assert 0 < accounts.resident_peak_bytes <= 4 * nbytes, f"backward {round_}: a window and the tensors in use"
        assert same_bits(take_gradient(x), expected)


# -- how far ahead -----------------------------------------------------------------------------------------------------


def _away(records: list[Any]) -> int:
    return sum(record is not None and record.state.value == "spilled" for record in records)


def _sines(count: int, at_each: Any = None) -> Tensor:
    h = torch.randn(ELEMENTS, requires_grad=True) * 1.0
    for _ in range(count):
        h = h.sin()
        if at_each is not None:
            h.register_hook(at_each)
    return h


@pytest.mark.parametrize("printed_by", ["user", "plan"])
@pytest.mark.parametrize(("window", "early"), [(2 * NBYTES, False), (COUNT * NBYTES, True)])
def test_a_record_behind_records_in_memory(
    make_offloader: MakeOffloader, window: int, early: bool, printed_by: str
) -> None:
    """The first storage moves, all others stay."""
    entries = tuple(PlanEntry(index=n, nbytes=NBYTES, action="keep" if n else "offload") for n in range(COUNT))
    if printed_by == "user":
        offloader = make_offloader(policy=Plan(entries), prefetch_bytes=window)
    else:
        offloader = make_offloader(policy=Plan(entries, prefetch_bytes=window))
    away: list[int] = []
    records: list[Any] = []
    with offloader:
        h = _sines(COUNT, lambda _: away.append(_away(records)))
        records += tape_records(offloader)[:1]
    offloader.synchronize()
    assert _away(records) == 1
    h.sum().backward()
    # Hooks run before their node's backward: no fetch has begun at the first, the last record's at the second.
    assert away[:2] == [1, 0 if early else 1]
    assert away[-1] == 0, "fetched before its own node unpacks it"


def test_tensors_of_a_small_forward_do_not_come_back_all_at_once(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all", min_bytes=1)
    away: list[int] = []
    records: list[Any] = []
    with offloader:
        h = _sines(COUNT, lambda _: away.append(_away(records)))
        records += tape_records(offloader)
    offloader.synchronize()
    h.sum().backward()
    assert away[0] == COUNT
    assert away[1] >= COUNT // 2, "backward has reached the first of eight, and reads a quarter ahead"


@pytest.mark.parametrize(("first", "second", "fetched"), [(4, 16, 4), (16, 4, 2)])
def test_the_window_near_a_forwards_end(make_offloader: MakeOffloader, first: int, second: int, fetched: int) -> None:
    offloader = make_offloader(policy="all", min_bytes=1)
    near: list[int] = []

    def forward(name: str, count: int, follows: tuple[str, str] | None = None) -> tuple[Tensor, list[Any]]:
        offloader.stage(name, "forward", next=follows)  # type: ignore[arg-type]
        with offloader:
            h = torch.randn(ELEMENTS, requires_grad=True) * 1.0
            for _ in range(count):
                h = h.sin()
                if follows:
                    near.append(sum(record.state.value != "spilled" or record.wanted for record in waiting))
            return h, tape_records(offloader)

    for step in range(2):  # the first step teaches how much each forward saves
        near.clear()
        old, waiting = forward("old", second)
        offloader.synchronize()
        new, _ = forward("new", first, ("old", "backward"))
        if step:
            begun = next(number for number, count in enumerate(near) if count)
            assert near[-1] == fetched
            assert first - begun - 1 <= fetched, "no earlier than the window reaches"
        for name, output in (("old", old), ("new", new)):
            offloader.stage(name, "backward")
            output.sum().backward()
