"""A plan as text: block by block what is done and why, predicted against seen, and what more memory would buy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby

from .config import format_size
from .plan_analysis import OUTSIDE, Alternative, Analysis, BlockRow, analyse
from .plan_analysis import milliseconds as _ms
from .planner import Plan
from .planners import Limits, Observed
from .profile import Link, Profile
from .simulator import Prediction

MOST_ROWS = 24
"""So many lines of blocks at most in `render_plan`'s text; neighbours that are treated alike share one."""


def render_plan(
    profile: Profile,
    plan: Plan,
    prediction: Prediction | None = None,
    seen: Observed | None = None,
    *,
    limits: Limits | None = None,
    more: Alternative | None = None,
) -> str:
    """A plan as several lines of text.

    Args:
        profile: what it was made from.
        plan: the plan.
        prediction: the step under it where that is known already, with its details.
        seen: steps as they really were under it; None when none has run yet.
        limits: what it was made under; None for no limits.
        more: what `one_more` says.

    Raises:
        ConfigError: the plan is for another profile.
    """
    analysis = analyse(profile, plan, limits, prediction=prediction, more=more)
    lines = [*headline(profile, plan, limits), *_comparison(analysis, seen), ""]
    times = dict(seen.blocks) if seen is not None else {}
    lines += _block_lines([replace(row, seen_s=times.get(row.name, 0.0)) for row in analysis.rows])
    lines += ["", *peak_lines(analysis), *more_lines(analysis, limits)]
    return "\n".join(lines)


def headline(profile: Profile, plan: Plan, limits: Limits | None = None) -> list[str]:
    """Who planned what for which step, and the plan in one line."""
    limits = limits or Limits()
    bounds = []
    if limits.device_budget is not None:
        bounds.append(f"device budget {format_size(limits.device_budget)}")
    if limits.max_slowdown is not None:
        bounds.append(f"at most {limits.max_slowdown:.1%} slower")
    links = [f"{name} {_rate(link)}" for name, link in (("host", profile.host), ("disk", profile.disk)) if link]
    lines = [
        f"plan of {plan.planner or 'unknown'} on {profile.device}, {', '.join(bounds) or 'no budget'}; "
        f"{'; '.join(links) or 'no link was measured'}"
    ]
    if plan.declined:
        return [*lines, f"declined: {plan.declined}"]
    count = len(plan.recompute)
    dropped = f", {count} block{'s' * (count > 1)} recomputed" if count else ""
    return [*lines, f"{format_size(plan.offloaded_bytes)} leave, {format_size(plan.kept_bytes)} stay{dropped}"]


def comparison_rows(analysis: Analysis, seen: Observed | None) -> list[tuple[str, str, str, str]]:
    """Step, waits and peak: name, predicted, seen (``"-"`` where nobody looked), and with nothing moved."""
    after, keep = analysis.prediction, analysis.keep
    observed = ("-", "-", "-", "-")
    if seen is not None:
        peak = "-" if seen.peak_bytes is None else format_size(seen.peak_bytes)
        observed = (
            _ms(seen.step_s),
            _ms(seen.forward_wait_s),
            _ms(seen.backward_wait_s),
            peak,
        )
    return [
        ("step", _ms(after.step_s), observed[0], _ms(keep.step_s)),
        ("forward waits", _ms(after.forward_wait_s), observed[1], "-"),
        ("backward waits", _ms(after.backward_wait_s), observed[2], "-"),
        ("recomputing", _ms(after.recompute_s), "-", "-"),
        ("activation peak", format_size(after.peak_bytes), observed[3], format_size(keep.peak_bytes)),
    ]


def _comparison(analysis: Analysis, seen: Observed | None) -> list[str]:
    rows = [("", "predicted", "seen", "nothing moved"), *comparison_rows(analysis, seen)]
    return [f"  {name:<16}{predicted:>12}{observed:>12}{keep:>15}" for name, predicted, observed, keep in rows]


def block_cells(row: BlockRow) -> tuple[str, ...]:
    """A row as text, as `BLOCK_COLUMNS` names it."""
    extra = row.recompute_s + row.wait_s
    return (
        row.name,
        row.what,
        format_size(row.saved_bytes),
        _ms(row.forward_s) if row.forward_s else "-",
        _ms(row.backward_s) if row.backward_s else "-",
        _ms(extra) if extra else "-",
        _ms(row.seen_s) if row.seen_s else "-",
        format_size(row.peak_bytes),
    )


BLOCK_COLUMNS = ("block", "what", "saves", "forward", "backward", "added", "seen", "at the peak")
"""What `block_cells` holds; ``added`` is recomputing and waiting, ``seen`` forward and backward as they really were."""


def why_lines(rows: Sequence[BlockRow]) -> list[str]:
    """The reasons, one line for each run of neighbours that share one."""
    lines = []
    for why, run in groupby(rows, key=lambda row: row.why):
        names = [row.name for row in run]
        lines.append(f"{names[0] if len(names) == 1 else f'{names[0]} … {names[-1]}'}: {why}")
    return lines


def merged_rows(rows: Sequence[BlockRow], most: int = MOST_ROWS) -> list[BlockRow]:
    """The rows; where there are more than ``most``, neighbours with the same treatment become one (their sum)."""
    if len(rows) <= most:
        return list(rows)
    merged: list[tuple[BlockRow, str]] = []
    for row in rows:
        if merged and merged[-1][0].what == row.what and OUTSIDE not in (row.name, merged[-1][1]):
            first, _ = merged[-1]
            merged[-1] = _sum(first, row), row.name
        else:
            merged.append((row, row.name))
    return [row if row.name == last else replace(row, name=f"{row.name} … {last}") for row, last in merged]


def _sum(a: BlockRow, b: BlockRow) -> BlockRow:
    names = [name for name in asdict(a) if name.endswith(("_bytes", "_s"))]
    return replace(a, **{name: getattr(a, name) + getattr(b, name) for name in names})


def _block_lines(rows: Sequence[BlockRow]) -> list[str]:
    shown = merged_rows(rows)
    table = [BLOCK_COLUMNS, *(block_cells(row) for row in shown)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(BLOCK_COLUMNS))]
    lines = []
    for cells in table:
        left = "  ".join(cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True))
        right = "  ".join(cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True))
        lines.append(f"  {left}  {right}".rstrip())
    return [*lines, "why", *(f"  {line}" for line in why_lines(shown))]


def peak_lines(analysis: Analysis) -> list[str]:
    """What sets the peak."""
    peak = analysis.prediction.peak
    if peak is None or not analysis.prediction.peak_bytes:
        return ["nothing is saved"]
    kinds = ", ".join(f"{format_size(n)} {kind}" for kind, n in peak.bytes_by_kind.items() if n)
    largest = sorted((row for row in analysis.rows if row.peak_bytes), key=lambda row: -row.peak_bytes)[:3]
    where = ", ".join(f"{row.name} {format_size(row.peak_bytes)}" for row in largest)
    total = format_size(analysis.prediction.peak_bytes)
    return [f"the peak, {total}, is at {_ms(peak.time_s)} in {peak.phase}: {kinds}", f"  most of it: {where}"]


def more_lines(analysis: Analysis, limits: Limits | None = None) -> list[str]:
    """What more memory would buy."""
    more = analysis.more
    if more is None or limits is None or limits.device_budget is None:
        return []
    extra = format_size(more.device_budget - limits.device_budget)
    if more.step_s is None:
        return [f"{extra} more of budget: still no plan keeps it"]
    now_s = analysis.prediction.step_s
    gain = now_s - more.step_s
    if gain <= 1e-4 * now_s:
        return [f"{extra} more of budget would buy no time"]
    return [f"{extra} more of budget would buy {_ms(gain)} a step ({gain / now_s:.1%}): {_ms(more.step_s)}"]


def _rate(link: Link) -> str:
    return f"{link.write_bytes_per_s / 1e9:.3g} GB/s out, {link.read_bytes_per_s / 1e9:.3g} back"
