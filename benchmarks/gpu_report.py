"""The GPU suite's results for people: the table, the goals and the points of the picture. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actoffload.analysis.plots import Point
from benchmarks.harness import Bound, markdown_table
from benchmarks.modes import MODES

PointRow = dict[str, Any]
COLUMNS = (
    "case / mode",
    "step time / reference",
    "step, s",
    "activation peak",
    "host RSS",
    "moved a step",
    "stalled a step, s",
    "bit-identical",
)
PEAK_GOAL, TIME_GOAL, TRL_GOAL, IDEAL_GOAL = 0.40, 1.02, 1.5, 0.95


def render(points: Sequence[PointRow]) -> str:
    """All points as a Markdown table, and what is to be known of them."""
    text = markdown_table(COLUMNS, [_row(point) for point in points])
    left_out = [_name(point) for point in points if "left_out" in point["result"]]
    if left_out:
        text += f"\nLeft out, as time was short or the reference failed: {'; '.join(left_out)}.\n"
    pageable = [_name(point) for point in points if point["result"].get("page_locked") is False]
    if pageable:
        text += f"\nWith host memory that could not be page-locked, so that copies block: {'; '.join(pageable)}.\n"
    return text


def _name(point: PointRow) -> str:
    return f"{point['case']['name']} / {point['mode']}"


def _row(point: PointRow) -> tuple[str, ...]:
    result = point["result"]
    why = "out of memory" if result.get("oom") else next((result[k] for k in _REASONS if k in result), None)
    if why is not None:
        return (_name(point), str(why), *["-"] * (len(COLUMNS) - 2))
    wait_s = result.get("wait_s_per_step")
    return (
        _name(point),
        "-" if "ratio" not in result else f"{result['ratio']:.3f}",
        f"{result['median_step_s']:.3f}",
        _size(result.get("activation_peak_bytes")),
        _size(result.get("host_rss_bytes")),
        _size(result.get("written_bytes_per_step")),
        "-" if wait_s is None else f"{wait_s:.3f}",
        _identical(result),
    )


def _identical(result: dict[str, Any]) -> str:
    if "identical" not in result:
        return "-"
    if not result["identical"]:
        return "NO"
    return "yes" if result.get("last_gradients", "") is not None else "first step"


_REASONS = ("error", "unavailable", "left_out")


def differs(result: dict[str, Any]) -> bool:
    """Whether gradients were not what they must be."""
    return result.get("identical") is False or result.get("reproducible") is False


def goals(points: Sequence[PointRow]) -> list[Bound]:
    """What the suite's numbers are to reach, as far as they were measured; on the CPU nothing."""
    found: list[Bound] = []
    for name in dict.fromkeys(point["case"]["name"] for point in points):
        mine = [point for point in points if point["case"]["name"] == name and "median_step_s" in point["result"]]
        results = {point["mode"]: point["result"] for point in mine}
        if "keep" in results and "peak_device_bytes" in results["keep"]:
            found += _case_goals(name, results, paper=mine[0]["case"]["ssdtrain"])
    return found


def _case_goals(name: str, results: dict[str, dict[str, Any]], *, paper: bool) -> list[Bound]:
    keep, host, trl = results["keep"], results.get("host"), results.get("TRL")
    found = []
    if host is not None and paper:
        share = _peak(host) / _peak(keep)
        found.append(Bound(what=f"{name}, host: activation peak / keep's", measured=share, bound=PEAK_GOAL))
        found.append(Bound(what=f"{name}, host: step time / keep's", measured=host["ratio"], bound=TIME_GOAL))
    if host is not None and trl is not None:
        faster, lower = trl["median_step_s"] / host["median_step_s"], _peak(host) / _peak(trl)
        what = f"{name}: TRL's step time / host's"
        found.append(Bound(what=what, measured=faster, bound=TRL_GOAL, at_most=False))
        found.append(Bound(what=f"{name}: host's activation peak / TRL's", measured=lower, bound=1.0))
    if "recompute" in results:
        limit = _peak(results["recompute"])
        below = [r["ratio"] for mode, r in results.items() if MODES[mode].ours and _peak(r) < limit]
        what = f"{name}, below recompute's peak: least step time / keep's"
        found.append(Bound(what=what, measured=min(below, default=None), bound=TIME_GOAL))
    ideal_s = results.get("nvme", {}).get("predicted_step_s")
    if ideal_s:
        share = ideal_s / results["nvme"]["median_step_s"]
        what = f"{name}, nvme: the plan's step time / the real one"
        found.append(Bound(what=what, measured=share, bound=IDEAL_GOAL, at_most=False))
    return found


def _peak(result: dict[str, Any]) -> float:
    return float(result["activation_peak_bytes"])


def drawn(points: Sequence[PointRow]) -> list[Point]:
    """The points of the picture: those that were measured, and those that ran out of memory."""
    found = []
    for point in points:
        result = point["result"]
        if any(reason in result for reason in _REASONS) and not result.get("oom"):
            continue
        peak = result.get("activation_peak_bytes")
        step_s = result.get("median_step_s") if peak is not None else None
        peak_gib = None if peak is None else peak / 2**30
        found.append(Point(group=point["case"]["name"], label=point["mode"], step_s=step_s, peak_gib=peak_gib))
    return found


def title(payload: dict[str, Any]) -> str:
    """Where it was measured."""
    environment = payload["environment"]
    return f"{environment['gpu'] or environment['cpu']}, torch {environment['torch']}"


def short(result: dict[str, Any]) -> dict[str, Any]:
    """What is printed while the suite runs."""
    keys = ("ratio", "median_step_s", "activation_peak_bytes", "identical", *_REASONS)
    return {key: result[key] for key in keys if key in result}


def _size(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
