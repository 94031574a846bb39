"""Points from samples, which of them are efficient, and the picture of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actoffload.analysis.plots import draw_rok
from actoffload.analysis.rok import PRESETS, points_of
from tests.rok_samples import CASE, all_points, failed, sample

# -- numbers ----------------------------------------------------------------------------------------------------------


def test_repeats_are_one_point_with_the_highest_peak_and_the_spread_of_their_medians() -> None:
    samples = [sample("keep", 100, 1.0), sample("keep", 120, 1.1, repeat=1)]
    (point,) = points_of(samples)
    assert (point.samples, point.peak_bytes) == (2, 120)
    assert point.spread == pytest.approx(0.1 / 1.05)


def test_one_bit_of_difference_is_found() -> None:
    other = sample("offload") | {"losses_hex": ["0x1p+2", "0x1.0000000000001p+1"]}
    points = points_of([other, sample("keep")])
    assert {p.variant.series: p.identical for p in points} == {"offload": False, "keep": True}


def test_what_is_efficient() -> None:
    samples = [
        sample("keep", 100, 1.0),
        sample("recompute", 40, 1.4),
        sample("offload", 60, 1.5),
        sample("hybrid", 60, 1.1),
        sample("keep", 10, 0.1, case=replace(CASE, hidden=256)),  # another panel
        failed("hybrid", "boom", case=replace(CASE, batch=4)),
    ]
    points = points_of(samples)
    assert [p.label for p in points if p.efficient] == [
        *("keep, batch 2", "recompute, batch 2", "hybrid, batch 2"),
        "keep, batch 2",  # of the other panel
    ]
    assert not points[-1].measured
    assert all(p.efficient for p in points_of([sample("keep"), sample("offload")])), "equal points"


def test_presets_hold_the_shapes_of_the_paper() -> None:
    shapes = {(c.model, c.hidden, c.layers, c.batch) for c in PRESETS["ssdtrain"].cases}
    for model in ("gpt", "bert", "t5"):
        assert {(model, 8192, 4, 16), (model, 12288, 3, 16), (model, 16384, 2, 16)} <= shapes
    assert {("bert", hidden, 3, batch) for hidden in (12288, 14336) for batch in (4, 8, 16, 32)} <= shapes
    assert len(shapes) == len(PRESETS["ssdtrain"].cases) == 16
    assert {c.dtype for c in PRESETS["ssdtrain"].cases} == {"bfloat16"}


# -- the picture -------------------------------------------------------------------------------------------------------


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "rok.png"
    assert draw_rok(points_of(all_points()), file, "title")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert draw_rok(points_of([failed("keep", "boom")]), file, "nothing was measured")
    assert not draw_rok([], tmp_path / "none.png", "nothing")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert not draw_rok(points_of(all_points()), tmp_path / "none.png", "title")
