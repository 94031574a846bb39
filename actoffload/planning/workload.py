"""A profile as what planners decide on and what the simulator goes through: items, groups of blocks, events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..policy import Decision
from .plan import Plan, PlanEntry
from .profile import Profile

ABSENT, KEEP, HOST, NVME, DROPPED = -1, 0, 1, 2, 3
"""What is done with a storage: not there, kept, sent to host memory, sent to disk, dropped and recomputed."""

TIER_NAMES = {KEEP: "", HOST: "host", NVME: "nvme"}

RECOMPUTE, BIRTH, NEED, DEATH = 0, 1, 2, 3
"""Events, in the order in which those of one moment happen."""


@dataclass(frozen=True, slots=True)
class Item:
    """What one decision is about: the storages at one place of every forward, or the input of one checkpoint.

    Attributes:
        positions: the storages; numbers from ``len(profile.storages)`` on stand for inputs of checkpoints.
        nbytes: bytes of all of them.
        movable: whether there is anything to decide.
        birth_s: when the first of them is saved.
        need_s: when backward needs it; the end of the step when it never does.
        owner: the group of blocks whose recomputation makes this item (an input) or drops it; -1 for none.
        made: whether it is there only while its owner is recomputed.
        input_of: the group whose checkpoint input it is, so that it stays when the group is recomputed; -1 for none.
    """

    positions: tuple[int, ...]
    nbytes: int
    movable: bool
    birth_s: float
    need_s: float
    owner: int = -1
    made: bool = False
    input_of: int = -1

    def has_place(self, recomputed: frozenset[int]) -> bool:
        """Whether a forward saves it in a record when these groups are recomputed."""
        if self.made and not self.movable:
            return False  # an input of a checkpoint that is kept without a record
        if self.owner < 0 or self.input_of >= 0:
            return True
        return (self.owner in recomputed) == self.made


@dataclass(frozen=True, slots=True)
class Group:
    """The blocks of one name, recomputed together: one block of each forward, by its number in `Profile.blocks`.

    ``freed_bytes`` need not be saved then, which adds ``recompute_s`` to the step; the first of it is saved at
    ``birth_s``.
    """

    name: str
    blocks: tuple[int, ...]
    freed_bytes: int
    recompute_s: float
    birth_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What a planner decides: a tier for each item, and the groups of blocks to recompute."""

    tiers: tuple[int, ...]
    recompute: frozenset[int] = frozenset()


class Workload:
    """A profile, prepared: computed once and used for every plan that is tried.

    It has more than fifteen attributes as the simulator's inner loop reads each of them by position, place or block.

    Attributes:
        nbytes: size by position; positions beyond the profile's storages are inputs of checkpoints.
        need: base time of the first use in backward by position, or None.
        dropped: by block, the positions that recomputing it drops.
        dropped_bytes: by block, their sum.
        block_input: by block, the position of its checkpoint's input.
        block_begin: by block, the base time at which its backward begins; None when it cannot be recomputed.
        events: ``(base time, kind, position or block)`` in order.
        order: in the order of need, ``(position, block)``: one of them is -1.
        place: by position, where it first is in that order; -1 where it never is.
        block_place: by block, likewise.
        recorded: by position, whether a forward has a record of it; the others are small, or stay for good.
        reach: bytes that a forward has saved in records before each place of the order, if nothing is recomputed.
        items: what is decided on, in the order of places.
        groups: blocks that can be recomputed, by name.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        storages, blocks = profile.storages, profile.blocks
        self.count = len(storages)
        self.nbytes = [s.nbytes for s in storages] + [b.input_bytes for b in blocks]
        self.need: list[float | None] = [s.need_s for s in storages] + [None] * len(blocks)
        self.dropped: list[list[int]] = [[] for _ in blocks]
        for number, storage in enumerate(storages):
            if storage.block is not None and number != blocks[storage.block].input:
                self.dropped[storage.block].append(number)
        self.dropped_bytes = [sum(self.nbytes[p] for p in positions) for positions in self.dropped]
        self.block_input = [self.count + n if b.input is None else b.input for n, b in enumerate(blocks)]
        self.block_begin = [
            min((need for p in positions if (need := self.need[p]) is not None), default=None)
            for positions in self.dropped
        ]
        self.groups = self._find_groups()
        self.items = self._find_items()
        known = {p for item in self.items for p in item.positions}
        self._unmatched = [p for p, storage in enumerate(storages) if storage.movable and p not in known]
        self.events = self._make_events()
        self.order = self._make_order()
        self.place, self.block_place = [-1] * len(self.nbytes), [-1] * len(blocks)
        for place, (position, block) in enumerate(self.order):
            (self.place if position >= 0 else self.block_place)[max(position, block)] = place
        self.recorded = [s.index is not None for s in storages] + [b.input_recorded for b in blocks]
        self.reach = self.reach_of([KEEP] * self.count + [ABSENT] * len(blocks), frozenset())

    # -- decisions ----------------------------------------------------------------------------------------------------

    def keep_all(self) -> Choice:
        """Nothing is moved."""
        return Choice((KEEP,) * len(self.items))

    def modes(self, choice: Choice) -> list[int]:
        """What is done with each position."""
        modes = [KEEP] * self.count + [ABSENT] * len(self.profile.blocks)
        for item, tier in zip(self.items, choice.tiers, strict=True):
            there = item.owner in choice.recompute if item.made else item.movable
            if there:  # also to keep: the input of a checkpoint is absent otherwise
                for position in item.positions:
                    modes[position] = tier
        for position in self._unmatched:
            modes[position] = self.lowest_tier()
        for number in choice.recompute:
            for block in self.groups[number].blocks:
                for position in self.dropped[block]:
                    modes[position] = DROPPED
        return modes

    def reach_of(self, modes: Sequence[int], recomputed: frozenset[int]) -> list[int]:
        """`reach` where these blocks are recomputed: what they drop is not there, the input of a checkpoint is."""
        reach, total = [0], 0
        inputs: set[int] = set()  # of checkpoints, which several may share: on the tape once, where it is needed first
        for position, block in self.order:
            source = position if position >= 0 else self.block_input[block]
            there = block in recomputed if position < 0 else modes[position] != DROPPED and self.recorded[position]
            if there and source not in inputs:
                total += self.nbytes[source]
                inputs.add(source)
            reach.append(total)
        return reach

    def lowest_tier(self) -> int:
        """Where an offloader sends what no plan knows."""
        if self.profile.disk is not None:
            return NVME
        return HOST if self.profile.host is not None else KEEP

    def layout(self, recompute: frozenset[int]) -> list[int]:
        """The numbers of the items that a forward saves with an index, in the order of their places."""
        return [number for number, item in enumerate(self.items) if item.has_place(recompute)]

    def to_entries(self, choice: Choice, reasons: Sequence[str], releases: Sequence[int]) -> tuple[PlanEntry, ...]:
        """Plan entries of a choice.

        Args:
            choice: what is decided.
            reasons: one text for each item.
            releases: by position, as `Prediction.releases`.
        """
        entries = []
        for place, number in enumerate(self.layout(choice.recompute)):
            item, tier = self.items[number], choice.tiers[number]
            position = item.positions[0]
            kept = self.profile.storages[position].kept if position < self.count else ""
            moves = item.movable and tier != KEEP
            entries.append(
                PlanEntry(
                    index=place,
                    nbytes=self.nbytes[position],
                    action=(Decision.OFFLOAD if moves else Decision.KEEP).value,
                    reason=reasons[number] or kept,
                    module=self.module_of(position),
                    tier=TIER_NAMES[tier] if moves else "",
                    release_after=(max(releases[p] for p in item.positions) or None) if moves else None,
                )
            )
        return tuple(entries)

    def module_of(self, position: int) -> str | None:
        """The module that saves a position; of the input of a checkpoint, the block."""
        if position >= self.count:
            return self.profile.blocks[position - self.count].name
        return self.profile.storages[position].module

    def from_plan(self, plan: Plan) -> Choice:
        """The choice that a plan means for this profile: by place and size, as an offloader follows it."""
        names = set(plan.recompute)
        recompute = frozenset(n for n, group in enumerate(self.groups) if group.name in names)
        tiers = [KEEP] * len(self.items)
        for place, number in enumerate(self.layout(recompute)):
            item = self.items[number]
            entry = plan.entry(place, self.nbytes[item.positions[0]])
            if not item.movable or (entry is not None and entry.action == Decision.KEEP.value):
                continue
            to_host = entry is not None and entry.tier == "host" and self.profile.host is not None
            tiers[number] = HOST if to_host else self.lowest_tier()
        return Choice(tuple(tiers), recompute)

    # -- preparation --------------------------------------------------------------------------------------------------

    def _find_groups(self) -> list[Group]:
        by_name: dict[str, list[int]] = {}
        for number, block in enumerate(self.profile.blocks):
            by_name.setdefault(block.name, []).append(number)
        groups = []
        for name, numbers in by_name.items():
            if any(self.block_begin[n] is None for n in numbers):
                continue
            made = [self.nbytes[self.block_input[n]] for n in numbers if self.block_input[n] >= self.count]
            births = [self.profile.storages[p].birth_s for n in numbers for p in self.dropped[n]]
            freed = sum(self.dropped_bytes[n] for n in numbers) - sum(made)
            seconds = sum(self.profile.blocks[n].recompute_s for n in numbers)
            groups.append(Group(name, tuple(numbers), freed, seconds, min(births)))
        return groups

    def _find_items(self) -> list[Item]:
        storages = self.profile.storages
        places: dict[int, list[int]] = {}
        for number, storage in enumerate(storages):
            if storage.index is not None:
                same = places.setdefault(storage.index, [])
                if not same or storage.nbytes == self.nbytes[same[0]]:
                    same.append(number)
        group_of = {block: n for n, group in enumerate(self.groups) for block in group.blocks}
        input_of = {self.block_input[block]: n for block, n in group_of.items()}
        placed = [(float(index), self._item(positions, group_of, input_of)) for index, positions in places.items()]
        for number, group in enumerate(self.groups):
            made = tuple(self.block_input[b] for b in group.blocks if self.block_input[b] >= self.count)
            if made:
                places_of = [i for b in group.blocks for p in self.dropped[b] if (i := storages[p].index) is not None]
                placed.append((min(places_of, default=0) - 0.5, self._made_item(made, number, group)))
        return [item for _, item in sorted(placed, key=lambda pair: pair[0])]

    def _item(self, positions: list[int], group_of: dict[int, int], input_of: dict[int, int]) -> Item:
        first = self.profile.storages[positions[0]]
        return Item(
            positions=tuple(positions),
            nbytes=sum(self.nbytes[p] for p in positions),
            movable=all(self.profile.storages[p].movable for p in positions),
            birth_s=first.birth_s,
            need_s=self.profile.step_s if first.need_s is None else first.need_s,
            owner=-1 if first.block is None else group_of.get(first.block, -1),
            input_of=input_of.get(positions[0], -1),
        )

    def _made_item(self, made: tuple[int, ...], number: int, group: Group) -> Item:
        begin_s = self.block_begin[group.blocks[0]]
        assert begin_s is not None, "a group has what can be recomputed"
        nbytes = sum(self.nbytes[p] for p in made)
        recorded = all(self.profile.blocks[b].input_recorded for b in group.blocks)
        return Item(made, nbytes, movable=recorded, birth_s=group.birth_s, need_s=begin_s, owner=number, made=True)

    def _make_events(self) -> list[tuple[float, int, int]]:
        events = []
        for p, storage in enumerate(self.profile.storages):
            events += [(storage.birth_s, BIRTH, p), (storage.last_need_s, DEATH, p)]
            if storage.need_s is not None:
                events.append((storage.need_s, NEED, p))
        for block, begin in enumerate(self.block_begin):
            if begin is None:
                continue
            events.append((begin, RECOMPUTE, block))
            if self.block_input[block] >= self.count:
                own = [self.profile.storages[p] for p in self.dropped[block]]
                events.append((min(s.birth_s for s in own), BIRTH, self.block_input[block]))
                events.append((max(s.last_need_s for s in own), DEATH, self.block_input[block]))
        return sorted(events)

    def _make_order(self) -> list[tuple[int, int]]:
        order = [(need, 1, p, -1) for p, need in enumerate(self.need) if need is not None]
        order += [(begin, 0, -1, block) for block, begin in enumerate(self.block_begin) if begin is not None]
        return [(p, block) for _, _, p, block in sorted(order)]
