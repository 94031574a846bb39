"""The parts of the benchmarks that decide: checksums, comparisons, bounds, and what the result files say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import gpu, harness, micro, micro_hooks, micro_spool, planner_cpu, worker


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
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
    first[0], first[1] = first[1].clone(), first[0].clone()  # the plain sum stays, the weighted one does not
    assert worker.gradients_checksum(model) != before
    first[0], first[1] = first[1].clone(), first[0].clone()
    monkeypatch.setattr(worker, "CHECK_CHUNK", 4)
    assert worker.gradients_checksum(model) == before, "whatever the chunks"


def test_results_name_no_host_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    arguments = ["--path", f"{harness.ROOT}/x", "--path", "/mnt/x"]
    results = harness.Results("micro", arguments, {"path": "/mnt/x", "rounds": 3}, variant="a")
    holds = results.finish("| a |\n", [harness.Bound(what="x", measured=2.0, bound=1.0, unit=" ×")], samples={"b": []})
    assert not holds
    text = results.file.read_text(encoding="utf-8")
    facts = json.loads(text)
    assert facts["command"] == "python -m benchmarks.micro --path ./x --path DIR"
    assert (facts["configuration"], facts["bounds"][0]["holds"], facts["samples"]) == ({"rounds": 3}, False, {"b": []})
    assert {"cpu", "cores", "torch", "commit", "gpu"} <= set(facts["environment"])
    assert os.uname().nodename not in {str(value) for value in facts["environment"].values()}
    assert not any(folder in text for folder in (str(harness.ROOT), str(Path.home()) + "/", "/mnt"))
    assert "| x | 2.000 × | ≤ 1 × | NO |" in results.file.with_suffix(".md").read_text(encoding="utf-8")
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".md"]


def test_the_suite_refuses_a_machine_without_an_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one here")
    assert gpu.main(["--skip-tests"]) == 2
    assert "--tiny" in capsys.readouterr().err


def _hooks(kind: str, *costs_us: float, alive: int = 10) -> harness.Sample:
    bare = {"wall_s": 1.0, "thread_s": 0.5}
    pairs = [
        {
            "bare": bare,
            "ours": {"wall_s": 1.0 + 2e-6 * us * alive, "thread_s": 0.5 + 1e-6 * us * alive},
        }
        for us in costs_us
    ]
    return {"kind": kind, "alive": alive, "nbytes": 0, "tensors": alive, "pairs": pairs}


def test_the_costs_of_hooks_have_their_bounds() -> None:
    samples = {
        "hooks": [
            *(_hooks("small", 1.0, 9.0), _hooks("small", 2.9)),
            _hooks("parameter", 3.1),
            _hooks("moves", 500.0),
            {"kind": "policy", "alive": 10, "nbytes": 0, "error": "x"},
        ]
    }
    assert {one.what: (one.bound, one.holds) for one in micro.judge(samples)} == {
        "hook: stays: a parameter": (3.0, False),
        "hook: stays: below min_bytes": (3.0, True),
        "hook: stays: a policy keeps it": (10.0, False),  # it could not be measured, which is no success
    }
    table = micro.render(samples)
    assert "Not measured: policy: x" in table
    assert "| stays: below min_bytes | - | 10 | 2.90 | 5.80 |" in table
    assert "| moves, memory engine | 0 | 10 | 500.00 | 1000.00 |" in table


def test_scaling_compares_many_with_few() -> None:
    samples = [_hooks(kind, cost, alive=n) for kind in micro.SCALED for n, cost in ((10, 2.0), (1000, 2.7))]
    bounds = micro.judge({"scaling": samples})
    assert [one.measured for one in bounds] == [pytest.approx(1.35)] * 3
    assert not any(one.holds for one in bounds)
    assert "1000 alive over 10" in bounds[0].what


def test_the_spool_is_judged_by_fio() -> None:
    rates = {"posix": (0.91e9, 1e9), "uring": (1.79e9, 2e9)}
    samples = [
        {"mode": mode, "block": 1 << 20, "direction": way, "bytes_per_s": own, "fio_bytes_per_s": fio}
        for mode, (own, fio) in rates.items()
        for way in micro_spool.WAYS
    ]
    holds = {one.what: one.holds for one in micro.judge({"spool": samples})}
    assert len(holds) == 4
    assert holds["spool: posix write, 1024 KiB, of fio"] is True
    assert holds["spool: uring read, 1024 KiB, of fio"] is False
    assert "| uring read, 1024 KiB | 1.79 | 2.00 |" in micro.render({"spool": samples})
    for one in samples:
        del one["fio_bytes_per_s"]
        one["fio_error"] = "fio is not installed"
    assert micro.judge({"spool": samples}) == []
    assert "Not measured: fio: fio is not installed" in micro.render({"spool": samples})


@pytest.mark.parametrize("kind", sorted(micro_hooks.KINDS))
def test_each_kind_of_tensor_does_what_it_is_called(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr("benchmarks.micro_hooks.gc.collect", lambda: 0)  # slow among all that other tests have loaded
    spec = {"kind": kind, "tensors": 5, "chains": 2, "pairs": 1, "path": str(tmp_path), "nbytes": 4096}
    sample = micro_hooks.measure(spec)
    assert "error" not in sample, sample
    statistics = sample["statistics"]
    assert (statistics["nvme_read_bytes"] > 0) == (kind == "moves")
    assert list(statistics["kept_bytes"]) == [one for one in [micro_hooks.REASONS[kind]] if one is not None]
    assert (sample["tensors"], len(sample["pairs"])) == (10, 1)
    monkeypatch.setattr(micro_hooks, "make_forward", lambda *_: lambda: torch.ones(4, requires_grad=True).sin())
    assert "not what was to be measured" in micro_hooks.measure(spec)["error"]


FAKE_FIO = """#!/bin/sh
echo "note: a line before the JSON"
echo "{\\"jobs\\": [{\\"error\\": 0, \\"write\\": {\\"bw_bytes\\": 3}, \\"read\\": {\\"bw_bytes\\": 4}}]}"
case "$*" in *libaio*) exit 1;; esac
"""


def test_fio_is_asked_and_its_failures_are_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"region": 1 << 20, "block": 4096, "depth": 1, "seconds": 0.1}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in micro_spool.measure_fio("x", "write", "io_uring", **options)["error"]
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "fio").write_text(FAKE_FIO, encoding="utf-8")
    (tmp_path / "fio").chmod(0o700)
    assert micro_spool.measure_fio("x", "read", "io_uring", **options) == {"bytes_per_s": 7.0}
    assert "status 1" in micro_spool.measure_fio("x", "read", "libaio", **options)["error"]


@pytest.mark.slow
def test_micro_without_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr("benchmarks.micro_spool.shutil.which", lambda name: None)
    monkeypatch.setattr(micro, "SCALED", ("small",))
    monkeypatch.setattr(micro_hooks, "KINDS", {kind: micro_hooks.KINDS[kind] for kind in ("small", "moves")})
    small = ["--region", "4", "--seconds", "0.02", "--rounds", "1", "--pairs", "1", "--few", "10", "--many", "20"]
    status = micro.main(["--path", str(tmp_path), "--blocks", str(1 << 20), *small])
    assert status in (0, 1)
    assert "Not measured: fio: fio is not installed" in capsys.readouterr().out
    (file,) = (tmp_path / "out").glob("micro_*.json")
    text = file.read_text(encoding="utf-8")
    facts = json.loads(text)
    assert set(facts["samples"]) == set(micro.PARTS)
    assert str(tmp_path) not in text
    assert len(facts["bounds"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_planner_benchmark_compares_steps_of_the_same_turn() -> None:
    def sample(*step_s: float, rss: Any = 100, **more: Any) -> dict[str, Any]:
        trace = {"losses": ["a"], "first_gradients": "b", "last_parameters": "c"}
        facts = {"step_s": list(step_s), "median_step_s": step_s[-1], "steady_peak_rss_bytes": rss, "options": {}}
        return {**trace, **facts, **more}

    counted = {"baseline_peak_bytes": 100, "resident_peak_bytes": 41}
    moved: dict[str, Any] = {
        "statistics": counted,
        "written_bytes_per_step": 80.0,
        "wait_s_per_step": 0.0,
        "bandwidth": None,
    }
    samples = {
        "keep": [sample(2.0, 4.0)],
        "recompute": [sample(3.0, 6.0)],
        "default": [sample(2.2, 4.4, rss=30, **moved)],
        "budget": [sample(2.0, 4.0, **moved | {"options": {"device_budget": 40}})],
    }
    verdict = planner_cpu.judge(samples)
    assert verdict.summary["recompute"]["ratio_to_keep"] == 1.5
    assert verdict.summary["default"]["ratio_to_keep"] == pytest.approx(1.1)
    assert verdict.summary["default"]["gone_share"] == pytest.approx(0.7)
    assert "| default | 4.400 s | 1.10 | 0.73 | 70% | 0 MiB | yes |" in verdict.table
    assert verdict.summary["budget"]["within_budget"] is False
    assert not verdict.right
    counted["resident_peak_bytes"] = 40
    assert planner_cpu.judge(samples).right
