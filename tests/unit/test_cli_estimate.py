"""``actoffload estimate``: tables for a person, JSON and nothing else, options over presets, errors that say how."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from actoffload.cli.app import app

runner = CliRunner()
SSDTRAIN = ["--write-amplification-rated", "2.5", "--retention-credit", "86"]


def run(*arguments: str) -> str:
    result = runner.invoke(app, ["estimate", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return result.output


def answer(*arguments: str) -> Any:
    return json.loads(run("--json", *arguments))


def test_for_a_person() -> None:
    text = run("--model", "gpt3-175b", "--gpu", "a100-pcie", *SSDTRAIN)
    for part in (
        "gpt, 96 layers × 12288",
        "needed, each way",
        "share that hides",
        "life on rated TBW",
        "× 215",
        "$360",
    ):
        assert part in text
    assert "on rated TBW alone it is" in text
    assert "(recalled, not measured)" in text


def test_json_holds_question_and_answer() -> None:
    parts = answer("--model", "gpt3-175b")
    assert set(parts) == {"model", "split", "hardware", "credits", "recompute", "estimate"}
    assert parts["credits"] == {
        "write_amplification_rated": 1.0,
        "write_amplification_workload": 1.0,
        "retention_credit": 1.0,
    }
    assert parts["estimate"]["credited_life_s"] == parts["estimate"]["rated_life_s"]
    assert parts["hardware"]["utilisation"] == 0.514
    assert parts["estimate"]["required_bytes_per_s"] == pytest.approx(12.0e9, rel=0.01)


def test_options_go_over_the_presets() -> None:
    parts = answer(
        *("--layers", "16", "--micro-batch", "2", "--micro-batches", "3", "--context", "2", "--fused-kernels"),
        *("--peak-tflops", "100", "--utilisation", "0.25", "--device-to-host", "20", "--host-to-device", "21"),
        *("--ssd-write", "2", "--ssd-read", "3", "--drives", "2", "--tbw", "1200", "--drive-price", "100"),
        *("--gpu-price", "30000", "--retention-credit", "2"),
    )
    assert (parts["model"]["layers"], parts["model"]["micro_batch"], parts["model"]["hidden"]) == (16, 2, 4096)
    assert parts["model"]["fused_kernels"] is True
    assert (parts["split"]["micro_batches"], parts["split"]["context"]) == (3, 2)
    hardware, result = parts["hardware"], parts["estimate"]
    assert (hardware["peak_flops"], hardware["utilisation"], hardware["drives"]) == (100e12, 0.25, 2)
    assert (result["write_bytes_per_s"], result["read_bytes_per_s"]) == (2e9, 3e9)
    assert hardware["drive"]["rated_written_bytes"] == 1200 * 10**12
    assert (result["ssd_price_usd"], result["ssd_share_of_gpu_price"]) == (200.0, pytest.approx(200 / 30000))
    assert result["credited_life_s"] == pytest.approx(2 * result["rated_life_s"])
    assert not any("line rate" in note for note in result["notes"])


def test_presets_are_listed() -> None:
    listed = answer("--presets")
    assert {"--model", "--gpu", "--drive"} == {entry["option"] for entry in listed}
    assert all(entry["source"] for entry in listed)
    assert "ssdtrain-t5-16384x2" in run("--presets")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt5"], "model='gpt5': no such preset; there are megatron-22b"),
        (["--gpu", "abacus"], "gpu='abacus': no such preset"),
        (["--drive", "floppy"], "drive='floppy': no such preset"),
        (["--recompute", "some"], "recompute='some': choose one of"),
        (["--tensor", "3"], "tensor=3: must divide heads=32"),
        (["--layers", "0"], "--layers"),
        (["--utilisation", "40"], "utilisation=40.0: is a share"),
        (["--ssd-write", "0"], "--ssd-write"),
        (["--step-s", "-1"], "step_s=-1.0"),
        (["--retention-credit", "0"], "retention_credit=0.0: must be a number above 0"),
        (["--drive", "p5800x-1.6tb", "--retention-credit", "86"], "retention_credit=86.0: Intel Optane"),
        (["--attention", "unfused", "--context", "2"], "context=2: context parallelism needs"),
        (["--modle", "x"], "modle"),
    ],
)
def test_bad_options_end_with_2_and_say_why(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["estimate", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in result.output
