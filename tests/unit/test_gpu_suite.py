"""The suite for a machine with an accelerator: table and goals, what it does when a process fails, and a tiny run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_report, gpu_worker
from benchmarks.gpu_cases import GpuCase, cases
from benchmarks.modes import MODES

CASE: dict[str, Any] = {"name": "s", "reference": "keep", "ssdtrain": True}
GIB = 1 << 30


def _result(step_s: float, peak: int, **more: Any) -> dict[str, Any]:
    measured = {"median_step_s": step_s, "activation_peak_bytes": peak, "peak_device_bytes": 2 * peak, "ratio": step_s}
    return measured | {"identical": True} | more


def _points(**results: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"case": CASE, "mode": mode, "result": result} for mode, result in results.items()]


def test_the_table() -> None:
    moved = {"written_bytes_per_step": 2 * GIB, "wait_s_per_step": 0.25, "host_rss_bytes": 3 << 20}
    table = gpu_report.render(
        _points(
            keep={"error": "out of memory: x", "oom": True},
            host=_result(1.5, GIB, **moved),
            nvme=_result(1.5, GIB, identical=False),
            tiered=_result(1.5, GIB, last_gradients=None),
            TRL={"unavailable": "needs an accelerator"},
        )
    )
    assert "| s / keep | out of memory | - | - | - | - | - | - |" in table
    assert "| s / host | 1.500 | 1.500 | 1.00 GiB | 3.0 MiB | 2.00 GiB | 0.250 | yes |" in table
    assert "| s / nvme | 1.500 | 1.500 | 1.00 GiB | - | - | - | NO |" in table
    assert "| s / tiered | 1.500 | 1.500 | 1.00 GiB | - | - | - | first step |" in table
    assert "| s / TRL | needs an accelerator |" in table


def test_the_goals() -> None:
    results = {
        "keep": _result(1.0, 10 * GIB),
        "recompute": _result(1.3, 5 * GIB),
        "host": _result(1.01, 4 * GIB),
        "nvme": _result(1.1, 8 * GIB, predicted_step_s=1.0),
        "TRL": _result(1.5, 5 * GIB),
    }
    goals = {goal.what: goal for goal in gpu_report.goals(_points(**results))}
    assert goals["s, host: activation peak / keep's"].measured == pytest.approx(0.4)
    assert goals["s: TRL's step time / host's"].holds is False
    assert goals["s: host's activation peak / TRL's"].holds is True
    assert goals["s, below recompute's peak: least step time / keep's"].measured == 1.01
    assert goals["s, nvme: the plan's step time / the real one"].holds is False
    assert len(goals) == 6
    del results["host"], results["nvme"]
    (left,) = gpu_report.goals(_points(**results))
    assert left.measured is None
    assert left.holds is False
    del results["keep"]
    assert gpu_report.goals(_points(**results)) == []


@pytest.mark.parametrize("tiny", [True, False])
def test_every_case_names_modes_that_there_are(tiny: bool) -> None:
    found = cases(tiny)
    assert len({case.name for case in found}) == len(found)
    for case in found:
        assert {case.reference, *case.modes} <= set(MODES)
        budgets = [i for i, mode in enumerate(case.modes) if "device_budget" in MODES[mode].options]
        ours = [i for i, mode in enumerate(case.modes) if MODES[mode].ours and i not in budgets]
        assert not budgets or min(ours) < min(budgets), "a share of what is saved is known once it was counted"


class Processes:
    """Stands for `stream_worker`: each process says what is listed for it, as far as it was asked for."""

    def __init__(self, *said: list[dict[str, Any]]) -> None:
        self.said = list(said)
        self.asked: list[list[str]] = []

    def __call__(self, module: str, spec: dict[str, Any], **_: Any) -> Iterator[dict[str, Any]]:
        self.asked.append(spec["modes"])
        yield from self.said.pop(0)


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu.Suite:
    monkeypatch.setenv("OUT", str(tmp_path))
    return gpu.Suite(gpu.parse(["--tiny", "--skip-tests"]), [])


def _run(suite: gpu.Suite, monkeypatch: pytest.MonkeyPatch, processes: Processes) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(gpu, "stream_worker", processes)
    spec = {"model": "gpt2", "batch": 1, "dtype": "float32", "sizes": {}}
    suite.run_case(GpuCase(name="c", spec=spec, modes=("host", "TRL", "nvme")))
    assert processes.said == []
    return {point["mode"]: point["result"] for point in suite.points}


def test_after_a_failure_the_next_process_takes_the_rest(suite: gpu.Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, host, nvme = ({"mode": mode, **_result(1.0, 1)} for mode in ("keep", "host", "nvme"))
    crash = {"error": "status 1: illegal memory access", "oom": False}
    processes = Processes([keep, host, crash], [keep, nvme])
    results = _run(suite, monkeypatch, processes)
    assert processes.asked == [["host", "TRL", "nvme"], ["nvme"]]
    assert list(results) == ["keep", "host", "TRL", "nvme"]
    assert results["TRL"]["error"] == crash["error"]
    assert suite.finish() == 0, "a peer that fails is no failure of ours"


def test_without_its_reference_a_case_is_left_out(suite: gpu.Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    results = _run(suite, monkeypatch, Processes([{"mode": "keep", "error": "out of memory: x", "oom": True}]))
    assert results["keep"]["oom"] is True
    assert results["nvme"]["left_out"] == "keep was not measured"


def test_gradients_that_differ_fail_the_suite(suite: gpu.Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [{"mode": mode, **_result(1.0, 1)} for mode in ("keep", "host", "TRL", "nvme")]
    said[2]["identical"] = False
    _run(suite, monkeypatch, Processes(said))
    assert suite.finish() == 0, "those of a peer are its own affair, and are in the table"
    suite.points[1]["result"]["identical"] = False
    assert suite.finish() == 1


def test_one_bit_in_a_later_step_makes_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"model": "gpt", "batch": 1, "gpt": {"layers": 1, "width": 16, "seq": 16}, "dtype": "float32"}
    more = {"device": "cpu", "steps": 1, "threads": 1, "path": None, "modes": [], "reference": "keep", "limit_s": 60.0}
    series = gpu_worker.Series(spec | more)
    real, wrong, steps = series.run.first_step, 0, 0

    def first_step() -> str:
        nonlocal steps
        steps += 1
        return real() if steps != wrong else "another bit"

    monkeypatch.setattr(series.run, "first_step", first_step)
    assert series.reference()["reproducible"] is True
    assert steps == 3
    assert series.mode("recompute")["identical"] is True
    assert steps == 5
    wrong = 6  # the first of the next mode
    assert series.mode("recompute")["identical"] is False
    wrong = 9  # the last of the one after it
    assert series.mode("recompute")["identical"] is False


def test_the_time_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["--tiny", "--skip-tests", "--budget-s", "0"]) == 0
    (file,) = tmp_path.glob("gpu_tiny_*.json")
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    assert {point["result"]["left_out"] for point in points} == {"no time was left"}
    assert "Left out" in file.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_tiny_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["--tiny", "--path", str(tmp_path)]) == 0, capsys.readouterr().out
    (file,) = tmp_path.glob("gpu_tiny_*.json")
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    assert {point["case"]["name"] for point in points} == {case.name for case in cases(True)}
    differ = [point for point in points if point["result"].get("identical") is False or "error" in point["result"]]
    assert differ == []
    results = {point["mode"]: point["result"] for point in points if point["case"]["name"] == "tiny gpt2"}
    assert results["keep"]["reproducible"] is True
    assert results.pop("TRL")["unavailable"] == "needs an accelerator"
    assert [mode for mode, result in results.items() if result.get("identical") is not True] == ["keep"]
    assert results["nvme, all"]["written_bytes_per_step"] > 0
    whole = results["nvme, all"]["statistics"]["baseline_peak_bytes"]
    assert results["budget 35 %"]["activation_peak_bytes"] <= 0.35 * whole
