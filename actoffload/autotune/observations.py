"""What the steps show: profiles of recorded ones, and medians of those that ran under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ..errors import ConfigError
from ..planning.constants import LOOK_AT_STEP, REVIEW_STEPS
from ..planning.planners.feedback import Observed, Rate
from ..planning.profile import Link, Profile
from ..runtime.store import ActivationStore


class Recording:
    """Profiles of recorded steps, on the links as they are known by then."""

    def __init__(self, store: ActivationStore) -> None:
        self.steps = 0
        """Steps that were recorded."""
        self._profiler, self._tiers, self._prefetch = store.profiler, store.tiers, store.prefetch
        self._known_rates: dict[tuple[str, str], float] = {}

    def profile(self) -> Profile | None:
        """The recorded step; None for a forward without a backward, or while the device has not come to its end."""
        if not self._profiler.useful:
            return None
        profile = self._profiler.profile(next(iter(self._tiers.by_device), "cpu"))
        if profile is None:
            return None
        self.steps += 1
        self.rates()
        window = self._prefetch.window.nbytes
        return replace(profile, host=self._link("host"), disk=self._link("disk"), prefetch_bytes=window)

    def _link(self, name: str) -> Link | None:
        """A link as it is known by now; one way is as fast as the other until that is known."""
        write, read = (self._known_rates.get((name, way)) for way in ("write", "read"))
        known = write or read
        return None if known is None else Link(write_bytes_per_s=write or known, read_bytes_per_s=read or known)

    def rates(self) -> dict[tuple[str, str], Rate]:
        """How fast the links were that were used since the last call, by link and way."""
        found = {key: Rate(bytes_per_s=rate, full=full) for key, (rate, full) in self._tiers.rates().items()}
        self._known_rates.update({key: rate.bytes_per_s for key, rate in found.items()})
        return found

    def block_times(self) -> dict[str, float] | None:
        """Forward and backward of each block in seconds; None when another step, or a later call, has to tell."""
        if not self._profiler.useful:
            self._profiler.forget()  # a forward without a backward: another step shows it
            return None
        times: dict[str, float] = {}
        try:
            profile = self._profiler.profile()
        except ConfigError:  # a step that was interrupted; a plan does not end because its blocks could not be timed
            self._profiler.forget()
            return times
        if profile is None:
            return None  # the device has not come to the end of that step
        for block in profile.blocks:
            times[block.name] = times.get(block.name, 0.0) + block.forward_s + block.backward_s
        return times


class StepsUnderPlan:
    """The steps under one plan: their medians, and once how long each block takes.

    Args:
        count: how many steps are looked at the first time.

    Attributes:
        seen: the median of the last steps that were looked at.
    """

    def __init__(self, count: int = REVIEW_STEPS) -> None:
        self.seen: Observed | None = None
        self._count = count
        self._blocks: tuple[tuple[str, float], ...] = ()
        self._steps: list[Observed] = []

    @property
    def blocks_are_due(self) -> bool:
        """Whether the next step shows how long each block takes under the plan: once for each plan, when it is used."""
        return not self._blocks and len(self._steps) == LOOK_AT_STEP

    @property
    def review_begins(self) -> bool:
        """Whether the next step is the first of those that the next review looks at."""
        return not self._steps

    def look_at_blocks(self, times: dict[str, float]) -> None:
        """Know how long each block took, in seconds."""
        self._blocks = tuple(times.items()) or (("", 0.0),)
        if self.seen is not None:
            self.seen = replace(self.seen, blocks=self._blocks)

    def add(self, observed: Observed, recording: Recording) -> Observed | None:
        """Add a step; once there are enough, their median, which is `seen` from then on."""
        self._steps.append(observed)
        if len(self._steps) < self._count:
            return None
        self._count = REVIEW_STEPS
        self.seen = replace(_median(self._steps), blocks=self._blocks, rates=recording.rates())
        self._steps.clear()
        return self.seen


def _median(observed: Sequence[Observed]) -> Observed:
    return Observed(
        step_s=median(o.step_s for o in observed),
        forward_wait_s=median(o.forward_wait_s for o in observed),
        backward_wait_s=median(o.backward_wait_s for o in observed),
        peak_bytes=max(o.peak_bytes or 0 for o in observed),
        hooks_s=sum(o.hooks_s for o in observed),  # one of them was watched
        idle_s=sum(o.idle_s for o in observed),
    )
