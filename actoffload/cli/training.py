"""What the worker processes of ``demo`` and ``rok`` share, and one timed training step of the demo."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


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


def train_step(
    context: AbstractContextManager[Any],
    forward: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    device: str,
) -> tuple[float, float]:
    """Run one step, with the forward in ``context``; return the loss, and the seconds with the device's work."""
    synchronize(device)
    begin_s = time.perf_counter()
    with context:
        loss = forward()
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.detach()
    del loss
    synchronize(device)
    step_s = time.perf_counter() - begin_s
    return float(value), step_s


def say(something: dict[str, Any]) -> None:
    """Print a JSON object for the parent process."""
    print(json.dumps(something), flush=True)
