"""The planner's baselines: all that can move ("greedy"), and SSDTrain's cut. Their rows beside the planner's.

SSDTrain's cut: the first storages leave, the last stay, by one inequality of volume against time.
Published: going through the modules, stop at the first one for which writing all before it, writing it and reading it
back takes more than the time until backward is back at it, with backward taken as twice forward. Here on storages that
are counted once, with the read bandwidth beside the write bandwidth, with backward as it was measured, and for every
earlier storage as well, whose reads queue behind.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actoffload.planning.profile import Link, Profile
from actoffload.planning.search import Limits, Search, plan
from actoffload.planning.simulator import Prediction, run, simulate
from actoffload.planning.workload import Choice
from tests import planner_cases
from tests.planner_cases import BUDGET
from tests.planner_rig import MakeRig, Rig, rigs

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
PLANNERS = ("greedy", "auto", "SSDTrain's cut")
LINKS = (0.5, 1.0, 2.0, 4.0)
"""The bytes that the disk can write during a step's compute, as a multiple of the saved bytes."""


def predict_cut(profile: Profile, limits: Limits) -> Prediction:
    """The step under the published cut."""
    search = Search(profile, limits)
    return search.predict(published_cut(search))


def published_cut(search: Search) -> Choice:
    """The published cut; moved towards the end as far as a budget demands, or all of it."""
    order = search.movable()
    choice = search.offload(order[: (least := _before_the_cut(search, order))])
    while search.limits.device_budget is not None and not search.fits(choice) and least < len(order):
        least += 1
        choice = search.offload(order[:least])
    return choice


def _before_the_cut(search: Search, order: list[int]) -> int:
    """How many items of ``order`` leave by the inequality."""
    if not order:
        return 0
    items, profile = search.workload.items, search.workload.profile
    links = [profile.host] if search.to_host else [profile.disk]
    write_s = max(1 / link.write_bytes_per_s for link in links if link is not None)
    read_s = max(1 / link.read_bytes_per_s for link in links if link is not None)
    begin_s = items[order[0]].birth_s
    volume = 0
    deadline_s = float("inf")
    for count, number in enumerate(order):
        item = items[number]
        deadline_s = min(deadline_s, item.need_s + volume * read_s)
        volume += item.nbytes
        if begin_s + volume * (write_s + read_s) > deadline_s:
            return count
    return len(order)


def wins(row: Row, name: str, factor: float = 1.005) -> bool:
    """Whether a row is as good as the best: the step under a budget, else the peak of a step that is not longer."""
    valid = {n: seen for n in PLANNERS if (seen := row[n])["valid"]}
    key = "step" if row["budget"] else "peak"
    return name in valid and valid[name][key] <= factor * min(seen[key] for seen in valid.values())


def _seen(step: float, peak: float, budget: float | None) -> Row:
    return {"step": step, "peak": peak, "valid": step <= 1.01 if budget is None else peak <= budget * (1 + 1e-9)}


def recorded() -> dict[str, Row]:
    """The recorded steps in the simulator, each under the plan of each planner."""
    rows: dict[str, Row] = {}
    for file in sorted((ROOT / "tests" / "recorded").glob("*.json")):
        recorded = Profile.load(file)
        keep = simulate(recorded, detail=False)
        for speed, share in itertools.product(LINKS, (None, BUDGET)):
            rate = speed * recorded.saved_bytes / recorded.step_s
            profile = recorded.with_links(disk=Link(write_bytes_per_s=rate, read_bytes_per_s=rate))
            budget = None if share is None else int(share * keep.peak_bytes)
            limits = Limits(device_budget=budget)
            search = Search(profile, limits)
            window = replace(limits, pending_bytes=profile.saved_bytes // 4)
            found = {
                "greedy": run(search.workload, search.offload(search.movable()), window),
                "auto": simulate(profile, plan(profile, limits), limits, detail=False),
                "SSDTrain's cut": predict_cut(profile, limits),
            }
            rows[f"{file.stem}, link × {speed:g}{'' if share is None else f', budget {share:.0%}'}"] = {
                "budget": share
            } | {
                name: _seen(one.step_s / keep.step_s, one.peak_bytes / keep.peak_bytes, share)
                for name, one in found.items()
            }
    return rows


def virtual() -> dict[str, Row]:
    """The real offloader in virtual time: the last of twelve steps."""
    rows: dict[str, Row] = {}
    for (model, work), disk, share in itertools.product(
        planner_cases.MODELS.items(), (planner_cases.FAST, planner_cases.SLOW), (None, BUDGET)
    ):
        with (
            tempfile.TemporaryDirectory() as folder,
            pytest.MonkeyPatch.context() as patch,
            rigs(Path(folder), patch) as make_rig,
        ):
            rate = disk * work.saved_bytes / work.step_s
            budget = None if share is None else int(share * work.saved_bytes)
            options = {"bytes_per_s": rate, "sizes": work.blocks, "device_budget": budget, "announce": "none"}

            def last(policy: object, make_rig: MakeRig = make_rig, options: Row = options) -> tuple[Rig, float, int]:
                rig = make_rig(**options | {"policy": policy})
                rig.steps(12)
                return rig, rig.seconds[-1], rig.peaks[-1]

            keep = last("keep")
            plain = make_rig(**options | {"bytes_per_s": 1e12, "device_budget": 1 << 40, "policy": "auto"})
            plain.steps(3)
            profile = plain.offloader.profile
            assert profile is not None, "three steps make one"
            link = Link(write_bytes_per_s=rate, read_bytes_per_s=rate)
            search = Search(profile.with_links(disk=link), Limits(device_budget=budget, tiers=("nvme",)))
            choice = published_cut(search)
            fits = search.fits(choice) or budget is None
            found = {"greedy": last("greedy"), "auto": last("auto")}
            found["SSDTrain's cut"] = last(search.finish(choice)) if fits else found["greedy"]
            rows[f"{model}, virtual, disk × {disk:g}{'' if share is None else f', budget {share:.0%}'}"] = {
                "budget": share
            } | {name: _seen(step_s / keep[1], peak / keep[2], share) for name, (_, step_s, peak) in found.items()}
    return rows
