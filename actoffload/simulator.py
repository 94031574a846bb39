"""What a step would be like under a plan: a profile is walked, with queues of transfers beside it. Pure, deterministic.

The compute timeline is the profile's, delayed by what it has to wait for and by what is recomputed. Each link has a
queue for each direction, first come first served. A storage that is offloaded is queued when it is saved; its device
memory is free when the write to the first tier has ended. Backward's demands are fetched in their order, as far ahead
as the window and the budget allow; what has not left yet is taken where it is, and a write that has not begun is
cancelled. The walk itself is in `walk.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ConfigError
from .planner import Plan
from .profile import Profile
from .timeline import DROPPED, HOST, KEEP, NVME, Choice, Workload
from .transit import QUEUED, WRITING, Bounds
from .walk import Walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a step runs under. Sizes in bytes; None is no limit.

    Attributes:
        device_budget: forward waits for room, and nothing is fetched ahead beyond it.
        host_budget: most bytes of host memory.
        nvme_budget: most bytes on disk.
        pending_bytes: without a ``device_budget``, a storage that would make more than this wait to be written is kept.
        prefetch_bytes: how far ahead of backward to read; None for the plan's window, else the profile's.
        latest_safe: read no earlier than a read must begin so that nothing waits, instead of filling a window.
    """

    device_budget: int | None = None
    host_budget: int | None = None
    nvme_budget: int | None = None
    pending_bytes: int | None = None
    prefetch_bytes: int | None = None
    latest_safe: bool = False

    def __post_init__(self) -> None:
        for name in ("device_budget", "host_budget", "nvme_budget", "pending_bytes", "prefetch_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ConfigError(name, value, "give a number of bytes, 0 or more, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What was on the device when the most was.

    Attributes:
        time_s: when, on the timeline of the step as it ran.
        phase: ``"forward"``, ``"backward"`` or ``"recompute"``.
        bytes_by_kind: ``"kept"``, ``"on its way out"``, ``"brought back"`` and ``"recomputed"``, in bytes.
        bytes_by_module: the modules with the most of it, in bytes, largest first.
    """

    time_s: float
    phase: str
    bytes_by_kind: dict[str, int]
    bytes_by_module: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step as the simulator saw it. Times in seconds, sizes in bytes.

    Attributes:
        step_s: the whole step.
        compute_s: the same without waits and recomputing.
        forward_wait_s: what saving waited for, room above all.
        backward_wait_s: what backward waited for.
        recompute_s: what recomputing took.
        cost_s: compute time that moving bytes took.
        peak_bytes: the most on the device.
        host_peak_bytes: the most in host memory.
        disk_peak_bytes: the most on disk.
        pending_peak_bytes: the most that was on its way out of the device at once.
        host_written_bytes: device to host.
        host_read_bytes: host to device.
        disk_written_bytes: to disk.
        disk_read_bytes: from disk.
        forwarded_bytes: taken before they had left.
        cancelled_bytes: of those, what no write was begun for.
        pressed_bytes: kept although planned to go, as a limit would have been passed.
        waits: ``(storage, seconds)`` for each wait in backward; storages by number, inputs of checkpoints beyond them.
        pressed: the storages that were kept although planned to go.
        stayed: those, and the ones that backward took before they had left.
        timeline: bytes on the device from each time on; empty unless asked for.
        peak: what was on the device at the peak; None unless asked for.
    """

    step_s: float
    compute_s: float
    forward_wait_s: float
    backward_wait_s: float
    recompute_s: float
    cost_s: float
    peak_bytes: int
    host_peak_bytes: int
    disk_peak_bytes: int
    pending_peak_bytes: int
    host_written_bytes: int
    host_read_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int
    forwarded_bytes: int
    cancelled_bytes: int
    pressed_bytes: int
    waits: tuple[tuple[int, float], ...] = ()
    pressed: tuple[int, ...] = ()
    stayed: tuple[int, ...] = ()
    timeline: tuple[tuple[float, int], ...] = ()
    peak: Peak | None = None

    @property
    def moved_bytes(self) -> int:
        """Bytes over any link, both ways: what the step costs in traffic."""
        return self.host_written_bytes + self.host_read_bytes + self.disk_written_bytes + self.disk_read_bytes


def simulate(
    profile: Profile, plan: Plan | None = None, conditions: Conditions | None = None, *, detail: bool = True
) -> Prediction:
    """One step of ``profile`` under ``plan``.

    Args:
        profile: the step and its links; `Profile.with_links` puts it on others.
        plan: what is moved and recomputed; None keeps all.
        conditions: budgets and windows; None for no limits.
        detail: whether to say the timeline and what sets the peak.

    Raises:
        ConfigError: the plan recomputes a block that the profile does not have; names ``plan``.
    """
    workload = Workload(profile)
    if plan is None:
        choice = workload.keep_all()
        window = None
    else:
        unknown = set(plan.recompute) - {group.name for group in workload.groups}
        if unknown:
            raise ConfigError("plan", sorted(unknown), "these blocks cannot be recomputed; make the plan anew")
        choice, window = workload.from_plan(plan), plan.prefetch_bytes
    return run(workload, choice, conditions or Conditions(), window=window, detail=detail)


def run(
    workload: Workload,
    choice: Choice,
    conditions: Conditions,
    *,
    window: int | None = None,
    detail: bool = False,
) -> Prediction:
    """One step of a prepared profile under a planner's choice; see `simulate`."""
    modes = workload.modes(choice)
    bounds = _bounds(workload, conditions, window)
    walk = Walk(workload, modes, choice.recompute, bounds)
    log: list[tuple[float, int]] = []
    peak = None
    if detail:
        walk.log = log
    walk.go()
    if detail:
        again = Walk(workload, modes, choice.recompute, bounds)
        again.stop_at_bytes = walk.peak
        again.go()
        peak = _peak(workload, again, modes)
    return _prediction(walk, tuple(log), peak)


def run_within(
    workload: Workload,
    choice: Choice,
    conditions: Conditions,
    *,
    window: int | None,
    most_bytes: float,
    most_delay_s: float,
) -> Prediction | None:
    """`run`, given up with None as soon as the peak or the delay is above what is of interest."""
    walk = Walk(workload, workload.modes(choice), choice.recompute, _bounds(workload, conditions, window))
    walk.stop_above_bytes, walk.stop_after_s = most_bytes, most_delay_s
    return _prediction(walk, (), None) if walk.go() else None


def _bounds(workload: Workload, conditions: Conditions, window: int | None) -> Bounds:
    prefetch = conditions.prefetch_bytes if conditions.prefetch_bytes is not None else window
    return Bounds(
        device=conditions.device_budget,
        host=conditions.host_budget,
        disk=conditions.nvme_budget,
        pending=conditions.pending_bytes if conditions.device_budget is None else None,
        window=0 if conditions.latest_safe else prefetch or workload.profile.prefetch_bytes,
        latest_safe=conditions.latest_safe,
    )


def _prediction(walk: Walk, log: tuple[tuple[float, int], ...], peak: Peak | None) -> Prediction:
    profile = walk.workload.profile
    has_host = profile.host is not None
    out_1, out_2, in_2, in_1 = walk.moved
    return Prediction(
        step_s=profile.step_s + walk.delay,
        compute_s=profile.step_s,
        forward_wait_s=walk.forward_wait,
        backward_wait_s=walk.backward_wait,
        recompute_s=walk.recompute_s,
        cost_s=walk.cost_s,
        peak_bytes=walk.peak,
        host_peak_bytes=walk.host_peak,
        disk_peak_bytes=walk.disk_peak,
        pending_peak_bytes=walk.pending_peak,
        host_written_bytes=out_1 if has_host else 0,
        host_read_bytes=in_1 if has_host else 0,
        disk_written_bytes=out_2 if has_host else out_1,
        disk_read_bytes=in_2 if has_host else in_1,
        forwarded_bytes=walk.forwarded,
        cancelled_bytes=walk.cancelled,
        pressed_bytes=sum(walk.workload.nbytes[p] for p in walk.pressed),
        waits=tuple(walk.waits),
        pressed=tuple(walk.pressed),
        stayed=tuple(p for p, mode in enumerate(walk.modes) if HOST <= mode <= NVME and not walk.left[p]),
        timeline=log,
        peak=peak,
    )


def _peak(workload: Workload, walk: Walk, modes: Sequence[int]) -> Peak:
    """What is on the device where ``walk`` stopped."""
    kinds = {"kept": 0, "on its way out": 0, "brought back": 0, "recomputed": 0}
    modules: dict[str, int] = {}
    storages = workload.profile.storages
    for position, nbytes in enumerate(workload.nbytes):
        state = walk.state[position]
        if not walk.on_device[position]:
            continue
        if state in (QUEUED, WRITING):
            kind = "on its way out"
        elif modes[position] == DROPPED:
            kind = "recomputed"
        elif modes[position] == KEEP or position in walk.pressed or not walk.left[position]:
            kind = "kept"
        else:
            kind = "brought back"
        kinds[kind] += nbytes
        made = position >= workload.count
        name = workload.profile.blocks[position - workload.count].name if made else storages[position].module or ""
        modules[name] = modules.get(name, 0) + nbytes
    largest = sorted(modules.items(), key=lambda pair: (-pair[1], pair[0]))
    return Peak(time_s=walk.peak_time, phase=walk.peak_phase, bytes_by_kind=kinds, bytes_by_module=dict(largest[:8]))


__all__ = ["Conditions", "Peak", "Prediction", "run", "run_within", "simulate"]
