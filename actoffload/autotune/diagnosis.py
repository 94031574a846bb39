"""What a run is told: the facts of an offloader, and the causes that they are evidence of, as lines of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from ..events import now
from ..planning.constants import MOST_CAUSES
from ..planning.explain import format_time
from ..planning.observed import Observed
from ..planning.profile import Link
from ..runtime.store import ActivationStore
from ..sizes import format_size
from ..statistics import Statistics
from ..storage.engines.base import IoKind
from ..storage.spool import Spool
from .autopilot import Autopilot
from .causes import Facts, Planned, causes


def known_at_the_end(facts: Facts, pilot: Autopilot | None) -> dict[str, Any]:
    """What a trace has of the whole run beside the statistics, ready for JSON."""
    planned = facts.planned
    found: dict[str, Any] = {
        "diagnosis": diagnose(facts),
        "planned_for": None if planned is None else planned.unit,
        "plans": [] if pilot is None else list(pilot.history),
        "profile": None,
        "limits": None,
        "predicted": None,
        "seen": None,
    }
    if planned is not None:
        plan, seen = planned.plan, planned.seen
        found["profile"] = json.loads(planned.profile.to_json())
        found["limits"] = asdict(planned.limits)
        found["predicted"] = {"step_s": plan.predicted_step_s, "peak_bytes": plan.predicted_peak_bytes}
        if seen is not None:
            found["seen"] = {"step_s": seen.step_s, "wait_s": seen.wait_s, "peak_bytes": seen.peak_bytes}
    return found


def planned_by(pilot: Autopilot | None, counts: Statistics) -> Planned | None:
    """What an autopilot knows; None before it has a plan."""
    if pilot is None or pilot.profile is None or pilot.plan is None:
        return None
    profile, plan = pilot.profile, pilot.plan
    unit = profile.unit(counts.microbatches, counts.optimizer_steps)
    return Planned(profile=profile, plan=plan, limits=pilot.limits, seen=pilot.seen, unit=unit)


def facts_of(store: ActivationStore, pilot: Autopilot | None, held_bytes: Mapping[str, int] | None = None) -> Facts:
    """What is known of a run; ``held_bytes``: see `Facts`."""
    counts, spool, pools = store.statistics(), store.tiers.spool, store.tiers.pools
    planned = planned_by(pilot, counts)
    before, peak_before = store.run.memory_before
    cached = spool is not None and not spool.direct and spool.engines[0].capabilities.needs_file
    step, first_wait_s = _step(store)
    return Facts(
        config=store.shared.config,
        counts=counts,
        accounts=store.shared.accounts,
        planned=planned,
        step=planned.seen if planned is not None and planned.seen is not None else step,
        first_wait_s=first_wait_s,
        disk=planned.profile.disk if planned is not None else _disk(spool),
        cached_by=spool.engine_name if spool is not None and cached else "",
        host_bytes=sum(pool.capacity_bytes for pool in pools),
        pageable=any(pool.pin_failed for pool in pools),
        before_bytes=before if peak_before < (counts.device_peak_bytes or counts.process_peak_bytes) else None,
        held_bytes=held_bytes or {},
    )


def _step(store: ActivationStore) -> tuple[Observed | None, float]:
    """The mean of all steps but the first, and what backward waits in it for what it asks for first."""
    if store.run.first_step is None:
        return None, 0.0
    accounts, (began_s, before) = store.shared.accounts, store.run.first_step
    steps = max(1, accounts.optimizer_steps - before.optimizer_steps or accounts.microbatches - before.microbatches)
    step = Observed(
        step_s=max(1e-9, now() - began_s) / steps,
        forward_wait_s=(accounts.pack_wait_s - before.pack_wait_s) / steps,
        backward_wait_s=(accounts.unpack_wait_s - before.unpack_wait_s) / steps,
    )
    return step, (accounts.first_wait_s - before.first_wait_s) / steps


def _disk(spool: Spool | None) -> Link | None:
    """How fast the disk was, where no plan says it."""
    if spool is None:
        return None
    write, read = (spool.meters[kind].bytes_per_s for kind in (IoKind.WRITE, IoKind.READ))
    known = write or read
    return None if known is None else Link(write_bytes_per_s=write or known, read_bytes_per_s=read or known)


def diagnose(facts: Facts) -> list[str]:
    """Return the causes that weigh the most and one thing to do about each, as lines; none before the first step."""
    if not facts.counts.steps:
        return []
    if facts.config.policy == "keep":
        return ["diagnosis: nothing moves, as policy='keep' says"]
    ranked = [cause for pair in zip_longest(*causes(facts)) for cause in pair if cause is not None]
    lines: list[str] = []
    for _, told, remedies in ranked[:MOST_CAUSES]:
        lines += [f"diagnosis: {told}", *(f"  next: {remedy}" for remedy in remedies[:1])]
    return lines or [f"diagnosis: OK: {_waits(facts)}"]


def explain_causes(facts: Facts) -> list[str]:
    """Return all causes with all that can be done, as lines; one line where nothing is wrong, none before a step."""
    if not facts.counts.steps:
        return []
    if facts.config.policy == "keep":
        return ["nothing moves, as policy='keep' says"]
    slower, memory = causes(facts)
    if not slower and not memory:
        return [f"nothing slows the step, and nothing keeps memory from falling: {_waits(facts)}"]
    lines: list[str] = []
    for title, found in (("why is a step slower:", slower), ("why did memory not fall:", memory)):
        lines.append(title if found else f"{title} nothing was found")
        for weight, told, remedies in found:
            size = f"{format_time(weight)} a step" if found is slower else format_size(int(weight))
            lines += [f"  {size}: {told}", *(f"    next: {remedy}" for remedy in remedies)]
    return lines


def _waits(facts: Facts) -> str:
    waited = f"{facts.share(facts.wait_s):.1%} of the time was spent waiting"
    return "one step was seen" if facts.step is None else waited
