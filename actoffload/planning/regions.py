"""Derives, from a known step, the step in which other checkpointed regions run once. Pure.

`with_regions` predicts a recorded step with some of its regions run once. `run_again` makes, on paper alone, the step
of a checkpointed model from the step of the same model without checkpoints.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from ..errors import ConfigError
from ..policy import KeepReason
from .constants import OPERANDS
from .profile import DERIVED, RECOMPUTED, ROUNDING, Profile, Region, RegionSave, Storage

PLACED = ("", KeepReason.EXCLUDED.value)
"""A storage that may move has a place on its tape, and so has one that the user's patterns keep."""


def choosable(base: Profile) -> list[int]:
    """The places of the regions that can run once: every forward recorded a recomputation and its end.

    A region whose saved tensors the program changes must run again, because backward needs them computed anew.
    """
    places = {region.place for region in base.regions}
    barred = {r.place for r in base.regions if r.again_s is None or r.backward_end_s is None or r.changed}
    return sorted(places - barred)


def more_beside(base: Profile, once: Collection[int]) -> int:
    """The bytes that a step with these regions run once may have beside saved tensors more than ``base`` has.

    Inputs that the program holds are resident in ``base``, and nothing saves them where their region runs once.
    """
    held = (storage for storage in base.storages if storage.kept == KeepReason.ALIVE.value)
    return sum(storage.nbytes for storage in held if storage.input_of in once)


def with_regions(base: Profile, once: Collection[int]) -> Profile:
    """The step of ``base``, in which all regions ran again, with the regions at these places run once in all forwards.

    The recomputations of these regions disappear, and all that
    came after them comes sooner. Their held storages are saved in the forward instead, and backward needs them in
    reverse order. An input that only the checkpoint of such a region saved is no longer saved.

    Raises:
        ConfigError: a place has no region that ran again; names ``once``.
    """
    unknown = sorted(set(once).difference(choosable(base)))
    if unknown:
        remedy = "give places of regions that ran again, of which backward has come to an end"
        raise ConfigError("once", unknown, remedy)
    if not once:
        return base
    chosen = [region for region in base.regions if region.place in once]
    gone = sorted((_again_s(region), region.recompute_s) for region in chosen)
    sooner = _Shift([begin for begin, _ in gone], [-seconds for _, seconds in gone])
    places = set(once)
    # A chosen region's held storages go, because `_saved_once` adds the same storages to its forward.
    stays = [s for s in base.storages if places.isdisjoint((_holder(s, base.regions), s.input_of))]
    kept = [_moved(s, sooner) for s in stays]
    # Removing time may make moments equal. The order of saving has to survive that: a plan counts places in it.
    born = list(accumulate((s.birth_s for s in kept), max))
    # At equal moments a region's saves come before the storage saved at its end, the input of the next region: so the
    # number of regions that have ended counts, and of equal ones the kept storages come first, as the sort is stable.
    ends = sorted(sooner(region.end_s) for region in base.regions)
    placed = [(time_s, bisect_right(ends, time_s), s) for time_s, s in zip(born, kept, strict=True)]
    outside: dict[tuple[int, int], int] = {}
    for region in chosen:
        ended = bisect_right(ends, sooner(region.begin_s))
        # The checkpoint saves its input before the region computes, and the hook takes time for that.
        place = bisect_left(born, sooner(region.begin_s))
        input_s = born[place] if place < len(born) and born[place] < sooner(region.end_s) else 0.0
        for number, s in _saved_once(region, sooner):
            s = _born_at(s, max(s.birth_s, input_s))
            # A derived one is made again in each region.
            first = (
                None if number is None or s.kept == DERIVED else outside.setdefault((region.tape, number), len(placed))
            )
            if first is None or first == len(placed):
                placed.append((s.birth_s, ended, s))
            else:  # an earlier region has saved it; backward needs it in this one first
                birth_s, before, saved = placed[first]
                need_s = min((n for n in (saved.need_s, s.need_s) if n is not None), default=None)
                last_s = max(saved.last_need_s, s.last_need_s)
                placed[first] = birth_s, before, replace(saved, need_s=need_s, last_need_s=last_s)
    return replace(
        base,
        storages=_numbered([storage for *_, storage in sorted(placed, key=lambda one: one[:2])]),
        regions=tuple(_moved_region(region, sooner, once=region.place in places) for region in base.regions),
        # Measured at the end of the step: micro-batches have time between them that is neither forward nor backward, so
        # a recomputation of the last one may begin later than ``forward_s + backward_s``.
        backward_s=base.backward_s - (base.step_s - sooner(base.step_s)),
    )


def run_again(plain: Profile, inputs: Mapping[int, int], once_bytes: Mapping[int, int]) -> Profile:
    """The step on paper in which all regions of ``plain``, which ran once, run again.

    Args:
        plain: `Storage.region` of its storages names the region that saves them.
        inputs: by the number of a region in `Profile.regions`, the storage that its checkpoint saves as its input. This
            storage lies outside of all regions.
        once_bytes: by storage, the bytes that its region saves of it if it runs once, where these differ from the
            bytes in ``plain``; 0 if backward computes it again.
    """
    members = {
        number: [n for n, s in enumerate(plain.storages) if (s.tape, s.region) == (region.tape, region.place)]
        for number, region in enumerate(plain.regions)
    }
    storages = plain.storages
    needs = {n: [storages[one].need_s for one in own] for n, own in members.items()}
    begins = {n: min((need_s for need_s in of if need_s is not None), default=None) for n, of in needs.items()}
    order = sorted((begin_s, n) for n, begin_s in begins.items() if begin_s is not None)
    times = [plain.regions[n].end_s - plain.regions[n].begin_s for _, n in order]
    later = _Shift([begin_s for begin_s, _ in order], times)
    again = {n: begin_s + before for (begin_s, n), before in zip(order, accumulate(times, initial=0.0), strict=False)}
    first_s: dict[int, float] = {}
    """By storage, the moment at which a recomputation reads it as its input."""
    for n, source in inputs.items():
        if n in again:
            first_s[source] = min(again[n], first_s.get(source, again[n]))
    listed = []
    for number, storage in enumerate(storages):
        if storage.region is None:
            moved = _moved(storage, later)
            need_s = first_s.get(number, moved.need_s)
            listed.append(replace(moved, need_s=need_s, last_need_s=max(moved.last_need_s, need_s or 0.0)))
    regions = [replace(region, backward_end_s=None) for region in plain.regions]
    for n, again_s in again.items():
        region, own = plain.regions[n], [storages[one] for one in members[n]]
        # The death is early: a region's storages die before a recomputation that begins at the same moment.
        recompute_s, end_s = region.end_s - region.begin_s, later(max(s.last_need_s for s in own), early=True)
        sizes = [once_bytes.get(one, storages[one].nbytes) for one in members[n]]
        saves = tuple(
            RegionSave(offset_s=s.birth_s - region.begin_s, nbytes=size or s.nbytes, kept=s.kept if size else DERIVED)
            for s, size in zip(own, sizes, strict=True)
        )
        regions[n] = replace(region, again_s=again_s, recompute_s=recompute_s, backward_end_s=end_s, saves=saves)
        facts: dict[str, Any] = {"module": region.name, "tape": region.tape, "kept": RECOMPUTED}
        nbytes = sum(s.nbytes for s in own)
        listed.append(Storage(index=None, nbytes=nbytes, birth_s=again_s, need_s=None, last_need_s=end_s, **facts))
    listed.sort(key=lambda s: s.birth_s)
    return replace(plain, storages=_numbered(listed), regions=tuple(regions), backward_s=plain.backward_s + sum(times))


def _again_s(region: Region) -> float:
    assert region.again_s is not None, "it ran again"
    return region.again_s


def _holder(storage: Storage, regions: Sequence[Region]) -> int | None:
    """The place of the region whose recomputation holds a storage: the last one that began before it; else None."""
    if storage.kept != RECOMPUTED:
        return None
    # A storage is held from the moment at which its recomputation begins; both are sums, equal up to rounding.
    before = [(r.again_s, r.place) for r in regions if r.tape == storage.tape and r.again_s is not None]
    return max(((s, place) for s, place in before if s <= storage.birth_s + ROUNDING), default=(0.0, None))[1]


class _Shift:
    """Moves moments: time is inserted at each of ``begins`` or, with seconds below 0, removed after it."""

    def __init__(self, begins: Sequence[float], seconds: Sequence[float]) -> None:
        self._begins = begins
        self._total = list(accumulate(seconds, initial=0.0))
        # All moments within a removed stretch become its beginning.
        self._least = list(accumulate((b + t for b, t in zip(begins, self._total, strict=False)), max))

    def __call__(self, time_s: float, *, early: bool = False) -> float:
        """Args: time_s: the moment; early: whether it comes before time that is inserted at this very moment."""
        place = (bisect_left if early else bisect_right)(self._begins, time_s)
        return max(self._least[place - 1], time_s + self._total[place]) if place else time_s

    def is_outside(self, begin_s: float, end_s: float) -> bool:
        """Whether no time is inserted or removed between two moments."""
        return bisect_left(self._begins, begin_s) == bisect_left(self._begins, end_s)


def _moved(storage: Storage, shift: _Shift) -> Storage:
    birth_s, last_s = shift(storage.birth_s), shift(storage.last_need_s, early=True)
    need_s = None if storage.need_s is None else shift(storage.need_s)
    # If a region that reads it runs once, more than one of the region's operators may save it.
    let_go = storage.let_go and shift.is_outside(storage.need_s or 0.0, storage.last_need_s)
    last_s = max(last_s, need_s or birth_s, birth_s)
    return replace(storage, birth_s=birth_s, need_s=need_s, last_need_s=last_s, let_go=let_go)


def _moved_region(region: Region, shift: _Shift, *, once: bool) -> Region:
    begin_s, forward_end_s = shift(region.begin_s), shift(region.end_s)
    again_s, end_s = (None if t is None else shift(t) for t in (region.again_s, region.backward_end_s))
    region = replace(region, begin_s=begin_s, end_s=forward_end_s, again_s=again_s, backward_end_s=end_s)
    return replace(region, again_s=None, recompute_s=0.0, saves=()) if once else region


def _born_at(storage: Storage, birth_s: float) -> Storage:
    # Backward may begin as forward ends. Both moments are sums, equal up to rounding.
    need_s = None if storage.need_s is None else max(storage.need_s, birth_s)
    return replace(storage, birth_s=birth_s, need_s=need_s, last_need_s=max(storage.last_need_s, birth_s))


def _saved_once(region: Region, shift: _Shift) -> list[tuple[int | None, Storage]]:
    """The storages that a region saves in its forward if it runs once, and the ones that backward makes of them.

    Each has `RegionSave.outside`.
    """
    assert region.backward_end_s is not None, "it is choosable"
    begin_s, forward_s = shift(region.begin_s), shift(region.end_s) - shift(region.begin_s)
    until_s = shift(region.backward_end_s)
    backward_s = until_s - shift(_again_s(region))
    saves = sorted(region.saves, key=lambda save: save.offset_s)
    # The second run ends at the last save, the first one with the operator that needs it. Without time, 1 divides.
    whole_s = max([forward_s, region.recompute_s, *(save.offset_s for save in saves)]) or 1.0
    shares = [save.offset_s / whole_s for save in saves]
    # An operator's forward ends as the next storage is saved. Backward reverses that: the operator, which needs its own
    # storage, begins as backward has left the next storage.
    again = [until_s - following * backward_s for _, following in pairwise([*shares, 1.0])]
    for number in reversed([number for number, save in enumerate(saves) if save.kept == DERIVED]):
        # It is computed from the last one or two before it: a product from an activation and the other factor.
        for operand in range(max(0, number - OPERANDS), number):
            again[operand] = again[number]
    return [
        (
            save.outside,
            Storage(
                index=0 if save.kept in PLACED else None,
                nbytes=save.nbytes,
                birth_s=need_s if save.kept == DERIVED else begin_s + share * forward_s,
                need_s=None if save.kept == DERIVED else need_s,
                # A storage that backward makes counts until backward has left the region, as all bytes of a second run.
                last_need_s=until_s if save.kept == DERIVED else until_s - share * backward_s,
                module=region.name,
                tape=region.tape,
                kept=save.kept,
                region=region.place,
            ),
        )
        for save, share, need_s in zip(saves, shares, again, strict=True)
    ]


def _numbered(storages: Sequence[Storage]) -> tuple[Storage, ...]:
    """The storages with their places counted anew in each forward; a storage without a place stays without one."""
    places: Counter[int] = Counter()
    numbered = []
    for storage in storages:
        if storage.index is not None:
            storage = replace(storage, index=places[storage.tape])
            places[storage.tape] += 1
        numbered.append(storage)
    return tuple(numbered)
