"""``ACTOFFLOAD`` and ``actoffload run`` on programs that do not mention actoffload."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import _actoffload_start
from actoffload import Attachment, OffloadConfig, Offloader, attach
from actoffload.errors import ConfigError
from actoffload.integrations import switch
from actoffload.tools.app import app
from tests.integration import matrix
from tests.integration.processes import launch
from tests.programs import warm_python

for _package in ("accelerate", "datasets", "deepspeed", "tensorboard", "trackio", "transformers", "trl"):
    pytest.importorskip(_package)

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

WORKER = "tests.integration.workers.switch"
METRICS = ["moved_bytes", "wait_s", "host_written_bytes", "nvme_written_bytes", "resident_peak_bytes"]
PROGRAMS = {"trainer": "Transformers", "sft": "TRL", "loop": "Accelerate", "engine": "DeepSpeed"}
WAYS = [
    (name, way) for way in matrix.WAYS for name in PROGRAMS if way not in matrix.NOT_OFFERED.get(PROGRAMS[name], ())
]
CASES = [
    pytest.param(name, checkpointed, way, marks=pytest.mark.proves(PROGRAMS[name], checkpointing=checkpointed, way=way))
    for name, way in WAYS
    for checkpointed in (False, True)
]

Found = dict[Any, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the process that runs the programs."""
    return tmp_path_factory.mktemp("env")


@pytest.fixture(scope="module")
def runs(place: Path) -> Found:
    """The results of each (program, with checkpoints, way); the way ``none`` is the program alone."""
    env = {"ACTOFFLOAD": "nvme", "ACTOFFLOAD_PATH": str(place), "ACTOFFLOAD_POLICY": "greedy"}
    found: Found = launch(WORKER, 1, place, env=env)[0]
    return found


@pytest.mark.parametrize(("name", "checkpointed", "way"), CASES)
def test_losses_and_weights_are_those_of_the_program_alone(
    runs: Found, name: str, checkpointed: bool, way: str
) -> None:
    found, alone = runs[name, checkpointed, way], runs[name, checkpointed, "none"]
    assert found["losses"] == alone["losses"]
    assert len(alone["losses"]) >= 4  # of steps, and of evaluations between them
    assert found["weights"] == alone["weights"]
    (moved,) = found["moved"]
    assert moved > 0
    (line,) = found["printed"]
    assert "target nvme" in line
    assert (alone["moved"], alone["printed"]) == ([], [])


def test_the_checkpoints_of_a_program_are_seen(runs: Found) -> None:
    """Each layer is a region; a DeepSpeed engine has DeepSpeed's own checkpoints, which are none."""
    for (name, checkpointed, way), found in runs.items():
        if way != "none":
            assert found["regions"] == [2 if checkpointed and name != "engine" else 0], (name, checkpointed, way)


def test_trainers_log_the_metrics_and_are_restored(runs: Found) -> None:
    for (name, checkpointed, way), found in runs.items():
        if name in ("trainer", "sft") and way != "none":
            assert len(found["logs"]) == 2
            assert all({f"actoffload/{metric}" for metric in METRICS} <= log.keys() for log in found["logs"])
            assert sum(log["actoffload/moved_bytes"] for log in found["logs"]) > 0
            assert not runs[name, checkpointed, "none"]["logs"]
            assert not found["left"]["attached"]
    assert runs["trainer", True, "env"]["left"]["checkpointing"]["offload"] == "nvme"


def test_tensorboard_and_trackio_show_the_metrics(runs: Found, place: Path) -> None:
    """Through TensorBoard's own reader, and trackio's database."""
    expected = {f"train/{name}": value for name, value in runs["trainer", False, "env"]["logs"][0].items()}
    board = EventAccumulator(str(place / "tensorboard")).Reload()
    assert {name: board.Scalars(name)[0].value for name in expected} == pytest.approx(expected)
    (database,) = (place / "trackio").glob("*.db")
    with contextlib.closing(sqlite3.connect(database)) as opened:
        ((first,), *_) = opened.execute("SELECT metrics FROM metrics ORDER BY step")
    assert {name: json.loads(first)[name] for name in expected} == expected


# -- exit status and output of a program ------------------------------------------------------------------------------


def start(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **env}, timeout=100)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return start(sys.executable, "-m", "actoffload", "run", *words)


ENDINGS = {
    "import sys; assert not {'torch', 'actoffload', 'transformers'} & set(sys.modules)": (0, ""),
    "import os, sys; os.fork() or os._exit(0); os.wait(); sys.exit(3)": (3, ""),
    "print('out', flush=True); raise ValueError('in vain')": (1, "ValueError: in vain\n"),
    "print('out', flush=True); import os; os.kill(os.getpid(), 15)": (-signal.SIGTERM, ""),
}
"""The exit status of some programs, and the end of their standard error."""


@pytest.mark.parametrize("code", ENDINGS)
def test_a_program_ends_under_the_variable_as_it_does_alone(code: str) -> None:
    done, alone = (start(sys.executable, "-c", code, ACTOFFLOAD=value) for value in ("nvme", "0"))
    assert (done.returncode, done.stdout, done.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    status, error = ENDINGS[code]
    assert done.returncode == status
    assert done.stderr.endswith(error) if error else not done.stderr


def test_run_passes_arguments_variables_and_the_exit_status_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTOFFLOAD_NATIVE", raising=False)  # `make newest` sets it
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], sorted(n for n in os.environ if n.startswith('ACTOFF')))\n")
    with script.open("a") as file:
        file.write("if os.fork() == 0:\n    os._exit(0)\nos.wait()\nsys.exit(3)\n")
    done = run("--target", "nvme", "-o", "io_threads=1", str(script), "--target", "x")
    names = ["ACTOFFLOAD", "ACTOFFLOAD_IO_THREADS"]
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{['--target', 'x']} {names}\n", "")
    done = run("--", "-c", "import os; os.kill(os.getpid(), 15)")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


LOOP = """
import accelerate, torch

accelerator = accelerate.Accelerator(cpu=True)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
model = torch.nn.Sequential(*layers)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
adapters = accelerator.prepare(torch.nn.Linear(2, 2))  # as trainers prepare their LoRA: it is never called
for _ in range(3):
    accelerator.backward(model(torch.randn(1024, 256)).square().mean())
    optimizer.step()
"""


def test_a_run_ends_with_one_line(tmp_path: Path) -> None:
    """The model is alive then; test_announcement.py has one that is dead. A module that is never called has no line."""
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    options = f"--target nvme --path {tmp_path} -o device_budget=25% -o trace={tmp_path}/run.json"
    done = run(*options.split(), str(script))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "; details: " in line]
    found = r"actoffload: 3 steps: activations' peak .*iB, [0-9.]+% waited, .* to NVMe; details: actoffload report "
    assert re.fullmatch(found + re.escape(f"{tmp_path}/run.json"), line)
    assert done.stderr.count("; details: ") == 1


def test_launchers_hand_the_switch_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "found = os.environ.get('RANK'), os.environ['ACTOFFLOAD'], '_actoffload_start' in sys.modules\n"
        "os.write(1, f'{found}\\n'.encode())\n"  # unbuffered, as a launcher ends the other processes
        "sys.exit(3)\n"
    )
    torchrun = [warm_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    accelerate = [warm_python(), "-m", "accelerate.commands.launch", "--cpu", str(script)]
    with ThreadPoolExecutor(2) as pool:
        jobs = pool.submit(run, "--target", "nvme", "--", *torchrun), pool.submit(start, *accelerate, ACTOFFLOAD="nvme")
        one, other = (job.result() for job in jobs)
    assert one.returncode == other.returncode == 1  # the status of both launchers if their program fails
    assert one.stdout
    assert set(one.stdout.splitlines()) <= {"('0', 'nvme', True)", "('1', 'nvme', True)"}
    assert other.stdout == "(None, 'nvme', True)\n"
    assert "ChildFailedError" in one.stderr
    assert "CalledProcessError" in other.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "floppy", "--", "x.py"], "ACTOFFLOAD='floppy': choose one of"),
        (["-o", "io_threads=much", "--", "x.py"], "ACTOFFLOAD_IO_THREADS='much': give a number"),
        (["-o", "verify=maybe", "--", "x.py"], "ACTOFFLOAD_VERIFY='maybe': give True or False"),
        (["-o", "min_byte=3", "x.py"], "ACTOFFLOAD_MIN_BYTE='3': no such option; did you mean min_bytes?"),
        (["-o", "verify", "x.py"], "--option 'verify': give NAME=VALUE"),
        (["-o", "min_bytes=", "x.py"], "--option 'min_bytes=': give NAME=VALUE"),
        (["-o", "target=host", "x.py"], "target is given twice, or has an option of its own"),
        (["-o", "min_bytes=1", "-o", "min_bytes=2", "x.py"], "--option 'min_bytes=2': min_bytes is given twice"),
        (["--device-budget", "1GiB", "-o", "device_budget=2GiB", "x.py"], "device_budget is given twice"),
        ([], "Missing argument"),
    ],
)
def test_bad_options_are_refused_before_the_program_starts(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "execve")  # execve() of an accepted command would replace the tests' own process
    done = CliRunner().invoke(app, ["run", *words])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_variables_are_options_and_one_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    read = OffloadConfig.options_from_environment
    variables = {"": "nvme", "_PATH": "/tmp:/var/tmp", "_INCLUDE": "layers.*,head", "_IO_THREADS": "3"}
    variables |= {"_CHECKPOINTS": "leave", "_RECOMPUTE": "layers.*,head"}
    for name, value in variables.items():
        monkeypatch.setenv(f"ACTOFFLOAD{name}", value)
    expected = {"target": "nvme", "path": ["/tmp", "/var/tmp"], "include": ["layers.*", "head"], "io_threads": 3}
    assert read() == expected | {"checkpoints": "leave", "recompute": ["layers.*", "head"]}
    assert read({"ACTOFFLOAD_RECOMPUTE": "1"}) == {"recompute": True}
    assert read({"ACTOFFLOAD_RECOMPUTE": "0"}) == {"recompute": False}
    assert read({"ACTOFFLOAD": "auto"}) == {}, "the flags of a framework name the target"
    with pytest.raises(ConfigError, match="ACTOFFLOAD_MIN_BYTE='3': no such option; did you mean min_bytes"):
        read({"ACTOFFLOAD": "nvme", "ACTOFFLOAD_MIN_BYTE": "3"})
    with pytest.raises(ConfigError, match="ACTOFFLOAD_TARGET='host': the target is the value of ACTOFFLOAD"):
        read({"ACTOFFLOAD": "nvme", "ACTOFFLOAD_TARGET": "host"})


def test_a_package_that_python_does_not_load_at_its_start_is_refused(tmp_path: Path) -> None:
    """In a checkout, no .pth file patches the program, so it would run without offloading and without a message."""
    venv.create(tmp_path, symlinks=True)
    (folder,) = tmp_path.glob("lib/python*/site-packages")
    (folder / "others.pth").write_text("\n".join(path for path in sys.path if path) + "\n")
    done = start(str(tmp_path / "bin" / "python"), "-m", "actoffload", "run", "--", "-c", "pass")
    assert done.returncode == 2
    assert "this is no installed actoffload" in done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variables", "reported"),
    [
        ({"ACTOFFLOAD": "nvmee"}, "actoffload: ACTOFFLOAD='nvmee': choose one of"),
        ({"ACTOFFLOAD": "nvme", "ACTOFFLOAD_MIN_BYTE": "3"}, "ACTOFFLOAD_MIN_BYTE='3': no such option; did you mean"),
        ({"ACTOFFLOAD": "nvme", "ACTOFFLOAD_DEVICE_BUDGET": "40"}, "ACTOFFLOAD_DEVICE_BUDGET='40': is 40 bytes: give"),
    ],
)
def test_a_misspelt_variable_is_reported_at_the_first_optimizer_step(variables: dict[str, str], reported: str) -> None:
    """At the end the program is warned, as any that has no attachment."""
    code = "import sys, torch; w = torch.nn.Linear(2, 2); o = torch.optim.SGD(w.parameters(), lr=1.0)\n"
    code += "for step in range(2): w(torch.ones(2)).sum().backward(); o.step(); print('step', step, file=sys.stderr)"
    done = start(sys.executable, "-c", code, **variables)
    before, _, after = done.stderr.partition("step 0")
    assert (done.returncode, reported in before, reported in after) == (0, True, False), done.stderr
    assert f"ACTOFFLOAD={variables['ACTOFFLOAD']} moved nothing" in after
    assert "call actoffload.attach(model)" in after


def test_modules_in_a_zip_file_share_a_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[str] = []
    monkeypatch.setattr(_actoffload_start, "SEAMS", {"seam.one"})
    monkeypatch.setattr(_actoffload_start, "_patch", lambda module: patched.append(module.__name__))
    monkeypatch.setattr(sys, "meta_path", [_actoffload_start._AfterImport(), *sys.meta_path])
    with zipfile.ZipFile(tmp_path / "seam.zip", "w") as archive:
        for name in ("__init__", "one", "two"):
            archive.writestr(f"seam/{name}.py", "")
    monkeypatch.syspath_prepend(tmp_path / "seam.zip")
    importlib.import_module("seam.one")
    importlib.import_module("seam.two")
    assert patched == ["seam.one"]


def test_a_loop_with_an_offloader_of_its_own_is_not_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_actoffload_start, "_stepped", True)
    Offloader(OffloadConfig(target="nvme", path=tmp_path)).close()
    _actoffload_start._warn_if_nothing_was_attached()
    assert capsys.readouterr().err == ""


def test_the_target_of_the_environment_holds_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execve", pytest.fail)
    done = CliRunner().invoke(app, ["run", "--", "-c", "pass"], env={"ACTOFFLOAD": "floppy"})
    assert "ACTOFFLOAD='floppy': choose one of" in " ".join(done.stderr.replace("│", " ").split())


def patched(name: str, kind: type) -> Any:
    """A class of a framework, as patched when its module is imported."""
    module: Any = ModuleType(name)
    setattr(module, kind.__name__, kind)
    switch.patch(module)
    return kind


class Trainer:
    """A trainer that is no subclass of transformers'."""

    args = None

    def train(self) -> None:
        """Train nothing."""


class Accelerator:
    """Prepares nothing."""

    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(activation_checkpointing_offload=True))

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model


def test_attachments_of_the_program_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTOFFLOAD", "nvme")
    accelerator = patched("accelerate.accelerator", Accelerator)()
    plugin = accelerator.state.fsdp_plugin
    with pytest.raises(ConfigError, match=r"give a transformers\.Trainer"):
        patched("transformers.trainer", Trainer)().train()  # the error leaves no state that changes the next calls
    other, model = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    attachment = attach(model, target="nvme", path=tmp_path)
    for each in (model, nn.Sequential(model), other, other):
        accelerator.prepare(each)
    assert not plugin.activation_checkpointing_offload  # Accelerate would move the same tensors as we do
    assert Attachment.of(model) is attachment
    made = Attachment.of(other)
    assert made is not None
    made.detach()
    attachment.detach()
