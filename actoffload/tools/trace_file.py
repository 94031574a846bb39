"""Reads and checks the trace of a run (``trace="run.json"``), and sorts its events by kind. Needs no torch.

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
from ..planning.json_input import convert, parse, read_file

MOST_BYTES = 1 << 30
"""The largest file. A step of a thousand tensors takes half a MiB."""
PHASES = ("forward", "backward", "optimizer")
LINKS = ("host write", "disk write", "disk read", "host read")
WAIT = "wait for "
OTHERS = ", by others"
"""The suffix of a link's name for transfers of another library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase, a transfer, a wait or, without a duration, a note: another plan, a failure that did no harm.

    Attributes:
        name: of a transfer, the module that saved the tensor.
        track: the track of a viewer that shows it.
        module: the module that saved the tensor, or that was about to save one; "" if it is not known.
        nbytes: of the tensor; of a transfer the bytes on the link, alignment included.
        microbatch: of a phase its number, from 1; of an optimizer the number of the last one before it.
        tensors: of a transfer, for each tensor the module that saved it, or None, and its bytes.
    """

    name: str
    begin_s: float
    end_s: float
    track: str = ""
    module: str = ""
    nbytes: int = 0
    microbatch: int = 0
    tensors: tuple[tuple[str | None, int], ...] = ()

    @property
    def duration_s(self) -> float:
        """From its begin to its end."""
        return self.end_s - self.begin_s

    @property
    def on_device(self) -> bool:
        """Whether its times are the device's (virtual on a simulated device), else the host's."""
        return self.track.startswith("device ")

    @property
    def link(self) -> str:
        """The link of a transfer and its way: ``"disk write"`` (away from the device), ``"host read"``, ..."""
        # Transfers of one link that overlap lie on numbered lanes.
        return self.track.partition(" #")[0].removesuffix(OTHERS)

    @property
    def ours(self) -> bool:
        """Whether this library moved the bytes. For another one, such as DeepSpeed, the times are of its calls."""
        return OTHERS not in self.track

    @property
    def reason(self) -> str:
        """Of a wait: ``"data"`` (backward waited for a tensor) or ``"room"`` (memory had to leave first)."""
        return self.name.removeprefix(WAIT)


Amount = tuple[float, float, float]
"""Begin and end in seconds, and an amount that is spread evenly over the time between: bytes, or seconds of work."""


@dataclass(slots=True)
class CounterValues:
    """Values over time: ascending moments, and by the name of a series its value at each of them."""

    times_s: list[float] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        """Add a moment. A series without a new value keeps its last one."""
        # A new series gets zeros for earlier moments, so that all series stay as long as `times_s`.
        for name in values.keys() - self.series.keys():
            self.series[name] = [0.0] * len(self.times_s)
        for name, known in self.series.items():
            known.append(float(values.get(name, known[-1] if known else 0.0)))
        self.times_s.append(time_s)

    def at(self, time_s: float) -> dict[str, float]:
        """Return the values at a moment; 0 before the first."""
        place = bisect_right(self.times_s, time_s) - 1
        return {name: known[place] if place >= 0 else 0.0 for name, known in self.series.items()}

    def amounts(self, name: str, begin_s: float, end_s: float) -> list[Amount]:
        """Return what a rate comes to, for each of its values between two moments. The last value is for no time."""
        first, last = bisect_right(self.times_s, begin_s) - 1, bisect_right(self.times_s, end_s)
        place = slice(max(0, first), last)
        times_s, rates = self.times_s[place], self.series.get(name, [])[place]
        ends = [*times_s[1:], *self.times_s[last : last + 1]]
        return [(b, e, rate * (e - b)) for b, e, rate in zip(times_s, ends, rates, strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A trace that passed all checks. Its events are sorted by their begin.

    Attributes:
        truncated: whether the process was killed, its disk was full, or it still runs. Facts that a run stores at its
            end are then missing.
        metadata: the facts of the run by name: ``machine``, ``config``, ``statistics``, ``plan``, ...
        phases: forwards, backwards and optimizers' steps.
        counters: by name. ``memory``: bytes by kind; ``memory total``: their measured sum; ``memory with nothing
            moved``: that sum if all tensors had stayed; ``host pool`` and ``disk``: bytes in use; ``processors``: the
            number in use by this process; ``drives``: bytes per second that all programs write and read on the disks.
    """

    path: str
    truncated: bool
    metadata: Mapping[str, Any]
    phases: tuple[Span, ...]
    transfers: tuple[Span, ...]
    waits: tuple[Span, ...]
    notes: tuple[Span, ...]
    counters: Mapping[str, CounterValues]

    def steps(self, *, on_device: bool = False) -> list[tuple[float, float]]:
        """Return begin and end of each step: from the first forward after an optimizer's step to the next such forward.

        In a trace without an optimizer each forward with its backward is a step. An evaluation belongs to the step
        that follows it, and to none at the end of the run. ``on_device``: by the device's phases.
        """
        # The device runs behind the host, so only phases of the same side follow each other in order.
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
        # A forward at the end of the run without a backward after it is an evaluation, and no step.
        if begins and before == "forward" and any(phase.name == "backward" for phase in phases):
            backward_s = max(phase.begin_s for phase in phases if phase.name == "backward")
            if backward_s < begins[-1]:
                del begins[-1], ends[-1]
        return list(zip(begins, ends, strict=False))  # not strict: without a begin there is still one end


def load(path: str | os.PathLike[str], *, truncated_ok: bool = False) -> TraceFile:
    """Read and check the trace of a run; ``truncated_ok`` accepts one without its end.

    Raises:
        TraceFileError: there is no such file, or it is no trace of this library, incomplete, broken, or without a step.
    """
    name = printable(os.fspath(path))  # messages and the page show it
    try:
        content = read_file(path, MOST_BYTES)
    except OSError as error:
        raise TraceFileError(f"{name}: cannot be read ({error.strerror}): give the file of a run's trace=") from error
    truncated = content.startswith(b"[")  # a run writes a list of events, and makes it an object only at its end
    try:
        data = _incomplete(content) if truncated else parse(content, _Whole, most_bytes=MOST_BYTES)
    except ValueError as error:
        raise TraceFileError(f"{name}: no trace ({printable(str(error))}): give the file of a run's trace=") from error
    events = data.traceEvents
    about = next((e.args for e in events if e.ph == "M" and e.name == "actoffload"), None)
    if about is None:
        remedy = "it is a trace of another program: give the file of trace=, or of `actoffload trace`"
        raise TraceFileError(f"{name}: {remedy}")
    if truncated and not truncated_ok:
        raise TraceFileError(
            f"{name}: truncated after {len(events)} events: the process was killed before it ended the file, its disk "
            "was full, or it still runs. `actoffload top`, load(..., truncated_ok=True) and Perfetto show what is there"
        )
    try:
        found = _sorted(events)
    except ValueError as error:
        raise TraceFileError(f"{name}: broken ({printable(str(error))}): trace the run again") from error
    if not found["phases"]:
        raise TraceFileError(f"{name}: empty: no forward ran inside an offloading context: attach() the model")
    return TraceFile(
        path=name,
        truncated=truncated,
        metadata={**about, **data.otherData},
        **found,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """An event in the form of a file."""

    ph: str
    name: str = ""
    ts: float | None = None
    dur: float | None = None
    tid: int | str = 0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Args:
    """The arguments of an event other than a counter."""

    module: str = ""
    bytes: int = 0
    microbatch: int = 0
    tensors: tuple[tuple[str | None, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """A complete file."""

    # The names of Chrome's trace format.
    traceEvents: tuple[_Event, ...]
    otherData: dict[str, Any] = field(default_factory=dict)


def _incomplete(content: bytes) -> _Whole:
    """Return the events of a file without its end, which has one event on each line."""
    events = []
    for line in content[1:].splitlines():
        with suppress(ValueError):  # a killed process may leave half of an event on the last line
            events.append(parse(line.strip().rstrip(b","), _Event))
    return _Whole(traceEvents=tuple(events))


def _sorted(events: Sequence[_Event]) -> dict[str, Any]:
    """Return the events by kind, with times from the first event on.

    Raises:
        ValueError: an event has arguments of another type.
    """
    timed = [(convert(event.ts, float), event) for event in events if event.ph != "M"]
    origin = min((ts for ts, _ in timed), default=0.0)
    tracks = {e.tid: convert(e.args.get("name"), str) for e in events if e.ph == "M" and e.name == "thread_name"}
    found: dict[str, list[Span]] = {"phases": [], "transfers": [], "waits": [], "notes": []}
    counters: dict[str, CounterValues] = {}
    # A run writes a span as it ends, so the file is in no order of begins.
    for ts, event in sorted(timed, key=lambda each: each[0]):
        if event.ph in ("s", "f"):  # an arrow, in a trace of an earlier version
            continue
        begin_s = (ts - origin) / 1e6
        if event.ph == "C":  # before the typed arguments, as a counter names its own series there
            counters.setdefault(event.name, CounterValues()).add(begin_s, convert(event.args, dict[str, float]))
            continue
        args, lasts_s = convert(event.args, _Args), 0.0 if event.ph == "i" else convert(event.dur, float) / 1e6
        common: dict[str, Any] = {"name": event.name, "begin_s": begin_s, "end_s": begin_s + lasts_s}
        common |= {"track": tracks.get(event.tid, ""), "module": args.module, "nbytes": args.bytes}
        span = Span(**common, microbatch=args.microbatch, tensors=args.tensors)
        if event.ph == "i":
            found["notes"].append(span)
        elif event.name.startswith(WAIT):
            found["waits"].append(span)
        elif event.name in PHASES:
            found["phases"].append(span)
        elif span.link in LINKS:
            found["transfers"].append(span)
    return {**{kind: tuple(spans) for kind, spans in found.items()}, "counters": counters}
