"""fio, the reference for what a file system gives: direct I/O on one file, one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

ENGINES = ("io_uring", "libaio")
"""Its engines that keep several transfers under way from one thread; which is faster differs between machines."""
TIMEOUT_S = 60.0
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""fio's buffers in huge pages, as the host pool's and the CPU allocator's are: in small ones it is half as fast."""
_WAYS = {"write": "write", "read": "read", "mixed": "rw"}


class FioError(RuntimeError):
    """fio is missing, or failed; the message says which."""


def version() -> str:
    """What it calls itself.

    Raises:
        FioError: it is not installed.
    """
    if shutil.which("fio") is None:
        raise FioError("fio is not installed (apt-get install fio)")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def measure(file: str, direction: str, *, engine: str, region: int, block: int, depth: int, seconds: float) -> float:
    """Bytes a second, written and read together, of sequential direct transfers in an existing file.

    Args:
        file: the file.
        direction: ``"write"``, ``"read"`` or ``"mixed"``.
        engine: of `ENGINES`.
        region: bytes at the beginning of the file that are used.
        block: bytes of a transfer.
        depth: transfers at the same time.
        seconds: how long.

    Raises:
        FioError: it failed.
    """
    command = ["fio", "--name=spool", f"--filename={file}", f"--size={region}", f"--rw={_WAYS[direction]}"]
    command += [f"--bs={block}", f"--iodepth={depth}", f"--ioengine={engine}", "--direct=1", "--thread"]
    command += ["--registerfiles=1"] if engine == "io_uring" else []  # as the spool's engine does
    command += ["--time_based", f"--runtime={round(seconds * 1000)}ms", "--output-format=json"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + TIMEOUT_S,
            env={**os.environ, **HUGE_PAGES},
        )
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (subprocess.TimeoutExpired, OSError, ValueError, LookupError) as error:
        raise FioError(f"fio {engine}: {type(error).__name__}") from error
    if done.returncode != 0 or job["error"]:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FioError(
            f"fio {engine}: status {done.returncode}, error {job['error']}: {last}".replace(file, "the file")
        )
    return float(job["write"]["bw_bytes"] + job["read"]["bw_bytes"])
