"""``actoffload rok``: taking samples, resuming, failures as results, the command, a real run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from actoffload.analysis.plots import has_matplotlib
from actoffload.analysis.rok import PRESETS, Preset
from actoffload.analysis.rok_run import RokRun, load_results
from actoffload.cli import rok as rok_command
from actoffload.cli import rok_models, rok_worker
from actoffload.cli.app import app
from actoffload.errors import ActOffloadError, BudgetError, ConfigError
from tests.rok_samples import CASE, MACHINE, PRESET, all_points, failed, sample

runner = CliRunner()


class Launcher:
    """Takes samples by a table, and notes what was asked for."""

    def __init__(self, **results: dict[str, Any]) -> None:
        self.results = results
        self.specs: list[dict[str, Any]] = []

    def __call__(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.specs.append(spec)
        default = {
            k: v for k, v in sample("").items() if k not in ("case", "series", "level", "repeat", "device_budget")
        }
        return self.results.get(spec["series"], default)

    @property
    def order(self) -> list[tuple[str, int, int | None]]:
        return [(s["series"], s["case"]["batch"], s["device_budget"]) for s in self.specs]


def make_run(file: Path, launch: Any, preset: Preset = PRESET, **options: Any) -> RokRun:
    return RokRun(preset, file, environment=dict(MACHINE), command="rok", launch=launch, **options)


def worker_spec(series: str, **changes: Any) -> dict[str, Any]:
    values = {"device": "cpu", "threads": None, "warm_up": 3, "steps": 1, "target": "nvme", "memory_limit": None}
    return values | {"case": asdict(CASE), "series": series, "device_budget": None, "path": None} | changes


# -- taking samples ---------------------------------------------------------------------------------------------------


def test_variants_take_turns_and_budgets_come_from_what_was_counted(tmp_path: Path) -> None:
    launch = Launcher(recompute=sample("recompute", 30))
    run = make_run(tmp_path / "r.json", launch)
    assert len(list(run.run())) == 2 * 2 * 6
    turn = [("keep", None), ("offload", None), ("recompute", None), ("hybrid", None), ("hybrid", 50), ("hybrid", 30)]
    assert launch.order == [(s, batch, budget) for batch in (2, 2, 4, 4) for s, budget in turn]


def test_a_run_is_resumed_and_only_failures_are_taken_again(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    first = Launcher(offload={"error": "boom", "oom": False})
    steps = make_run(file, first).run()
    for _ in range(5):
        next(steps)
    steps.close()
    assert len(load_results(file)["samples"]) == 5
    assert not list(tmp_path.glob("*.partial"))
    second = Launcher()
    assert len(list(make_run(file, second).run())) == 24 - 5
    assert list(make_run(file, second).run()) == []
    third = Launcher()
    assert [job.variant.series for job, _ in make_run(file, third, retry=True).run()] == ["offload"]
    assert len(load_results(file)["samples"]) == 24


def test_results_of_other_options_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    list(make_run(file, Launcher()).run())
    with pytest.raises(ConfigError, match="another warm_up, memory_limit; name a new file"):
        make_run(file, Launcher(), replace(PRESET, warm_up=2), memory_limit=5)
    file.write_text('{"benchmark": "gpu"}')
    with pytest.raises(ConfigError, match="no results of `actoffload rok`"):
        make_run(file, Launcher())


def test_results_show_no_path_of_this_machine() -> None:
    given = ["rok", "--out", "/data/me/r.json", "--path=/mnt/nvme0/x", "--level", "40%", "--preset=cpu", "r.json", ""]
    shown = ["rok", "--out", "r.json", "--path=x", "--level", "40%", "--preset=cpu", "r.json", ""]
    assert rok_command.without_folders(given) == shown


def test_the_offloaders_own_baseline_does_where_keep_ran_out_of_memory(tmp_path: Path) -> None:
    offload = sample("offload") | {"statistics": {"baseline_peak_bytes": 400}}
    launch = Launcher(keep={"error": "out of memory", "oom": True}, offload=offload)
    list(make_run(tmp_path / "r.json", launch).run())
    assert ("hybrid", 2, 200) in launch.order


# -- the worker -------------------------------------------------------------------------------------------------------


def test_the_worker_measures_the_same_training_in_every_series(tmp_path: Path) -> None:
    keep = rok_worker.measure(worker_spec("keep"))
    recompute = rok_worker.measure(worker_spec("recompute"))
    path = [str(tmp_path)]
    offload = rok_worker.measure(worker_spec("offload", path=path))
    budget = keep["counted_peak_bytes"] * 6 // 10
    hybrid = rok_worker.measure(worker_spec("hybrid", path=path, device_budget=budget, warm_up=4))
    assert keep["losses_hex"] == recompute["losses_hex"] == offload["losses_hex"] == hybrid["losses_hex"][:4]
    assert len(set(keep["losses_hex"])) == 4
    assert keep["flops"] == 3 * 2 * (2 * 128 * (2 * 12 * 128**2 + 128 * 64) + 2 * 2 * 2 * 128 * 128 * 128)
    block = 2 * 128 * 128 * 4 * 16  # input, norm, q k v, attention, projection's input, norm, 4 + 4 of the MLP
    assert keep["activation_peak_bytes"] > 2 * block
    assert block < recompute["activation_peak_bytes"] < keep["activation_peak_bytes"] - block / 2
    assert hybrid["activation_peak_bytes"] <= budget
    assert hybrid["planning"]["history"] == ["first plan"]


def test_the_worker_turns_failures_into_results(capsys: pytest.CaptureFixture[str]) -> None:
    spec = worker_spec("keep", case=asdict(replace(CASE, model="abacus")))
    assert rok_worker.main(json.dumps(spec)) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "model='abacus': choose one of 'gpt-small', 'gpt'" in result["error"]
    assert result["oom"] is False
    text = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"
    assert rok_worker.failure(RuntimeError(text))["oom"] is True
    assert rok_worker.failure(torch.OutOfMemoryError("CUDA out of memory"))["oom"] is True
    assert rok_worker.failure(ActOffloadError("x"))["oom"] is False
    assert rok_worker.failure(BudgetError(1, 2, "floor"))["below_floor"] is True


def test_models_need_sizes_that_fit_and_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="hidden=100: must be a multiple of head_width=64"):
        rok_models.build(replace(CASE, hidden=100))
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs Transformers: pip install actoffload\[hf\]"):
        rok_models.build(replace(CASE, model="bert"))


@pytest.mark.parametrize("model", ["gpt", "bert", "t5"])
def test_transformers_models(model: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    workload = rok_models.build(replace(CASE, model=model, layers=3))
    assert len(workload.blocks) == 3
    for name in workload.blocks:
        workload.model.get_submodule(name)
    loss = workload.loss(torch.randint(1, 64, (2, 129)))
    torch.autograd.backward(loss)
    assert torch.isfinite(loss)
    assert workload.model.training


# -- the command ------------------------------------------------------------------------------------------------------


def invoke(*arguments: str, status: int = 0) -> str:
    result = runner.invoke(app, ["rok", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def write(file: Path, samples: Sequence[dict[str, Any]]) -> Path:
    how = {"device": "cpu", "threads": 1, "warm_up": 1, "steps": 1, "target": "auto", "memory_limit": None}
    payload = {"benchmark": "rok", "version": 1, "environment": MACHINE, "measured_with": how, "samples": samples}
    file.write_text(json.dumps(payload))
    return file


def test_redraw_prints_what_dominates_and_draws(tmp_path: Path) -> None:
    file = write(tmp_path / "r.json", all_points()[:-1])
    text = invoke("--redraw", str(file))
    assert "out of memory" in text
    assert "hybrid 60%" in text
    assert "Losses are equal bit for bit" in text
    assert (tmp_path / "r.png").exists() == has_matplotlib()
    data = json.loads(invoke("--redraw", str(file), "--json"))
    assert [row["efficient"] for row in data["points"]] == [True, True, False, True, False]


def test_redraw_fails_when_losses_differ_or_a_point_failed(tmp_path: Path) -> None:
    different = [sample("keep"), sample("offload") | {"losses_hex": ["0x0p+0"]}]
    assert "LOSSES DIFFER" in invoke("--redraw", str(write(tmp_path / "a.json", different)), status=1)
    invoke("--redraw", str(write(tmp_path / "b.json", all_points())), status=1)
    floor = [sample("keep"), failed("hybrid", "BudgetError: the floor is 5") | {"below_floor": True}]
    invoke("--redraw", str(write(tmp_path / "c.json", floor)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "preset='huge': choose one of 'ssdtrain', 'cpu', 'tiny'"),
        (["--series", "best"], "series='best': choose one of 'keep'"),
        (["--memory-limit", "lots"], "memory_limit='lots'"),
        (["--redraw", "/no/such/file"], "no results of `actoffload rok`"),
        (["--batch", "0"], "--batch"),
    ],
)
def test_bad_options_end_with_2_and_say_why(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["rok", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in result.output


def test_options_select_from_the_preset() -> None:
    chosen = rok_command.select(PRESETS["cpu"], ["gpt-small"], [64, 128], [1])
    assert {(c.model, c.hidden, c.batch) for c in chosen.cases} == {("gpt-small", 64, 1), ("gpt-small", 128, 1)}
    assert rok_command.select(PRESETS["tiny"]) == PRESETS["tiny"]


@pytest.mark.slow
def test_a_real_run_is_resumed_and_drawn(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    options = ["--preset", "tiny", "--out", str(file), "--batch", "2", "--path", str(tmp_path)]
    invoke(*options, "--series", "keep", "--series", "recompute")
    assert len(load_results(file)["samples"]) == 2
    text = invoke(*options)
    samples = load_results(file)["samples"]
    assert [s["series"] for s in samples] == ["keep", "recompute", "offload", "hybrid", "hybrid"]
    assert not any("error" in s for s in samples)
    assert samples[-1]["activation_peak_bytes"] <= samples[-1]["device_budget"]
    assert str(tmp_path) not in json.dumps([s.get("case") for s in samples])
    assert "Losses are equal bit for bit" in text


@pytest.mark.slow
def test_running_out_of_memory_is_a_point(tmp_path: Path) -> None:
    file = tmp_path / "oom.json"
    options = ["--preset", "tiny", "--out", str(file), "--batch", "4096", "--series", "keep", "--memory-limit", "1GiB"]
    text = invoke(*options)
    (found,) = load_results(file)["samples"]
    assert found["oom"] is True
    assert "out of memory" in text
