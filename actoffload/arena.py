"""The arenas of a spool: one file, one engine and one allocator per path ("lane"), and extents striped over them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from .engines import EngineFactory, choose_engine, create_engine
from .engines.base import SpoolFile, StorageEngine
from .errors import SpoolFullError, StorageError
from .extent_io import Segment
from .extents import ExtentAllocator
from .paths import MAX_BLOCK_BYTES, check_directory, free_bytes, grow_arena, open_arena

_MIN_PIECE_BYTES = 1 << 20  # below this a piece is not worth its request, as long as there is room for larger ones
_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class SpoolStatistics:
    """What a spool is and has done so far; all sizes in bytes."""

    engine: str
    direct: bool
    alignment: int
    paths: tuple[str, ...]
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


class Lane:
    """One path: its file, its engine, and which bytes of the file are in use. Not thread-safe.

    Args:
        file: The open arena; the lane closes it.
        engine: Works on that file.
        granularity: Offsets and sizes of segments are multiples of this many bytes.
    """

    def __init__(self, file: SpoolFile, engine: StorageEngine, granularity: int) -> None:
        self.file = file
        self.engine = engine
        self.extents = ExtentAllocator(0, granularity)
        self.grow_error: StorageError | None = None
        self.share_bytes = _UNLIMITED_BYTES
        """Most bytes of the arena, where several processes share the disk."""
        self._refused_free_bytes: int | None = None
        self._open: list[None] = [None]
        self._probe_bytes = (engine.written_bytes, engine.read_bytes)  # what trying the engine has moved is not counted

    @property
    def written_bytes(self) -> int:
        """Bytes written to this lane."""
        return self.engine.written_bytes - self._probe_bytes[0]

    @property
    def read_bytes(self) -> int:
        """Bytes read from this lane."""
        return self.engine.read_bytes - self._probe_bytes[1]

    def grow(self, wanted: int, step: int, limit: int) -> bool:
        """Makes the arena larger by ``step`` bytes or what there is up to ``limit``, never by less than ``wanted``."""
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
        """Closes the descriptor, once; the file goes with it."""
        if self.file.fd >= 0 and self._open:
            self._open.pop()
            os.close(self.file.fd)


class ArenaSet:
    """All lanes of a spool. Not thread-safe, but for the engines.

    Args:
        paths: One directory per lane.
        engine: As in ``Spool``.
        threads: As in ``Spool``.
        allow_any_filesystem: As in ``Spool``.
        stripe_bytes: As in ``Spool``; rounded up to the granularity.
        grow_bytes: As in ``Spool``.
        capacity_bytes: As in ``Spool``.
        processes: As in ``Spool``.

    Attributes:
        capacity_bytes: Limit for all lanes together; None: what is free.

    Raises:
        StorageError: One of the lanes cannot be made, or there is no room for its first step.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        engine: str | EngineFactory,
        threads: int | None,
        allow_any_filesystem: bool,
        stripe_bytes: int,
        grow_bytes: int,
        capacity_bytes: int | None,
        processes: int,
    ) -> None:
        self.lanes: list[Lane] = []
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self._grow_bytes = grow_bytes
        self.capacity_bytes = capacity_bytes
        self._next_lane = 0
        try:
            reasons = []
            for path in paths:
                lane, reason = _open_lane(path, engine, threads, allow_any_filesystem)
                self.lanes.append(lane)
                reasons.append(reason)
            capabilities = [lane.engine.capabilities for lane in self.lanes]
            self.alignment = max(each.alignment for each in capabilities)
            self.direct = all(each.direct for each in capabilities)
            self.engine_name = "+".join(dict.fromkeys(each.name for each in capabilities))
            self.engine_reason = "; ".join(dict.fromkeys(reasons))
            self.granularity = max(self.alignment, MAX_BLOCK_BYTES)
            self.stripe_bytes = self.round_up(stripe_bytes)
            if capacity_bytes is None and processes > 1:
                self._share(processes)
            self._grow_first()
        except BaseException:
            for lane in self.lanes:
                lane.engine.abort()
            self.close_files()
            raise

    @property
    def arena_bytes(self) -> int:
        """Bytes reserved, all lanes together."""
        return sum(lane.extents.capacity_bytes for lane in self.lanes)

    def round_up(self, nbytes: int) -> int:
        """Returns ``nbytes`` rounded up to the granularity."""
        return -(-nbytes // self.granularity) * self.granularity

    def take(self, nbytes: int) -> tuple[Segment, ...]:
        """Takes room in pieces of about the same size, none larger than a stripe, round robin over the lanes.

        Raises:
            SpoolFullError: There is no room; nothing is taken.
        """
        remaining = self.round_up(nbytes)
        pieces = -(-remaining // self.stripe_bytes)
        wanted = self.round_up(-(-remaining // pieces))
        segments: list[Segment] = []
        while remaining:
            wanted = min(wanted, remaining)
            segment = self._take_piece(wanted)
            if segment is not None:
                segments.append(segment)
                remaining -= wanted
            elif wanted > _MIN_PIECE_BYTES:
                wanted = self.round_up(wanted // 2)  # no hole is large enough, but smaller ones may be
            else:
                self.give_back(segments)
                raise self._full_error(nbytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return tuple(segments)

    def give_back(self, segments: Sequence[Segment]) -> None:
        """Makes the room of these segments free for others."""
        for segment in segments:
            self.lanes[segment.lane].extents.free(segment.offset, segment.nbytes)
            self.allocated_bytes -= segment.nbytes

    def close_files(self) -> None:
        """Closes every descriptor, once."""
        for lane in self.lanes:
            lane.close_file()

    @property
    def _limit_bytes(self) -> int:
        return _UNLIMITED_BYTES if self.capacity_bytes is None else self.capacity_bytes

    def _share(self, processes: int) -> None:
        """Leaves the other processes as much of each disk as this one may take; lanes on one disk share that."""
        lanes = [lane for lane in self.lanes if lane.engine.capabilities.needs_file]
        disks = [os.fstat(lane.file.fd).st_dev for lane in lanes]
        for lane, disk in zip(lanes, disks, strict=True):
            lane.share_bytes = free_bytes(lane.file) // (processes * disks.count(disk))
        if lanes:
            self.capacity_bytes = sum(lane.share_bytes for lane in lanes)

    def _take_piece(self, nbytes: int) -> Segment | None:
        count = len(self.lanes)
        for turn in range(self._next_lane, self._next_lane + count):
            index = turn % count
            lane = self.lanes[index]
            offset = lane.extents.allocate(nbytes)
            if offset is None and lane.grow(nbytes, self._grow_bytes, self._limit_bytes - self.arena_bytes):
                offset = lane.extents.allocate(nbytes)
            if offset is not None:
                self._next_lane = (index + 1) % len(self.lanes)
                self.allocated_bytes += nbytes
                return Segment(index, offset, nbytes)
        return None

    def _grow_first(self) -> None:
        """Reserves a first step on every path, so that a full disk is found now and not in the middle of a step."""
        share = min(self._grow_bytes, self._limit_bytes // len(self.lanes))
        for lane in self.lanes:
            lane.grow(self.granularity, share, share)
        if not self.arena_bytes:
            raise self._full_error(self.granularity)

    def _full_error(self, nbytes: int) -> SpoolFullError:
        cause = next((lane.grow_error for lane in self.lanes if lane.grow_error is not None), None)
        where = ", ".join(lane.file.path for lane in self.lanes)
        error = SpoolFullError(
            (cause.errno if cause else None) or errno.ENOSPC,
            f"no room for {nbytes} bytes: {self.allocated_bytes} of {self.arena_bytes} bytes of the arenas are in use,"
            f" and they cannot grow ({cause or 'nvme_budget or the share of the free disk space is reached'}); "
            f"free space in {where}, raise nvme_budget, or give another path",
        )
        error.__cause__ = cause
        return error


def _open_lane(
    path: str | os.PathLike[str], engine: str | EngineFactory, threads: int | None, allow_any_filesystem: bool
) -> tuple[Lane, str]:
    """Opens the arena in ``path`` and its engine; returns the lane and why it has this engine."""
    if engine == "memory":
        file = SpoolFile(fd=-1, path=os.fspath(path), direct=False, alignment=1)
    else:
        file = open_arena(check_directory(path, allow_any_filesystem=allow_any_filesystem))
    try:
        if callable(engine):
            made, reason = engine(file), "made by the factory that was given"
        elif engine == "auto":
            made, reason = choose_engine(file, threads=threads)
        else:
            made = create_engine(engine, file, threads=threads)
            reason = f"asked for by name; {made.remark}" if made.remark else "asked for by name"
    except BaseException:
        if file.fd >= 0:
            os.close(file.fd)
        raise
    return Lane(file, made, max(made.capabilities.alignment, MAX_BLOCK_BYTES)), reason


__all__ = ["ArenaSet", "Lane", "SpoolStatistics"]
