"""``actoffload estimate``: tables for a person, JSON and nothing else, options over presets, errors that say how."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from actoffload.tools import estimate as estimate_command
from actoffload.tools.on_paper import BUILT_IN, MODELS, PUBLISHED
from tests import commands
from tests.commands import invoke

TWO_LAYERS = ("--model", "ssdtrain-16384")
run, answer = partial(invoke, "estimate"), partial(commands.answer, "estimate")


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "memory.svg"
    run(*TWO_LAYERS, "--picture", str(file))
    text = file.read_text(encoding="utf-8")
    for said in ("ssdtrain-16384 on a100-pcie", "all kept", "all moves", "saved activations", "there is: 39 GiB"):
        assert said in text


def test_for_a_person() -> None:
    text = run("--model", "gpt3-175b", "--gpu", "a100-pcie")
    for part in (
        "96 layers × 12288",
        "memory of a GPU at its peak",
        "does NOT fit",
        "needed, each way",
        "share that hides",
        "life on rated TBW",
        "$360",
    ):
        assert part in text
    assert "(recalled, not measured)" in text


def test_json_holds_question_and_answer() -> None:
    parts = answer(*TWO_LAYERS)
    assert set(parts) == {"activations", "split", "hardware", "estimate"}
    assert parts["hardware"]["utilisation"] == 0.5
    assert parts["activations"]["label"].startswith("GPT of 2 layers × 16384, sequence 1024, micro-batch 16: 2 × ")


def test_options_go_over_the_presets() -> None:
    parts = answer(
        *("--model", "megatron-22b", "--micro-batch", "2", "--micro-batches", "3"),
        *("--peak-tflops", "100", "--utilisation", "0.25", "--link", "20"),
        *("--ssd-write", "2", "--ssd-read", "3", "--drives", "2", "--drive", "p5800x-1.6tb"),
    )
    whole = answer("--model", "megatron-22b", "--micro-batch", "4")["activations"]
    assert sum(parts["activations"]["blocks"]) == pytest.approx(sum(whole["blocks"]) / 2)
    assert parts["activations"]["flops"] == whole["flops"] / 2
    assert parts["split"]["micro_batches"] == 3
    hardware, result = parts["hardware"], parts["estimate"]
    assert (hardware["peak_flops"], hardware["utilisation"], hardware["drives"]) == (100e12, 0.25, 2)
    assert (result["write_bytes_per_s"], result["read_bytes_per_s"]) == (2e9, 3e9)
    assert hardware["drive"]["rated_written_bytes"] == 292 * 10**15
    assert result["ssd_price_usd"] == 2 * 3823
    assert not any("line rate" in note for note in result["notes"])


def test_published_figures_are_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = answer("--check")
    assert [row["source"].partition(",")[0] for row in rows] == 8 * ["Korthikanti et al."] + 4 * ["SSDTrain"]
    for row in rows:
        assert row["ours"] == pytest.approx(row["value"], rel=0.15 if "recalled" in row["source"] else 0.02), row
    monkeypatch.setattr(estimate_command, "PUBLISHED", PUBLISHED[-1:])
    assert "SSDTrain, Table III" in run("--check")


def test_memory_follows_the_gpu_the_optimizer_and_zero() -> None:
    options = (*TWO_LAYERS, "--gpu", "rtx-4090")
    memory = answer(*options)["estimate"]["memory"]
    assert memory["capacity_bytes"] == 23 << 30
    assert memory["parameter_bytes"] == pytest.approx(2 * (2 * 12 * 16384**2 + 2 * 30592 * 16384) / 2, rel=0.01)
    assert memory["optimizer_bytes"] == 6 * memory["parameter_bytes"]
    sgd = answer(*options, "--memory", "48GiB", "--optimizer-bytes", "0", "--data", "4", "--zero", "3")
    assert sgd["estimate"]["memory"]["capacity_bytes"] == 47 << 30
    assert sgd["estimate"]["memory"]["optimizer_bytes"] == 0
    assert sgd["estimate"]["memory"]["gradient_bytes"] == memory["gradient_bytes"] / 4


def test_presets_are_listed() -> None:
    listed = answer("--presets")
    assert {"--model", "--gpu", "--drive"} == {entry["option"] for entry in listed}
    assert all(entry["source"] for entry in listed)
    assert "qwen3-30b-a3b" in run("--presets")


COUNTED = [name for name, entry in MODELS.items() if entry.kind != BUILT_IN]


@pytest.mark.parametrize("model", COUNTED)
def test_presets_of_transformers_are_counted(model: str) -> None:
    """The layers of the real model; a short sequence, so that it is quick."""
    pytest.importorskip("transformers")
    parts = answer("--model", model, "--sequence", "128")
    assert len(parts["activations"]["blocks"]) in (32, 48, 80)
    assert parts["estimate"]["required_bytes_per_s"] > 0
    assert parts["activations"]["source"].endswith("flash attention")


def test_a_config_json_is_counted_with_the_batch_that_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 64}))
    short, long = (answer("--from-model", str(file), "--sequence", n)["estimate"] for n in ("1024", "2048"))
    assert long["activation_bytes_in_flight"] == pytest.approx(2 * short["activation_bytes_in_flight"], rel=0.001)
    assert "llama, sequence 2048, micro-batch 1: 2 × " in run("--from-model", str(file))


def test_the_documented_model_of_ones_own_is_counted(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "commands.md"
    file = tmp_path / "mine.py"
    file.write_text(page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0])
    parts = answer("--from-model", f"{file}:build", "--micro-batch", "64")
    assert len(parts["activations"]["blocks"]) == 4
    assert min(parts["activations"]["blocks"]) > 64 * 128 * 256 * 4
    assert parts["hardware"]["name"] == "h100-sxm"
