"""Measures a path through the spool (writing, reading, both at once) and says what that could hide from training.

The rule is SSDTrain's (arXiv 2408.10013): what a step of ``t`` seconds saves is written in one half of it and read
back in the other, so ``S`` bytes hide where ``S / (t/2)`` is at most what the disk sustains. As writes and reads
overlap in a real step, the rate that counts is the slowest of writing, reading and both at once (their bytes added up).
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, get_args

import numpy as np

from ..errors import ActOffloadError, ChecksumError, ConfigError, SpoolFullError, SpoolPathError
from ..memory.process_memory import map_private
from ..sizes import format_size
from ..storage.engines import ENGINES
from ..storage.engines.base import EngineCapabilities
from ..storage.spool import Extent, Spool, Transfer
from ..storage.spool_files import MAX_BLOCK_BYTES

Direction = Literal["write", "read", "mixed"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
DISK_ENGINES = tuple(name for name in ENGINES if name != "memory")
"""The engines that work on a disk, in the order of ``ENGINES``."""
NEARLY = 0.97
"""A setting that reaches this share of the best one does as well."""
REGION_BYTES, BLOCK_BYTES, SECONDS, ROUNDS = 128 << 20, 8 << 20, 0.3, 2
"""How a path is measured unless told otherwise: in `bench` and in `doctor` alike."""
_RANDOM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the disk is used. ``depth``: transfers at the same time, in each directory; None: the engine's own choice."""

    engine: str
    block_bytes: int
    depth: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed run of one direction; of ``"mixed"``, bytes written and read together."""

    setting: Setting
    direction: Direction
    bytes_per_s: float
    direct: bool
    """Whether the transfers bypassed the page cache."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A setting that could not be measured."""

    setting: Setting
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The medians of one setting, bytes a second; None: not measured."""

    setting: Setting
    direct: bool
    write: float | None
    read: float | None
    mixed: float | None

    @property
    def sustained(self) -> float | None:
        """The slowest of what was measured: what a step can count on. None without both ways."""
        if self.write is None or self.read is None:
            return None
        return min(rate for rate in (self.write, self.read, self.mixed) if rate is not None)


# -- what the samples say ---------------------------------------------------------------------------------------------


def rates_of(samples: Iterable[Sample]) -> list[Rates]:
    """Return the medians of each setting, in the order in which settings first appear."""
    direct: dict[Setting, bool] = {}
    found: dict[tuple[Setting, Direction], list[float]] = {}
    for one in samples:
        direct[one.setting] = one.direct
        found.setdefault((one.setting, one.direction), []).append(one.bytes_per_s)
    middle = {key: median(rates) for key, rates in found.items()}
    return [
        Rates(setting=one, direct=direct[one], **{way: middle.get((one, way)) for way in DIRECTIONS}) for one in direct
    ]


def best_of(rates: Sequence[Rates]) -> Rates | None:
    """Return the setting that hides most; of those that are nearly as good, the one with the least in flight.

    Rates through the page cache are also those of memory, so such a setting is chosen only where nothing else runs.
    """
    usable = [one for one in rates if one.sustained is not None]
    usable = [one for one in usable if one.direct] or usable
    top = max((one.sustained or 0.0 for one in usable), default=0.0)
    good = (one for one in usable if (one.sustained or 0.0) >= NEARLY * top)
    return min(good, key=lambda one: (one.setting.depth or 1) * one.setting.block_bytes, default=None)


def training_facts(best: Rates | None, step_s: float | None, saved_bytes: int | None) -> dict[str, Any] | None:
    """Return what the user's step could hide: bytes, seconds and bytes a second. None where nothing was measured.

    Args:
        best: the setting to use.
        step_s: seconds of the step; None takes a step of one second.
        saved_bytes: what it saves for backward; None: not known.
    """
    if best is None or not best.sustained:
        return None
    seconds = 1.0 if step_s is None else step_s
    hidden = seconds / 2 * best.sustained
    return {
        "step_s": seconds,
        "sustained_bytes_per_s": best.sustained,
        "hidden_bytes": hidden,
        "saved_bytes": saved_bytes,
        "share_hidden": min(1.0, hidden / saved_bytes) if saved_bytes and step_s is not None else None,
        "hiding_step_s": 2 * saved_bytes / best.sustained if saved_bytes else None,
    }


# -- measuring --------------------------------------------------------------------------------------------------------


def measure_all(
    paths: Sequence[str], settings: Iterable[Setting], *, region_bytes: int, seconds: float, rounds: int
) -> Generator[Sample | Failure]:
    """Measure every setting in every direction, in turns (A B A B) where there are several rounds.

    Args:
        paths: see `Rig`.
        settings: what to measure.
        region_bytes: see `Rig`.
        seconds: of each sample.
        rounds: samples of each setting and direction.

    Yields:
        Each sample when it is taken. A setting whose engine cannot run here gives one `Failure`, in the first round.

    Raises:
        ConfigError: a block size cannot work.
        StorageError: a directory cannot hold a spool, has too little room, or failed.
    """
    blocks: dict[tuple[str, int | None], list[int]] = {}
    for each in settings:
        blocks.setdefault((each.engine, each.depth), []).append(each.block_bytes)
    for number in range(rounds):
        for (engine, depth), sizes in list(blocks.items()):
            try:
                rig = Rig(paths, engine, depth, max(sizes), region_bytes)
            except (ConfigError, SpoolPathError, SpoolFullError):
                raise
            except (ActOffloadError, OSError) as error:
                if number:
                    raise
                del blocks[engine, depth]
                yield from (Failure(Setting(engine=engine, block_bytes=n, depth=depth), str(error)) for n in sizes)
                continue
            with rig:
                for size in sizes:
                    rig.prepare(size)
                    for direction in DIRECTIONS:
                        yield rig.measure(direction, seconds)


class Rig:
    """An open spool to measure, with one engine and one depth. A context manager; leaves nothing on the disk.

    Args:
        paths: directories; blocks go to them in turns.
        engine: one of ``ENGINES``, or ``"auto"``.
        depth: transfers at the same time, in each directory; None: the engine's own choice.
        largest_block_bytes: the largest block that will be measured.
        region_bytes: how much disk is used, in all directories together.

    Attributes:
        spool: what is measured.

    Raises:
        ConfigError: an argument cannot work.
        EngineUnavailableError: the engine cannot run here.
        StorageError: the spool cannot be made, has too little room, or does not give back what was written.
    """

    def __init__(
        self, paths: Sequence[str], engine: str, depth: int | None, largest_block_bytes: int, region_bytes: int
    ) -> None:
        self._region_bytes = region_bytes // len(paths)
        _check(paths, largest_block_bytes, self._region_bytes)
        self._slots: list[_Slot] = []
        self.spool = Spool(
            paths,
            engine=engine,
            threads=depth,
            capacity_bytes=region_bytes,
            grow_bytes=region_bytes,
            request_bytes=largest_block_bytes,
        )
        try:
            # Twice as many slots as transfers that run, so that an engine always finds the next one waiting.
            self._most_slots = 2 * self.capabilities.threads * len(paths)
            self._random = np.frombuffer(os.urandom(_RANDOM_BYTES), np.uint8)
            pieces = -(-min(self._most_slots * largest_block_bytes, region_bytes) // _RANDOM_BYTES)
            memory = np.frombuffer(map_private(pieces * _RANDOM_BYTES), np.uint8)  # as the host pool's
            self._memory = memory.reshape(pieces, _RANDOM_BYTES)
            self._memory[:] = self._random
            self.prepare(largest_block_bytes)
            self._run("write", None)  # the first write to reserved room is slower than any later one
            self._check_content()
        except BaseException:
            self.close()
            raise

    @property
    def capabilities(self) -> EngineCapabilities:
        """Of the engine."""
        return self.spool.engines[0].capabilities

    @property
    def file(self) -> str:
        """A path that opens the first directory's file in another process, while the rig is open (Linux)."""
        return f"/proc/{os.getpid()}/fd/{self.spool.files[0].fd}"

    def prepare(self, block_bytes: int) -> None:
        """Measure blocks of this size from now on. They cover the whole region and are dealt out to slots in turns.

        Raises:
            ConfigError: the size cannot work.
        """
        _check((), block_bytes, self._region_bytes)
        for slot in self._slots:
            for extent in slot.extents:
                self.spool.free(extent)
        self._block_bytes = block_bytes
        blocks = self._region_bytes // block_bytes * len(self.spool.engines)
        extents = [self.spool.allocate(block_bytes) for _ in range(blocks)]
        count = min(self._most_slots, len(extents))
        addresses = range(self._memory.ctypes.data, self._memory.ctypes.data + count * block_bytes, block_bytes)
        self._slots = [_Slot(address, extents[i::count], i % 2) for i, address in enumerate(addresses)]

    def measure(self, direction: Direction, seconds: float) -> Sample:
        """Time one direction; reading and mixed go over what was written since `prepare`.

        An engine that works through the page cache makes one pass at most; what it wrote is forced to the disk within
        the time, and what it reads is dropped from the cache before.

        Raises:
            StorageError: a transfer failed.
        """
        moved, elapsed_s = self._run(direction, seconds)
        about = self.capabilities
        setting = Setting(engine=about.name, block_bytes=self._block_bytes, depth=about.threads)
        return Sample(setting=setting, direction=direction, bytes_per_s=moved / elapsed_s, direct=about.direct)

    def close(self) -> None:
        """Stop, and give the disk space back. Idempotent."""
        self.spool.abort()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, direction: Direction, seconds: float | None) -> tuple[int, float]:
        """Move blocks for so many seconds, None: for one pass; return the bytes that moved and the seconds."""
        cached = self.capabilities.needs_file and not self.capabilities.direct
        files = [file.fd for file in self.spool.files] if cached else []
        for fd in files:
            os.fdatasync(fd)  # what is dirty cannot be dropped
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begin_s = time.perf_counter()
        deadline_s = None if seconds is None else begin_s + seconds
        blocks = self._move(direction, deadline_s, one_pass=cached or seconds is None)
        for fd in files:
            os.fdatasync(fd)
        return blocks * self._block_bytes, time.perf_counter() - begin_s

    def _move(self, direction: Direction, deadline_s: float | None, *, one_pass: bool) -> int:
        """Keep every slot under way until the deadline, or for one pass over its extents; return the blocks moved."""
        free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        errors: list[BaseException] = []

        def done(slot: _Slot, transfer: Transfer) -> None:
            if transfer.error is not None:
                errors.append(transfer.error)
            free.put(slot)

        for slot in self._slots:
            slot.turn = 0
            free.put(slot)
        moved, active = 0, len(self._slots)
        while active:
            slot = free.get()
            late = deadline_s is not None and time.perf_counter() >= deadline_s
            if errors or late or (slot.turn == slot.length(direction) and (one_pass or not slot.turn)):
                active -= 1
                continue
            extent, writes = slot.next(direction)
            start = self.spool.write if writes else self.spool.read
            start(extent, slot.address, self._block_bytes, on_done=partial(done, slot))
            moved += 1
        if errors:
            raise errors[0]
        return moved

    def _check_content(self) -> None:
        """Read a block of each slot back: an engine that is fast because it moves nothing must not win."""
        block, random = self._block_bytes, self._random
        self._memory[:] = 0
        for transfer in [self.spool.read(slot.extents[-1], slot.address, block) for slot in self._slots]:
            transfer.wait()
            if transfer.error is not None:
                raise transfer.error
        used = self._memory.reshape(-1)[: len(self._slots) * block]
        pieces = (used[i : i + len(random)] for i in range(0, len(used), len(random)))
        if not all(np.array_equal(piece, random[: len(piece)]) for piece in pieces):
            raise ChecksumError(errno.EBADMSG, "what was read back is not what was written", self.spool.files[0].path)


class _Slot:
    """Memory of one block, and the extents that it goes through one after the other."""

    def __init__(self, address: int, extents: list[Extent], parity: int) -> None:
        self.address, self.extents, self.parity = address, extents, parity
        self.turn = 0
        self.written = 0
        """How many of its extents, from the first on, hold something to read."""

    def length(self, direction: Direction) -> int:
        """Return how many extents there are to go through."""
        return len(self.extents) if direction == "write" else self.written

    def next(self, direction: Direction) -> tuple[Extent, bool]:
        """Return the next extent, and whether to write it."""
        turn, count = self.turn, self.length(direction)
        self.turn += 1
        if direction == "write":
            self.written = max(self.written, turn % count + 1)
        if direction != "mixed":
            return self.extents[turn % count], direction == "write"
        reads = (turn + self.parity) % 2  # what was written a while ago
        return self.extents[(turn + reads * count) // 2 % count], not reads


def _check(paths: Sequence[str], block: int, region: int) -> None:
    """Refuse blocks that cannot work and room that no disk has: to reserve that would fill the disk for a moment."""
    if block < 1 or block % MAX_BLOCK_BYTES:
        raise ConfigError("size", block, f"give a multiple of {MAX_BLOCK_BYTES} bytes, as direct transfers need it")
    if block > region:
        raise ConfigError("size", block, f"is larger than the {format_size(region)} that each directory is measured on")
    for path in filter(os.path.isdir, paths):  # the spool refuses what is no directory
        if (free := shutil.disk_usage(path).free) < region:
            problem = f"too little room for {format_size(region)} ({format_size(free)} free)"
            raise SpoolFullError(errno.ENOSPC, f"{path}: {problem}; use a smaller region or another path")
