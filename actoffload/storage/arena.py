"""The disk under spools: a file, an engine and an allocator for each path, extents in them, and the lock of it all.

The lock guards the allocators and the counts of every spool. A finalizer may run while its own thread holds the lock,
so freed extents and ended transfers go into a mailbox, which the thread that gets or releases the lock empties.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ConfigError, SpoolFullError, StorageError
from ..locks import DrainingLock, Mailbox
from ..memory.best_fit import ExtentAllocator
from .engines import EngineFactory, choose_engine, create_engine
from .engines.base import EngineCapabilities, SpoolFile, StorageEngine
from .spool_files import MAX_BLOCK_BYTES, check_directory, free_bytes, grow_arena, open_arena

_UNLIMITED_BYTES = 1 << 62
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SpoolStatistics:
    """The room and the traffic of a spool so far; all sizes in bytes."""

    capacity_bytes: int | None
    """Limit for all arenas together; None: the free space of the file systems."""
    arena_bytes: int
    """Reserved on disk."""
    allocated_bytes: int
    peak_allocated_bytes: int
    written_bytes: int
    read_bytes: int
    busy_extents: int
    """Extents with a transfer in flight."""


class PathArena:
    """One path: its file, its engine, and which bytes of the file are in use. Not thread-safe, but for the engine.

    Attributes:
        extents: Which bytes are in use; offsets and sizes are multiples of the block size.
        queued_bytes: Bytes of the transfers that were enqueued on this path and have not ended.
        grow_error: Why the last attempt to grow failed, if the file system refused it.
        share_bytes: Most bytes of the arena, where several processes share the disk.
    """

    def __init__(self, file: SpoolFile, engine: StorageEngine) -> None:
        self.file = file
        self.engine = engine
        self.extents = ExtentAllocator(0, max(engine.capabilities.alignment, MAX_BLOCK_BYTES))
        self.queued_bytes = 0
        self.grow_error: StorageError | None = None
        self.share_bytes = _UNLIMITED_BYTES
        self._refused_free_bytes: int | None = None
        self._closed = False

    def grow(self, wanted: int, step: int, limit: int) -> bool:
        """Make the arena larger by ``step`` bytes, by less if ``limit`` demands it, never by less than ``wanted``."""
        on_disk = self.engine.capabilities.needs_file
        limit = min(limit, self.share_bytes - self.extents.capacity_bytes)
        if on_disk:
            room = free_bytes(self.file)
            if self._refused_free_bytes is not None and room < self._refused_free_bytes + wanted:
                return False  # the last attempt failed (a quota?) and nothing has changed since
            limit = min(limit, room)
        old = self.extents.capacity_bytes
        new = self.extents.round_down(old + min(max(step, wanted), limit))
        if new - old < wanted:
            return False
        if on_disk:
            try:
                grow_arena(self.file, old, new)
            except StorageError as exc:
                self.grow_error, self._refused_free_bytes = exc, room
                return False
        self._refused_free_bytes = None
        self.extents.grow(new)
        return True

    def close_file(self) -> None:
        """Close the descriptor, once; the file goes with it."""
        if self.file.fd >= 0 and not self._closed:
            self._closed = True
            os.close(self.file.fd)


@dataclass(slots=True, eq=False)
class Extent:
    """A contiguous range of the file of one path; the spool makes, changes and frees it."""

    arena: PathArena
    offset: int  # where it starts in the file
    nbytes: int  # a multiple of the spool's granularity
    checksums: dict[int, int] = field(default_factory=dict)  # by offset of each request, where the spool verifies
    valid_bytes: int = 0  # how much the last write left here; 0: nothing that may be read
    transfers: int = 0  # how many are in flight
    writer: object = None  # the write that is in flight
    freed: bool = False  # the caller has freed it: the spool releases it when the last transfer has ended

    def __repr__(self) -> str:
        return f"<Extent {self.nbytes} bytes at {self.offset} in {self.arena.file.path}>"


class Disk:
    """A file, an engine and an allocator for each path, and the lock that guards them. Several spools may share it.

    All methods but `post`, `close` and `after_fork_in_child` are called with the lock held. Sizes are in bytes.

    Args:
        paths: Directories; each extent lies on one of them.
        engine: Name of an engine, ``"auto"``, names of which the first that works is taken, or a factory that makes one
            for a file.
        capacity_bytes: Most bytes, all paths together; None: the free space of the file systems, less a reserve.
        processes: How many processes open a disk like this one on the machine: without ``capacity_bytes`` each takes
            at most its share of the free space as it begins, so that none fills the disk alone.
        request_bytes: Largest request; a longer transfer is several, which run at the same time.
        grow_bytes: How much an arena is grown at a time; the first step is taken at once.
        threads: Threads per engine; None: the engine's own choice.
        allow_any_filesystem: Also take memory, network and FUSE file systems.

    Attributes:
        lock: guards the allocators, and the counts of every spool.
        users: the spools, also the closed ones.
        closed: the files are gone; another spool has to open another disk.
        capabilities: Of all engines together; ``engine_reason``: why they were chosen.
        granularity: Extents are multiples of this many bytes.

    Raises:
        ConfigError: There is no such engine.
        SpoolPathError: A directory cannot hold a spool.
        SpoolFullError: There is no room for the first step.
        EngineUnavailableError: The engine cannot run here.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        engine: str | tuple[str, ...] | EngineFactory = "auto",
        capacity_bytes: int | None = None,
        processes: int = 1,
        request_bytes: int = 8 << 20,
        grow_bytes: int = 256 << 20,
        threads: int | None = None,
        allow_any_filesystem: bool = False,
    ) -> None:
        self.arenas: list[PathArena] = []
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.closed = False
        self.capacity_bytes = capacity_bytes
        self._grow_bytes = grow_bytes
        self._next = 0  # index of the arena that the next extent comes from if all queues are equal
        self._renew_lock()
        reasons = []
        try:
            for path in paths:
                arena, reason = _open_path(path, engine, threads, allow_any_filesystem)
                self.arenas.append(arena)
                reasons.append(reason)
            self.capabilities = _of_all([arena.engine.capabilities for arena in self.arenas])
            self.engine_reason = "; ".join(dict.fromkeys(reasons))
            self.granularity = max(self.capabilities.alignment, MAX_BLOCK_BYTES)
            self.request_bytes = self.round_up(request_bytes)
            if capacity_bytes is None and processes > 1:
                self._share(processes)
            self._grow_first()
        except BaseException:
            self.close(wait=False)
            raise

    @property
    def arena_bytes(self) -> int:
        """Bytes reserved, all paths together."""
        return sum(arena.extents.capacity_bytes for arena in self.arenas)

    @property
    def allocated_bytes(self) -> int:
        """Bytes in extents, of all spools."""
        return sum(arena.extents.allocated_bytes for arena in self.arenas)

    def round_up(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to the granularity."""
        return -(-nbytes // self.granularity) * self.granularity

    def take(self, nbytes: int) -> Extent:
        """Take room in one piece, on the path with the shortest queue if it has that much, else on another one.

        Raises:
            SpoolFullError: There is no room; nothing is taken.
        """
        size, count = self.round_up(nbytes), len(self.arenas)
        # Equal queues take turns: extents that are written one after the other are read together, from all disks.
        turns = [(self._next + turn) % count for turn in range(count)]
        if count > 1:
            turns.sort(key=lambda index: self.arenas[index].queued_bytes)
        for index in turns:
            arena = self.arenas[index]
            offset = arena.extents.allocate(size)
            if offset is None:
                wanted, limit = size - arena.extents.free_at_end_bytes, self._limit_bytes - self.arena_bytes
                offset = arena.extents.allocate(size) if arena.grow(wanted, self._grow_bytes, limit) else None
            if offset is not None:
                self._next = (index + 1) % count
                return Extent(arena, offset, size)
        raise self._full_error(nbytes)

    def poison(self, extent: Extent) -> None:
        """Overwrite the bytes of an extent, past the engines: for debugging."""
        fd = extent.arena.file.fd
        if fd >= 0:
            with contextlib.suppress(OSError), mmap.mmap(-1, extent.nbytes) as block:
                block[:] = b"\xff" * extent.nbytes
                os.pwrite(fd, block, extent.offset)

    def post(self, work: Callable[[T], None], item: T) -> None:
        """Have ``work(item)`` done with the lock held, soon. Never blocks."""
        self._posted.append((work, item))
        self._deliver()

    def work_off(self) -> bool:
        """Do all work that was posted, by any spool; True."""
        while self._posted:  # not `drain`: for each tensor its generator costs more than this check
            work, item = self._posted.popleft()
            work(item)
        return True

    def close(self, *, wait: bool) -> None:
        """End the engines, without ``wait`` cancel queued requests, and give the disk space back."""
        self.closed = True
        for arena in self.arenas:
            if wait:
                arena.engine.close()
            else:
                arena.engine.abort()
        self._close_files()

    def after_fork_in_child(self) -> None:
        """Close our descriptors; the files and threads are the parent's."""
        if not self.closed:
            self.closed = True
            self._renew_lock()  # the old one may be held by a thread that this process does not have
            for arena in self.arenas:
                arena.engine.after_fork_in_child()
            self._close_files()

    def _renew_lock(self) -> None:
        self._posted: Mailbox[tuple[Callable[[Any], None], Any]] = Mailbox()
        self.lock = DrainingLock(self._posted)
        self.lock.after_release = weakref.WeakMethod(self._deliver)

    def _deliver(self) -> None:
        self.lock.deliver(self.work_off)

    def _close_files(self) -> None:
        for arena in self.arenas:
            arena.close_file()

    @property
    def _limit_bytes(self) -> int:
        return _UNLIMITED_BYTES if self.capacity_bytes is None else self.capacity_bytes

    def _share(self, processes: int) -> None:
        """Limit each path to this process's share of the free space of its disk; paths on one disk divide the share."""
        on_disk = [arena for arena in self.arenas if arena.engine.capabilities.needs_file]
        disks = [os.fstat(arena.file.fd).st_dev for arena in on_disk]
        for arena, disk in zip(on_disk, disks, strict=True):
            arena.share_bytes = free_bytes(arena.file) // (processes * disks.count(disk))
        if on_disk:
            self.capacity_bytes = sum(arena.share_bytes for arena in on_disk)

    def _grow_first(self) -> None:
        """Reserve a first step on every path, so that a full disk is found now and not in the middle of a step."""
        share = min(self._grow_bytes, self._limit_bytes // len(self.arenas))
        for arena in self.arenas:
            arena.grow(self.granularity, share, share)
        if not self.arena_bytes:
            raise self._full_error(self.granularity)

    def _full_error(self, nbytes: int) -> SpoolFullError:
        cause = next((arena.grow_error for arena in self.arenas if arena.grow_error is not None), None)
        where = ", ".join(arena.file.path for arena in self.arenas)
        reason = cause or "nvme_budget or the share of the free disk space is reached"
        error = SpoolFullError(
            (cause.errno if cause else None) or errno.ENOSPC,
            f"no room for {nbytes} bytes in one piece: {self.allocated_bytes} of {self.arena_bytes} bytes of the arenas"
            f" are in use, and they cannot grow ({reason}); free space in {where}, raise nvme_budget, or give another"
            " path",
        )
        error.__cause__ = cause
        return error


def _of_all(engines: Sequence[EngineCapabilities]) -> EngineCapabilities:
    """Return the demands of any of these engines, and what every one of them can do."""
    return EngineCapabilities(
        name="+".join(dict.fromkeys(each.name for each in engines)),
        direct=all(each.direct for each in engines),
        alignment=max(each.alignment for each in engines),
        needs_file=any(each.needs_file for each in engines),
        threads=sum(each.threads for each in engines),
        vectored=all(each.vectored for each in engines),
        device_memory=all(each.device_memory for each in engines),
    )


def _open_path(
    path: str | os.PathLike[str],
    engine: str | tuple[str, ...] | EngineFactory,
    threads: int | None,
    allow_any_filesystem: bool,
) -> tuple[PathArena, str]:
    """Open the arena in ``path`` and its engine; return it and why it has this engine."""
    if engine == "memory":
        file = SpoolFile(fd=-1, path=os.fspath(path), direct=False, alignment=1)
    else:
        file = open_arena(check_directory(path, allow_any_filesystem=allow_any_filesystem))
    try:
        if callable(engine):
            made, reason = engine(file), "made by the factory that was given"
            if not isinstance(made, StorageEngine):
                raise ConfigError("engine", engine, f"it returned {made!r}: return a StorageEngine")
        elif engine == "auto" or isinstance(engine, tuple):
            made, reason = choose_engine(file, engine if isinstance(engine, tuple) else None, threads=threads)
        else:
            made = create_engine(engine, file, threads=threads)
            reason = f"asked for by name; {made.remark}" if made.remark else "asked for by name"
    except BaseException:
        if file.fd >= 0:
            os.close(file.fd)
        raise
    return PathArena(file, made), reason
