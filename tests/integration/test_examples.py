"""The examples run as a user runs them, and print the same losses, to the last bit, with and without offloading."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--layers", "2", "--width", "64", "--seq", "64", "--batch", "2", "--steps", "3"]
FEW_BYTES = ["--min-bytes", "1KiB", "--device-budget", "256KiB"]
LOSS = re.compile(r"loss \S+ = (-?0x\S+)")
ATTEMPTS = 4
LATE_DECREF = "terminate called without an active exception"
"""How PyTorch ends a process, with and without offloading, in which a thread of gloo's lets go of a tensor while the
interpreter is finalized (2.13: `ConcretePyInterpreterVTable::decref` waits for a lock that is never given again)."""


def run(name: str, directory: Path, *arguments: str, ranks: int = 1) -> tuple[str, str]:
    """What an example said on stdout and stderr; fails when it did or when a warning of ours escaped."""
    module = f"actoffload.integrations.examples.{name}"
    starter = ["-m", module]
    if ranks > 1:
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", module]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACTOFFLOAD_PATH": str(directory),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
    }
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            [sys.executable, *starter, *SIZES, *arguments],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        if done.returncode == 0 or LATE_DECREF not in done.stderr:
            break
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "RuntimeWarning" not in done.stderr
    assert not re.search(r"actoffload\S*\.py:\d+: \w*Warning", done.stderr)
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "ranks", "losses"),
    [
        ("plain_loop", [], 1, 3),
        ("titan_loop", ["--compile", "aot_eager", "--device-budget", "640KiB"], 1, 3),
        ("titan_loop", ["--recompute"], 2, 3),
        ("lightning_loop", ["--accelerator", "cpu", "--accumulate", "2"], 1, 6),
    ],
    ids=["plain", "titan compiled", "titan sharded and checkpointed", "lightning"],
)
def test_same_losses(name: str, more: list[str], ranks: int, losses: int, tmp_path: Path) -> None:
    if name == "lightning_loop":
        pytest.importorskip("lightning.pytorch")
    plain, _ = run(name, tmp_path, "--target", "none", *more, ranks=ranks)
    offloaded, said = run(name, tmp_path, "--target", "nvme", *FEW_BYTES, *more, ranks=ranks)
    expected = LOSS.findall(plain)
    assert len(expected) == losses
    assert len(set(expected)) == losses, "the losses do not change: nothing is learned"
    assert LOSS.findall(offloaded) == expected
    report = re.search(r"nvme  written +([0-9.]+) KiB +read +([0-9.]+) KiB|nvme  written +([0-9.]+) MiB", offloaded)
    assert report is not None, offloaded
    assert float(report[1] or report[3]) > 0
    shares = re.search(r"peak \S+ \S+ of \S+ \S+ with nothing moved \((\d+)%\)", offloaded)
    assert shares is not None
    assert int(shares[1]) < 100
    assert said.count("actoffload: target nvme") == 1, "it is said once, by the first rank"
    assert "actoffload" not in plain
