"""Searches a plan: which checkpointed regions run once, and which saved storages leave. Pure and deterministic.

The first storages leave and the last stay: one cut through a forward, under each of a few windows, scored on the
simulator. How far ahead backward reads matters more than which storage leaves: slow links must be asked early, but not
before the peak is over. Regions are tried a few numbers and patterns at a time, each with all free to move.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from ..errors import BudgetError, ConfigError
from ..sizes import format_size
from .constants import (
    ALIKE_STEPS,
    CUT_TRIES,
    HOST_SHARE,
    LEAST_GAIN,
    LEAST_GAIN_BYTES,
    MEMORY_MARGIN,
    NO_LOSS,
    SAFETY,
    SHARES_AHEAD,
    SPREAD,
    TRIMS,
)
from .plan import Plan
from .profile import Profile
from .regions import choosable, with_regions
from .simulator import Conditions, Prediction, run
from .workload import HOST, KEEP, NVME, Choice, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Conditions):
    """What a plan has to respect: the budgets of `Conditions`, and more.

    Attributes:
        max_slowdown: how much slower than keeping all a step may be, as a share; None for no loss (`NO_LOSS`), or for
            whatever a ``device_budget`` costs.
        tiers: where storages may go: ``"host"``, ``"nvme"``.
        agreed: whether all ranks run the same regions once, so that regions in which they communicate may be chosen.
    """

    max_slowdown: float | None = None
    tiers: tuple[str, ...] = ("host", "nvme")
    agreed: bool = False

    def __post_init__(self) -> None:
        Conditions.__post_init__(self)  # super() does not work in a dataclass with slots
        slowdown = self.max_slowdown
        if slowdown is not None and (not isinstance(slowdown, (int, float)) or not 0 <= slowdown < float("inf")):
            raise ConfigError("max_slowdown", slowdown, "give a share of the step time, for example 0.02, or None")
        if not set(self.tiers) <= {"host", "nvme"}:
            raise ConfigError("tiers", self.tiers, 'name "host", "nvme" or both')


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Which regions should run once, with the step that is predicted: seconds, and bytes of the peak."""

    once: frozenset[int]
    step_s: float
    peak_bytes: int


def plan(profile: Profile, limits: Limits) -> Plan:
    """Plan for a step as it was recorded: what leaves and what stays. Its regions stay as they were recorded.

    Without a budget it frees the most memory that costs no time (or no more than ``max_slowdown``); under a
    ``device_budget`` it finds the fastest step that keeps it. Where nothing is gained it moves nothing and says why.

    Raises:
        BudgetError: no plan keeps ``limits.device_budget``; it has the floor.
    """
    return Search(profile, limits).plan()


def floor(profile: Profile, limits: Limits) -> int:
    """The lowest peak, in bytes, that moving and waiting reach."""
    return Search(profile, limits).floor()


def propose(base: Profile, limits: Limits) -> Proposal:
    """Choose the regions that should run once, from a step in which every region ran again.

    Without a budget they may take as much memory as ``base`` does, and a region runs once only if that is faster.

    Raises:
        BudgetError: no choice keeps ``limits.device_budget``; it has the lowest peak that was found.
    """
    limits = bounded(base, limits)
    if limits.device_budget is None:  # there is nothing to choose
        return Proposal(once=frozenset(), step_s=base.step_s, peak_bytes=base.baseline_peak_bytes)
    return _Regions(base, limits).propose()


def bounded(base: Profile, limits: Limits) -> Limits:
    """The limits of a step with checkpointed regions: without a budget it may take as much memory as it does."""
    if limits.device_budget is not None or not choosable(base):
        return limits
    return replace(limits, device_budget=own_budget(base))


def own_budget(base: Profile) -> int:
    """What a step with checkpointed regions may save without a budget: as much as it does, less a margin.

    Moving has memory of its own, as that of a storage whose copy has just ended.
    """
    return int((1 - MEMORY_MARGIN) * base.baseline_peak_bytes)


def best(profile: Profile, limits: Limits) -> tuple[Profile, Plan]:
    """The step with the regions that `propose` chooses run once, and the plan for it: both choices on paper.

    Raises:
        BudgetError: no choice keeps ``limits.device_budget``.
    """
    limits = bounded(profile, limits)
    chosen = with_regions(profile, propose(profile, limits).once)
    return chosen, plan(chosen, limits)


Score = tuple[float, float, int]
Tried = tuple[Score, int, Choice]
"""A choice under a window."""


class Search:
    """Choices for one profile under limits, tried on the simulator and compared.

    Attributes:
        workload: the prepared profile.
        keep: the choice that keeps all; ``kept``: the step then.
        allowed_s: the longest step that the limits allow, less a margin; infinite with a ``device_budget`` alone.
        window: how far ahead backward reads, in bytes; None for the profile's window.
    """

    def __init__(self, profile: Profile, limits: Limits) -> None:
        self.workload = Workload(profile)
        self.limits = limits
        self.to_host = profile.host is not None and "host" in limits.tiers
        self.to_disk = profile.disk is not None and "nvme" in limits.tiers
        self.window: int | None = None
        self._known: dict[tuple[tuple[int, ...], int | None, int | None], Prediction] = {}
        self.keep = self.workload.keep_all()
        self.kept = self.predict(self.keep)
        slowdown = limits.max_slowdown
        if slowdown is None:
            slowdown = float("inf") if limits.device_budget is not None else NO_LOSS
        self.allowed_s = self.kept.step_s * (1 + SAFETY * slowdown)

    def plan(self) -> Plan:
        """The best of the cuts under the windows; see `plan`."""
        budget = self.limits.device_budget
        if budget is not None and self.kept.peak_bytes <= budget:
            return self._decline(f"all fits: it takes {format_size(self.kept.peak_bytes)} of {format_size(budget)}")
        if not self.movable():
            if budget is not None:
                raise self._over(self.kept.peak_bytes)
            links = self.to_host or self.to_disk
            return self._decline("no saved storage may move" if links else "nothing has moved yet: no link is known")
        choice = self.search()
        seen = self.predict(choice)
        if budget is not None and seen.peak_bytes > budget:
            raise self._over(seen.peak_bytes)
        if budget is None and seen.peak_bytes > self._worth_it:
            return self._decline(self._why_declined(choice))
        return self.finish(choice, self._why_moved)

    # -- trying -------------------------------------------------------------------------------------------------------

    def predict(self, choice: Choice, budget: int | None = None) -> Prediction:
        """The step under a choice; ``budget`` replaces the ``device_budget``."""
        key = (choice.tiers, self.window, budget)
        found = self._known.get(key)
        if found is None:
            conditions = self.limits if budget is None else replace(self.limits, device_budget=budget)
            found = self._known[key] = run(self.workload, choice, conditions, window=self.window)
        return found

    def score(self, choice: Choice) -> Score:
        """Less is better: first how far the limits are passed, then what is asked for (time or memory), then bytes."""
        seen, budget = self.predict(choice), self.limits.device_budget
        if budget is None:
            return max(0.0, seen.step_s - self.allowed_s), float(seen.peak_bytes), seen.moved_bytes
        return float(max(0, seen.peak_bytes - budget)), seen.step_s, seen.moved_bytes

    def fits(self, choice: Choice) -> bool:
        """Whether a choice respects the limits."""
        return self.score(choice)[0] <= 0.0

    def search(self) -> Choice:
        """The best choice that was found, under the window that is best for it, which is `window` from then on."""
        order, by_time = self.movable(), self.limits.device_budget is not None
        small = sorted(order, key=lambda n: self.workload.items[n].nbytes)  # the first may be more than has to leave
        found = [self.glance()] if by_time else []
        for numbers in (order, small):
            tried = [cut for window in self.windows() for cut in self._cuts(numbers, window)]
            found.append(self._trimmed(_least_moved(tried, by_time=by_time)))
        _, self.window, choice = _least_moved(found, by_time=by_time)
        return choice

    def _trimmed(self, cut: Tried) -> Tried:
        """The cut, with the largest that need not leave kept, each tried once."""
        score, self.window, choice = cut
        largest = sorted(self.movable(), key=lambda n: -self.workload.items[n].nbytes)
        for number in [n for n in largest if choice.tiers[n] != KEEP][:TRIMS]:
            tiers = list(choice.tiers)
            tiers[number] = KEEP
            other = Choice(tuple(tiers))
            if self.score(other) < score:
                score, choice = self.score(other), other
        return score, self.window, choice

    def windows(self) -> list[int]:
        """How far ahead backward may read, in bytes: as the profile says, then from near to far.

        Under a budget its room bounds that as well, and two are enough.
        """
        own, whole = self.workload.profile.prefetch_bytes, self.workload.reach[-1]
        shares = SHARES_AHEAD if self.limits.device_budget is None else SHARES_AHEAD[-2:-1]
        return [own, *(max(1, int(whole * share)) for share in shares)]

    # -- making choices -----------------------------------------------------------------------------------------------

    def movable(self) -> list[int]:
        """The items that may move, in the order in which they are saved."""
        if not (self.to_host or self.to_disk):
            return []
        return [number for number, item in enumerate(self.workload.items) if item.movable]

    def offload(self, numbers: Iterable[int]) -> Choice:
        """These items leave, all others stay. To host memory while its budget lasts; what leaves first goes to disk."""
        items, tiers = self.workload.items, [KEEP] * len(self.workload.items)
        numbers = sorted(numbers, key=lambda n: items[n].birth_s)
        on_disk = self._bytes_for_disk(sum(items[n].nbytes for n in numbers))
        for number in numbers:
            tiers[number] = NVME if on_disk > 0 else HOST
            on_disk -= items[number].nbytes
        return Choice(tuple(tiers))

    def _bytes_for_disk(self, nbytes: int) -> float:
        if not self.to_host:
            return float("inf")
        host = self.limits.host_budget
        if not self.to_disk or host is None or nbytes <= host:
            return 0.0
        return nbytes - HOST_SHARE * host

    def _cuts(self, order: Sequence[int], window: int) -> list[Tried]:
        """Under a window the first of ``order`` leave, as few as the budget demands, or as many as cost no time.

        Beside them more, up to all: that may save a wait for room. Or less, which may leave sooner, and lower the peak.
        """
        self.window = window
        everything, nothing = self.offload(order), self.keep
        want_few = self.limits.device_budget is not None
        few, many = 0, len(order)
        if self.fits(nothing if want_few else everything):
            few, many = (few, few) if want_few else (many, many)
        for _ in range(CUT_TRIES):
            if many - few <= 1:
                break
            middle = (few + many) // 2
            if self.fits(self.offload(order[:middle])) == want_few:
                many = middle
            else:
                few = middle
        low, high = (many, len(order)) if want_few else (0, few)
        counts = sorted({low + (high - low) * step // (SPREAD - 1) for step in range(SPREAD)})
        return [(self.score(c), window, c) for c in (self._relieved(self.offload(order[:n])) for n in counts)]

    def glance(self) -> Tried:
        """A choice after a few tries: the first leave, about as many bytes as the budget is passed by."""
        excess = self.kept.peak_bytes - (self.limits.device_budget or 0)
        if excess <= 0:
            return self.score(self.keep), self.windows()[0], self.keep
        order = self.movable()
        leaving = list(accumulate(self.workload.items[number].nbytes for number in order))
        tried: list[Tried] = []
        for window in self.windows():
            self.window = window
            for count in 1 + bisect_left(leaving, excess), len(order):
                choice = self.offload(order[:count])
                tried.append((self.score(choice), window, choice))
                if not tried[-1][0][0] and tried[-1][0][1] <= (1 + ALIKE_STEPS) * self.kept.step_s:
                    return tried[-1]
        return min(tried, key=lambda one: one[0])

    def _relieved(self, choice: Choice) -> Choice:
        """The choice, with what would never leave kept from the start, where that is no worse: it is in others' way."""
        stayed = set(self.predict(choice).stayed)
        if not stayed:
            return choice
        tiers = list(choice.tiers)
        for number, item in enumerate(self.workload.items):
            if stayed.issuperset(item.positions):
                tiers[number] = KEEP
        other = Choice(tuple(tiers))
        return other if self.score(other)[:2] <= self.score(choice)[:2] else choice

    # -- plans --------------------------------------------------------------------------------------------------------

    def floor(self) -> int:
        """The lowest peak that moving and waiting reach: the peak if forward waits until all that leaves has left."""
        choices = self.keep, self.offload(self.movable())
        return min(self.predict(choice, budget=0).peak_bytes for choice in choices)

    def _over(self, reached: int) -> BudgetError:
        """The error of a budget that no choice keeps, of which the lowest peak is known."""
        budget = self.limits.device_budget or 0
        lowest = self.floor()
        lowest = lowest if budget < lowest < reached else reached
        return BudgetError(budget, lowest, f"{format_size(lowest)}; the planner reaches {format_size(reached)}")

    def _decline(self, reason: str) -> Plan:
        self.window = None
        return self.finish(self.keep, declined=reason)

    def finish(self, choice: Choice, why: Callable[[int], str] = lambda number: "", *, declined: str = "") -> Plan:
        """The plan of a choice; ``why``: the reason for an item, by its number."""
        seen, profile = self.predict(choice), self.workload.profile
        reasons = [why(number) if tier != KEEP else "" for number, tier in enumerate(choice.tiers)]
        return Plan(
            self.workload.to_entries(choice, reasons, seen.releases),
            planner="auto",
            once=profile.once,
            regions=1 + max((region.place for region in profile.regions), default=-1),
            declined=declined,
            prefetch_bytes=self.window or profile.prefetch_bytes,
            pending_bytes=seen.pending_peak_bytes,
            predicted_step_s=seen.step_s,
            predicted_peak_bytes=seen.peak_bytes,
            baseline_peak_bytes=self.kept.peak_bytes,
        )

    @property
    def _worth_it(self) -> float:
        """The highest peak, in bytes, for which it is worth moving anything."""
        return min((1 - LEAST_GAIN) * self.kept.peak_bytes, self.kept.peak_bytes - LEAST_GAIN_BYTES)

    def _why_declined(self, choice: Choice) -> str:
        lowest = min(self.predict(other).peak_bytes for other in (choice, self.offload(self.movable())))
        peak = run(self.workload, self.keep, self.limits, detail=True).peak
        where, nbytes = next(iter(peak.bytes_by_module.items()), ("", 0)) if peak is not None else ("", 0)
        sets = f"; of the peak of {format_size(self.kept.peak_bytes)} the most, {format_size(nbytes)}, is "
        sets += where or "outside any module"
        if lowest > self._worth_it:
            return (
                f"moving lowers the peak by less than {format_size(int(self.kept.peak_bytes - self._worth_it))}{sets}"
            )
        allowed = self.allowed_s / self.kept.step_s - 1 if self.kept.step_s else 0.0
        return f"what lowers the peak slows the step by more than {allowed / SAFETY:.1%}{sets}"

    def _why_moved(self, number: int) -> str:
        """Why an item leaves: how long it would lie idle, against how long it takes to move."""
        item, profile = self.workload.items[number], self.workload.profile
        link = profile.host or profile.disk
        seconds_per_byte = 1 / link.write_bytes_per_s + 1 / link.read_bytes_per_s if link else 0.0
        idle_ms = 1e3 * (item.need_s - item.birth_s)
        return f"idle for {idle_ms:.3g} ms, moved in {1e3 * item.nbytes * seconds_per_byte:.3g} ms"


def _least_moved(tried: Sequence[Tried], *, by_time: bool) -> Tried:
    """The best score; among steps of nearly the same time the one that moves the fewest bytes."""
    best = min(tried, key=lambda one: one[0])
    if not by_time:
        return best
    over, step_s, _ = best[0]
    near = [one for one in tried if one[0][0] <= over and one[0][1] <= (1 + ALIKE_STEPS) * step_s]
    return min(near, key=lambda one: (one[0][2], one[0][1]))


@dataclass(frozen=True, slots=True, order=True)
class _Mix:
    """Regions that run once, tried: bytes over the budget, seconds, bytes moved, peak. The least is the best."""

    over: float
    step_s: float
    moved_bytes: int
    peak_bytes: int
    once: frozenset[int] = field(compare=False)


class _Regions:
    """Tries sets of regions, each with a few choices of what leaves."""

    def __init__(self, base: Profile, limits: Limits) -> None:
        self._base, self._limits = base, limits
        barred = set() if limits.agreed else {region.place for region in base.regions if region.communicates}
        self._places = [place for place in choosable(base) if place not in barred]
        self._seconds, self._saved = dict.fromkeys(self._places, 0.0), dict.fromkeys(self._places, 0)
        for region in base.regions:
            if region.place in self._seconds:
                self._seconds[region.place] += region.recompute_s
                self._saved[region.place] += sum(save.nbytes for save in region.saves)
        self._tried: dict[frozenset[int], _Mix] = {}

    def propose(self) -> Proposal:
        """The least moved among the shortest steps within the budget; see the function."""
        self._try(frozenset())
        if self._places:
            self._search()
        best = min(self._tried.values())
        if best.over:
            budget = self._limits.device_budget or 0
            raise BudgetError(budget, best.peak_bytes, f"{format_size(best.peak_bytes)}, by any mix of regions")
        near = [m for m in self._tried.values() if not m.over and m.step_s <= (1 + ALIKE_STEPS) * best.step_s]
        best = min(near, key=lambda mix: (mix.moved_bytes, mix.step_s))
        return Proposal(once=best.once, step_s=best.step_s, peak_bytes=best.peak_bytes)

    def _search(self) -> None:
        for pattern in self._patterns():
            before, around = (0, 0), (0, len(self._places))
            while around != before:
                before, around = around, self._close_in(pattern, *around)

    def _patterns(self) -> list[Callable[[int], frozenset[int]]]:
        """Which regions run once, by their number: the first, the cheapest by the byte, the last, or evenly spread.

        The last one of a forward is always among them: all that it saves is there anyway while it runs again.
        """
        places, last, count = self._places, self._places[-1], len(self._places)
        early = [last, *places[:-1]]
        late = places[::-1]
        rates = {place: self._seconds[place] / max(1, self._saved[place]) for place in early}
        most = max(rates.values()) or 1.0
        cheap = sorted(early, key=lambda place: -round(10 * rates[place] / most))  # equals in the order of `early`
        patterns = [partial(_first_of, order) for order in (early, cheap, late)]
        # From the first to the last: so the link has something to move all the time.
        return [*patterns, lambda k: frozenset(places[-1 - i * (count - 1) // max(1, k - 1)] for i in range(k))]

    def _close_in(self, pattern: Callable[[int], frozenset[int]], low: int, high: int) -> tuple[int, int]:
        """Try a few numbers from ``low`` to ``high``; the neighbours of the best of them."""
        counts = sorted({low + (high - low) * step // (SPREAD - 1) for step in range(SPREAD)})
        found = []
        for count in reversed(counts):
            once = pattern(count)
            best = min(self._tried.values())
            # It computes for so long at least.
            least_s = self._base.step_s - sum(self._seconds[place] for place in once)
            if once in self._tried or best.over or least_s < best.step_s:
                found.append((self._try(once), count))
        if not found:
            return low, high
        place = counts.index(min(found, key=lambda one: one[0])[1])
        return counts[max(0, place - 1)], counts[min(len(counts) - 1, place + 1)]

    def _try(self, once: frozenset[int]) -> _Mix:
        found = self._tried.get(once)
        if found is None:
            search = Search(with_regions(self._base, once), self._limits)
            (over, step_s, moved), search.window, choice = search.glance()
            peak = search.predict(choice).peak_bytes
            found = self._tried[once] = _Mix(over, step_s, moved, peak, once)
        return found


def _first_of(order: Sequence[int], count: int) -> frozenset[int]:
    return frozenset(order[:count])
