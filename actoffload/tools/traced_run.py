"""A traced run in numbers: its usual step, memory with and without moving, links, waits and predictions."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median_low
from typing import Any

from ..errors import TraceFileError
from ..sizes import format_size, format_time
from ..tell.causes import NEXT
from .trace_file import LINKS, PHASES, Amount, CounterValues, Span, TraceFile

SAVED, AWAY = "saved activations", "away"
BEFORE = "before training"
KINDS = (BEFORE, "parameters", "optimizer state", "kept free", "temporaries", "gradients", SAVED, AWAY)
"""The uses of memory, in the order in which a chart stacks them: activations lie as a mountain on the gradients, and
those that are away above them. Before training: on the CPU the process as it was before the first forward, without
parameters. Kept free: memory that the allocator keeps, beside what is in use."""
MOST_WAITS = 10
MOST_MOMENTS = 400
"""The most moments of the step that is shown; of several that lie together, the one with the most memory."""
LABELS = {
    "steps": "steps",
    "step_s": "a step (median)",
    "peak_bytes": "memory, peak of a step",
    "peak_without_bytes": "… with nothing moved",
    "saved_peak_bytes": "saved activations, peak",
    "saved_peak_without_bytes": "… with nothing moved",
    "moved_bytes": "leaves in a step (mean)",
    "wait_s": "waits in a step (mean)",
}
"""Labels for the names in `Run.numbers`."""
Row = dict[str, Any]
"""The figures of a link, a kind of phase or a wait, ready for JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes from a moment of the step on: for each of `KINDS`, as measured in all, and that if nothing had moved."""

    time_s: float
    by_kind: dict[str, float]
    total: float
    without: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A trace and the step that represents it; made by `look_at`.

    Attributes:
        count: the number of its steps.
        step_s: their median, without the steps before the last plan.
        shown: the number of the step of median length, from 0.
        begin_s: its begin on the host or the device; ``end_s``: its end on both.
    """

    trace: TraceFile
    count: int
    step_s: float
    shown: int
    begin_s: float
    end_s: float

    @property
    def name(self) -> str:
        """The name of the file."""
        return os.path.basename(self.trace.path)

    def known(self, name: str) -> Mapping[str, Any]:
        """Return the facts that the trace has at its end under a name; empty if there are none."""
        found = self.trace.metadata.get(name)
        return found if isinstance(found, dict) else {}  # a file may hold anything under the name

    def numbers(self) -> dict[str, float]:
        """Return the numbers that sum a run up (see `LABELS`): bytes, seconds, and a count."""
        memory, statistics = self.memory(), self.known("statistics")
        saved = [moment.by_kind[SAVED] for moment in memory]
        unmoved = [moment.by_kind[SAVED] + moment.by_kind[AWAY] for moment in memory]
        ours = [moved for moved in self.trace.transfers if moved.ours]
        left = [sum(moved.nbytes for moved in ours if moved.link == f"{link} write") for link in ("host", "disk")]
        return {
            "steps": self.count,
            "step_s": self.step_s,
            "peak_bytes": max(moment.total for moment in memory),
            "peak_without_bytes": max(moment.without for moment in memory),
            # A truncated trace has no statistics, and the step that is shown stands for all.
            "saved_peak_bytes": statistics.get("plan_peak_bytes", max(saved)),
            "saved_peak_without_bytes": statistics.get("baseline_peak_bytes", max(unmoved)),
            # The larger one: a tensor goes to disk through host memory, and the sum would count it twice.
            "moved_bytes": max(left) / self.count,
            "wait_s": sum(wait.duration_s for wait in self.trace.waits) / self.count,
        }

    def memory(self) -> list[Moment]:
        """Return the memory over the step that is shown."""
        begin_s, end_s = self.begin_s, self.end_s
        # The ends of the step as well, because counters have moments of their own alone.
        times = self.trace.counters["memory"].times_s
        moments = [self._at(at_s) for at_s in (begin_s, *(t for t in times if begin_s < t < end_s), end_s)]
        # Gradients and states that were there before training are kinds of their own, so the least rest bounds it.
        least = min(moment.by_kind[BEFORE] for moment in moments)
        for kinds in (moment.by_kind for moment in moments):
            kinds["temporaries"] += kinds[BEFORE] - least
            kinds[BEFORE] = least
        each = -(-len(moments) // MOST_MOMENTS)
        if each == 1:
            return moments
        groups = (moments[place : place + each] for place in range(0, len(moments), each))
        return [max(group, key=lambda moment: moment.total) for group in groups]

    def _at(self, time_s: float) -> Moment:
        counters = self.trace.counters
        values = counters["memory"].at(time_s)
        total, without, free = (
            counters[name].at(time_s)["bytes"] if name in counters and counters[name].times_s else 0.0
            for name in ("memory total", "memory with nothing moved", "kept free")
        )
        known = {name: values.get(name, 0.0) for name in ("optimizer state", "gradients")}
        known[SAVED] = sum(nbytes for name, nbytes in values.items() if name.startswith("saved"))
        left = max(0.0, total - sum(known.values()))
        parameters, before, away = min(left, values.get("parameters", 0.0)), 0.0, without - total
        left -= parameters
        if "process memory" not in counters:  # the total is the process's, of which the free memory is a part
            away += free
            free = min(left, free)
            left -= free
            process = self.known("statistics").get("process_before_bytes", math.inf)
            before = min(left, max(0.0, process - parameters))
        known |= {BEFORE: before, "parameters": parameters, "temporaries": left - before}
        known |= {"kept free": max(0.0, free), AWAY: max(0.0, away)}
        by_kind = {kind: known[kind] for kind in KINDS}
        return Moment(time_s=time_s - self.begin_s, by_kind=by_kind, total=total, without=without)

    def links(self) -> list[Row]:
        """Return a row for each direction of a link that moved bytes in the run.

        ``nbytes`` of this library and ``others_bytes``: in the run. ``can_do``: bytes per second over the time with a
        transfer, 0 if there was none. ``used``: the part of the step that is shown in which one was under way.
        """
        found: list[Row] = []
        for name in LINKS:
            moved = [one for one in self.trace.transfers if one.link == name]
            nbytes, busy_s = sum(one.nbytes for one in moved), _busy_s(moved, 0.0, math.inf)
            ours = sum(one.nbytes for one in moved if one.ours)
            others = round(self.moved(name, 0.0, self.trace.phases[-1].end_s, ours=False)[0])
            if ours or others:
                used = _busy_s(moved, self.begin_s, self.end_s) / (self.end_s - self.begin_s)
                can_do = nbytes / busy_s if busy_s else 0.0
                row = {"name": name, "used": used, "can_do": can_do, "nbytes": ours, "others_bytes": others}
                found.append(row)
        return found

    def moved(self, link: str, begin_s: float, end_s: float, count: int = 1, *, ours: bool) -> list[float]:
        """Return the bytes on a link in each of ``count`` equal parts of a time: of this library, or of others.

        On a disk others are all programs: the kernel's count, less our bytes. On the link of a device they are what
        another library has reported (`Offloader.traced`).
        """
        device, _, way = link.partition(" ")
        counted = device == "disk" and not ours
        spans = (one for one in self.trace.transfers if one.link == link and one.ours is (ours or counted))
        found = spread(((one.begin_s, one.end_s, one.nbytes) for one in spans), begin_s, end_s, count)
        if not counted:
            return found
        by_all = self._rate("drives", way, begin_s, end_s, count)
        left = list(accumulate(nbytes - own for nbytes, own in zip(by_all, found, strict=True)))
        # Within a transfer the two counts differ, so only bytes that are left at the end are others'.
        sums = accumulate((min(nbytes, left[-1]) for nbytes in left), max, initial=0.0)
        return [after - before for before, after in pairwise(sums)]

    def processor_s(self, begin_s: float, end_s: float, count: int = 1) -> list[float]:
        """Return the processor time that this process used in each of ``count`` equal parts of a time."""
        return self._rate("processors", "in use", begin_s, end_s, count)

    def _rate(self, counter: str, name: str, begin_s: float, end_s: float, count: int) -> list[float]:
        values = self.trace.counters.get(counter, CounterValues())
        return spread(values.amounts(name, begin_s, end_s), begin_s, end_s, count)

    @property
    def threads(self) -> int:
        """The number of threads with which PyTorch computes on the CPU."""
        return int(self.known("machine").get("threads", 1))

    def _idle_s(self, begin_s: float, end_s: float) -> float:
        on_device = [phase for phase in self.trace.phases if phase.on_device]
        if not on_device:
            return max(0.0, end_s - begin_s - sum(self.processor_s(begin_s, end_s)) / self.threads)
        waits = [wait for wait in self.trace.waits if wait.on_device]
        return end_s - begin_s - _busy_s(on_device, begin_s, end_s) + _busy_s(waits, begin_s, end_s)

    def uses(self) -> list[Row]:
        """Return a row for each kind of phase of the step that is shown, and at last one for the step.

        ``length_s``: of all its micro-batches. On a device it is the device's time, but of an optimizer on the host.
        ``processor_s``: of all threads of this process. ``idle_s``: in which the device computed nothing; on the CPU,
        what PyTorch's threads left of their processors. ``moved`` and ``by_others``: bytes by link and way.
        """
        parts = {"phases": self.trace.phases, "transfers": self.trace.transfers, "waits": self.trace.waits}
        of_step: dict[str, Any] = {part: tuple(filter(self._is_in_step, spans)) for part, spans in parts.items()}
        step, times = replace(self, trace=replace(self.trace, **of_step)), {}
        for name in PHASES:
            spans = [one for one in step.trace.phases if one.name == name]
            spans = [one for one in spans if one.on_device] or spans
            times[name] = [(max(one.begin_s, self.begin_s), min(one.end_s, self.end_s)) for one in spans]
        times["step"] = [(self.begin_s, self.end_s)]
        return [step._use(name, parts) for name, parts in times.items() if parts]

    def _use(self, name: str, parts: Sequence[tuple[float, float]]) -> Row:
        moved, by_others = (
            {link: sum(self.moved(link, *part, ours=ours)[0] for part in parts) for link in LINKS}
            for ours in (True, False)
        )
        return {
            "name": name,
            "length_s": sum(end_s - begin_s for begin_s, end_s in parts),
            "processor_s": sum(sum(self.processor_s(*part)) for part in parts),
            "idle_s": sum(self._idle_s(*part) for part in parts),
            "moved": moved,
            "by_others": by_others,
        }

    def _is_in_step(self, span: Span) -> bool:
        return bool(span.duration_s and span.begin_s < self.end_s and span.end_s > self.begin_s)

    def phases(self) -> list[Span]:
        """Return the host's phases of the step, with times from its begin on."""
        return self.of_step([phase for phase in self.trace.phases if not phase.on_device])

    def of_step(self, spans: Sequence[Span]) -> list[Span]:
        """Return those of the trace's spans that are in the step, with times from its begin on."""
        return [
            replace(span, begin_s=span.begin_s - self.begin_s, end_s=min(span.end_s, self.end_s) - self.begin_s)
            for span in spans
            if self._is_in_step(span)
        ]

    def dearest_waits(self) -> list[Row]:
        """Return a row for each of the `MOST_WAITS` modules and `Span.reason` with the longest waits of the run."""
        groups: dict[tuple[str, str], list[Span]] = {}
        for wait in (wait for wait in self.trace.waits if wait.duration_s):
            groups.setdefault((wait.module or "(no module)", wait.reason), []).append(wait)
        found: list[Row] = []
        for (module, reason), waits in groups.items():
            total_s, nbytes = sum(wait.duration_s for wait in waits), max(wait.nbytes for wait in waits)
            row = {"module": module, "reason": reason, "total_s": total_s, "count": len(waits), "nbytes": nbytes}
            found.append(row)
        return sorted(found, key=lambda row: -row["total_s"])[:MOST_WAITS]

    @property
    def planned_for(self) -> str:
        """The unit of the plan: a step, or with accumulated gradients a micro-batch of it."""
        return self.trace.metadata.get("planned_for") or "a step"

    @property
    def machine_changed(self) -> str:
        """The reason why the prediction must miss, as a sentence; empty if there is none."""
        text: str = self.trace.metadata.get("machine_changed") or ""
        return f"{text[:1].upper()}{text[1:]}." if text else ""

    def predictions(self) -> list[tuple[str, float, float | None]]:
        """Return the plan's prediction for `planned_for` and the observed value of ``step_s`` and ``peak_bytes``."""
        predicted, whole = self.known("predicted"), self.planned_for == "a step"
        step_s = self.step_s if whole else self.known("seen").get("step_s")
        seen = {"step_s": step_s, "peak_bytes": self.known("statistics").get("plan_peak_bytes")}
        return [(name, value, seen.get(name)) for name, value in predicted.items() if value is not None]

    @property
    def report(self) -> str:
        """The run's own `Offloader.report`; of a trace without an end, its steps."""
        return self.trace.metadata.get("report") or f"{self.count} steps so far, {format_time(self.step_s)} each"

    def what_limits(self) -> str:
        """Return the limit of the step, as in its `report`; empty if the trace has no end."""
        told = next(iter(self._after("diagnosis: ")), "")
        return told[:1].upper() + told[1:]

    @property
    def next_steps(self) -> list[str]:
        """The remedies for the limits of the step, as in its `report`."""
        return self._after(NEXT)

    def _after(self, begin: str) -> list[str]:
        return [line.removeprefix(begin) for line in self.report.splitlines() if line.startswith(begin)]

    def about(self) -> str:
        """Return the machine, the versions and the options of the run as one line of text."""
        data, machine = self.trace.metadata, self.known("machine")
        config, parts = self.known("config"), [str(machine.get("device", "?"))]
        parts += [f"{machine.get('cores')} cores", f"torch {data.get('torch')}", f"target {config.get('target')}"]
        parts += [f"policy {config.get('policy')}"]
        if data.get("ranks", 1) > 1:
            parts.append(f"rank {data['rank']} of {data['ranks']}")
        if data.get("offloaders", 1) > 1:
            parts.append(f"{data['offloaders']} offloaders: what is counted is the last one's")
        if data.get("dropped_events"):
            parts.append(f"{data['dropped_events']} events came too fast and are missing")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers and texts but the series over time, ready for JSON."""
        return {
            "path": self.trace.path,
            "about": self.about(),
            "step_shown": self.shown + 1,
            **self.numbers(),
            "links": self.links(),
            "phases": self.uses(),
            "dearest_waits": self.dearest_waits(),
            "statistics": self.known("statistics"),
            "report": self.report,
            "predicted": {name: {"predicted": value, "seen": seen} for name, value, seen in self.predictions()},
            "what_limits": self.what_limits(),
            "next_steps": self.next_steps,
        }


def spread(amounts: Iterable[Amount], begin_s: float, end_s: float, count: int) -> list[float]:
    """Return the sum of amounts in each of ``count`` equal parts of a time."""
    found, part_s = [0.0] * count, (end_s - begin_s) / count
    for from_s, to_s, amount in amounts:
        if from_s >= end_s or to_s < begin_s:
            continue
        first, last = (int((time_s - begin_s) / part_s) for time_s in (from_s, to_s))
        for place in range(max(0, first), min(last + 1, count)):
            at_s = begin_s + place * part_s
            within_s = max(0.0, min(to_s, at_s + part_s) - max(from_s, at_s))
            found[place] += amount * within_s / (to_s - from_s) if to_s > from_s else amount
    return found


def _busy_s(spans: Iterable[Span], begin_s: float, end_s: float) -> float:
    """Return the time in which at least one of the spans, which are in the order of begins, is under way."""
    busy_s = 0.0
    for one in spans:
        busy_s += max(0.0, min(one.end_s, end_s) - max(one.begin_s, begin_s))
        begin_s = max(begin_s, min(one.end_s, end_s))  # so that time that transfers share counts once
    return busy_s


def look_at(trace: TraceFile) -> Run:
    """Return the run of a trace. It shows the step of median length under the last plan.

    Raises:
        TraceFileError: the trace has no forward, or is of the simulated device.
    """
    if trace.metadata.get("virtual_device_time"):
        raise TraceFileError(f"{trace.path}: is in the simulated device's time, which is not the host's: use Perfetto")
    host, device = trace.steps(), trace.steps(on_device=True)
    count = min(len(host), len(device)) if device else len(host)  # the last step may lack its times on the device
    if not count:
        raise TraceFileError(f"{trace.path}: empty: no forward ended inside an offloading context")
    # Lengths are the host's, but the part of the trace that is drawn spans host and device.
    lengths_s = [end_s - begin_s for begin_s, end_s in host[:count]]
    steps = [(min(h[0], d[0]), max(h[1], d[1])) for h, d in zip(host, device or host, strict=False)]
    planned_s = max((note.begin_s for note in trace.notes if note.name.startswith("plan:")), default=0.0)
    # Without the first step, which allocates and compiles, and without those under an earlier plan.
    usual = [n for n in range(count) if n and steps[n][0] >= planned_s] or list(range(count))
    # The low median is the length of a real step, never the mean of two, so `shown` finds that step below.
    step_s = median_low(lengths_s[n] for n in usual)
    shown = next(n for n in usual if lengths_s[n] == step_s)
    begin_s, end_s = steps[shown]
    place: dict[str, Any] = {"shown": shown, "begin_s": begin_s, "end_s": end_s}
    return Run(trace=trace, count=count, step_s=step_s, **place)


def format_number(name: str, value: float | None) -> str:
    """Return a number of `Run.numbers` as text."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return format_size(value)
    return format_time(value) if name.endswith("_s") else f"{value:g}"
