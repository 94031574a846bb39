"""What every planner shares: the protocol, the limits, and a bench that tries choices on the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from ...errors import BudgetError, ConfigError
from ...sizes import format_size
from ..constants import COST_OF_A_RUN, CUT_TRIES, FLOOR_TRIES, HOST_SHARE, NO_LOSS, SAFETY
from ..plan import Plan
from ..profile import Profile
from ..simulator import Conditions, Prediction, run
from ..workload import HOST, KEEP, NVME, Choice, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Conditions):
    """What a plan has to respect: the budgets of `Conditions`, and more.

    Attributes:
        max_slowdown: how much slower than keeping all a step may be, as a share; None for no loss (`NO_LOSS`), or for
            whatever a ``device_budget`` costs.
        tiers: where storages may go: ``"host"``, ``"nvme"``.
        recompute: whether blocks may be recomputed, where a step may be slower at all.
    """

    max_slowdown: float | None = None
    tiers: tuple[str, ...] = ("host", "nvme")
    recompute: bool = True

    def __post_init__(self) -> None:
        Conditions.__post_init__(self)  # super() does not work in a dataclass with slots
        slowdown = self.max_slowdown
        if slowdown is not None and (not isinstance(slowdown, (int, float)) or not 0 <= slowdown < float("inf")):
            raise ConfigError("max_slowdown", slowdown, "give a share of the step time, for example 0.02, or None")
        if not set(self.tiers) <= {"host", "nvme"}:
            raise ConfigError("tiers", self.tiers, 'name "host", "nvme" or both')


@runtime_checkable
class Planner(Protocol):
    """One way to plan: a pure function of a profile and limits."""

    @property
    def name(self) -> str:
        """What it is called: `Plan.planner`."""
        ...

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        """The plan.

        Raises:
            BudgetError: no plan of this planner meets ``limits.device_budget``; it says the floor.
        """
        ...


Score = tuple[float, float, float, int]


class Bench:
    """Choices for one profile under limits, tried on the simulator and compared.

    Attributes:
        workload: the prepared profile.
        limits: the limits.
        keep: the choice that keeps all.
        kept: the step with nothing moved.
        allowed_s: the longest step that the limits allow, less a margin; infinite with a ``device_budget`` alone.
        all_groups: the groups of blocks that may be recomputed: none without a budget or a slow-down to pay it with.
        to_host: whether items may go to host memory.
        to_disk: whether they may go to disk.
        window: how far ahead to read; None for the profile's window.
        spent: items simulated so far, as a measure of time without a clock.
    """

    def __init__(self, profile: Profile, limits: Limits) -> None:
        self.workload = Workload(profile)
        self.limits = limits
        self.to_host = profile.host is not None and "host" in limits.tiers
        self.to_disk = profile.disk is not None and "nvme" in limits.tiers
        costs_allowed = limits.device_budget is not None or bool(limits.max_slowdown)
        groups = range(len(self.workload.groups)) if limits.recompute and costs_allowed else ()
        self.all_groups = frozenset(groups)
        self.window: int | None = None
        self.spent = 0
        self._cost = len(self.workload.items) + COST_OF_A_RUN
        self._known: dict[tuple[Choice, int | None, int | None], Prediction] = {}
        self.keep = self.workload.keep_all()
        self.kept = self.predict(self.keep)
        slowdown = limits.max_slowdown
        if slowdown is None:
            slowdown = float("inf") if limits.device_budget is not None else NO_LOSS
        self.allowed_s = self.kept.step_s * (1 + SAFETY * slowdown)

    # -- trying -------------------------------------------------------------------------------------------------------

    def predict(self, choice: Choice, budget: int | None = None) -> Prediction:
        """The step under a choice; ``budget`` replaces the ``device_budget``."""
        key = (choice, self.window, budget)
        found = self._known.get(key)
        if found is None:
            conditions = self.limits if budget is None else replace(self.limits, device_budget=budget)
            found = run(self.workload, choice, conditions, window=self.window)
            self._known[key] = found
            self.spent += self._cost
        return found

    def score(self, choice: Choice) -> Score:
        """Less is better: first the limits, then what is asked for (time or memory), then the rest."""
        seen = self.predict(choice)
        budget = self.limits.device_budget
        late = max(0.0, seen.step_s - self.allowed_s)
        if budget is None:
            return (late, float(seen.peak_bytes), seen.step_s, seen.moved_bytes)
        over = float(max(0, seen.peak_bytes - budget))
        return (over, round(seen.step_s / self.kept.step_s, 9) if self.kept.step_s else 0.0, 0.0, seen.moved_bytes)

    def fits(self, choice: Choice) -> bool:
        """Whether a choice respects the budget, or, without one, the allowed slow-down."""
        return self.score(choice)[0] <= 0.0

    def best(self, choices: Sequence[Choice]) -> Choice:
        """The best choice; the first of equals."""
        return min(choices, key=self.score)

    def lowest_tier(self) -> int:
        """Where an item goes unless something else is said: host memory before disk."""
        if self.to_host:
            return HOST
        return NVME if self.to_disk else KEEP

    # -- making choices -----------------------------------------------------------------------------------------------

    def movable(self, recompute: frozenset[int] = frozenset()) -> list[int]:
        """The items that may move when these groups are recomputed, in the order in which they are saved."""
        if not (self.to_host or self.to_disk):
            return []
        items = self.workload.items
        return [n for n in self.workload.layout(recompute) if items[n].movable]

    def offload(self, numbers: Sequence[int], recompute: frozenset[int] = frozenset()) -> Choice:
        """These items leave, all others stay. To host memory while its budget lasts; what leaves first goes to disk."""
        tiers = [KEEP] * len(self.workload.items)
        items = self.workload.items
        on_disk = self._bytes_for_disk(sum(items[n].nbytes for n in numbers))
        for number in sorted(numbers, key=lambda n: items[n].birth_s):
            if on_disk > 0:
                tiers[number] = NVME
                on_disk -= items[number].nbytes
            else:
                tiers[number] = HOST
        return Choice(tuple(tiers), recompute)

    def _bytes_for_disk(self, nbytes: int) -> float:
        if not self.to_host:
            return float("inf")
        host = self.limits.host_budget
        if not self.to_disk or host is None or nbytes <= host:
            return 0.0
        return nbytes - HOST_SHARE * host

    def offload_all(self, recompute: frozenset[int] = frozenset()) -> Choice:
        """All that may move leaves."""
        return self.offload(self.movable(recompute), recompute)

    def search_cut(self, order: Sequence[int], recompute: frozenset[int] = frozenset()) -> Choice:
        """The first of ``order`` leave: as few as the budget demands, or as many as cost no time.

        Where no number of them fits, the one that comes nearest.
        """
        few, many = 0, len(order)
        want_few = self.limits.device_budget is not None
        good = self.offload(() if want_few else order, recompute)
        if self.fits(good):
            return good
        for _ in range(CUT_TRIES):
            if many - few <= 1:
                break
            middle = (few + many) // 2
            if self.fits(self.offload(order[:middle], recompute)) == want_few:
                many = middle
            else:
                few = middle
        return self.offload(order[: many if want_few else few], recompute)

    # -- plans --------------------------------------------------------------------------------------------------------

    def floor(self) -> tuple[int, Choice]:
        """The lowest peak that waiting, moving and recomputing reach, in bytes, and the choice that reaches it."""
        choices = self.keep, self.offload_all(), self.offload_all(self.all_groups)
        found = min(choices, key=self._waiting_peak)
        largest_first = sorted(self.all_groups, key=lambda n: -self.workload.groups[n].freed_bytes)
        for number in largest_first[:FLOOR_TRIES]:
            other = self.offload_all(found.recompute ^ {number})
            if self._waiting_peak(other) < self._waiting_peak(found):
                found = other
        return self._waiting_peak(found), found

    def _waiting_peak(self, choice: Choice) -> int:
        """The peak if forward waits until all that leaves has left."""
        return self.predict(choice, budget=0).peak_bytes

    def finish(
        self,
        choice: Choice,
        planner: str,
        why: Callable[[int], str] = lambda number: "",
        *,
        declined: str = "",
    ) -> Plan:
        """The plan of a choice.

        Args:
            choice: what is decided.
            planner: who decides.
            why: the reason for an item, by its number.
            declined: why nothing is moved.

        Raises:
            BudgetError: the choice does not meet the budget.
        """
        seen = self.predict(choice)
        budget = self.limits.device_budget
        if budget is not None and seen.peak_bytes > budget:
            floor = self.floor()[0]
            floor = floor if budget < floor < seen.peak_bytes else seen.peak_bytes
            detail = f"{format_size(floor)}; {planner} reaches {format_size(seen.peak_bytes)}"
            raise BudgetError(budget, floor, detail)
        choice = self.relieved(choice)
        seen = self.predict(choice)
        names = sorted(self.workload.groups[n].name for n in choice.recompute)
        arguments = {block.name: block.arguments for block in self.workload.profile.blocks}
        dropped = (b for n in choice.recompute for b in self.workload.groups[n].blocks)
        reasons = [why(number) if choice.tiers[number] != KEEP else "" for number in range(len(choice.tiers))]
        return Plan(
            self.workload.to_entries(choice, reasons, seen.releases),
            planner=planner,
            recompute=tuple(names),
            arguments=tuple(arguments[name] for name in names),
            recompute_bytes=max((self.workload.dropped_bytes[b] for b in dropped), default=0),
            declined=declined,
            prefetch_bytes=self.window or self.workload.profile.prefetch_bytes,
            pending_bytes=seen.pending_peak_bytes,
            predicted_step_s=seen.step_s,
            predicted_peak_bytes=seen.peak_bytes,
            baseline_peak_bytes=self.kept.peak_bytes,
        )

    def relieved(self, choice: Choice) -> Choice:
        """The choice, with what would never leave kept from the start, where that is no worse: it is in others' way."""
        stayed = set(self.predict(choice).stayed)
        if not stayed:
            return choice
        tiers = list(choice.tiers)
        for number, item in enumerate(self.workload.items):
            if stayed.issuperset(item.positions):
                tiers[number] = KEEP
        other = Choice(tuple(tiers), choice.recompute)
        return other if self.score(other)[:2] <= self.score(choice)[:2] else choice
