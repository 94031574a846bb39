"""Floor, then bring back: offload everything, then bring the largest back while headroom lasts.

As DeepSpeed's DeepCompile pass does it. Headroom is what the budget leaves above the floor; without a budget it is the
slow-down that offloading everything costs, and the largest come back until it is gone.
"""

from __future__ import annotations

from ..plan import Plan
from ..profile import Profile
from ..workload import Choice
from .base import Bench, Limits

MORE_TRIES = 4


class BringBack:
    """Keep the largest, offload the rest."""

    name = "bring_back"

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        """The fewest that have to leave, the smallest first."""
        bench = Bench(profile, limits)
        return bench.finish(bring_back(bench), self.name, lambda _: "no headroom to bring it back")


def bring_back(bench: Bench, recompute: frozenset[int] = frozenset(), *, tries: int = 12) -> Choice:
    """Offload all, then bring back the largest that there is room, or no time, for."""
    items = bench.workload.items
    smallest_first = sorted(bench.movable(recompute), key=lambda n: (items[n].nbytes, items[n].birth_s))
    count, choice = bench.search_cut(smallest_first, recompute, tries=tries)
    left = smallest_first[:count]
    for number in reversed(smallest_first[max(0, count - MORE_TRIES) : count]):
        fewer = [n for n in left if n != number]
        other = bench.offload(fewer, recompute)
        if bench.beats(other, bench.score(choice)):
            left, choice = fewer, other
    return choice
