"""Every copy between a device with streams and host memory, and the order in which memory may be reused.

This is the one choke point of the ordering rules in docs/design.md. Each edge is a method of its own, so that a test
can take it away and see the simulated device show the corruption. No method blocks the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from .accelerator import Accelerator, Event, Stream
from .timers import DeviceStopwatch, StreamWaits, WaitFor

WINDOW_FLOOR_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Outgoing:
    """A device-to-host copy that was begun, and the device memory that it reads."""

    source: Tensor
    nbytes: int
    index: int
    stream: Stream
    """The stream that produced the source and in whose order its memory is released."""
    event: Event
    """Happens when the copy is complete."""
    released: bool = False


@dataclass(slots=True, eq=False)
class Incoming:
    """A host-to-device copy that was begun, and the device memory that it fills."""

    tensor: Tensor
    index: int
    stream: Stream
    """The compute stream that owns the memory."""
    event: Event
    awaited_by: list[Stream] = field(default_factory=list)


class CopyStreams:
    """Copies on side streams, ordered against the compute streams by events."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self.written_bytes = 0
        self.read_bytes = 0
        self.stopwatch: DeviceStopwatch | None = None
        """Told of every copy and of every wait of a compute stream, while a step is timed."""
        self.waits = StreamWaits(device)
        self._inert = False
        self._compute_streams: dict[int, list[Stream]] = {}

    # -- device to host -----------------------------------------------------------------------------------------------

    def begin_out(self, source: Tensor, destination: Tensor, after: Iterable[Event] = ()) -> Outgoing:
        """Copy the flat bytes of ``source`` (device) to ``destination`` (host) once what produced them is done.

        Args:
            source: flat bytes on the device.
            destination: as many in host memory.
            after: the events of the copies that used the host memory before.
        """
        index = self.device.index_of(source)
        producer = self.device.current_stream(index)
        self._saw(index, producer)
        side = self.device.side_stream(index, "out")
        self._order_after_producer(side, producer)
        self._order_after_host_copies(side, after)
        self._copy("write", destination, source, side)
        self.written_bytes += destination.numel()
        return Outgoing(source, destination.numel(), index, producer, self.device.record(side))

    def release_source(self, out: Outgoing) -> None:
        """Let the copy's device memory go, in stream order: what reuses it on the compute stream runs after the copy.

        The caller drops its other references to the memory after this call.
        """
        if out.released or self._inert:
            return
        self._order_release_after_copy(out)
        out.released = True
        del out.source

    # -- host to device -----------------------------------------------------------------------------------------------

    def begin_in(self, source: Tensor, index: int, after: Iterable[Event] = ()) -> Incoming:
        """Copy the flat bytes of ``source`` (host), complete after events, into new memory of device ``index``."""
        compute = self.device.current_stream(index)
        self._saw(index, compute)
        tensor = self.device.empty(source.numel(), index, compute)
        side = self.device.side_stream(index, "in")
        self._order_after_allocation(side, compute)
        self._order_after_host_copies(side, after)
        self._copy("read", tensor, source, side)
        self.read_bytes += source.numel()
        return Incoming(tensor, index, compute, self.device.record(side))

    def before_use(self, incoming: Incoming) -> Tensor:
        """The filled memory; what the calling thread gives its current stream from now on runs after the copy."""
        current = self.device.current_stream(incoming.index)
        self._saw(incoming.index, current)
        if not self.device.same_stream(current, incoming.stream):
            self.device.used_on(incoming.tensor, current)
        if not any(self.device.same_stream(current, stream) for stream in incoming.awaited_by):
            self._order_use_after_fill(current, incoming)
            incoming.awaited_by.append(current)
        return incoming.tensor

    def drop_unused(self, incoming: Incoming) -> None:
        """Before memory that was filled (or is being filled) and never used is dropped: reuse waits for the copy."""
        if not incoming.awaited_by and not self._inert:
            self._order_reuse_after_fill(incoming)

    def order_all_reuse(self) -> None:
        """Before memory is dropped after an interrupt: every compute stream waits for all copies."""
        for index, streams in () if self._inert else self._compute_streams.items():
            for role in ("out", "in"):
                with contextlib.suppress(RuntimeError):  # a device that refuses must not keep the rest from ending
                    event = self.device.record(self.device.side_stream(index, role))
                    for stream in streams:
                        self.device.wait(stream, event)

    def after_fork_in_child(self) -> None:
        """The device is the parent's: it is asked nothing any more, and orders nothing."""
        self._inert = True
        self.waits.stop()

    def on_the_one_compute_stream(self, index: int) -> bool:
        """Whether a single stream of device ``index`` has computed so far, and the calling thread is on it."""
        self._saw(index, self.device.current_stream(index))
        return len(self._compute_streams[index]) == 1

    # -- the edges, one method each -----------------------------------------------------------------------------------

    def _order_after_producer(self, side: Stream, producer: Stream) -> None:
        self.device.wait(side, self.device.record(producer))

    def _order_release_after_copy(self, out: Outgoing) -> None:
        if self.device.done(out.event):
            return
        self._compute_waits(WaitFor.ROOM, out.stream, out.event, out.index)
        if len(self._compute_streams[out.index]) > 1:
            # Several compute streams: the memory may belong to another than the one that saved it.
            self.device.used_on(out.source, self.device.side_stream(out.index, "out"))

    def _order_after_allocation(self, side: Stream, compute: Stream) -> None:
        self.device.wait(side, self.device.record(compute))

    def _order_after_host_copies(self, side: Stream, after: Iterable[Event]) -> None:
        for event in after:
            self.device.wait(side, event)

    def _order_use_after_fill(self, current: Stream, incoming: Incoming) -> None:
        self._compute_waits(WaitFor.DATA, current, incoming.event, incoming.index)

    def _order_reuse_after_fill(self, incoming: Incoming) -> None:
        self._compute_waits(WaitFor.ROOM, incoming.stream, incoming.event, incoming.index)

    def _copy(self, way: str, destination: Tensor, source: Tensor, side: Stream) -> None:
        stopwatch = self.stopwatch if self.stopwatch is not None and self.stopwatch.running else None
        before = stopwatch.moment(side) if stopwatch is not None else None
        self.device.copy(destination, source, side)
        if stopwatch is not None:
            stopwatch.copied(way, destination.numel(), side, before)

    def _compute_waits(self, why: WaitFor, stream: Stream, event: Event, index: int) -> None:
        begin = self.waits.begin(stream, event)
        self.device.wait(stream, event)
        if begin is not None:
            end = self.waits.end(why, index, stream, begin)
            if end is not None and self.stopwatch is not None and self.stopwatch.running:
                self.stopwatch.waited(begin, end, index)

    def _saw(self, index: int, stream: Stream) -> None:
        seen = self._compute_streams.setdefault(index, [])
        if not any(self.device.same_stream(stream, known) for known in seen):
            seen.append(stream)


class ReleaseWindow:
    """The copies whose device memory is still held, oldest first, bounded in bytes.

    Args:
        copies: makes the copies.
        limit_bytes: the bound; None for twice the largest copy seen (one under way, one behind it), at least 64 MiB.
        on_release: called with the owner of each copy whose device memory was let go.
    """

    def __init__(self, copies: CopyStreams, limit_bytes: int | None, on_release: Callable[[object], None]) -> None:
        self._copies = copies
        self._fixed = limit_bytes is not None
        self._limit_bytes = WINDOW_FLOOR_BYTES if limit_bytes is None else limit_bytes
        self._on_release = on_release
        self._expected_bytes = 0
        self._held: dict[object, Outgoing] = {}
        self.held_bytes = 0

    def hold(self, owner: object, out: Outgoing) -> None:
        """Hold a copy's device memory until the window is past it."""
        self._held[owner] = out
        self.held_bytes += out.nbytes
        if not self._fixed:
            self._limit_bytes = max(self._limit_bytes, 2 * out.nbytes)

    def expect(self, nbytes: int) -> None:
        """A plan counts on so many bytes that are held at once and on nothing that waits for them."""
        self._expected_bytes = 0 if self._fixed else nbytes

    def take(self, owner: object) -> Outgoing | None:
        """Remove a copy from the window without releasing its memory (it is needed again, or its owner died)."""
        out = self._held.pop(owner, None)
        if out is not None:
            self.held_bytes -= out.nbytes
        return out

    def forget(self) -> None:
        """Drop all copies; `CopyStreams.order_all_reuse` goes before."""
        self._held.clear()
        self.held_bytes = 0

    def advance(self, limit_bytes: int | None = None) -> None:
        """Release what is complete, then the oldest until at most ``limit_bytes`` are held."""
        limit = max(self._limit_bytes, self._expected_bytes) if limit_bytes is None else limit_bytes
        while self._held:
            owner, out = next(iter(self._held.items()))
            if self.held_bytes <= limit and not self._copies.device.done(out.event):
                return
            self.take(owner)
            self._copies.release_source(out)
            self._on_release(owner)
