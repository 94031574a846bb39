"""The facts of a run as plain data. Causes, reports and explanations are made from them, and a trace stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..config import OffloadConfig
from ..events import now
from ..planning.observed import Observed, PlanFacts
from ..planning.plan import Plan
from ..planning.profile import Link, Profile
from ..planning.search import Limits
from ..sizes import format_size
from ..storage.engines.base import EngineCapabilities, IoKind
from ..tiers.accounts import Accounts
from ..tiers.statistics import Statistics
from .parts import BudgetRow, budget_table

if TYPE_CHECKING:
    from ..runtime.store import ActivationStore

CHANGED = 0.15
"""A step that takes another time by this share, waits apart, is another machine's: the median of steps varies less."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned step: the profile that it was planned from, the plan, and the steps that ran under it.

    ``unit`` is the planned part of training, as `Profile.unit` names it: a step or a micro-batch.
    """

    profile: Profile
    plan: Plan
    limits: Limits
    seen: Observed | None
    unit: str = "a step"

    @cached_property
    def budgets(self) -> list[BudgetRow]:
        """The step with other budgets. Each search takes time, so all text about this plan shares one table."""
        return budget_table(self.profile, self.limits)

    @property
    def step_s(self) -> float:
        """The predicted step."""
        return self.plan.predicted_step_s or self.profile.step_s


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a run, in bytes and seconds.

    Attributes:
        config: the options of the offloader.
        counts: its statistics; ``accounts``: the counts that no statistic shows.
        planned: its plan, if there is one.
        step: a step under the plan, else the mean of all steps but the first; None if the first one alone was seen.
        disk: the measured rates of the disk.
        engine: the storage engine; None without a disk.
        host_bytes: the most host memory.
        before_bytes: memory of the device or the process before the first forward; None if the peak was before that.
        notes: remarks and advice from the run.
        elapsed_s: seconds since the first forward began, which the wear of the drives is computed from.
    """

    config: OffloadConfig
    counts: Statistics
    accounts: Accounts = field(default_factory=Accounts)
    planned: Planned | None = None
    step: Observed | None = None
    disk: Link | None = None
    engine: EngineCapabilities | None = None
    host_bytes: int = 0
    before_bytes: int | None = None
    notes: Sequence[str] = ()
    elapsed_s: float = 0.0

    @property
    def steps(self) -> int:
        """Steps so far."""
        counts = self.counts
        return max(1, counts.optimizer_steps or counts.microbatches or counts.steps - counts.unhooked)

    @property
    def units(self) -> float:
        """Steps so far, or units of the plan if `step` measures one of those."""
        planned = self.planned
        if planned is None or planned.seen is None:
            return self.steps
        return max(1.0, self.counts.microbatches / planned.profile.forwards)

    @property
    def wait_s(self) -> float:
        """The waits of a step."""
        return 0.0 if self.step is None else self.step.wait_s

    def share(self, seconds: float) -> float:
        """A time as a share of a step. Host and stream can wait at once, so waits may add up to more than the step."""
        return 0.0 if self.step is None else seconds / max(self.step.step_s, self.wait_s)

    @property
    def summary(self) -> str:
        """The run in one line."""
        counts = self.counts
        if not counts.packed_tensors:
            return "autograd saved nothing inside the context yet"
        peak, whole = format_size(counts.plan_peak_bytes or counts.resident_peak_bytes), counts.baseline_peak_bytes
        (number, unit), before = peak.split(), format_size(whole)
        before = before.removesuffix(f" {unit}")
        change = peak if peak == format_size(whole) else f"{before} → {number} {unit}"
        parts = [f"{passes(counts)}: activations' peak {change}"]
        if self.step is not None:
            parts.append(f"{self.share(self.wait_s):.1%} waited")
        if counts.nvme_written_bytes:
            parts.append(f"{format_size(counts.nvme_written_bytes)} to NVMe")
        elif counts.host_written_bytes:
            parts.append(f"{format_size(counts.host_written_bytes)} to host memory")
        return self.inexact + ", ".join(parts if counts.moved_bytes else [*parts, "nothing moved"])

    @property
    def inexact(self) -> str:
        """The beginning of each first line where the option ``fp8`` rounds saved tensors, else nothing."""
        return f"gradients are not exact: fp8 for {', '.join(self.config.fp8)}; " if self.config.fp8 else ""

    def as_dict(self) -> dict[str, Any]:
        """The part of the facts that a trace stores at its end, ready for JSON."""
        found: dict[str, Any] = dict.fromkeys(("predicted", "seen", "planned_for"))
        found["statistics"] = self.counts.as_dict()
        planned = self.planned
        if planned is not None:
            plan, seen = planned.plan, planned.seen
            found["planned_for"] = planned.unit
            found["machine_changed"] = machine_changed(planned.profile, seen)
            found["predicted"] = {"step_s": plan.predicted_step_s, "peak_bytes": plan.predicted_peak_bytes}
            if seen is not None:
                found["seen"] = {"step_s": seen.step_s, "wait_s": seen.wait_s, "peak_bytes": seen.peak_bytes}
        return found


def passes(s: Statistics) -> str:
    """The amount of work: optimizer steps and their micro-batches, or forward passes if no optimizer stepped."""
    if not s.optimizer_steps:
        number = s.steps - s.unhooked
        return f"{number} forward pass{'es' * (number != 1)}"
    steps = f"{s.optimizer_steps} step{'s' * (s.optimizer_steps != 1)}"
    return f"{steps} ({s.microbatches} micro-batches)" if s.microbatches > s.optimizer_steps else steps


def machine_changed(profile: Profile, seen: Observed | None) -> str:
    """Whether computing alone takes another time than in the recorded step, so that the prediction must miss."""
    seen = None if seen is None else seen.as_recorded(profile)
    change = 0.0 if seen is None else (seen.step_s - seen.wait_s) / profile.step_s - 1
    if abs(change) < CHANGED:
        return ""
    now_takes = f"{abs(change):.0%} {'longer' if change > 0 else 'less'}"
    return f"the machine has changed since the step was recorded: without waits it takes {now_takes}, whatever the plan"


def facts_of(store: ActivationStore, plans: PlanFacts | None) -> Facts:
    """The facts of a run so far, with its plans if ``policy="auto"`` has made any."""
    counts, spool, pools = store.statistics(), store.tiers.spool, store.tiers.pools
    planned = None
    if plans is not None and (profile := plans.shape.profile) is not None and (plan := plans.shape.plan) is not None:
        unit = profile.unit(counts.microbatches, counts.optimizer_steps)
        planned = Planned(profile=profile, plan=plan, limits=plans.limits, seen=plans.shape.seen, unit=unit)
    disk = None if planned is None else planned.profile.disk
    if planned is None and spool is not None:
        disk = Link.measured(*(spool.meters[way].bytes_per_s for way in (IoKind.WRITE, IoKind.READ)))
    before, peak_before = store.run.memory_before
    return Facts(
        config=store.shared.config,
        counts=counts,
        accounts=store.shared.accounts,
        planned=planned,
        step=planned.seen if planned is not None and planned.seen is not None else _step(store),
        disk=disk,
        engine=None if spool is None else spool.capabilities,
        host_bytes=sum(pool.capacity_bytes for pool in pools),
        before_bytes=before if peak_before < (counts.device_peak_bytes or counts.process_peak_bytes) else None,
        notes=[*store.tiers.remarks, *store.shared.reporter.advice.values()],
        elapsed_s=store.run.elapsed_s,
    )


def _step(store: ActivationStore) -> Observed | None:
    """The mean of all steps but the first."""
    if store.run.first_step is None:
        return None
    accounts, (began_s, before) = store.shared.accounts, store.run.first_step
    steps = max(1, accounts.optimizer_steps - before.optimizer_steps or accounts.microbatches - before.microbatches)
    forwards, unhooked = accounts.steps - before.steps, accounts.unhooked - before.unhooked
    hooked = 1 - unhooked / max(1, forwards)  # only such are among the steps that were counted
    return Observed(
        step_s=max(1e-9, hooked * (now() - began_s)) / steps,
        forward_wait_s=(accounts.pack_wait_s - before.pack_wait_s) / steps,
        backward_wait_s=(accounts.unpack_wait_s - before.unpack_wait_s) / steps,
    )
