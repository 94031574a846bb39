"""`Workload`: a profile, prepared as the items that a planner decides on and the events of the simulator. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..policy import Decision
from .plan import Plan, PlanEntry
from .profile import ENTER, HOLD, LEAVE, NEED, RECOMPUTED, ROUNDING, Profile, moment

KEEP, HOST, NVME = range(3)
"""Where a storage goes: it is kept, sent to host memory, or sent to disk."""

TIER_NAMES = {KEEP: "", HOST: "host", NVME: "nvme"}


@dataclass(frozen=True, slots=True)
class Item:
    """One decision: the storages at one place of every forward, by their numbers, and the bytes of all.

    The first of them is saved at ``birth_s``. Backward needs it at ``need_s``: the end of the step if it never does.
    """

    positions: tuple[int, ...]
    nbytes: int
    movable: bool
    birth_s: float
    need_s: float


Choice = tuple[int, ...]
"""A tier for each item."""


class Workload:
    """A profile, prepared once and used for every plan that a planner tries. Storages are known by their numbers.

    Attributes:
        need: base time of the first use in backward; None if there is no use, or if backward makes the storage.
        events: ``(base time, kind, storage or place)`` in order.
        order: the storages that backward needs, in that order.
        place: the place of a storage in ``order``; -1 if backward never needs it.
        recorded: whether a forward has a record of the storage; a storage without one is small, or stays for good.
        held: as `Storage.held`.
        reach: bytes of the records in ``order`` before each place of it.
        recomputed: the bytes of each recomputation of a region, in the order in which they begin.
        begun: the number of recomputations that begin before backward needs the storage at each place of ``order``.
        derived: as `Profile.derived_bytes`.
        items: the decisions, in the order of places.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        storages = profile.storages
        self.nbytes = [s.nbytes for s in storages]
        self.recorded = [s.index is not None for s in storages]
        self.held = [s.held for s in storages]
        # Backward never waits for these: they are on the device until it has used them.
        self.need = [None if held else s.need_s for s, held in zip(storages, self.held, strict=True)]
        self.items = self._find_items()
        known = {p for item in self.items for p in item.positions}
        self._unmatched = [p for p, storage in enumerate(storages) if storage.movable and p not in known]
        self.events = self._make_events()
        # Equal moments keep the order of saving: equal profiles give equal plans.
        self.order = [p for _, p in sorted((need, p) for p, need in enumerate(self.need) if need is not None)]
        self.place = [-1] * len(storages)
        self.reach = [0]
        for place, p in enumerate(self.order):
            self.place[p] = place
            self.reach.append(self.reach[-1] + (self.nbytes[p] if self.recorded[p] else 0))
        self.derived = profile.derived_bytes
        self.recomputed: list[int] = []
        self.begun = [0] * len(self.order)
        for _, kind, p in self.events:  # in the order of events: at one moment an input comes before its recomputation
            if kind == HOLD and storages[p].kept == RECOMPUTED:
                self.recomputed.append(self.nbytes[p])
            elif kind == NEED:
                self.begun[self.place[p]] = len(self.recomputed)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def keep_all(self) -> Choice:
        """The choice that moves nothing."""
        return (KEEP,) * len(self.items)

    def modes(self, choice: Choice) -> list[int]:
        """The tier of each storage."""
        modes = [KEEP] * len(self.nbytes)
        for item, tier in zip(self.items, choice, strict=True):
            if item.movable:
                for position in item.positions:
                    modes[position] = tier
        # An offloader finds no plan entry of this size at their place, and moves such storages.
        for position in self._unmatched:
            modes[position] = self.lowest_tier()
        return modes

    def lowest_tier(self) -> int:
        """The tier to which an offloader sends storages that a plan does not list."""
        if self.profile.disk is not None:
            return NVME
        return HOST if self.profile.host is not None else KEEP

    def to_entries(self, choice: Choice, releases: Sequence[int]) -> tuple[PlanEntry, ...]:
        """The plan entries of a choice; ``releases``: by storage, as `Prediction.releases`."""
        entries = []
        for number, (item, tier) in enumerate(zip(self.items, choice, strict=True)):
            first = self.profile.storages[item.positions[0]]
            moves = item.movable and tier != KEEP
            # One entry serves every forward of the step, and the latest release is late enough for the copies of all.
            # 0 events: backward used the storage before it had left, so the entry sets no moment.
            entries.append(
                PlanEntry(
                    index=number,
                    nbytes=first.nbytes,
                    action=(Decision.OFFLOAD if moves else Decision.KEEP).value,
                    reason=first.kept,
                    module=first.module,
                    tier=TIER_NAMES[tier] if moves else "",
                    release_after=(max(releases[p] for p in item.positions) or None) if moves else None,
                )
            )
        return tuple(entries)

    def from_plan(self, plan: Plan) -> Choice:
        """The choice that a plan makes in this profile: by place and size, as an offloader follows it."""
        tiers = [KEEP] * len(self.items)
        for number, item in enumerate(self.items):
            entry = plan.entry(number, self.nbytes[item.positions[0]])
            # A storage without an entry moves: so the offloader treats storages that its plan does not list.
            if not item.movable or (entry is not None and entry.action == Decision.KEEP.value):
                continue
            to_host = entry is not None and entry.tier == "host" and self.profile.host is not None
            tiers[number] = HOST if to_host else self.lowest_tier()
        return tuple(tiers)

    # -- preparation --------------------------------------------------------------------------------------------------

    def _find_items(self) -> list[Item]:
        storages = self.profile.storages
        places: dict[int, list[int]] = {}
        for number, storage in enumerate(storages):
            if storage.index is not None:
                same = places.setdefault(storage.index, [])
                # An offloader matches entries by place and size, so a storage of another size is not in this item.
                if not same or storage.nbytes == self.nbytes[same[0]]:
                    same.append(number)
        items = []
        for _, positions in sorted(places.items()):
            first = storages[positions[0]]
            items.append(
                Item(
                    positions=tuple(positions),
                    nbytes=sum(self.nbytes[p] for p in positions),
                    movable=all(storages[p].movable for p in positions),
                    birth_s=first.birth_s,
                    need_s=self.profile.step_s if first.need_s is None else first.need_s,
                )
            )
        return items

    def _make_events(self) -> list[tuple[float, int, int]]:
        events = []
        for p, storage in enumerate(self.profile.storages):
            events += [(*event, p) for event in storage.life]
            need_s = self.need[p]
            if need_s is not None:
                events.append((moment(need_s), NEED, p))
        for place, begin_s, end_s in [*((r.place, r.begin_s, r.end_s) for r in self.profile.regions), *self._turns()]:
            begin, end = moment(begin_s), moment(end_s)
            events += [(begin, ENTER, place), (max(begin + 1, end), LEAVE, place)]
        return [(time * ROUNDING, kind, p) for time, kind, p in sorted(events)]

    def _turns(self) -> Iterator[tuple[int, float, float]]:
        """For each forward the number of its regions, and when its turn begins and ends; see `Conditions`."""
        begins = [region.begin_s for region in self.profile.regions]
        for tape in {region.tape for region in self.profile.regions}:
            regions = [region for region in self.profile.regions if region.tape == tape]
            since_s = max(region.end_s for region in regions)
            reached = [s.need_s for s in self.profile.storages if s.tape == tape and s.birth_s < since_s]
            again = [region.again_s for region in regions]
            ends = [time for time in (*reached, *again, *begins) if time is not None and time >= since_s]
            yield 1 + max(region.place for region in regions), since_s, min(ends, default=self.profile.step_s)
