"""The recompute-offload-keep curve predicted from shapes: bytes as counted, times as estimated, nothing run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload.tools import models
from actoffload.tools.on_paper import hardware_of
from actoffload.tools.rok import PRESETS, load_results, points_of, predict
from actoffload.tools.rok_points import Case, Variant
from actoffload.tools.saved_bytes import WatchedStep
from tests.commands import invoke

CASE = Case(model="gpt-small", hidden=2048, layers=4, batch=8, seq=512, vocab=1024, dtype="bfloat16")


def predicted(case: Case = CASE, gpu: str = "a100-pcie", *levels: str) -> dict[str, Any]:
    variants = replace(PRESETS["cpu"], levels=levels).variants
    found = predict({"case": asdict(case), "variants": [asdict(v) for v in variants], "gpu": gpu})["samples"]
    return {s["series"] + s["level"]: s for s in found}


@pytest.mark.parametrize("model", ["gpt-small", "llama"])
def test_keep_saves_what_is_counted_and_takes_as_long_as_is_estimated(model: str) -> None:
    """A layer of Llama saves its input in float32 alone: only a checkpoint saves the input itself."""
    if model == "llama":
        pytest.importorskip("transformers")
    case = replace(CASE, model=model)
    keep = predicted(case)["keep"]
    made = models.build(case, torch.device("meta"))
    batch, blocks = made.batch(CASE.batch), {name: made.model.get_submodule(name) for name in made.blocks}
    step = WatchedStep(made.model, blocks, batch)
    with models.unpacked_sequences(), step.flops, step.forward():
        loss = made.loss(batch)
    assert keep["peak_bytes"][0] == pytest.approx(sum(one.nbytes for one in step.saved.values()), rel=0.001)
    step_s = 3 * step.forward_flops / hardware_of("a100-pcie").flops_per_s
    del loss
    assert keep["step_s"][0] == pytest.approx(step_s, rel=0.03), "flash attention computes its scores anew in backward"


def test_recomputing_costs_a_forward_and_leaves_the_blocks_inputs() -> None:
    found = predicted()
    assert found["recompute"]["ratios"][0] == pytest.approx(4 / 3, rel=0.05)
    assert found["recompute"]["peak_bytes"][0] < 0.5 * found["keep"]["peak_bytes"][0]


def test_offloading_hides_where_links_are_fast_enough_and_the_hybrid_keeps_its_budget() -> None:
    found = predicted(replace(CASE, hidden=8192, head_width=128), "a100-pcie", "0.5", "recompute", "0.01")
    keep, offload, half, as_recompute = (found[name] for name in ("keep", "offload", "hybrid0.5", "hybridrecompute"))
    assert offload["ratios"][0] < 1.05
    assert offload["peak_bytes"][0] < 0.7 * keep["peak_bytes"][0]
    assert half["device_budget"] == keep["peak_bytes"][0] // 2
    assert half["peak_bytes"][0] <= half["device_budget"]
    assert as_recompute["device_budget"] == found["recompute"]["peak_bytes"][0]
    assert found["hybrid0.01"]["oom"], "a budget that no plan reaches is a result"
    assert [name for name, sample in found.items() if "error" in sample] == ["hybrid0.01"]


def test_a_sample_without_a_prediction_has_its_error(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("import torch\ndef build():\n    return torch.nn.Flatten(0), lambda size: torch.ones(size)\n")
    variants = [asdict(v) for v in replace(PRESETS["cpu"], levels=("recompute",)).variants]
    spec = {"variants": variants, "gpu": "a100-pcie"}
    assert "its loss has no gradient" in predict({**spec, "case": {"model": f"{own}:build", "batch": 2}})["error"]
    own.write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0)), lambda size: torch.ones(size, 4)\n"
    )
    keep, recompute, _, _, hybrid = predict({**spec, "case": {"model": f"{own}:build", "batch": 1}})["samples"]
    assert keep["ratios"] == [1.0]
    assert "there are no blocks to recompute" in recompute["error"]
    assert "the peak for recompute is not known" in hybrid["error"]


def test_one_command_predicts_and_writes_both_pictures_marked_as_predicted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "r.json"
    options = ["rok", "--preset", "tiny", "--gpu", "h100-sxm", "--out", str(file)]
    for again in (options, ["rok", "--redraw", str(file), "--dark"]):
        invoke(*again)
    assert load_results(file)["measured_with"]["gpu"] == "h100-sxm"
    assert {p.name for p in tmp_path.iterdir()} == {"r.json", "r.png", "r.svg", "r_dark.png", "r_dark.svg"}
    assert "PREDICTED from shapes, nothing was run" in (tmp_path / "r.svg").read_text()
    assert Variant(series="hybrid", level="0.6") in {p.variant for p in points_of(load_results(file)["samples"])}
