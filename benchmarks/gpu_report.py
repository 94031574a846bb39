"""The GPU suite's results for people: the table, the verdicts and the goals. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness import Bound, Row, number, table_of
from benchmarks.modes import MODES

PEAK_GOAL, TIME_GOAL, TRL_GOAL, IDEAL_GOAL = 0.40, 1.02, 1.5, 0.95
CHECKPOINTED, CHECKPOINTED_GOAL = "checkpointed, ours at equal memory", 0.94
"""Times the step of the same checkpoints alone; the peak must not be above theirs."""
RECOMPUTING = ("recompute", "selective")
SAME_PEAK = 1.02
"""Peaks that differ by less are one peak."""
REASONS = ("error", "unavailable", "left_out")
"""Keys of a result that has no numbers."""
REMARKS: dict[str, Callable[[Row], object]] = {
    "Left out, as time was short or the reference failed": lambda result: "left_out" in result,
    "Timed while another plan was made": lambda result: result.get("plans_while_timed"),
    "With host memory that could not be page-locked, so that copies block": (
        lambda result: result.get("page_locked") is False
    ),
}
"""Said below the table of the points of which it holds."""


def render(points: Sequence[Row]) -> str:
    """All points as a Markdown table, and what is to be known of them."""
    text = table_of("case / mode", {_name(point): point["result"] for point in points}, COLUMNS)
    text += "".join(f"\n{verdict}\n" for verdict in verdicts(points))
    for remark, holds in REMARKS.items():
        named = [_name(point) for point in points if holds(point["result"])]
        text += f"\n{remark}: {'; '.join(named)}.\n" if named else ""
    return text


def _name(point: Row) -> str:
    return f"{point['case']['name']} / {point['mode']}"


def _why(result: Row) -> str | None:
    """Why there are no numbers."""
    return "out of memory" if result.get("oom") else next((result[k] for k in REASONS if k in result), None)


def _identical(result: Row) -> str | None:
    if "identical" not in result:
        return None
    if not result["identical"]:
        return "NO"
    return "yes" if result.get("last_gradients", "") is not None else "first step"


def _bytes(name: str) -> Callable[[Row], str]:
    return lambda result: _size(result.get(f"{name}_bytes"))


_RATIO = number("ratio", 1, 3)
COLUMNS: dict[str, Callable[[Row], object]] = {
    "step time / reference": lambda result: _why(result) or _RATIO(result),
    "step, s": number("median_step_s", 1, 3),
    "activation peak": _bytes("activation_peak"),
    "held as backward ends": _bytes("held"),
    "peak of AdamW's step": _bytes("optimizer_peak"),
    "host RSS": _bytes("host_rss"),
    "moved a step": lambda result: _size(result.get("written_bytes_per_step")),
    "stalled a step, s": number("wait_s_per_step", 1, 3),
    "bit-identical": _identical,
}


def differs(result: Row) -> bool:
    """Whether gradients were not what they must be."""
    return result.get("identical") is False or result.get("reproducible") is False


def goals(points: Sequence[Row]) -> list[Bound]:
    """What the suite's numbers are to reach, as far as they were measured."""
    found: list[Bound] = []
    paper = {point["case"]["name"] for point in points if point["case"]["ssdtrain"]}
    for name, results in _by_case(points).items():
        if "peak_device_bytes" in results.get("keep", {}):
            found += _case_goals(name, results, paper=name in paper)
        alone, ours = results.get("recompute"), results.get(CHECKPOINTED)
        if alone is not None and ours is not None:
            what = f"{name}, checkpointed"
            found.append(Bound(f"{what}: step time / alone", _times(ours) / _times(alone), CHECKPOINTED_GOAL))
            found.append(Bound(f"{what}: activation peak / alone", _peak(ours) / _peak(alone), SAME_PEAK))
    return found


def _by_case(points: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """What was measured, by case and mode."""
    found: dict[str, dict[str, Row]] = {}
    for point in points:
        if "median_step_s" in point["result"]:
            found.setdefault(point["case"]["name"], {})[point["mode"]] = point["result"]
    return found


def _case_goals(name: str, results: dict[str, Row], *, paper: bool) -> list[Bound]:
    keep, host, trl = results["keep"], results.get("host"), results.get("TRL")
    found = []
    if host is not None and paper:
        hides = hiding(keep, PEAK_GOAL * _peak(keep))
        found.append(Bound(f"{name}, host: activation peak / keep's{hides}", _peak(host) / _peak(keep), PEAK_GOAL))
        found.append(Bound(f"{name}, host: step time / keep's", host["ratio"], TIME_GOAL))
    if "default" in results:
        found.append(Bound(f"{name}, default: step time / keep's", results["default"]["ratio"], TIME_GOAL))
    if host is not None and trl is not None:
        found.append(Bound(f"{name}: TRL's step time / host's", _times(trl) / _times(host), TRL_GOAL, at_most=False))
        found.append(Bound(f"{name}: host's activation peak / TRL's", _peak(host) / _peak(trl), 1.0))
    if "recompute" in results:
        limit = _peak(results["recompute"])
        below = [r["ratio"] for mode, r in results.items() if MODES[mode].ours and _peak(r) < limit]
        what = f"{name}, below recompute's peak: least step time / keep's{hiding(keep, limit)}"
        found.append(Bound(what, min(below, default=None), TIME_GOAL))
    if ideal_s := results.get("nvme", {}).get("predicted_step_s"):
        share = ideal_s / results["nvme"]["median_step_s"]
        found.append(Bound(f"{name}, nvme: the plan's step time / the real one", share, IDEAL_GOAL, at_most=False))
    return found


def hiding(keep: Row, peak_bytes: float) -> str:
    """The most that can leave while a forward runs, beside a goal that needs so much to leave."""
    if "hides_bytes" not in keep:
        return ""
    hides, needed = keep["hides_bytes"], _peak(keep) - peak_bytes
    forbidden = ": NOT POSSIBLE at no loss" if hides < needed else ""
    return f" (needs {_size(needed)} to leave, {_size(hides)} can hide{forbidden})"


def verdicts(points: Sequence[Row]) -> list[str]:
    """For each case: at the peak of recomputing every block, how much faster the library is than any recomputation."""
    found = []
    for name, results in _by_case(points).items():
        if "recompute" not in results or not any(MODES[mode].ours for mode in results):
            continue
        limit = SAME_PEAK * _peak(results["recompute"])
        below = {mode: _times(r) for mode, r in results.items() if _peak(r) <= limit}
        ours = min((mode for mode in below if MODES[mode].ours), key=below.__getitem__, default=None)
        best = min((mode for mode in below if mode in RECOMPUTING), key=below.__getitem__)
        if ours is None:
            least = min(_peak(result) for mode, result in results.items() if MODES[mode].ours)
            said = f"no mode of the library gets there; the lowest of its peaks is {_size(least)}"
        else:
            said = f"{ours} is faster than the fastest recomputation ({best}) by {below[best] / below[ours]:.3f} ×"
        found.append(f"{name}: at this peak ({_size(_peak(results['recompute']))}), {said}.")
    return found


def _times(result: Row) -> float:
    """Times the reference's step, of the steps beside this mode's: seconds of two processes, or minutes, may differ."""
    return float(result.get("ratio", 1.0))  # the reference itself has none


def _peak(result: Row) -> float:
    return float(result["activation_peak_bytes"])


def short(result: Row) -> Row:
    """What is printed while the suite runs."""
    keys = ("ratio", "median_step_s", "activation_peak_bytes", "identical", *REASONS)
    return {key: result[key] for key in keys if key in result}


def _size(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
