"""The file of a trace, in Chrome's trace event format, which a thread writes during the run. It knows no tensors.

While the file is open it is an array without its end, which the format allows, so that a killed run still has its
trace. `TraceWriter.close` makes it an object: it changes the first few bytes, and appends the facts at the end.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from typing import Any

from .trace_format import Events, Row, to_json

FLUSH_S = 0.25
"""The time between two writes, whose events a killed run loses."""
MOST_ROWS = 200_000
"""At most this many events wait to be written, about 60 MB; further events are counted and dropped."""

_ARRAY, _OBJECT = b"[               ", b'{"traceEvents":['


class Running(threading.local):
    """One thread's name, and the phases that run in it, outermost first."""

    def __init__(self) -> None:
        thread = threading.current_thread()
        number = thread.native_id or thread.ident
        self.name = "main thread" if thread is threading.main_thread() else f"thread {number}"
        self.phases: list[Any] = []


class TraceWriter:
    """The writer of one file, which is overwritten. Any thread adds events to it, at the cost of an append.

    ``about``: the facts of the run at its beginning, ready for JSON.
    """

    def __init__(self, path: str, about: Mapping[str, Any]) -> None:
        self.users = 0
        self.opened = 0  # how often `open` was called
        self.dropped = 0  # events that came faster than the thread could write them
        self.failed = ""  # why nothing is written any more
        self.running = Running()  # for all users of the file: spans of one thread must nest
        self.forward_s = 0.0  # when the last forward began
        self._rows: deque[Row] = deque()
        self._writing = threading.Lock()  # guards the events and the file
        self._events = Events()
        self._about = {**about, "base_ns": self._events.base_ns}
        name = {"name": f"actoffload, rank {about.get('rank', 0)}"}
        first = [self._events.metadata("process_name", 0, name), self._events.metadata("actoffload", 0, self._about)]
        # Without a buffer, whose bytes a forked child would write once more as it ends.
        self._file = FileIO(path, "w+")
        self._length = 0  # of the events, without an end
        self._append(_ARRAY + b"\n" + b",\n".join(first))

    # -- any thread ---------------------------------------------------------------------------------------------------

    def span(self, track: str, name: str, begin_s: float, end_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Add an event with a duration. Two spans of a track must be apart, or nest."""
        self._add(("X", track, name, begin_s, max(0.0, end_s - begin_s), args))

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
            if self._file.closed:
                self._file = FileIO(self._file.name, "r+")
                _write(self._file, _ARRAY, 0)
                self._file.truncate(self._length)
        threading.Thread(target=self._run, args=(self._file,), name="actoffload-trace", daemon=True).start()

    def close(self, known: Mapping[str, Any]) -> None:
        """Undo one `open`; the last call ends the file, with the facts at the end of the run.

        After an error of the system the file stays without an end, as that of a killed run.
        """
        self.flush()  # before the lock, which it takes
        other = {**self._about, **known, "dropped_events": self.dropped, "offloaders": self.opened}
        end = {"displayTimeUnit": "ms", "baseTimeNanoseconds": self._events.base_ns, "otherData": other}
        with self._writing:
            self.users -= 1
            if self.users or self._file.closed:
                return
            with suppress(OSError):
                if not self.failed:  # else part of an event may be the last of the file
                    _write(self._file, b"\n]," + to_json(end)[1:] + b"\n", self._length)
                    _write(self._file, _OBJECT, 0)
            self._file.close()

    def flush(self) -> None:
        """Write the events so far. Events after the last `close` wait until the file is opened again."""
        with self._writing:
            while self._rows and not self.failed and not self._file.closed:
                lines = [self._events.line(self._rows.popleft()) for _ in range(min(1000, len(self._rows)))]
                try:
                    self._append(b",\n" + b",\n".join(lines))
                except OSError as error:
                    self.failed = f"{self._file.name}: {error}"
            if self.failed:
                self._rows.clear()

    def _append(self, data: bytes) -> None:
        _write(self._file, data, self._length)
        self._length += len(data)

    def after_fork_in_child(self) -> None:
        """Write nothing more: the file is the parent's."""
        self.failed = "a forked process"
        self._rows.clear()
        self._writing = threading.Lock()  # a thread that this process does not have may hold the old one

    def _run(self, file: FileIO) -> None:
        while not file.closed:
            time.sleep(FLUSH_S)
            self.flush()


def _write(file: FileIO, data: bytes, place: int) -> None:
    """Write all of ``data``."""
    while data:
        written = os.pwrite(file.fileno(), data, place)  # may be a part
        place += written
        data = data[written:]


_writers: dict[str, TraceWriter] = {}
"""The writers of this process by path: offloaders with the same file share one."""


def writer_for(path: str, about: Mapping[str, Any]) -> TraceWriter:
    """Return the writer of a file, opened; the caller closes it.

    Raises:
        OSError: the file cannot be written.
    """
    place = os.path.abspath(path)
    writer = _writers.get(place)
    if writer is None or writer.failed or not os.path.exists(place):
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
