"""Points from samples, their verdicts next to the noise, and the picture of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from actoffload.tools.plots import BRIGHT, DEEP, draw_rok
from actoffload.tools.rok import points_of
from tests.rok_samples import all_points, failed, sample

# -- numbers ----------------------------------------------------------------------------------------------------------


def test_rounds_are_one_point_with_the_middle_half_of_their_steps() -> None:
    first = sample("offload", step_s=1.0) | {"step_s": [1.0, 1.0, 1.2, 5.0], "peak_bytes": [100, 100, 100, 900]}
    second = sample("offload") | {"step_s": [1.0, 1.1], "peak_bytes": [100, 110]}
    (point,) = points_of([first, second])
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


def test_in_virtual_time_keeps_own_speed_is_no_noise_and_a_hundredth_no_difference() -> None:
    found = points_of([sample("keep", ratios=[1.0]), *(sample("offload", ratios=[r]) for r in (1.0, 1.009))])
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
    rounds = [sample("offload"), sample("offload", identical=False), sample("keep")]
    assert {p.variant.series: p.identical for p in points_of(rounds)} == {"offload": False, "keep": True}


# -- the picture -------------------------------------------------------------------------------------------------------


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "rok.png", tmp_path / "rok.svg"]
    draw_rok(points_of(all_points()), paths, "title")
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in paths[1].read_bytes()
    draw_rok(points_of([failed("keep", "boom")]), paths, "nothing was measured")
    none = [tmp_path / "none.png"]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError):
        draw_rok(points_of(all_points()), none, "title")
    assert not none[0].exists()


@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_is_as_wide_as_a_column_and_has_its_colours(dark: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "rok.svg"
    draw_rok(points_of(all_points()), [file], "title", dark=dark)
    text = file.read_text(encoding="utf-8")
    assert 'width="237.6pt"' in text
    assert (BRIGHT if dark else DEEP)["hybrid"] in text


def test_the_picture_has_a_legend_for_exactly_its_series(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "rok.svg"
    draw_rok(points_of(all_points()), [file], "title")
    text = file.read_text(encoding="utf-8")  # SVG names each text in a comment
    for printed in ("hybrid ≤ 60% of keep", "recompute", "keep, batch 8", "no room", "A/A noise of keep"):
        assert printed in text
    draw_rok(points_of([sample("keep", ratios=[1.0]), sample("offload")]), [file], "title")
    text = file.read_text(encoding="utf-8")
    assert not [printed for printed in ("hybrid", "recompute", "batch 8", "no room", "A/A noise") if printed in text]
