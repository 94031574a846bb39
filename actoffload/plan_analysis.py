"""A plan in numbers: what is done with each block and why, and what is on the device at the peak. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from .config import format_size
from .errors import BudgetError
from .planner import Plan
from .planners import Limits, Planner
from .profile import Profile
from .simulator import Conditions, Prediction, simulate
from .timeline import ABSENT, DROPPED, HOST, KEEP, NVME, Choice, Workload
from .transit import Bounds
from .walk import Walk

GIB = 1 << 30
OUTSIDE = "(outside blocks)"
NEARLY_ALL = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One block of a plan, all its runs in the step together. Sizes in bytes, times in seconds.

    Attributes:
        name: the block's name, or `OUTSIDE` for what no block saves.
        saved_bytes: what it saves when nothing is recomputed.
        kept_bytes: what of it stays.
        host_bytes: what goes to host memory.
        disk_bytes: what goes to disk.
        recomputed_bytes: what is dropped and made again.
        forward_s: its forward; 0 outside blocks.
        backward_s: its backward without recomputing; 0 outside blocks.
        recompute_s: what recomputing it adds.
        wait_s: what backward waits for its storages.
        peak_bytes: what of it is on the device when the most is.
        why: the reason, in words.
        seen_s: what its forward and backward really took under the plan, without waits; 0 where nobody looked.
    """

    name: str
    saved_bytes: int
    kept_bytes: int
    host_bytes: int
    disk_bytes: int
    recomputed_bytes: int
    forward_s: float
    backward_s: float
    recompute_s: float
    wait_s: float
    peak_bytes: int
    why: str
    seen_s: float = 0.0

    @property
    def what(self) -> str:
        """What is done, in a few words: ``"keep"``, ``"offload"``, ``"offload 62 %"``, ``"recompute"``, ..."""
        if self.recomputed_bytes:
            return "recompute"
        moved = self.host_bytes + self.disk_bytes
        total = moved + self.kept_bytes
        if not moved:
            return "keep" if total else "-"
        return "offload" if moved >= NEARLY_ALL * total else f"offload {moved / total:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The same step planned with another budget. Bytes and seconds; None where no plan keeps that budget.

    Attributes:
        device_budget: the other budget.
        step_s: the step with it.
        peak_bytes: its peak.
    """

    device_budget: int
    step_s: float | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """All that is to be said of a plan.

    Attributes:
        rows: the blocks in the order in which they run, and what is outside them.
        prediction: the step under the plan.
        keep: the step with nothing moved.
        more: the plan with a higher budget; None when that was not asked for or there is no budget.
    """

    rows: tuple[BlockRow, ...]
    prediction: Prediction
    keep: Prediction
    more: Alternative | None = None

    def as_dict(self) -> dict[str, object]:
        """Everything but the timelines, ready for JSON."""
        without = {"timeline", "waits", "pressed", "stayed"}
        return {
            "blocks": [asdict(row) | {"what": row.what} for row in self.rows],
            "prediction": {k: v for k, v in asdict(self.prediction).items() if k not in without},
            "keep": {k: v for k, v in asdict(self.keep).items() if k not in without},
            "more": None if self.more is None else asdict(self.more),
        }


def conditions_of(limits: Limits) -> Conditions:
    """What a step runs under when it is planned with these limits."""
    return Conditions(
        device_budget=limits.device_budget, host_budget=limits.host_budget, nvme_budget=limits.nvme_budget
    )


def analyse(
    profile: Profile,
    plan: Plan,
    limits: Limits | None = None,
    *,
    prediction: Prediction | None = None,
    more: Alternative | None = None,
) -> Analysis:
    """The numbers of a plan.

    Args:
        profile: what it was made from.
        plan: the plan.
        limits: what it was made under; None for no limits.
        prediction: the step under it where that is known already, with its details.
        more: what `one_more` says.

    Raises:
        ConfigError: the plan is for another profile.
    """
    limits = limits or Limits()
    conditions = conditions_of(limits)
    if prediction is None or prediction.peak is None:
        prediction = simulate(profile, plan, conditions)
    keep = simulate(profile, None, Conditions())
    workload = Workload(profile)
    choice = workload.from_plan(plan)
    rows = _Rows(workload, choice, plan, prediction, conditions, limits.device_budget is not None)
    return Analysis(rows=rows.make(), prediction=prediction, keep=keep, more=more)


def one_more(profile: Profile, plan: Plan, limits: Limits, planner: Planner, nbytes: int = GIB) -> Alternative | None:
    """What ``nbytes`` more of device budget would buy; None without a budget, as there is nothing to raise."""
    if limits.device_budget is None:
        return None
    budget = limits.device_budget + nbytes
    try:
        other = planner.plan(profile, replace(limits, device_budget=budget))
    except BudgetError:
        return Alternative(device_budget=budget, step_s=None, peak_bytes=None)
    step_s = other.predicted_step_s
    if step_s is not None and plan.predicted_step_s is not None:
        step_s = min(step_s, plan.predicted_step_s)  # the old plan keeps the higher budget too
    return Alternative(device_budget=budget, step_s=step_s, peak_bytes=other.predicted_peak_bytes)


class _Rows:
    """Makes the rows of one plan."""

    def __init__(
        self,
        workload: Workload,
        choice: Choice,
        plan: Plan,
        prediction: Prediction,
        conditions: Conditions,
        budgeted: bool,
    ) -> None:
        self.workload = workload
        self.profile = workload.profile
        self.plan = plan
        self.budgeted = budgeted
        self.modes = workload.modes(choice)
        for position in prediction.pressed:
            self.modes[position] = KEEP
        self.recomputed = {b for group in choice.recompute for b in workload.groups[group].blocks}
        self.waited: dict[int, float] = {}
        for position, seconds in prediction.waits:
            self.waited[position] = self.waited.get(position, 0.0) + seconds
        self.present = self._at_peak(choice, conditions, prediction.peak_bytes)

    def _at_peak(self, choice: Choice, conditions: Conditions, peak_bytes: int) -> list[bool]:
        """Which positions are on the device when the most is."""
        window = conditions.prefetch_bytes or self.plan.prefetch_bytes or self.profile.prefetch_bytes
        bounds = Bounds(
            device=conditions.device_budget,
            host=conditions.host_budget,
            disk=conditions.nvme_budget,
            pending=None,
            window=window,
            latest_safe=False,
        )
        walk = Walk(self.workload, self.workload.modes(choice), choice.recompute, bounds)
        walk.stop_at_bytes = peak_bytes
        walk.go()
        return walk.on_device

    def make(self) -> tuple[BlockRow, ...]:
        names = list(dict.fromkeys(block.name for block in self.profile.blocks))
        rows = [self._row(name, [n for n, b in enumerate(self.profile.blocks) if b.name == name]) for name in names]
        return (*rows, *([outside] if (outside := self._row(OUTSIDE, [])).saved_bytes else []))

    def _row(self, name: str, blocks: list[int]) -> BlockRow:
        storages, count = self.profile.storages, self.workload.count
        members = [p for p, s in enumerate(storages) if (s.block in blocks if blocks else s.block is None)]
        inputs = [count + b for b in blocks if self.modes[count + b] != ABSENT]
        bytes_by_mode: dict[int, int] = {}
        for p in (*members, *inputs):
            bytes_by_mode[self.modes[p]] = bytes_by_mode.get(self.modes[p], 0) + self.workload.nbytes[p]
        parts = [self.profile.blocks[b] for b in blocks]
        again = [self.profile.blocks[b] for b in blocks if b in self.recomputed]
        return BlockRow(
            name=name,
            saved_bytes=sum(storages[p].nbytes for p in members),
            kept_bytes=bytes_by_mode.get(KEEP, 0),
            host_bytes=bytes_by_mode.get(HOST, 0),
            disk_bytes=bytes_by_mode.get(NVME, 0),
            recomputed_bytes=bytes_by_mode.get(DROPPED, 0),
            forward_s=sum(b.forward_s for b in parts),
            backward_s=sum(b.backward_s for b in parts),
            recompute_s=sum(b.recompute_s for b in again),
            wait_s=sum(self.waited.get(p, 0.0) for p in (*members, *inputs)),
            peak_bytes=sum(self.workload.nbytes[p] for p in (*members, *inputs) if self.present[p]),
            why=self._why(members, [b for b in blocks if b in self.recomputed]),
        )

    def _why(self, members: Sequence[int], recomputed: Sequence[int]) -> str:
        if recomputed:
            seconds = sum(self.profile.blocks[b].recompute_s for b in recomputed)
            freed = sum(self.workload.dropped_bytes[b] for b in recomputed)
            leaves = [p for p in self._inputs(recomputed) if self.modes[p] in (HOST, NVME)]
            text = f"{milliseconds(seconds)} frees {format_size(freed)}{self._against(freed)}"
            return f"{text}; its input leaves" if leaves else text
        moved = [p for p in members if self.modes[p] in (HOST, NVME)]
        kept = [p for p in members if self.modes[p] == KEEP and self.profile.storages[p].nbytes]
        if moved:
            return self._idle(moved) + (f"; rest: {self._why_kept(kept)}" if kept else "")
        return self._why_kept(kept) if kept else "saves nothing"

    def _inputs(self, blocks: Iterable[int]) -> list[int]:
        """The positions of the inputs of these blocks' checkpoints."""
        return [self.workload.block_input[b] for b in blocks]

    def _against(self, nbytes: int) -> str:
        seconds = self._seconds(nbytes)
        return "" if seconds is None else f", moving takes {milliseconds(seconds)}"

    def _idle(self, positions: Iterable[int]) -> str:
        idle = [self._idle_s(p) for p in positions]
        seconds = self._seconds(sum(self.workload.nbytes[p] for p in positions))
        return f"idle {_span(idle)}" + ("" if seconds is None else f", moved in {milliseconds(seconds)}")

    def _why_kept(self, positions: Sequence[int]) -> str:
        storages = self.profile.storages
        total = sum(storages[p].nbytes for p in positions)
        fixed: dict[str, int] = {}
        for p in positions:
            if not storages[p].movable:
                reason = storages[p].kept or "not recorded"
                fixed[reason] = fixed.get(reason, 0) + storages[p].nbytes
        if 2 * sum(fixed.values()) >= total:
            return f"must stay: {max(fixed, key=lambda reason: fixed[reason])}"
        if self.plan.declined:
            return "the plan declines to move"
        free = [p for p in positions if storages[p].movable]
        late = [p for p in free if (s := self._seconds(storages[p].nbytes)) is not None and s > self._idle_s(p)]
        if free and len(late) == len(free):
            return "needed again before it could be back"
        return "the budget has room" if self.budgeted else "no time left on the link"

    def _idle_s(self, position: int) -> float:
        storage = self.profile.storages[position]
        until = storage.last_need_s if storage.need_s is None else storage.need_s
        return until - storage.birth_s

    def _seconds(self, nbytes: int) -> float | None:
        """How long the first link takes there and back."""
        link = self.profile.host or self.profile.disk
        return None if link is None else nbytes / link.write_bytes_per_s + nbytes / link.read_bytes_per_s


def milliseconds(seconds: float) -> str:
    """A time for a person: ``"12.3 ms"``, from one second on ``"1.23 s"``."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 or not seconds else f"{1e3 * seconds:.3g} ms"


def _span(seconds: Sequence[float]) -> str:
    low, high = min(seconds), max(seconds)
    return milliseconds(high) if high - low < 0.1 * high else f"{1e3 * low:.3g} to {milliseconds(high)}"
