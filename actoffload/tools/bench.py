"""``actoffload bench``: measures a path through the spool: writing, reading and both at once.

The rule is SSDTrain's (arXiv 2408.10013): a step of ``t`` seconds writes its saved bytes in one half and reads them
back in the other, so ``S`` bytes hide if ``S / (t/2)`` is at most the rate that the disk sustains. As writes and reads
overlap in a real step, that rate is the slowest of writing, reading and both at once (their bytes added up).
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median
from typing import Annotated, Any, Literal, get_args

import numpy as np
import typer

from ..config import default_paths
from ..errors import ChecksumError, ConfigError, EngineUnavailableError, SpoolFullError
from ..memory.process_memory import map_private
from ..sizes import format_size
from ..storage.engines import ENGINES
from ..storage.spool import Spool, Transfer
from .console import JsonOption, PathOption, option, print_json, print_rows, progress_bar

Direction = Literal["write", "read", "mixed"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
DISK_ENGINES = tuple(name for name in ENGINES if name != "memory")
REGION_BYTES, BLOCK_BYTES, SECONDS, ROUNDS = 128 << 20, 8 << 20, 0.3, 2
"""In `bench` and in `doctor` alike: the disk space in use, the bytes of a transfer, and the samples of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Median bytes a second of an engine; ``mixed``: written and read together. ``direct``: past the page cache."""

    engine: str
    direct: bool
    write: float
    read: float
    mixed: float

    @property
    def sustained(self) -> float:
        """The slowest: a step can count on it."""
        return min(self.write, self.read, self.mixed)


def command(
    path: PathOption = None,
    engine: Annotated[list[str] | None, option(f"{', '.join(ENGINES)}; repeat. Default: all that use a disk.")] = None,
    seconds: Annotated[float, option("Of each sample.", min=0.01)] = SECONDS,
    as_json: JsonOption = False,
) -> None:
    """Measure a path with each engine: write, read and both at once, and what training could hide.

    S bytes that a step of T seconds saves hide if S / (T/2) is at most the slowest of write, read and mixed.
    """
    for name in engine or ():
        if name not in ENGINES:
            raise ConfigError("engine", name, f"choose one of {', '.join(ENGINES)}")
    paths, engines = path or list(default_paths()), list(dict.fromkeys(engine or DISK_ENGINES))
    rates: list[Rates] = []
    problems: dict[str, str] = {}
    with progress_bar(quiet=as_json) as progress:
        for name in progress.track(engines, description="engines"):
            try:
                rig = Rig(paths, name, None, BLOCK_BYTES, REGION_BYTES)
            except EngineUnavailableError as error:
                problems[name] = str(error)
                continue
            with rig:
                rates.append(rig.rates(seconds, ROUNDS))
    best = best_of(rates)
    if as_json:
        rows = [asdict(one) | {"sustained": one.sustained} for one in rates]
        training = best and {"step_s": 1.0, "hidden_bytes": best.sustained / 2}
        found = {"rates": rows, "failures": problems, "best": best and rows[rates.index(best)]}
        print_json(found | {"training": training})
    else:
        show(rates, problems, best)
    raise typer.Exit(0 if best is not None else 1)


def best_of(rates: Sequence[Rates]) -> Rates | None:
    """Return the engine that hides most. A rate through the page cache is partly memory's, so it wins only alone."""
    usable = [one for one in rates if one.direct] or rates
    return max(usable, key=lambda one: one.sustained, default=None)


def show(rates: Sequence[Rates], problems: dict[str, str], best: Rates | None) -> None:
    """Print the table, the engines that could not run with the reasons, and the advice."""
    rows = []
    for one in rates:
        figures = (f"{rate / 1e9:.2f}" for rate in (one.write, one.read, one.mixed, one.sustained))
        rows.append((one.engine if one.direct else f"{one.engine} (page cache)", *figures))
    if rows:
        print_rows(rows, "engine", *DIRECTIONS, "both ways", title="GB/s")
    lines = [f"{name} was not measured: {problem}" for name, problem in problems.items()]
    for line in (*lines, *(() if best is None else advice(best))):
        typer.echo(line)


def advice(best: Rates) -> list[str]:
    """Return sentences on the best engine, and on the bytes that a step hides with it."""
    rate = f"{best.sustained / 1e9:.2f} GB/s"
    lines = [
        f"Best: {best.engine}, {rate} both ways (the slowest of write, read and mixed).",
        f"A step of 1 s hides {format_size(best.sustained / 2)} written and read back: "
        f"half of the step at {rate}, as far as the disk goes.",
    ]
    if not best.direct:
        lines.append("No engine went past the page cache here: these rates are also those of memory.")
    return lines


# -- measuring --------------------------------------------------------------------------------------------------------


class Rig(AbstractContextManager["Rig"]):
    """An open spool to measure, with one engine, depth and block size. A context manager; leaves nothing on the disk.

    Args:
        paths: directories; blocks go to them in turns.
        engine: one of ``ENGINES``, or ``"auto"``.
        depth: transfers at the same time, in each directory; None: the engine's own choice.
        region_bytes: disk space, in all directories together. Its blocks are dealt out to slots in turns.

    Raises:
        EngineUnavailableError: the engine cannot run here.
        StorageError: the spool cannot be made, has too little room, or does not give back the bytes written.
    """

    def __init__(
        self, paths: Sequence[str], engine: str, depth: int | None, block_bytes: int, region_bytes: int
    ) -> None:
        self._block_bytes, region = block_bytes, region_bytes // len(paths)
        for path in filter(os.path.isdir, paths):  # the spool refuses other files
            # To reserve room that the disk lacks would fill the disk for a moment.
            if (free := shutil.disk_usage(path).free) < region:
                problem = f"too little room for {format_size(region)} ({format_size(free)} free)"
                raise SpoolFullError(errno.ENOSPC, f"{path}: {problem}; use another path")
        space: dict[str, Any] = {"capacity_bytes": region_bytes, "grow_bytes": region_bytes}
        self.spool = Spool(paths, engine=engine, threads=depth, request_bytes=block_bytes, **space)
        try:
            extents = [self.spool.allocate(block_bytes) for _ in range(region // block_bytes * len(paths))]
            # Twice as many slots as transfers that run, so that an engine always finds the next one waiting.
            slots = min(2 * self.spool.capabilities.threads, len(extents))
            self._random = np.frombuffer(os.urandom(block_bytes), np.uint8)
            memory = np.frombuffer(map_private(slots * block_bytes), np.uint8)  # as the host pool's
            self._memory = memory.reshape(slots, block_bytes)
            self._memory[:] = self._random
            begin = self._memory.ctypes.data
            # Memory of one block each, and the extents that it goes through.
            self._slots = [(begin + i * block_bytes, extents[i::slots]) for i in range(slots)]
            self.measure("write")  # the first write to reserved room is slower than any later one
            self._check_content()
        except BaseException:
            self.close()
            raise

    def rates(self, seconds: float, rounds: int) -> Rates:
        """Take ``rounds`` samples of each direction, in turns, and return their medians."""
        samples = [{way: self.measure(way, seconds) for way in DIRECTIONS} for _ in range(rounds)]
        middle = {way: median(sample[way] for sample in samples) for way in DIRECTIONS}
        return Rates(engine=self.spool.capabilities.name, direct=self.spool.capabilities.direct, **middle)

    def measure(self, direction: Direction, seconds: float = math.inf) -> float:
        """Return the bytes a second of one direction; reading and mixed go over the blocks written before.

        An engine that works through the page cache makes one pass at most, as any does without ``seconds``. Its writes
        are forced to the disk within the time, and the blocks that it reads are dropped from the cache before.
        """
        # A second pass through the page cache would measure memory.
        cached = self.spool.capabilities.needs_file and not self.spool.capabilities.direct
        files = [file.fd for file in self.spool.files] if cached else []
        for fd in files:
            os.fdatasync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begin_s = time.perf_counter()
        blocks = self._move(direction, begin_s + seconds, one_pass=cached or seconds == math.inf)
        for fd in files:
            os.fdatasync(fd)
        return blocks * self._block_bytes / (time.perf_counter() - begin_s)

    def close(self) -> None:
        """Stop, and give the disk space back. Idempotent."""
        self.spool.abort()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _move(self, direction: Direction, deadline_s: float, *, one_pass: bool) -> int:
        """Keep every slot under way until the deadline, or for one pass over its extents; return the blocks moved."""
        running: dict[int, Transfer] = {}
        moved, slots = 0, len(self._slots)
        for step in range(slots * len(self._slots[0][1])) if one_pass else count():
            turn, number = divmod(step, slots)
            before, (address, extents) = running.get(number), self._slots[number]
            if before is not None:
                before.wait()
            if time.perf_counter() >= deadline_s or (before is not None and before.error is not None):
                break
            if not one_pass or turn < len(extents):
                # Neighbours of a mixed run write and read in turn, so that both directions are always under way.
                writes = direction == "write" or (direction == "mixed" and (turn + number) % 2 == 0)
                start = self.spool.write if writes else self.spool.read
                running[number] = start(extents[turn % len(extents)], address, self._block_bytes)
                moved += 1
        _end(running.values())
        return moved

    def _check_content(self) -> None:
        """Read a block of each slot back: an engine that is fast because it moves nothing must not win."""
        self._memory[:] = 0
        reads = [self.spool.read(extents[-1], address, self._block_bytes) for address, extents in self._slots]
        _end(reads)
        if not all(np.array_equal(block, self._random) for block in self._memory):
            raise ChecksumError(errno.EBADMSG, "what was read back is not what was written", self.spool.files[0].path)


def _end(transfers: Collection[Transfer]) -> None:
    # All end first, so that no transfer uses the memory any more when this returns or raises.
    for transfer in transfers:
        transfer.wait()
    for transfer in transfers:
        if transfer.error is not None:
            raise transfer.error
