"""A measurement's surroundings: machine, software and commit, the process that measures, and files written whole."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from ..memory.process_memory import peak_rss_bytes as peak_rss_bytes
from ..memory.process_memory import rss_bytes as rss_bytes
from ..version import __version__

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, if the package is used from one."""
CODE = ("actoffload", "integrations", "benchmarks/*.py")
"""The files below the checkout that a measurement depends on."""
BUSY_SHARE = 0.15
"""A machine on which other processes take more of the processors than this is called busy."""


def describe_environment() -> dict[str, Any]:
    """Describe the machine, its load while this process waits, and the software. No host name, no path."""
    import torch

    from ..autograd import native

    share = psutil.cpu_percent(interval=0.2) / 100
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=True),
        "memory_bytes": int(psutil.virtual_memory().total),
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "cpu_busy_share": round(share, 3),
        "busy": share > BUSY_SHARE,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "actoffload": __version__,
        "native_hooks": native.refusal() or "yes",
        "commit": commit_of(),
        "gpu": None,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        facts["cuda"] = torch.version.cuda
    return facts


def find_device() -> str:
    """Return the accelerator's type if there is one, else ``"cpu"``."""
    from ..tiers.accelerator import default_device_types  # imports torch

    return default_device_types()[0]


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    with contextlib.suppress(OSError):
        if found := re.search("model name.*: (.+)", Path("/proc/cpuinfo").read_text(errors="replace")):
            return found[1]
    return platform.processor() or platform.machine()


def commit_of(root: Path = ROOT) -> str | None:
    """Return the commit that was measured, with ``+changes`` if the code differs from it.

    None without git, and if the package is installed: a repository around it is another project's.
    """
    try:
        _git(root, "ls-files", "--error-unmatch", "actoffload/version.py")
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", *CODE)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changed else head


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def without_paths(text: str) -> str:
    """Return ``text`` without this machine's directories."""
    return text.replace(str(ROOT), ".").replace(str(Path.home()), "~")


def without_errno(text: str) -> str:
    """Return the text of an error without the system's number for it, which the words beside it explain."""
    return re.sub(r"\[Errno \d+\] ", "", text)


def write_json(file: Path, payload: dict[str, Any]) -> None:
    """Write ``payload`` as JSON in one step, so that a run that is killed leaves the last whole file."""
    text = json.dumps(payload, indent=1) + "\n"
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


# -- the process ------------------------------------------------------------------------------------------------------


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


def clock_s(device: str) -> float:
    """Return the time at which the device has done its work."""
    if device != "cpu":
        import torch

        torch.accelerator.synchronize()
    return time.perf_counter()
