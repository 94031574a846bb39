"""`Observed`: the times and the peak of one step as it ran, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The times and the peak of one step as it ran.

    Attributes:
        step_s: the whole step.
        forward_wait_s: waits of saving.
        backward_wait_s: waits of backward.
        peak_bytes: the most activation bytes on the device; None if it was not measured.
        hooks_s: host time of hooks that moved tensors, without waits; 0 if it was not measured.
        idle_s: for how long an accelerator idled in these hooks, because it had caught up with the host.
        other_s: the part after the last backward, as `Profile.other_s`; None if it was not measured.
    """

    step_s: float
    forward_wait_s: float = 0.0
    backward_wait_s: float = 0.0
    peak_bytes: int | None = None
    hooks_s: float = 0.0
    idle_s: float = 0.0
    other_s: float | None = None

    def as_recorded(self, profile: Profile) -> Observed:
        """The step as if the part after backward took as long as in a recorded step.

        It is the optimizer, the data, an evaluation, a checkpoint: nothing in it depends on a plan, or on the pace of
        forward and backward. Between forwards that are alive at once there are such parts that nobody has measured.
        """
        if self.other_s is None or profile.forwards > 1:
            return self
        step_s = max(1e-9, self.step_s + profile.other_s - self.other_s)
        return replace(self, step_s=step_s, other_s=profile.other_s)

    @property
    def wait_s(self) -> float:
        """All waits of the step."""
        return self.forward_wait_s + self.backward_wait_s

    @property
    def computed_s(self) -> float:
        """The step without its waits; 0 if several threads have waited at once for longer than it took."""
        return max(0.0, self.step_s - self.wait_s)
