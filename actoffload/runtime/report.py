"""What a person reads: the report, the announcement after the first forward, and what was decided in the last one."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Sequence

from ..config import OffloadConfig
from ..interrupts import expected
from ..policy import STATIC, reasons
from ..sizes import format_size
from ..statistics import Statistics
from ..storage.endurance import Rating, render_wear
from ..storage.spool import Spool
from .store import ActivationStore
from .trace import rank_and_ranks

TOLD_AS_CAUSES = ("burst", "page-locking")
"""Advice that a report does not repeat, as the causes that it names say the same with this run's figures."""


class Report(str):
    """The text of a report. A notebook shows it as a table, whose columns two spaces or more lie between."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        lines = [(line.startswith(" "), re.split(r"\s{2,}", html.escape(line.strip()))) for line in self.splitlines()]
        width = max((len(cells) for _, cells in lines), default=1)
        rows = []
        for indented, (*cells, last) in lines:
            tag = "td" if indented else "th"
            wide = f'<{tag} colspan="{width - len(cells)}" style="text-align: left">{last}</{tag}>'
            rows.append("".join([*(f"<{tag}>{cell}</{tag}>" for cell in cells), wide]))
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def report_of(store: ActivationStore) -> str:
    """Return what was done and why, for a person."""
    spool = store.tiers.spool
    advice = (text for key, text in store.shared.reporter.advice.items() if key not in TOLD_AS_CAUSES)
    return render_report(
        store.shared.config, store.statistics(), spool, [*store.tiers.remarks, *advice], store.run.elapsed_s
    )


def render_report(
    config: OffloadConfig,
    statistics: Statistics,
    spool: Spool | None = None,
    notes: Sequence[str] = (),
    elapsed_s: float = 0.0,
) -> str:
    """What was done and why, for a person.

    Args:
        config: the options of the offloader.
        statistics: what it counted.
        spool: the disk, or None when there is none.
        notes: further sentences, such as why an engine could not be used.
        elapsed_s: seconds since the first forward began, by which the wear of the drives is told.

    Returns:
        Several lines: a paragraph to read first, then what moved, what was kept and why, and what went wrong.
    """
    sections = [
        _headline(config, statistics),
        _peaks(statistics),
        _regions(statistics),
        _tiers(statistics, spool),
        _kept(statistics),
        _degraded(statistics),
        _wear(config, statistics, elapsed_s),
        [f"note: {note}" for note in notes],
    ]
    return "\n".join(line for section in sections for line in section)


def announce(store: ActivationStore) -> None:
    """Say in one line what the first forward saved, to whom the configuration says."""
    if store.shared.config.announce != "none":
        say(store.shared.config, _announcement(store))


def say(config: OffloadConfig, line: str) -> None:
    """Say a line to whom the configuration says."""
    rank, world = rank_and_ranks()
    if config.announce == "none" or (config.announce == "first" and rank != 0):
        return
    line += f" [rank {rank} of {world}]" if world > 1 else ""
    if callable(config.announce):
        expected(config.announce, line)
    else:
        print(line, file=sys.stderr, flush=True)


def _announcement(store: ActivationStore) -> str:
    config, s, spool = store.shared.config, store.statistics(), store.tiers.spool
    target = f"target {config.target}"
    if spool is not None:
        directness = "direct" if spool.direct else "buffered"
        target += f" ({', '.join(config.paths)}: {spool.engine_name} engine, {directness} I/O)"
    moving_bytes = store.shared.accounts.moved_bytes
    static = sum(s.kept_bytes.get(reason, 0) for reason in STATIC)
    stays = sorted(
        ((nbytes, reason) for reason, nbytes in s.kept_bytes.items() if nbytes and reason not in STATIC),
        reverse=True,
    )
    why = ", ".join(f"{format_size(nbytes)} {reason}" for nbytes, reason in stays)
    seen = f"the first forward saved {format_size(s.activation_bytes)} of activations in {s.packed_tensors} tensors"
    if moving_bytes:
        moves = f"{format_size(moving_bytes)} moves, {format_size(sum(n for n, _ in stays))} stays"
        told = f"{moves} ({why})" if why else moves
    elif config.policy == "keep":
        told = "nothing moves, as policy='keep' says"
    else:
        told = (
            f"nothing moves ({why or 'no activation was saved'}): lower min_bytes, or check target, devices and policy"
        )
    never = f"; {format_size(static)} of parameters, buffers and inputs never moves" if static else ""
    return f"actoffload: {target}: {seen}; {told}{never}"


def _headline(config: OffloadConfig, s: Statistics) -> list[str]:
    if s.packed_tensors == 0:
        return [f"actoffload (target {config.target}): autograd saved nothing inside the context yet."]
    return [
        f"actoffload (target {config.target}): in {passes(s)}, moved {format_size(s.moved_bytes)} of "
        f"{format_size(s.activation_bytes)} saved activations ({s.moved_share:.0%}); "
        f"waited {s.wait_s:.2f} s (forward {s.pack_wait_s:.2f}, backward {s.unpack_wait_s:.2f})."
    ]


def passes(s: Statistics) -> str:
    """How much was done: optimizer steps, and the micro-batches in them, where an optimizer was seen to step."""
    if not s.optimizer_steps:
        return _count(s.steps, "forward pass", "forward passes")
    steps = _count(s.optimizer_steps, "step", "steps")
    return f"{steps} ({s.microbatches} micro-batches)" if s.microbatches > s.optimizer_steps else steps


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _peaks(s: Statistics) -> list[str]:
    """The peak of what autograd saved beside that of the device or process, which has more in it."""
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
    """Which checkpointed regions ran again, and what that took of memory."""
    if not s.regions:
        return []
    again = s.regions - s.regions_once
    count = _count(s.regions, "checkpointed region", "checkpointed regions")
    line = f"  {count}: {s.regions_once} ran once, {again} ran again in backward"
    return [line + (f" and held up to {format_size(s.recompute_peak_bytes)}" if s.recompute_peak_bytes else "")]


def _tiers(s: Statistics, spool: Spool | None) -> list[str]:
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
    if spool is not None:
        directness = "direct I/O" if spool.direct else "buffered I/O (through the page cache)"
        lines.append(f"  storage engine {spool.engine_name}, {directness}, alignment {spool.alignment} B")
    return lines


def _kept(s: Statistics) -> list[str]:
    kept = sorted(
        ((nbytes, reason) for reason, nbytes in reasons(s.kept_bytes).items() if nbytes), key=lambda pair: -pair[0]
    )
    if not kept:
        return []
    lines = ["kept where they were:"]
    for nbytes, reason in kept:
        lines.append(f"  {format_size(nbytes):>10}  {reason.value:<24} {reason.meaning}")
    return lines


def _degraded(s: Statistics) -> list[str]:
    if not s.degraded:
        return []
    lines = ["degraded (the step went on; results are unharmed):"]
    return lines + [f"  {count:>6} × {reason}" for reason, count in sorted(s.degraded.items())]


def _wear(config: OffloadConfig, s: Statistics, elapsed_s: float) -> list[str]:
    tbw = config.drive_tbw
    rating = None if tbw is None else Rating(name="the drive", rated_written_bytes=config.size("drive_tbw", 0))
    return render_wear(s.nvme_written_bytes, elapsed_s, rating, drives=len(config.paths))
