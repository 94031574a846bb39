"""``ACTOFFLOAD`` and ``actoffload run``: programs that were not changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actoffload import OffloadConfig
from actoffload.cli.app import app
from actoffload.errors import ConfigError
from tests.integration.processes import launch

for _package in ("accelerate", "datasets", "deepspeed", "transformers", "trl"):
    pytest.importorskip(_package)

WORKER = "tests.integration.workers.switch"
PROGRAMS = ["trainer", "checkpointed", "sft", "loop", "engine"]
OFF = "ACTOFFLOAD"
METRICS = {"moved_bytes", "wait_s", "host_written_bytes", "nvme_written_bytes", "resident_peak_bytes"}

Found = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found, str]:
    """The program with the switch and the frameworks' own flags, without either, and what the first one printed."""
    places = [tmp_path_factory.mktemp(name) for name in ("with", "without")]
    switched = {"ACTOFFLOAD": "nvme", "ACTOFFLOAD_PATH": str(places[0]), "ACTOFFLOAD_MIN_BYTES": "1KiB"}
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(launch, WORKER, 1, place, env=env)
            for place, env in zip(places, ({**switched, "OFFLOAD_FLAG": "nvme"}, {}), strict=True)
        ]
        with_it, without = (job.result()[0] for job in jobs)
    return with_it, without, (places[0] / "log0.txt").read_text()


@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_and_weights_are_those_of_the_program_alone(runs: tuple[Found, Found, str], program: str) -> None:
    with_it, without, _ = runs
    assert with_it[program]["losses"] == without[program]["losses"]
    assert len(without[program]["losses"]) >= 3
    assert with_it[program]["weights"] == without[program]["weights"]


def test_all_that_trains_moves_and_says_so(runs: tuple[Found, Found, str]) -> None:
    with_it, without, printed = runs
    assert without["moved"] == []
    assert len(with_it["moved"]) == 3  # for trainers, the loop and the engine, which print in three ways
    assert min(with_it["moved"]) > 0
    assert printed.count("actoffload: target nvme") == 3
    assert "moved nothing" not in printed
    assert with_it["engine"]["on"]


def test_trainers_log_what_was_done_and_are_left_as_they_were(runs: tuple[Found, Found, str]) -> None:
    with_it, without, _ = runs
    for program in ("trainer", "checkpointed", "sft"):
        logs = [log for log in with_it[program]["logs"] if log]
        assert len(logs) >= 3
        assert all({f"actoffload/{name}" for name in METRICS} <= log.keys() for log in logs)
        assert sum(log["actoffload/moved_bytes"] for log in logs) > 0
        assert not any(without[program]["logs"])
        assert not with_it[program]["left"]["attached"]
    assert with_it["checkpointed"]["left"]["checkpointing"]["offload"] == "nvme"


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "actoffload", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env}, timeout=100)


def test_the_program_is_what_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], sorted(n for n in os.environ if n.startswith('ACTOFF')))\n")
    done = run("--target", "nvme", "-o", "max_slowdown=0.1", str(script), "--target", "x")
    names = ["ACTOFFLOAD", "ACTOFFLOAD_MAX_SLOWDOWN"]
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{['--target', 'x']} {names}\n", "")
    script.write_text("import os, sys\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\nsys.exit(3)\n")
    done = run("--", sys.executable, str(script))
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    done = run("--", "-c", "import os; os.kill(os.getpid(), 15)")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "floppy", "--", "x.py"], "ACTOFFLOAD='floppy': choose one of"),
        (["-o", "max_slowdown=much", "--", "x.py"], "ACTOFFLOAD_MAX_SLOWDOWN='much': give a share"),
        (["-o", "recompute=maybe", "--", "x.py"], "ACTOFFLOAD_RECOMPUTE='maybe': give True or False"),
        (["-o", "min_byte=3", "x.py"], "ACTOFFLOAD_MIN_BYTE='3': no such option; did you mean min_bytes?"),
        (["-o", "verify", "x.py"], "option='verify': give NAME=VALUE"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_work_is_said_before_the_program_starts(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["run", *words])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_a_variable_that_is_no_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTOFFLOAD", "nvme")
    monkeypatch.setenv("ACTOFFLOAD_PATH", "/tmp:/var/tmp")
    monkeypatch.setenv("ACTOFFLOAD_INCLUDE", "layers.*,head")
    monkeypatch.setenv("ACTOFFLOAD_IO_THREADS", "3")
    expected = {"target": "nvme", "path": ["/tmp", "/var/tmp"], "include": ["layers.*", "head"], "io_threads": 3}
    assert OffloadConfig.options_from_environment() == expected
    monkeypatch.setenv("ACTOFFLOAD_MIN_BYTE", "3")
    with pytest.raises(ConfigError, match="ACTOFFLOAD_MIN_BYTE='3': no such option; did you mean min_bytes"):
        OffloadConfig.options_from_environment()


def test_a_loop_that_nothing_is_attached_to_is_told() -> None:
    code = "import torch; w = torch.nn.Linear(2, 2); o = torch.optim.SGD(w.parameters(), lr=1.0)"
    done = run("--", "-c", f"{code}; w(torch.ones(2)).sum().backward(); o.step()")
    assert done.returncode == 0
    assert "ACTOFFLOAD=auto moved nothing" in done.stderr
    assert "call actoffload.attach(model)" in done.stderr
