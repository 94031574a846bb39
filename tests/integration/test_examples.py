"""The examples run as a user runs them, and print the same losses, to the last bit, with and without offloading."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from actoffload.integrations import examples
from tests.integration.workers.twice import SECOND
from tests.programs import FRAMEWORKS, run_program, warm_python

ROOT = Path(__file__).resolve().parents[2]
TEXT = ["--layers", "2", "--width", "64", "--seq", "64", "--batch", "2", "--steps", "3"]
LOSS = re.compile(r"loss \S+ = (-?0x\S+)")
ATTEMPTS = 4
BYTES = {" KiB": 1 << 10, " MiB": 1 << 20}
TWICE = "tests.integration.workers.twice"
LATE_DECREF = "terminate called without an active exception"
"""PyTorch's message as it aborts: a thread of gloo's releases a tensor while the interpreter is finalized, and
`ConcretePyInterpreterVTable::decref` waits for the GIL in vain (2.13, with and without offloading)."""
RUNS = {
    "plain_loop": (TEXT, "256KiB", 1, 3),
    "titan_loop": ([*TEXT, "--layers", "4", "--recompute", "--compile", "aot_eager"], "550KiB", 2, 3),
    "layer_major_loop": (TEXT, "640KiB", 1, 3),
}
"""For each example: its flags, a budget, the ranks, and how many losses it prints.

The budget is below the bytes that it saves; with checkpoints, below these and the bytes of a recomputation, by more
than the few tensors that backward fetches at once on a busy machine.
"""


def run(name: str, directory: Path, flags: list[str], budget: str, ranks: int) -> tuple[list[str], list[str]]:
    """Stdout and stderr of an example, each without and with offloading; fails if actoffload warned."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", TWICE]
    words = [f"{examples.__name__}.{name}", *flags, "--", "--min-bytes", "1KiB", "--device-budget", budget]
    env = {"OMP_NUM_THREADS": "1", "ACTOFFLOAD_PATH": str(directory)}
    for _ in range(ATTEMPTS):
        if ranks == 1:
            program = f"import runpy; runpy.run_module({TWICE!r}, run_name='__main__')"
            modules = FRAMEWORKS if name == "layer_major_loop" else ()  # it trains a model of transformers
            done = run_program(program, *words, environment=env, timeout_s=280, modules=modules)
        else:
            command = [warm_python(), *launcher, *words]
            env = os.environ | env | {"PYTHON_EXEC": warm_python()}  # the interpreter of the ranks
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
        if done.returncode == 0 or LATE_DECREF not in done.stderr:
            break
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "RuntimeWarning" not in done.stderr
    assert not re.search(r"actoffload\S*\.py:\d+: \w*Warning", done.stderr)
    return done.stdout.split(SECOND, 1), done.stderr.split(SECOND, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_same_losses(name: str, tmp_path: Path) -> None:
    if name == "layer_major_loop":
        pytest.importorskip("transformers")
    flags, budget, ranks, losses = RUNS[name]
    (plain, offloaded), (quiet, printed) = run(name, tmp_path, flags, budget, ranks)
    expected = LOSS.findall(plain)
    assert len(expected) == losses
    assert len(set(expected)) == losses, "a model that learns has another loss in each step"
    assert LOSS.findall(offloaded) == expected
    report = re.search(r"nvme  written +([0-9.]+) KiB +read +([0-9.]+) KiB|nvme  written +([0-9.]+) MiB", offloaded)
    assert report is not None, offloaded
    assert float(report[1] or report[3]) > 0
    (peaks, *_) = re.findall(
        r"activations' peak (\S+)( [KM]iB)? → (\S+)( [KM]iB)", offloaded
    )  # the plan's is the second
    before, after = (float(number) * BYTES[unit or peaks[3]] for number, unit in (peaks[:2], peaks[2:]))
    assert after < before
    assert (printed + offloaded).count("actoffload: target nvme") == 1, "the first rank announces once"
    assert "actoffload: " not in plain + quiet


def test_every_example_is_run() -> None:
    there = {file.stem for file in Path(examples.__path__[0]).glob("*_loop.py")}
    assert there == set(RUNS)
