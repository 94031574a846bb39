"""What the spool reaches of the disk: each of its engines and fio in turns, on the same file, block size and depth."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from actoffload.errors import ActOffloadError
from actoffload.tools.bench import DIRECTIONS, Direction, Rig
from benchmarks.harness import Sample

ENGINES = ("posix", "uring")
WAYS: tuple[Direction, ...] = tuple(way for way in DIRECTIONS if way != "mixed")

FIO_ENGINES = ("io_uring", "libaio")
"""fio's engines that keep several transfers under way from one thread; which is faster differs between machines."""
FIO_TIMEOUT_S = 60.0
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""fio's buffers in huge pages, as the host pool's are, and what is written: in small ones it is half as fast."""


def against_fio(
    path: str, blocks: Sequence[int], *, depth: int, region: int, seconds: float, rounds: int
) -> Iterator[Sample]:
    """Every engine and the faster of fio's in turns on the same file, as two files of one disk may differ by a factor.

    Args:
        path: a directory on the disk.
        blocks: sizes of a transfer, bytes; ``depth`` of them are under way at the same time.
        region: bytes of each engine's file.
        seconds: of each of the ``rounds`` samples of a kind.

    Yields:
        Each sample, with ``fio_bytes_per_s`` where fio runs; ``error`` where the engine, or ``fio_error`` where fio
        does not.
    """
    for engine in ENGINES:
        for block in blocks:
            try:
                rig = Rig([path], engine, depth, block, region)
            except (ActOffloadError, OSError) as error:
                yield {"mode": engine, "error": str(error).replace(path, "PATH")}
                break
            file = f"/proc/{os.getpid()}/fd/{rig.spool.files[0].fd}"
            with rig:
                for _ in range(rounds):
                    for way in WAYS:
                        setting = {"region": region // block * block, "block": block, "depth": depth}
                        fio = [measure_fio(file, way, name, seconds=seconds, **setting) for name in FIO_ENGINES]
                        rates = [found["bytes_per_s"] for found in fio if "error" not in found]
                        reference = {"fio_bytes_per_s": max(rates)} if rates else {"fio_error": fio[0]["error"]}
                        own = {"bytes_per_s": rig.measure(way, seconds)}
                        yield {"mode": engine, "direction": way} | setting | own | reference


def measure_fio(
    file: str, direction: str, engine: str, *, region: int, block: int, depth: int, seconds: float
) -> Sample:
    """Let fio write or read the first ``region`` bytes of an existing file, in sequence and directly.

    Returns:
        ``bytes_per_s``, or why there is none under ``error``.
    """
    if shutil.which("fio") is None:
        return {"error": "fio is not installed (apt-get install fio)"}
    command = ["fio", "--name=spool", f"--filename={file}", f"--size={region}", f"--rw={direction}"]
    command += [f"--bs={block}", f"--iodepth={depth}", f"--ioengine={engine}", "--direct=1", "--thread"]
    command += ["--registerfiles=1"] if engine == "io_uring" else []  # as the spool's engine does
    command += ["--time_based", f"--runtime={round(seconds * 1000)}ms", "--output-format=json"]
    environment, limit_s = {**os.environ, **HUGE_PAGES}, seconds + FIO_TIMEOUT_S
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (subprocess.TimeoutExpired, OSError, ValueError, LookupError) as error:
        return {"error": f"fio {engine}: {type(error).__name__}"}
    if done.returncode != 0 or job["error"]:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1].replace(file, "the file")
        return {"error": f"fio {engine}: status {done.returncode}, error {job['error']}: {last}"}
    return {"bytes_per_s": float(job["write"]["bw_bytes"] + job["read"]["bw_bytes"])}
