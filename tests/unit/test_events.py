"""Trace events and the Chrome trace that they become."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from actoffload.events import ChromeTraceSink, EventKind, TraceEvent, now, open_sink


def _event(**changes: Any) -> TraceEvent:
    values: dict[str, Any] = {"kind": EventKind.WRITE, "time_s": 1.5, "record": 7, "nbytes": 4096}
    return TraceEvent(**(values | changes))


def test_events_are_frozen_and_know_their_thread() -> None:
    event = _event()
    assert event.thread == threading.get_ident()
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.nbytes = 1  # type: ignore[misc]


def test_no_trace_means_no_sink() -> None:
    assert open_sink(None) is None


def test_a_callable_is_the_sink_itself() -> None:
    seen: list[TraceEvent] = []
    sink = open_sink(seen.append)
    assert sink is not None
    sink(_event())
    assert seen == [_event()]


def test_a_path_becomes_a_chrome_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    sink = open_sink(file)
    assert isinstance(sink, ChromeTraceSink)
    sink(_event(duration_s=0.25, detail="block 3"))
    sink(_event(kind=EventKind.CANCEL))
    sink.close()
    span, instant, end = json.loads(file.read_text(encoding="utf-8"))
    assert (span["name"], span["cat"], span["ph"]) == ("block 3", "write", "X")
    assert (span["ts"], span["dur"]) == (1.5e6, 0.25e6)
    assert span["args"] == {"record": 7, "bytes": 4096}
    assert (span["pid"], span["tid"]) == (os.getpid(), threading.get_ident())
    assert (instant["name"], instant["ph"], instant["s"]) == ("cancel", "i", "t")
    assert end == {}


def test_a_trace_that_was_never_closed_can_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    sink = ChromeTraceSink(file)
    sink(_event())
    sink._file.flush()
    rows = json.loads(file.read_text(encoding="utf-8").rstrip().rstrip(",") + "]")
    sink.close()
    assert len(rows) == 1


def test_close_twice_and_late_events_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    sink = ChromeTraceSink(file)
    sink.close()
    sink(_event())
    sink.close()
    assert json.loads(file.read_text(encoding="utf-8")) == [{}]


def test_events_from_several_threads_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    sink = ChromeTraceSink(file)

    def emit() -> None:
        for _ in range(200):
            sink(_event())

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    assert len(json.loads(file.read_text(encoding="utf-8"))) == 801


def test_an_unusable_trace_path_raises_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        open_sink(tmp_path / "missing" / "trace.json")


def test_the_clock_goes_forward() -> None:
    assert now() <= now()
