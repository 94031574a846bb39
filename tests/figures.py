"""The rows of README's tables, made from the files in benchmarks/results that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
H200 = "gpu_nvidia-h200_2026-11-26.json"
H100, H100_STEPS = "gpu_nvidia-h100_2026-11-27.json", "gpu_steps_nvidia-h100_2026-11-27.json"
CPU = ("e2e_cpu_2026-11-23_same_memory.json", "e2e_cpu_2026-11-23_models.json")
MODES = {
    "keep": "keep everything",
    "default": "actoffload, the default",
    "selective": "PyTorch's selective checkpointing",
    "recompute": "recompute every layer",
    "checkpointed, ours at equal memory": "the same, and actoffload in no more memory",
    "TRL": "TRL's `OffloadActivations`",
    "save_on_cpu": "PyTorch's `save_on_cpu`",
}


def load(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def h200_rows() -> list[str]:
    """Return a row for each mode of the Llama: step over keep's, peak, share of keep's peak."""
    found = {p["mode"]: p["result"] for p in load(H200)["points"] if p["case"]["name"] == "llama, 8k tokens"}
    keep_bytes = found["keep"]["activation_peak_bytes"]
    rows = []
    for mode, label in MODES.items():
        step, peak_bytes = found[mode].get("ratio", 1.0), found[mode]["activation_peak_bytes"]
        assert mode == "keep" or found[mode]["identical"]
        rows.append(f"| {label} | {step:.2f} | {peak_bytes / GIB:.1f} | {peak_bytes / keep_bytes:.0%} |")
    return rows


def cpu_rows() -> list[str]:
    """Return a row for each model: step over keep's, over keep's in the same memory, resident share, share gone."""
    rows = []
    for name, row in (item for file in CPU for item in load(file)["summary"].items()):
        assert row["identical"]
        step, moving = (_spread(row[key], row[f"{key}_of_rounds"]) for key in ("ratio", "moving"))
        rows.append(f"| {name} | {step} | {moving} | {row['resident_share']:.0%} | {row['gone_share']:.0%} |")
    return rows


def _spread(median: float, rounds: list[float]) -> str:
    return f"{median:.3f} ({min(rounds):.2f} to {max(rounds):.2f})"
