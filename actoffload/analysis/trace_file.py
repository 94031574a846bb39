"""Reads the trace of a run (``trace="run.json"``), checks it, and gives what is in it by kind. Needs no torch.

Times are in seconds from the first event of the file, sizes in bytes.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import TraceFileError, printable
from ..json_input import convert, parse, read_file

MOST_BYTES = 1 << 30
"""Of a file. A step of a thousand tensors takes half a MiB."""
PHASES = ("forward", "backward", "optimizer")
OTHERS = ", by others"
"""After the name of a link: another library moved it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time.

    Attributes:
        name: what it was; of a transfer, the module that saved what was moved.
        begin_s: when it began; ``end_s``: when it had ended.
        track: where a viewer shows it.
    """

    name: str
    begin_s: float
    end_s: float
    track: str

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase(Span):
    """A forward, a backward or an optimizer's step.

    Attributes:
        microbatch: which one, from 1; for an optimizer the last one before it.
        on_device: the device's own time, virtual on a simulated one; else the host's.
    """

    microbatch: int
    on_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Span):
    """Bytes that went over a link.

    Attributes:
        link: ``"disk"`` or ``"host"``; ``way``: ``"write"`` (away from the device) or ``"read"``.
        nbytes: what went over it, alignment included.
        tensors: the module that saved each tensor, or None, and its bytes.
        ours: this library moved them; else another, such as DeepSpeed, whose times are those of its calls.
    """

    link: str
    way: str
    nbytes: int
    tensors: tuple[tuple[str | None, int], ...]
    ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Span):
    """A step that waited.

    Attributes:
        reason: ``"data"`` (backward waited for a tensor) or ``"room"`` (memory had to leave first).
        module: that saved the tensor waited for, or that was about to save one; "" where it is not known.
        nbytes: the tensor's.
        on_device: a stream of the device waited; else a thread of the host's.
    """

    reason: str
    module: str
    nbytes: int
    on_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that happened at a moment: another plan, a failure that did no harm, a write that was not needed."""

    name: str
    time_s: float
    module: str = ""
    nbytes: int = 0


@dataclass(slots=True)
class Counter:
    """Values over time.

    Attributes:
        times_s: the moments, ascending.
        series: the values at these moments by the name of the series, each as long as ``times_s``.
    """

    times_s: list[float] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        """Add a moment; a series that is not named stays as it was."""
        for name in values.keys() - self.series.keys():
            self.series[name] = [0.0] * len(self.times_s)
        for name, known in self.series.items():
            known.append(float(values.get(name, known[-1] if known else 0.0)))
        self.times_s.append(time_s)

    def at(self, time_s: float) -> dict[str, float]:
        """The values at a moment; 0 before the first."""
        place = bisect_right(self.times_s, time_s) - 1
        return {name: known[place] if place >= 0 else 0.0 for name, known in self.series.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A trace that was read and found to be in order.

    Attributes:
        path: the file.
        truncated: the process was killed, or still runs: what is known only at the end is not there.
        began_unix_s: the first event, in seconds since 1970.
        metadata: what is known of the run, by name: ``machine``, ``config``, ``statistics``, ``plan``, ...
        phases: by their begin, as all that follow.
        counters: by name. ``memory``: bytes by what they are; ``memory total``: all of them, as measured;
            ``memory with nothing moved``: what that would be; ``host pool`` and ``disk``: bytes in use; a link, as
            ``disk write``: bytes per second (``bytes_per_s``), and so far while a transfer was under way (``can_do``).
    """

    path: str
    truncated: bool
    began_unix_s: float
    metadata: Mapping[str, Any]
    phases: tuple[Phase, ...]
    transfers: tuple[Moved, ...]
    waits: tuple[Wait, ...]
    notes: tuple[Note, ...]
    counters: Mapping[str, Counter]

    def steps(self, *, on_device: bool = False) -> list[tuple[float, float]]:
        """When each step began and ended: from the first forward after an optimizer's step to the next such forward.

        Where no optimizer was seen, each forward with its backward is a step. An evaluation belongs to the step that
        follows, and to none at the end of the run. ``on_device``: by the device's phases.
        """
        phases = [phase for phase in self.phases if phase.on_device == on_device]
        stepped = any(phase.name == "optimizer" for phase in phases)
        last = "optimizer" if stepped else "backward"
        begins: list[float] = []
        before = last
        for phase in phases:
            if phase.name == "forward" and before == last:
                begins.append(phase.begin_s)
            before = phase.name
        ends = [*begins[1:], max((phase.end_s for phase in phases), default=0.0)]
        if begins and before == "forward" and any(phase.name == "backward" for phase in phases):
            backward_s = max(phase.begin_s for phase in phases if phase.name == "backward")
            if backward_s < begins[-1]:
                del begins[-1], ends[-1]
        return list(zip(begins, ends, strict=False))  # no begins: no ends


def load(path: str | os.PathLike[str], *, truncated_ok: bool = False) -> TraceFile:
    """Read and check the trace of a run.

    Args:
        path: the file.
        truncated_ok: take a trace without its end as it is, not as an error.

    Raises:
        TraceFileError: there is no such file, it is no trace of ours, is not whole, is broken, or shows no step; the
            message names the file and says what to do.
    """
    name = printable(os.fspath(path))
    try:
        content = read_file(path, MOST_BYTES)
    except OSError as error:
        raise TraceFileError(f"{name}: cannot be read ({error.strerror}): give the file of a run's trace=") from error
    truncated = content.startswith(b"[")
    data = _incomplete(content) if truncated else _complete(name, content)
    events = data.traceEvents
    about = next((e.args for e in events if e.ph == "M" and e.name == "actoffload"), None)
    if about is None:
        remedy = "it is a trace of another program: give the file of trace=, or of `actoffload trace`"
        raise TraceFileError(f"{name}: {remedy}")
    if truncated and not truncated_ok:
        raise TraceFileError(
            f"{name}: truncated after {len(events)} events: the process was killed before it ended the file, or still "
            "runs. `actoffload top`, load(..., truncated_ok=True) and Perfetto show what is there"
        )
    try:
        found = _sorted(events)
        base_s = convert(about.get("base_ns"), float) / 1e9
    except ValueError as error:
        raise TraceFileError(f"{name}: broken ({printable(str(error))}): trace the run again") from error
    if not found["phases"]:
        raise TraceFileError(f"{name}: empty: no forward ran inside an offloading context: attach() the model")
    return TraceFile(
        path=name,
        truncated=truncated,
        began_unix_s=base_s + min(e.ts for e in events if e.ts is not None and e.ph != "M") / 1e6,
        metadata={**about, **data.otherData},
        **found,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """An event as a file has it; `_sorted` knows what it stands for."""

    ph: str
    name: str = ""
    ts: float | None = None
    dur: float | None = None
    tid: int | str = 0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Args:
    """The arguments of an event that is no counter."""

    module: str = ""
    bytes: int = 0
    microbatch: int = 0
    tensors: tuple[tuple[str | None, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """A file with its end."""

    traceEvents: tuple[_Event, ...]
    otherData: dict[str, Any] = field(default_factory=dict)


def _complete(name: str, content: bytes) -> _Whole:
    try:
        return parse(content, _Whole, most_bytes=MOST_BYTES)
    except ValueError as error:
        raise TraceFileError(f"{name}: no trace ({printable(str(error))}): give the file of a run's trace=") from error


def _incomplete(content: bytes) -> _Whole:
    """The events of a file without its end: one on each line, and perhaps the half of one on the last."""
    events = []
    for line in content[1:].splitlines():
        with suppress(ValueError):
            events.append(parse(line.strip().rstrip(b","), _Event))
    return _Whole(traceEvents=tuple(events))


def _sorted(events: Sequence[_Event]) -> dict[str, Any]:
    """The events by kind, with times from the first of them on.

    Raises:
        ValueError: an event has arguments of another type.
    """
    timed = [(convert(event.ts, float), event) for event in events if event.ph != "M"]
    origin = min((ts for ts, _ in timed), default=0.0)
    tracks = {e.tid: convert(e.args.get("name"), str) for e in events if e.ph == "M" and e.name == "thread_name"}
    phases: list[Phase] = []
    transfers: list[Moved] = []
    waits: list[Wait] = []
    notes: list[Note] = []
    counters: dict[str, Counter] = {}
    for ts, event in sorted(timed, key=lambda each: each[0]):
        begin_s = (ts - origin) / 1e6
        if event.ph == "C":
            counters.setdefault(event.name, Counter()).add(begin_s, convert(event.args, dict[str, float]))
            continue
        args = convert(event.args, _Args)
        if event.ph == "i":
            notes.append(Note(name=event.name, time_s=begin_s, module=args.module, nbytes=args.bytes))
            continue
        track = tracks.get(event.tid, "")
        span: dict[str, Any] = {"name": event.name, "begin_s": begin_s, "track": track}
        span["end_s"] = begin_s + convert(event.dur, float) / 1e6
        on_device = track.startswith("device ")
        lane = track.partition(" #")[0]
        link, _, way = lane.removesuffix(OTHERS).partition(" ")
        if event.name.startswith("wait for "):
            reason = event.name.removeprefix("wait for ")
            waits.append(Wait(**span, reason=reason, module=args.module, nbytes=args.bytes, on_device=on_device))
        elif event.name in PHASES:
            phases.append(Phase(**span, microbatch=args.microbatch, on_device=on_device))
        elif link in ("disk", "host"):
            moved: dict[str, Any] = {"link": link, "way": way, "nbytes": args.bytes, "ours": not lane.endswith(OTHERS)}
            transfers.append(Moved(**span, **moved, tensors=args.tensors))
    groups = {"phases": tuple(phases), "transfers": tuple(transfers), "waits": tuple(waits), "notes": tuple(notes)}
    return {**groups, "counters": counters}
