"""A plan explained: what is done with each block and why, what sets the peak, what more memory would buy. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import Any

from ..errors import BudgetError
from ..sizes import format_size
from . import search
from .constants import BUDGET_SHARES, GIB, JUST_BELOW, MOST_AT_PEAK, MOST_ROWS, NEARLY_ALL, NO_GAIN, ROOM_FOR_A_BLOCK
from .observed import Observed
from .plan import Plan
from .planners.base import Limits, Planner
from .profile import Link, Profile
from .simulator import Prediction, simulate
from .workload import ABSENT, DROPPED, HOST, KEEP, NVME, Workload

OUTSIDE = "(outside blocks)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One block of a plan (or `OUTSIDE`), all its runs in the step together. Sizes in bytes, times in seconds.

    ``saved_bytes`` is what it saves when nothing is recomputed; ``peak_bytes`` is on the device when the most is.
    ``seen_s`` is what its forward and backward really took under the plan, without waits; 0 where nobody looked.
    """

    name: str
    saved_bytes: int
    kept_bytes: int
    host_bytes: int
    disk_bytes: int
    recomputed_bytes: int
    forward_s: float
    backward_s: float
    recompute_s: float
    wait_s: float
    peak_bytes: int
    why: str
    seen_s: float = 0.0

    @property
    def what(self) -> str:
        """What is done, in a few words: ``"keep"``, ``"offload"``, ``"offload 62 %"``, ``"recompute"``, ..."""
        if self.recomputed_bytes:
            return "recompute"
        moved = self.host_bytes + self.disk_bytes
        total = moved + self.kept_bytes
        if not moved:
            return "keep" if total else "-"
        return "offload" if moved >= NEARLY_ALL * total else f"offload {moved / total:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """The step planned with one ``device_budget``: its time, its peak, how many blocks it recomputes. Bytes, seconds.

    ``step_s`` and ``peak_bytes`` are None where no plan keeps the budget. ``note`` says what is special about it.
    """

    device_budget: int
    step_s: float | None
    peak_bytes: int | None
    recomputed: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A plan in numbers.

    Attributes:
        rows: the blocks in the order in which they run, and what is outside them.
        prediction: the step under the plan.
        keep: the step with nothing moved.
        more: the plan with a higher budget; None when that was not asked for or there is no budget.
    """

    rows: tuple[BlockRow, ...]
    prediction: Prediction
    keep: Prediction
    more: BudgetRow | None = None

    def as_dict(self) -> dict[str, object]:
        """Everything but the lists of storages and times, ready for JSON."""

        def numbers(seen: Prediction) -> dict[str, object]:
            without = {"timeline", "waits", "pressed", "stayed", "at_peak"}
            return {name: value for name, value in asdict(seen).items() if name not in without}

        return {
            "blocks": [asdict(row) | {"what": row.what} for row in self.rows],
            "prediction": numbers(self.prediction),
            "keep": numbers(self.keep),
            "more": None if self.more is None else asdict(self.more),
        }


def analyse(profile: Profile, plan: Plan, limits: Limits | None = None, *, more: BudgetRow | None = None) -> Analysis:
    """Work out the numbers of a plan that was made for a profile under limits; ``more`` is what `one_more` says.

    Raises:
        ConfigError: the plan is for another profile.
    """
    prediction = simulate(profile, plan, limits)
    has_budget = limits is not None and limits.device_budget is not None
    rows = _Blocks(profile, plan, prediction, has_budget).rows()
    return Analysis(rows=rows, prediction=prediction, keep=simulate(profile), more=more)


def one_more(profile: Profile, plan: Plan, limits: Limits, planner: Planner, nbytes: int = GIB) -> BudgetRow | None:
    """Plan with ``nbytes`` more of device budget; None without a budget, as there is nothing to raise."""
    if limits.device_budget is None:
        return None
    (row,) = budget_rows(profile, limits, planner, [limits.device_budget + nbytes])
    if row.step_s is not None and plan.predicted_step_s is not None:
        return replace(row, step_s=min(row.step_s, plan.predicted_step_s))  # the old plan keeps the higher budget too
    return row


def budget_rows(profile: Profile, limits: Any, budgets: Sequence[int]) -> list[BudgetRow]:
    """Plan a step with each of these budgets in place of the limits' own."""
    rows = []
    for budget in budgets:
        block, _ = next_block(profile, budget) if getattr(limits, "recompute", False) else (0, 0)
        note = f"just below one block ({format_size(block)}), which cannot be recomputed" if block else ""
        try:
            plan = search.plan(profile, replace(limits, device_budget=budget, max_slowdown=None))
        except BudgetError:
            rows.append(BudgetRow(device_budget=budget, step_s=None, peak_bytes=None, note=note))
            continue
        seen = plan.predicted_step_s, plan.predicted_peak_bytes, len(plan.recompute)
        rows.append(BudgetRow(device_budget=budget, step_s=seen[0], peak_bytes=seen[1], recomputed=seen[2], note=note))
    return rows


def budget_table(profile: Profile, limits: Limits, planner: object = None) -> list[BudgetRow]:
    """What a step takes and how high it peaks with several budgets, the largest first.

    They are `BUDGET_SHARES` of the peak with nothing moved, the limits' own, and for one that lies just below a block
    the one from which on that block can be recomputed.
    """
    budgets = {int(share * profile.baseline_peak_bytes) for share in BUDGET_SHARES}
    if limits.device_budget is not None:
        budgets.add(limits.device_budget)
        if getattr(limits, "recompute", False):
            budgets.add(next_block(profile, limits.device_budget)[1])
    return budget_rows(profile, limits, sorted(budgets - {0}, reverse=True))


def next_block(profile: Profile, budget: int) -> tuple[int, int]:
    """The smallest block that a budget lies just below, in bytes, and a budget that has room for it; else zeros.

    To recompute a block, its input and all that it saves must be on the device at once.
    """
    work = Workload(profile)
    blocks = [block for group in work.groups for block in group.blocks]
    sizes = [work.dropped_bytes[block] + work.nbytes[work.block_input[block]] for block in blocks]
    block = min((size for size in sizes if budget < size <= JUST_BELOW * budget), default=0)
    return block, int(ROOM_FOR_A_BLOCK * block)


class _Blocks:
    """Makes the rows of one plan."""

    def __init__(self, profile: Profile, plan: Plan, prediction: Prediction, has_budget: bool) -> None:
        self.profile, self.plan, self.has_budget = profile, plan, has_budget
        self.workload = Workload(profile)
        choice = self.workload.from_plan(plan)
        self.modes = self.workload.modes(choice)
        for position in prediction.pressed:
            self.modes[position] = KEEP
        self.recomputed = {b for group in choice.recompute for b in self.workload.groups[group].blocks}
        self.waited: dict[int, float] = {}
        for position, wait_s in prediction.waits:
            self.waited[position] = self.waited.get(position, 0.0) + wait_s
        self.at_peak = set(prediction.at_peak)

    def rows(self) -> tuple[BlockRow, ...]:
        blocks: dict[str, list[int]] = {}
        for number, block in enumerate(self.profile.blocks):
            blocks.setdefault(block.name, []).append(number)
        rows = [self._row(name, numbers) for name, numbers in blocks.items()]
        outside = self._row(OUTSIDE, [])
        return (*rows, outside) if outside.saved_bytes else tuple(rows)

    def _row(self, name: str, blocks: list[int]) -> BlockRow:
        storages, count, nbytes = self.profile.storages, self.workload.count, self.workload.nbytes
        members = [p for p, s in enumerate(storages) if (s.block in blocks if blocks else s.block is None)]
        everything = members + [count + b for b in blocks if self.modes[count + b] != ABSENT]
        by_mode = dict.fromkeys((KEEP, HOST, NVME, DROPPED), 0)
        for p in everything:
            by_mode[self.modes[p]] += nbytes[p]
        parts = [self.profile.blocks[b] for b in blocks]
        again = [b for b in blocks if b in self.recomputed]
        return BlockRow(
            name=name,
            saved_bytes=sum(nbytes[p] for p in members),
            kept_bytes=by_mode[KEEP],
            host_bytes=by_mode[HOST],
            disk_bytes=by_mode[NVME],
            recomputed_bytes=by_mode[DROPPED],
            forward_s=sum(block.forward_s for block in parts),
            backward_s=sum(block.backward_s for block in parts),
            recompute_s=sum(self.profile.blocks[b].recompute_s for b in again),
            wait_s=sum(self.waited.get(p, 0.0) for p in everything),
            peak_bytes=sum(nbytes[p] for p in everything if p in self.at_peak),
            why=self._why_recomputed(again) if again else self._why(members),
        )

    def _why_recomputed(self, blocks: list[int]) -> str:
        freed = sum(self.workload.dropped_bytes[b] for b in blocks)
        text = f"{format_time(sum(self.profile.blocks[b].recompute_s for b in blocks))} frees {format_size(freed)}"
        if self.link is not None:
            text += f", moving takes {format_time(self._move_s(freed))}"
        leaves = any(self.modes[self.workload.block_input[b]] in (HOST, NVME) for b in blocks)
        return f"{text}; its input leaves" if leaves else text

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

    Raises:
        ConfigError: the plan is for another profile.
    """
    limits = limits or Limits()
    analysis = analysis or analyse(profile, plan, limits)
    times = dict(seen.blocks) if seen is not None else {}
    rows = [replace(row, seen_s=times.get(row.name, 0.0)) for row in analysis.rows]
    if len(rows) > MOST_ROWS:
        rows = _merged(rows)
    return "\n".join(
        [
            *_headline(profile, plan, limits),
            *_table(_comparison(analysis, seen), left=1),
            "",
            *_table([_COLUMNS, *map(_cells, rows)], left=2),
            "  (added: by recomputing and by waiting)",
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
    if plan.declined:
        return [first, f"declined: {plan.declined}"]
    count = len(plan.recompute)
    dropped = f", {count} block{'s' * (count > 1)} recomputed" if count else ""
    return [first, f"{format_size(plan.offloaded_bytes)} leave, {format_size(plan.kept_bytes)} stay{dropped}"]


def _comparison(analysis: Analysis, seen: Observed | None) -> list[tuple[str, ...]]:
    after, keep = analysis.prediction, analysis.keep
    step = forward = backward = peak = hooks = idle = "-"
    if seen is not None:
        hooks, idle = (format_time(seconds) if seconds else "-" for seconds in (seen.hooks_s, seen.idle_s))
        step, forward, backward = map(format_time, (seen.step_s, seen.forward_wait_s, seen.backward_wait_s))
        peak = "-" if seen.peak_bytes is None else format_size(seen.peak_bytes)
    return [
        ("", "predicted", "seen", "nothing moved"),
        ("step", format_time(after.step_s), step, format_time(keep.step_s)),
        ("forward waits", format_time(after.forward_wait_s), forward, "-"),
        ("backward waits", format_time(after.backward_wait_s), backward, "-"),
        ("recomputing", format_time(after.recompute_s), "-", "-"),
        *([("hooks that move", "-", hooks, "-"), ("device idle for them", "-", idle, "-")] if hooks != "-" else ()),
        ("activation peak", format_size(after.peak_bytes), peak, format_size(keep.peak_bytes)),
    ]


_COLUMNS = ("block", "what", "saves", "forward", "backward", "added", "seen", "at the peak")


def _cells(row: BlockRow) -> tuple[str, ...]:
    times = (row.forward_s, row.backward_s, row.recompute_s + row.wait_s, row.seen_s)
    shown = [format_time(time_s) if time_s else "-" for time_s in times]
    return row.name, row.what, format_size(row.saved_bytes), *shown, format_size(row.peak_bytes)


def _merged(rows: Sequence[BlockRow]) -> list[BlockRow]:
    """Neighbours with the same treatment as one row, their sum."""
    merged = []
    for _, run in groupby(rows, key=lambda row: (row.what, row.name == OUTSIDE)):
        first, *others = run
        summed = [f.name for f in fields(first) if f.name.endswith(("_bytes", "_s"))]
        sums = {name: sum((getattr(row, name) for row in others), getattr(first, name)) for name in summed}
        merged.append(replace(first, name=_span(first, *others), **sums))
    return merged


def _span(first: BlockRow, *others: BlockRow) -> str:
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
    shown = [("device budget", "step", "peak", "blocks recomputed", "")]
    for row in rows:
        step = "no plan keeps it" if row.step_s is None else format_time(row.step_s)
        peak = "-" if row.peak_bytes is None else format_size(row.peak_bytes)
        shown.append((format_size(row.device_budget), step, peak, str(row.recomputed or "-"), row.note))
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
