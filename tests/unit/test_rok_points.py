"""Points from samples, their verdicts next to the noise, and the picture of them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload.tools import models
from actoffload.tools.on_paper import Case, hardware_of
from actoffload.tools.rok import COLOURS, PRESETS, Variant, draw_rok, points_of, predict
from actoffload.tools.saved_bytes import WatchedStep
from tests.commands import invoke
from tests.rok_samples import all_points, failed, sample

# -- numbers ----------------------------------------------------------------------------------------------------------


def test_a_point_has_the_middle_half_of_its_steps() -> None:
    times, peaks = [1.0, 1.0, 1.2, 5.0, 1.0, 1.1], [100, 100, 100, 900, 100, 110]
    (point,) = points_of([sample("offload") | {"step_s": times, "peak_bytes": peaks}])
    assert point.peak_bytes == 100
    assert point.step_s is not None
    assert point.tflops is not None
    assert point.step_s.median == pytest.approx(1.05)
    assert [point.step_s.low, point.step_s.high] == pytest.approx([1.0, 1.175])
    assert point.tflops.low == pytest.approx(1 / 1.175)
    assert point.tflops.high == 1.0


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.3, 1.4, 1.5], "slower"),
        ([0.7, 0.8, 0.85], "faster"),
        ([1.0, 1.06, 1.5], "as keep"),
        ([0.5, 1.04, 1.05, 9.0], "as keep"),
    ],
)
def test_no_verdict_is_stronger_than_the_noise_between_keeps_own_steps(ratios: list[float], verdict: str) -> None:
    keep, other = points_of([sample("keep"), sample("offload", ratios=ratios)])
    assert keep.ratio is not None
    assert keep.ratio.low == pytest.approx(1 / keep.ratio.high, rel=0.02)
    assert keep.ratio.high == pytest.approx(1.07, abs=0.01)
    assert (keep.verdict, other.verdict) == ("A/A noise", verdict)


def test_in_predictions_keeps_own_speed_is_no_noise_and_a_hundredth_no_difference() -> None:
    found = points_of([sample("keep", ratios=[1.0]), sample("offload", ratios=[1.009])])
    assert [p.verdict for p in found] == ["A/A noise", "as keep"]
    assert points_of([sample("keep", ratios=[1.0]), sample("offload", ratios=[1.02])])[1].verdict == "slower"


def test_there_is_no_verdict_where_keep_was_not_measured() -> None:
    points = points_of([failed("keep", "out of memory", oom=True), sample("offload", ratios=[])])
    assert [(p.ratio, p.verdict) for p in points] == [(None, ""), (None, "")]
    assert points[1].tflops is not None
    assert points[1].tflops.median == 1.0


def test_throughput_is_keeps_over_the_ratio_within_turns() -> None:
    drifted = sample("offload", step_s=9.0, ratios=[1.25, 1.25])
    keep, offload = points_of([sample("keep", step_s=0.5), drifted])
    assert keep.tflops is not None
    assert offload.tflops is not None
    assert keep.tflops.median == pytest.approx(2.0, rel=0.01)
    assert offload.tflops.median == pytest.approx(2.0 / 1.25)


def test_one_bit_of_difference_is_found() -> None:
    samples = [sample("offload", identical=False), sample("keep"), sample("hybrid", identical=None)]
    found = {point.variant.series: point.identical for point in points_of(samples)}
    assert found == {"offload": False, "keep": True, "hybrid": None}


# -- the picture -------------------------------------------------------------------------------------------------------


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as wide as a column, and its legend has exactly its series; SVG names each text in a comment."""
    pytest.importorskip("matplotlib")
    png, svg = paths = [tmp_path / "rok.png", tmp_path / "rok.svg"]
    draw_rok(points_of(all_points()), paths, "title")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text(encoding="utf-8")
    assert 'width="237.6pt"' in text
    assert COLOURS["hybrid"] in text
    for printed in ("hybrid ≤ 60% of keep", "recompute", "keep, batch 8", "no room", "A/A noise of keep"):
        assert printed in text
    draw_rok(points_of([sample("keep", ratios=[1.0]), sample("offload")]), [svg], "title")
    text = svg.read_text(encoding="utf-8")
    assert not [printed for printed in ("hybrid", "recompute", "batch 8", "no room", "A/A noise") if printed in text]
    draw_rok(points_of([failed("keep", "boom")]), [svg], "nothing was measured")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError):
        draw_rok(points_of(all_points()), [tmp_path / "none.png"], "title")
    assert not (tmp_path / "none.png").exists()


# -- predicted from shapes: bytes as counted, times as estimated, nothing run ------------------------------------------


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
    spec = {"variants": variants, "gpu": "a100-pcie", "case": {"model": f"{own}:build", "batch": 1}}
    assert "its loss has no gradient" in predict(spec)["error"]
    own.write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0)), lambda size: torch.ones(size, 4)\n"
    )
    keep, recompute, _, _, hybrid = predict(spec)["samples"]
    assert keep["ratios"] == [1.0]
    assert "there are no blocks to recompute" in recompute["error"]
    assert "the peak for recompute is not known" in hybrid["error"]


def test_one_command_predicts_and_writes_both_pictures_marked_as_predicted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "r.json"
    invoke("rok", "--preset", "tiny", "--gpu", "h100-sxm", "--out", str(file))
    results = json.loads(file.read_text())
    assert results["measured_with"]["gpu"] == "h100-sxm"
    assert {p.name for p in tmp_path.iterdir()} == {"r.json", "r.png", "r.svg"}
    assert "PREDICTED from shapes, nothing was run" in (tmp_path / "r.svg").read_text()
    assert Variant(series="hybrid", level="0.6") in {p.variant for p in points_of(results["samples"])}
