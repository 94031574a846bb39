"""Keep, offload or recompute, decided together: LoHan's and ProTrain's choice with the simulator as the time model.

Blocks are ranked by the time that recomputing them takes for each byte that they then need not save. For a number of
blocks recomputed in that order, the first of what is left leaves: as little as the budget demands, or as much as costs
no time. The step is close to convex in that number, so a few numbers are tried and the search closes in on the best.
"""

from __future__ import annotations

from ..constants import ALIKE, SPEND, SPREAD
from ..plan import Plan
from ..profile import Profile
from ..workload import Choice
from .base import Bench, Limits


class Joint:
    """Recompute what is cheapest by the byte, offload the first of the rest, keep the last."""

    name = "joint"

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        """The best mix of the three that the search finds."""
        bench = Bench(profile, limits)
        choice = joint(bench)
        if limits.device_budget is not None and not bench.fits(choice):
            choice = bench.floor()[1]
        return bench.finish(choice, self.name, lambda _: "saved before what is kept; cheaper to move than to recompute")


def joint(bench: Bench) -> Choice:
    """The best mix found while fewer than `SPEND` items are simulated."""
    until = bench.spent + SPEND
    best = bench.search_cut(bench.movable())
    for earliest_first in (True, False):
        ranked = ranking(bench, earliest_first=earliest_first)
        if ranked:
            best = bench.best([best, _close_in(bench, ranked, until)])
        if bench.spent > until:
            break
    return best


def ranking(bench: Bench, *, earliest_first: bool) -> list[int]:
    """Groups of blocks by recompute time for each byte freed, as many as the allowed time permits.

    Args:
        bench: the profile and limits.
        earliest_first: which of equals come first. Equal is what differs by less than one part of `ALIKE`.
    """
    groups = bench.workload.groups
    useful = [n for n in sorted(bench.all_groups) if groups[n].freed_bytes > 0]
    if not useful:
        return []
    rate = {n: groups[n].recompute_s / groups[n].freed_bytes for n in useful}
    cheapest = min(rate.values())
    sign = 1 if earliest_first else -1
    useful.sort(key=lambda n: (round(ALIKE * rate[n] / cheapest) if cheapest else 0, sign * groups[n].birth_s))
    spare_s = bench.allowed_s - bench.kept.step_s
    chosen = []
    for n in useful:
        spare_s -= groups[n].recompute_s
        if spare_s < 0:
            break
        chosen.append(n)
    return chosen


def _close_in(bench: Bench, ranked: list[int], until: int) -> Choice:
    tried: dict[int, Choice] = {}
    low, high = 0, len(ranked)
    while True:
        counts = {low + (high - low) * k // (SPREAD - 1) for k in range(SPREAD)}
        for count in sorted(counts, key=lambda count: (count not in (low, high), count)):
            if count not in tried and (bench.spent < until or not tried):
                recompute = frozenset(ranked[:count])
                tried[count] = bench.search_cut(bench.movable(recompute), recompute)
        best = min(tried, key=lambda count: bench.score(tried[count]))
        if bench.spent >= until or high - low < SPREAD:
            return tried[best]
        around = sorted(tried)
        place = around.index(best)
        low = around[max(0, place - 1)]
        high = around[min(len(around) - 1, place + 1)]
