"""Measures a path through the spool: writing, reading and both at once, by engine, block size and depth."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from ..config import format_size
from ..engines import ENGINES
from ..engines.base import EngineCapabilities
from ..errors import ActOffloadError, ChecksumError, ConfigError, SpoolFullError
from ..memory import map_private
from ..paths import MAX_BLOCK_BYTES, RESERVE_BYTES, check_directory
from ..spool import Extent, Spool
from .bench import Direction, Failure, Sample, Setting
from .bench_stream import Slot, Stream, compute_until

DISK_ENGINES = tuple(name for name in ENGINES if name != "memory")
"""The engines that work on a disk, in the order of ``ENGINES``."""
_PATTERN_BYTES = 1 << 20
_QUEUE_BYTES = 128 << 20
"""Most bytes of the transfers that are kept waiting or running where the depth is the engine's own choice."""


def measure_all(
    paths: Sequence[str],
    settings: Sequence[Setting],
    directions: Sequence[Direction],
    *,
    region_bytes: int,
    seconds: float,
    rounds: int = 1,
    busy: bool = False,
) -> Iterator[Sample | Failure]:
    """Measure every setting, in turns (A B A B) where there are several rounds.

    Args:
        paths: directories; blocks go to them in turns.
        settings: what to measure.
        directions: which ways; reading and mixed need ``"write"`` first.
        region_bytes: how much disk is used, in all directories together.
        seconds: of each sample.
        rounds: samples of each setting and direction.
        busy: let the main thread run pure Python meanwhile.

    Yields:
        Each sample when it is taken. A setting whose engine cannot run here gives one `Failure`, in the first round.

    Raises:
        ConfigError: a block size cannot work.
        SpoolFullError: the disk has too little room.
        StorageError: the disk failed.
    """
    check_room(paths, region_bytes)
    failed: set[Setting] = set()
    for _ in range(rounds):
        for engine, depth in dict.fromkeys((each.engine, each.depth) for each in settings):
            mine = [each for each in settings if (each.engine, each.depth) == (engine, depth) and each not in failed]
            if not mine:
                continue
            try:
                rig = Rig(paths, engine, depth, max(each.block_bytes for each in mine), region_bytes)
            except (ActOffloadError, OSError) as error:
                if isinstance(error, (ConfigError, SpoolFullError)):
                    raise
                failed.update(mine)
                yield from (Failure(setting=each, problem=str(error)) for each in mine)
                continue
            with rig:
                for setting in mine:
                    rig.prepare(setting.block_bytes)
                    for direction in directions:
                        yield rig.measure(direction, seconds, busy=busy)


def check_room(paths: Sequence[str], region_bytes: int) -> None:
    """Look whether the disks have room for a measurement before anything is written.

    Raises:
        SpoolPathError: a directory cannot hold a spool.
        SpoolFullError: there is too little room.
    """
    share = region_bytes // len(paths)
    needed: dict[int, int] = {}
    for path in paths:
        folder = check_directory(path)
        disk = os.stat(folder).st_dev
        needed[disk] = needed.get(disk, 0) + share
        info = os.statvfs(folder)
        free = info.f_bavail * info.f_frsize
        if free < needed[disk] + RESERVE_BYTES:
            raise SpoolFullError(
                errno.ENOSPC,
                f"too little room: the measurement needs {format_size(needed[disk])} and leaves "
                f"{format_size(RESERVE_BYTES)} for others, and {format_size(free)} are free; free space, name another "
                "path, or use a smaller region",
                path,
            )


class Rig:
    """An open spool to measure, with one engine and one depth. A context manager; leaves nothing on the disk.

    Args:
        paths: directories; blocks go to them in turns.
        engine: one of ``ENGINES``.
        depth: transfers at the same time, in each directory; None: the engine's own choice.
        largest_block_bytes: of the blocks that will be measured.
        region_bytes: how much disk is used, in all directories together.

    Raises:
        ConfigError: an argument cannot work.
        EngineUnavailableError: the engine cannot run here.
        StorageError: the spool cannot be made.
    """

    def __init__(
        self, paths: Sequence[str], engine: str, depth: int | None, largest_block_bytes: int, region_bytes: int
    ) -> None:
        _check_block(largest_block_bytes, region_bytes // len(paths))
        self._region_bytes = region_bytes
        self._spool = Spool(
            paths,
            engine=engine,
            threads=depth,
            capacity_bytes=region_bytes,
            grow_bytes=region_bytes,
            stripe_bytes=largest_block_bytes,
        )
        self._queue_bytes = _QUEUE_BYTES if depth is None else region_bytes
        self._setting = Setting(engine=engine, block_bytes=largest_block_bytes, depth=self.capabilities.threads)
        self._slots: list[Slot] = []
        self._extents: list[Extent] = []
        self._memory: mmap.mmap | None = None
        self._address = 0
        try:
            self._lay_out(largest_block_bytes)
            self._run("write", None)  # the first write to reserved room is slower than any later one
            self._check_content()
        except BaseException:
            self.close()
            raise

    @property
    def capabilities(self) -> EngineCapabilities:
        """Of the engine."""
        return self._spool.engines[0].capabilities

    @property
    def file(self) -> str:
        """A path that opens the first directory's file in another process, while the rig is open (Linux)."""
        return f"/proc/{os.getpid()}/fd/{self._spool.files[0].fd}"

    def prepare(self, block_bytes: int) -> None:
        """Measure blocks of this size from now on.

        Raises:
            ConfigError: it cannot work.
        """
        _check_block(block_bytes, self._region_bytes // len(self._spool.engines))
        self._lay_out(block_bytes)

    def measure(self, direction: Direction, seconds: float, *, busy: bool = False) -> Sample:
        """Time one direction. Reading and mixed go over what was written since `prepare`.

        An engine that works through the page cache makes one pass at most; what it wrote is forced to the disk within
        the time, and what it reads is dropped from the cache before.

        Raises:
            StorageError: a transfer failed.
        """
        processor_s = time.process_time()
        moved, elapsed_s = self._run(direction, seconds, busy=busy)
        return Sample(
            setting=self._setting,
            direction=direction,
            bytes_per_s=moved / elapsed_s,
            seconds=elapsed_s,
            processor_s=time.process_time() - processor_s,
            direct=self.capabilities.direct,
        )

    def close(self) -> None:
        """Stop, and give the disk space back. Idempotent."""
        self._spool.abort()
        self._drop_memory()

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lay_out(self, block: int) -> None:
        """Extents over the whole region, dealt out to the slots in turns, and memory for each slot."""
        self._setting = replace(self._setting, block_bytes=block)
        for extent in self._extents:
            self._spool.free(extent)
        lanes = len(self._spool.engines)
        per_lane = self._region_bytes // lanes // block
        self._extents = []
        self._extents += (self._spool.allocate(block) for _ in range(per_lane * lanes))
        wanted = min(2 * self._setting.depth, max(2, self._queue_bytes // block))
        count = min(wanted * lanes, len(self._extents))
        self._drop_memory()
        self._memory = map_private(count * block)  # as the host pool's
        pattern = os.urandom(min(block, _PATTERN_BYTES))
        whole = (pattern * -(-block // len(pattern)))[:block]
        for index in range(count):
            self._memory[index * block : (index + 1) * block] = whole
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._address = address = ctypes.addressof(anchor)
        del anchor  # else the mapping could not be closed
        for engine in self._spool.engines:
            engine.register_memory(address, count * block)
        self._slots = [Slot(address + i * block, self._extents[i::count]) for i in range(count)]

    def _drop_memory(self) -> None:
        if self._memory is None:
            return
        for engine in self._spool.engines:
            engine.unregister_memory(self._address, len(self._memory))
        self._memory.close()
        self._memory = None

    def _run(self, direction: Direction, seconds: float | None, *, busy: bool = False) -> tuple[int, float]:
        slots = self._slots if direction == "write" else [slot for slot in self._slots if slot.written]
        if not slots:
            raise ConfigError("direction", direction, "nothing was written yet: measure 'write' first")
        cached = self.capabilities.needs_file and not self.capabilities.direct
        if cached and direction != "write":
            self._drop_cache()
        stream = Stream(self._spool, slots, direction, self._setting.block_bytes, seconds)
        elapsed_s = stream.run(compute_until if busy else threading.Event.wait, one_pass=cached)
        if cached and direction != "read":
            begin_s = time.perf_counter()
            for file in self._spool.files:
                os.fdatasync(file.fd)
            elapsed_s += time.perf_counter() - begin_s
        return stream.moved_bytes, elapsed_s

    def _drop_cache(self) -> None:
        for file in self._spool.files:
            os.fdatasync(file.fd)  # what is dirty cannot be dropped
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _check_content(self) -> None:
        """An engine that is fast because it moves nothing must not win."""
        assert self._memory is not None, "memory is laid out before anything is written"
        block = self._setting.block_bytes
        written = self._memory[:block]
        self._memory[:block] = bytes(block)
        transfer = self._spool.read(self._slots[0].extents[-1], self._slots[0].address, block)
        transfer.wait()
        if transfer.error is not None:
            raise transfer.error
        if self._memory[:block] != written:
            where = self._spool.files[0].path
            raise ChecksumError(errno.EBADMSG, "what was read back is not what was written", where)


def _check_block(block: int, region: int) -> None:
    if block < 1 or block % MAX_BLOCK_BYTES:
        raise ConfigError("size", block, f"give a multiple of {MAX_BLOCK_BYTES} bytes, as direct transfers need it")
    if block > region:
        raise ConfigError("size", block, f"is larger than the {format_size(region)} that each directory is measured on")


__all__ = ["DISK_ENGINES", "Rig", "check_room", "measure_all"]
