"""Why a step is slower and why memory did not fall: causes with this run's figures, each with remedies.

Each cause is a function of the facts that returns None where they are no evidence of it. No torch, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..planning.constants import LEAST_GAIN_BYTES
from ..policy import KeepReason, Kind, reasons
from ..sizes import format_size, format_time
from .facts import Facts, Planned
from .parts import BudgetRow

SLOW = 0.05
"""Share of the time. A step that waits for this much is slow."""
SMALL_PART = 0.2
"""Share of the peak. If saved activations are less, moving them changes little."""
MUCH_KEPT = 0.5
"""Share of the activations' peak. If this much stays, the report names a budget."""
MUCH_LATE = 0.2
"""Share of the activations' peak. If backward needs this much before it has left, that is a cause. The last tensors of
a forward never leave in time (an eighth in the virtual steps that a disk keeps up with)."""
LEAST_LATE = 1 << 20
"""Bytes. In steps of milliseconds, less is late by the disk's latency alone."""
WORTH_SAYING = 0.05
"""Share of a step. The report names another budget if the step is predicted to be shorter by this."""
HELD = 0.05
"""Share of the activations' peak. If this many bytes stay for one reason, that is a cause."""
LEAST_OTHERS = 64 << 20
"""Bytes. If memory that is no saved tensor takes this much, that is a cause; libraries that a first step loads take
nearly as much."""
CHECKPOINT = (
    "checkpoint the model's blocks, as recompute=True with model= does: those run again for which that takes less than "
    "waiting"
)
FASTER_DISK = "give path= on a faster disk ('actoffload bench' measures one), or several to stripe over"
NEXT = "  next: "
"""The begin of a line with a remedy."""
_WHEN_DEGRADED = {
    "no room on disk": "free room under path=, raise nvme_budget, or give another path=",
    "write failed": "look at the disk under path= (dmesg), or give another path=",
}


class Cause(NamedTuple):
    """Why a step is slower, or why memory did not fall."""

    weight: float
    """Seconds of a step, or bytes: causes are ranked by it."""
    evidence: str
    """The figures of this run."""
    remedies: Sequence[str]
    """The remedies, the best first."""


def causes(facts: Facts) -> tuple[list[Cause], list[Cause]]:
    """Return why a step is slower, and why memory did not fall, each list with the heaviest cause first."""

    def found(checks: Sequence[Callable[[Facts], Cause | None]]) -> list[Cause]:
        return sorted(filter(None, (check(facts) for check in checks)), key=lambda cause: -cause.weight)

    return found(SLOWER), found(MEMORY)


# -- why is a step slower ---------------------------------------------------------------------------------------------


def slow_link(f: Facts) -> Cause | None:
    """The disk, or the way to host memory, is slower than the step needs it."""
    if f.step is None or f.share(f.wait_s) < SLOW:
        return None
    writes = f.step.forward_wait_s > f.step.backward_wait_s
    disk, planned, config = bool(f.counts.nvme_written_bytes), f.planned, f.config
    rate, link = "", f.disk if disk else planned.profile.host if planned is not None else None
    if link is not None:
        found = (link.write_bytes_per_s if writes else link.read_bytes_per_s) / 1e9
        needed = f.counts.moved_bytes / f.units / max(1e-9, f.step.step_s - f.wait_s) / 1e9  # in all of a step
        rate = f": it {'writes' if writes else 'reads'} {found:.2g} GB/s"
        rate += f" and needs more than {needed:.2g}" if needed > found else ""
    remedies: list[str] = []
    if planned is not None and planned.limits.device_budget is not None:
        remedies += _faster(planned)
        if not planned.profile.regions:
            remedies.append(CHECKPOINT)
    elif config.policy != "auto" and config.device_budget is not None:
        remedies.append(f"policy='auto', and {CHECKPOINT}")
    elif config.policy != "auto":
        remedies.append("policy='auto' keeps what cannot be moved in time")
    elif config.device_budget is not None:
        remedies.append("raise device_budget: forward waits until what is above it has left")
    if disk:
        remedies.append(FASTER_DISK)
    medium, part = "the disk" if disk else "host memory", "forward" if writes else "backward"
    evidence = f"{f.share(f.wait_s):.0%} of a step waits for {medium}, mostly in {part}{rate}"
    return Cause(f.wait_s, evidence, remedies or ["name modules in exclude=: what they save stays"])


def host_bound(f: Facts) -> Cause | None:
    """The device idles while hooks that move tensors keep the host busy."""
    if f.step is None or f.share(f.step.idle_s) < SLOW:
        return None
    share = f"{f.share(f.step.idle_s):.0%}"
    evidence = f"for {share} of a step the device has no work, as hooks that move tensors keep the host busy"
    remedy = "raise min_bytes, so that fewer and larger tensors move; or take larger batches"
    return Cause(f.step.idle_s, evidence, [*(_faster(f.planned) if f.planned else []), remedy])


# -- why did memory not fall ------------------------------------------------------------------------------------------


def nothing_reached(f: Facts) -> Cause | None:
    """Autograd saved nothing inside the context."""
    if f.counts.packed_tensors or not f.counts.steps:
        return None
    evidence = f"autograd saved nothing inside the context in {f.counts.steps} forward passes"
    remedy = "run the forward inside it and in its thread, with gradients, and inside no other saved_tensors_hooks"
    return Cause(0 if f.before_bytes is None else _peak(f)[0] - f.before_bytes, evidence, [remedy])


def stays(f: Facts) -> Cause | None:
    """Nothing moves, or most saved tensors stay, for a reason."""
    s, planned = f.counts, f.planned
    kept = {why: nbytes // f.steps for why, nbytes in reasons(s.kept_bytes).items() if why.kind is not Kind.STATIC}
    if f.accounts.refused_bytes:
        pressure = kept.get(KeepReason.PRESSURE, 0)
        kept[KeepReason.PRESSURE] = pressure - f.accounts.refused_bytes // f.steps  # see `host_memory_full`
    reason, saved_bytes = max(kept, key=lambda why: kept[why], default=None), s.activation_bytes // f.steps
    remedies = [reason.remedy] if reason is not None and reason.remedy else []
    if saved_bytes and not (s.moved_bytes or s.forwarded_bytes or s.cancelled_bytes):
        why = (planned.plan.declined if planned is not None else "") or (reason.value if reason else "see above")
        return Cause(sum(kept.values()), f"nothing moves ({why})", remedies)
    if planned is not None:
        if planned.limits.device_budget is not None or s.plan_peak_bytes < MUCH_KEPT * s.baseline_peak_bytes:
            return None
        why, share = planned.plan.declined or "no more can be moved in time", s.plan_peak_bytes / s.baseline_peak_bytes
        evidence = f"{share:.0%} of the activations' peak stays: {why}"
        half = next((row for row in planned.budgets if row.step_s and 2 * row.device_budget <= s.plan_peak_bytes), None)
        return Cause(s.plan_peak_bytes, evidence, [] if half is None else [_priced(planned, half)])
    if reason is None or not remedies or kept[reason] < MUCH_KEPT * saved_bytes:
        return None
    if reason.kind is Kind.ASKED or reason is KeepReason.FITS:
        return None  # the user chose this, so it is no cause unless nothing moves
    evidence = f"{format_size(kept[reason])} of {format_size(saved_bytes)} that a step saves stay ({reason.value})"
    return Cause(kept[reason], evidence, remedies)


def leaves_too_late(f: Facts) -> Cause | None:
    """Backward needs tensors that are still being written, so they never leave. A budget or a plan prevents that."""
    nbytes = f.accounts.late_bytes // max(1, f.counts.microbatches)
    if f.planned is not None or f.config.device_budget is not None:
        return None
    if nbytes < max(LEAST_LATE, MUCH_LATE * f.counts.baseline_peak_bytes):
        return None
    disk = bool(f.counts.nvme_peak_bytes)
    rate = f": it writes {f.disk.write_bytes_per_s / 1e9:.2g} GB/s" if disk and f.disk is not None else ""
    evidence = (
        f"{format_size(nbytes)} of what a forward saves had not left when backward asked for it, as "
        f"{'the disk' if disk else 'the way to host memory'} is too slow{rate}"
    )
    remedies = ["set device_budget, so that forward waits for what leaves"]
    if disk:
        remedies.append(FASTER_DISK)
    return Cause(nbytes, evidence, remedies)


def degraded(f: Facts) -> Cause | None:
    """Something below failed, so tensors stayed."""
    reasons = f.counts.degraded
    if not reasons:
        return None
    evidence = ", ".join(f"{count} × {reason}" for reason, count in sorted(reasons.items()))
    remedies = [remedy for reason, remedy in _WHEN_DEGRADED.items() if reason in reasons]
    return Cause(f.accounts.degraded_bytes / f.steps, f"memory is not saved as it could be: {evidence}", remedies)


def held_elsewhere(f: Facts) -> Cause | None:
    """The program itself holds saved tensors until backward needs them."""
    alive, planned = KeepReason.ALIVE.value, f.planned
    nbytes = f.counts.kept_bytes.get(alive, 0) // f.steps
    if planned is not None:  # the plan keeps these tensors, so their reason stands in its profile
        nbytes = max(nbytes, sum(one.nbytes for one in planned.profile.storages if one.kept == alive))
    # The program holds a step's inputs, which are few bytes, until the step has ended.
    if nbytes < max(HELD * f.counts.baseline_peak_bytes, LEAST_GAIN_BYTES):
        return None
    evidence = (
        f"{format_size(nbytes)} that a step saves are held by the program until backward: moving them frees nothing"
    )
    remedy = "let go of what forward hooks, lists and variables hold before backward begins, or hold less of it"
    return Cause(nbytes, evidence, [remedy])


def compiled_whole(f: Facts) -> Cause | None:
    """One autograd node saves most of a forward at once, as a whole model under ``torch.compile`` does."""
    nbytes = f.accounts.at_once_bytes
    evidence = (
        f"one autograd node saves {format_size(nbytes)} at once, as a compiled model does; the peak stays above that"
    )
    remedy = "compile block by block (for block in model.blocks: block.compile())"
    return Cause(nbytes, evidence, [remedy]) if nbytes else None


def host_memory_full(f: Facts) -> Cause | None:
    """Host memory was used up, so tensors stayed on the device."""
    nbytes, size = f.accounts.refused_bytes // f.steps, format_size(f.host_bytes)
    if not nbytes or nbytes < HELD * f.counts.baseline_peak_bytes:
        return None
    evidence = f"{format_size(nbytes)} a step stay on the device, as the {size} of host memory are full"
    more = f"host_budget={format_size(f.host_bytes + nbytes)!r}, if the machine has that"
    return Cause(nbytes, evidence, [more, "or target='tiered' with path=, so that the rest goes to disk"])


def peak_of_others(f: Facts) -> Cause | None:
    """Memory that autograd does not save sets the peak."""
    (peak, of), s, before = _peak(f), f.counts, f.before_bytes
    if before is None or not s.packed_tensors:
        return None
    transient = max(0, peak - before - s.resident_peak_bytes)
    others = transient if of == "process" else transient + before  # a process has Python and libraries before
    if s.baseline_peak_bytes >= SMALL_PART * (others + s.baseline_peak_bytes) or others < LEAST_OTHERS:
        return None
    evidence = (
        f"of the {of}'s peak, {format_size(peak)}, saved activations are at most {format_size(s.resident_peak_bytes)}; "
        f"{format_size(before)} were there before the first forward, and {format_size(transient)} are gradients, "
        "optimizer states and temporaries"
    )
    return Cause(others, evidence, ["look for those first: moving activations lowers the peak by no more than it has"])


def _peak(f: Facts) -> tuple[int, str]:
    """The peak, and whether it is the device's or the process's."""
    s = f.counts
    return (s.device_peak_bytes, "device") if s.device_peak_bytes else (s.process_peak_bytes, "process")


SLOWER = (slow_link, host_bound)
MEMORY = (
    nothing_reached,
    stays,
    leaves_too_late,
    degraded,
    held_elsewhere,
    compiled_whole,
    host_memory_full,
    peak_of_others,
)


def _priced(planned: Planned, row: BudgetRow) -> str:
    """The row's budget as an option, with the predicted peak and time beside those of the plan."""
    peak, step = format_size(row.peak_bytes or 0), format_time(row.step_s or 0.0)
    before = format_size(planned.plan.predicted_peak_bytes or 0), format_time(planned.step_s)
    size = f"{peak} instead of {before[0]}" if peak != before[0] else f"{peak}, as now"
    time = f"{step} instead of {before[1]}" if step != before[1] else f"{step}, as now,"
    budget = row.device_budget
    option = f"device_budget='{f'{budget >> 20}MiB' if budget % (1 << 20) == 0 else f'{budget >> 10}KiB'}'"
    return f"{option} is predicted to peak at {size}, and to take {time} for {planned.unit}"


def _faster(planned: Planned) -> list[str]:
    """The lowest budget with nearly the shortest step, if that step is shorter by `WORTH_SAYING`."""
    rows = [row for row in planned.budgets if row.step_s and row.step_s <= (1 - WORTH_SAYING) * planned.step_s]
    enough_s = (1 + WORTH_SAYING / 5) * min((row.step_s or 0.0 for row in rows), default=0.0)
    enough = [row for row in rows if (row.step_s or 0.0) <= enough_s]
    return [_priced(planned, min(enough, key=lambda row: row.device_budget))] if enough else []
