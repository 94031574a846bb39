"""A plan explained: what is done with each part and why, what sets the peak, what more memory would buy. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby

from ..errors import BudgetError
from ..sizes import format_size
from .constants import BUDGET_SHARES, GIB, MOST_AT_PEAK, MOST_ROWS, NEARLY_ALL, NO_GAIN
from .observed import Observed
from .plan import Plan, regions_in_words
from .profile import Link, Profile
from .search import Limits, best
from .simulator import Prediction, simulate
from .workload import HOST, KEEP, NVME, Workload

OUTSIDE = "(no module)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One part of the model, by its name up to the first number: ``"model.layers.3"``. Bytes and seconds.

    ``held_bytes`` is what its regions hold that run again, in ``recompute_s``; ``peak_bytes`` is on the device when the
    most is.
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
        """What is done, in a few words: ``"keep"``, ``"offload"``, ``"offload 62 %"``, ``"recompute"``, ..."""
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
        recompute_s: what regions that run again take of both.
        more: the plan with a higher budget; None when that was not asked for or there is no budget.
    """

    rows: tuple[Row, ...]
    prediction: Prediction
    keep: Prediction
    recompute_s: float = 0.0
    more: BudgetRow | None = None

    def as_dict(self) -> dict[str, object]:
        """Everything but the lists of storages and times, ready for JSON."""

        def numbers(seen: Prediction) -> dict[str, object]:
            without = {"timeline", "waits", "pressed", "stayed", "at_peak"}
            return {name: value for name, value in asdict(seen).items() if name not in without}

        return {
            "parts": [asdict(row) | {"what": row.what} for row in self.rows],
            "prediction": numbers(self.prediction),
            "keep": numbers(self.keep),
            "recompute_s": self.recompute_s,
            "more": None if self.more is None else asdict(self.more),
        }


def analyse(profile: Profile, plan: Plan, limits: Limits | None = None, *, more: BudgetRow | None = None) -> Analysis:
    """Work out the numbers of a plan that was made for a profile under limits; ``more`` is what `one_more` says."""
    prediction = simulate(profile, plan, limits)
    has_budget = limits is not None and limits.device_budget is not None
    rows = _Parts(profile, plan, prediction, has_budget).rows()
    again_s = sum(region.recompute_s for region in profile.regions)
    return Analysis(rows=rows, prediction=prediction, keep=simulate(profile), recompute_s=again_s, more=more)


def one_more(profile: Profile, plan: Plan, limits: Limits, nbytes: int = GIB) -> BudgetRow | None:
    """Plan with ``nbytes`` more of device budget; None without a budget, as there is nothing to raise."""
    if limits.device_budget is None:
        return None
    (row,) = budget_rows(profile, limits, [limits.device_budget + nbytes])
    if row.step_s is not None and plan.predicted_step_s is not None:
        return replace(row, step_s=min(row.step_s, plan.predicted_step_s))  # the old plan keeps the higher budget too
    return row


def budget_rows(profile: Profile, limits: Limits, budgets: Sequence[int]) -> list[BudgetRow]:
    """Plan a step, regions included, with each of these budgets in place of the limits' own."""
    rows = []
    for budget in budgets:
        try:
            _, plan = best(profile, replace(limits, device_budget=budget, max_slowdown=None))
        except BudgetError:
            rows.append(BudgetRow(device_budget=budget, step_s=None, peak_bytes=None))
            continue
        seen = plan.predicted_step_s, plan.predicted_peak_bytes
        rows.append(BudgetRow(device_budget=budget, step_s=seen[0], peak_bytes=seen[1], once=len(plan.once)))
    return rows


def budget_table(profile: Profile, limits: Limits) -> list[BudgetRow]:
    """What a step takes and how high it peaks with several budgets, the largest first.

    They are `BUDGET_SHARES` of the peak with nothing moved, and the limits' own.
    """
    budgets = {int(share * profile.baseline_peak_bytes) for share in BUDGET_SHARES}
    budgets |= {limits.device_budget or 0}
    return budget_rows(profile, limits, sorted(budgets - {0}, reverse=True))


def part_of(module: str | None) -> str:
    """The part of the model that a module is in: its name up to the first number."""
    if not module:
        return OUTSIDE
    names = module.split(".")
    number = next((place for place, name in enumerate(names) if name.isdigit()), len(names))
    return ".".join(names[: number + 1])


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
        self.at_peak = set(prediction.at_peak)

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
        shortest, longest = (extreme(map(self._idle_s, moved)) for extreme in (min, max))
        text = f"idle {_range(shortest, longest)}"
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
        """How long that link takes there and back."""
        link = self.link
        return 0.0 if link is None else nbytes / link.write_bytes_per_s + nbytes / link.read_bytes_per_s


# -- text -------------------------------------------------------------------------------------------------------------


def render_plan(
    profile: Profile,
    plan: Plan,
    limits: Limits | None = None,
    *,
    analysis: Analysis | None = None,
    seen: Observed | None = None,
) -> str:
    """Explain a plan in several lines of text.

    Args:
        profile: what it was made from.
        plan: the plan.
        limits: what it was made under; None for no limits.
        analysis: what `analyse` says; None to work it out here.
        seen: steps as they really were under it; None when none has run yet.
    """
    limits = limits or Limits()
    analysis = analysis or analyse(profile, plan, limits)
    rows = list(analysis.rows)
    if len(rows) > MOST_ROWS:
        rows = _merged(rows)
    return "\n".join(
        [
            *_headline(profile, plan, limits),
            *_table(_comparison(analysis, seen), left=1),
            "",
            *_table([_COLUMNS, *map(_cells, rows)], left=2),
            "  (added: by waiting)",
            "why",
            *(f"  {_span(*run)}: {why}" for why, run in groupby(rows, key=lambda row: row.why)),
            "",
            *_peak(analysis),
            *_more(analysis, limits),
        ]
    )


def render_decisions(plan: Plan, target: str) -> str:
    """One line for each run of neighbouring storages of which the same was decided.

    Args:
        plan: what was decided in the last forward, as `Offloader.plan` says.
        target: where storages were sent.
    """
    if not plan.entries:
        return f"actoffload (target {target}): no forward has saved anything yet."
    lines = [
        f"last forward: {len(plan.entries)} storages saved, {format_size(plan.offloaded_bytes)} sent to "
        f"{target}, {format_size(plan.kept_bytes)} kept"
    ]
    for (action, reason, module), run in groupby(plan.entries, key=lambda e: (e.action, e.reason, e.module)):
        entries = list(run)
        first, last = entries[0].index, entries[-1].index
        place = f"{first}" if first == last else f"{first}-{last}"
        size = format_size(sum(entry.nbytes for entry in entries))
        why = f" ({reason})" if reason else ""
        where = f" in {module}" if module else ""
        lines.append(f"  {place:>9}  {size:>10}  {action}{why}{where}")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines with columns as wide as they need to be, the first ``left`` of them aligned left, the others right.

    Columns on the right that say nothing are left out.
    """
    columns = [c for n, c in enumerate(zip(*rows, strict=True)) if n < left or set(c[1:]) != {"-"}]
    aligned = []
    for number, column in enumerate(columns):
        width = max(map(len, column))
        aligned.append([cell.ljust(width) if number < left else cell.rjust(width) for cell in column])
    return [f"  {'  '.join(cells)}".rstrip() for cells in zip(*aligned, strict=True)]


def _headline(profile: Profile, plan: Plan, limits: Limits) -> list[str]:
    """Who planned what for which step, and the plan in one line."""
    bounds = []
    if limits.device_budget is not None:
        bounds.append(f"device budget {format_size(limits.device_budget)}")
    if limits.max_slowdown is not None:
        bounds.append(f"at most {limits.max_slowdown:.1%} slower")
    links = [
        f"{name} {link.write_bytes_per_s / 1e9:.3g} GB/s out, {link.read_bytes_per_s / 1e9:.3g} back"
        for name, link in (("host", profile.host), ("disk", profile.disk))
        if link
    ]
    first = (
        f"plan of {plan.planner or 'unknown'} on {profile.device}, {', '.join(bounds) or 'no budget'}; "
        f"{'; '.join(links) or 'no link was measured'}"
    )
    regions = [regions_in_words(plan.regions, len(plan.once))] if plan.regions else []
    if plan.declined:
        return [first, f"declined: {plan.declined}", *regions]
    return [first, f"{format_size(plan.offloaded_bytes)} leave, {format_size(plan.kept_bytes)} stay", *regions]


def _comparison(analysis: Analysis, seen: Observed | None) -> list[tuple[str, ...]]:
    after, keep = analysis.prediction, analysis.keep
    step = forward = backward = peak = hooks = idle = "-"
    again = format_time(analysis.recompute_s)
    if seen is not None:
        hooks, idle = (format_time(seconds) if seconds else "-" for seconds in (seen.hooks_s, seen.idle_s))
        step, forward, backward = map(format_time, (seen.step_s, seen.forward_wait_s, seen.backward_wait_s))
        peak = "-" if seen.peak_bytes is None else format_size(seen.peak_bytes)
    return [
        ("", "predicted", "seen", "nothing moved"),
        ("step", format_time(after.step_s), step, format_time(keep.step_s)),
        ("forward waits", format_time(after.forward_wait_s), forward, "-"),
        ("backward waits", format_time(after.backward_wait_s), backward, "-"),
        *([("recomputing", again, "-", again)] if analysis.recompute_s else ()),
        *([("hooks that move", "-", hooks, "-"), ("device idle for them", "-", idle, "-")] if hooks != "-" else ()),
        ("activation peak", format_size(after.peak_bytes), peak, format_size(keep.peak_bytes)),
    ]


_COLUMNS = ("part", "what", "saves", "holds", "again", "added", "at the peak")


def _cells(row: Row) -> tuple[str, ...]:
    held = format_size(row.held_bytes) if row.held_bytes else "-"
    times = [format_time(time_s) if time_s else "-" for time_s in (row.recompute_s, row.wait_s)]
    return row.name, row.what, format_size(row.saved_bytes), held, *times, format_size(row.peak_bytes)


def _merged(rows: Sequence[Row]) -> list[Row]:
    """Neighbours with the same treatment as one row, their sum."""
    merged = []
    for _, run in groupby(rows, key=lambda row: (row.what, row.name == OUTSIDE)):
        first, *others = run
        summed = [f.name for f in fields(first) if f.name.endswith(("_bytes", "_s"))]
        sums = {name: sum((getattr(row, name) for row in others), getattr(first, name)) for name in summed}
        merged.append(replace(first, name=_span(first, *others), **sums))
    return merged


def _span(first: Row, *others: Row) -> str:
    return f"{first.name} … {others[-1].name}" if others else first.name


def _peak(analysis: Analysis) -> list[str]:
    """What sets the peak."""
    peak = analysis.prediction.peak
    if peak is None or not analysis.prediction.peak_bytes:
        return ["nothing is saved"]
    kinds = ", ".join(f"{format_size(n)} {kind}" for kind, n in peak.bytes_by_kind.items() if n)
    largest = sorted((row for row in analysis.rows if row.peak_bytes), key=lambda row: -row.peak_bytes)[:MOST_AT_PEAK]
    where = ", ".join(f"{row.name} {format_size(row.peak_bytes)}" for row in largest)
    total = format_size(analysis.prediction.peak_bytes)
    return [f"the peak, {total}, is at {format_time(peak.time_s)} in {peak.phase}: {kinds}", f"  most of it: {where}"]


def _more(analysis: Analysis, limits: Limits) -> list[str]:
    """What more memory would buy."""
    more = analysis.more
    if more is None or limits.device_budget is None:
        return []
    extra = format_size(more.device_budget - limits.device_budget)
    if more.step_s is None:
        return [f"{extra} more of budget: still no plan keeps it"]
    now_s = analysis.prediction.step_s
    gain = now_s - more.step_s
    if gain <= NO_GAIN * now_s:
        return [f"{extra} more of budget would buy no time"]
    bought = f"{format_time(gain)} a step ({gain / now_s:.1%}): {format_time(more.step_s)}"
    return [f"{extra} more of budget would buy {bought}"]


def render_budgets(rows: Sequence[BudgetRow]) -> str:
    """The rows of `budget_table` as lines of text, under a heading."""
    shown = [("device budget", "step", "peak", "regions run once")]
    for row in rows:
        step = "no plan keeps it" if row.step_s is None else format_time(row.step_s)
        peak = "-" if row.peak_bytes is None else format_size(row.peak_bytes)
        shown.append((format_size(row.device_budget), step, peak, str(row.once or "-")))
    return "\n".join(["other budgets", *_table(shown, left=0)])


def format_time(time_s: float) -> str:
    """A time for a person: ``"12.3 ms"``, from one second on ``"1.23 s"``."""
    if time_s >= 999.5:
        return f"{time_s:.0f} s"
    return f"{time_s:.3g} s" if time_s >= 0.9995 or not time_s else f"{1e3 * time_s:.3g} ms"


def _range(shortest_s: float, longest_s: float) -> str:
    """A range of times in the unit of the longest."""
    if format_time(shortest_s) == format_time(longest_s):
        return format_time(longest_s)
    scale = 1.0 if format_time(longest_s).endswith(" s") else 1e3
    return f"{scale * shortest_s:.3g} to {format_time(longest_s)}"
