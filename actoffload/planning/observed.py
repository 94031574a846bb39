"""`Observed`: one step as it really was, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One step as it really was.

    Attributes:
        step_s: the whole step.
        forward_wait_s: what saving waited for.
        backward_wait_s: what backward waited for.
        peak_bytes: the most activation bytes on the device; None when nobody looked.
        hooks_s: what hooks took of the host to move tensors, without waits; 0 where nobody looked.
        idle_s: how much of that an accelerator has waited for, as it had caught up with the host later on.
    """

    step_s: float
    forward_wait_s: float = 0.0
    backward_wait_s: float = 0.0
    peak_bytes: int | None = None
    hooks_s: float = 0.0
    idle_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.step_s < float("inf"):
            raise ConfigError("step_s", self.step_s, "give the seconds that the step took")

    def lasting(self, step_s: float, most_waited: float) -> Observed:
        """The step as long as this, of which it waited for no more than a share.

        The host and a stream may have waited at the same time, and what a stream did is told a step later.
        """
        share = min(1.0, most_waited * step_s / max(1e-9, self.wait_s))
        waits = share * self.forward_wait_s, share * self.backward_wait_s
        return replace(self, step_s=step_s, forward_wait_s=waits[0], backward_wait_s=waits[1])

    @property
    def wait_s(self) -> float:
        """What the step waited for, all together."""
        return self.forward_wait_s + self.backward_wait_s
