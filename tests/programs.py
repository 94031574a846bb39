"""Programs in processes of their own. Each is forked from one that has imported PyTorch, which takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_SERVER = """
import contextlib, gc, importlib, json, os, runpy, select, signal, socket, sys, tempfile, warnings
import torch, torch._inductor.compile_fx, torch.distributed.fsdp, actoffload, actoffload.testing.faults
for name in sys.argv[2:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()  # else each child looks at all that, and copies it
torch.set_num_threads(1)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
    link, _ = server.accept()
    keeper = not os.fork()
    if keeper:
        break
    link.close()
else:
    os._exit(0)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
data, files, *_ = socket.recv_fds(link, 1 << 20, 3)
child = os.fork()
if child:  # the keeper ends the child, with its own children, as it ends or as nobody waits for it any more
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    select.select([os.pidfd_open(child), link], [], [])
    ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        os._exit(1)
    link.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)
with contextlib.suppress(OSError):
    os.setpgid(0, 0)
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
server.close()
link.close()
job = json.loads(data)
os.chdir(job["folder"])
os.environ.clear()
os.environ.update(job["environment"])
tempfile.tempdir = None
for name in job["errors"]:
    warnings.simplefilter("error", getattr(__builtins__, name))
how, what, *arguments = (word for number, word in enumerate(job["words"]) if number or word != "-u")
sys.argv = [how, *arguments]
sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if "ACTOFFLOAD" in os.environ:
    import _actoffload_start  # as Python's start does
if how == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    assert how == "-c", how
    exec(compile(what, "<string>", "exec"), globals())
"""
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
job = {{"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ), "errors": []}}
socket.send_fds(link, [json.dumps(job).encode()], [0, 1, 2])
status = int(link.recv(16) or -signal.SIGKILL)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class _Warm(NamedTuple):
    address: str
    python: str


FRAMEWORKS = (
    *("transformers.trainer", "transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer", "peft"),
    *("deepspeed", "diffusers.models.unets.unet_2d", "lightning.pytorch"),
)
"""Modules that take seconds to import; those that are not installed are left out."""


@cache
def _warm(*modules: str) -> _Warm:
    """The socket of the process that forks, which ends with this one, and a program that has it fork.

    With ``modules`` it is another process, a fork of the first, which has imported these, too.
    """
    folder = tempfile.TemporaryDirectory(prefix="warm")
    found = _Warm(f"{folder.name}/socket", f"{folder.name}/python")
    with open(found.python, "w", encoding="utf-8") as file:
        file.write(_CLIENT.format(python=sys.executable, address=found.address))
        os.fchmod(file.fileno(), 0o700)
    server = subprocess.Popen(
        [warm_python() if modules else sys.executable, "-c", _SERVER, found.address, *modules],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert b"ready\n" in server.stdout, "PyTorch could not be imported"  # DeepSpeed prints a line before

    def end() -> None:
        server.communicate()  # ends its input, and waits
        folder.cleanup()

    atexit.register(end)
    return found


def warm_python(*modules: str) -> str:
    """Stands in for ``sys.executable`` with ``-c`` or ``-m``, where PyTorch, and these modules, are imported anyway.

    Little of Python's start happens anew, so it is not for what limits memory. Where ``ACTOFFLOAD`` is set, the program
    waits for frameworks as after any start, but not for PyTorch's first optimizer, which it has imported.
    """
    return _warm(*modules).python


def run_program(
    program: str,
    *arguments: str,
    errors: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    timeout_s: float = 240,
    modules: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -c`` does, to the end of the interpreter.

    Args:
        program: its text.
        arguments: behind ``sys.argv[0]``.
        errors: the warnings that are errors in it.
        environment: variables in addition to ours.
        timeout_s: then it is killed.
        modules: what has been imported beside PyTorch.
    """
    job: dict[str, Any] = {"words": ["-c", program, *arguments], "folder": str(ROOT), "errors": errors}
    job["environment"] = {**os.environ, **(environment or {})}
    with (
        tempfile.NamedTemporaryFile("r") as out,
        tempfile.NamedTemporaryFile("r") as err,
        contextlib.ExitStack() as stack,
    ):

        def opened(name: str, mode: str) -> IO[bytes]:
            return stack.enter_context(open(name, mode))

        files = [opened(os.devnull, "rb"), opened(out.name, "wb"), opened(err.name, "wb")]
        link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        link.settimeout(timeout_s)
        link.connect(_warm(*modules).address)
        socket.send_fds(link, [json.dumps(job).encode()], [file.fileno() for file in files])
        with contextlib.suppress(TimeoutError):
            status = int(link.recv(16) or -9)
            return subprocess.CompletedProcess(["-c"], status, out.read(), err.read())
        return subprocess.CompletedProcess(["-c"], -9, out.read(), err.read())
