"""The report that a person reads: plain text from plain numbers, no torch and no terminal library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass

from .config import OffloadConfig, format_size
from .statistics import Statistics
from .wear import Rating, render_wear

KEPT_MEANINGS = {
    "parameter": "a parameter or a view of one",
    "buffer": "a module's buffer or a view of one",
    "input": "lives anyway: the caller holds it",
    "below min_bytes": "too small to be worth moving",
    "keep()": "you said so",
    "no_offload()": "you said so",
    "policy": "the policy said so",
    "plan": "the planner found moving it would not pay, or not be needed",
    "module excluded": "saved in a module that `exclude` names, or that `include` does not",
    "last saved layer": "its backward follows at once",
    "pressure": "could not have been moved in time",
    "saved during backward": "by a recomputation; it is used at once",
    "unknown tensor subclass": "how to take it apart is not known",
    "not strided": "sparse, or another layout without plain memory",
    "other device": "on a device that is not offloaded",
    "resized": "its owner freed its memory while it was being moved, to fill it again later",
    "graph capture": "a captured graph replays on fixed memory",
    "degraded": "something below failed; see there",
    "forked process": "a child of the process that owns the spool",
}
"""What a reason means; a reason that is not here is shown by its name."""
STATIC_REASONS = ("parameter", "buffer", "input")
"""What lives anyway and is no activation."""


def render_report(
    config: OffloadConfig,
    statistics: Statistics,
    spool_statistics: object | None = None,
    notes: Sequence[str] = (),
    elapsed_s: float = 0.0,
) -> str:
    """What was done and why, for a person.

    Args:
        config: the options of the offloader.
        statistics: what it counted.
        spool_statistics: a dataclass or a mapping about the spool, or None when there is none.
        notes: further sentences, such as why the engine was chosen.
        elapsed_s: seconds since the offloader began, by which the wear of the drives is told.

    Returns:
        Several lines: a paragraph to read first, then what moved, what was kept and why, and what went wrong.
    """
    sections = [
        _headline(config, statistics),
        _tiers(statistics, _as_mapping(spool_statistics)),
        _kept(statistics),
        _degraded(statistics),
        _wear(config, statistics, elapsed_s),
        [f"note: {note}" for note in notes],
    ]
    return "\n".join(line for section in sections for line in section)


def render_announcement(config: OffloadConfig, s: Statistics, moving_bytes: int, spool: str = "") -> str:
    """One line at the end of the first forward.

    Args:
        config: the options of the offloader.
        s: what it counted until now.
        moving_bytes: bytes of activations that left or are leaving the device.
        spool: where on disk, and how; empty when there is no spool.
    """
    target = f"target {config.target}" + (f" ({spool})" if spool else "")
    static = sum(s.kept_bytes.get(reason, 0) for reason in STATIC_REASONS)
    stays = sorted(
        ((nbytes, reason) for reason, nbytes in s.kept_bytes.items() if nbytes and reason not in STATIC_REASONS),
        reverse=True,
    )
    why = ", ".join(f"{format_size(nbytes)} {reason}" for nbytes, reason in stays)
    seen = f"the first forward saved {format_size(s.activation_bytes)} of activations in {s.packed_tensors} tensors"
    if moving_bytes:
        moves = f"{format_size(moving_bytes)} moves, {format_size(sum(n for n, _ in stays))} stays"
        told = f"{moves} ({why})" if why else moves
    else:
        told = (
            f"nothing moves ({why or 'no activation was saved'}): lower min_bytes, or check target, devices and policy"
        )
    never = f"; {format_size(static)} of parameters, buffers and inputs never moves" if static else ""
    return f"actoffload: {target}: {seen}; {told}{never}"


def _headline(config: OffloadConfig, s: Statistics) -> list[str]:
    if s.packed_tensors == 0:
        return [f"actoffload (target {config.target}): autograd saved nothing inside the context yet."]
    steps = "1 step" if s.steps == 1 else f"{s.steps} steps"
    return [
        f"actoffload (target {config.target}): in {steps}, moved {format_size(s.moved_bytes)} of "
        f"{format_size(s.activation_bytes)} saved activations ({s.moved_share:.0%}); resident peak "
        f"{format_size(s.resident_peak_bytes)} of {format_size(s.baseline_peak_bytes)} ({s.resident_share:.0%}); "
        f"waited {s.wait_s:.2f} s (forward {s.pack_wait_s:.2f}, backward {s.unpack_wait_s:.2f})."
    ]


def _tiers(s: Statistics, spool: Mapping[str, object]) -> list[str]:
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
    if spool:
        directness = "direct I/O" if spool.get("direct") else "buffered I/O"
        lines.append(
            f"  storage engine {spool.get('engine', '?')}, {directness}, alignment {spool.get('alignment', 1)} B"
        )
    return lines


def _kept(s: Statistics) -> list[str]:
    kept = sorted(((nbytes, reason) for reason, nbytes in s.kept_bytes.items() if nbytes), reverse=True)
    if not kept:
        return []
    lines = ["kept where they were:"]
    for nbytes, reason in kept:
        meaning = KEPT_MEANINGS.get(reason, "")
        lines.append(f"  {format_size(nbytes):>10}  {reason:<24} {meaning}".rstrip())
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


def _as_mapping(value: object | None) -> Mapping[str, object]:
    if value is None:
        return {}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return value
    raise TypeError(f"spool statistics must be a dataclass or a mapping, not {type(value).__name__}")
