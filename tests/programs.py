"""Programs in processes of their own. Each is forked from one that has imported PyTorch, which takes seconds."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SERVER = """
import gc, json, os, sys, warnings
import torch, actoffload, actoffload.testing.faults
gc.freeze()  # else each child looks at all that, and copies it
torch.set_num_threads(1)
for job in map(json.loads, sys.stdin):
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, job["out"], job["err"])):
    os.dup2(os.open(name, os.O_RDWR), number)
for name in job["errors"]:
    warnings.simplefilter("error", getattr(__builtins__, name))
os.environ.update(job["environment"])
sys.argv = ["-c", *job["arguments"]]
exec(compile(job["program"], "<string>", "exec"), globals())
"""


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(server.communicate)  # ends its input, and waits
    return server


def run_program(
    program: str,
    *arguments: str,
    errors: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    timeout_s: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -c`` does, to the end of the interpreter.

    Args:
        program: its text.
        arguments: behind ``sys.argv[0]``.
        errors: the warnings that are errors in it.
        environment: variables in addition to ours.
        timeout_s: then it is killed.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        job = {"program": program, "arguments": arguments, "errors": errors, "environment": environment or {}}
        server.stdin.write(json.dumps(job | {"out": out.name, "err": err.name}) + "\n")
        server.stdin.flush()
        clock = threading.Timer(timeout_s, os.killpg, (server.pid, signal.SIGKILL))
        clock.start()
        answer = server.stdout.readline()
        clock.cancel()
        if not answer:
            server.wait()
            _server.cache_clear()
        status = int(answer or -signal.SIGKILL)
        return subprocess.CompletedProcess(["-c"], status, out.read(), err.read())
