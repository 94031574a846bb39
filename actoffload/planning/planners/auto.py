"""The default: cuts and joint choices, the best of them on the simulator, made better by local search.

Without a budget it frees the most memory that costs no time (or no more than ``max_slowdown``); under a
``device_budget`` it finds the fastest step that keeps it. Where nothing is gained it moves nothing and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...sizes import format_size
from ..constants import (
    COST_OF_A_RUN,
    LEAST_GAIN,
    LEAST_GAIN_BYTES,
    MANY_ITEMS,
    SAFETY,
    SHARES_AHEAD,
    SPEND,
    SPEND_PER_ITEM,
)
from ..plan import Plan
from ..profile import Profile
from ..simulator import run
from ..workload import Choice
from .base import Bench, Limits, Score
from .joint import joint
from .search import every_choice, refine


class Auto:
    """The best of all.

    Args:
        spend: how long to search, in items simulated.
    """

    name = "auto"

    def __init__(self, spend: int = SPEND) -> None:
        self._spend = spend

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        """The fastest plan within the budget; without one, the plan that frees the most memory at no loss."""
        bench = Bench(profile, limits)
        budget = limits.device_budget
        if budget is not None and bench.kept.peak_bytes <= budget:
            return self._decline(
                bench, f"all fits: it takes {format_size(bench.kept.peak_bytes)} of {format_size(budget)}"
            )
        if not bench.movable() and not bench.all_groups:
            if budget is not None:
                return bench.finish(bench.keep, self.name)
            links = bench.to_host or bench.to_disk
            why = "no saved storage may move" if links else "nothing has moved yet, so that no link is known"
            return self._decline(bench, f"{why}, and no block can be recomputed")
        choice = self._search(bench)
        _choose_window(bench, (choice,), _windows(bench)[1::2] if _many(bench) else _windows(bench))
        if budget is None and bench.predict(choice).peak_bytes > _worth_it(bench):
            return self._decline(bench, _why_declined(bench))
        return bench.finish(choice, self.name, partial(_reason, bench))

    def _decline(self, bench: Bench, reason: str) -> Plan:
        return bench.finish(bench.keep, self.name, declined=reason)

    def _search(self, bench: Bench) -> Choice:
        everything = every_choice(bench)
        if everything is not None:
            return min(everything, key=bench.score)
        choices = [bench.keep, bench.offload_all(), first_cut(bench)]
        best = bench.best([*choices, *map(bench.relieved, choices[1:])])
        windows = _windows(bench)
        if _many(bench):
            windows = windows[-2:-1] or windows
        others = [*choices[1:], *_under(bench, windows)]
        _choose_window(bench, (best, *others), windows)
        best = bench.best([best, *others])
        if not bench.fits(best):
            best = bench.best([best, bench.floor()[1]])
        best = bench.best([best, joint(bench)])
        most = SPEND_PER_ITEM * (len(bench.workload.items) + COST_OF_A_RUN)
        return refine(bench, best, min(most, self._spend - bench.spent))


def _many(bench: Bench) -> bool:
    return len(bench.workload.items) > MANY_ITEMS


def first_cut(bench: Bench) -> Choice:
    """The first leave, the last stay: SSDTrain's cut, placed by the simulator."""
    return bench.search_cut(bench.movable())


def _windows(bench: Bench) -> list[int]:
    """How far ahead backward may read, in bytes, from near to far."""
    own, whole = bench.workload.profile.prefetch_bytes, bench.workload.reach[-1]
    return sorted({own, *(max(1, int(whole * share)) for share in SHARES_AHEAD)})


def _under(bench: Bench, windows: Sequence[int]) -> list[Choice]:
    """What leaves when backward reads so far ahead: slow links must be asked early, but not before the peak is over."""
    if bench.limits.device_budget is not None:
        return []  # it reads far ahead anyway, as its room allows
    usual = bench.window
    found = []
    for window in windows:
        bench.window = window
        found.append(first_cut(bench))
    bench.window = usual
    return found


def _choose_window(bench: Bench, choices: Sequence[Choice], windows: Sequence[int]) -> None:
    """Let backward read as far ahead as is best for one of the choices."""

    def score(window: int | None) -> Score:
        bench.window = window
        return min(map(bench.score, choices))

    bench.window = min((bench.window, *windows), key=score)


def _worth_it(bench: Bench) -> float:
    """The highest peak, in bytes, for which it is worth moving anything."""
    return min((1 - LEAST_GAIN) * bench.kept.peak_bytes, bench.kept.peak_bytes - LEAST_GAIN_BYTES)


def _why_declined(bench: Bench) -> str:
    choices = bench.offload_all(), bench.offload_all(bench.all_groups)
    lowest = min(bench.predict(choice).peak_bytes for choice in choices)
    peak = run(bench.workload, bench.keep, bench.limits, detail=True).peak
    where, nbytes = next(iter(peak.bytes_by_module.items()), ("", 0)) if peak is not None else ("", 0)
    sets = f"; of the peak of {format_size(bench.kept.peak_bytes)} the most, {format_size(nbytes)}, is "
    sets += where or "outside any block"
    if lowest > _worth_it(bench):
        return f"moving lowers the peak by less than {format_size(int(bench.kept.peak_bytes - _worth_it(bench)))}{sets}"
    allowed = bench.allowed_s / bench.kept.step_s - 1 if bench.kept.step_s else 0.0
    return f"what lowers the peak slows the step by more than {allowed / SAFETY:.1%}{sets}"


def _reason(bench: Bench, number: int) -> str:
    """Why an item leaves: how long it would lie idle, against how long it takes to move."""
    item, profile = bench.workload.items[number], bench.workload.profile
    link = profile.host or profile.disk
    seconds_per_byte = 1 / link.write_bytes_per_s + 1 / link.read_bytes_per_s if link else 0.0
    idle_ms = 1e3 * (item.need_s - item.birth_s)
    return f"idle for {idle_ms:.3g} ms, moved in {1e3 * item.nbytes * seconds_per_byte:.3g} ms"
