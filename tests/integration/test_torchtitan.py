"""torchtitan 0.3.0: its llama3 debug model on the CPU, with and without the config that its command line chooses."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import launch

Found = dict[str, Any]
PAIRS = ["none, flag", "none, variable", "full, flag", "full, override", "selective, variable"]
"""The override is the one in docs/upstream."""


def shown(name: str) -> list[pytest.MarkDecorator]:
    """The cell of the table that a pair proves."""
    ways = {"flag": "flag", "variable": "env"}
    checkpointing, way = name.split(", ")
    if way not in ways:
        return []
    return [pytest.mark.proves("torchtitan", checkpointing=checkpointing != "none", way=ways[way])]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of one process that ran every command line of the worker."""
    pytest.importorskip("torchtitan")
    place = tmp_path_factory.mktemp("titan")
    env = {"ACTOFFLOAD": "auto", "ACTOFFLOAD_PATH": str(place), "ACTOFFLOAD_MIN_BYTES": "1KiB"}
    env |= {"ACTOFFLOAD_DEVICE_BUDGET": "40%", "ACTOFFLOAD_DEBUG": "1", "ACTOFFLOAD_POLICY": "greedy"}
    env |= {"HF_DATASETS_CACHE": str(place / "datasets")}
    answer: Found = launch("tests.integration.workers.titan", 1, place, env=env)[0]
    return {**answer, "printed": (place / "log0.txt").read_text()}


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [pytest.param(name, marks=shown(name)) for name in PAIRS])
def test_losses_and_weights_are_those_of_torchtitan_alone(found: Found, offloaded: str) -> None:
    plain, ours = found["rows"]["none"], found["rows"][offloaded]  # also for rows with checkpoints, which change no bit
    assert len(plain["losses"]) == 4, "two steps, and validation after each"
    assert len({loss for _, loss, *_ in plain["losses"]}) == 4, "a model that learns has another loss in each step"
    assert ours["losses"] == plain["losses"]
    assert ours["weights"] == plain["weights"]
    assert plain["statistics"] is None
    statistics = ours["statistics"]
    assert statistics.nvme_written_bytes > 0
    assert statistics.nvme_read_bytes > 0
    assert statistics.resident_peak_bytes < statistics.baseline_peak_bytes
    assert statistics.live_records == 0
    assert ours["debug"] == ("override" not in offloaded), "torchtitan has a flag of this variable's name"


@pytest.mark.slow
def test_each_run_announces_once_and_logs_its_report(found: Found) -> None:
    assert found["printed"].count("actoffload: target nvme") == len(PAIRS)
    assert found["printed"].count("  storage engine ") == len(PAIRS) - 1, "one report for each run but the override's"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("CUDA graphs", "training.disable_cuda_graphs"),
        ("its own offloading", "compile.memory_policy='sac_and_offload'"),
        ("one graph", "compile.mode='aot_fx_trace'"),
        ("wrong target", "--activation-checkpoint.target"),
        ("wrong size", "activation_checkpoint.device_budget='much'"),
        ("unknown variable", "ACTOFFLOAD_BUDGET='1GiB'"),
    ],
)
def test_a_bad_option_is_refused_by_its_flag_before_training(found: Found, case: str, words: str) -> None:
    assert words in found["refused"][case]


def test_a_missing_torchtitan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torchtitan.")]:
        monkeypatch.delitem(sys.modules, name)  # another test of this process may have imported it
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "actoffload.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"pip install actoffload\[torchtitan\]"):
        importlib.import_module("actoffload.integrations.torchtitan")


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchtitan imports Triton, but does not depend on it."""
    pytest.importorskip("tyro")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").write_text("import triton")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "actoffload.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"needs torchtitan, tested with 0\.3\.0 \(pip install triton\)"):
        importlib.import_module("actoffload.integrations.torchtitan")
