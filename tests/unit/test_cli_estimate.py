"""``actoffload estimate``: tables for a person, JSON and nothing else, options over presets, errors that say how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actoffload.analysis.estimate_presets import MODELS, CountedModel
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
        "96 layers × 12288",
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
    assert set(parts) == {"activations", "split", "hardware", "credits", "estimate"}
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
        *("--model", "megatron-22b", "--micro-batch", "2", "--micro-batches", "3", "--context", "2"),
        *("--peak-tflops", "100", "--utilisation", "0.25", "--link", "20"),
        *("--ssd-write", "2", "--ssd-read", "3", "--drives", "2", "--tbw", "1200", "--retention-credit", "2"),
    )
    whole = answer("--model", "megatron-22b", "--micro-batch", "4")["activations"]
    assert sum(parts["activations"]["blocks"]) == pytest.approx(sum(whole["blocks"]) / 4)
    assert parts["activations"]["flops"] == whole["flops"] / 2
    assert (parts["split"]["micro_batches"], parts["split"]["context"]) == (3, 2)
    hardware, result = parts["hardware"], parts["estimate"]
    assert (hardware["peak_flops"], hardware["utilisation"], hardware["drives"]) == (100e12, 0.25, 2)
    assert (result["write_bytes_per_s"], result["read_bytes_per_s"]) == (2e9, 3e9)
    assert hardware["drive"]["rated_written_bytes"] == 1200 * 10**12
    assert result["ssd_price_usd"] == 180.0
    assert result["credited_life_s"] == pytest.approx(2 * result["rated_life_s"])
    assert not any("line rate" in note for note in result["notes"])


def test_recomputing_moves_inputs_only() -> None:
    kept, again = answer("--model", "gpt3-175b"), answer("--model", "gpt3-175b", "--recompute")
    bytes_of = [sum(parts["activations"]["blocks"]) for parts in (again, kept)]
    assert bytes_of[0] == pytest.approx(bytes_of[1] * 2 / 34)
    assert again["activations"]["flops"] > kept["activations"]["flops"]


def test_presets_are_listed() -> None:
    listed = answer("--presets")
    assert {"--model", "--gpu", "--drive"} == {entry["option"] for entry in listed}
    assert all(entry["source"] for entry in listed)
    assert "deepseek-v3" in run("--presets")


COUNTED = [name for name, entry in MODELS.items() if isinstance(entry.model, CountedModel)]


@pytest.mark.parametrize("model", COUNTED)
def test_presets_of_transformers_are_counted(model: str) -> None:
    """The layers of the real model; a short sequence, so that it is quick."""
    pytest.importorskip("transformers")
    parts = answer("--model", model, "--sequence", "128")
    assert len(parts["activations"]["blocks"]) in (24, 32, 36, 48, 61, 80)
    assert parts["estimate"]["required_bytes_per_s"] > 0
    own = "the model's own attention, whose matrices are kept"
    assert parts["activations"]["source"].endswith(own if model == "gpt-oss-20b" else "flash attention")


def test_a_config_json_is_counted_with_the_batch_that_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 64}))
    short, long = (answer("--from-model", str(file), "--sequence", n)["estimate"] for n in ("1024", "2048"))
    assert long["activation_bytes_in_flight"] == pytest.approx(2 * short["activation_bytes_in_flight"], rel=0.001)
    assert "llama, sequence 2048, micro-batch 1: 2 × " in run("--from-model", str(file))


def test_a_function_of_ones_own_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    model = "torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))"
    file.write_text(f"import torch\ndef build():\n    return {model}, lambda size: torch.ones(size, 512)\n")
    parts = answer("--from-model", f"{file}:build", "--micro-batch", "4096")
    assert parts["activations"]["blocks"] == [0.0, 4096 * 512 * 4]
    assert parts["hardware"]["name"] == "h100-sxm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt5"], "model='gpt5': no such preset; there are megatron-22b"),
        (["--gpu", "abacus"], "gpu='abacus': no such preset"),
        (["--drive", "floppy"], "drive='floppy': no such preset"),
        (["--tensor", "5"], "tensor=5: must divide heads=96"),
        (["--pipeline", "5"], "pipeline=5: pipeline × interleave must divide layers=96"),
        (["--micro-batch", "0"], "--micro-batch"),
        (["--from-model", "no.py:build"], "there is no file no.py"),
        (["--from-model", "x.py:build", "--sequence", "5"], "sequence=5: your own make_batch(size) says it"),
        (["--utilisation", "40"], "utilisation=40.0: is a share"),
        (["--ssd-write", "0"], "--ssd-write"),
        (["--step-s", "-1"], "step_s=-1.0"),
        (["--retention-credit", "0"], "retention_credit=0.0: must be a number above 0"),
        (["--drive", "p5800x-1.6tb", "--retention-credit", "86"], "retention_credit=86.0: Intel Optane"),
        (["--modle", "x"], "modle"),
    ],
)
def test_bad_options_end_with_2_and_say_why(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["estimate", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in result.output
