"""The file of a trace, in Chrome's trace event format, which a thread writes during the run. It knows no tensors.

While the file is open it is an array without its end, which the format allows, so that a killed run still has its
trace. `TraceWriter.close` makes it an object: it changes the first few bytes, and appends the facts at the end.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

FLUSH_S = 0.25
"""The time between two writes, whose events a killed run loses."""
MOST_ROWS = 200_000
"""At most this many events wait to be written, about 60 MB; further events are counted and dropped."""
TRACK_IDS = 2_000_000_000
"""The first number of a track. No thread of the system has such a number, so that traces can be merged."""
ORDER = (
    "steps",
    "phases",
    "waits",
    "device phases",
    "device waits",
    "host write",
    "disk write",
    "disk read",
    "host read",
)
"""The tracks from top to bottom, by the begins of their names; others follow."""
QUARTER_S = 7_889_238
"""Times count from the last multiple of a quarter of a year, as in ``torch.profiler``, so that a double holds them."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_ARRAY, _OBJECT = b"[               ", b'{"traceEvents":['
Row = tuple[str, str, str, float, float, Mapping[str, Any] | None]
"""Phase letter of the format, track, name, begin and duration in seconds, arguments."""


class TraceWriter:
    """The writer of one file. Any thread adds events to it, at the cost of an append.

    Args:
        path: the file; an old file is overwritten.
        about: the facts of the run at its beginning, ready for JSON.

    Attributes:
        dropped: events that came faster than the thread could write them.
        failed: why nothing is written any more, or "".
        running: the phases of each thread, for all users of the file: spans of one thread must nest.
        forwards: how many have begun.
        opened: how often `open` was called.
        stepped_s: when an optimizer has stepped since the last forward began; None if it has not.
    """

    def __init__(self, path: str, about: Mapping[str, Any]) -> None:
        self.path = path
        self.dropped = 0
        self.failed = ""
        self.users = self.opened = self.forwards = self._steps = 0
        self.stepped_s: float | None = None
        self._step_begin_s: float | None = None
        self.running = threading.local()
        # The largest of five: a pause between the readings of the two clocks makes a difference smaller.
        unix_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(5))
        self.base_ns = time.time_ns() // (QUARTER_S * 10**9) * QUARTER_S * 10**9
        self._shift_us = (unix_ns - self.base_ns) / 1e3
        self._pid = os.getpid()
        self._rows: deque[Row] = deque()
        self._tracks: dict[str, int] = {}
        self._lanes: dict[str, list[float]] = {}
        self._writing = threading.Lock()
        self._stopped = threading.Event()
        self._end = 0
        self._about = {**about, "base_ns": self.base_ns}
        self._file = os.open(path, _FLAGS | os.O_TRUNC, 0o666)
        name = {"name": f"actoffload, rank {about.get('rank', 0)}"}
        self._began_us = (time.time_ns() - self.base_ns) / 1e3
        self._put(_ARRAY + b"\n" + self._metadata("process_name", 0, name))
        self._put(self._metadata("actoffload", 0, self._about))

    # -- any thread ---------------------------------------------------------------------------------------------------

    def span(self, track: str, name: str, begin_s: float, end_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Add an event with a duration. Two spans of a track must be apart, or nest."""
        self._add(("X", track, name, begin_s, max(0.0, end_s - begin_s), args))

    def forward_begins(self, begin_s: float) -> None:
        """Count a forward. The first one after an optimizer's step ends the span of a step, and begins the next."""
        self.forwards += 1
        self._end_step(begin_s)
        if self._step_begin_s is None:
            self._step_begin_s = begin_s

    def _end_step(self, end_s: float | None) -> None:
        if self.stepped_s is not None and self._step_begin_s is not None:
            self._steps += 1
            self.span("steps", f"step {self._steps}", self._step_begin_s, self.stepped_s if end_s is None else end_s)
            self._step_begin_s = self.stepped_s = None

    def instant(self, track: str, name: str, time_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Add an event without a duration."""
        self._add(("i", track, name, time_s, 0.0, args))

    def counter(self, name: str, time_s: float, values: Mapping[str, float]) -> None:
        """Add the values of a counter from now on. A series that is left out keeps its value."""
        self._add(("C", "", name, time_s, 0.0, values))

    def _add(self, row: Row) -> None:
        if len(self._rows) < MOST_ROWS:
            self._rows.append(row)
        else:
            self.dropped += 1

    # -- the file -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to write, or continue where `close` has ended the file."""
        with self._writing:
            self.users += 1
            self.opened += 1
            if self.users > 1:
                return
            if self._file < 0:
                self._file = os.open(self.path, _FLAGS, 0o666)
                os.pwrite(self._file, _ARRAY, 0)
                os.truncate(self._file, self._end)
            self._stopped = threading.Event()  # a new one: the old thread may not have seen the old one set
        threading.Thread(target=self._run, args=(self._stopped,), name="actoffload-trace", daemon=True).start()

    def close(self, known: Mapping[str, Any]) -> None:
        """Undo one `open`; the last call ends the file, with the facts at the end of the run."""
        self._end_step(None)
        self.flush()  # before the lock, which it takes
        missing = {"dropped_events": self.dropped, "ended_early": self.failed}
        other = {**self._about, **known, **missing, "offloaders": self.opened}
        end = {"displayTimeUnit": "ms", "baseTimeNanoseconds": self.base_ns, "otherData": other}
        with self._writing:
            self.users -= 1
            if self.users:
                return
            self._stopped.set()
            with suppress(OSError):  # on an error the file stays an array
                os.truncate(self._file, self._end)  # cut off the part of a write that failed
                _write(self._file, b"\n]," + _json(end)[1:] + b"\n", self._end)
                _write(self._file, _OBJECT, 0)
            os.close(self._file)
            self._file = -1

    def flush(self) -> None:
        """Write the events so far. Events after the last `close` wait until the file is opened again."""
        with self._writing:
            while self._rows and not self.failed and self._file >= 0:
                lines = [self._line(self._rows.popleft()) for _ in range(min(1000, len(self._rows)))]
                try:
                    self._put(b",\n".join(lines))
                except OSError as error:
                    self.failed = f"{self.path}: {error}"
            if self.failed:
                self._rows.clear()

    def after_fork_in_child(self) -> None:
        """Write nothing more: the file is the parent's."""
        self.failed = "a forked process"
        self._rows.clear()
        self._writing = threading.Lock()  # a thread that this process does not have may hold the old one

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.wait(FLUSH_S):
            self.flush()

    def _put(self, data: bytes) -> None:
        """Append to the file."""
        if self._end:
            data = b",\n" + data
        _write(self._file, data, self._end)
        self._end += len(data)

    def _line(self, row: Row) -> bytes:
        letter, track, name, begin_s, duration_s, args = row
        event: dict[str, Any] = {"ph": letter, "name": name, "pid": self._pid}
        event["ts"] = round(begin_s * 1e6 + self._shift_us, 3)
        before = b""
        if letter != "C":
            if track.endswith("*"):  # transfers overlap, so each goes to the first free lane
                track = self._lane(track, begin_s, duration_s)
            before, event["tid"] = self._track(track)
        if letter == "X":
            event["cat"], event["dur"] = track.partition(" #")[0], round(duration_s * 1e6, 3)
        elif letter == "i":
            event["cat"], event["s"] = "note", "p"
        if args:
            event["args"] = args
        return before + _json(event) + self._flow(event)

    def _flow(self, event: dict[str, Any]) -> bytes:
        """Return the events that join the write of each tensor with its reads: a viewer draws them as arrows."""
        link, _, way = event.get("cat", "").partition(" ")
        bound = {"ph": "s"} if way == "write" else {"ph": "f", "bp": "e"}
        common = {**bound, "name": "saved tensor", "cat": link, "pid": self._pid, "tid": event.get("tid")}
        numbers = event.get("args", {}).get("records", ())
        return b"".join(b",\n" + _json({**common, "ts": event["ts"], "id": number}) for number in numbers)

    def _lane(self, track: str, begin_s: float, duration_s: float) -> str:
        ends = self._lanes.setdefault(track, [])
        lane = next((number for number, end_s in enumerate(ends) if end_s <= begin_s), len(ends))
        ends[lane : lane + 1] = [begin_s + duration_s]
        return f"{track[:-1]} #{lane + 1}"

    def _track(self, track: str) -> tuple[bytes, int]:
        """Return the events that name a new track, or nothing, and its number."""
        number = self._tracks.get(track)
        if number is not None:
            return b"", number
        number = self._tracks[track] = TRACK_IDS + len(self._tracks)
        name = self._metadata("thread_name", number, {"name": track})
        kind = next((place for place, name in enumerate(ORDER) if track.startswith(name)), len(ORDER))
        order = self._metadata("thread_sort_index", number, {"sort_index": 1000 * kind + len(self._tracks)})
        return name + b",\n" + order + b",\n", number

    def _metadata(self, name: str, track: int, args: Mapping[str, Any]) -> bytes:
        event = {"ph": "M", "name": name, "pid": self._pid, "tid": track, "ts": round(self._began_us, 3)}
        return _json({**event, "args": args})


def _write(file: int, data: bytes, place: int) -> None:
    """Write all of ``data``."""
    while data:
        written = os.pwrite(file, data, place)  # may be a part
        place += written
        data = data[written:]


_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode


def _json(value: object) -> bytes:
    return _encode(value).encode()


_writers: dict[str, TraceWriter] = {}
"""The writers of this process by path: offloaders with the same file share one."""


def writer_for(path: str, about: Mapping[str, Any]) -> TraceWriter:
    """Return the writer of a file, opened; the caller closes it.

    Raises:
        OSError: the file cannot be written.
    """
    place = os.path.abspath(path)
    writer = _writers.get(place)
    if writer is None or writer.failed:
        writer = _writers[place] = TraceWriter(place, about)
    writer.open()
    return writer


def _in_child() -> None:
    for writer in _writers.values():
        writer.after_fork_in_child()
    _writers.clear()


def _at_exit() -> None:
    for writer in _writers.values():
        if writer.users:  # an offloader was dropped without `close`
            writer.users = 1  # so that this one call ends the file
            writer.close({})


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
