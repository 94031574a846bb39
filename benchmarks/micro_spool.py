"""What the spool reaches of the disk: each of its engines and fio in turns, on the same file, block size and depth."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from actoffload.analysis.bench import DIRECTIONS, Direction, Rig
from actoffload.errors import ActOffloadError
from benchmarks.harness import Sample

ENGINES = ("posix", "uring")
WAYS: tuple[Direction, ...] = tuple(way for way in DIRECTIONS if way != "mixed")

FIO_ENGINES = ("io_uring", "libaio")
"""fio's engines that keep several transfers under way from one thread; which is faster differs between machines."""
FIO_TIMEOUT_S = 60.0
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""fio's buffers in huge pages, as the host pool's and the CPU allocator's are: in small ones it is half as fast."""


def against_fio(
    path: str, blocks: Sequence[int], *, depth: int, region: int, seconds: float, rounds: int
) -> Iterator[Sample]:
    """Every engine and fio in turns, with the main thread waiting.

    All of a turn use the same file, as two files of one disk may differ by a factor of two; who begins changes from
    round to round.

    Args:
        path: a directory on the disk.
        blocks: sizes of a transfer, bytes.
        depth: transfers at the same time.
        region: bytes of each engine's file.
        seconds: of each sample.
        rounds: samples of each kind.

    Yields:
        Each sample; one that failed has ``error``.
    """
    with ExitStack() as stack:
        rigs, problems = _open(stack, path, depth, max(blocks), region)
        references = _references(next(iter(rigs.values()))) if rigs else []
        yield from (*problems, *references)
        fio = [sample["mode"] for sample in references if "error" not in sample]
        for block in blocks:
            setting = {"region": region // block * block, "block": block, "depth": depth}
            for rig in rigs.values():
                rig.prepare(block)
            for turn in range(rounds):
                for direction in WAYS:
                    for engine, rig in rigs.items():
                        modes = [engine, *fio]
                        first = turn % len(modes)
                        for mode in modes[first:] + modes[:first]:
                            about = {"mode": mode, "file_of": engine, "direction": direction} | setting
                            if mode == engine:
                                yield about | {"bytes_per_s": rig.measure(direction, seconds).bytes_per_s}
                            else:
                                fio_engine = mode.removeprefix("fio ")
                                rate = measure_fio(rig.file, direction, fio_engine, seconds=seconds, **setting)
                                yield about | rate


def _open(
    stack: ExitStack, path: str, depth: int | None, block: int, region: int
) -> tuple[dict[str, Rig], list[Sample]]:
    """A rig for each engine that runs here, and why the others do not."""
    rigs: dict[str, Rig] = {}
    problems: list[Sample] = []
    for engine in ENGINES:
        try:
            rigs[engine] = stack.enter_context(Rig([path], engine, depth, block, region))
        except (ActOffloadError, OSError) as error:
            problems.append({"mode": engine, "error": str(error).replace(path, "PATH")})
    return rigs, problems


def _references(rig: Rig) -> list[Sample]:
    """A sample for each of fio's engines, with fio's version, or with why it does not work here."""
    found: list[Sample] = []
    for engine in FIO_ENGINES:
        about: Sample = {"mode": f"fio {engine}"}
        tried = measure_fio(rig.file, "read", engine, region=1 << 20, block=1 << 18, depth=1, seconds=0.1)
        if "error" in tried:
            found.append(about | tried)
        else:
            version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
            found.append(about | {"version": version})
    return found


def measure_fio(
    file: str, direction: str, engine: str, *, region: int, block: int, depth: int, seconds: float
) -> Sample:
    """Let fio do sequential direct transfers in an existing file.

    Args:
        file: the file.
        direction: ``"write"`` or ``"read"``.
        engine: of `FIO_ENGINES`.
        region: bytes at the beginning of the file that are used.
        block: bytes of a transfer.
        depth: transfers at the same time.
        seconds: how long.

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
