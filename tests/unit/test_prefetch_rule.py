"""How far ahead is read: the simulator's rule is the real one's, need by need."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from actoffload.planner import Plan, PlanEntry
from actoffload.profile import Link, Profile, Storage
from actoffload.schedule import LearnedOrders, Tape
from actoffload.simulator import simulate

FAST = Link(write_bytes_per_s=1e15, read_bytes_per_s=1e15)
COUNT = 40


@dataclass(eq=False)
class _Record:
    nbytes: int
    away: bool


def _profile(chance: random.Random, window: int) -> Profile:
    """Each storage has its own size, so that the bytes on the device tell which one came; some have no record."""
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
    """What came back at each need, by the sizes; the needs by their seconds after 100."""
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
        tape.append(record)
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
