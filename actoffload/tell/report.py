"""The text about a run: the report, the lines that are announced, and the causes that were found."""

from __future__ import annotations

import contextlib
import sys
from itertools import zip_longest

from ..config import OffloadConfig
from ..policy import STATIC, KeepReason, reasons
from ..runtime.trace import rank_and_ranks, trace_path
from ..sizes import format_size, format_time
from ..storage.endurance import render_wear
from ..tiers.interrupts import expected
from ..tiers.statistics import Statistics
from .causes import NEXT, causes
from .facts import Facts

MOST_CAUSES = 3
"""Causes that a report names, each with one remedy."""
KEEPS = "nothing moves, as policy='keep' says"


def render_report(facts: Facts) -> str:
    """The work that was done and the reasons, without a diagnosis.

    Returns:
        Several lines: first a sentence with the sum, then peaks, tiers, reasons to stay, and failures.
    """
    config, counts = facts.config, facts.counts
    sections = [
        _headline(facts),
        _peaks(counts),
        _regions(counts),
        _tiers(facts),
        _kept(counts),
        _degraded(counts),
        _wear(config, counts, facts.elapsed_s),
        [f"note: {note}" for note in facts.notes],
    ]
    return "\n".join(line for section in sections for line in section)


def diagnose(facts: Facts) -> list[str]:
    """The heaviest causes as lines, each with one remedy; no line before the first step."""
    if not facts.counts.steps:
        return []
    if facts.config.policy == "keep":
        could = facts.counts.kept_bytes.get(KeepReason.POLICY.value, 0) // facts.steps
        free = [f"{NEXT}policy='auto' moves what costs no time, up to {format_size(could)} a step"] if could else []
        return [f"diagnosis: {KEEPS}", *free]
    ranked = [cause for pair in zip_longest(*causes(facts)) for cause in pair if cause is not None]
    lines: list[str] = []
    for _, evidence, remedies in ranked[:MOST_CAUSES]:
        lines += [f"diagnosis: {evidence}", *(f"{NEXT}{remedy}" for remedy in remedies[:1])]
    return lines or [f"diagnosis: OK: {_waits(facts)}"]


def explain_causes(facts: Facts) -> list[str]:
    """All causes as lines, each with all remedies; one line if there is none, no line before the first step."""
    if not facts.counts.steps:
        return []
    if facts.config.policy == "keep":
        return [KEEPS]
    slower, memory = causes(facts)
    if not slower and not memory:
        return [f"nothing slows the step, and nothing keeps memory from falling: {_waits(facts)}"]
    lines: list[str] = []
    for title, found in (("why is a step slower:", slower), ("why did memory not fall:", memory)):
        lines.append(title if found else f"{title} nothing was found")
        for weight, evidence, remedies in found:
            size = f"{format_time(weight)} a step" if found is slower else format_size(int(weight))
            lines += [f"  {size}: {evidence}", *(f"    next: {remedy}" for remedy in remedies)]
    return lines


def _waits(facts: Facts) -> str:
    waited = f"{facts.share(facts.wait_s):.1%} of the time was spent waiting"
    return "one step was seen" if facts.step is None else waited


def say(config: OffloadConfig, line: str) -> None:
    """Write a line where ``announce`` of the options directs it."""
    rank, world = rank_and_ranks()
    if config.announce == "none" or (config.announce == "first" and rank != 0):
        return
    line += f" [rank {rank} of {world}]" if world > 1 else ""
    if callable(config.announce):
        expected(config.announce, line)
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # its terminal or pipe is gone, which must not end the training
            print(line, file=sys.stderr, flush=True)


def closing_line(facts: Facts) -> str:
    """One line on the whole run, and the command that has more."""
    file = trace_path(facts.config)
    return f"actoffload: {facts.summary}; details: actoffload {f'report {file}' if file else 'trace -- PROGRAM'}"


def announcement(facts: Facts) -> str:
    """One line on the first forward: the tensors that it saved, and those that move."""
    config, s = facts.config, facts.counts
    target = f"target {config.target}"
    if facts.engine:
        directness = "direct" if facts.engine.direct else "buffered"
        target += f" ({', '.join(config.paths)}: {facts.engine.name} engine, {directness} I/O)"
    moving_bytes = facts.accounts.moved_bytes
    static = sum(s.kept_bytes.get(reason, 0) for reason in STATIC)
    stays = [(reason.value, nbytes) for reason, nbytes in _stayed(s) if reason.value not in STATIC]
    why = ", ".join(f"{format_size(nbytes)} {reason}" for reason, nbytes in stays)
    seen = f"the first forward saved {format_size(s.activation_bytes)} of activations in {s.packed_tensors} tensors"
    if moving_bytes:
        moves = f"{format_size(moving_bytes)} moves, {format_size(sum(n for _, n in stays))} stays"
        text = f"{moves} ({why})" if why else moves
    elif config.policy == "keep":
        text = KEEPS
    else:
        text = (
            f"nothing moves ({why or 'no activation was saved'}): lower min_bytes, or check target, devices and policy"
        )
    never = f"; {format_size(static)} of parameters, buffers and inputs never moves" if static else ""
    return f"actoffload: {target}: {facts.inexact}{seen}; {text}{never}"


def _headline(facts: Facts) -> list[str]:
    s = facts.counts
    lines = [f"actoffload (target {facts.config.target}): {facts.summary}"]
    if s.packed_tensors:
        moved = f"{format_size(s.moved_bytes)} of {format_size(s.activation_bytes)} saved activations"
        waited = f"waited {s.wait_s:.2f} s (forward {s.pack_wait_s:.2f}, backward {s.unpack_wait_s:.2f})"
        lines.append(f"  moved              {moved} ({s.moved_share:.0%}); {waited}")
    if s.halved_bytes:
        lines.append(f"  halved             {format_size(2 * s.halved_bytes)} of float32, cast from bfloat16")
    if s.fp8_bytes:
        lines.append(f"  rounded to fp8     {format_size(s.fp8_bytes)} less to save")
    if s.derived_bytes:
        lines.append(f"  computed again     {format_size(s.derived_bytes)} of products and activations")
    if s.unhooked:
        more = f"{s.unhooked} more forward pass{'es' * (s.unhooked != 1)}"
        lines.append(f"  as nothing moves, {more} ran without hooks")
    return lines


def _peaks(s: Statistics) -> list[str]:
    """The peak of saved tensors beside the peak of the whole device or process."""
    if not s.packed_tensors:
        return []
    lines = [
        f"  saved activations  peak {format_size(s.resident_peak_bytes)} of {format_size(s.baseline_peak_bytes)} with "
        f"nothing moved ({s.resident_share:.0%})"
    ]
    if 0 < s.plan_peak_bytes < s.resident_peak_bytes:
        lines[0] += f"; {format_size(s.plan_peak_bytes)} under the plan that is followed now"
    if s.device_peak_bytes:
        lines.append(f"  whole device       peak {format_size(s.device_peak_bytes)} (all that PyTorch had allocated)")
    elif s.process_peak_bytes:
        peak, before = format_size(s.process_peak_bytes), format_size(s.process_before_bytes)
        lines.append(f"  whole process      peak {peak}; {before} before the first forward")
    return lines


def _regions(s: Statistics) -> list[str]:
    """The checkpointed regions that ran again, and the memory that this took."""
    if not s.regions:
        return []
    again = s.regions - s.regions_once
    count = f"{s.regions} checkpointed region{'s' * (s.regions != 1)}"
    line = f"  {count}: {s.regions_once} ran once, {again} ran again in backward"
    return [line + (f" and held up to {format_size(s.recompute_peak_bytes)}" if s.recompute_peak_bytes else "")]


def _tiers(facts: Facts) -> list[str]:
    s = facts.counts
    rows = []
    if s.host_written_bytes or s.host_peak_bytes:
        rows.append(("host", s.host_written_bytes, s.host_read_bytes, s.host_peak_bytes))
    if s.nvme_written_bytes or s.nvme_peak_bytes:
        rows.append(("nvme", s.nvme_written_bytes, s.nvme_read_bytes, s.nvme_peak_bytes))
    lines = [
        f"  {name:<5} written {format_size(written):>10}   read {format_size(read):>10}   peak {format_size(peak):>10}"
        for name, written, read, peak in rows
    ]
    if s.forwarded_bytes or s.cancelled_bytes:
        lines.append(
            f"  forwarded {format_size(s.forwarded_bytes)} from memory; {format_size(s.cancelled_bytes)} of writes "
            "cancelled before they began"
        )
    if facts.engine:
        directness = "direct I/O" if facts.engine.direct else "buffered I/O (through the page cache)"
        lines.append(f"  storage engine {facts.engine.name}, {directness}, alignment {facts.engine.alignment} B")
    return lines


def _stayed(s: Statistics) -> list[tuple[KeepReason, int]]:
    """The bytes that stayed by reason, the most first."""
    return sorted(((reason, n) for reason, n in reasons(s.kept_bytes).items() if n), key=lambda each: -each[1])


def _kept(s: Statistics) -> list[str]:
    lines = [f"  {format_size(nbytes):>10}  {reason.value:<24} {reason.meaning}" for reason, nbytes in _stayed(s)]
    return ["kept where they were:", *lines] if lines else []


def _degraded(s: Statistics) -> list[str]:
    if not s.degraded:
        return []
    lines = ["degraded (the step went on; results are unharmed):"]
    return lines + [f"  {count:>6} × {reason}" for reason, count in sorted(s.degraded.items())]


def _wear(config: OffloadConfig, s: Statistics, elapsed_s: float) -> list[str]:
    rated = None if config.drive_tbw is None else config.size("drive_tbw", 0)
    return render_wear(s.nvme_written_bytes, elapsed_s, rated, drives=len(config.paths))
