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


def test_for_a_person() -> None:
    text = run("--model", "megatron-22b", "--gpu", "a100-pcie")
    for part in (
        "48 layers × 6144",
        "memory of a GPU at its peak",
        "does NOT fit",
        "needed, each way",
        "share that hides",
        "life on rated TBW",
    ):
        assert part in text
    assert "(recalled, not measured)" in text


def test_json_holds_question_and_answer() -> None:
    parts = answer(*TWO_LAYERS)
    assert set(parts) == {"activations", "split", "hardware", "estimate"}
    assert parts["hardware"]["flops_per_s"] == 156e12
    assert parts["activations"]["label"].startswith("GPT of 2 layers × 16384, sequence 1024, micro-batch 16: 2 × ")


def test_options_go_over_the_presets() -> None:
    parts = answer(
        *("--model", "megatron-22b", "--micro-batch", "2"),
        *("--tflops", "25", "--link", "20", "--disk", "2", "--drives", "3", "--drive", "p5800x-1.6tb"),
    )
    whole = answer("--model", "megatron-22b", "--micro-batch", "4")["activations"]
    assert sum(parts["activations"]["blocks"]) == pytest.approx(sum(whole["blocks"]) / 2)
    assert parts["activations"]["flops"] == whole["flops"] / 2
    hardware, result = parts["hardware"], parts["estimate"]
    assert (hardware["flops_per_s"], hardware["drives"]) == (25e12, 3)
    assert (result["write_bytes_per_s"], result["read_bytes_per_s"]) == (2e9, 2e9)
    assert hardware["drive"]["rated_written_bytes"] == 292 * 10**15
    assert not any("line rate" in note for note in result["notes"])


def test_published_figures_are_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = answer("--check")
    assert [row["source"].partition(",")[0] for row in rows] == ["Korthikanti et al."] + 3 * ["SSDTrain"]
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


def test_in_host_memory_no_drive_wears_and_the_link_bounds() -> None:
    disk, host = (answer(*TWO_LAYERS, "--target", target) for target in ("nvme", "host"))
    result = host["estimate"]
    assert result["write_bytes_per_s"] == result["read_bytes_per_s"] == host["hardware"]["link_bytes_per_s"]
    assert (result["written_bytes_per_day"], result["rated_life_s"]) == (0, None)
    assert result["share_hidden"] >= disk["estimate"]["share_hidden"]
    assert disk["estimate"]["notes"][0].startswith("WEAR: ")
    assert not any("WEAR" in note or "drive" in note for note in result["notes"])
    said = run(*TWO_LAYERS, "--target", "host")
    assert "TBW" not in said


def test_adapters_leave_the_states_of_the_rest_out() -> None:
    whole, some, half = (
        answer(*TWO_LAYERS, "--tensor", "1", *more)["activations"]
        for more in ((), ("--adapters", "16"), ("--trained", "0.5"))
    )
    trained = some["gradient_bytes"] / 2
    linears = 4 * 16384 * 16 + (16384 + 3 * 16384) * 16 + 2 * (16384 + 4 * 16384) * 16 - 2 * 16384 * 16
    assert trained == pytest.approx(2 * linears, rel=0.2), "two layers; queries, keys and values are one"
    assert some["parameter_bytes"] == pytest.approx(whole["parameter_bytes"] + 2 * trained, rel=0.001)
    assert some["optimizer_bytes"] == 12 * trained
    assert (half["gradient_bytes"], half["optimizer_bytes"]) == (
        whole["gradient_bytes"] / 2,
        whole["optimizer_bytes"] / 2,
    )
    assert half["blocks"] == whole["blocks"]
    assert sum(some["blocks"]) == pytest.approx(sum(whole["blocks"]), rel=0.2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--memory", "41GiB"), "It fits as it is, up to micro-batch 16; with offloading up to 27"),
        (("--memory", "37GiB"), "It fits with offloading, and no step is longer"),
        (("--memory", "37GiB", "--disk", "1"), "so steps wait"),
        (("--memory", "24GiB"), "Try --adapters 16; or --zero 3 --data N over N GPUs; or --gpu a100-pcie."),
    ],
)
def test_the_first_line_says_what_to_do(options: tuple[str, ...], told: str) -> None:
    first, second, *_ = run("--model", "ssdtrain-8192", *options).splitlines()
    assert told in first
    assert second.startswith("WEAR: "), "before the tables"


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
    short, long = (answer("--from-model", str(file), "--sequence", n)["estimate"]["memory"] for n in ("1024", "2048"))
    assert long["kept"]["saved_bytes"] == pytest.approx(2 * short["kept"]["saved_bytes"], rel=0.001)
    assert "llama, sequence 2048, micro-batch 1: 2 × " in run("--from-model", str(file))


def test_the_documented_model_of_ones_own_is_counted(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "commands.md"
    file = tmp_path / "mine.py"
    file.write_text(page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0])
    parts = answer("--from-model", f"{file}:build", "--micro-batch", "64")
    assert len(parts["activations"]["blocks"]) == 4
    assert min(parts["activations"]["blocks"]) > 64 * 128 * 256 * 4
    assert parts["hardware"]["name"] == "rtx-4090"
