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
from benchmarks import fio, gpu, harness, micro, micro_hooks, micro_spool, planner_cpu, worker


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
    assert harness.command_line("benchmarks.gpu", ["--path", "/mnt/x"]) == "python -m benchmarks.gpu --path DIR"


def test_results_are_written_in_one_step(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    harness.write_results(target, {"a": 1})
    harness.write_results(target, {"a": 2})
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_markdown() -> None:
    assert harness.markdown_table(("a", "b"), [("x", 1)]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


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


def _hooks(kind: str, *costs_us: float, alive: int = 10) -> harness.Sample:
    bare = {"wall_s": 1.0, "thread_s": 0.5}
    pairs = [
        {
            "bare": bare,
            "ours": {"wall_s": 1.0 + 2e-6 * us * alive, "thread_s": 0.5 + 1e-6 * us * alive},
            "empty_call_s": 51e-9,
        }
        for us in costs_us
    ]
    return {"kind": kind, "alive": alive, "nbytes": 0, "tensors": alive, "pairs": pairs}


def test_the_cost_of_a_hook_is_what_it_takes_above_a_bare_one() -> None:
    samples = [_hooks("small", 1.0, 9.0), _hooks("small", 2.0)]
    assert micro.above_bare_us(samples, "thread_s") == pytest.approx(2.0)
    assert micro.above_bare_us(samples, "wall_s") == pytest.approx(4.0)
    assert micro.above_bare_us([{"kind": "small", "error": "x"}], "wall_s") is None


def test_the_costs_of_hooks_have_their_bounds() -> None:
    failed: harness.Sample = {"kind": "policy", "alive": 10, "nbytes": 0, "error": "x"}
    samples = [_hooks("small", 2.9), _hooks("parameter", 3.1), _hooks("moves", 59.0), failed]
    bounds = micro.judge({"hooks": samples})
    assert {one.what: one.holds for one in bounds} == {
        "hook: stays: below min_bytes": True,
        "hook: stays: a parameter": False,
        "hook: moves, memory engine": True,
        "hook: stays: a policy keeps it": False,  # it could not be measured, which is no success
    }
    table = micro.render({"hooks": samples}, bounds)
    assert "| hook: stays: a parameter | 3.100 µs | ≤ 3 µs | NO |" in table
    assert "Not measured: policy: x" in table
    assert "| stays: below min_bytes | - | 10 | 2.90 | 5.80 | 51 |" in table


def test_scaling_compares_many_with_few() -> None:
    samples = [_hooks(kind, cost, alive=n) for kind in micro.SCALED for n, cost in ((10, 2.0), (1000, 2.7))]
    bounds = micro.judge({"scaling": samples})
    assert [one.measured for one in bounds] == [pytest.approx(1.35)] * 3
    assert not any(one.holds for one in bounds)
    assert "1000 alive over 10" in bounds[0].what


def _rate(mode: str, direction: str, rate: float, *, busy: bool = False) -> harness.Sample:
    block = micro_spool.BUSY_BLOCK if busy else 1 << 20
    head = {"mode": mode, "block": block, "direction": direction, "busy": busy, "depth": 4}
    return {**head, "bytes_per_s": rate}


def test_the_spool_is_judged_by_the_faster_fio_on_the_same_file() -> None:
    rates = {"posix": 0.91e9, "uring": 1.79e9}
    samples = [_rate(mode, way, rate) | {"file_of": mode} for mode, rate in rates.items() for way in micro_spool.WAYS]
    for file, fastest in (("posix", 1e9), ("uring", 2e9)):
        for mode, rate in (("fio io_uring", fastest / 2), ("fio libaio", fastest)):
            samples += [_rate(mode, way, rate) | {"file_of": file} for way in micro_spool.WAYS]
    holds = {one.what: one.holds for one in micro.judge({"spool": samples})}
    assert len(holds) == 4
    assert holds["spool: posix write, 1024 KiB, of fio"] is True
    assert holds["spool: uring read, 1024 KiB, of fio"] is False
    text = micro.render({"spool": samples}, [])
    assert "| fio libaio, on the file of uring | 1024 | 4 | waits | 2.00 | 2.00 |" in text
    assert "| posix | 1024 | 4 | waits | 0.91 | 0.91 |" in text
    without = [s for s in samples if not s["mode"].startswith("fio")]
    missing: list[harness.Sample] = [{"mode": "fio libaio", "error": "fio is not installed"}]
    assert micro.judge({"spool": without + missing}) == []
    assert "Not measured: fio libaio: fio is not installed" in micro.render({"spool": without + missing}, [])


def test_uring_is_compared_with_posix_while_python_runs() -> None:
    samples = [_rate("posix", "write", 1.0, busy=True), _rate("uring", "write", 2.0, busy=True)]
    (write,) = micro.judge({"busy": samples})
    assert (write.measured, write.holds) == (2.0, True)
    assert micro.judge({"busy": samples[:1]}) == []


@pytest.mark.parametrize("kind", sorted(micro_hooks.KINDS))
def test_each_kind_of_tensor_does_what_it_is_called(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(
        "benchmarks.micro_hooks.gc.collect", lambda: 0
    )  # slow among all that the other tests have loaded
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
[ "$1" = --version ] && echo fio-9 && exit
echo "note: a line before the JSON"
echo "{\\"jobs\\": [{\\"error\\": 0, \\"write\\": {\\"bw_bytes\\": 3}, \\"read\\": {\\"bw_bytes\\": 4}}]}"
case "$*" in *libaio*) exit 1;; esac
"""


def test_fio_is_asked_and_its_failures_are_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"region": 1 << 20, "block": 4096, "depth": 1, "seconds": 0.1}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fio.FioError, match="not installed"):
        fio.version()
    with pytest.raises(fio.FioError, match="FileNotFoundError"):
        fio.measure("x", "write", engine="io_uring", **options)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "fio").write_text(FAKE_FIO, encoding="utf-8")
    (tmp_path / "fio").chmod(0o700)
    assert fio.version() == "fio-9"
    assert fio.measure("x", "mixed", engine="io_uring", **options) == 7.0
    with pytest.raises(fio.FioError, match="status 1"):
        fio.measure("x", "mixed", engine="libaio", **options)


@pytest.mark.slow
def test_micro_without_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr("benchmarks.fio.shutil.which", lambda name: None)
    monkeypatch.setattr(micro, "SCALED", ("small",))
    monkeypatch.setattr(micro_hooks, "KINDS", {kind: micro_hooks.KINDS[kind] for kind in ("small", "moves")})
    small = ["--region", "4", "--seconds", "0.02", "--rounds", "1", "--pairs", "1", "--few", "10", "--many", "20"]
    status = micro.main(["--path", str(tmp_path), "--blocks", str(1 << 20), *small])
    text = capsys.readouterr().out
    assert status in (0, 1)
    assert "Not measured: fio libaio: fio is not installed" in text
    (file,) = (tmp_path / "out").glob("micro_*.json")
    facts = json.loads(file.read_text(encoding="utf-8"))
    assert set(facts["samples"]) == set(micro.PARTS)
    assert str(tmp_path) not in file.read_text(encoding="utf-8").replace(facts["command"], "")
    ran = {sample["mode"] for sample in facts["samples"]["busy"] if "error" not in sample}
    assert len(facts["bounds"]) == 2 + 1 + (2 if "uring" in ran else 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_planner_benchmark_compares_each_sample_with_those_of_keep_beside_it() -> None:
    def sample(step_s: float, keep_s: float | None = None, **more: Any) -> dict[str, Any]:
        found = {"median_step_s": step_s, "losses_hex": ["a", "b", "c"], "spec": {"device_budget": None}, **more}
        return found if keep_s is None else found | {"keep_step_s": keep_s}

    moved = {"peak_bytes": 30, "baseline_peak_bytes": 100, "written_bytes": 80, "ideal_bytes": 100}
    rows = planner_cpu.summarise(
        {
            "keep": [sample(2.0), sample(4.0)],
            "recompute": [sample(3.0, 2.0), sample(6.0, 4.0)],
            "default": [sample(2.2, 2.0, **moved), sample(4.8, 4.0, **moved)],
        }
    )
    assert rows["recompute"]["ratio_to_keep"] == 1.5
    assert rows["default"]["ratio_to_keep"] == pytest.approx(1.15)
    assert (rows["default"]["of_ideal"], rows["default"]["peak_share"]) == (0.8, 0.3)
    assert rows["default"]["identical"]
    text = planner_cpu.render(rows)
    assert "| default | 3.500 s | 1.15 |  | 30% | 0 MiB | 80% | yes |" in text
