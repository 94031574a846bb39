"""Estimates on paper: Megatron-LM's formulas and what follows from them, against published numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from actoffload.analysis.estimate import Activations, Estimate, Hardware, estimate, required_bytes_per_s
from actoffload.analysis.estimate import megatron_activations as by_formula
from actoffload.analysis.estimate_presets import DRIVES, GPUS, MODELS
from actoffload.analysis.megatron import MegatronModel, Parallelism, layer_bytes, model_flops
from actoffload.errors import ConfigError
from actoffload.storage.endurance import (
    DAY_S,
    YEAR_S,
    Credits,
    Drive,
    endurance_bytes,
    lifetime_s,
    render_wear,
    written_per_day,
)

ONE = Parallelism()
DRIVE = DRIVES["980pro-1tb"]


def shape(**changes: Any) -> MegatronModel:
    sizes: dict[str, Any] = {"layers": 4, "hidden": 1024, "heads": 16, "sequence": 512, "micro_batch": 2, "vocab": 1000}
    return MegatronModel(**(sizes | changes))


def activations(split: Parallelism = ONE, **options: Any) -> Activations:
    return by_formula(shape(), split, **options)


def machine(**changes: Any) -> Hardware:
    values: dict[str, Any] = {"name": "toy", "peak_flops": 1e14, "utilisation": 0.5, "drive": DRIVE}
    values["link_bytes_per_s"] = 10e9
    return Hardware(**(values | changes))


def test_flops_follow_the_published_formula() -> None:
    model = published("gpt3-175b")
    s, h, layers, vocab = model.sequence, model.hidden, model.layers, model.vocab
    formula = 72 * model.micro_batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert model_flops(model) == pytest.approx(formula)
    again = model_flops(model, recompute=True) - model_flops(model)
    assert again == pytest.approx((formula - 6 * s * h * vocab) / 3)


@pytest.mark.parametrize(
    ("split", "options", "of_sbh", "of_square"),
    [
        (Parallelism(), {"unfused": True}, 34, 5),
        (Parallelism(tensor=4), {"unfused": True}, 10 + 24 / 4, 5 / 4),
        (Parallelism(tensor=4, sequence_parallel=True), {"unfused": True}, 34 / 4, 5 / 4),
        (Parallelism(tensor=4), {}, 10 + 24 / 4, 0),
        (Parallelism(tensor=4, sequence_parallel=True), {}, 34 / 4, 0),
        (Parallelism(tensor=4), {"recompute": True}, 2, 0),
    ],
)
def test_a_layer_is_korthikantis(split: Parallelism, options: dict[str, Any], of_sbh: float, of_square: float) -> None:
    layer = shape(hidden=4096, heads=32)
    sbh = layer.sequence * layer.micro_batch * layer.hidden
    square = layer.heads * layer.sequence**2 * layer.micro_batch
    assert layer_bytes(layer, split, **options) == pytest.approx(of_sbh * sbh + of_square * square)


def test_micro_batches_in_flight_are_those_of_1f1b() -> None:
    assert Parallelism(pipeline=8, micro_batches=64).microbatches_in_flight == 8
    assert Parallelism(pipeline=8, micro_batches=3).microbatches_in_flight == 3
    assert Parallelism(pipeline=8, micro_batches=64, interleave=3).microbatches_in_flight == pytest.approx(8 + 7 / 3)


# -- against published numbers: Korthikanti et al. 2022 (arXiv 2205.05198) and SSDTrain (arXiv 2408.10013) -------------


def published(name: str) -> MegatronModel:
    model = MODELS[name].model
    assert isinstance(model, MegatronModel)
    return model


def run_on_a100(name: str) -> Estimate:
    """A published run on SSDTrain's assumed machine, at its published MFU, with everything moved."""
    model, gpu = MODELS[name], GPUS["a100-pcie"]
    link = {"link_bytes_per_s": gpu.link_bytes_per_s}
    hardware = machine(peak_flops=gpu.peak_flops, utilisation=model.utilisation or 0.5, **link)
    return estimate(by_formula(published(name), model.split), model.split, hardware)


@pytest.mark.parametrize(
    ("name", "gib", "step_s", "shares"),
    [
        ("megatron-22b", 9.5625, 1.10, (66.84, 49.42, 16.18, 7.64)),
        ("gpt3-175b", 12.3515625, 13.75, (62.04, 56.53, 18.49, 8.71)),
        ("megatron-530b", 23.076171875, 37.83, (58.31, 62.04, 20.27, 9.42)),
        ("megatron-1t", 26.5625, 71.49, (58.31, 62.04, 20.27, 9.42)),
    ],
)
def test_korthikantis_runs(name: str, gib: float, step_s: float, shares: tuple[float, ...]) -> None:
    """Figure 1: activations of the first stage; Table 5: step time; Figure 7 (as Calculon has read it off): percent."""
    model, split = published(name), MODELS[name].split
    alone = replace(split, sequence_parallel=False)
    ours = model.layers * layer_bytes(model, split) / split.pipeline * split.microbatches_in_flight
    assert ours / 2**30 == pytest.approx(gib, rel=0.01)
    assert run_on_a100(name).step_s == pytest.approx(step_s, rel=0.02)
    whole = layer_bytes(model, alone, unfused=True)
    part = [
        layer_bytes(model, split, unfused=True),  # sequence parallelism
        layer_bytes(model, alone),  # selective recomputation
        layer_bytes(model, split),
        layer_bytes(model, alone, recompute=True),
    ]
    assert [100 * nbytes / whole for nbytes in part] == pytest.approx(shares, abs=0.2)


def test_ssdtrains_bandwidth_size_and_cost() -> None:
    """Figure 5: at most 12.1 GB/s a GPU, in all but the smallest of Megatron's runs; needs fall with scale."""
    names = ("megatron-22b", "gpt3-175b", "megatron-530b", "megatron-1t")
    needed = [run_on_a100(name).required_bytes_per_s for name in names]
    assert needed == sorted(needed, reverse=True)
    assert [rate <= 12.1e9 * 1.05 for rate in needed] == [False, True, True, True]
    for name in names[1:]:  # its model: 0.4 to 1.8 TB a GPU and step at micro-batch 8 to 32
        model, split = replace(published(name), micro_batch=8), MODELS[name].split
        nbytes = model.layers * layer_bytes(model, split) / split.pipeline * split.micro_batches
        assert 0.4e12 <= nbytes <= 1.05 * 1.8e12
    assert run_on_a100("gpt3-175b").ssd_price_usd == 360.0


def test_ssdtrains_lifetime_holds_only_with_its_credits() -> None:
    def life(credits: Credits, drive: str = "980pro-1tb") -> float:
        return lifetime_s(endurance_bytes(DRIVES[drive], 4, credits), 2.0, 12.1e9)

    assert life(Credits()) / DAY_S == pytest.approx(4.6, abs=0.05)
    assert life(Credits(write_amplification_rated=2.5)) / DAY_S == pytest.approx(11.5, abs=0.05)
    both = Credits(write_amplification_rated=2.5, retention_credit=86.0)
    assert life(both) / YEAR_S == pytest.approx(2.70, abs=0.01)
    assert life(Credits(), "p5800x-1.6tb") / YEAR_S == pytest.approx(6.1, abs=0.05)


def test_the_share_that_hides_is_the_lesser_of_write_and_read() -> None:
    free = estimate(activations(), ONE, machine())
    need = free.required_bytes_per_s
    assert need == required_bytes_per_s(free.activation_bytes_per_step, free.step_s)
    for changes, share in (
        ({"ssd_write_bytes_per_s": need / 4}, 0.25),
        ({"ssd_read_bytes_per_s": need / 5}, 0.2),
        ({"link_bytes_per_s": need / 2}, 0.5),
        ({"link_bytes_per_s": need / 2, "ssd_write_bytes_per_s": need / 4}, 0.25),
        ({}, 1.0),
    ):
        fast = {"drives": 1000, "link_bytes_per_s": 2 * need}
        result = estimate(activations(), ONE, machine(**(fast | changes)))
        assert result.share_hidden == pytest.approx(share)
        assert result.moved_bytes_per_step == pytest.approx(share * result.activation_bytes_per_step)
        assert result.written_bytes_per_day == pytest.approx(result.moved_bytes_per_step / result.step_s * DAY_S)
        assert any("hides" in note for note in result.notes) == (result.share_hidden < 1)


def test_no_credit_is_given_unasked() -> None:
    result = estimate(activations(), ONE, machine())
    assert result.credited_life_s == result.rated_life_s
    assert result.rated_life_s * result.written_bytes_per_day / DAY_S == pytest.approx(4 * DRIVE.rated_written_bytes)
    credited = estimate(activations(), ONE, machine(), credits=Credits(retention_credit=86))
    assert credited.credited_life_s == pytest.approx(86 * result.rated_life_s)
    assert credited.rated_life_s == result.rated_life_s
    assert "on rated TBW alone" in credited.notes[0]


def test_cost_and_a_measured_step() -> None:
    result = estimate(activations(), ONE, machine(), step_s=2.0)
    assert result.step_s == 2.0
    assert result.ssd_price_usd == 360.0
    unknown = estimate(activations(), ONE, machine(drive=replace(DRIVE, price_usd=None)))
    assert unknown.ssd_price_usd is None


def test_recomputing_leaves_less_to_move_and_takes_longer() -> None:
    kept, full = (estimate(activations(recompute=how), ONE, machine()) for how in (False, True))
    assert full.activation_bytes_per_step < kept.activation_bytes_per_step / 10
    assert full.step_s > 1.2 * kept.step_s


def test_what_is_too_small_stays() -> None:
    split = Parallelism(pipeline=2, micro_batches=4)
    some = Activations(label="x", blocks=(100.0, 200.0, 100.0, 200.0), small_bytes=50.0, ends_bytes=7.0, flops=1e12)
    result = estimate(some, split, machine())
    assert result.activation_bytes_per_step == 4 * 300
    assert (result.activation_bytes_in_flight, result.small_bytes) == (2 * (300 + 25), 2 * 25)
    assert result.ends_bytes == 7.0


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if isinstance(entry.model, MegatronModel)])
def test_every_published_run_can_be_estimated_and_printed(name: str) -> None:
    result = run_on_a100(name)
    assert 0 < result.share_hidden <= 1
    assert math.isfinite(json.loads(json.dumps(result.as_dict()))["rated_life_s"])


def test_presets_name_a_gpu_and_a_source() -> None:
    assert all(entry.gpu in GPUS and entry.source for entry in MODELS.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shape(micro_batch=2.5), "micro_batch=2.5"),
        (lambda: activations(Parallelism(tensor=3)), "tensor=3: must divide heads=16"),
        (lambda: Parallelism(pipeline=0), "pipeline=0"),
        (lambda: estimate(activations(), Parallelism(pipeline=3), machine()), "pipeline=3: it must divide layers=4"),
        (lambda: machine(peak_flops=math.inf), "peak_flops=inf"),
        (lambda: machine(drives=0), "drives=0"),
        (lambda: replace(DRIVE, rated_written_bytes=-1), "rated_written_bytes=-1"),
    ],
)
def test_errors_name_the_field_and_the_remedy(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_wear_of_a_measured_run() -> None:
    drive = Drive(
        name="D", capacity_bytes=1, rated_written_bytes=600 * 10**12, write_bytes_per_s=1.0, read_bytes_per_s=1.0
    )
    assert written_per_day(10**12, 3600) == 24e12
    assert render_wear(0, 3600, drive) == []
    assert render_wear(10**12, 0, drive) == []
    assert render_wear(10**12, 3600, drive) == [
        "SSD wear: 1.0 TB written in 60.0 min, 24.0 TB a day at this rate; 25.0 days of writing at this rate to the "
        "rated 600.0 TB of D"
    ]
    assert "50.0 days" in render_wear(10**12, 3600, drive, drives=2)[0]
    assert "1.2 PB of 2 × D" in render_wear(10**12, 3600, drive, drives=2)[0]
    assert "set drive_tbw=" in render_wear(10**12, 3600, None)[0]
