"""``actoffload estimate``: tables, JSON without other output, options over presets, errors with a remedy."""

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
    found = answer(*TWO_LAYERS)
    assert found["hardware"]["flops_per_s"] == 156e12
    assert found["split"]["tensor"] == 2
    assert found["label"].startswith("GPT of 2 layers × 16384, sequence 1024, micro-batch 16: 2 × ")


def test_options_go_over_the_presets() -> None:
    found = answer(
        *(*TWO_LAYERS, "--micro-batch", "8"),
        *("--tflops", "25", "--link", "20", "--disk", "2", "--drives", "3", "--drive", "p5800x-1.6tb"),
    )
    whole = answer(*TWO_LAYERS)
    assert sum(found["layers_bytes"]) == pytest.approx(sum(whole["layers_bytes"]) / 2)
    assert found["step_flops"] == pytest.approx(whole["step_flops"] / 2)
    assert found["step_s"] == pytest.approx(found["step_flops"] / 25e12)
    hardware = found["hardware"]
    assert (hardware["flops_per_s"], hardware["drives"], hardware["disk_bytes_per_s"]) == (25e12, 3, 2e9)
    assert hardware["drive"]["rated_written_bytes"] == 292 * 10**15
    assert not any("line rate" in note for note in found["notes"])
    assert answer(*TWO_LAYERS, "--step-s", "7")["step_s"] == pytest.approx(7)


def test_published_figures_are_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = answer("--check")
    assert [row["source"].partition(",")[0] for row in rows] == ["Korthikanti et al."] + 3 * ["SSDTrain"]
    for row in rows:
        assert row["ours"] == pytest.approx(row["value"], rel=0.15 if "recalled" in row["source"] else 0.02), row
    monkeypatch.setattr(estimate_command, "PUBLISHED", PUBLISHED[-1:])
    assert "SSDTrain, Table III" in run("--check")


def test_memory_follows_the_gpu_and_the_optimizer() -> None:
    found = answer(*TWO_LAYERS, "--gpu", "rtx-4090")
    states = found["states"]
    assert "23.0 GiB for tensors" in run(*TWO_LAYERS, "--gpu", "rtx-4090")
    assert states["parameters"] == pytest.approx(2 * (2 * 12 * 16384**2 + 2 * 30592 * 16384) / 2, rel=0.01)
    assert states["optimizer"] == 6 * states["parameters"]
    sgd = answer(*TWO_LAYERS, "--memory", "48GiB", "--optimizer-bytes", "0")
    assert sgd["hardware"]["memory_bytes"] == 48 << 30
    assert sgd["states"]["optimizer"] == 0


def test_states_are_split_by_zero_over_data_parallel_ranks() -> None:
    found = [answer(*TWO_LAYERS, "--data", "8", "--zero", str(stage))["states"] for stage in range(4)]
    shares = [[nbytes / found[0][name] for name, nbytes in states.items()] for states in found]
    assert shares == [[1, 1, 1], [1, 1, 1 / 8], [1, 1 / 8, 1 / 8], [1 / 8, 1 / 8, 1 / 8]]


def test_in_host_memory_no_drive_wears_and_the_link_bounds() -> None:
    disk, host = (answer(*TWO_LAYERS, "--target", target, "--drives", "1") for target in ("nvme", "host"))
    assert host["fits"]["hidden"]["saved_bytes"] < disk["fits"]["hidden"]["saved_bytes"]
    assert (host["written_bytes_per_day"], host["rated_life_s"]) == (0, None)
    assert disk["rated_life_s"] * disk["written_bytes_per_day"] / 86400 == pytest.approx(600e12)
    assert disk["notes"][0].startswith("WEAR: ")
    assert not any("WEAR" in note or "drive" in note for note in host["notes"])
    assert "TBW" not in run(*TWO_LAYERS, "--target", "host")


def test_hidden_moves_cost_no_time_and_the_least_memory_does() -> None:
    fits = answer("--model", "ssdtrain-8192")["fits"]
    kept, hidden, least = fits["kept"], fits["hidden"], fits["least"]
    assert kept["saved_bytes"] > hidden["saved_bytes"] > least["saved_bytes"] > 0
    assert kept["step_s"] <= hidden["step_s"] <= 1.01 * kept["step_s"] < least["step_s"]
    assert kept["micro_batch"] <= hidden["micro_batch"] <= least["micro_batch"]


def test_the_memory_with_all_kept_is_that_of_try(tmp_path: Path) -> None:
    own = f"{documented_model(tmp_path)}:build"
    kept = answer("--from-model", own, "--micro-batch", "64")["fits"]["kept"]["saved_bytes"]
    assert kept == commands.answer("try", own, "--no-measure", "--batch", "64", "--gpu", "rtx-4090")["kept_bytes"]


def test_adapters_leave_the_states_of_the_rest_out() -> None:
    whole, some, half = (
        answer(*TWO_LAYERS, "--tensor", "1", *more) for more in ((), ("--adapters", "16"), ("--trained", "0.5"))
    )
    trained = some["states"]["gradients"] / 2
    linears = 4 * 16384 * 16 + (16384 + 3 * 16384) * 16 + 2 * (16384 + 4 * 16384) * 16 - 2 * 16384 * 16
    assert trained == pytest.approx(2 * linears, rel=0.2), "two layers; one adapter for queries, keys and values"
    assert some["states"]["parameters"] == pytest.approx(whole["states"]["parameters"] + 2 * trained, rel=0.001)
    assert some["states"]["optimizer"] == 12 * trained
    for name in ("gradients", "optimizer"):
        assert half["states"][name] == whole["states"][name] / 2
    assert half["layers_bytes"] == whole["layers_bytes"]
    assert sum(some["layers_bytes"]) == pytest.approx(sum(whole["layers_bytes"]), rel=0.2)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (("--memory", "41GiB"), "It fits as it is, up to micro-batch 16; with offloading up to 37"),
        (("--memory", "37GiB"), "It fits with offloading, and no step is longer"),
        (("--memory", "37GiB", "--disk", "1"), "so steps wait"),
        (("--memory", "24GiB"), "Try --adapters 16; or --zero 3 --data N over N GPUs; or --gpu a100-pcie."),
    ],
)
def test_the_first_line_has_the_advice(options: tuple[str, ...], reported: str) -> None:
    first, second, *_ = run("--model", "ssdtrain-8192", *options).splitlines()
    assert reported in first
    assert second.startswith("WEAR: "), "the warning of wear precedes the tables"


def test_presets_are_listed() -> None:
    listed = answer("--presets")
    assert {"--model", "--gpu", "--drive"} == {entry["option"] for entry in listed}
    assert all(entry["source"] for entry in listed)
    assert "qwen3-30b-a3b" in run("--presets")


COUNTED = [name for name, entry in MODELS.items() if entry.kind != BUILT_IN]


@pytest.mark.sampled(2)  # the other one differs in numbers alone
@pytest.mark.parametrize("model", COUNTED)
def test_presets_of_transformers_are_counted(model: str) -> None:
    """With the layers of the real model, and a short sequence, because that is quick."""
    pytest.importorskip("transformers")
    found = answer("--model", model, "--sequence", "128")
    assert len(found["layers_bytes"]) in (32, 48, 80)
    assert found["required_bytes_per_s"] > 0
    assert "Bytes by counting on meta tensors, with flash attention." in found["notes"]


def test_a_config_json_is_counted_with_the_batch_that_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 64}))
    short, long = (answer("--from-model", str(file), "--sequence", n)["fits"]["kept"] for n in ("1024", "2048"))
    assert long["saved_bytes"] == pytest.approx(2 * short["saved_bytes"], rel=0.001)
    assert "llama, sequence 2048, micro-batch 1: 2 × " in run("--from-model", str(file))


def documented_model(folder: Path) -> Path:
    """The file that docs/commands.md shows."""
    page = Path(__file__).parents[2] / "docs" / "commands.md"
    file = folder / "mine.py"
    file.write_text(page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0])
    return file


def test_the_documented_model_of_ones_own_is_counted(tmp_path: Path) -> None:
    found = answer("--from-model", f"{documented_model(tmp_path)}:build", "--micro-batch", "64")
    assert len(found["layers_bytes"]) == 4
    assert min(found["layers_bytes"]) > 64 * 128 * 256 * 4
    assert found["hardware"]["name"] == "rtx-4090"


def test_a_model_needs_no_loss_and_may_save_nothing_that_can_move(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def build():\n"
        "    layers = (torch.nn.Linear(8, 8) for _ in range(2))\n"
        "    return torch.nn.Sequential(*layers), lambda size: torch.ones(size, 8)\n"
    )
    found = answer("--from-model", f"{file}:build")
    assert (found["activation_bytes_per_step"], found["share_hidden"], found["rated_life_s"]) == (0, 0, None)
    assert found["fits"]["kept"] == found["fits"]["least"]
    assert found["small_bytes"] == found["fits"]["kept"]["saved_bytes"] > 0


def test_a_model_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))\n"
        "    return model.requires_grad_(False), lambda size: torch.ones(size, 8)\n"
    )
    assert "its loss has no gradient: train some of its parameters" in run("--from-model", f"{file}:build", status=2)
