"""Every copy between a device with streams and host memory, and the order in which memory may be reused.

This is the one choke point of the ordering rules in docs/design.md. Each edge is a method of its own, so that a test
can take it away and see the simulated device show the corruption. No method blocks the host, but for `synchronize`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from torch import Tensor

from .accelerator import Accelerator, Event, Stream
from .timers import DeviceStopwatch, StreamWaits, Timeline, Traced, WaitFor, traced

WINDOW_FLOOR_BYTES = 64 << 20
BATCH_BYTES = 16 << 20
"""Most bytes of the copies of a batch, which take under a millisecond; a larger copy goes alone."""
BATCH_COPIES = 16
BATCH_SHARE = 1 / 16
"""A batch is full at this share of the bytes that a plan expects to wait for their copies: a copy that waits for its
batch is late by no more than that."""


@dataclass(slots=True, eq=False)
class Batch:
    """Copies of one direction that begin together, and the event after them."""

    way: str  # "out" or "in"
    index: int  # of the device
    stream: Stream  # that computes: it has produced the bytes that leave, or it owns the memory that is filled
    copies: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Destination and source, flat bytes both, by owner. Copies out are held until they are released."""
    nbytes: int = 0
    event: Event | None = None  # none: the copies have not begun
    due: int = 0  # on the way out: the last event at which a plan releases its memory; 0: no plan
    number: int = 0  # among the batches of this way and device, as they began, from 1
    after: dict[tuple[str, int], Batch] = field(default_factory=dict)
    """The last batch of each way and device that used the host memory before."""
    replaced: dict[object, tuple[Batch, ...]] = field(default_factory=dict)
    """The batches that this one has replaced in ``used_by``, by owner, until it begins."""
    timed: bool = False  # the event tells the time
    happened: bool = False  # the event is known to have happened
    awaited_by: list[Stream] = field(default_factory=list)  # on the way in: the streams that have waited for the copies
    about: tuple[Traced, ...] = ()  # while tracing is on: the tensor of each copy

    def add(self, owner: object, destination: Tensor, source: Tensor, used_by: list[Any]) -> None:
        """Add a copy of flat bytes. This batch takes the place of those that have ``used_by`` the host memory."""
        self.copies[owner] = destination, source
        self.nbytes += destination.nbytes
        for before in used_by:
            place = before.way, before.index
            if place not in self.after or self.after[place].number < before.number:
                self.after[place] = before
        if used_by:
            self.replaced[owner] = tuple(used_by)
        used_by[:] = [self]


class CopyStreams:
    """Copies on side streams, ordered against the compute streams by events."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self.written_bytes = 0
        self.read_bytes = 0
        self.stopwatch = DeviceStopwatch(device, self.current_index)
        """Notified of every copy and of every wait of a compute stream, while a step is timed."""
        self.waits = StreamWaits(device)
        self.timeline: Timeline | None = None
        """Notes every copy, and every wait of a compute stream, while tracing is on."""
        self.inert = False
        """In a forked child: the device is the parent's, and gets no calls."""
        self._seen: dict[int, None] = {}
        """The devices of the tensors seen so far."""
        self._numbers: dict[tuple[str, int], int] = {}
        self._awaited: dict[tuple[str, int, str, int], int] = {}
        """The number of the last batch that a side stream has waited for, by both ways and devices."""
        self._compute_streams: defaultdict[int, set[Stream]] = defaultdict(set)
        """By device: those that copies have been ordered with."""

    def gather(self, way: str, index: int, batch: Batch | None) -> Batch:
        """Return a batch for copies of the memory of the current stream of device ``index``; ``way``: see `Batch`.

        It is ``batch``, the last one, if that has not begun and is for this stream; else it is a new one.
        """
        stream = self.device.current_stream(index)
        if batch is not None and batch.event is None and batch.index == index and batch.stream == stream:
            return batch
        self._compute_streams[index].add(stream)
        return Batch(way, index, stream)

    # -- device to host -----------------------------------------------------------------------------------------------

    def begin_out(self, out: Batch) -> None:
        """Copy to the host, after all work of the batch's stream so far."""
        side = self.device.side_stream(out.index, "out")
        self._order_after_producer(side, out)
        self._order_after_host_copies(side, out)
        self._copy("write", out, side)
        self.written_bytes += out.nbytes

    def copy_flag(self, flag: Tensor, stream: Stream, host: Tensor) -> Event:
        """Begin to copy a flag that a compute stream has computed to page-locked memory; return the event after that.

        On the side stream, because a link makes one copy after the other: the compute stream would wait for all copies
        that began before.
        """
        side = self.device.side_stream(flag.device.index or 0, "out")
        self.device.wait(side, self.device.record(stream))  # the flag is computed first
        self.device.copy([(host, flag)], side)
        self.device.used_on(flag, side)  # the caller drops it, and the compute stream may use its memory again
        return self.device.record(side)

    def release_sources(self, *outs: Batch) -> None:
        """Release the device memory of batches in stream order: kernels on their streams reuse it after the copies.

        The caller drops its other references to the memory after this call. The batches have begun in this order, so
        a stream that waits for one has waited for all before it.
        """
        for number, out in enumerate(outs):
            if not self.inert:
                if not any(out.stream == later.stream for later in outs[number + 1 :]):
                    self._order_release_after_copy(out)
                self._order_release_after_compute(out)
        for out in outs:
            out.copies.clear()

    def saved_again(self, tensor: Tensor, reported: Stream = None) -> None:
        """Order the reuse of memory that was saved once more after the current stream, perhaps another one.

        Plain autograd would hold the memory until that stream's backward. Here the record may have released it already,
        while the program still owns it.

        ``reported``: a stream that the allocator knows to use this memory, or will know once the memory is released. It
        then waits for all work that is enqueued on that stream until the owner frees the memory.
        """
        if self.inert:
            return
        # PyTorch's streams are neither equal to None nor unequal.
        if reported is None or self.device.current_stream(tensor.device.index or 0) != reported:
            self._order_release_after_later_save(tensor)

    # -- host to device -----------------------------------------------------------------------------------------------

    def begin_in(self, incoming: Batch) -> None:
        """Copy to memory of the device, complete after the batches that make the host's bytes."""
        side = self.device.side_stream(incoming.index, "in")
        self._order_after_allocation(side, incoming)
        self._order_after_host_copies(side, incoming)
        self._copy("read", incoming, side)
        incoming.copies.clear()
        self.read_bytes += incoming.nbytes

    def before_use(self, incoming: Batch, filled: Callable[[], Tensor]) -> None:
        """Make later work of this thread's current stream run after copies that have begun; it uses ``filled()``."""
        current = self.device.current_stream(incoming.index)
        if current != incoming.stream:
            self._compute_streams[incoming.index].add(current)
            self.device.used_on(filled(), current)
        if current not in incoming.awaited_by:
            self._order_use_after_fill(current, incoming)
            incoming.awaited_by.append(current)

    def drop_unused(self, incoming: Batch) -> None:
        """Before memory that was filled (or is being filled) and never used is dropped: reuse waits for the copies."""
        if incoming.stream not in incoming.awaited_by and not self.inert:
            self._order_reuse_after_fill(incoming)
            incoming.awaited_by.append(incoming.stream)

    # -- events -------------------------------------------------------------------------------------------------------

    def done(self, batch: Any) -> bool:
        """Whether the copies of a batch are known to be complete, now."""
        if not batch.happened and batch.event is not None and not self.inert:
            batch.happened = self.device.done(batch.event)
        return bool(batch.happened)

    def synchronize(self, batch: Any) -> None:
        """Block the calling thread until the copies of a batch are complete, if they have begun."""
        if not batch.happened and batch.event is not None and not self.inert:
            self.device.synchronize(batch.event)

    def order_all_reuse(self, interrupted: Iterable[Batch] = ()) -> None:
        """Before memory is dropped after an interrupt: every compute stream waits for all copies.

        ``interrupted``: batches without an event, of which some copies may have begun.
        """
        for index, streams in () if self.inert else self._compute_streams.items():
            for role in ("out", "in"):
                with contextlib.suppress(RuntimeError):  # a device that refuses must not keep the rest from ending
                    event = self.device.record(self.device.side_stream(index, role))
                    for batch in interrupted:
                        if (batch.way, batch.index) == (role, index):
                            batch.event = event
                    for stream in streams:
                        self.device.wait(stream, event)

    def capturing(self, index: int | None = None) -> bool:
        """Whether the calling thread's current stream is being captured, on any device that tensors were seen on.

        To move a tensor of one device may make streams of other devices wait, as one window holds all copies out.
        A tensor of device ``index`` is seen from now on.
        """
        if self.inert:
            return False
        if index is not None:
            self._seen[index] = None  # atomic: hooks on several threads note their devices without a lock
        return any(map(self.device.capturing, tuple(self._seen)))

    def current_index(self) -> int | None:
        """The device on which the calling thread computes; None while no tensor was seen on any.

        A program may use device 1 while device 0 is current, and must get no context on device 0.
        """
        current, seen = self.device.current_index(), self._seen
        if current in seen or (not seen and any(self.device.allocated_bytes(current) or ())):
            return current
        return next(iter(seen), None)

    def usable_bytes(self) -> int | None:
        """See `Accelerator.usable_bytes`, of the device of `current_index`; None while there is none."""
        index = self.current_index()
        return None if index is None else self.device.usable_bytes(index)

    def after_fork_in_child(self) -> None:
        """Make no calls to the device any more, as it is the parent's."""
        self.inert = True
        self.waits.stop()

    # -- the edges, one method each -----------------------------------------------------------------------------------

    def _order_after_producer(self, side: Stream, out: Batch) -> None:
        moment, hook = self.waits.moment(out.stream), self.device.hook
        self.device.wait(side, moment or self.device.record(out.stream))
        if moment is not None and hook.depth:
            hook.recorded = out.stream, moment

    def _order_release_after_copy(self, out: Batch) -> None:
        self._compute_waits(WaitFor.ROOM, out.stream, out)

    def _order_release_after_compute(self, out: Batch) -> None:
        # The memory may belong to another stream than the one that has used it, so the allocator must know both.
        for _, source in out.copies.values():
            self.device.used_on(source, out.stream)

    def _order_release_after_later_save(self, tensor: Tensor) -> None:
        self.device.used_on(tensor, self.device.current_stream(tensor.device.index or 0))

    def _order_after_allocation(self, side: Stream, incoming: Batch) -> None:
        self.device.wait(side, self.device.record(incoming.stream))

    def _order_after_host_copies(self, side: Stream, batch: Batch) -> None:
        for (way, index), before in batch.after.items():
            # One stream makes all copies of a way in order: to have waited for one is to have waited for all before it.
            key = (batch.way, batch.index, way, index)
            ordered = (way, index) == (batch.way, batch.index) or before.number <= self._awaited.get(key, 0)
            if not ordered and not before.happened:
                self.device.wait(side, before.event)
                self._awaited[key] = before.number
        batch.after.clear()
        batch.replaced.clear()

    def _order_use_after_fill(self, current: Stream, incoming: Batch) -> None:
        self._compute_waits(WaitFor.DATA, current, incoming)

    def _order_reuse_after_fill(self, incoming: Batch) -> None:
        self._compute_waits(WaitFor.ROOM, incoming.stream, incoming)

    def _copy(self, way: str, batch: Batch, side: Stream) -> None:
        timeline, watched = self.timeline, self.stopwatch.running
        begin = self.waits.moment(side) if watched else None
        if timeline is not None:
            begin = timeline.moment(batch.index, side)
        self.device.copy(batch.copies.values(), side)
        end = self.waits.moment(side)
        batch.event, batch.timed = end or self.device.record(side), end is not None
        place = batch.way, batch.index
        batch.number = self._numbers[place] = self._numbers.get(place, 0) + 1
        if timeline is not None:
            batch.about = tuple(traced(owner, to.nbytes) for owner, (to, _) in batch.copies.items())
            timeline.add(f"host {way}", batch.index, begin, end, batch.about)
        if watched and begin is not None and end is not None:
            self.stopwatch.copied(way, batch.nbytes, begin, end)

    def _compute_waits(self, why: WaitFor, stream: Stream, batch: Batch) -> None:
        """Make a compute stream wait; to query first whether it has to would cost as much."""
        if batch.happened:
            return
        timeline, watched = self.timeline, self.stopwatch.running
        stands_for = 1 if watched or timeline is not None else self.waits.stands_for()
        recorded, self.device.hook.recorded = self.device.hook.recorded, None
        here = recorded is not None and recorded[0] == stream  # nothing was enqueued on it since
        begin = recorded[1] if here and recorded is not None else None
        if begin is None and stands_for:
            begin = self.waits.moment(stream)
        self.device.wait(stream, batch.event)
        if begin is None or not batch.timed or not stands_for:
            return
        self.waits.add(why, batch.index, begin, batch.event, stream, stands_for)
        if timeline is not None:
            timeline.add(f"wait for {why.value}", batch.index, begin, batch.event, batch.about)
        if watched:
            self.stopwatch.waited(begin, batch.event, batch.index)


class ReleaseWindow:
    """The copies out with device memory that is still held, oldest first, bounded in bytes.

    Args:
        copies: makes the copies.
        limit_bytes: the bound; None for twice the largest copy seen (one under way, one behind it), at least 64 MiB.
        on_release: called with the owner of each copy as its device memory is released.
        may_begin: called with the owner of each copy that is about to begin: False once it has withdrawn it.

    Attributes:
        is_fixed: the user set the bound.
        limit_bytes: the bound.
        expected_bytes: how much a plan expects to be held at once; 0 without a plan.
        held_bytes: the device memory that is held.
        due: the first event at which a plan releases a batch; 0: there is none.
    """

    def __init__(
        self,
        copies: CopyStreams,
        limit_bytes: int | None,
        on_release: Callable[[Any], None],
        may_begin: Callable[[Any], bool],
    ) -> None:
        self._copies = copies
        self.is_fixed = limit_bytes is not None
        self.limit_bytes = WINDOW_FLOOR_BYTES if limit_bytes is None else limit_bytes
        self._on_release = on_release
        self._may_begin = may_begin
        self._batches: deque[Batch] = deque()
        self.due = 0
        self.expected_bytes = 0
        self.held_bytes = 0

    def hold(
        self,
        owner: object,
        destination: Tensor,
        source: Tensor,
        index: int,
        used_by: list[Any],
        of_bytes: int,
        due: int,
    ) -> Batch:
        """Have flat bytes of device ``index`` copied to the host, soon, and hold them until the window is past them.

        Args:
            owner: a key for the bytes.
            destination: host memory; ``used_by``: see `Batch.add`.
            source: device memory.
            of_bytes: of how many bytes these are a part, which are let go together.
            due: the event at which a plan releases them, see `release_due`; 0 without a plan.
        """
        nbytes = destination.nbytes
        last = self._batches[-1] if self._batches else None
        batch = self._copies.gather("out", index, last)
        if batch is not last:
            self.begin()
            self._batches.append(batch)
        batch.add(owner, destination, source, used_by)
        if due:
            batch.due = max(batch.due, due)
            self._find_due()
        self.held_bytes += nbytes
        if not self.is_fixed:
            self.limit_bytes = max(self.limit_bytes, 2 * of_bytes)
        most = min(BATCH_BYTES, self.limit_bytes // 4)
        if self.expected_bytes:  # a plan takes each copy to begin as its storage is saved
            most = min(most, int(BATCH_SHARE * self.expected_bytes))
        full = len(batch.copies) >= BATCH_COPIES or batch.nbytes >= most
        if full or self.held_bytes > self.limit_bytes:
            self.begin()
        return batch

    @property
    def gathering(self) -> Batch | None:
        """The batch that is being filled."""
        last = self._batches[-1] if self._batches else None
        return last if last is not None and last.event is None else None

    def begin(self) -> None:
        """Begin the batch that is being filled."""
        out = self.gathering
        if out is not None and any([self._may_begin(owner) for owner in tuple(out.copies)]):
            self._copies.begin_out(out)

    def withdraw(self, owner: object, batch: Batch, used_by: list[Any] | None) -> bool:
        """Take a copy out of its batch; return False when it has begun: its memory is held until it is complete.

        ``used_by``: the list that `hold` has changed, which becomes as it was before; None: the host memory is free.
        """
        if batch.event is not None:
            return False
        nbytes = batch.copies.pop(owner)[1].nbytes
        batch.nbytes -= nbytes
        before = batch.replaced.pop(owner, ())
        if used_by is not None:
            used_by[:] = before
        self.held_bytes -= nbytes
        if not batch.copies:
            self._batches.pop()  # only the last one has not begun
            self._find_due()
        return True

    def forget(self) -> None:
        """Drop all copies; `CopyStreams.order_all_reuse` goes before."""
        self._batches.clear()
        self.held_bytes = self.due = 0

    # None of these looks whether a copy has ended: the host may be far ahead of the device, and would release nothing.
    # The compute stream waits for the copies, and the allocator may use their memory for work that is enqueued later.

    def advance(self, limit_bytes: int) -> None:
        """Release the oldest copies' memory, in stream order, until at most ``limit_bytes`` are held."""
        if self.held_bytes > limit_bytes:
            self._release_oldest(lambda: self.held_bytes > limit_bytes)

    def advance_for(self, excess: Callable[[], int]) -> None:
        """Release the oldest copies' memory, in stream order, while there is an excess of bytes.

        Some of the released bytes may stay resident: backward has taken the original of a record, say.
        """
        held_bytes = self.held_bytes + 1
        while 0 < self.held_bytes < held_bytes and (over := excess()) > 0:
            held_bytes = self.held_bytes
            self.advance(max(0, held_bytes - over))

    def _find_due(self) -> None:
        self.due = next((batch.due for batch in self._batches if batch.due), 0)

    def release_due(self, event: int) -> None:
        """Release, in stream order, the memory that a plan releases by ``event``, and all that began to leave before.

        One stream makes the copies in order, so a stream that waits for one has waited for all before it.
        """
        self._release_oldest(lambda: 0 < self.due <= event)

    def release_if(self, condition: Callable[[Any], bool]) -> None:
        """Release, in stream order, the memory of each batch if all its owners meet a condition."""
        self._release([out for out in self._batches if out.event is not None and all(map(condition, out.copies))])

    def release_complete(self) -> None:
        """Release the memory of the oldest copies that are known to have ended, now."""
        self._release(list(takewhile(self._copies.done, self._batches)))

    def _release_oldest(self, more: Callable[[], bool]) -> None:
        """Release the oldest batches, as long as there is ``more`` to release."""
        going: list[Batch] = []
        while self._batches and more():
            if self._batches[0].event is None:
                self.begin()
            if self._batches and self._batches[0].event is not None:  # else every copy in it was withdrawn
                going.append(self._take_out(self._batches[0]))
        self._let_go(going)

    def _release(self, outs: Iterable[Batch]) -> None:
        self._let_go([self._take_out(out) for out in outs])

    def _take_out(self, out: Batch) -> Batch:
        self._batches.remove(out)
        self.held_bytes -= out.nbytes
        if out.due:
            self._find_due()
        return out

    def _let_go(self, outs: list[Batch]) -> None:
        owners = [owner for out in outs for owner in out.copies]
        self._copies.release_sources(*outs)
        for owner in owners:
            self._on_release(owner)
