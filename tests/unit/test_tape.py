"""Tapes, learned orders and the prefetch window, without torch and without a clock; and the simulator's rule."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from actoffload import Plan
from actoffload.errors import StateError
from actoffload.planning.plan import PlanEntry
from actoffload.planning.profile import Link, Profile, Storage
from actoffload.planning.simulator import simulate
from actoffload.runtime.tape import GROWTH, GROWTH_LIMIT, LearnedOrders, Tape, Window
from actoffload.tiers.record import TRANSITIONS, Record, State


@dataclass(eq=False)
class _Sized:
    nbytes: int
    name: int = 0
    data: None = None


def _tape(sizes: list[int]) -> Tape[_Sized]:
    tape: Tape[_Sized] = Tape()
    for name, nbytes in enumerate(sizes):
        assert tape.append(_Sized(nbytes, name), nbytes) == name
    return tape


def _names(tape: Tape[_Sized], window_bytes: int, near: tuple[int, ...] = ()) -> list[int]:
    fetched: list[int] = []

    def fetch(record: _Sized, early: bool) -> int | None:
        if early and record.name not in near:
            return None
        fetched.append(record.name)
        return 0 if record.name in near else record.nbytes

    tape.fetch_ahead(window_bytes, fetch)
    return fetched


def test_released_records_are_passed_over_and_no_longer_counted() -> None:
    tape = _tape([10] * 6)
    tape.advance(5, LearnedOrders())
    tape.forget(3)
    assert _names(tape, 30) == [4, 2]
    tape.forget(4)
    tape.advance(4, LearnedOrders())
    assert _names(tape, 30) == [1]


def test_no_room_stops_and_the_next_time_goes_on_there() -> None:
    tape = _tape([10] * 4)
    tape.advance(3, LearnedOrders())
    asked: list[int] = []

    def refuse(record: _Sized, early: bool) -> int | None:
        asked.append(record.name)
        return None

    tape.fetch_ahead(100, refuse)
    tape.fetch_ahead(100, refuse)
    assert asked == [2, 2]
    assert _names(tape, 100) == [2, 1, 0]


def test_a_window_grows_when_backward_waits_up_to_a_limit() -> None:
    window = Window(100)
    sizes = []
    for _ in range(20):
        window.waited()
        sizes.append(window.nbytes)
    assert sizes[0] == int(100 * GROWTH)
    assert sizes == sorted(sizes)
    assert sizes[-1] == 100 * GROWTH_LIMIT


def test_a_window_that_a_plan_chose_stays_while_the_plan_does() -> None:
    window = Window(100)
    window.waited()
    window.follow(700)
    window.waited()
    assert window.nbytes == 700
    window.start_over()
    assert window.nbytes == 100
    window.waited()
    assert window.nbytes == int(100 * GROWTH)
    fixed = Window(100, fixed=True)
    fixed.follow(700)
    assert fixed.nbytes == 100
    fixed.start_over()
    fixed.waited()
    assert fixed.nbytes == 100


def test_the_oldest_orders_are_forgotten() -> None:
    orders = LearnedOrders(capacity=2)
    orders.put(1, (1,))
    orders.put(2, (2,))
    orders.put(1, (1, 0))
    orders.put(3, (3,))
    assert [orders.get(signature) for signature in (1, 2, 3)] == [(1, 0), None, (3,)]


# -- the simulator fetches the same at the same need -------------------------------------------------------------------


FAST = Link(write_bytes_per_s=1e15, read_bytes_per_s=1e15)
COUNT = 40


@dataclass(eq=False)
class _Record:
    nbytes: int
    away: bool


def _profile(chance: random.Random, window: int) -> Profile:
    """Each storage has its own size, so that the bytes on the device identify it; some have no record."""
    storages, index = [], 0
    for n in range(COUNT):
        recorded = chance.random() < 0.8
        need_s = 100.0 + (COUNT - n)
        place = index if recorded else None
        nbytes = 1000 + n if recorded else 1
        storages.append(Storage(index=place, nbytes=nbytes, birth_s=float(n), need_s=need_s, last_need_s=need_s + 0.5))
        index += recorded
    backward_s = 100.0 + COUNT + 1 - float(COUNT)
    return Profile(
        storages=tuple(storages), forward_s=float(COUNT), backward_s=backward_s, disk=FAST, prefetch_bytes=window
    )


def _simulated(profile: Profile, away: list[bool]) -> dict[int, list[int]]:
    """The sizes of the storages fetched at each need; needs are numbered by their seconds after 100."""
    recorded = [s for s in profile.storages if s.index is not None]
    entries = tuple(
        PlanEntry(index=n, nbytes=s.nbytes, action="offload" if gone else "keep", tier="nvme" if gone else "")
        for n, (s, gone) in enumerate(zip(recorded, away, strict=True))
    )
    timeline = simulate(profile, Plan(entries)).timeline
    came: dict[int, list[int]] = {}
    for (_, before), (time_s, after) in pairwise(timeline):
        if time_s >= 100 and after > before:
            came.setdefault(round(time_s) - 100, []).append(after - before)
    return came


def _real(profile: Profile, away: list[bool], window: int) -> dict[int, list[int]]:
    recorded = [s for s in profile.storages if s.index is not None]
    tape: Tape[_Record] = Tape()
    records = [_Record(s.nbytes, gone) for s, gone in zip(recorded, away, strict=True)]
    for record in records:
        tape.append(record, record.nbytes)
    came: dict[int, list[int]] = {}
    orders = LearnedOrders()
    for storage, record in sorted(zip(recorded, records, strict=True), key=lambda pair: pair[0].need_s or 0.0):
        at = came.setdefault(round(storage.need_s or 0.0) - 100, [])
        assert storage.index is not None
        tape.advance(storage.index, orders)
        if record.away:
            record.away = False
            at.append(record.nbytes)

        def fetch(other: _Record, early: bool, at: list[int] = at) -> int | None:
            if not other.away:
                return 0
            if early:
                return None
            other.away = False
            at.append(other.nbytes)
            return other.nbytes

        tape.fetch_ahead(window, fetch)
    return {place: sizes for place, sizes in came.items() if sizes}


@pytest.mark.parametrize("seed", range(30))
def test_the_same_is_fetched_at_the_same_need(seed: int) -> None:
    chance = random.Random(seed)
    window = chance.choice([2500, 5000, 12000, 60000])
    profile = _profile(chance, window)
    records = sum(s.index is not None for s in profile.storages)
    share = chance.choice([0.1, 0.4, 0.9])
    away = [chance.random() < share for _ in range(records)]
    sizes = [
        s.nbytes for s, gone in zip((s for s in profile.storages if s.index is not None), away, strict=True) if gone
    ]
    window = max(window, 2 * max(sizes, default=0))
    assert _simulated(profile, away) == _real(profile, away, window)


# -- the life of a record: one transition table, and nothing beside it -------------------------------------------------


def _record(state: State = State.RESIDENT) -> Record:
    storage = torch.arange(16, dtype=torch.uint8).untyped_storage()
    record = Record(storage, storage.data_ptr(), 4, 12, torch.device("cpu"))
    record.state = state
    return record


def _legal(before: State, after: State) -> bool:
    if after is State.RELEASED:
        return before is not State.RELEASED
    return after in TRANSITIONS[before]


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)), ids=lambda state: state.value)
def test_every_transition_is_legal_or_raises_and_changes_nothing(before: State, after: State) -> None:
    record = _record(before)
    if _legal(before, after):
        record.to(after)
        assert record.state is after
    else:
        with pytest.raises(StateError, match=f"record {record.number}: {before.value} -> {after.value} is not a legal"):
            record.to(after)
        assert record.state is before


def test_the_table_has_every_state_and_never_loses_bytes() -> None:
    """No transition skips a copy: a record goes from disk to host memory, and from there to the device."""
    assert set(TRANSITIONS) == set(State)
    for before, afters in TRANSITIONS.items():
        assert before not in afters, "a transition to the same state hides a bug"
        assert State.RELEASED not in afters, "the way to RELEASED is not in the table"
    assert not {State.RELOADING, State.HOSTED} & set(TRANSITIONS[State.SPILLED])
    assert State.SPILLED not in TRANSITIONS[State.STAGING]


def test_flat_is_the_span_and_shares_memory() -> None:
    record = _record()
    assert record.on_device
    assert record.nbytes == 8
    assert record.flat().tolist() == list(range(4, 12))
    record.data, record.data_begin = torch.arange(4, 12, dtype=torch.uint8).untyped_storage(), 4
    assert record.flat().tolist() == list(range(4, 12))
    record.data = None
    assert not record.on_device
