"""Tapes and learned orders, records, meters of links, and how far ahead a tensor is fetched."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader, Plan
from actoffload.errors import StateError
from actoffload.planning.plan import PlanEntry
from actoffload.planning.profile import Link, Profile, Storage
from actoffload.planning.simulator import simulate
from actoffload.runtime.tape import GROWTH, GROWTH_LIMIT, LearnedOrders, Tape, Window
from actoffload.storage.meters import ENOUGH_BYTES, RateMeter
from actoffload.testing.faults import GateEngine, SlowEngine
from actoffload.tiers.record import TRANSITIONS, Record, Saved, State
from actoffload.tiers.storage_ref import StorageRef
from tests.harness import (
    MakeOffloader,
    accounts_of,
    assert_empty,
    batch,
    only_engine,
    same_bits,
    tape_records,
    wait_until,
    window_bytes,
)
from tests.profiles import bytes_over_time
from tests.unit.saving import ReadsTwice, take_gradient, weight


@dataclass(eq=False)
class _Record:
    nbytes: int
    away: bool = True


def _tape(records: list[_Record]) -> Tape[_Record]:
    tape: Tape[_Record] = Tape()
    for number, record in enumerate(records):
        assert tape.append(record, record.nbytes) == number
    return tape


def _fetched(tape: Tape[_Record], window_bytes: int) -> list[int]:
    """Fetch all within the window that are away; returns their bytes."""
    fetched: list[int] = []

    def fetch(record: _Record, early: bool) -> int | None:
        if not record.away:
            return 0
        if early:
            return None
        record.away = False
        fetched.append(record.nbytes)
        return record.nbytes

    tape.walk.fetch_ahead(tape.records, window_bytes, fetch)
    return fetched


def test_released_records_are_passed_over_and_no_longer_counted() -> None:
    tape = _tape([_Record(10 + number) for number in range(6)])
    tape.advance(5, LearnedOrders())
    tape.forget(3)
    assert _fetched(tape, 30) == [14, 12]
    tape.forget(4)
    tape.advance(4, LearnedOrders())
    assert _fetched(tape, 30) == [11]


def test_a_record_that_was_fetched_ahead_and_dies_unused_takes_no_room_in_the_window() -> None:
    """Backward passes over a branch that nobody needs. Nothing reaches its record any more, so only its death tells."""
    tape = _tape([_Record(10 + number) for number in range(6)])
    tape.advance(5, LearnedOrders())
    assert _fetched(tape, 27) == [14, 13]
    tape.forget(4)
    tape.advance(3, LearnedOrders())
    assert _fetched(tape, 27) == [12, 11, 10]


def test_no_room_stops_and_the_next_time_goes_on_there() -> None:
    tape = _tape([_Record(10 + number) for number in range(4)])
    tape.advance(3, LearnedOrders())
    asked: list[int] = []

    def refuse(record: _Record, early: bool) -> None:
        asked.append(record.nbytes)

    tape.walk.fetch_ahead(tape.records, 100, refuse)
    tape.walk.fetch_ahead(tape.records, 100, refuse)
    assert asked == [12, 12]
    assert _fetched(tape, 100) == [12, 11, 10]


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
    with bytes_over_time() as over_time:
        simulate(profile, Plan(entries))
    came: dict[int, list[int]] = {}
    for (_, before), (time_s, after) in pairwise(over_time):
        if time_s >= 100 and after > before:
            came.setdefault(round(time_s) - 100, []).append(after - before)
    return came


def _real(profile: Profile, away: list[bool], window: int) -> dict[int, list[int]]:
    recorded = [s for s in profile.storages if s.index is not None]
    records = [_Record(s.nbytes, gone) for s, gone in zip(recorded, away, strict=True)]
    tape, orders = _tape(records), LearnedOrders()
    came: dict[int, list[int]] = {}
    for storage, record in reversed(list(zip(recorded, records, strict=True))):  # the last one is needed first
        assert storage.index is not None
        tape.advance(storage.index, orders)
        own = [record.nbytes] if record.away else []
        record.away = False
        came[round(storage.need_s or 0.0) - 100] = own + _fetched(tape, window)
    return {place: sizes for place, sizes in came.items() if sizes}


@pytest.mark.parametrize("seed", range(30))
def test_the_same_is_fetched_at_the_same_need(seed: int) -> None:
    chance = random.Random(seed)
    window = chance.choice([2500, 5000, 12000, 60000])
    profile = _profile(chance, window)
    recorded = [s for s in profile.storages if s.index is not None]
    share = chance.choice([0.1, 0.4, 0.9])
    away = [chance.random() < share for _ in recorded]
    window = max(window, 2 * max((s.nbytes for s, gone in zip(recorded, away, strict=True) if gone), default=0))
    assert _simulated(profile, away) == _real(profile, away, window)


# -- the life of a record: one transition table, and nothing beside it -------------------------------------------------


def test_every_transition_is_legal_or_raises_and_changes_nothing() -> None:
    storage = torch.arange(16, dtype=torch.uint8).untyped_storage()
    saved = Saved(StorageRef(storage), storage.data_ptr(), 4, torch.device("cpu"))
    for before, after in itertools.product(State, State):
        record = Record(saved, storage, 8, "cpu", before)
        if after in TRANSITIONS[before] or (after is State.RELEASED and before is not State.RELEASED):
            record.to(after)
            assert record.state is after
            continue
        with pytest.raises(StateError, match=f"record {saved.number}: {before.value} -> {after.value} is not a legal"):
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


# -- meters of links ---------------------------------------------------------------------------------------------------


def replay(meter: RateMeter, transfers: list[tuple[float, float, int]]) -> None:
    """Feed transfers to the meter, each with its begin, its end and its bytes."""
    moments = [(begin_s, 1, n) for n, (begin_s, _, _) in enumerate(transfers)]
    moments += [(end_s, 0, n) for n, (_, end_s, _) in enumerate(transfers)]
    before = {}
    for time_s, begins, n in sorted(moments):  # at one time, ends come before begins
        if begins:
            before[n] = meter.began(time_s)
        else:
            meter.ended(transfers[n][2], time_s, before[n])


def test_only_a_full_link_shows_its_rate() -> None:
    meter = RateMeter(depth=2)
    replay(meter, [(0.0, 10.0, ENOUGH_BYTES)])  # alone: slow
    assert meter.bytes_per_s == ENOUGH_BYTES / 10
    assert meter.full_bytes_per_s is None
    replay(meter, [(20.0, 21.0, ENOUGH_BYTES), (20.0, 21.0, ENOUGH_BYTES), (30.0, 50.0, ENOUGH_BYTES)])
    assert meter.bytes_per_s == meter.full_bytes_per_s == 2 * ENOUGH_BYTES


@pytest.mark.parametrize("overlap_s", [0.1, 1.0, 3.0])
def test_a_transfer_that_was_alone_for_a_while_counts_in_part(overlap_s: float) -> None:
    # A link of ENOUGH_BYTES a second: each transfer is alone for 4 seconds and shares the link with its neighbours.
    nbytes = int(ENOUGH_BYTES * (4.0 + 2 * overlap_s / 2))
    step_s = 4.0 + overlap_s
    meter = RateMeter(depth=2)
    replay(meter, [(n * step_s, (n + 1) * step_s + overlap_s, nbytes) for n in range(20)])
    assert meter.full_bytes_per_s == pytest.approx(ENOUGH_BYTES, rel=0.06)  # the first and the last are half alone


@pytest.mark.parametrize(("burst", "most"), [(2, 1.34), (3, 1.34), (8, 1.14)])
def test_one_after_the_other_a_burst_is_not_taken_for_much_faster_than_it_is(burst: int, most: float) -> None:
    # A link of ENOUGH_BYTES a second that serves in order: all are submitted at once, and one ends each second.
    meter = RateMeter(depth=2)
    for turn in range(4):
        begin_s = 100.0 * turn
        replay(meter, [(begin_s, begin_s + 1 + n, ENOUGH_BYTES) for n in range(burst)])
    assert meter.full_bytes_per_s is not None
    assert 1.0 <= meter.full_bytes_per_s / ENOUGH_BYTES <= most


def test_a_link_that_one_transfer_cannot_fill_is_never_taken_for_faster_than_it_is() -> None:
    # Alone a transfer goes at half of the link's rate; A runs for 3 s, B joins it for the last one and stays for two.
    meter = RateMeter(depth=2)
    a = b = int((2 * 0.5 + 0.5) * 4 * ENOUGH_BYTES)
    replay(meter, [(0.0, 3.0, a), (2.0, 5.0, b)])
    rate = meter.full_bytes_per_s
    assert rate is not None
    assert 0.3 * 4 * ENOUGH_BYTES <= rate <= 4 * ENOUGH_BYTES


def test_after_a_restart_transfers_under_way_still_count_as_load() -> None:
    meter = RateMeter(depth=2)
    first, second = meter.began(0.0), meter.began(0.0)
    meter.ended(7, 1.0, first)
    meter.restart()
    third = meter.began(1.0)
    meter.ended(2 * ENOUGH_BYTES, 2.0, third)
    assert meter.full_bytes_per_s == 2 * ENOUGH_BYTES
    meter.ended(0, 2.0, second)


# -- prefetch ----------------------------------------------------------------------------------------------------------


CHAIN = 8
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


def _away_in_backward(offloader: Offloader, watched: int = CHAIN) -> list[int]:
    """How many of the first records of a chain are on disk as backward comes to each of its nodes."""
    away: list[int] = []
    records: list[Any] = []
    with offloader:
        h = torch.randn(ELEMENTS, requires_grad=True) * 1.0
        for _ in range(CHAIN):
            h = h.sin()
            h.register_hook(lambda _: away.append(sum(record.state is State.SPILLED for record in records)))
        records += tape_records(offloader)[:watched]
    offloader.synchronize()
    h.sum().backward()
    return away


@pytest.mark.parametrize("chosen_by", ["user", "plan"])
@pytest.mark.parametrize(("window", "early"), [(2 * NBYTES, False), (CHAIN * NBYTES, True)])
def test_a_record_behind_records_in_memory(
    make_offloader: MakeOffloader, window: int, early: bool, chosen_by: str
) -> None:
    """The first storage moves, all others stay."""
    entries = tuple(PlanEntry(index=n, nbytes=NBYTES, action="keep" if n else "offload") for n in range(CHAIN))
    if chosen_by == "user":
        offloader = make_offloader(policy=Plan(entries), prefetch_bytes=window)
    else:
        offloader = make_offloader(policy=Plan(entries, prefetch_bytes=window))
    away = _away_in_backward(offloader, watched=1)
    # Hooks run before their node's backward: no fetch has begun at the first, the last record's at the second.
    assert away[:2] == [1, 0 if early else 1]
    assert away[-1] == 0, "fetched before its own node unpacks it"


def test_a_read_that_backward_waits_for_counts_and_widens_the_window(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(SlowEngine, latency_s=0.02), policy="all")
    x, before = torch.randn(ELEMENTS, requires_grad=True), window_bytes(offloader)
    with offloader:
        loss = (x * 1.0).sin().sum()
    offloader.synchronize()
    assert offloader.statistics().unpack_wait_s == 0
    loss.backward()
    assert offloader.statistics().unpack_wait_s >= 0.02
    assert window_bytes(offloader) > before


def test_tensors_of_a_small_forward_do_not_come_back_all_at_once(make_offloader: MakeOffloader) -> None:
    away = _away_in_backward(make_offloader(policy="all", min_bytes=1))
    assert away[0] == CHAIN
    assert away[1] >= CHAIN // 2, "backward has reached the first of eight, and reads a quarter ahead"


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
                    near.append(sum(record.state.value != "spilled" for record in waiting))
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
