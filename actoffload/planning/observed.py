"""Steps as they ran, and the plans that they follow, as plain data: for decisions on plans and for explanations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .plan import Plan
from .profile import Profile
from .search import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The times and the peak of one step as it ran.

    Attributes:
        step_s: the whole step; ``forward_wait_s``: waits of saving; ``backward_wait_s``: waits of backward.
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


@dataclass(frozen=True, kw_only=True)
class ShapeFacts:
    """Steps of one shape of inputs, as ``policy="auto"`` knows them.

    Attributes:
        inputs: the shape, as text.
        profile: the recorded step that the plan was made from; None before there is one.
        plan: the plan that these steps follow; None before there is one.
        seen: the median of the last steps under the plan; None before there are any.
        regions: checkpointed regions of a forward; ``once``: how many of them run once.
        base_s: the step in which every region runs again; ``base_bytes``: the peak of saved tensors in it.
        predicted_s: the step as it was predicted when the plan was made.
        other_bytes: other memory of the device; ``device_bytes``: the most of all of it, 0 without ``device_memory``.
    """

    inputs: str
    profile: Profile | None
    plan: Plan | None
    seen: Observed | None
    regions: int = 0
    once: int = 0
    base_s: float = 0.0
    base_bytes: int = 0
    predicted_s: float | None = None
    other_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """The plans of ``policy="auto"``.

    Attributes:
        history: why each of the last plans was made, oldest first.
        limits: the limits of a plan for the recorded shape.
        shape: the shape that runs; ``others``: the other known shapes.
        recorded_ago: steps since the recorded step, which is counted as one.
        probes: whether one storage moves now and then, only to measure a link.
        rest: the next steps that run without hooks.
        stuck: no step has ended, because a tensor that a forward saved is always alive.
    """

    history: Sequence[str]
    limits: Limits
    shape: ShapeFacts
    others: Sequence[ShapeFacts] = ()
    recorded_ago: int = 0
    probes: bool = False
    rest: int = 0
    stuck: bool = False
