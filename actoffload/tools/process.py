"""A process that measures or trains: its threads and seed, its memory, its reads and writes, and how it reports."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import psutil

from ..memory.process_memory import peak_rss_bytes, rss_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["block_io", "peak_rss_bytes", "prepare_process", "rss_bytes", "say", "sum_of_bits", "synchronize"]


def prepare_process(device: str, threads: int | None, seed: int) -> None:
    """Set threads and seed; on an accelerator, let torch choose kernels that give the same bits in every run."""
    import torch

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
        import torch

        torch.accelerator.synchronize()


def say(something: dict[str, Any]) -> None:
    """Print a JSON object for the parent process."""
    print(json.dumps(something), flush=True)


def sum_of_bits(tensor: Tensor | None) -> int:
    """Return the sum of a tensor's elements, each read as a whole number of its size; 0 for None."""
    import torch

    if tensor is None:
        return 0
    # A sum of integers has no rounding, so one bit that differs shows.
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(tensor.view(kinds[tensor.element_size()]).sum())


def block_io() -> Any:
    """Return the kernel's count of ``read_bytes`` and ``write_bytes`` to storage; None if it keeps none.

    Direct I/O is counted when it reaches the device. Buffered writes are counted when a page becomes dirty, and
    buffered reads that the page cache answers are not counted.
    """
    try:
        return psutil.Process().io_counters()
    except (AttributeError, NotImplementedError, OSError, psutil.Error):
        return None
