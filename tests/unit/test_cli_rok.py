"""``actoffload rok``: taking samples, failures as results, the command, a real run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload.errors import ActOffloadError, BudgetError, ConfigError
from actoffload.tools import models, rok_worker
from actoffload.tools import rok as rok_command
from actoffload.tools.rok import RokRun, Variant, points_of
from actoffload.tools.workers import failure, serve
from tests import commands
from tests.rok_samples import CASE, MACHINE, PRESET, all_points, failed, sample

invoke = partial(commands.invoke, "rok")


class Launcher:
    """Returns rounds from a table, and records the batch of each case."""

    def __init__(self, **errors: dict[str, Any]) -> None:
        self.errors = errors
        self.asked: list[int] = []

    def __call__(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(spec["case"]["batch"])
        heads = ("case", "others_cpu_share")
        samples = [sample(v["series"]) | v | self.errors.get(v["series"], {}) for v in spec["variants"]]
        return {
            "samples": [{name: value for name, value in s.items() if name not in heads} for s in samples],
            "others_cpu_share": 0.5,
        }


def make_run(file: Path, launch: Any) -> RokRun:
    return RokRun(PRESET, file, {"environment": dict(MACHINE), "command": "rok"}, launch)


def worker_spec(*variants: Variant, **changes: Any) -> dict[str, Any]:
    values = {"device": "cpu", "threads": None, "warm_up": 4, "steps": 2, "path": None}
    return values | {"case": asdict(CASE), "variants": [asdict(variant) for variant in variants]} | changes


# -- taking rounds ----------------------------------------------------------------------------------------------------


def test_each_case_is_in_the_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    launch = Launcher(offload={"error": "boom", "oom": False})
    cases = make_run(file, launch).run()
    next(cases)
    assert len(json.loads(file.read_text())["samples"]) == len(PRESET.variants) == 6
    next(cases)
    assert launch.asked == [2, 4]
    samples = json.loads(file.read_text())["samples"]
    assert len(samples) == 2 * 6
    assert {s["series"] for s in samples if "error" in s} == {"offload"}
    assert {s["others_cpu_share"] for s in samples} == {0.5}
    assert not list(tmp_path.glob("*.partial"))


def test_a_case_that_fails_whole_fails_in_every_variant(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r.json", lambda spec: {"error": "killed", "oom": True})
    _, samples = next(run.run())
    assert [(s["series"], s["level"], s["error"]) for s in samples] == [
        (v.series, v.level, "killed") for v in PRESET.variants
    ]
    assert all(p.oom for p in points_of(samples))


def test_a_file_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text("{}")
    refused = invoke("--preset", "tiny", "--out", str(file), status=2)
    assert f"--out '{file}': there is such a file already; name a new one, or remove it" in refused
    assert file.read_text() == "{}"


# -- the worker -------------------------------------------------------------------------------------------------------


def test_the_worker_measures_the_same_training_in_every_series(tmp_path: Path) -> None:
    found = rok_worker.measure(worker_spec(*(replace(PRESET, levels=("0.6",)).variants), path=[str(tmp_path)]))
    keep, recompute, offload, _, hybrid = found["samples"]
    assert [s.get("error") for s in found["samples"]] == [None] * 5
    assert all(s["identical"] for s in found["samples"])
    assert keep["flops"] == 3 * 2 * (2 * 128 * (2 * 12 * 128**2 + 128 * 64) + 2 * 2 * 2 * 128 * 128 * 128)
    assert [len(s["step_s"]) for s in found["samples"]] == [4, 2, 2, 2, 2], "keep runs twice in a turn"
    assert keep["ratios"][0] == pytest.approx(1 / keep["ratios"][1])
    turn = recompute["step_s"][0] * 2 / sum(keep["step_s"][:2])
    assert recompute["ratios"][0] == pytest.approx(turn)
    block = 2 * 128 * 128 * 4 * 16  # saved: input, norm, q k v, attention, projection's input, norm, 4 + 4 of the MLP
    assert min(keep["peak_bytes"]) > 2 * block
    assert block < max(recompute["peak_bytes"]) < min(keep["peak_bytes"]) - block / 2
    assert max(offload["peak_bytes"]) <= min(keep["peak_bytes"])
    assert hybrid["device_budget"] == keep["counted_peak_bytes"] * 6 // 10
    assert max(hybrid["peak_bytes"]) <= 1.02 * hybrid["device_budget"]


def test_a_step_without_hooks_has_the_peak_of_one_with_all_kept() -> None:
    """In a short step in which nothing may move, the planner leaves the hooks out, and no peak is counted."""
    case = asdict(replace(CASE, hidden=64, layers=1, seq=32, batch=1))
    keep, hybrid = rok_worker.measure(worker_spec(Variant(series="keep"), Variant(series="hybrid"), case=case))[
        "samples"
    ]
    assert hybrid["peak_bytes"] == keep["peak_bytes"][:2]


def test_a_bit_that_differs_is_seen_by_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(rok_worker.Round):
        def _step(self, mode: rok_worker.Mode, context: Any = None) -> float:
            inputs = self.inputs
            self.inputs = tuple(reversed(inputs)) if mode.variant.series == "recompute" else inputs
            step_s = super()._step(mode, context)
            self.inputs = inputs
            return step_s

    monkeypatch.setattr(rok_worker, "Round", Wrong)
    variants = Variant(series="keep"), Variant(series="recompute")
    keep, recompute = rok_worker.measure(worker_spec(*variants, warm_up=0, steps=1))["samples"]
    assert (keep["identical"], recompute["identical"]) == (True, False)


def test_modes_that_fail_leave_the_others_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(self: rok_worker.Round, mode: rok_worker.Mode) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rok_worker.Round, "_count", without_memory)
    variants = [Variant(series=name) for name in ("keep", "recompute", "offload")]
    budgets = [Variant(series="hybrid", level=level) for level in ("recompute", "0.5")]
    keep, _, offload, unknown, half = rok_worker.measure(worker_spec(*variants, *budgets))["samples"]
    assert (keep["oom"], keep["step_s"]) == (True, [])
    assert len(offload["step_s"]) == 2
    assert (offload["ratios"], offload["identical"]) == ([], True)
    assert "the peak for recompute is not known" in unknown["error"]
    assert half["device_budget"] > 0, "half of the bytes that offload would have kept"


def test_the_worker_turns_failures_into_results(capsys: pytest.CaptureFixture[str]) -> None:
    spec = worker_spec(Variant(series="keep"), case=asdict(replace(CASE, model="abacus")))
    serve(rok_worker.measure, json.dumps(spec))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "'abacus': give FILE.py:FUNCTION, a config.json, or a model type of Transformers" in result["error"]
    assert result["oom"] is False
    text = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"
    assert failure(RuntimeError(text))["oom"] is True
    assert failure(torch.OutOfMemoryError("CUDA out of memory"))["oom"] is True
    assert failure(ActOffloadError("x"))["oom"] is False
    assert failure(BudgetError(1, 2, "out of memory"))["error"].startswith("BudgetError: ")


def test_models_need_sizes_that_fit_and_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="hidden=100: must be a multiple of head_width=64"):
        models.build(replace(CASE, hidden=100))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs Transformers: pip install actoffload\[hf\]"):
        models.build(replace(CASE, model="bert"))


OWN = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from beside import WIDTH
from torch.nn import GELU, Linear, Sequential

@dataclass
class Sizes:
    layers: int = 3

class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            Sequential(Linear(WIDTH, WIDTH), GELU(), Linear(WIDTH, WIDTH)) for _ in range(Sizes().layers)
        )

    def forward(self, x, target):
        for layer in self.layers:
            x = torch.nn.functional.dropout(layer(x), 0.1)
        return {"loss": torch.nn.functional.mse_loss(x, target)}

def build():
    return Mine(), lambda size: (torch.randn(size, WIDTH), torch.ones(size, WIDTH, device="cpu"))

def five():
    return 5

def no_loss():
    return torch.nn.Linear(2, 2), lambda size: torch.ones(size, 2)

class Normed(torch.nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).square().sum()

def normed():
    return Normed(8), lambda size: torch.randn(size, 8)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A user's file, which imports another file beside it."""
    (tmp_path / "beside.py").write_text("WIDTH = 512\n")
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return str(file)


def test_ones_own_model_is_measured_with_its_dropout(own: str, tmp_path: Path) -> None:
    case = {"model": f"{own}:build", "batch": 1024}
    variants = [Variant(series=name) for name in ("keep", "recompute", "offload")]
    spec = worker_spec(*variants, case=case, path=[str(tmp_path)], warm_up=1, steps=1)
    keep, recompute, offload = rok_worker.measure(spec)["samples"]
    assert [s.get("error") for s in (keep, recompute, offload)] == [None] * 3
    assert all(s["identical"] for s in (keep, recompute, offload))
    assert keep["flops"] == 3 * 6 * 2 * 1024 * 512 * 512
    assert recompute["peak_bytes"][0] < keep["peak_bytes"][0]


def test_ones_own_model_may_need_several_samples(own: str) -> None:
    spec = worker_spec(Variant(series="keep"), case={"model": f"{own}:normed", "batch": 4}, warm_up=1, steps=0)
    (keep,) = rok_worker.measure(spec)["samples"]
    assert "error" not in keep


def test_ones_own_model_is_on_the_device_that_is_used(own: str) -> None:
    workload = models.build_own("model", f"{own}:build", torch.device("meta"))
    assert workload.blocks == ("layers.0", "layers.1", "layers.2")
    assert [tensor.device.type for tensor in (*workload.batch(2), *workload.model.parameters())] == ["meta"] * 14


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "has no function 'nothing'; give FILE.py:FUNCTION"),
        ("five", r"must return a model and a function make_batch\(size\)"),
        ("no_loss", "model='Linear': must return its loss: a tensor of one element"),
    ],
)
def test_a_wrong_result_of_ones_own_function_is_an_error(own: str, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rok_worker.measure(worker_spec(Variant(series="keep"), case={"model": f"{own}:{function}", "batch": 1}))


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the command, as if it had measured some samples."""

    def run(samples: Sequence[dict[str, Any]], *options: str, status: int = 0) -> str:
        monkeypatch.setattr(rok_command, "take", lambda run, *, quiet: run.payload["samples"].extend(samples))
        return invoke("--preset", "tiny", "--out", str(tmp_path / "r.json"), *options, status=status)

    return run


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes a second."""
    monkeypatch.setattr(rok_command, "draw_rok", lambda *_: None)


@pytest.mark.usefixtures("without_pictures")
def test_points_are_compared(finished: Callable[..., str]) -> None:
    text = finished(all_points()[:-1])
    for printed in ("out of memory", "hybrid ≤ 60% of keep", "slower", "A/A noise", "Losses and gradients are equal"):
        assert printed in text
    assert "busy" not in text
    data = json.loads(finished(all_points()[:-1], "--json"))
    assert [row["verdict"] for row in data["points"]] == ["A/A noise", "slower", "slower", "slower", ""]
    text = finished([sample("keep"), sample("offload", others_cpu_share=0.41)])
    assert "The machine was busy: others took 41% of the processors" in text


@pytest.mark.usefixtures("without_pictures")
def test_the_command_fails_when_bits_differ_or_a_point_failed(finished: Callable[..., str]) -> None:
    assert "BITS DIFFER" in finished([sample("keep"), sample("offload", identical=False)], status=1)
    finished(all_points(), status=1)
    finished([sample("keep"), failed("hybrid", "BudgetError: the floor is 5", oom=True)])


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[RokRun]:
    """The runs that the command would have taken."""
    runs: list[RokRun] = []
    monkeypatch.setattr(rok_command, "take", lambda run, *, quiet: runs.append(run))
    monkeypatch.setattr(rok_command, "finish", lambda *_: 0)
    return runs


def test_options_select_from_the_preset(chosen: list[RokRun], tmp_path: Path) -> None:
    invoke("--out", str(tmp_path / "r.json"), "--model", "bert", "--batch", "4", "--steps", "3")
    assert [(case.model, case.batch) for case in chosen[0].cases] == [("bert", 4)]
    assert chosen[0].payload["measured_with"]["steps"] == 3


@pytest.mark.usefixtures("own")
def test_a_model_of_ones_own_takes_the_place_of_the_presets_cases(
    chosen: list[RokRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    invoke("--model", "mine.py:build", "--batch", "3")
    invoke("--model", "mine.py:build", "--preset", "tiny")
    assert [run.file.name for run in chosen] == ["rok_mine.json"] * 2
    assert [case.name for case in chosen[0].cases] == ["mine.py:build, batch 3"]
    assert [case.batch for case in chosen[1].cases] == [1, 2, 4]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_real_run_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    text = invoke("--preset", "tiny", "--batch", "2", "--out", str(file), "--path", str(tmp_path))
    samples = json.loads(file.read_text())["samples"]
    assert [s["case"]["batch"] for s in samples] == [2] * 5
    assert not any("error" in s for s in samples)
    assert str(tmp_path) not in file.read_text()
    assert "equal bit for bit" in text
    assert file.with_suffix(".png").exists() == (find_spec("matplotlib") is not None)
