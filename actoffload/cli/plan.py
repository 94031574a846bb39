"""``actoffload plan``: what a planner does with a recorded step: per block what and why, its time and its peak."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import parse_size
from ..errors import BudgetError, ConfigError
from ..plan_analysis import GIB, Analysis, analyse, one_more
from ..plan_report import (
    BLOCK_COLUMNS,
    block_cells,
    comparison_rows,
    headline,
    merged_rows,
    more_lines,
    peak_lines,
    why_lines,
)
from ..planner import Plan
from ..planners import Limits, make_planner
from ..profile import Link, Profile
from ..report.plan_picture import PlanPicture, draw_plan

TARGETS = {"host": ("host",), "nvme": ("nvme",), "tiered": ("host", "nvme"), "auto": ("host", "nvme")}
_LINKS = "Links; default: what the profile measured"
Rate = Annotated[float | None, typer.Option(help="GB/s.", rich_help_panel=_LINKS)]
Bytes = Annotated[str | None, typer.Option(help='Bytes, or text such as "8GiB".')]


def command(
    profile: Annotated[Path, typer.Argument(help="A profile: the JSON file that Profile.save wrote.")],
    device_budget: Annotated[
        str | None, typer.Option(help='Most saved bytes on the device: "8GiB", or "40%" of the peak with all kept.')
    ] = None,
    host_budget: Bytes = None,
    nvme_budget: Bytes = None,
    max_slowdown: Annotated[float | None, typer.Option(help="As a share: 0.02 is 2 %.")] = None,
    planner: Annotated[str, typer.Option(help="auto, ssdtrain, bring_back, lifetime or joint.")] = "auto",
    target: Annotated[str, typer.Option(help="Where bytes may go: host, nvme, tiered or auto.")] = "auto",
    recompute: Annotated[bool, typer.Option(help="Let blocks be recomputed.")] = True,
    more: Annotated[str, typer.Option(help="How much more budget to price.")] = "1GiB",
    host_write: Rate = None,
    host_read: Rate = None,
    disk_write: Rate = None,
    disk_read: Rate = None,
    all_blocks: Annotated[bool, typer.Option("--all", help="A line for each block, however many there are.")] = False,
    plan_out: Annotated[Path | None, typer.Option(help="Write the plan here; Plan.from_json reads it.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw bytes on the device over the step (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Plan a recorded step: what each block keeps, offloads or recomputes, why, and what that does to time and peak."""
    try:
        step = load(profile, {"host": (host_write, host_read), "disk": (disk_write, disk_read)})
        chosen = make_planner(planner)
        limits = make_limits(step, device_budget, host_budget, nvme_budget, max_slowdown, target, recompute)
        extra = parse_size("more", more)
        plan = chosen.plan(step, limits)
        analysis = analyse(step, plan, limits, more=one_more(step, plan, limits, chosen, extra or GIB))
    except BudgetError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    _write(step, plan, limits, analysis, plan_out, picture)
    if as_json:
        typer.echo(json.dumps(as_dict(step, plan, analysis), indent=2))
    else:
        show(step, plan, limits, analysis, every_block=all_blocks)


def load(path: Path, rates: dict[str, tuple[float | None, float | None]]) -> Profile:
    """The profile of a file, with other links where rates in GB/s (write, read) are given.

    Raises:
        ConfigError: the file cannot be read or holds no profile, or a rate is not above 0.
    """
    try:
        profile = Profile.load(path)
    except OSError as error:
        raise ConfigError("profile", str(path), f"{error.strerror}; give a file that Profile.save wrote") from error
    except UnicodeDecodeError as error:
        raise ConfigError("profile", str(path), "no text; give a file that Profile.save wrote") from error
    changed: dict[str, Link] = {}
    for name, (write, read) in rates.items():
        for way, rate in (("write", write), ("read", read)):
            if rate is not None and rate <= 0:
                raise ConfigError(f"{name}_{way}", rate, "must be above 0 GB/s; leave it out for the profile's")
        link = _link(getattr(profile, name), write, read)
        if link is not None:
            changed[name] = link
    return profile.with_links(**changed)


def _link(known: Link | None, write: float | None, read: float | None) -> Link | None:
    """A link with other rates; one that the profile lacks is as fast both ways unless told otherwise."""
    if write is None and read is None:
        return known
    if known is None:
        first, second = write or read, read or write
        return Link(write_bytes_per_s=1e9 * (first or 0.0), read_bytes_per_s=1e9 * (second or 0.0))
    return replace(
        known,
        write_bytes_per_s=known.write_bytes_per_s if write is None else 1e9 * write,
        read_bytes_per_s=known.read_bytes_per_s if read is None else 1e9 * read,
    )


def make_limits(
    profile: Profile,
    device_budget: str | None,
    host_budget: str | None,
    nvme_budget: str | None,
    max_slowdown: float | None,
    target: str,
    recompute: bool,
) -> Limits:
    """The limits that the options mean.

    Raises:
        ConfigError: an option cannot work; it is named.
    """
    if target not in TARGETS:
        raise ConfigError("target", target, f"choose one of {', '.join(map(repr, TARGETS))}")
    return Limits(
        device_budget=_budget(profile, device_budget),
        host_budget=None if host_budget is None else parse_size("host_budget", _number(host_budget)),
        nvme_budget=None if nvme_budget is None else parse_size("nvme_budget", _number(nvme_budget)),
        max_slowdown=max_slowdown,
        tiers=TARGETS[target],
        recompute=recompute,
    )


def _budget(profile: Profile, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.endswith("%"):
        return parse_size("device_budget", _number(text))
    try:
        share = float(text[:-1]) / 100
    except ValueError as error:
        raise ConfigError("device_budget", text, 'give a size such as "8GiB", or a share such as "40%"') from error
    if not 0 <= share < float("inf"):
        raise ConfigError("device_budget", text, "give a share of 0 % or more")
    return int(share * profile.baseline_peak_bytes)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _write(
    profile: Profile, plan: Plan, limits: Limits, analysis: Analysis, plan_out: Path | None, picture: Path | None
) -> None:
    try:
        if plan_out is not None:
            plan_out.write_text(plan.to_json() + "\n", encoding="utf-8")
        drawn = picture is None or draw_plan(_picture(profile, plan, limits, analysis), picture)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: nothing could be written: {error}", err=True)
        raise typer.Exit(1) from error
    if not drawn:
        typer.echo("Error: --picture needs matplotlib: pip install actoffload[plots]", err=True)
        raise typer.Exit(1)


def _picture(profile: Profile, plan: Plan, limits: Limits, analysis: Analysis) -> PlanPicture:
    return PlanPicture(
        title=f"plan of {plan.planner} on {profile.device}" + (" (declined)" if plan.declined else ""),
        keep=analysis.keep.timeline,
        plan=analysis.prediction.timeline,
        keep_step_s=analysis.keep.step_s,
        plan_step_s=analysis.prediction.step_s,
        forward_s=profile.forward_s,
        device_budget=limits.device_budget,
    )


def as_dict(profile: Profile, plan: Plan, analysis: Analysis) -> dict[str, Any]:
    """Everything, ready for JSON; ``plan`` is what `Plan.from_json` takes."""
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
        "plan": json.loads(plan.to_json()),
    }


def show(profile: Profile, plan: Plan, limits: Limits, analysis: Analysis, *, every_block: bool = False) -> None:
    """Print the plan for a person."""
    console = Console()
    for line in headline(profile, plan, limits):
        console.print(escape(line), highlight=False)
    summary = Table("", "predicted", "nothing moved")
    for column in summary.columns[1:]:
        column.justify = "right"
    for name, predicted, _, kept in comparison_rows(analysis, None):
        summary.add_row(name, predicted, kept)
    console.print(summary)
    blocks = Table(*BLOCK_COLUMNS)
    for column in blocks.columns[2:]:
        column.justify = "right"
    rows = analysis.rows if every_block else merged_rows(analysis.rows)
    for row in rows:
        blocks.add_row(*map(escape, block_cells(row)))
    console.print(blocks)
    console.print("added: by recomputing and by waiting; at the peak: on the device when the most is.", style="dim")
    for line in why_lines(rows):
        console.print(escape(line), highlight=False)
    console.print()
    for line in (*peak_lines(analysis), *more_lines(analysis, limits)):
        console.print(escape(line), highlight=False)
