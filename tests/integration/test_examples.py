"""The examples run as a user runs them, and print the same losses, to the last bit, with and without offloading."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from actoffload.integrations.examples.__main__ import main

from actoffload.integrations import examples
from tests.integration.workers.twice import SECOND
from tests.programs import FRAMEWORKS, run_program, warm_python

ROOT = Path(__file__).resolve().parents[2]
TEXT = ["--layers", "2", "--width", "64", "--seq", "64", "--batch", "2", "--steps", "3"]
PICTURES = ["--batch", "2", "--steps", "3"]
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
    "lightning_loop": ([*TEXT, "--accelerator", "cpu", "--accumulate", "2"], "256KiB", 1, 6),
    "hf_loop": (TEXT, "384KiB", 1, 3),
    "layer_major_loop": (TEXT, "640KiB", 1, 3),
    "diffusers_loop": ([*PICTURES, "--width", "16", "--size", "16"], "384KiB", 1, 3),
    "torchvision_loop": ([*PICTURES, "--size", "64"], "1MiB", 1, 3),
}
"""For each example: its flags, a budget, the ranks, and how many losses it prints.

The budget is below the bytes that it saves; with checkpoints, below these and the bytes of a recomputation, by more
than the few tensors that backward fetches at once on a busy machine.
"""
NEEDS = {"diffusers_loop": "diffusers", "hf_loop": "transformers", "lightning_loop": "lightning"}
NEEDS["layer_major_loop"] = "transformers"
NEEDS["torchvision_loop"] = "torchvision"
APART = Path(sys.prefix) / "torchvision"
"""The directory into which `make` installs torchvision."""


def run(name: str, directory: Path, flags: list[str], budget: str, ranks: int) -> tuple[list[str], list[str]]:
    """Stdout and stderr of an example, each without and with offloading; fails if actoffload warned."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", TWICE]
    words = [f"{examples.__name__}.{name}", *flags, "--", "--min-bytes", "1KiB", "--device-budget", budget]
    env = {"OMP_NUM_THREADS": "1", "ACTOFFLOAD_PATH": str(directory)}
    for _ in range(ATTEMPTS):
        if ranks == 1:
            apart = f"import sys; sys.path.append({str(APART)!r}); " if name == "torchvision_loop" else ""
            program = f"{apart}import runpy; runpy.run_module({TWICE!r}, run_name='__main__')"
            # torchvision is for another PyTorch, so that frameworks which import it cannot stand beside it.
            modules = FRAMEWORKS if name in NEEDS and not apart else ()
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
    there = importlib.util.find_spec(NEEDS[name]) if name in NEEDS else True
    if not there and not (name == "torchvision_loop" and APART.is_dir()):
        pytest.skip(f"{NEEDS[name]} is not installed")
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "choose one of diffusers_loop, hf_loop, "),
        (["no_loop"], "no_loop is no example; choose one of diffusers_loop, "),
        (["plain_loop", "--target", "disk"], "invalid choice: 'disk'"),
        (["diffusers_loop"], "diffusers_loop needs a package that is missing: pip install diffusers"),
        (["torchvision_loop"], "torchvision_loop needs a package that is missing: pip install torchvision"),
    ],
    ids=" ".join,
)
def test_an_example_that_cannot_run_names_the_reason(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["examples", *flags])
    for package in ("diffusers", "torchvision"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert words in f"{stopped.value} {capsys.readouterr().err}"
