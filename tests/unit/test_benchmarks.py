"""The parts of the benchmarks that decide: checksums, comparisons, tables, environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actoffload.report.plots import Point, step_time_against_memory
from benchmarks import gpu, harness, memory_cpu, worker


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)
    model(torch.randn(4, 7, dtype=dtype)).sum().backward()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_checksum_sees_one_bit_and_an_exchange(dtype: torch.dtype) -> None:
    model = _model(dtype)
    before = worker.gradients_checksum(model)
    assert before == worker.gradients_checksum(_model(dtype))
    first = next(model.parameters()).grad
    assert first is not None
    bits = first.view(torch.uint8)
    bits[0, 0] ^= 1
    assert worker.gradients_checksum(model) != before
    bits[0, 0] ^= 1
    assert worker.gradients_checksum(model) == before
    # Values that change places: the plain sum is the same, the weighted one is not.
    first[0], first[1] = first[1].clone() + 1, first[0].clone() + 1
    swapped = worker.gradients_checksum(model)
    first[0], first[1] = first[1].clone(), first[0].clone()
    assert worker.gradients_checksum(model) != swapped


def test_the_checksum_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = worker.gradients_checksum(_model())
    monkeypatch.setattr(worker, "CHECK_CHUNK", 4)
    assert worker.gradients_checksum(_model()) == whole


def test_interleaving_takes_turns() -> None:
    order: list[str] = []

    def measure(mode: str) -> harness.Sample:
        order.append(mode)
        return {"n": len(order)}

    samples = harness.interleave(["a", "b"], 2, measure)
    assert order == ["a", "b", "a", "b"]
    assert samples == {"a": [{"n": 1}, {"n": 3}], "b": [{"n": 2}, {"n": 4}]}


def test_a_sample_that_fails_is_a_result(capfd: pytest.CaptureFixture[str]) -> None:
    sample = harness.run_sample("benchmarks.no_such_module", {}, timeout_s=60)
    assert "No module named" in sample["error"]
    assert "No module named" in capfd.readouterr().err


def test_the_environment_names_no_host_and_no_path() -> None:
    text = json.dumps(harness.environment())
    assert os.uname().nodename not in {str(value) for value in harness.environment().values()}
    assert str(harness.ROOT) not in text
    assert str(Path.home()) + "/" not in text
    assert {"cpu", "cores", "torch", "commit", "gpu"} <= set(json.loads(text))


def test_the_command_line_names_no_path() -> None:
    line = harness.command_line("benchmarks.gpu", ["--path", f"{harness.ROOT}/x"])
    assert line == "python -m benchmarks.gpu --path ./x"


def test_results_are_written_in_one_step(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    harness.write_results(target, {"a": 1})
    harness.write_results(target, {"a": 2})
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_markdown() -> None:
    assert harness.markdown_table(("a", "b"), [("x", 1)]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


def _sample(gradients: str, step_s: float, rss: int, **statistics: int) -> harness.Sample:
    return {
        "first_gradients": gradients,
        "median_step_s": step_s,
        "peak_rss_bytes": rss,
        "statistics": {"baseline_peak_bytes": 1000, "resident_peak_bytes": 200} | statistics,
    }


def test_the_summary_of_memory_cpu() -> None:
    samples = {
        "keep": [_sample("a", 2.0, 3000), _sample("a", 4.0, 3000), _sample("a", 3.0, 3000)],
        "nvme": [_sample("a", 3.0, 2400), _sample("a", 3.6, 2400), _sample("a", 3.3, 2400)],
    }
    summary = memory_cpu.summarise(samples)
    assert summary["resident_share"] == 0.2
    assert summary["step_time_ratio"] == pytest.approx(1.1)
    assert summary["saved_share_gone_from_rss"] == 0.6
    assert summary["gradients_identical"] == 1.0
    assert "20.0% of baseline" in memory_cpu.render(summary)
    samples["nvme"][1]["first_gradients"] = "b"
    assert "NO" in memory_cpu.render(memory_cpu.summarise(samples))


def _points() -> list[dict[str, Any]]:
    case = {"name": "s", "batch": 2, "seq": 8}
    done = {"median_step_s": 1.5, "identical": True, "activation_peak_bytes": 1 << 30}
    moved = {"statistics": {"moved_bytes": 1 << 32, "wait_s": 0.5, "steps": 2}}
    return [
        {"case": case, "mode": "keep", "result": {"error": "out of memory: x", "oom": True, "identical": None}},
        {"case": case, "mode": "host", "result": done | moved},
        {"case": case, "mode": "nvme", "result": done | moved | {"identical": False}},
    ]


def test_the_table_of_the_gpu_suite() -> None:
    table = gpu.render(_points())
    assert "| s (2 × 8) / keep | out of memory | - | - | - | - |" in table
    assert "| s (2 × 8) / host | 1.500 | 1.00 GiB | 2.00 GiB | 0.25 | yes |" in table
    assert "| NO |" in table


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.png"
    points = [
        Point(group="a", label="keep", step_s=1.0, peak_gib=2.0),
        Point(group="a", label="oom", step_s=None, peak_gib=None),
    ]
    assert step_time_against_memory(points, file, "title")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert not step_time_against_memory([], tmp_path / "none.png", "title")


def test_the_suite_refuses_a_machine_without_an_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one here")
    assert gpu.main(["--skip-tests"]) == 2
    assert "--tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tiny_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu, "TINY_MODES", ("keep", "save_on_cpu", "nvme"))
    assert gpu.main(["--tiny", "--skip-tests", "--steps", "1", "--path", str(tmp_path)]) == 0, capsys.readouterr().out
    (file,) = tmp_path.glob("gpu_tiny_*.json")
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    assert [point["result"]["identical"] for point in points] == [True, True, True]
    assert points[-1]["result"]["statistics"]["nvme_written_bytes"] > 0


def test_the_time_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["--tiny", "--skip-tests", "--budget-s", "0"]) == 0
    (file,) = tmp_path.glob("gpu_tiny_*.json")
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    assert all(point["result"]["skipped"] for point in points)
