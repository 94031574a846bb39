"""``actoffload try``: predictions for GPUs, a trial on this machine, and errors with a remedy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload.policy import KeepReason
from actoffload.tools import trial
from actoffload.tools.models import build, profiles_of
from actoffload.tools.on_paper import Case, hardware_of
from tests import commands
from tests.commands import invoke

run, answer = partial(invoke, "try"), partial(commands.answer, "try")
OWN = """
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

def build():
    return Stack(), lambda size: torch.randn(size, 512, 64)

def adapted():
    return Stack().to(torch.bfloat16), lambda size: torch.randn(size, 512, 64, dtype=torch.bfloat16)

def without_blocks():
    return nn.Linear(4, 4), lambda size: torch.randn(size, 4)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The file of a model with six blocks."""
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    return str(file)


def test_predicted_steps_lie_between_checkpointing_and_keeping_all(own: str) -> None:
    found = answer(f"{own}:build", "--no-measure", "--batch", "64", "--gpu", "h100-sxm", "--gpu", "rtx-4090")
    assert [row["gpu"] for row in found["gpus"]] == ["h100-sxm", "rtx-4090"]
    assert found["regions"] == 6
    assert found["checkpointed_bytes"] < found["kept_bytes"]
    weights = 6 * (64 * 256 + 256 + 256 * 64 + 64)
    assert found["states_bytes"] == weights * 4 * (1 + 1 + 2)  # in float32: weights, gradients, two moments
    for row in found["gpus"]:
        assert row["kept"] <= row["more_memory"] <= row["same_memory"] <= 1
        assert row["kept"] < 0.9, "without a second forward, a block's backward is a third shorter"
        assert row["fits"] == {"checkpointed": True, "more_memory": True, "kept": True}


def test_a_faster_link_shortens_the_step(own: str) -> None:
    # In narrow layers, even over the fastest link a move takes longer than the recomputation that it saves.
    Path(own).write_text(OWN.replace("256", "4096").replace("64", "1024"), encoding="utf-8")
    by_target = {
        target: answer(f"{own}:build", "--no-measure", "--gpu", "gh200", "--target", target)
        for target in ("host", "nvme")
    }
    ratios = {target: found["gpus"][0]["more_memory"] for target, found in by_target.items()}
    assert ratios["host"] < ratios["nvme"]


def test_a_step_that_does_not_fit_is_named(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(f"{own}:build", "--no-measure", "--batch", "5000", "--gpu", "rtx-4090")
    (row,) = found["gpus"]
    assert row["fits"] == {"checkpointed": True, "more_memory": True, "kept": False}
    assert "all but the last" in run(f"{own}:build", "--no-measure", "--batch", "5000", "--gpu", "rtx-4090")
    monkeypatch.setattr(trial, "states_of", lambda *_: {"parameter_bytes": 22e9})
    (row,) = answer(f"{own}:build", "--no-measure", "--batch", "5000", "--gpu", "rtx-4090")["gpus"]
    assert not any(row["fits"].values()), "weights, gradients and optimizer states take memory, too"


def test_a_block_that_runs_once_is_predicted_to_save_what_it_saves_by_default(own: str) -> None:
    machine, device = hardware_of("h100-sxm", target="host"), torch.device("meta")
    workload = build(Case(model=f"{own}:adapted", batch=64, adapters=4), device)
    base, plain, _ = profiles_of(workload, 64, machine)
    rows = 64 * 512
    half, activation, computed, small = rows * 64 * 2, rows * 256 * 2, rows * 256 * 4, rows * 4 * 4
    kept = KeepReason.SMALL.value
    saves = [(half, ""), (small, kept), (activation, ""), (computed, KeepReason.DERIVED.value), (small, kept)]
    # The first block's input needs no gradient, so it has no node, and its cast is saved whole.
    assert [[(s.nbytes, s.kept) for s in region.saves] for region in base.regions[1:]] == [saves] * 5
    loss = half  # the loss squares its input
    assert plain.movable_bytes == 6 * (2 * half + activation + computed) + loss, "without checkpoints all is whole"


@pytest.mark.usefixtures("warm_workers")
def test_the_trial_trains_with_and_without_and_compares_bits(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WARM_UP", 2)
    monkeypatch.setattr(trial, "TURNS", 1)
    found = answer(f"{own}:build", "--gpu", "h100-sxm", "--batch", "4")["measured"]
    assert found["label"] == "your model, each of its blocks checkpointed"
    assert found["identical"]
    assert found["ratio"] > 0
    theirs, ours = found["peak_bytes"]
    assert 0 < ours <= 1.02 * theirs, "the comparison needs equal memory"
    trial.show_measured(found)


def test_the_trial_has_the_adapters_that_the_prediction_has(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Case] = []

    def worker(module: str, spec: dict[str, Any], **options: Any) -> dict[str, Any]:
        cases.append(Case(**spec["case"]))
        return _round({})

    monkeypatch.setattr(trial, "run_worker", worker)
    for rank in ([], ["--adapters", "4"]):
        answer(f"{own}:build", "--gpu", "h100-sxm", *rank)
    whole, adapted = (sum(p.numel() for p in build(case).model.parameters() if p.requires_grad) for case in cases)
    assert adapted == 6 * 2 * 4 * (64 + 256) < whole


def _round(ours: dict[str, Any]) -> dict[str, Any]:
    one = {"step_s": [1.0] * 6, "peak_bytes": [1 << 20] * 6, "moved_bytes": 0, "identical": True}
    return {"samples": [{"error": "out of memory: no room"}, one, one | ours], "others_cpu_share": 0.0}


def test_different_bits_are_an_error(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_worker", lambda *_, **__: _round({"identical": False}))
    assert "BITS DIFFER" in run(f"{own}:build", "--gpu", "h100-sxm", status=1)
    monkeypatch.setattr(trial, "run_worker", lambda *_, **__: _round({}))
    assert "1.00 × checkpointing's step" in run(f"{own}:build", "--gpu", "h100-sxm"), "keep may run out of memory"


@pytest.mark.parametrize("failed", [_round({"error": "no room on disk"}), {"error": "no room on disk"}])
def test_a_trial_that_fails_says_why(own: str, monkeypatch: pytest.MonkeyPatch, failed: dict[str, Any]) -> None:
    monkeypatch.setattr(trial, "run_worker", lambda *_, **__: failed)
    assert "It could not be measured: no room on disk" in run(f"{own}:build", "--gpu", "h100-sxm", status=1)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5", "llama", "mistral", "qwen3", "gemma2", "mixtral", "qwen3_moe"])
def test_a_small_model_of_each_type_can_be_built(kind: str) -> None:
    pytest.importorskip("transformers")
    made = build(Case(model=kind, **trial.SMALL, batch=1), torch.device("meta"))
    assert len(made.blocks) >= trial.SMALL["layers"] - 1
    assert sum(parameter.numel() for parameter in made.model.parameters()) < 70e6
    assert made.model.training


def test_a_model_without_blocks_is_refused(own: str) -> None:
    assert "there are no blocks to recompute" in run(f"{own}:without_blocks", status=2)
