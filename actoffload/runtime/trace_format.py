"""The events of a trace in Chrome's trace event format, with times and tracks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

TRACK_IDS = 2_000_000_000
"""The first number of a track. No thread of the system has such a number, so that traces can be merged."""
ORDER = (
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
Row = tuple[str, str, str, float, float, Mapping[str, Any] | None]
"""Phase letter of the format, track, name, begin and duration in seconds, arguments."""


_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode


def to_json(value: object) -> bytes:
    """Return a value in JSON, on one line; an unknown type as its text."""
    return _encode(value).encode()


class Events:
    """Makes the events of one file. One thread at a time."""

    def __init__(self) -> None:
        # The largest of five: a pause between the readings of the two clocks makes a difference smaller.
        unix_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(5))
        self.base_ns = time.time_ns() // (QUARTER_S * 10**9) * QUARTER_S * 10**9  # from which the file's times count
        self._shift_us = (unix_ns - self.base_ns) / 1e3
        self._began_us = (time.time_ns() - self.base_ns) / 1e3
        self._pid = os.getpid()
        self._tracks: dict[str, int] = {}
        self._lanes: dict[str, list[float]] = {}

    def line(self, row: Row) -> bytes:
        """Return the event of a row, after the events that name its track, if it is new."""
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
        return before + to_json(event)

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
        name = self.metadata("thread_name", number, {"name": track})
        kind = next((place for place, name in enumerate(ORDER) if track.startswith(name)), len(ORDER))
        order = self.metadata("thread_sort_index", number, {"sort_index": 1000 * kind + len(self._tracks)})
        return name + b",\n" + order + b",\n", number

    def metadata(self, name: str, track: int, args: Mapping[str, Any]) -> bytes:
        """Return an event about the process, or about a track."""
        event = {"ph": "M", "name": name, "pid": self._pid, "tid": track, "ts": round(self._began_us, 3)}
        return to_json({**event, "args": args})
