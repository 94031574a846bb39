"""A plan in numbers: each part of the model with its treatment, the peak, and the step with other budgets.

No torch, no clock: simulations of recorded steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from ..errors import BudgetError
from ..planning.plan import Plan
from ..planning.profile import Link, Profile
from ..planning.search import Limits, best
from ..planning.simulator import Prediction, simulate
from ..planning.workload import HOST, KEEP, NVME, Workload
from ..policy import part_of
from ..sizes import format_size, format_time

BUDGET_SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
"""Shares of keep's peak in a table of budgets."""
NEARLY_ALL = 0.98
"""Share of a part's bytes. If this much moves, the part is shown as offloaded, without a number."""
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One part of the model, by its name up to the first number: ``"model.layers.3"``. Bytes and seconds.

    ``held_bytes`` is held by its regions that run again, in ``recompute_s``. ``peak_bytes`` is its part of the peak.
    """

    name: str
    saved_bytes: int
    kept_bytes: int
    host_bytes: int
    disk_bytes: int
    held_bytes: int
    recompute_s: float
    wait_s: float
    peak_bytes: int
    why: str

    @property
    def what(self) -> str:
        """The treatment in a few words: ``"keep"``, ``"offload"``, ``"offload 62 %"``, ``"recompute"``, ..."""
        if self.held_bytes or self.recompute_s:
            return "recompute"
        moved = self.host_bytes + self.disk_bytes
        total = moved + self.kept_bytes
        if not moved:
            return "keep" if total else "-"
        return "offload" if moved >= NEARLY_ALL * total else f"offload {moved / total:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """The step planned with one ``device_budget``: its time, its peak, how many regions run once. Bytes, seconds.

    ``step_s`` and ``peak_bytes`` are None where no plan keeps the budget.
    """

    device_budget: int
    step_s: float | None
    peak_bytes: int | None
    once: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A plan in numbers.

    Attributes:
        rows: the parts of the model in the order in which they save.
        prediction: the step under the plan.
        keep: the step with nothing moved.
        recompute_s: the part of both steps in which regions run again.
    """

    rows: tuple[Row, ...]
    prediction: Prediction
    keep: Prediction
    recompute_s: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Everything but the lists of storages, ready for JSON."""

        def numbers(seen: Prediction) -> dict[str, object]:
            found = asdict(seen)
            for name in ("waits", "pressed", "stayed"):
                del found[name]
            for tier in ("host", "disk"):
                found |= {f"{tier}_{name}": nbytes for name, nbytes in found.pop(tier).items()}
            if found["peak"] is not None:
                del found["peak"]["storages"]
            return found

        return {
            "parts": [asdict(row) | {"what": row.what} for row in self.rows],
            "prediction": numbers(self.prediction),
            "keep": numbers(self.keep),
            "recompute_s": self.recompute_s,
        }


def analyse(profile: Profile, plan: Plan, limits: Limits | None = None) -> Analysis:
    """Compute the numbers of a plan that was made for a profile under limits."""
    prediction = simulate(profile, plan, limits)
    has_budget = limits is not None and limits.device_budget is not None
    rows = _Parts(profile, plan, prediction, has_budget).rows()
    again_s = sum(region.recompute_s for region in profile.regions)
    return Analysis(rows=rows, prediction=prediction, keep=simulate(profile), recompute_s=again_s)


def budget_table(profile: Profile, limits: Limits) -> list[BudgetRow]:
    """The time and the peak of a step with several budgets, the largest first.

    The budgets are `BUDGET_SHARES` of the peak with nothing moved, and the limits' own. A share is rounded up to a
    figure that a person can write as an option.
    """
    unit = MIB if profile.baseline_peak_bytes >= 64 * MIB else KIB
    budgets = {-(-int(share * profile.baseline_peak_bytes) // unit) * unit for share in BUDGET_SHARES}
    budgets |= {limits.device_budget or 0}
    rows = []
    for budget in sorted(budgets - {0}, reverse=True):
        try:
            _, plan = best(profile, replace(limits, device_budget=budget))
        except BudgetError:
            rows.append(BudgetRow(device_budget=budget, step_s=None, peak_bytes=None))
            continue
        step_s, peak_bytes = plan.predicted_step_s, plan.predicted_peak_bytes
        rows.append(BudgetRow(device_budget=budget, step_s=step_s, peak_bytes=peak_bytes, once=len(plan.once)))
    return rows


class _Parts:
    """Makes the rows of one plan."""

    def __init__(self, profile: Profile, plan: Plan, prediction: Prediction, has_budget: bool) -> None:
        self.profile, self.plan, self.has_budget = profile, plan, has_budget
        self.workload = Workload(profile)
        self.modes = self.workload.modes(self.workload.from_plan(plan))
        for position in prediction.pressed:
            self.modes[position] = KEEP
        self.waited: dict[int, float] = {}
        for position, wait_s in prediction.waits:
            self.waited[position] = self.waited.get(position, 0.0) + wait_s
        self.at_peak = set() if prediction.peak is None else set(prediction.peak.storages)

    def rows(self) -> tuple[Row, ...]:
        parts: dict[str, list[int]] = {}
        for number, storage in enumerate(self.profile.storages):
            parts.setdefault(part_of(storage.module), []).append(number)
        for region in self.profile.regions:
            parts.setdefault(part_of(region.name), [])
        return tuple(self._row(name, numbers) for name, numbers in parts.items())

    def _row(self, name: str, members: list[int]) -> Row:
        held = [p for p in members if self.workload.held[p]]
        own = [p for p in members if not self.workload.held[p]]
        by_mode = {mode: self._bytes(p for p in own if self.modes[p] == mode) for mode in (KEEP, HOST, NVME)}
        again_s = sum(region.recompute_s for region in self.profile.regions if part_of(region.name) == name)
        return Row(
            name=name,
            saved_bytes=self._bytes(own),
            kept_bytes=by_mode[KEEP],
            host_bytes=by_mode[HOST],
            disk_bytes=by_mode[NVME],
            held_bytes=self._bytes(held),
            recompute_s=again_s,
            wait_s=sum(self.waited.get(p, 0.0) for p in members),
            peak_bytes=self._bytes(p for p in members if p in self.at_peak),
            why=self._why_again(again_s, self._bytes(held), own) if again_s else self._why(own),
        )

    def _bytes(self, positions: Iterable[int]) -> int:
        return sum(self.workload.nbytes[p] for p in positions)

    def _why_again(self, again_s: float, nbytes: int, own: list[int]) -> str:
        text = f"run again in {format_time(again_s)} for {format_size(nbytes)}"
        if self.link is not None:
            text += f", which moves in {format_time(self._move_s(nbytes))}"
        return f"{text}; its input leaves" if any(self.modes[p] != KEEP for p in own) else text

    def _why(self, members: list[int]) -> str:
        moved = [p for p in members if self.modes[p] in (HOST, NVME)]
        kept = [p for p in members if self.modes[p] == KEEP and self.workload.nbytes[p]]
        why_kept = self._why_kept(kept) if kept else ""
        if not moved:
            return why_kept or "saves nothing"
        idle = dict.fromkeys(format_time(extreme(map(self._idle_s, moved))) for extreme in (min, max))
        text = f"idle {' to '.join(idle)}"
        text += f", moved in {format_time(self._move_s(sum(self.workload.nbytes[p] for p in moved)))}"
        return f"{text}; rest: {why_kept}" if why_kept else text

    def _why_kept(self, positions: list[int]) -> str:
        storages = self.profile.storages
        fixed: Counter[str] = Counter()
        for p in positions:
            if not storages[p].movable:
                fixed[storages[p].kept or "not recorded"] += storages[p].nbytes
        if 2 * fixed.total() >= sum(storages[p].nbytes for p in positions):
            return f"must stay: {fixed.most_common(1)[0][0]}"
        if self.plan.declined:
            return "the plan declines to move"
        if all(self._move_s(storages[p].nbytes) > self._idle_s(p) for p in positions if storages[p].movable):
            return "needed again before it could be back"
        return "the budget has room" if self.has_budget else "no time left on the link"

    def _idle_s(self, position: int) -> float:
        storage = self.profile.storages[position]
        return (storage.last_need_s if storage.need_s is None else storage.need_s) - storage.birth_s

    @property
    def link(self) -> Link | None:
        """The first link on the way out."""
        return self.profile.host or self.profile.disk

    def _move_s(self, nbytes: int) -> float:
        """How long that link takes for both ways."""
        link = self.link
        return 0.0 if link is None else nbytes / link.write_bytes_per_s + nbytes / link.read_bytes_per_s
