"""`explain()`: what was decided in the last forward, storage by storage, as text. No torch."""

from __future__ import annotations

from itertools import groupby

from .config import OffloadConfig, format_size
from .planner import Plan, PlanEntry
from .statistics import Statistics


def explain(config: OffloadConfig, plan: Plan, statistics: Statistics) -> str:
    """One line for each run of neighbouring storages of which the same was decided.

    Args:
        config: the options.
        plan: what was decided in the last forward.
        statistics: what was counted so far.
    """
    if not plan.entries:
        return f"actoffload (target {config.target}): no forward has saved anything yet."
    lines = [
        f"last forward: {len(plan.entries)} storages saved, {format_size(plan.offloaded_bytes)} sent to "
        f"{config.target}, {format_size(plan.kept_bytes)} kept"
    ]
    for (action, reason, module), run in groupby(plan.entries, key=_key):
        entries = list(run)
        first, last = entries[0].index, entries[-1].index
        place = f"{first}" if first == last else f"{first}-{last}"
        size = format_size(sum(entry.nbytes for entry in entries))
        why = f" ({reason})" if reason else ""
        where = f" in {module}" if module else ""
        lines.append(f"  {place:>9}  {size:>10}  {action}{why}{where}")
    waits = statistics.pack_wait_s + statistics.unpack_wait_s
    lines.append(f"forward and backward waited {waits:.3f} s in {statistics.steps} steps")
    return "\n".join(lines)


def _key(entry: PlanEntry) -> tuple[str, str, str]:
    return entry.action, entry.reason, entry.module or ""
