"""What the processes that train a model share."""

from __future__ import annotations

import json
import os
from typing import Any

import torch


def prepare_process(device: str, threads: int | None, seed: int) -> None:
    """Set threads and seed; on an accelerator, let torch choose kernels that give the same bits in every run."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    if device != "cpu":
        # Read when cuBLAS starts: without a fixed workspace its results are not reproducible.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.accelerator.synchronize()


def say(something: dict[str, Any]) -> None:
    """Print a JSON object for the parent process."""
    print(json.dumps(something), flush=True)
