"""The benchmarks: their verdicts (bits, turns, bounds) are right, and each benchmark runs with tiny sizes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from actoffload.testing.gpt import GPT, GPTConfig
from benchmarks import (
    gpu,
    gpu_needs,
    gpu_report,
    gpu_worker,
    harness,
    memory_over_step,
    micro,
    micro_hooks,
    steps_cpu,
    worker,
)
from benchmarks.gpu_cases import GpuCase, cases
from benchmarks.modes import MODES
from benchmarks.peers import Unavailable
from benchmarks.worker import Run
from benchmarks.workloads import gpt
from tests.programs import warm_python

SPEC = {
    "model": "gpt",
    "gpt": {"layers": 2, "width": 64, "seq": 64, "vocab": 32},
    "batch": 2,
    "device": "cpu",
    "dtype": "float32",
    "mode": "keep",
    "options": {"min_bytes": 0},
}
GIB = 1 << 30

# -- bits -------------------------------------------------------------------------------------------------------------


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)
    model(torch.randn(4, 7, dtype=dtype)).sum().backward()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_checksum_sees_one_bit_and_an_exchange(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(dtype)
    before = worker.gradients_checksum(model)
    assert before == worker.gradients_checksum(_model(dtype))
    first = next(model.parameters()).grad
    assert first is not None
    bits = first.view(torch.uint8)
    bits[0, 0] ^= 1
    assert worker.gradients_checksum(model) != before
    bits[0, 0] ^= 1
    first[0], first[1] = first[1].clone(), first[0].clone()  # the plain sum is the same, the weighted one differs
    assert worker.gradients_checksum(model) != before
    first[0], first[1] = first[1].clone(), first[0].clone()
    monkeypatch.setattr(worker, "CHECK_CHUNK", 4)
    assert worker.gradients_checksum(model) == before, "the size of the chunks changes nothing"


@pytest.mark.parametrize("name", ["recompute", "nvme, all", "keep, same memory", "save_on_cpu", "torch.save"])
def test_each_mode_gives_the_same_gradients_and_leaves_the_model_as_it_was(name: str, tmp_path: Path) -> None:
    expected = Run(SPEC).first_step()
    run = Run({**SPEC, "path": str(tmp_path)})
    before = [dict(vars(module)) for module in run.model.modules()]
    run.open(name, {"engine": "memory"})
    assert [run.first_step() for _ in range(3)] == [expected] * 3
    run.close()
    assert list(tmp_path.iterdir()) == []
    assert [module.keys() for module in before] == [vars(module).keys() for module in run.model.modules()]
    run.open("keep")
    assert run.first_step() == expected


@pytest.mark.parametrize("name", sorted(steps_cpu.models(True)))
def test_every_case_trains(name: str) -> None:
    pytest.importorskip("transformers")
    run = Run(SPEC | steps_cpu.models(True)[name])
    run.make_static()
    assert run.static_bytes > 1 << 20
    run.open("recompute")
    recomputed = run.first_step()
    run.open("keep")
    assert run.first_step() == recomputed
    assert float.fromhex(run.losses[0]) > 0


def test_one_bit_in_a_later_step_makes_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"model": "gpt", "batch": 1, "gpt": {"layers": 1, "width": 16, "seq": 16}, "dtype": "float32"}
    more = {"device": "cpu", "steps": 1, "untimed": 1, "threads": 1, "path": None, "modes": [], "reference": "keep"}
    series = gpu_worker.Series(spec | more | {"limit_s": 60.0})
    real, wrong, steps = series.run.first_step, 0, 0

    def first_step() -> str:
        nonlocal steps
        steps += 1
        return real() if steps != wrong else "another bit"

    monkeypatch.setattr(series.run, "first_step", first_step)
    assert series.reference()["reproducible"] is True
    assert series.mode("recompute")["identical"] is True
    assert steps == 5
    wrong = 6  # the first of the next mode
    assert series.mode("recompute")["identical"] is False
    wrong = 9  # the last step of the mode after that
    assert series.mode("recompute")["identical"] is False


def test_steps_are_timed_again_where_a_plan_was_made_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([1, 2, 2, 2])
    series = object.__new__(gpu_worker.Series)
    vars(series).update(spec={"steps": 2}, run=SimpleNamespace(measure=lambda take: take(), timed=lambda steps: {}))
    monkeypatch.setattr(series, "_plans", lambda: next(made), raising=False)
    assert series._timed() == {"plans": 2, "plans_while_timed": 0}


def _sample(median_s: float, rss: int = 2000, **more: Any) -> harness.Sample:
    facts = {"step_s": [median_s], "median_step_s": median_s, "peak_rss_bytes": rss, "static_rss_bytes": 100}
    trace = {"losses": ["0x1p+0"], "first_gradients": "a", "last_parameters": "b"}
    counted = {"statistics": {"baseline_peak_bytes": 1000, "resident_peak_bytes": 200}}
    used = {"system_s_per_step": median_s / 10, "cpu_s_per_step": median_s, "others_cpu_share": 0.0}
    return facts | trace | counted | used | {"written_bytes_per_step": 900.0, "wait_s_per_step": 0.5} | more


@pytest.mark.parametrize("key", ["losses", "first_gradients", "last_parameters"])
def test_one_bit_makes_a_difference(key: str) -> None:
    other = _sample(2.0) | {key: ["0x1.8p+0"] if key == "losses" else "c"}
    same = [_sample(2.0)]
    assert steps_cpu.compare(same, {"ratio": same, "moving": same})["identical"] is True
    assert steps_cpu.compare([other], {"ratio": same, "moving": same})["identical"] is False
    assert steps_cpu.compare(same, {"ratio": same, "moving": [other]})["identical"] is False


# -- turns and bounds -------------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_each_turn() -> None:
    # The machine becomes three times slower after the first turn, so medians of all steps would give 1.2 and 1.5.
    keep = [_sample(0.0, step_s=[2.0, 6.0, 6.0])]
    ours = [_sample(0.0, step_s=[2.4, 7.2, 6.6])]
    assert harness.ratios([*ours, _sample(9.0)], [*keep, _sample(6.0)]) == [pytest.approx(1.2), pytest.approx(1.5)]
    with pytest.raises(ValueError, match="shorter"):
        harness.ratios(ours, [_sample(2.0)])


TURNING = """
import json, sys
spec = json.loads(sys.argv[1])
def note(what):
    open(spec["log"], "a").write(f"{spec['name']} {what},")
if spec["name"] == "fails at once":
    raise SystemExit("a bad day")
if spec["name"] == "not here":
    print(json.dumps({"unavailable": "no headers"}))
    raise SystemExit
print(json.dumps({"turn": 0}), flush=True)
step_s = []
for _ in sys.stdin:
    note("begins")
    if spec["name"] == "fails in a turn":
        raise SystemExit("a bad turn")
    step_s.append(len(step_s) + 1.0)
    note("ends")
    print(json.dumps({"turn": len(step_s)}), flush=True)
print(json.dumps({"step_s": step_s, "median_step_s": 1.5, "peak_rss_bytes": 1 << 20}))
"""
"""A worker that logs the begin and end of each of its steps."""


def test_workers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker's step ends before the next worker's begins. A worker that fails or is unavailable delays none."""
    (tmp_path / "turning.py").write_text(TURNING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(harness.ROOT)]))
    monkeypatch.setattr(harness, "WORKER", "turning")
    log = tmp_path / "log"
    names = ("a", "fails at once", "fails in a turn", "not here", "b")
    group = {name: {"name": name, "log": str(log), "steps": 2} for name in names}
    samples = harness.take_rounds([group], 1, limit_s=60, after_round=lambda taken: None)
    first = ["a begins", "a ends", "fails in a turn begins", "b begins", "b ends"]
    assert log.read_text(encoding="utf-8").split(",") == [*first, "b begins", "b ends", "a begins", "a ends", ""]
    assert samples["a"][0]["step_s"] == samples["b"][0]["step_s"] == [1.0, 2.0]
    assert "a bad day" in samples["fails at once"][0]["error"]
    assert "a bad turn" in samples["fails in a turn"][0]["error"]
    assert samples["not here"][0]["unavailable"] == "no headers"


def test_the_bounds_of_e2e() -> None:
    samples = {"keep": [_sample(2.0)] * 2, "keep, same memory": [_sample(1.75, 1900)] * 2}
    samples["default"] = [_sample(2.1, 1300)] * 2
    part = steps_cpu.e2e(True, "")
    (row,) = steps_cpu.rows_of(part, {f"gpt/{mode}": taken for mode, taken in samples.items()}).values()
    assert row["above_static_bytes"] == 1200
    bounds = part.bounds({"gpt": row, "gpt, layers × 2": row | {"ratio": 0.9, "moving": 1.22}})
    assert {bound.what: (round(bound.measured or 0, 6), bound.holds) for bound in bounds} == {
        "gpt: saved bytes gone from peak RSS": (0.7, True),
        "gpt: step time / keep's": (1.05, True),
        "gpt, layers × 2: change of the step time / keep's": (0.15, False),  # a smaller ratio is a change, too
        "gpt: step time / keep's in the same memory": (1.2, False),
        "gpt, layers × 2: change of the step time / keep's in the same memory": (0.02, True),
    }


def test_the_goals_of_the_gpu_suite() -> None:
    def points(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        case = {"name": "s", "reference": "keep", "ssdtrain": True}
        return [{"case": case, "mode": mode, "result": result} for mode, result in results.items()]

    results = {
        "keep": _result(1.0, 10 * GIB, hides_bytes=5.5 * GIB),
        "recompute": _result(1.3, 5 * GIB),
        "selective": _result(1.2, 6 * GIB),
        "host": _result(1.01, 4 * GIB),
        "nvme": _result(1.1, 8 * GIB, predicted_step_s=1.0),
        "TRL": _result(1.5, 5 * GIB),
    }
    goals = {goal.what.partition(" (")[0]: goal for goal in gpu_report.goals(points(results))}
    peak = goals["s, host: activation peak / keep's"]
    assert peak.measured == pytest.approx(0.4)
    assert peak.what.endswith("(needs 6.00 GiB to leave, 5.50 GiB can hide: NOT POSSIBLE at no loss)")
    assert goals["s: TRL's step time / host's"].holds is False
    assert goals["s: host's activation peak / TRL's"].holds is True
    below = goals["s, below recompute's peak: least step time / keep's"]
    assert (below.measured, below.what.endswith("(needs 5.00 GiB to leave, 5.50 GiB can hide)")) == (1.01, True)
    assert goals["s, nvme: the plan's step time / the real one"].holds is False
    assert len(goals) == 6
    verdict = "host is faster than the fastest recomputation (recompute) by 1.287 ×"
    assert gpu_report.verdicts(points(results)) == [f"s: at this peak (5.00 GiB), {verdict}."]
    results["selective"]["activation_peak_bytes"] = 5 * GIB
    assert "(selective) by 1.188 ×" in gpu_report.verdicts(points(results))[0]
    # From another machine, on which all steps take half the time, so that only the ratios compare.
    results[gpu_report.CHECKPOINTED] = _result(1.2, 5.2 * GIB) | {"median_step_s": 0.6}
    goals = {goal.what: goal for goal in gpu_report.goals(points(results))}
    assert goals["s, checkpointed: step time / alone"].measured == pytest.approx(1.2 / 1.3)
    assert goals["s, checkpointed: activation peak / alone"].holds is False
    del results["host"], results[gpu_report.CHECKPOINTED]
    assert "the lowest of its peaks is 8.00 GiB" in gpu_report.verdicts(points(results))[0]
    del results["nvme"]
    (left,) = gpu_report.goals(points(results))
    assert (left.measured, left.holds) == (None, False)


def test_results_name_no_host_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    arguments = ["--path", f"{harness.ROOT}/x", "--path", "/mnt/x"]
    results = harness.Results("micro", arguments, {"path": "/mnt/x", "rounds": 3}, variant="a")
    assert not results.finish("| a |\n", [harness.Bound(what="x", measured=2.0, bound=1.0, unit=" ×")])
    text = results.file.read_text(encoding="utf-8")
    facts = json.loads(text)
    assert facts["command"] == "python -m benchmarks.micro --path ./x --path DIR"
    assert (facts["configuration"], facts["bounds"][0]["holds"]) == ({"rounds": 3}, False)
    assert {"cpu", "cores", "torch", "commit", "gpu"} <= set(facts["environment"])
    assert os.uname().nodename not in {str(value) for value in facts["environment"].values()}
    assert not any(folder in text for folder in (str(harness.ROOT), str(Path.home()) + "/", "/mnt"))


# -- the suite for a machine with an accelerator ----------------------------------------------------------------------


def _result(step_s: float, peak: float, **more: Any) -> dict[str, Any]:
    measured = {"median_step_s": step_s, "activation_peak_bytes": peak, "peak_device_bytes": 2 * peak, "ratio": step_s}
    return measured | {"identical": True} | more


@pytest.mark.slow
def test_every_case_fits_the_device() -> None:
    pytest.importorskip("peft")
    for case in cases(False):
        need = gpu_needs.needs(case)
        assert 0 < need.saved < need.peak <= gpu_needs.FITS_BYTES, case.name
        assert bool(need.states) == case.optimizer


def test_a_budget_may_be_the_peak_of_another_mode() -> None:
    series = object.__new__(gpu_worker.Series)
    vars(series).update(spec={"reference": "keep"}, baseline_bytes=90, peaks={"keep": 100})
    with pytest.raises(Unavailable, match="the peak of recompute is not known"):
        series._budget("recompute's peak")
    series.peaks["recompute"] = 40
    assert series._budget("recompute's peak") == {"device_budget": 30}, "the step needs 10 bytes beside saved tensors"
    assert series._budget("budget 35 %") == {"device_budget": 31}
    series.peaks["recompute"] = 10
    with pytest.raises(Unavailable, match="no room"):
        series._budget("recompute's peak")
    series.run = SimpleNamespace(static_bytes=500)  # type: ignore[assignment]
    assert series._budget(gpu_report.CHECKPOINTED) == {"device_memory": 510}, "`device_memory` counts all memory"


@pytest.mark.parametrize("tiny", [True, False])
def test_every_case_names_modes_that_there_are(tiny: bool) -> None:
    found = cases(tiny)
    assert len({case.name for case in found}) == len(found)
    for case in found:
        assert {case.reference, *case.modes} <= set(MODES)
        budgets = [i for i, mode in enumerate(case.modes) if "device_budget" in MODES[mode].options]
        ours = [i for i, mode in enumerate(case.modes) if MODES[mode].ours and i not in budgets]
        assert not budgets or min(ours) < min(budgets), (
            "a share of the saved bytes needs a mode before it that counts them"
        )
        for i in budgets:
            of = MODES[case.modes[i]].options["device_budget"]
            assert not isinstance(of, str) or of in case.modes[:i], "another mode's peak needs that mode before it"


def _run_case(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *processes: list[dict[str, Any]], arguments: tuple[str, ...] = ()
) -> tuple[gpu.Suite, list[list[str]]]:
    """Run a case with these results of its processes; returns the suite and the modes that each process had to run."""
    monkeypatch.setenv("OUT", str(folder))
    suite, printed, asked = gpu.Suite(gpu.parse(["--tiny", *arguments]), []), list(processes), []

    def stream(module: str, spec: dict[str, Any], **_: Any) -> Iterator[dict[str, Any]]:
        asked.append(spec["modes"])
        yield from printed.pop(0)

    monkeypatch.setattr(gpu, "stream_worker", stream)
    spec = {"model": "gpt2", "batch": 1, "dtype": "float32", "sizes": {}}
    suite.run_case(GpuCase(name="c", spec=spec), ("host", "TRL", "nvme"))
    assert printed == []
    return suite, asked


def test_after_a_failure_the_next_process_takes_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, host, nvme = ({"mode": mode, **_result(1.0, 1)} for mode in ("keep", "host", "nvme"))
    crash = {"error": "status 1: illegal memory access", "oom": False}
    suite, asked = _run_case(monkeypatch, tmp_path, [keep, host, crash], [keep, nvme])
    assert asked == [["host", "TRL", "nvme"], ["nvme"]]
    assert [point["mode"] for point in suite.points] == ["keep", "host", "TRL", "nvme"]
    assert suite.points[2]["result"]["error"] == crash["error"]
    assert suite.finish() == 0, "only our own failures count"
    suite.points[1]["result"]["identical"] = False
    assert suite.finish() == 1
    # A resumed suite measures only points that were left out.
    suite.points[1]["result"] = {"left_out": "no time was left"}
    suite.write()
    arguments = ("--resume", str(suite.results.file))
    suite, asked = _run_case(monkeypatch, tmp_path, [keep, host], arguments=arguments)
    assert asked == [["host"]]
    assert [point["mode"] for point in suite.points] == ["keep", "TRL", "nvme", "host"]


def test_without_its_reference_a_case_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, _ = _run_case(monkeypatch, tmp_path, [{"mode": "keep", "error": "out of memory: x", "oom": True}])
    assert suite.points[0]["result"]["oom"] is True
    assert suite.points[-1]["result"]["left_out"] == "keep was not measured"


# -- each runs --------------------------------------------------------------------------------------------------------


def test_the_arguments_on_the_gpu_page_are_known() -> None:
    page = (harness.ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    passed = re.findall(r"""GPU_ARGS=(?:'([^']+)'|"([^"]+)")""", page)
    assert len(passed) > 5
    for one in passed:
        gpu.parse(shlex.split("".join(one)))  # ends where an option or a case is unknown


def test_a_missing_peer_ends_the_suite_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "trl" else name)
    with pytest.raises(SystemExit, match=r"MISSING: trl\. .make gpu-wheels"):
        gpu.main([])


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_the_suite_on_the_simulated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the built-in GPT: other tests make the suite's own models, for which a process imports Transformers."""
    monkeypatch.setenv("OUT", str(tmp_path))
    budgets = ("recompute's peak",)  # in a tiny model, the recomputation of one block needs more than 35 %
    modes = ("recompute", "default", "TRL", *budgets, "host, all")
    spec = gpt(layers=4, width=128, sequence=128, batch=4) | {"dtype": "float32"}
    case = GpuCase(name="gpt", spec=spec, modes=modes, ssdtrain=True)
    monkeypatch.setattr(gpu, "cases", lambda tiny: [case])
    monkeypatch.setattr(gpu, "UNTIMED", 6)  # by then plans are made
    assert gpu.main(["--tiny", "--path", str(tmp_path)]) == 0, capsys.readouterr().out
    (file,) = tmp_path.glob("gpu_tiny_*.json")
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    results = {point["mode"]: point["result"] for point in points}
    assert list(results) == ["keep", *modes]
    assert results.pop("TRL")["unavailable"] == "needs CUDA"
    for mode, result in results.items():
        assert result["identical" if "ratio" in result else "reproducible"] is True, (mode, result)
        assert result["step_s"]
        assert result["peak_device_bytes"] > result["activation_peak_bytes"] > 0
        assert result["plans_while_timed"] == 0
        assert (result["plans"] > 0) == (mode in ("default", *budgets)), mode
        assert 0 <= result["held_bytes"] <= result["optimizer_peak_bytes"], mode
        # A tiny model moves only if forced to, because the window of copies under way is larger than the model.
        assert MODES[mode].ours >= (result.get("written_bytes_per_step", 0) > 0) >= (mode == "host, all"), mode
    keep = results["keep"]
    assert keep["hides_bytes"] == pytest.approx(keep["forward_s"] * keep["link_bytes_per_s"])
    assert keep["held_bytes"] < 4096, "only the loss is held"
    for mode in ("recompute", *budgets):
        assert results[mode]["activation_peak_bytes"] < keep["activation_peak_bytes"], mode
    out = capsys.readouterr().out
    assert f"{case.name}: at this peak (" in out
    assert "| gpt, default: step time / keep's |" in out
    assert "to leave, " in out
    assert "0 failed, 0 differ, tests failed: False" in out


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_the_cpu_benchmarks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    arguments = ["--tiny", "--path", str(tmp_path)]
    few = ["--rounds", "1", "--steps", "3"]
    assert steps_cpu.main([*arguments, "--part", "trace", *few]) == 0, capsys.readouterr().out
    (file,) = tmp_path.glob("steps_cpu_trace_*.json")
    (row,) = json.loads(file.read_text(encoding="utf-8"))["summary"].values()
    assert row["identical"] is True
    assert row["written_bytes_per_step"] > 0
    assert str(tmp_path) not in file.read_text(encoding="utf-8")
    assert memory_over_step.main([*arguments, "--steps", "6"]) == 0, capsys.readouterr().out
    (curves,) = tmp_path.glob("memory_over_step_*.json")
    for name, row in json.loads(curves.read_text(encoding="utf-8"))["rows"].items():
        assert 0 < max(row["resident_bytes"]) <= row["saved_bytes"], name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_study_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One of its programs, where PyTorch is imported; the bounds on kinds of memory and bytes on disk are its own.

    It is ``actoffload trace`` that starts the program, so the command has to name the interpreter.
    """
    from benchmarks import study

    python = warm_python()

    def run(words: list[str], **more: Any) -> Any:
        return subprocess.run([python, *words[1:-3], python, *words[-3:]], **more)

    monkeypatch.setattr(study, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    monkeypatch.setattr(study, "PIXELS", 40)
    monkeypatch.setattr(study, "RUNS", {"actoffload": study.RUNS["actoffload"]})
    monkeypatch.setenv("OUT", str(tmp_path))
    assert study.main(["--tiny", "--path", str(tmp_path)]) == 0, capsys.readouterr().out
    assert {file.name for file in tmp_path.glob("*.png")} == {"study-light.png", "study-dark.png"}


def test_micro_without_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples run in this process, because only right times need a process for each."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(harness, "run_sample", lambda module, spec, **_: micro_hooks.measure(spec))
    monkeypatch.setattr("benchmarks.micro_spool.shutil.which", lambda name: None)
    monkeypatch.setattr(micro, "SCALED", ("small",))
    monkeypatch.setattr(micro_hooks, "KINDS", {kind: micro_hooks.KINDS[kind] for kind in ("small", "moves")})
    small = ["--region", "4", "--seconds", "0.02", "--rounds", "1", "--pairs", "1", "--few", "10", "--many", "20"]
    small += ["--parts", "hooks", "scaling", "spool"]
    assert micro.main(["--path", str(tmp_path), "--blocks", str(1 << 20), *small]) in (0, 1)
    assert "Not measured: fio: fio is not installed" in capsys.readouterr().out
    (file,) = (tmp_path / "out").glob("micro_*.json")
    facts = json.loads(file.read_text(encoding="utf-8"))
    assert set(facts["samples"]) == {"hooks", "scaling", "spool"}
    assert len(facts["bounds"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


# -- the small GPT of the demo and the benchmarks ----------------------------------------------------------------------


def test_a_position_sees_nothing_after_it() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, seq=16, head_width=16))
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 0
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])
