"""Why a step is slower, and why memory did not fall: each cause with the figures of this run and what to do. Pure.

Each cause is one function of the facts, which returns None where they are no evidence of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..config import OffloadConfig
from ..planning.constants import (
    HELD,
    LARGE_FIRST,
    LEAST_OTHERS,
    MORE_BUDGET,
    MUCH_KEPT,
    PART_OF_WAITS,
    SLOW,
    SMALL_PART,
    WORTH_SAYING,
)
from ..planning.explain import BudgetRow, budget_rows, format_time, next_block
from ..planning.plan import Plan
from ..planning.planners.base import Limits, Planner
from ..planning.planners.feedback import Observed
from ..planning.profile import Link, Profile
from ..policy import STATIC
from ..sizes import format_size
from ..statistics import Statistics

_WHEN_IT_STAYS = {
    "below min_bytes": "lower min_bytes",
    "other device": "CPU tensors move with target='nvme' and path= alone; for other devices pass devices=",
    "no time to move": "set device_budget, so that a step may wait for what leaves",
    "pressure": "set device_budget, so that forward waits for what leaves; or raise pending_bytes",
    "last saved layer": "pass keep_last_bytes=0; a deeper model has more that can leave",
}
_WHEN_ALL_STAYS = _WHEN_IT_STAYS | {
    "below min_bytes": "lower min_bytes: every activation is smaller",
    "module excluded": "widen include=, or name less in exclude=",
    "policy": "have the policy decide Decision.OFFLOAD for larger tensors",
    "fits the budget": "lower device_budget",
}
_WHEN_DEGRADED = {
    "no room on disk": "free room under path=, raise nvme_budget, or give another path=",
    "write failed": "look at the disk under path= (dmesg), or give another path=",
}
_BLOCK_BY_BLOCK = "compile block by block (for block in model.blocks: block.compile())"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What ``policy="auto"`` knows: what it planned from and how, the plan, and the steps that were seen under it."""

    profile: Profile
    plan: Plan
    limits: Limits
    planner: Planner
    seen: Observed | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run. Bytes and seconds; the times are those of one step, without the first one's.

    It has more than fifteen fields, one for each figure that a cause is told by.

    Attributes:
        config: the options of the offloader.
        counts: what it counted.
        planned: its plan, where it has one: budgets are only named with what they are predicted to give.
        step_s: a step; 0 where only the first one was seen.
        forward_wait_s, backward_wait_s: what it waited in forward for what leaves, in backward for what comes back.
        idle_s: an accelerator had no work, as the hooks kept the host from giving it some.
        first_wait_s: of the waits, for what backward asks for first; ``first_bytes``: how much that is.
        disk: how fast the disk was.
        cached_by: the engine that writes through the page cache; empty where none does.
        pageable: host memory could not be page-locked.
        host_bytes: most host memory; ``refused_bytes``: what stayed for want of it, in all steps.
        degraded_bytes: what stayed as something below failed, in all steps.
        at_once_bytes: the most that one autograd node saved, where that was most of a forward.
        before_bytes: memory of the device or the process before the first forward; None where the peak was before that.
        held_bytes: tensors that autograd functions hold as attributes, by the function's name.
    """

    config: OffloadConfig
    counts: Statistics
    planned: Planned | None = None
    step_s: float = 0.0
    forward_wait_s: float = 0.0
    backward_wait_s: float = 0.0
    idle_s: float = 0.0
    first_wait_s: float = 0.0
    first_bytes: int = 0
    disk: Link | None = None
    cached_by: str = ""
    pageable: bool = False
    host_bytes: int = 0
    refused_bytes: int = 0
    degraded_bytes: int = 0
    at_once_bytes: int = 0
    before_bytes: int | None = None
    held_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def wait_s(self) -> float:
        """What a step waited."""
        return self.forward_wait_s + self.backward_wait_s

    def share(self, seconds: float) -> float:
        """A time as a share of a step; where the host and a stream wait at once, the step is no shorter than that."""
        return seconds / max(self.step_s, self.wait_s) if self.step_s else 0.0

    @property
    def steps(self) -> int:
        """Steps so far."""
        return max(1, self.counts.optimizer_steps or self.counts.microbatches or self.counts.steps)

    @property
    def kept_bytes(self) -> dict[str, int]:
        """Activations that stayed in a step, by reason, but for those that found no host memory."""
        kept = {reason: nbytes for reason, nbytes in self.counts.kept_bytes.items() if reason not in STATIC}
        if self.refused_bytes:
            kept["pressure"] = kept.get("pressure", 0) - self.refused_bytes
        return {reason: nbytes // self.steps for reason, nbytes in kept.items() if nbytes > 0}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a step is slower, or why memory did not fall.

    Attributes:
        weight: seconds of a step, or bytes: causes are ranked by it.
        evidence: what was seen in this run.
        remedies: what to do, the best first.
    """

    weight: float
    evidence: str
    remedies: tuple[str, ...]


def causes(facts: Facts) -> tuple[list[Cause], list[Cause]]:
    """Return why a step is slower, and why memory did not fall, each list with the heaviest cause first."""

    def found(checks: tuple[Callable[[Facts], Cause | None], ...]) -> list[Cause]:
        return sorted(filter(None, (check(facts) for check in checks)), key=lambda cause: -cause.weight)

    return found(SLOWER), found(MEMORY)


# -- why is a step slower ---------------------------------------------------------------------------------------------


def slow_link(f: Facts) -> Cause | None:
    """The disk, or the way to host memory, is slower than the step needs it."""
    forward_s, backward_s = f.forward_wait_s, max(0.0, f.backward_wait_s - _first_wait_s(f))
    waited_s = forward_s + backward_s
    if f.share(f.wait_s) < SLOW or waited_s < PART_OF_WAITS * f.wait_s:
        return None
    on_disk, planned, config = bool(f.counts.nvme_written_bytes), f.planned, f.config
    medium, part = "the disk" if on_disk else "host memory", "forward" if forward_s > backward_s else "backward"
    remedies: list[str] = []
    if planned is not None and planned.limits.device_budget is not None:
        remedies += _another_budget(planned, planned.limits.device_budget)
        if not planned.profile.blocks:
            remedies.append("pass model=, so that blocks can be recomputed where that is cheaper than waiting")
    elif config.policy != "auto" and config.device_budget is not None:
        remedies.append("policy='auto' with model= recomputes blocks where that takes less than waiting")
    elif config.policy != "auto":
        remedies.append("policy='auto' keeps what cannot be moved in time")
    elif config.device_budget is not None:
        remedies.append("raise device_budget: forward waits until what is above it has left")
    if on_disk:
        remedies.append("give path= on a faster disk ('actoffload bench' measures one), or several to stripe over")
    return Cause(
        weight=waited_s,
        evidence=f"{f.share(waited_s):.0%} of a step waits for {medium}, mostly in {part}"
        + _rate(f, on_disk=on_disk, write=part == "forward"),
        remedies=tuple(remedies) or ("set max_slowdown=0.02: what would take longer stays",),
    )


def _rate(f: Facts, *, on_disk: bool, write: bool) -> str:
    """How fast a link was, and how fast it would have to be at the least: as if all of a step were there for it."""
    link = f.disk if on_disk else f.planned.profile.host if f.planned is not None else None
    if link is None:
        return ""
    found = (link.write_bytes_per_s if write else link.read_bytes_per_s) / 1e9
    needed = f.counts.moved_bytes / f.steps / max(1e-9, f.step_s - f.wait_s) / 1e9
    more = f" and needs more than {needed:.2g}" if needed > found else ""
    return f": it {'writes' if write else 'reads'} {found:.2g} GB/s{more}"


def _first_wait_s(f: Facts) -> float:
    """What backward waits for what it asks for first; 0 where that is little, or a plan has weighed it."""
    weighed = f.planned is not None and f.planned.seen is not None
    little = f.first_bytes < LARGE_FIRST * f.counts.baseline_peak_bytes
    return 0.0 if weighed or little else f.first_wait_s


def first_moves(f: Facts) -> Cause | None:
    """What forward saves last moves, as a loss's logits, and backward waits for it as it begins."""
    waited_s = _first_wait_s(f)
    if f.share(f.wait_s) < SLOW or waited_s < PART_OF_WAITS * f.wait_s:
        return None
    size = format_size(f.first_bytes)
    keeps = f.config.policy in ("auto", "greedy")
    return Cause(
        weight=waited_s,
        evidence=f"{f.share(waited_s):.0%} of a step waits as backward begins: the last {size} that forward saves "
        "move, and are wanted back at once",
        remedies=(
            f"keep_last_bytes={size!r} keeps them" if keeps else "policy='auto' keeps them",
            "or name the last module, such as the head, in exclude=",
        ),
    )


def host_bound(f: Facts) -> Cause | None:
    """The device idles while hooks that move tensors keep the host busy."""
    if f.share(f.idle_s) < SLOW:
        return None
    planned, budget = f.planned, None if f.planned is None else f.planned.limits.device_budget
    priced = _another_budget(planned, budget) if planned is not None and budget is not None else []
    return Cause(
        weight=f.idle_s,
        evidence=f"for {f.share(f.idle_s):.0%} of a step the device has no work, as hooks that move tensors keep the "
        "host busy",
        remedies=(*priced, "raise min_bytes, so that fewer and larger tensors move; or take larger batches"),
    )


def pageable_copies(f: Facts) -> Cause | None:
    """Copies go through host memory that is not page-locked, so the host waits for each."""
    if not f.pageable or not f.counts.host_written_bytes:
        return None
    written, read = f.counts.host_written_bytes / f.steps, f.counts.host_read_bytes / f.steps
    link = None if f.planned is None else f.planned.profile.host
    return Cause(
        weight=0.0 if link is None else written / link.write_bytes_per_s + read / link.read_bytes_per_s,
        evidence=f"host memory could not be page-locked: {format_size(int(written + read))} a step are copied through "
        "pageable memory, and the host waits for each copy",
        remedies=("raise the limit of locked memory (ulimit -l unlimited), or lower host_budget until it suffices",),
    )


# -- why did memory not fall ------------------------------------------------------------------------------------------


def nothing_reached(f: Facts) -> Cause | None:
    """Autograd saved nothing inside the context."""
    if f.counts.packed_tensors or not f.counts.steps:
        return None
    return Cause(
        weight=max(0, _whole(f)[0] - (f.before_bytes or _whole(f)[0])),
        evidence=f"autograd saved nothing inside the context in {f.counts.steps} forward passes",
        remedies=(
            "run the forward inside the context and in its thread, with gradients (not under torch.no_grad()), and "
            "inside no other saved_tensors_hooks, which take what is saved",
        ),
    )


def stays(f: Facts) -> Cause | None:
    """Nothing moves, or most of what is saved stays, for a reason."""
    s, kept = f.counts, f.kept_bytes
    reason = max(kept, key=lambda name: kept[name], default="")
    nbytes, saved_bytes = kept.get(reason, 0), s.activation_bytes // f.steps
    if saved_bytes and not (s.moved_bytes or s.forwarded_bytes or s.cancelled_bytes):
        why = f.planned.plan.declined if f.planned is not None and f.planned.plan.declined else reason
        remedy = _WHEN_ALL_STAYS.get(reason)
        told = f"nothing moves ({why or 'see above'})"
        return Cause(weight=sum(kept.values()), evidence=told, remedies=(remedy,) if remedy else ())
    if f.planned is not None:
        return _no_time(f, f.planned)
    if reason not in _WHEN_IT_STAYS or nbytes < MUCH_KEPT * saved_bytes:
        return None
    told = f"{format_size(nbytes)} of {format_size(saved_bytes)} that a step saves stay ({reason})"
    return Cause(weight=nbytes, evidence=told, remedies=(_WHEN_IT_STAYS[reason],))


def _no_time(f: Facts, planned: Planned) -> Cause | None:
    """A plan that may not slow the step down keeps much; a budget is priced."""
    peak, whole = f.counts.plan_peak_bytes, f.counts.baseline_peak_bytes
    if peak < MUCH_KEPT * whole or planned.limits.device_budget is not None:
        return None
    (row,) = budget_rows(planned.profile, planned.limits, planned.planner, [peak // 2])
    now_s = planned.plan.predicted_step_s or planned.profile.step_s
    known = row.step_s is not None and row.peak_bytes is not None
    priced = (f"{_predicted(row)} instead of {format_time(now_s)}",) if known else ()
    why = planned.plan.declined or "no more can be moved in time"
    return Cause(weight=peak, evidence=f"{peak / whole:.0%} of the activations' peak stays: {why}", remedies=priced)


def degraded(f: Facts) -> Cause | None:
    """Something below failed, so tensors stayed."""
    if not f.counts.degraded:
        return None
    told = ", ".join(f"{count} × {reason}" for reason, count in sorted(f.counts.degraded.items()))
    return Cause(
        weight=f.degraded_bytes / f.steps,
        evidence=f"memory is not saved as it could be: {told}",
        remedies=tuple(step for reason, step in _WHEN_DEGRADED.items() if reason in f.counts.degraded),
    )


def held_by_functions(f: Facts) -> Cause | None:
    """Custom autograd functions hold tensors as attributes of ``ctx``, where no hook sees them."""
    nbytes = sum(f.held_bytes.values())
    if not nbytes or nbytes < HELD * f.counts.baseline_peak_bytes:
        return None
    names = ", ".join(sorted(f.held_bytes, key=lambda name: -f.held_bytes[name])[:3])
    return Cause(
        weight=nbytes,
        evidence=f"{format_size(nbytes)} of tensors are attributes of ctx in custom autograd functions ({names}), "
        "alive as long as the loss",
        remedies=("save them by ctx.save_for_backward(...), and read them from ctx.saved_tensors",),
    )


def compiled_whole(f: Facts) -> Cause | None:
    """One autograd node saves most of a forward at once, as a whole model under ``torch.compile`` does."""
    if not f.at_once_bytes:
        return None
    return Cause(
        weight=f.at_once_bytes,
        evidence=f"one autograd node saves {format_size(f.at_once_bytes)} at once, as a compiled model does; the peak "
        "does not fall below that",
        remedies=(_BLOCK_BY_BLOCK,),
    )


def page_cache(f: Facts) -> Cause | None:
    """What is written to disk stays in the machine's memory, as the engine writes through the page cache."""
    if not f.cached_by or not f.counts.nvme_peak_bytes:
        return None
    return Cause(
        weight=f.counts.nvme_peak_bytes,
        evidence=f"up to {format_size(f.counts.nvme_peak_bytes)} on disk are in the page cache as well, which is the "
        f"machine's memory: the {f.cached_by} engine writes through it",
        remedies=("give path= on a file system with direct I/O (ext4, XFS), and leave engine= out",),
    )


def host_memory_full(f: Facts) -> Cause | None:
    """Host memory was used up, so tensors stayed on the device."""
    nbytes = f.refused_bytes // f.steps
    if nbytes < max(1, HELD * f.counts.baseline_peak_bytes):
        return None
    return Cause(
        weight=nbytes,
        evidence=f"{format_size(nbytes)} a step stay on the device, as the {format_size(f.host_bytes)} of host memory "
        "that may be page-locked are full",
        remedies=(
            f"host_budget={format_size(f.host_bytes + nbytes)!r}, if the machine has that",
            "or target='tiered' with path=, so that the rest goes to disk",
        ),
    )


def peak_of_others(f: Facts) -> Cause | None:
    """The peak is set by what autograd does not save."""
    whole, of = _whole(f)
    s, before = f.counts, f.before_bytes
    if before is None or not s.packed_tensors:
        return None
    transient = max(0, whole - before - s.resident_peak_bytes)
    others = transient if of == "process" else transient + before  # a process has Python and libraries before
    if s.baseline_peak_bytes >= SMALL_PART * (others + s.baseline_peak_bytes) or others < LEAST_OTHERS:
        return None
    return Cause(
        weight=others,
        evidence=f"the {of}'s peak is {format_size(whole)}, of which saved activations are at most "
        f"{format_size(s.resident_peak_bytes)}: {format_size(before)} were there before the first forward, and "
        f"{format_size(transient)} are gradients, optimizer states and temporaries",
        remedies=("look for those first: moving activations lowers the peak by no more than it has",),
    )


def _whole(f: Facts) -> tuple[int, str]:
    """The peak of the device or the process, and which of them it is."""
    s = f.counts
    return (s.device_peak_bytes, "device") if s.device_peak_bytes else (s.process_peak_bytes, "process")


SLOWER = (slow_link, first_moves, host_bound, pageable_copies)
MEMORY = (
    nothing_reached,
    stays,
    degraded,
    held_by_functions,
    compiled_whole,
    page_cache,
    host_memory_full,
    peak_of_others,
)


# -- budgets ----------------------------------------------------------------------------------------------------------


def _another_budget(planned: Planned, budget: int) -> list[str]:
    """What a budget above the next block, or `MORE_BUDGET` times as large, is predicted to give."""
    block, enough = next_block(planned.profile, budget) if planned.limits.recompute else (0, 0)
    tried = enough or min(int(MORE_BUDGET * budget), planned.profile.baseline_peak_bytes)
    (row,) = budget_rows(planned.profile, planned.limits, planned.planner, [tried])
    now_s = planned.plan.predicted_step_s
    if row.step_s is None or row.peak_bytes is None or now_s is None or row.step_s > (1 - WORTH_SAYING) * now_s:
        return []
    why = ""
    if block:
        why = f" (device_budget {format_size(budget)} is below one block, {format_size(block)}: none can be recomputed)"
    return [f"{_predicted(row)} instead of {format_time(now_s)}{why}"]


def _predicted(row: BudgetRow) -> str:
    assert row.step_s is not None, "the budget can be kept"
    assert row.peak_bytes is not None, "with its step its peak is known"
    budget = f"device_budget={format_size(row.device_budget)!r}"
    peak = format_size(row.peak_bytes)
    return f"{budget} is predicted to peak at {peak} and to take {format_time(row.step_s)} a step"
