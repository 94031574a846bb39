"""``actoffload plan``: the plan for a recorded step, by part of the model, with reasons, time and peak."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..config import OffloadConfig
from ..errors import ConfigError
from ..planning.profile import Profile
from ..planning.search import Limits, best, bounded, tiers_of
from ..tell.parts import analyse, budget_table
from ..tell.plans import render_budgets, render_plan
from .console import JsonOption, grouped, option, print_json

SIZES = ("device_budget", "host_budget", "nvme_budget")
Bytes = Annotated[str | None, option('Bytes, or text such as "8GiB".')]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits of a plan, as text."""

    device_budget: Annotated[str | None, option('Of saved bytes on the device: "8GiB", or "40%" of keep\'s peak.')] = (
        None
    )
    host_budget: Bytes = None
    nvme_budget: Bytes = None
    target: Annotated[str, option("Where bytes may go: host, nvme, tiered or auto.")] = "auto"

    def of(self, profile: Profile) -> Limits:
        """Return the limits for a step."""
        config = OffloadConfig(**asdict(self))  # checks the texts, and makes numbers of the sizes
        share, sizes = config.device_share, {name: getattr(config, name) for name in SIZES}
        if share is not None:
            sizes["device_budget"] = int(share * profile.baseline_peak_bytes)
        return bounded(profile, Limits(**sizes, tiers=tiers_of(config.target)))


@grouped
def command(
    profile: Annotated[Path, typer.Argument(help="A recorded step, as `actoffload demo --profile FILE` writes it.")],
    budget: Budget,
    plan_out: Annotated[Path | None, option("Write the plan here; Plan.from_json reads it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan a recorded step: which checkpointed regions run once, what stays and leaves, why, its time and its peak."""
    recorded = read_profile(profile)
    limits = budget.of(recorded)
    budgets = budget_table(recorded, limits)
    step, plan = best(recorded, limits)
    analysis = analyse(step, plan, limits)
    if plan_out is not None:
        plan_out.write_text(plan.to_json() + "\n", encoding="utf-8")
    if as_json:
        names = ("device", "saved_bytes", "movable_bytes", "baseline_peak_bytes", "step_s")
        about = {name: getattr(step, name) for name in names} | {"storages": len(step.storages)}
        rows = [asdict(row) for row in budgets]
        print_json({"profile": about, **analysis.as_dict(), "budgets": rows, "plan": json.loads(plan.to_json())})
    else:
        typer.echo(f"{render_plan(step, plan, limits, analysis=analysis)}\n\n{render_budgets(budgets)}")


def read_profile(path: Path) -> Profile:
    """Return the profile of a file."""
    try:
        return Profile.load(path)
    except (OSError, ConfigError) as error:
        problem = getattr(error, "strerror", None) or getattr(error, "remedy", "").partition(";")[0]
        remedy = "`actoffload demo --profile FILE` writes one, and so does offloader.profile.save(FILE) after 3 steps"
        raise ConfigError("profile", str(path), f"{problem}; give a recorded step: {remedy}") from error
