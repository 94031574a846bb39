"""What a run is told: the facts of an offloader, and the causes that they are evidence of, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from ..events import now
from ..planning.constants import MOST_CAUSES
from ..planning.explain import format_time
from ..planning.profile import Link
from ..runtime.store import ActivationStore
from ..sizes import format_size
from ..storage.engines.base import IoKind
from ..tiers.tiers import Tiers
from .autopilot import Autopilot
from .causes import Cause, Facts, Planned, causes


def planned_by(pilot: Autopilot | None) -> Planned | None:
    """What an autopilot knows; None before it has a plan."""
    if pilot is None or pilot.profile is None or pilot.plan is None:
        return None
    return Planned(profile=pilot.profile, plan=pilot.plan, limits=pilot.limits, planner=pilot.planner, seen=pilot.seen)


def facts_of(store: ActivationStore, pilot: Autopilot | None, held_bytes: Mapping[str, int] | None = None) -> Facts:
    """What is known of a run; ``held_bytes``: see `Facts`."""
    counts, tiers, accounts = store.statistics(), store.tiers, store.shared.accounts
    planned, spool = planned_by(pilot), tiers.spool
    before, peak_before = store.memory_before
    cached = spool is not None and not spool.direct and spool.engines[0].capabilities.needs_file
    return Facts(
        config=store.shared.config,
        counts=counts,
        planned=planned,
        first_bytes=accounts.first_bytes,
        disk=_disk(tiers, planned),
        cached_by=spool.engine_name if cached and spool is not None else "",
        pageable=any(pool.pin_failed for pool in tiers.pools),
        host_bytes=sum(pool.capacity_bytes for pool in tiers.pools),
        refused_bytes=accounts.refused_bytes,
        degraded_bytes=accounts.degraded_bytes,
        at_once_bytes=accounts.at_once_bytes,
        before_bytes=before if peak_before < (counts.device_peak_bytes or counts.process_peak_bytes) else None,
        held_bytes=held_bytes or {},
        **_times(store, planned),
    )


def _times(store: ActivationStore, planned: Planned | None) -> dict[str, Any]:
    """The times of one step: of the last ones under the plan, else of all but the first."""
    if planned is not None and planned.seen is not None:
        seen = planned.seen
        return {
            "step_s": seen.step_s,
            "forward_wait_s": seen.forward_wait_s,
            "backward_wait_s": seen.backward_wait_s,
            "idle_s": seen.idle_s,
        }
    if store.first_step is None:
        return {}
    began_s, before = store.first_step
    accounts = store.shared.accounts
    steps = max(1, accounts.optimizer_steps - before.optimizer_steps or accounts.microbatches - before.microbatches)
    return {
        "step_s": (now() - began_s) / steps,
        "forward_wait_s": (accounts.pack_wait_s - before.pack_wait_s) / steps,
        "backward_wait_s": (accounts.unpack_wait_s - before.unpack_wait_s) / steps,
        "first_wait_s": (accounts.first_wait_s - before.first_wait_s) / steps,
    }


def _disk(tiers: Tiers, planned: Planned | None) -> Link | None:
    """How fast the disk was."""
    if planned is not None or tiers.spool is None:
        return None if planned is None else planned.profile.disk
    write, read = (tiers.spool.meters[kind].bytes_per_s for kind in (IoKind.WRITE, IoKind.READ))
    known = write or read
    return None if known is None else Link(write_bytes_per_s=write or known, read_bytes_per_s=read or known)


def diagnose(facts: Facts) -> list[str]:
    """Return the causes that weigh the most and one thing to do about each, as lines; none before the first step."""
    if not facts.counts.steps:
        return []
    pairs = zip_longest(*causes(facts))
    ranked = [cause for pair in pairs for cause in pair if cause is not None][:MOST_CAUSES]
    if not ranked:
        return [f"diagnosis: OK: {_waits(facts)}"]
    return [line for cause in ranked for line in _cause_lines(cause)]


def _cause_lines(cause: Cause) -> list[str]:
    return [f"diagnosis: {cause.evidence}", *(f"  next: {remedy}" for remedy in cause.remedies[:1])]


def explain_causes(facts: Facts) -> list[str]:
    """Return all causes with all that can be done, as lines; one line where nothing is wrong, none before a step."""
    if not facts.counts.steps:
        return []
    slower, memory = causes(facts)
    if not slower and not memory:
        return [f"nothing slows the step, and nothing keeps memory from falling: {_waits(facts)}"]
    lines: list[str] = []
    for title, found in (("why is a step slower", slower), ("why did memory not fall", memory)):
        lines.append(f"{title}: {'' if found else 'nothing was found'}".rstrip())
        for cause in found:
            weight = format_time(cause.weight) + " a step" if found is slower else format_size(int(cause.weight))
            lines += [f"  {weight}: {cause.evidence}", *(f"    next: {remedy}" for remedy in cause.remedies)]
    return lines


def _waits(facts: Facts) -> str:
    return f"{facts.share(facts.wait_s):.1%} of the time was spent waiting" if facts.step_s else "one step was seen"
