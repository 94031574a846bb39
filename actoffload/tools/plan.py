"""``actoffload plan``: what the planner does with a recorded step: by part what and why, its time and its peak."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import OffloadConfig, Offloader
from ..errors import ConfigError
from ..planning.constants import GIB
from ..planning.plan import Plan
from ..planning.profile import Link, Profile
from ..planning.search import Limits, best, bounded
from ..sizes import parse_share, parse_size
from ..tell.parts import Analysis, BudgetRow, analyse, budget_table, one_more
from ..tell.plans import render_budgets, render_plan
from .console import (
    LEAST,
    DarkOption,
    JsonOption,
    PathOption,
    PictureOption,
    StyleOption,
    draw_or_fail,
    explained_errors,
    fail,
    print_json,
    strings,
)
from .environment import find_device
from .models import build_own, is_own
from .plots import Look, Style, draw_plan
from .process import prepare_process

RECORDED_STEPS = 3
"""The second is recorded; the profile is there in the third."""
TARGETS = {"host": ("host",), "nvme": ("nvme",), "tiered": ("host", "nvme"), "auto": ("host", "nvme")}
_LINKS = "Links; default: what the profile measured"
Rate = Annotated[float | None, typer.Option(help="GB/s.", min=LEAST, rich_help_panel=_LINKS)]
Bytes = Annotated[str | None, typer.Option(help='Bytes, or text such as "8GiB".')]


def command(
    profile: Annotated[
        Path,
        typer.Argument(help="A recorded step, as `actoffload demo --profile FILE` writes it; or FILE.py:FUNCTION."),
    ],
    device_budget: Annotated[
        str | None, typer.Option(help='Most saved bytes on the device: "8GiB", or "40%" of the peak with all kept.')
    ] = None,
    host_budget: Bytes = None,
    nvme_budget: Bytes = None,
    max_slowdown: Annotated[float | None, typer.Option(help="As a share: 0.02 is 2 %.")] = None,
    target: Annotated[str, typer.Option(help="Where bytes may go: host, nvme, tiered or auto.")] = "auto",
    more: Annotated[str, typer.Option(help="How much more budget to price.")] = "1GiB",
    host_write: Rate = None,
    host_read: Rate = None,
    disk_write: Rate = None,
    disk_read: Rate = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of FUNCTION's batch.")] = 1,
    path: PathOption = None,
    plan_out: Annotated[Path | None, typer.Option(help="Write the plan here; Plan.from_json reads it.")] = None,
    picture: PictureOption = None,
    style: StyleOption = Style.PAPER,
    dark: DarkOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan a recorded step: which checkpointed regions run once, what stays and leaves, why, its time and its peak.

    FUNCTION returns a model and make_batch(size), which returns the model's arguments; the model returns its loss.
    """
    with explained_errors():
        recorded = record(str(profile), batch, strings(path)) if is_own(str(profile)) else read_profile(profile)
        step = with_rates(recorded, {"host": (host_write, host_read), "disk": (disk_write, disk_read)})
        if target not in TARGETS:
            raise ConfigError("target", target, f"choose one of {', '.join(map(repr, TARGETS))}")
        limits = Limits(
            device_budget=_budget(step, device_budget),
            host_budget=None if host_budget is None else parse_size("host_budget", host_budget),
            nvme_budget=None if nvme_budget is None else parse_size("nvme_budget", nvme_budget),
            max_slowdown=max_slowdown,
            tiers=TARGETS[target],
        )
        limits = bounded(step, limits)
        extra = parse_size("more", more)
        budgets = budget_table(step, limits)
        recorded, (step, plan) = step, best(step, limits)
        analysis = analyse(step, plan, limits, more=one_more(recorded, plan, limits, extra or GIB))
    if plan_out is not None:
        try:
            plan_out.write_text(plan.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            fail(f"nothing could be written: {error}", error)
    if picture is not None:
        _draw(step, plan, limits, analysis, picture, Look(style, dark))
    if as_json:
        print_json(as_dict(step, plan, analysis, budgets))
    else:
        typer.echo(f"{render_plan(step, plan, limits, analysis=analysis)}\n\n{render_budgets(budgets)}")


def read_profile(path: Path) -> Profile:
    """Return the profile of a file.

    Raises:
        ConfigError: the file cannot be read or holds no profile; it says what writes one.
    """
    try:
        return Profile.load(path)
    except (OSError, ConfigError) as error:
        problem = getattr(error, "strerror", None) or getattr(error, "remedy", "").partition(";")[0]
        remedy = "`actoffload demo --profile FILE` writes one, and so does offloader.profile.save(FILE) after 3 steps"
        raise ConfigError("profile", str(path), f"{problem}; give a recorded step: {remedy}") from error


def record(source: str, batch: int, path: list[str] | None) -> Profile:
    """Return the profile of a user's own model: three steps without an optimizer, each of the same batch.

    Raises:
        ConfigError: the function or what it returns is not as `models` asks for, or nothing that is saved may move.
    """
    device = find_device()
    prepare_process(device, None, seed=0)
    workload = build_own("profile", source, torch.device(device))
    inputs = workload.batch(batch)
    config = OffloadConfig(path=path, target="nvme" if device == "cpu" else "auto")
    with closing(Offloader(config).use(workload.model)) as offloader:
        for step in range(RECORDED_STEPS):
            with offloader:
                loss = workload.loss(inputs)
            if not step:  # backward of a short step takes everything before it has left, and no link would be known
                offloader.synchronize()
            torch.autograd.backward(loss)
            workload.model.zero_grad()
        if offloader.profile is None:
            raise ConfigError("batch", batch, "nothing that its step saves may move; give a larger one")
        return offloader.profile


def with_rates(profile: Profile, rates: dict[str, tuple[float | None, float | None]]) -> Profile:
    """Return a profile, with other links where rates in GB/s (write, read) are given."""
    changed = {}
    for name, (write, read) in rates.items():
        known = getattr(profile, name)
        first, second = write or read, read or write
        if known is None and first and second:  # as fast both ways unless told otherwise
            changed[name] = Link(write_bytes_per_s=1e9 * first, read_bytes_per_s=1e9 * second)
        elif known is not None and first:
            given = {"write_bytes_per_s": write, "read_bytes_per_s": read}
            changed[name] = replace(known, **{way: 1e9 * rate for way, rate in given.items() if rate is not None})
    return profile.with_links(**changed)


def _budget(profile: Profile, text: str | None) -> int | None:
    if text is None:
        return None
    share = parse_share("device_budget", text)
    return parse_size("device_budget", text) if share is None else int(share * profile.baseline_peak_bytes)


def _draw(profile: Profile, plan: Plan, limits: Limits, analysis: Analysis, picture: Path, look: Look) -> None:
    title = f"plan of {plan.planner} on {profile.device}, as predicted" + (" (declined)" if plan.declined else "")
    options: dict[str, Any] = {"forward_s": profile.forward_s, "device_budget": limits.device_budget, "look": look}
    draw_or_fail(lambda: draw_plan(analysis.keep, analysis.prediction, picture, title, **options))


def as_dict(profile: Profile, plan: Plan, analysis: Analysis, budgets: Sequence[BudgetRow]) -> dict[str, Any]:
    """Return everything, ready for JSON; ``plan`` is what `Plan.from_json` takes."""
    return {
        "profile": {
            "device": profile.device,
            "storages": len(profile.storages),
            "saved_bytes": profile.saved_bytes,
            "movable_bytes": profile.movable_bytes,
            "baseline_peak_bytes": profile.baseline_peak_bytes,
            "step_s": profile.step_s,
        },
        **analysis.as_dict(),
        "budgets": [asdict(row) for row in budgets],
        "plan": json.loads(plan.to_json()),
    }
