"""``actoffload plan`` for a recorded step: tables, JSON, and a plan that can be followed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from actoffload import Plan
from actoffload.planning.profile import Profile
from tests import commands
from tests.profiles import Accelerator, checkpointed, link, transformer_profile

GIB = 1 << 30
invoke, answer = partial(commands.invoke, "plan"), partial(commands.answer, "plan")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    accelerator = Accelerator(name="paper", flops=300e12, host=None, disk=link(5, 6))
    target = tmp_path_factory.mktemp("profiles") / "profile.json"
    transformer_profile(4096, 6, 4, accelerator=accelerator).save(target)
    return target


def test_for_a_person(file: Path, tmp_path: Path) -> None:
    text = invoke(str(file), "--device-budget", "1GiB")
    assert all(part in text for part in ("plan of auto on cuda, device budget 1.0 GiB", "layers.0", "other budgets"))
    slow = tmp_path / "slow.json"
    Profile.load(file).with_links(disk=link(0.05, 0.05)).save(slow)
    assert "declined: " in invoke(str(slow))


def test_a_checkpointed_step(file: Path, tmp_path: Path) -> None:
    base = checkpointed(Profile.load(file)).with_links(disk=link(50))
    base.save(tmp_path / "base.json")
    text = invoke(str(tmp_path / "base.json"), "--device-budget", str(base.baseline_peak_bytes))
    assert "6 checkpointed regions: " in text
    assert "regions run once" in text
    parts = answer(str(tmp_path / "base.json"))
    assert parts["plan"]["regions"] == 6
    assert parts["plan"]["once"], "without a budget, regions run once within the memory of checkpointing"
    assert parts["prediction"]["peak_bytes"] <= base.baseline_peak_bytes
    assert parts["prediction"]["step_s"] < base.step_s


def test_json_holds_all(file: Path) -> None:
    parts = answer(str(file), "--device-budget", "1GiB")
    assert set(parts) == {"profile", "parts", "prediction", "keep", "recompute_s", "budgets", "plan"}
    assert GIB in [row["device_budget"] for row in parts["budgets"]]
    assert parts["prediction"]["peak_bytes"] <= GIB
    assert parts["prediction"]["peak"]["phase"] in ("forward", "backward", "recompute")
    assert parts["keep"]["peak_bytes"] == parts["profile"]["baseline_peak_bytes"]
    assert sum(part["saved_bytes"] for part in parts["parts"]) == parts["profile"]["saved_bytes"]
    assert Plan.from_json(json.dumps(parts["plan"])).planner == "auto"


def test_a_budget_may_be_a_share(file: Path) -> None:
    whole = Profile.load(file).baseline_peak_bytes
    assert answer(str(file), "--device-budget", "40%")["prediction"]["peak_bytes"] <= 0.4 * whole
    assert answer(str(file), "--device-budget", str(whole))["plan"]["declined"].startswith("all fits")


def test_options_reach_the_planner(file: Path, tmp_path: Path) -> None:
    plan = answer(str(file), "--device-budget", "2GiB")["plan"]
    assert {entry["tier"] for entry in plan["entries"]} == {"", "nvme"}
    Profile.load(file).with_links(host=link(25)).save(tmp_path / "hosted.json")
    hosted = answer(str(tmp_path / "hosted.json"), "--device-budget", "2GiB", "--target", "host")
    assert {entry["tier"] for entry in hosted["plan"]["entries"]} == {"", "host"}


def test_a_plan_is_written_to_a_file(file: Path, tmp_path: Path) -> None:
    invoke(str(file), "--device-budget", "2GiB", "--plan-out", str(tmp_path / "plan.json"))
    assert Plan.from_json((tmp_path / "plan.json").read_text()).offloaded_bytes > 0


@pytest.mark.parametrize("contents", [None, b"\x89PNG\xff", b'{"benchmark": "rok", "version": 1}'])
def test_a_wrong_file_is_refused_with_the_command_that_writes_one(contents: bytes | None, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    if contents is not None:
        wrong.write_bytes(contents)
    printed = invoke(str(wrong), status=2)
    assert f"PROFILE '{wrong}': {'not a profile of version 2' if contents else 'No such file'}" in printed
    assert "`actoffload demo --profile FILE` writes one" in printed
    assert "offloader.profile.save(FILE)" in printed


def test_the_error_of_a_budget_below_the_floor_names_the_floor(file: Path) -> None:
    assert "the floor is 409600000 bytes" in invoke(str(file), "--device-budget", "1MiB", status=1)
