"""Makes equal stretches of a step's time equally long: measured once, equal blocks differ by up to three. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

FEWEST = 3
"""Of so many equal stretches each is taken to be as long as their median."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """From one time to another, in seconds; stretches of one ``kind`` do the same."""

    begin_s: float
    end_s: float
    kind: Hashable


def evened(stretches: Sequence[Stretch]) -> Callable[[float], float]:
    """Return what the times of a step become when each stretch is as long as the median of its kind.

    Times keep their order. Nothing changes where stretches overlap, as blocks in several threads may.

    >>> even = evened([Stretch(0, 2, "a"), Stretch(2, 3, "a"), Stretch(3, 4, "a")])
    >>> [even(time_s) for time_s in (0, 1, 2, 4, 5)]
    [0.0, 0.5, 1.0, 3.0, 4.0]
    """
    ordered = sorted(stretches, key=lambda stretch: (stretch.begin_s, stretch.end_s))
    if any(earlier.end_s > later.begin_s for earlier, later in pairwise(ordered)):
        return float
    lengths: dict[Hashable, list[float]] = {}
    for stretch in ordered:
        lengths.setdefault(stretch.kind, []).append(stretch.end_s - stretch.begin_s)
    moved_s = 0.0
    before, after = [0.0], [0.0]
    for stretch in ordered:
        length_s = stretch.end_s - stretch.begin_s
        others = lengths[stretch.kind]
        if length_s <= 0.0 or len(others) < FEWEST:
            continue
        before += [stretch.begin_s, stretch.end_s]
        after += [stretch.begin_s + moved_s]
        moved_s += median(others) - length_s
        after += [stretch.end_s + moved_s]

    def even(time_s: float) -> float:
        place = bisect_right(before, time_s) - 1
        if place + 1 == len(before) or before[place + 1] == before[place]:
            return after[place] + time_s - before[place]
        share = (time_s - before[place]) / (before[place + 1] - before[place])
        return after[place] + share * (after[place + 1] - after[place])

    return even
