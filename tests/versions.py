"""Tests on several releases of PyTorch and Python, each in an environment of its own, and a table of the results.

    python -m tests.versions [TORCH:PYTHON ...]

`make versions` runs it. The environments lie under ``.versions``, which git ignores, and are used again. A Python that
is not on this machine, or a release that pip does not find, is named in the table. A result file of the same day keeps
the rows of other pairs.

The release ``newest`` (`make newest`) is the newest of PyTorch and of all frameworks that pip finds to fit together.
Its row has their versions, and which tests of the frameworks failed. This takes hours, file by file, so it may be
stopped: the next run of the same week takes the same environment, and only the files that have not passed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from actoffload.tools.environment import commit_of
from benchmarks import harness

PAIRS = ["2.9:3.11", "2.11:3.12", "2.13:3.13", "2.14:3.11", "2.15:3.11"]
if shutil.which("python3.14"):
    PAIRS.append("2.14:3.14")
PACKAGES = ("expecttest", "hypothesis", "numpy", "psutil", "pytest", "pytest-timeout", "rich", "typer")
SUITES = {
    "gradients": ["tests/parity/test_graphs.py", "tests/parity/test_tensors.py", "tests/parity/test_training.py"],
    "native programs": [
        *("-m", "not slow"),
        *(f"tests/unit/test_{name}.py" for name in ("cpu_allocator", "native_build", "native_hooks")),
    ],
    "checkpoints": [f"tests/unit/test_{name}.py" for name in ("selective", "checkpoint")],
    "simulated device": [
        "--simulated",
        *(f"tests/unit/test_{name}.py" for name in ("ordering", "stream_waits", "device_budget")),
        *(f"tests/unit/test_simulated_{name}.py" for name in ("accelerator", "copies", "storage")),
    ],
}
NEWEST, FRAMEWORKS = "newest", "frameworks"
"""A release, and its one suite: the files of tests/integration."""
FOLDER = harness.ROOT / ".versions"
INSTALL_S, SUITE_S = 3600, 3600
WEEK_S = 6 * 86400
"""After this time newer releases have appeared, and the environment is made anew."""


def main(arguments: Sequence[str]) -> int:
    """Run every suite on every pair; 1 when a test failed or a pair could not be had."""
    results = harness.Results("versions", arguments, {})
    results.payload["command"] = " ".join(["python", "-m", "tests.versions", *arguments])
    known = json.loads(results.file.read_text(encoding="utf-8")) if results.file.exists() else {}
    rows: dict[str, dict[str, Any]] = known.get("rows", {})
    for pair in arguments or PAIRS:
        torch, _, python = pair.partition(":")
        for row in run_pair(torch, python):
            rows[pair] = row
            results.write(rows=rows)  # a run that is stopped leaves its rows so far
    columns = ("PyTorch, Python", *SUITES, FRAMEWORKS)
    results.finish(harness.markdown_table(columns, [_shown(row) for row in rows.values()]))
    return int(any("missing" in row or any(map(_failed, row["suites"].values())) for row in rows.values()))


def run_pair(torch: str, python: str) -> Iterator[dict[str, Any]]:
    """Yield the results of one environment after each suite; ``missing`` has the reason why there is none."""
    row: dict[str, Any] = {"torch": torch, "python": python, "suites": {}}
    folder = FOLDER / f"torch-{torch}-python-{python}"
    try:
        interpreter = _environment(folder, torch, python)
        asked = "import platform, torch; print(torch.__version__, platform.python_version())"
        row["torch"], row["python"] = _output([interpreter, "-c", asked]).split()
        if torch == NEWEST:
            listed = json.loads(_output([interpreter, "-m", "pip", "list", "--format", "json"]))
            known = {line.partition("==")[0] for line in (harness.ROOT / "constraints.txt").read_text().splitlines()}
            row["packages"] = {each["name"]: each["version"] for each in listed if each["name"] in known}
    except (OSError, subprocess.SubprocessError) as error:
        printed = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        yield row | {"missing": printed[-1] if printed else type(error).__name__}
        return
    if torch == NEWEST:
        for found in _run_files(folder, interpreter):
            yield row | {"files": found, "suites": {FRAMEWORKS: _sum(found.values())}}
        return
    for name, files in SUITES.items():
        row["suites"][name] = _run_suite(folder, interpreter, files)
        yield row


def _environment(folder: Path, torch: str, python: str) -> str:
    """The interpreter of an environment with this release, which is made unless there is one."""
    interpreter, stamp = str(folder / "bin" / "python"), folder / "installed"
    kept = stamp.exists() and (torch != NEWEST or time.time() - stamp.stat().st_mtime < WEEK_S)
    if not kept:
        _output([f"python{python}", "-m", "venv", "--clear", str(folder)])
        pip = [interpreter, "-m", "pip", "install", "--no-compile", "--no-cache-dir"]
        pip += shlex.split(os.environ.get("PIP_ARGS", ""))
        if torch == NEWEST:
            # torchtitan imports Triton, which a PyTorch for the CPU does not bring.
            _output([*pip, "--editable", f"{harness.ROOT}[all,test]", "triton"])
        else:
            _output([*pip, f"torch=={torch}.*", *PACKAGES])
            _output([*pip, "--no-deps", "--editable", str(harness.ROOT)])
        stamp.touch()
    return interpreter


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=True, cwd=harness.ROOT)
    return done.stdout


def _run_files(folder: Path, interpreter: str) -> Iterator[dict[str, Any]]:
    """Yield all results so far after each file: a file that hangs or ends pytest costs only its own results."""
    kept = folder / "tested.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    commit = commit_of(harness.ROOT)
    for file in sorted((harness.ROOT / "tests" / "integration").glob("test_*.py")):
        if file.stem not in found or _failed(found[file.stem]):
            found[file.stem] = _run_suite(folder, interpreter, [str(file)]) | {"commit": commit}
            kept.write_text(json.dumps(found))
            print(f"{file.stem}: {_reported(found[file.stem])}", flush=True)
        yield found


def _sum(files: Iterable[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": [], "status": 0}
    for found in files:
        total = {key: value + found[key] for key, value in total.items()}
    return total


def _run_suite(folder: Path, interpreter: str, files: list[str]) -> dict[str, Any]:
    """How many tests passed, were skipped and failed, and which."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    # A native program refuses releases that it does not know: here it is tried on them.
    variables = os.environ | {"ACTOFFLOAD_NATIVE": "1", "OMP_NUM_THREADS": "1"}
    options = ("-q", "--thorough", "-p", "no:cacheprovider", f"--junitxml={report}")
    command = [interpreter, "-m", "pytest", *options, *files]
    try:
        done = subprocess.run(command, cwd=harness.ROOT, env=variables, timeout=SUITE_S, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, subprocess.TimeoutExpired, ElementTree.ParseError) as error:
        return {"passed": 0, "skipped": 0, "failed": [f"{files[-1]}: {type(error).__name__}"], "status": 1}
    kinds = {kind: [c for c in cases if c.find(kind) is not None] for kind in ("skipped", "failure", "error")}
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in kinds["failure"] + kinds["error"]]
    counts = {"passed": len(cases) - len(failed) - len(kinds["skipped"]), "skipped": len(kinds["skipped"])}
    return counts | {"failed": failed, "status": done.returncode % 5}  # 5: all were skipped


def _failed(suite: dict[str, Any]) -> bool:
    return bool(suite["status"])


def _shown(row: dict[str, Any]) -> list[str]:
    name = f"{row['torch']}, {row['python']}"
    if "missing" in row:
        return [name, row["missing"], *["-"] * len(SUITES)]
    suites = row["suites"]
    return [name, *(_reported(suites[suite]) if suite in suites else "-" for suite in (*SUITES, FRAMEWORKS))]


def _reported(suite: dict[str, Any]) -> str:
    failed = f"NO: {len(suite['failed'])} failed, " if _failed(suite) else ""
    return f"{failed}{suite['passed']} passed, {suite['skipped']} skipped"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
