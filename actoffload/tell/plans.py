"""A plan explained in text: its parts, its peak, and other budgets; and the reasons for the last plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from ..planning.constants import REVIEW_STEPS, WARM_UP
from ..planning.observed import Observed, PlanFacts, ShapeFacts
from ..planning.plan import Plan, regions_in_words
from ..planning.profile import Profile
from ..planning.search import Limits
from ..policy import OUTSIDE
from ..sizes import format_size, format_time
from .facts import machine_changed
from .parts import Analysis, BudgetRow, Row, analyse

MOST_ROWS = 24
"""Lines of parts at most; neighbours with the same decision share one."""
MOST_AT_PEAK = 3
"""How many modules with the most bytes at the peak a plan's explanation names."""


def explain_plans(facts: PlanFacts) -> str:
    """The plan that is followed, by part of the model, with predicted beside seen numbers; and why plans were made."""
    shape = facts.shape
    lines = [f"inputs {summary(other)}" for other in facts.others]
    lines += [f"plan {number}: {reason}" for number, reason in enumerate(facts.history, start=1)]
    rest = [f"nothing moves: the next {facts.rest} steps run without hooks"] if facts.rest else []
    if shape.plan is None or shape.profile is None:
        if rest:
            return "\n".join([f"no plan for inputs {shape.inputs}", *rest, *lines])
        first = f"it is made from what the first {WARM_UP + 1} steps show"
        if facts.stuck:
            first = (
                "no step has ended, as something that a forward saved is alive all the time, such as a loss that "
                "somebody keeps: keep loss.detach() or loss.item() instead"
            )
        elif facts.others:
            return "\n".join([f"no plan yet for inputs {shape.inputs}: it is made from what a step shows", *lines])
        return "\n".join([f"no plan yet: {first}", *lines])
    age = f"measured: in the step recorded {facts.recorded_ago} step{'s' * (facts.recorded_ago != 1)} ago"
    if facts.probes:
        age += f"; one storage in {REVIEW_STEPS} steps moves only to be measured"
    plan = render_plan(shape.profile, shape.plan, facts.limits, seen=shape.seen)
    return "\n".join([plan, *([regions_line(shape)] if shape.regions else []), age, *rest, *lines])


def regions_line(shape: ShapeFacts) -> str:
    """How checkpointed regions run, and the prediction beside the step in which all of them run again."""
    text = f"{shape.regions} checkpointed regions: {shape.once} no longer run again"
    if shape.predicted_s and shape.base_s:
        text += f", predicted {shape.predicted_s / shape.base_s:.2f} x the step"
    peak = (shape.plan.predicted_peak_bytes or 0) if shape.plan is not None else 0
    if shape.device_bytes:
        return f"{text}, peak {format_size(peak + shape.other_bytes)} of {format_size(shape.device_bytes)}"
    own = format_size(shape.base_bytes)
    return f"{text}, peak of saved tensors {format_size(peak)} of {own} that the program's own checkpoints hold"


def summary(shape: ShapeFacts) -> str:
    """The plan for steps of one shape, in one line."""
    plan = shape.plan
    if plan is None:
        return f"{shape.inputs}: no plan yet"
    parts = [f"{shape.inputs}: {format_size(plan.offloaded_bytes)} leave, {format_size(plan.kept_bytes)} stay"]
    if shape.regions:
        parts.append(f"{shape.once} of {shape.regions} checkpointed regions run once")
    if plan.predicted_step_s is not None:
        parts.append(f"a step is predicted to take {format_time(plan.predicted_step_s)}")
    if shape.seen is not None:
        parts.append(f"takes {format_time(shape.seen.step_s)}")
    return ", ".join(parts)


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
        profile: the recorded step that it was made from.
        plan: the plan.
        limits: the limits that it was made under; None for no limits.
        analysis: the result of `analyse`; None to compute it here.
        seen: measured steps under the plan; None when none has run yet.
    """
    limits = limits or Limits()
    analysis = analysis or analyse(profile, plan, limits)
    groups = _groups(analysis.rows, lambda row: (row.saved_bytes, row.held_bytes))
    if len(groups) > MOST_ROWS:
        groups = _groups(analysis.rows, lambda row: None)
    return "\n".join(
        [
            *_headline(profile, plan, limits),
            *_table(_comparison(analysis, seen), left=1),
            *filter(None, [machine_changed(profile, seen)]),
            "",
            *_table([_COLUMNS, *map(_cells, groups)], left=2),
            "  (added: by waiting)",
            "why",
            *_whys(groups),
            "",
            *_peak(analysis),
        ]
    )


def render_decisions(plan: Plan, target: str, *, each: bool) -> str:
    """The sums of a forward's decisions, and a line for each run of neighbouring storages with the same one.

    Args:
        plan: the decisions of the last forward, as in `Offloader.plan`.
        target: the tier that storages were sent to.
        each: with these lines.
    """
    if not plan.entries:
        return f"actoffload (target {target}): no forward has saved anything yet."
    lines = [
        f"last forward: {len(plan.entries)} storages saved, {format_size(plan.offloaded_bytes)} sent to "
        f"{target}, {format_size(plan.kept_bytes)} kept{'' if each else '; explain(tensors=True) lists them'}"
    ]
    if not each:
        return lines[0]
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
    """Lines of aligned columns: the first ``left`` columns to the left, all following ones to the right.

    Empty columns on the right are left out.
    """
    columns = [c for n, c in enumerate(zip(*rows, strict=True)) if n < left or set(c[1:]) != {"-"}]
    aligned = []
    for number, column in enumerate(columns):
        width = max(map(len, column))
        aligned.append([cell.ljust(width) if number < left else cell.rjust(width) for cell in column])
    return [f"  {'  '.join(cells)}".rstrip() for cells in zip(*aligned, strict=True)]


def _headline(profile: Profile, plan: Plan, limits: Limits) -> list[str]:
    """The planner, its limits and links, and the plan in one line."""
    budget = "no budget" if limits.device_budget is None else f"device budget {format_size(limits.device_budget)}"
    links = [
        f"{name} {link.write_bytes_per_s / 1e9:.3g} GB/s out, {link.read_bytes_per_s / 1e9:.3g} back"
        for name, link in (("host", profile.host), ("disk", profile.disk))
        if link
    ]
    first = (
        f"plan of {plan.planner or 'unknown'} on {profile.device}, {budget}; "
        f"{'; '.join(links) or 'no link was measured'}"
    )
    run = [regions_in_words(plan.regions, len(plan.once))] if plan.regions else []
    if plan.declined:
        return [first, f"declined: {plan.declined}", *run]
    return [first, f"{format_size(plan.offloaded_bytes)} leave, {format_size(plan.kept_bytes)} stay", *run]


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


def _groups(rows: Sequence[Row], equal: Callable[[Row], object]) -> list[list[Row]]:
    """Neighbours with the same treatment that are also ``equal``; tensors outside of all modules stand alone."""
    found = groupby(rows, key=lambda row: (row.what, row.name == OUTSIDE, equal(row)))
    return [list(group) for _, group in found]


def _cells(group: Sequence[Row]) -> tuple[str, ...]:
    def total(name: str) -> Any:
        return sum(getattr(row, name) for row in group)

    saved = {row.saved_bytes for row in group}
    size = (
        f"{len(group)} × {format_size(*saved)}" if len(saved) == 1 < len(group) else format_size(total("saved_bytes"))
    )
    held = format_size(total("held_bytes")) if total("held_bytes") else "-"
    times = [format_time(total(name)) if total(name) else "-" for name in ("recompute_s", "wait_s")]
    return _span(*group), group[0].what, size, held, *times, format_size(total("peak_bytes"))


def _whys(groups: Sequence[Sequence[Row]]) -> list[str]:
    """The reasons, one line for each; equal neighbours share it, and of equal blocks the first and last have one."""
    ends = [(group, group[0].why, group[-1].why) for group in groups]
    lines = []
    for (first, last), run in groupby(ends, key=lambda end: end[1:]):
        rows = [row for group, _, _ in run for row in group]
        lines.append(f"  {_span(*rows)}: {first}" + (f"; the last: {last}" if last != first else ""))
    return lines


def _span(first: Row, *others: Row) -> str:
    return f"{first.name} … {others[-1].name}" if others else first.name


def _peak(analysis: Analysis) -> list[str]:
    """The moment of the peak, and the parts that hold most of it."""
    peak = analysis.prediction.peak
    if peak is None or not analysis.prediction.peak_bytes:
        return ["nothing is saved"]
    kinds = ", ".join(f"{format_size(n)} {kind}" for kind, n in peak.bytes_by_kind.items() if n)
    largest = sorted((row for row in analysis.rows if row.peak_bytes), key=lambda row: -row.peak_bytes)[:MOST_AT_PEAK]
    where = ", ".join(f"{row.name} {format_size(row.peak_bytes)}" for row in largest)
    total = format_size(analysis.prediction.peak_bytes)
    return [f"the peak, {total}, is at {format_time(peak.time_s)} in {peak.phase}: {kinds}", f"  most of it: {where}"]


def render_budgets(rows: Sequence[BudgetRow]) -> str:
    """The rows of `budget_table` as lines of text, under a heading."""
    shown = [("device budget", "step", "peak", "regions run once")]
    for row in rows:
        step = "no plan keeps it" if row.step_s is None else format_time(row.step_s)
        peak = "-" if row.peak_bytes is None else format_size(row.peak_bytes)
        shown.append((format_size(row.device_budget), step, peak, str(row.once or "-")))
    return "\n".join(["other budgets", *_table(shown, left=0)])
