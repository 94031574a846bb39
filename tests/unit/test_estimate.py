"""Estimates on paper: figures from the bytes that a model saves, and SSDTrain's lifetimes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from actoffload.errors import ConfigError
from actoffload.storage.endurance import DAY_S, YEAR_S, render_wear, written_per_day
from actoffload.tools.on_paper import DRIVES, Activations, Estimate, Hardware, Parallelism

GIB = 1 << 30
ONE = Parallelism()
DRIVE = DRIVES["980pro-1tb"]


SOME = Activations(label="some", blocks=(100e6, 100e6, 100e6, 100e6), flops=1e12)


def machine(**changes: Any) -> Hardware:
    values: dict[str, Any] = {"name": "toy", "flops_per_s": 5e13, "drive": DRIVE}
    values |= {"link_bytes_per_s": 10e9, "memory_bytes": 80 * GIB}
    return Hardware(**(values | changes))


def test_ssdtrains_lifetime_on_rated_endurance_is_days() -> None:
    def life(drive: str) -> float:
        some = Activations(label="12.1 GB a step", blocks=(12.1e9,), flops=1.0)
        return Estimate(some, ONE, machine(drive=DRIVES[drive], link_bytes_per_s=1e12), step_s=2.0).rated_life_s

    assert life("980pro-1tb") / DAY_S == pytest.approx(4.6, abs=0.05)
    assert life("p5800x-1.6tb") / YEAR_S == pytest.approx(6.1, abs=0.05)


def test_the_share_that_hides_is_the_lesser_of_write_and_read() -> None:
    free = Estimate(SOME, ONE, machine())
    need = free.required_bytes_per_s
    assert need == free.activation_bytes_per_step / (free.step_s / 2)
    for changes, share in (
        ({"disk_bytes_per_s": need / 4}, 0.25),
        ({"drive": replace(DRIVE, write_bytes_per_s=need / 4, read_bytes_per_s=need), "drives": 1}, 0.25),
        ({"drive": replace(DRIVE, write_bytes_per_s=need, read_bytes_per_s=need / 5), "drives": 1}, 0.2),
        ({"link_bytes_per_s": need / 2}, 0.5),
        ({"link_bytes_per_s": need / 2, "disk_bytes_per_s": need / 4}, 0.25),
        ({}, 1.0),
    ):
        fast = {"drives": 1000, "link_bytes_per_s": 2 * need}
        result = Estimate(SOME, ONE, machine(**(fast | changes)))
        assert result.share_hidden == pytest.approx(share)
        assert result.moved_bytes_per_step == pytest.approx(share * result.activation_bytes_per_step)
        assert result.written_bytes_per_day == pytest.approx(result.moved_bytes_per_step / result.step_s * DAY_S)
        assert any("hides" in note for note in result.notes) == (result.share_hidden < 1)


def test_small_tensors_stay() -> None:
    some = Activations(label="x", blocks=(100.0, 200.0), small_bytes=50.0, ends_bytes=7.0, flops=1e12)
    result = Estimate(some, ONE, machine())
    assert result.activation_bytes_per_step == 300.0
    assert result.memory.kept.saved_bytes == 357.0


def test_memory_of_a_gpu_at_its_peak() -> None:
    """Everything but two layers leaves where all hides; half of it stays where half hides."""
    states: dict[str, Any] = {"parameter_bytes": 2.0 * GIB, "gradient_bytes": 2.0 * GIB, "optimizer_bytes": 8.0 * GIB}
    layers = (1.0 * GIB,) * 8
    some = Activations(label="x", micro_batch=2, blocks=layers, small_bytes=1e6, ends_bytes=GIB, flops=1e15, **states)
    free = Estimate(some, ONE, machine(memory_bytes=25 * GIB))
    memory = free.memory
    assert (memory.states_bytes, memory.capacity_bytes) == (12 * GIB, 24 * GIB)
    assert (memory.kept.saved_bytes, memory.moved.saved_bytes) == (9 * GIB + 1e6, 3 * GIB + 1e6)
    assert memory.hidden == memory.moved
    assert (memory.kept.micro_batch, memory.moved.micro_batch) == (2, 7)
    slow = {"disk_bytes_per_s": free.required_bytes_per_s / 2}
    half = Estimate(some, ONE, machine(memory_bytes=13 * GIB, **slow)).memory
    assert half.hidden.saved_bytes == pytest.approx(7 * GIB + 1e6)
    assert [peak.micro_batch for peak in (half.kept, half.hidden, half.moved)] == [0, 0, 0]


def test_a_model_that_saves_nothing_that_may_move_has_nothing_to_hide() -> None:
    result = Estimate(Activations(label="x", blocks=(0.0, 0.0), small_bytes=5.0, flops=1e12), ONE, machine())
    assert (result.share_hidden, result.rated_life_s) == (1.0, math.inf)
    assert result.memory.kept == result.memory.moved


def test_states_are_split_by_zero_over_data_parallel_ranks() -> None:
    states: dict[str, Any] = {"parameter_bytes": 64.0, "gradient_bytes": 64.0, "optimizer_bytes": 64.0}
    some = Activations(label="x", blocks=(1.0,) * 2, flops=1e12, **states)
    found = []
    for zero in range(4):
        memory = Estimate(some, Parallelism(data=8, zero=zero), machine()).memory
        found.append((memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes))
    assert found == [(64, 64, 64), (64, 64, 8), (64, 8, 8), (8, 8, 8)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Parallelism(zero=4), "zero=4: is a stage, 0 to 3"),
        (lambda: Parallelism(data=0), "data=0"),
        (lambda: machine(flops_per_s=math.inf), "flops_per_s=inf"),
        (lambda: machine(drives=0), "drives=0"),
    ],
)
def test_errors_name_the_field_and_the_remedy(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_wear_of_a_measured_run() -> None:
    drive = 600 * 10**12
    assert written_per_day(10**12, 3600) == 24e12
    assert render_wear(0, 3600, drive) == []
    assert render_wear(10**12, 0, drive) == []
    assert render_wear(10**12, 3600, drive) == [
        "SSD wear: 1.0 TB written in 60.0 min, 24.0 TB a day at this rate; 25.0 days of writing at this rate to the "
        "rated 600.0 TB of the drive"
    ]
    assert "50.0 days" in render_wear(10**12, 3600, drive, drives=2)[0]
    assert "1.2 PB of 2 × the drive" in render_wear(10**12, 3600, drive, drives=2)[0]
    assert "set drive_tbw=" in render_wear(10**12, 3600, None)[0]
