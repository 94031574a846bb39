"""A traced run in numbers: its usual step, memory with and without moving, links, waits, and what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median_low
from typing import Any

from ..errors import TraceFileError
from ..sizes import format_size, format_time
from ..storage.endurance import Rating, render_wear
from ..tell.causes import next_steps
from .trace_file import Counter, Moved, Phase, Span, TraceFile, Wait

SAVED = "saved activations"
KINDS = ("parameters", "gradients", "optimizer state", "other", SAVED)
"""What memory is used for, as it is stacked."""
MOST_WAITS = 10
MOST_BLOCKS = 3
"""So many blocks are named of those that saved what is in memory at a moment."""
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
"""The names of a run's `Run.numbers` for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory over one step: seconds from its begin, and bytes at these moments.

    Attributes:
        by_kind: for each of `KINDS`.
        blocks: the blocks that saved the most of what is there, each with its size as text.
        total: all of it, as measured.
        without: what that would be with nothing moved.
    """

    times_s: list[float]
    by_kind: dict[str, list[float]]
    blocks: list[list[str]]
    total: list[float]
    without: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One direction of a link in one step: bytes per second over time, and while it moved something.

    Attributes:
        phase: in which it has to move them, so that nothing waits: writes in forward, reads in backward.
        used: how much of what it can do it did in that phase, as a share.
    """

    name: str
    phase: str
    times_s: list[float]
    bytes_per_s: list[float]
    used: float
    can_do: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsFor:
    """All waits of a run for what one module saved, for one reason (`Wait.reason`)."""

    module: str
    reason: str
    total_s: float
    count: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A trace, and which of its steps is shown; made by `look_at`.

    Attributes:
        count: how many steps it has.
        step_s: their median, without those before the last plan.
        shown: the number of the step that is shown, from 0: the one that took so long.
        begin_s: when it began, for the host or the device; ``end_s``: when it had ended for both.
    """

    trace: TraceFile
    count: int
    step_s: float
    shown: int
    begin_s: float
    end_s: float

    def known(self, name: str) -> Mapping[str, Any]:
        """What the trace has at its end under a name; empty where it does not know it."""
        found = self.trace.metadata.get(name)
        return found if isinstance(found, dict) else {}

    def numbers(self) -> dict[str, float]:
        """What runs are compared by; see `LABELS`. Bytes, seconds, and a count."""
        memory, statistics = self.memory(), self.known("statistics")
        saved = memory.by_kind[SAVED]
        away = [without - total for without, total in zip(memory.without, memory.total, strict=True)]
        by_link = {link: sum(m.nbytes for m in self._left(link)) for link in ("host", "disk")}
        return {
            "steps": self.count,
            "step_s": self.step_s,
            "peak_bytes": max(memory.total),
            "peak_without_bytes": max(memory.without),
            "saved_peak_bytes": statistics.get("plan_peak_bytes", max(saved)),
            "saved_peak_without_bytes": statistics.get(
                "baseline_peak_bytes", max(map(sum, zip(saved, away, strict=True)))
            ),
            "moved_bytes": max(by_link.values()) / self.count,
            "wait_s": sum(wait.duration_s for wait in self.trace.waits) / self.count,
        }

    def _left(self, link: str) -> list[Moved]:
        return [moved for moved in self.trace.transfers if moved.ours and (moved.link, moved.way) == (link, "write")]

    def memory(self) -> Memory:
        """Memory over the step."""
        begin_s, end_s = self.begin_s, self.end_s
        counters = self.trace.counters
        detail = counters["memory"]
        times = [begin_s, *(time_s for time_s in detail.times_s if begin_s < time_s < end_s), end_s]
        at = [detail.at(time_s) for time_s in times]
        by_kind = {kind: [values.get(kind, 0.0) for values in at] for kind in KINDS}
        saved = [
            {name: nbytes for name, nbytes in values.items() if name.startswith("saved") and nbytes} for values in at
        ]
        by_kind[SAVED] = [sum(values.values()) for values in saved]
        whole, unmoved = counters["memory total"], counters["memory with nothing moved"]
        return Memory(
            times_s=[time_s - begin_s for time_s in times],
            by_kind=by_kind,
            blocks=[_largest(values) for values in saved],
            total=[whole.at(time_s)["bytes"] for time_s in times],
            without=[unmoved.at(time_s)["bytes"] for time_s in times],
        )

    def links(self) -> list[LinkUse]:
        """The directions of links that moved bytes in the run."""
        found = []
        for link in ("host", "disk"):
            for way in ("write", "read"):
                counter = self.trace.counters.get(f"{link} {way}")
                if counter is not None and counter.times_s and counter.series["can_do"][-1]:
                    found.append(self._use(f"{link} {way}", counter))
        return found

    def _use(self, name: str, counter: Counter) -> LinkUse:
        begin_s, end_s = self.begin_s, self.end_s
        times = [begin_s, *(time_s for time_s in counter.times_s if begin_s < time_s < end_s), end_s]
        rates = [counter.at(time_s)["bytes_per_s"] for time_s in times]
        phase, can_do = "forward" if name.endswith("write") else "backward", counter.series["can_do"][-1]
        moved = lasted_s = 0.0
        for first_s, last_s in self._when(phase):
            lasted_s += last_s - first_s
            for (before_s, after_s), rate in zip(pairwise(times), rates, strict=False):
                moved += rate * max(0.0, min(after_s, last_s) - max(before_s, first_s))
        return LinkUse(
            name=name,
            phase=phase,
            times_s=[time_s - begin_s for time_s in times],
            bytes_per_s=rates,
            used=moved / (lasted_s * can_do) if lasted_s else 0.0,
            can_do=can_do,
            nbytes=sum(moved.nbytes for moved in self.trace.transfers if f"{moved.link} {moved.way}" == name),
        )

    def _when(self, name: str) -> list[tuple[float, float]]:
        """The step's phases of one name, on the device where there is one; one within another counts once."""
        found: list[tuple[float, float]] = []
        on_device = any(phase.on_device for phase in self.trace.phases)
        for phase in sorted(self.trace.phases, key=lambda phase: phase.begin_s):
            if phase.name == name and phase.on_device == on_device:
                begin_s = max(phase.begin_s, self.begin_s, found[-1][1] if found else 0.0)
                end_s = min(phase.end_s, self.end_s)
                found += [(begin_s, end_s)] if end_s > begin_s else []
        return found

    def phases(self) -> list[Phase]:
        """The host's phases of the step, with times from its begin on."""
        return [span for span in self.spans() if isinstance(span, Phase) and not span.on_device]

    def spans(self) -> list[Span]:
        """Phases, waits and transfers of the step, with times from its begin on."""
        trace, begin_s, end_s = self.trace, self.begin_s, self.end_s
        found: list[Span] = []
        waits = [wait for wait in trace.waits if wait.duration_s]
        for span in (*trace.phases, *waits, *trace.transfers):
            if span.begin_s < end_s and span.end_s > begin_s:
                found.append(replace(span, begin_s=span.begin_s - begin_s, end_s=min(span.end_s, end_s) - begin_s))
        return found

    def dearest_waits(self) -> list[WaitsFor]:
        """The `MOST_WAITS` modules that were waited for longest, over the whole run."""
        groups: dict[tuple[str, str], list[Wait]] = {}
        for wait in (wait for wait in self.trace.waits if wait.duration_s):
            groups.setdefault((wait.module or "(no module)", wait.reason), []).append(wait)
        found = [
            WaitsFor(
                module=module,
                reason=reason,
                total_s=sum(wait.duration_s for wait in waits),
                count=len(waits),
                nbytes=max(wait.nbytes for wait in waits),
            )
            for (module, reason), waits in groups.items()
        ]
        return sorted(found, key=lambda waits: -waits.total_s)[:MOST_WAITS]

    def kept(self) -> dict[str, int]:
        """Bytes of the whole run that stayed, by reason, the most first."""
        kept = self.known("statistics").get("kept_bytes", {})
        return dict(sorted(((name, n) for name, n in kept.items() if n), key=lambda item: -item[1]))

    @property
    def planned_for(self) -> str:
        """What was planned: a step, or with accumulated gradients a micro-batch of it."""
        return self.trace.metadata.get("planned_for") or "a step"

    def predictions(self) -> list[tuple[str, float, float | None]]:
        """What was predicted of `planned_for` under the plan, and what was seen: ``step_s`` and ``peak_bytes``."""
        predicted, whole = self.known("predicted"), self.planned_for == "a step"
        step_s = self.step_s if whole else self.known("seen").get("step_s")
        seen = {"step_s": step_s, "peak_bytes": self.known("statistics").get("plan_peak_bytes")}
        return [(name, value, seen.get(name)) for name, value in predicted.items() if value is not None]

    def wear(self) -> str:
        """What the run means for its SSD; empty where nothing was written to one."""
        config, spool = self.known("config"), self.known("spool")
        tbw = config.get("drive_tbw")
        rating = None if tbw is None else Rating(name="the drive", rated_written_bytes=tbw)
        elapsed_s = self.trace.metadata.get("elapsed_s") or self.trace.steps()[-1][1]
        written = sum(moved.nbytes for moved in self._left("disk"))
        return " ".join(render_wear(written, elapsed_s, rating, drives=len(spool.get("paths", ())) or 1))

    def what_limits(self) -> str:
        """What limits the step, as `Offloader.report` says; empty where the run did not come to its end."""
        diagnosis: Sequence[str] = self.trace.metadata.get("diagnosis") or [""]
        told = diagnosis[0].removeprefix("diagnosis: ")
        return told[:1].upper() + told[1:]

    @cached_property
    def next_steps(self) -> list[str]:
        """What to do next: at most three sentences, each with an option, its value and what it changes."""
        return next_steps(self.trace.metadata, self.numbers())

    def about(self) -> str:
        """Where it ran, and what."""
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
        if data.get("ended_early"):
            parts.append(f"not all of it: the trace ended early ({data['ended_early']})")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """All of it but what goes over time, ready for JSON."""
        without = ("times_s", "bytes_per_s")
        links = [{name: value for name, value in asdict(link).items() if name not in without} for link in self.links()]
        return {
            "path": self.trace.path,
            "about": self.about(),
            "step_shown": self.shown + 1,
            **self.numbers(),
            "links": links,
            "dearest_waits": [asdict(wait) for wait in self.dearest_waits()],
            "kept_bytes": self.kept(),
            "predicted": {name: {"predicted": value, "seen": seen} for name, value, seen in self.predictions()},
            "wear": self.wear(),
            "what_limits": self.what_limits(),
            "next_steps": self.next_steps,
        }


def look_at(trace: TraceFile) -> Run:
    """Return the run of a trace, with the step of median length among those after the last plan was made.

    Raises:
        TraceFileError: it shows no forward, or is of the simulated device.
    """
    if trace.metadata.get("virtual_device_time"):
        raise TraceFileError(f"{trace.path}: is in the simulated device's time, which is not the host's: use Perfetto")
    host, device = trace.steps(), trace.steps(on_device=True)
    count = min(len(host), len(device)) if device else len(host)
    if not count:
        raise TraceFileError(f"{trace.path}: empty: no forward ended inside an offloading context")
    lengths_s = [end_s - begin_s for begin_s, end_s in host[:count]]
    steps = [(min(h[0], d[0]), max(h[1], d[1])) for h, d in zip(host, device or host, strict=False)]
    planned_s = max((note.time_s for note in trace.notes if note.name.startswith("plan:")), default=0.0)
    usual = [n for n in range(count) if n and steps[n][0] >= planned_s] or list(range(count))
    step_s = median_low(lengths_s[n] for n in usual)
    shown = next(n for n in usual if lengths_s[n] == step_s)
    begin_s, end_s = steps[shown]
    return Run(trace=trace, count=count, step_s=step_s, shown=shown, begin_s=begin_s, end_s=end_s)


def format_number(name: str, value: float | None) -> str:
    """A number of `Run.numbers`, for a person."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return format_size(value)
    return format_time(value) if name.endswith("_s") else f"{value:g}"


def _largest(saved: Mapping[str, float]) -> list[str]:
    largest = sorted(saved.items(), key=lambda item: -item[1])
    told = [f"{name.removeprefix('saved by ')} {format_size(nbytes)}" for name, nbytes in largest[:MOST_BLOCKS]]
    return [*told, *(["…"] if largest[MOST_BLOCKS:] else [])]
