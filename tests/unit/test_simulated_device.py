"""Runs the tests of the simulated accelerator in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [Path(__file__).with_name(f"simulated_{name}_cases.py") for name in ("device", "copies", "storage", "reader")]


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler")
def test_the_cases_pass_in_a_process_that_knows_the_device_from_the_start() -> None:
    """PyTorch starts a thread of autograd for each device that it knows at the first backward, and for no other later.

    And from then on the process has an accelerator, which other tests do not expect.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
