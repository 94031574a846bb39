"""Searches for a plan: which checkpointed regions run once, and which saved storages leave. Pure and deterministic.

The first storages leave and the last stay: one cut through a forward, under each of a few windows, scored on the
simulator. The window matters more than the choice of storages: reads over a slow link must begin early, but not before
the peak is over. Regions are tried in a few numbers and patterns, each with all storages free to move.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

from ..errors import BudgetError, ConfigError
from ..sizes import format_size
from .constants import (
    ALIKE_STEPS,
    HOST_SHARE,
    LEAST_GAIN_BYTES,
    MEMORY_MARGIN,
    NO_LOSS,
    SHARES_AHEAD,
    SPREAD,
    TRIES,
    TRIMS,
)
from .plan import Plan
from .profile import Profile
from .regions import choosable, more_beside, with_regions
from .simulator import Conditions, Prediction, run
from .workload import HOST, KEEP, NVME, Choice, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Conditions):
    """The bounds of a plan: the budgets of `Conditions`, and more.

    Attributes:
        tiers: where storages may go: ``"host"``, ``"nvme"``.
        agreed: whether all ranks run the same regions once, so that regions in which ranks communicate may be chosen.
        whole_device: the ``device_budget`` is the part of a number for the whole device that saved tensors may take.
    """

    tiers: tuple[str, ...] = ("host", "nvme")
    agreed: bool = False
    whole_device: bool = False

    def __post_init__(self) -> None:
        if not set(self.tiers) <= {"host", "nvme"}:
            raise ConfigError("tiers", self.tiers, 'name "host", "nvme" or both')


def tiers_of(target: str) -> tuple[str, ...]:
    """The tiers to which storages may go with an option ``target``."""
    return (target,) if target in ("host", "nvme") else ("host", "nvme")


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Proposal:
    """The places of the regions that should run once, and the predicted step; of several the least is the best.

    ``over_bytes`` is how far the peak is over the budget.
    """

    over_bytes: float = 0.0
    step_s: float
    moved_bytes: int = 0
    peak_bytes: int
    once: frozenset[int] = field(compare=False)


def plan(profile: Profile, limits: Limits) -> Plan:
    """Plan for a step as recorded: which storages leave and which stay. Its regions run as in the recording.

    Without a budget the plan frees the most memory that costs no time. Under a ``device_budget`` it is the shortest
    step that keeps the budget. If nothing is gained, the plan moves nothing and has the reason in ``declined``.

    Raises:
        BudgetError: no plan keeps ``limits.device_budget``; it carries the floor.
    """
    return Search(profile, limits).plan()


def propose(base: Profile, limits: Limits) -> Proposal:
    """Choose the regions that should run once, from a step in which every region ran again.

    Without a budget they may take as much memory as ``base`` does, and a region runs once only if that saves time.

    Raises:
        BudgetError: no choice keeps ``limits.device_budget``; it carries the lowest peak that was found.
    """
    limits = bounded(base, limits)
    if limits.device_budget is None:  # `bounded` sets a budget wherever a region can be chosen
        return Proposal(step_s=base.step_s, peak_bytes=base.baseline_peak_bytes, once=frozenset())
    return _Regions(base, limits).best()


def bounded(base: Profile, limits: Limits) -> Limits:
    """The limits of a step with checkpointed regions: without a budget it may take the memory that it takes anyway."""
    if limits.device_budget is not None or not choosable(base):
        return limits
    return replace(limits, device_budget=own_budget(base, limits.in_forward))


def own_budget(base: Profile, in_forward: Mapping[int, int]) -> int:
    """The bytes that a step with checkpointed regions may save without a budget: its own peak less a margin.

    ``in_forward`` is as in `Conditions`. Moving needs memory too, for example of a storage whose copy has just ended.
    """
    workload = Workload(base)
    own = run(workload, workload.keep_all(), Conditions(in_forward=in_forward))
    return int((1 - MEMORY_MARGIN) * own.peak_bytes)


def best(profile: Profile, limits: Limits) -> tuple[Profile, Plan]:
    """The step with the regions of `propose` run once, and the plan for it: both choices on paper.

    Raises:
        BudgetError: no choice keeps ``limits.device_budget``.
    """
    limits = bounded(profile, limits)
    once = propose(profile, limits).once
    chosen = with_regions(profile, once)
    return chosen, plan(chosen, _of_regions(limits, profile, once))


def _of_regions(limits: Limits, base: Profile, once: Collection[int]) -> Limits:
    """The limits of the step in which these regions of ``base`` run once."""
    budget = limits.device_budget
    if budget is None or not limits.whole_device:
        return limits
    return replace(limits, device_budget=max(0, budget - more_beside(base, once)))


def _spread(low: int, high: int) -> list[int]:
    """A few numbers from ``low`` to ``high``, both among them."""
    return sorted({low + (high - low) * step // (SPREAD - 1) for step in range(SPREAD)})


Score = tuple[float, float, int]
Tried = tuple[Score, int, Choice]
"""A choice, the window under which it was tried, and its score."""


class Search:
    """Choices for one profile under limits, tried on the simulator and compared.

    Attributes:
        workload: the prepared profile.
        keep: the choice that keeps everything; ``kept``: the step under it.
        allowed_s: the longest step without a ``device_budget``.
        window: how far ahead backward reads, in bytes; None for the profile's own window.
    """

    def __init__(self, profile: Profile, limits: Limits) -> None:
        self.workload = Workload(profile)
        self.limits = limits
        self.to_host = profile.host is not None and "host" in limits.tiers
        self.to_disk = profile.disk is not None and "nvme" in limits.tiers
        self.window: int | None = None
        self._known: dict[tuple[Choice, int | None, int | None], Prediction] = {}
        self.keep = self.workload.keep_all()
        self.kept = self.predict(self.keep)
        self.allowed_s = self.kept.step_s * (1 + NO_LOSS)

    def plan(self) -> Plan:
        """The best of the cuts under all windows; see the function `plan`."""
        budget = self.limits.device_budget
        # Under a budget memory below it has no value, and every byte that moves is traffic for nothing.
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
        # A first plan knows nothing of the time that hooks and copies take, for which a small gain does not pay.
        if budget is None and seen.peak_bytes > self._worth_it:
            return self._decline(self._why_declined(choice))
        return self.finish(choice)

    # -- trying -------------------------------------------------------------------------------------------------------

    def predict(self, choice: Choice, budget: int | None = None) -> Prediction:
        """The step under a choice; ``budget`` replaces the ``device_budget``."""
        # Simulations are the whole cost of a search, and halving and trimming return to the same choices.
        key = (choice, self.window, budget)
        if key not in self._known:
            conditions = self.limits if budget is None else replace(self.limits, device_budget=budget)
            self._known[key] = run(self.workload, choice, conditions, window=self.window)
        return self._known[key]

    def score(self, choice: Choice) -> Score:
        """Lower is better: first the excess over the limits, then the goal (time or memory), then the bytes moved."""
        seen, budget = self.predict(choice), self.limits.device_budget
        if budget is None:
            return max(0.0, seen.step_s - self.allowed_s), float(seen.peak_bytes), seen.moved_bytes
        return float(max(0, seen.peak_bytes - budget)), seen.step_s, seen.moved_bytes

    def fits(self, choice: Choice) -> bool:
        """Whether a choice respects the limits."""
        return self.score(choice)[0] <= 0.0

    def search(self) -> Choice:
        """The best choice found, under its best window; `window` is that window from then on."""
        order, by_time = self.movable(), self.limits.device_budget is not None
        # The cut in the order of saving may move a large first storage where a few small ones would do.
        small = sorted(order, key=lambda n: self.workload.items[n].nbytes)
        found = []
        for numbers in (order, small):
            tried = [cut for window in self.windows() for cut in self._cuts(numbers, window)]
            found.append(self._trimmed(_least_moved(tried, by_time=by_time)))
        _, self.window, choice = _least_moved(found, by_time=by_time)
        return choice

    def _trimmed(self, cut: Tried) -> Tried:
        """The cut, with its largest storages kept again where that improves the score; each is tried once."""
        score, self.window, choice = cut
        # Largest first: each of the few tries saves the most traffic.
        largest = sorted(self.movable(), key=lambda n: -self.workload.items[n].nbytes)
        for number in [n for n in largest if choice[n] != KEEP][:TRIMS]:
            other = _without(choice, {number})
            if self.score(other) < score:
                score, choice = self.score(other), other
        return score, self.window, choice

    def windows(self) -> list[int]:
        """How far ahead backward may read, in bytes: the profile's own window, then from near to far.

        Under a budget its free room bounds the reads as well, so two windows are enough.
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
        """These items leave, all others stay. Host memory takes the last ones, up to its budget; the disk the first."""
        items, tiers = self.workload.items, [KEEP] * len(self.workload.items)
        # Backward needs the first storages last, so they have the most time for the longer way to disk.
        numbers = sorted(numbers, key=lambda n: items[n].birth_s)
        on_disk = self._bytes_for_disk(sum(items[n].nbytes for n in numbers))
        for number in numbers:
            tiers[number] = NVME if on_disk > 0 else HOST
            on_disk -= items[number].nbytes
        return tuple(tiers)

    def _bytes_for_disk(self, nbytes: int) -> float:
        if not self.to_host:
            return float("inf")
        host = self.limits.host_budget
        if not self.to_disk or host is None or nbytes <= host:
            return 0.0
        # Storages on their way to disk pass through host memory, so not all of it is for storages that stay there.
        return nbytes - HOST_SHARE * host

    def _cuts(self, order: Sequence[int], window: int) -> list[Tried]:
        """Cuts under a window: the first of ``order`` leave, as few as the budget demands, or as many as cost no time.

        Under a budget larger cuts are tried too, since they may save a wait for room. Without one smaller cuts are
        tried too, since their storages may leave sooner and lower the peak.
        """
        self.window = window
        everything, nothing = self.offload(order), self.keep
        want_few = self.limits.device_budget is not None
        few, many = 0, len(order)
        if self.fits(nothing if want_few else everything):
            few, many = (few, few) if want_few else (many, many)
        # A longer cut has a lower peak and more traffic, so as a rule the limits hold on one side of one number.
        for _ in range(TRIES):
            if many - few <= 1:
                break
            middle = (few + many) // 2
            if self.fits(self.offload(order[:middle])) == want_few:
                many = middle
            else:
                few = middle
        counts = _spread(many, len(order)) if want_few else _spread(0, few)
        return [(self.score(c), window, c) for c in (self._relieved(self.offload(order[:n])) for n in counts)]

    def glance(self) -> Tried:
        """A choice after a few tries: the first leave, with about as many bytes as the peak is over the budget."""
        excess = self.kept.peak_bytes - (self.limits.device_budget or 0)
        if excess <= 0:
            return self.score(self.keep), self.windows()[0], self.keep
        order = self.movable()
        leaving = list(accumulate(self.workload.items[number].nbytes for number in order))
        choices = [self.offload(order[:count]) for count in (1 + bisect_left(leaving, excess), len(order))]
        tried: list[Tried] = []
        for window, choice in product(self.windows(), choices):
            self.window = window
            over, step_s, moved = self.score(choice)
            tried.append(((over, step_s, moved), window, choice))
            # This choice keeps the budget in keep's time, and no other is shorter by enough to matter.
            if not over and step_s <= (1 + ALIKE_STEPS) * self.kept.step_s:
                return tried[-1]
        return min(tried, key=lambda one: one[0])

    def _relieved(self, choice: Choice) -> Choice:
        """The choice without the items that would not leave in time, if that scores no worse: they delay the others."""
        stayed = set(self.predict(choice).stayed)
        if not stayed:
            return choice
        items = enumerate(self.workload.items)
        other = _without(choice, {number for number, item in items if stayed.issuperset(item.positions)})
        return other if self.score(other)[:2] <= self.score(choice)[:2] else choice

    # -- plans --------------------------------------------------------------------------------------------------------

    def floor(self) -> int:
        """The lowest peak that moving and waiting reach: without room, forward waits until all that leaves has left."""
        choices = self.keep, self.offload(self.movable())
        return min(self.predict(choice, budget=0).peak_bytes for choice in choices)

    def _over(self, reached: int) -> BudgetError:
        """The error for a budget that no choice keeps, with the lowest peak that one does reach."""
        budget, floor = self.limits.device_budget or 0, self.floor()
        # The error must name a peak above the refused budget. The floor may lie below it: no choice has reached it yet.
        lowest = floor if budget < floor < reached else reached
        return BudgetError(budget, lowest, f"{format_size(lowest)}; the planner reaches {format_size(reached)}")

    def _decline(self, reason: str) -> Plan:
        self.window = None
        return self.finish(self.keep, declined=reason)

    def finish(self, choice: Choice, *, declined: str = "") -> Plan:
        """The plan of a choice; ``declined``: why it moves nothing."""
        seen, profile = self.predict(choice), self.workload.profile
        return Plan(
            self.workload.to_entries(choice, seen.releases),
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
        """The highest peak, in bytes, at which moving is worth its trouble."""
        return min((1 - NO_LOSS) * self.kept.peak_bytes, self.kept.peak_bytes - LEAST_GAIN_BYTES)

    def _why_declined(self, choice: Choice) -> str:
        lowest = min(self.predict(other).peak_bytes for other in (choice, self.offload(self.movable())))
        # Simulated anew: the search's own predictions have no contents of the peak, which take time.
        modules: Counter[str] = Counter()
        peak = run(self.workload, self.keep, self.limits, detail=True).peak
        for p in peak.storages if peak is not None else ():
            modules[self.workload.profile.storages[p].module or ""] += self.workload.nbytes[p]
        where, nbytes = min(modules.items(), key=lambda pair: (-pair[1], pair[0]), default=("", 0))
        why = f"what lowers the peak slows the step by more than {NO_LOSS:.1%}"
        if lowest > self._worth_it:
            why = f"moving lowers the peak by less than {format_size(int(self.kept.peak_bytes - self._worth_it))}"
        most = f"the most, {format_size(nbytes)}, is {where or 'outside any module'}"
        return f"{why}; of the peak of {format_size(self.kept.peak_bytes)} {most}"


def _without(choice: Choice, numbers: Collection[int]) -> Choice:
    """The choice with these items kept."""
    return tuple(KEEP if number in numbers else tier for number, tier in enumerate(choice))


def _least_moved(tried: Sequence[Tried], *, by_time: bool) -> Tried:
    """The best score; among steps of nearly the same length the one that moves the fewest bytes."""
    best = min(tried, key=lambda one: one[0])
    if not by_time:
        return best
    over, step_s, _ = best[0]
    near = [one for one in tried if one[0][0] <= over and one[0][1] <= (1 + ALIKE_STEPS) * step_s]
    return min(near, key=lambda one: (one[0][2], one[0][1]))


class _Regions:
    """Tries sets of regions, each with a few choices of storages that leave."""

    def __init__(self, base: Profile, limits: Limits) -> None:
        self._base, self._limits = base, limits
        # A rank that runs such a region once joins no collective of a second run, and other ranks would wait for it.
        barred = set() if limits.agreed else {region.place for region in base.regions if region.communicates}
        self._places = [place for place in choosable(base) if place not in barred]
        self._seconds, self._saved = dict.fromkeys(self._places, 0.0), dict.fromkeys(self._places, 0)
        for region in base.regions:
            if region.place in self._seconds:
                self._seconds[region.place] += region.recompute_s
                self._saved[region.place] += sum(save.nbytes for save in region.saves)
        self._tried: dict[frozenset[int], Proposal] = {}

    def best(self) -> Proposal:
        """The set with the shortest step within the budget; see the function `propose`."""
        self._try(frozenset())
        for pattern in self._patterns() if self._places else ():
            before, around = (0, 0), (0, len(self._places))
            while around != before:
                before, around = around, self._close_in(pattern, *around)
        best = min(self._tried.values())
        if best.over_bytes:
            budget = self._limits.device_budget or 0
            raise BudgetError(budget, best.peak_bytes, f"{format_size(best.peak_bytes)}, by any mix of regions")
        return best

    def _patterns(self) -> list[Callable[[int], frozenset[int]]]:
        """The sets of regions to try, by their size: the first, the cheapest by the byte, or evenly spread.

        Each has the last region of a forward: all that it saves is resident anyway while it runs again.
        """
        places, count = self._places, len(self._places)
        early = [places[-1], *places[:-1]]
        rates = {place: self._seconds[place] / max(1, self._saved[place]) for place in early}
        most = max(rates.values()) or 1.0
        # Rates within a tenth count as equal and keep the order of `early`: measured times are noisy.
        cheap = sorted(early, key=lambda place: -round(10 * rates[place] / most))
        # Spread from the first to the last, so that the link always has bytes to move.
        return [
            lambda k: frozenset(early[:k]),
            lambda k: frozenset(cheap[:k]),
            lambda k: frozenset(places[-1 - i * (count - 1) // max(1, k - 1)] for i in range(k)),
        ]

    def _close_in(self, pattern: Callable[[int], frozenset[int]], low: int, high: int) -> tuple[int, int]:
        """Try a few sizes from ``low`` to ``high``; return the neighbours of the best of them."""
        counts, found = _spread(low, high), []
        # The largest first: it computes for the shortest time, and a short step rules smaller sets out below.
        for count in reversed(counts):
            once = pattern(count)
            best = min(self._tried.values())
            # Even without a wait this set computes that long, so it cannot beat a shorter step.
            least_s = self._base.step_s - sum(self._seconds[place] for place in once)
            if once in self._tried or best.over_bytes or least_s < best.step_s:
                found.append((self._try(once), count))
        if not found:
            return low, high
        place = counts.index(min(found, key=lambda one: one[0])[1])
        return counts[max(0, place - 1)], counts[min(len(counts) - 1, place + 1)]

    def _try(self, once: frozenset[int]) -> Proposal:
        if once not in self._tried:
            search = Search(with_regions(self._base, once), _of_regions(self._limits, self._base, once))
            (over, step_s, moved), search.window, choice = search.glance()
            peak = search.predict(choice).peak_bytes
            self._tried[once] = Proposal(over_bytes=over, step_s=step_s, moved_bytes=moved, peak_bytes=peak, once=once)
        return self._tried[once]
