"""The state that an activation store and its tiers share: one lock, the counts, the memory budget, the reporter."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable

from ..config import OffloadConfig
from ..events import EventKind, EventSink, TraceEvent, now
from ..locks import Changed, DrainingLock
from .accounts import Accounts
from .interrupts import expected, is_interrupt
from .record import Record

_logger = logging.getLogger("actoffload")


class DeviceBudget:
    """The user's limit of saved bytes on the device, the bytes that must fit beside early fetches, and spare memory.

    Attributes:
        limit_bytes: the limit; None when there is none, or where it is a share of a peak that no step has shown yet.
            Without a limit of the user's it is the room of the device, if a plan would need more.
        largest_bytes: the largest record so far; the next one may be as large.
        following_bytes: the size of the storage that the forward saves next, where a plan knows it.
        again: the bytes that each region of a forward holds when backward runs it again, by its place; regions that
            run once are not among them.
        made_bytes: the bytes that backward may make at any time: in nested checkpoints, or from other saved tensors.
        used_bytes: the bytes that backward has used of the region, run once, that it is in. A region that runs again
            counts with all its bytes until backward has left it, and what it needs beside them is measured so.
        floor_bytes: the lowest limit that a step keeps, where that is known; a share is never less.
        spare_bytes: without a plan, how much device memory copies out may hold, and fetches ahead as much again: a part
            of the device memory that was free as the forward began; None: no limit is known.
        allows_codes: it may leave room for tensors that backward computes again from others, so ``codec`` applies.
        no_memory_ahead: the device had no memory for a fetch ahead. The allocator has given its cache back,
            to no avail, so that nothing more is fetched ahead before the next forward.
    """

    def __init__(self, config: OffloadConfig, accounts: Accounts) -> None:
        self.floor_bytes = 0
        self._share = config.device_share
        limited = config.device_budget is not None and self._share is None
        self.limit_bytes = config.size("device_budget", 0) if limited else None
        self.largest_bytes = 0
        self.following_bytes: int | None = None
        self.again: dict[int, int] = {}
        self.made_bytes = self.used_bytes = 0
        self.spare_bytes: int | None = None
        self.allows_codes = True
        self.no_memory_ahead = False
        self._accounts = accounts

    def begin_forward(self, *, first: bool) -> None:
        """Set a limit that is a share of the peak, once a step has shown that; ``first``: nothing is alive."""
        peak = self._accounts.baseline_peak_bytes
        # Where one tensor lives on for ever, nothing ever is: then the first step is over when less is alive than was.
        over = first or (self.limit_bytes is None and self._accounts.baseline_bytes < peak)
        if self._share is not None and peak and over:
            self.limit_bytes = max(int(self._share * peak), self.floor_bytes)

    def next_bytes(self, planned: int | None) -> int:
        """Return the bytes that the next storage may have: those that a plan knows, or the most so far."""
        return self.largest_bytes if planned is None else planned

    def excess_bytes(self, nbytes: int) -> int:
        """Return by how much ``nbytes`` more would pass the limit; negative, or 0 without one, if they would not."""
        return 0 if self.limit_bytes is None else self._accounts.resident_bytes + nbytes - self.limit_bytes

    def has_room_early(self, nbytes: int, record: Record | None = None) -> bool:
        """Whether ``nbytes`` that backward does not need yet fit, beside all that may be there before it does.

        Args:
            nbytes: of device memory.
            record: that backward will need; None for one that is not saved yet.
        """
        if self.limit_bytes is None:
            return True
        # Reading ahead follows the order of need, so a tensor that backward needs at once is an exception: one of them.
        made = self._made_before(record) - self._accounts.recomputed_bytes
        at_once = max(self.largest_bytes, self.used_bytes, made)
        return self._accounts.resident_bytes + nbytes + at_once <= self.limit_bytes

    def _made_before(self, record: Record | None) -> int:
        """The most bytes that backward makes at once before it needs the record."""
        if record is None or not record.tape.in_backward:
            return max(self.made_bytes, *self.again.values(), 0)
        # Backward takes the regions of a forward in reverse order: the regions that began after the record's save run
        # again before backward needs it, except for those that backward has passed.
        again, tape = self.again, record.tape
        began = tape.began_before[record.index]
        if began > tape.walk.mark:  # another branch, so nothing shows which regions come first
            return max(self.made_bytes, *again.values(), 0)
        return max([self.made_bytes, *(again[place] for place in range(began, tape.walk.mark) if place in again)])


class Reporter:
    """Traces events, counts degraded tensors, and keeps messages until a thread of the user's can log them.

    Attributes:
        sink: takes the events; None when tracing is off.
        unwanted: kinds of events that it does not need.
        advice: messages about how the library is used, each logged once, by key.
    """

    def __init__(self, sink: EventSink | None, accounts: Accounts) -> None:
        self.sink = sink
        self.unwanted: tuple[EventKind, ...] = ()
        self.advice: dict[str, str] = {}
        self.unsaid: deque[tuple[int, str]] = deque()
        """Messages to log, each with its level of `logging`."""
        self._accounts = accounts
        self._warned: set[str] = set()

    def event(self, kind: EventKind, record: Record, detail: str = "", since_s: float | None = None) -> None:
        """Report to the sink, if there is one. An error of the sink is advised once and harms nothing."""
        if self.sink is None or kind in self.unwanted:
            return
        time_s, saved = now(), record.saved
        begin_s = time_s if since_s is None else since_s
        thread, module = threading.get_ident(), saved.module or ""
        self._tell(TraceEvent(kind, begin_s, saved.number, record.nbytes, time_s - begin_s, detail, thread, module))

    def planned(self, told: str) -> None:
        """Report another plan to the sink, if there is one, and have `warn` log it."""
        self.unsaid.append((logging.INFO, told))
        if self.sink is not None:
            self._tell(TraceEvent(EventKind.PLAN, now(), 0, 0, detail=told, thread=threading.get_ident()))

    def _tell(self, event: TraceEvent) -> None:
        assert self.sink is not None, "there is one"
        try:
            expected(self.sink, event)
        except Exception as error:  # the records change under the lock meanwhile, and must not stay half changed
            if is_interrupt(error):
                raise
            self.advise("trace", f"the trace= callable raised {error!r}; training goes on, later events are told")

    def degrade(self, reason: str, record: Record, error: BaseException) -> None:
        """Count a tensor that stays after an error while the step goes on; `warn` logs each reason once."""
        self._accounts.degraded[reason] += 1
        self._accounts.degraded_bytes += record.nbytes
        self.event(EventKind.DEGRADED, record, reason)
        if reason not in self._warned:
            self._warned.add(reason)
            told = f"{reason}: {error}. The tensor stays in memory and the step goes on; "
            self.unsaid.append((logging.WARNING, f"{told}Statistics.degraded counts such tensors"))

    def advise(self, key: str, text: str, level: int = logging.WARNING) -> None:
        """Have `warn` log a text once for each ``key``; the report repeats it."""
        if key not in self.advice:
            self.advice[key] = text
            self.unsaid.append((level, text))

    def warn(self) -> None:
        """Log the messages, on a user's thread and without the lock: a filter may turn a warning into an error."""
        while self.unsaid:
            level, text = self.unsaid.popleft()
            _logger.log(level, text)
            if level >= logging.WARNING:
                expected(warnings.warn, f"actoffload: {text}", RuntimeWarning, stacklevel=3)


class Shared:
    """The state that an activation store and its tiers share. The lock guards all of it.

    Attributes:
        config: the options.
        lock: see `actoffload.locks`.
        changed: the condition that records, room or errors have changed.
        accounts: the running counts.
        budget: the limit of bytes on the device.
        reporter: events, warnings and advice.
        pending_bytes: bytes of writes that were begun and have not ended.
        events: how many storages with a place on a tape were saved, or used in backward for the first time. A plan
            counts in events when device memory is released, not in seconds: the host may be far ahead of the device.
        largest_moved_bytes: the largest record that moved; prefetch looks at least twice as far.
        late_s: seconds that compute streams waited for records that were fetched ahead, since a forward began.
        coded: ``codec="exact"`` applies to tensors outside of regions that run once, too. A planner may change it as a
            forward begins.
        watches_host: this step measures whether an accelerator idles while hooks move records.
        stopped: nothing may be started any more: the store was aborted or shut, or this is a forked child.
        interrupted: an interrupt has left records half changed, so that completions do nothing.
    """

    def __init__(self, config: OffloadConfig, sink: EventSink | None) -> None:
        self.config = config
        self.lock = DrainingLock()
        self.changed = Changed(self.lock)
        self.accounts = Accounts()
        self.budget = DeviceBudget(config, self.accounts)
        self.reporter = Reporter(sink, self.accounts)
        self.pending_bytes = 0
        self.events = 0
        self.largest_moved_bytes = 0
        self.late_s = 0.0
        self.coded = True
        self.watches_host = False
        self.stopped = False
        self.interrupted = False
        self.flush_tiers: Callable[[], Callable[[], None] | None] = lambda: None
        """Returns what begins everything that waits for a later moment."""

    def begin_all(self) -> None:
        """Begin everything that waits for a later moment, in every tier, before this thread waits for what is pending.

        A batch that waits for more records would stay pending for ever: this thread adds none. Call it before the
        condition is looked at, as what begins may also be given up at once, and nobody notifies this thread of that.
        """
        flush = self.flush_tiers()
        if flush is not None:
            flush()

    def after_fork_in_child(self) -> None:
        """Take a new lock, as the old one may have been held when the process forked, and start nothing any more."""
        self.stopped = True
        self.reporter.sink = None
        self.reporter.unsaid.clear()
        before = self.lock
        self.lock = DrainingLock(before.noted)
        self.lock.after_release = before.after_release
        self.changed = Changed(self.lock)
