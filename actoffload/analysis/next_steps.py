"""What to do next, from the trace of a run: an option, its value, and what it changes by the simulator or by count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import BudgetError, ConfigError
from ..planning.constants import BUDGET_SHARES
from ..planning.explain import format_time
from ..planning.profile import Profile
from ..planning.search import Limits, best
from ..policy import KeepReason
from ..sizes import format_size

MOST_STEPS = 3
WORTH_SAYING = 0.05
"""Less of a step, or of what is saved, is not worth another option."""
LOWER = 0.9
"""Another budget is named to save memory where it lowers the peak to this share at least."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the run planned from, as its steps have corrected it, and a step under the best plan with its options.

    Attributes:
        what: is planned: a step, or with accumulated gradients a micro-batch of it.
    """

    profile: Profile
    limits: Limits
    what: str
    step_s: float
    peak_bytes: int

    def instead(self, option: str, step_s: float, peak_bytes: int) -> str:
        """What an option is predicted to change, as a sentence."""
        step, peak = format_time(step_s), format_size(peak_bytes)
        before = format_time(self.step_s), format_size(self.peak_bytes)
        time = f"{self.what} of {step}" + (f" instead of {before[0]}" if step != before[0] else ", as now")
        size = f"a peak of saved activations of {peak}" + (
            f" instead of {before[1]}" if peak != before[1] else ", as now"
        )
        return f"{option}: predicted are {size}, and {time}."


def next_steps(metadata: Mapping[str, Any], numbers: Mapping[str, float]) -> list[str]:
    """Return at most `MOST_STEPS` sentences; none where nothing is known that would change much.

    Args:
        metadata: what the trace has at its end.
        numbers: of the run, as `Run.numbers` gives them.
    """
    statistics, config = metadata.get("statistics"), metadata.get("config", {})
    if not statistics:
        return []
    planned = _planned(metadata)
    found = [] if planned is None else _other_plans(planned)
    if planned is None:
        found = _without_a_plan(config, statistics, numbers)
    return [*found, *_what_could_move(statistics, numbers["steps"])][:MOST_STEPS]


def _planned(metadata: Mapping[str, Any]) -> _Planned | None:
    if not metadata.get("profile") or not metadata.get("limits"):
        return None
    try:
        profile = Profile.from_json(json.dumps(metadata["profile"]))
    except ConfigError:  # of a trace that another release wrote
        return None
    known = {field.name for field in fields(Limits)}
    limits = Limits(**{name: value for name, value in metadata["limits"].items() if name in known})
    limits = replace(limits, tiers=tuple(limits.tiers))
    predicted = _predict(profile, limits)
    return predicted and _Planned(profile, limits, metadata.get("planned_for") or "a step", *predicted)


def _predict(profile: Profile, limits: Limits) -> tuple[float, int] | None:
    """Seconds and peak of a step that is planned so; None where no plan keeps the budget."""
    try:
        _, plan = best(profile, limits)
    except BudgetError:
        return None
    return plan.predicted_step_s or 0.0, plan.predicted_peak_bytes or 0


def _other_plans(planned: _Planned) -> list[str]:
    """Budgets and links with which the planner predicts less time or less memory."""
    profile, limits, now_s = planned.profile, planned.limits, planned.step_s
    budgets = {-(-int(share * profile.baseline_peak_bytes) // MIB) * MIB for share in BUDGET_SHARES}
    tried = []
    for budget in sorted(budgets - {limits.device_budget}):
        predicted = _predict(profile, replace(limits, device_budget=budget))
        if predicted is not None:
            tried.append((*predicted, budget))
    found = []
    faster = [row for row in tried if row[0] <= (1 - WORTH_SAYING) * now_s]
    if faster:
        enough_s = (1 + WORTH_SAYING / 5) * min(faster)[0]
        step_s, peak, budget = min((row for row in faster if row[0] <= enough_s), key=lambda row: row[2])
        found.append(planned.instead(f"device_budget='{budget // MIB}MiB'", step_s, peak))
    lower = [row for row in tried if row[0] <= (1 + WORTH_SAYING) * now_s and row[1] <= LOWER * planned.peak_bytes]
    if lower:
        step_s, peak, budget = min(lower, key=lambda row: row[1])
        found.append(planned.instead(f"device_budget='{budget // MIB}MiB'", step_s, peak))
    return found + _faster_disk(planned)


def _faster_disk(planned: _Planned) -> list[str]:
    profile, disk = planned.profile, planned.profile.disk
    if disk is None:
        return []
    predicted = _predict(profile.with_links(disk=disk.scaled(2)), planned.limits)
    if predicted is None:
        return []
    step_s, peak = predicted
    gains = step_s <= (1 - WORTH_SAYING) * planned.step_s or peak <= LOWER * planned.peak_bytes
    if not gains or step_s > (1 + WORTH_SAYING) * planned.step_s:
        return []
    return [planned.instead("path= with a second drive as fast as this one", step_s, peak)]


def _without_a_plan(
    config: Mapping[str, Any], statistics: Mapping[str, Any], numbers: Mapping[str, float]
) -> list[str]:
    """What follows from counts alone, as upper bounds, where nothing was planned."""
    found = []
    policy, saved = config.get("policy"), statistics["kept_bytes"].get("policy", 0)
    if policy != "auto" and numbers["wait_s"] > WORTH_SAYING * numbers["step_s"]:
        found.append(
            f"policy='auto' keeps what cannot be back in time: of {format_time(numbers['step_s'])} a step it can save "
            f"up to the {format_time(numbers['wait_s'])} that are waited."
        )
    peak, whole = numbers["saved_peak_without_bytes"], numbers["peak_without_bytes"]
    if policy == "keep" and saved:
        found.append(
            f"policy='auto' moves what costs no time: up to {format_size(saved / numbers['steps'])} a step can "
            f"leave, and at its peak {format_size(peak)} of saved activations are {peak / whole:.0%} of the memory."
        )
    lowers = peak / 2 <= LOWER * numbers["saved_peak_bytes"]
    if policy != "auto" and lowers and peak > WORTH_SAYING * whole and config.get("device_budget") is None:
        found.append(
            f"device_budget='50%' with policy='auto' holds saved activations at {format_size(peak / 2)} instead of "
            f"{format_size(numbers['saved_peak_bytes'])}; after three steps its report predicts what a step takes."
        )
    return found


def _what_could_move(statistics: Mapping[str, Any], steps: float) -> list[str]:
    found = []
    for reason in KeepReason:
        nbytes, all_bytes = statistics["kept_bytes"].get(reason.value, 0), statistics["activation_bytes"]
        if reason.option and nbytes > WORTH_SAYING * all_bytes:
            each = format_size(nbytes / steps)
            found.append(
                f"{reason.option} lets up to {each} more leave in a step, {nbytes / all_bytes:.0%} of what it saves."
            )
    return found
