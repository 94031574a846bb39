"""What the spool reaches of the disk: each of its engines and fio in turns, on the same file, block size and depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from actoffload.errors import ActOffloadError
from actoffload.report.bench import DIRECTIONS, Direction
from actoffload.report.bench_run import Rig, check_room
from benchmarks import fio, harness

ENGINES = ("posix", "uring")
BUSY_BLOCK = 256 << 10
WAYS: tuple[Direction, ...] = tuple(way for way in DIRECTIONS if way != "mixed")


def against_fio(
    path: str, blocks: Sequence[int], *, depth: int, region: int, seconds: float, rounds: int
) -> Iterator[harness.Sample]:
    """Every engine and fio in turns, with the main thread waiting.

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
        yield from problems
        references = _references(next(iter(rigs.values()))) if rigs else []
        yield from references
        names = [sample["mode"] for sample in references if "error" not in sample]
        for block in blocks:
            options = {"region": region // block * block, "block": block, "depth": depth, "seconds": seconds}
            yield from _in_turns(rigs, names, rounds, options)


def main_thread_in_python(path: str, *, region: int, seconds: float, rounds: int) -> Iterator[harness.Sample]:
    """Every engine at its own depth while the main thread runs pure Python; arguments as for `against_fio`."""
    with ExitStack() as stack:
        rigs, problems = _open(stack, path, None, BUSY_BLOCK, region)
        yield from problems
        for round_ in range(rounds):
            for direction in WAYS:
                for engine, rig in rigs.items():
                    rate = rig.measure(direction, seconds, busy=True).bytes_per_s
                    yield _sample(engine, BUSY_BLOCK, direction, round_, rate, rig, busy=True)


def _open(
    stack: ExitStack, path: str, depth: int | None, block: int, region: int
) -> tuple[dict[str, Rig], list[harness.Sample]]:
    """A rig for each engine that runs here, and why the others do not."""
    check_room([path], region * len(ENGINES))
    rigs: dict[str, Rig] = {}
    problems: list[harness.Sample] = []
    for engine in ENGINES:
        try:
            rigs[engine] = stack.enter_context(Rig([path], engine, depth, block, region))
        except (ActOffloadError, OSError) as error:
            problems.append({"mode": engine, "error": str(error).replace(path, "PATH")})
    return rigs, problems


def _references(rig: Rig) -> list[harness.Sample]:
    """Which of fio's engines work here; a sample with its version, or with the error, for each."""
    found: list[harness.Sample] = []
    for engine in fio.ENGINES:
        mode = f"fio {engine}"
        try:
            version = fio.version()
            fio.measure(rig.file, "read", engine=engine, region=1 << 20, block=1 << 18, depth=1, seconds=0.1)
            found.append({"mode": mode, "version": version})
        except fio.FioError as error:
            found.append({"mode": mode, "error": str(error)})
    return found


def _in_turns(
    rigs: dict[str, Rig], references: Sequence[str], rounds: int, options: dict[str, Any]
) -> Iterator[harness.Sample]:
    block = options["block"]
    for rig in rigs.values():
        rig.prepare(block)
    for round_ in range(rounds):
        for direction in WAYS:
            for (
                engine,
                rig,
            ) in rigs.items():  # all on the same file: two files of one disk may differ by a factor of two
                modes = [engine, *references]
                first = round_ % len(modes)
                for mode in modes[first:] + modes[:first]:
                    if mode == engine:
                        rate: float | str = rig.measure(direction, options["seconds"]).bytes_per_s
                    else:
                        rate = _fio(rig, direction, mode, options)
                    yield _sample(mode, block, direction, round_, rate, rig) | {"file_of": engine}


def _fio(rig: Rig, direction: str, mode: str, options: dict[str, Any]) -> float | str:
    """The rate, or what went wrong."""
    try:
        return fio.measure(rig.file, direction, engine=mode.removeprefix("fio "), **options)
    except fio.FioError as error:
        return str(error)


def _sample(
    mode: str, block: int, direction: str, round_: int, rate: float | str, rig: Rig, *, busy: bool = False
) -> harness.Sample:
    depth = rig.capabilities.threads
    head: harness.Sample = {"mode": mode, "block": block, "direction": direction, "round": round_, "busy": busy}
    if not mode.startswith("fio"):
        head["direct"] = rig.capabilities.direct
    return head | {"depth": depth} | ({"error": rate} if isinstance(rate, str) else {"bytes_per_s": rate})
