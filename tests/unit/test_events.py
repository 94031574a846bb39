"""Trace events, the Chrome trace that they become, and what a step tells of itself by them."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from actoffload.events import ChromeTraceSink, EventKind, TraceEvent, open_sink
from tests.harness import Chain, MakeOffloader, batch, run_in_threads, train_step


def _event(**changes: Any) -> TraceEvent:
    values: dict[str, Any] = {"kind": EventKind.WRITE, "time_s": 1.5, "record": 7, "nbytes": 4096}
    return TraceEvent(**(values | changes))


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


def test_events_from_several_threads_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    sink = ChromeTraceSink(file)

    def emit() -> None:
        for _ in range(200):
            sink(_event())

    run_in_threads(*[emit] * 4)
    sink.close()
    assert len(json.loads(file.read_text(encoding="utf-8"))) == 801


TENSOR_BYTES = 128 * 64 * 4


def test_a_callable_sees_every_event(make_offloader: MakeOffloader) -> None:
    events: list[TraceEvent] = []
    offloader = make_offloader(trace=events.append)
    train_step(Chain(), batch(), offloader, between=offloader.synchronize)
    offloader.close()
    kinds = Counter(event.kind for event in events)
    assert kinds[EventKind.PACK] == kinds[EventKind.RELEASE] == len({event.record for event in events})
    assert kinds[EventKind.WRITE] == kinds[EventKind.PACK]
    assert 0 < kinds[EventKind.READ] <= kinds[EventKind.WRITE]
    assert all(event.nbytes == TENSOR_BYTES and event.duration_s >= 0 for event in events)
    per_record: dict[int, list[EventKind]] = {}
    for event in events:
        per_record.setdefault(event.record, []).append(event.kind)
    for story in per_record.values():
        assert story[0] is EventKind.PACK
        assert story[-1] is EventKind.RELEASE


def test_a_trace_file_is_valid_json_after_close(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    offloader = make_offloader(trace=file, min_bytes="16KiB")
    train_step(Chain(), batch(), offloader, between=offloader.synchronize)
    train_step(Chain(), batch(rows=4), offloader)
    offloader.close()
    rows = json.loads(file.read_text(encoding="utf-8"))[:-1]
    assert {row["cat"] for row in rows} >= {"pack", "write", "read", "release"}
    assert {row["args"]["bytes"] for row in rows} == {TENSOR_BYTES}
