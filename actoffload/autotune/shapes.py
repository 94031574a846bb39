"""Steps of different shapes, as buckets of lengths make them: a plan for each of the last few."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import Enum

from ..planning.constants import MOST_SHAPES, MOST_TRIED, PROBE_SHARE, REST_STEPS
from ..planning.plan import Plan
from ..planning.profile import Profile
from ..runtime.decision import InputShapes
from ..tell.facts import ShapeFacts
from .observations import StepsUnderPlan

AGAIN: frozenset[int] = frozenset()
"""No region runs once: all run again, as the program says."""


class Stage(Enum):
    """What the next step of a shape is for."""

    SAFE = "there is no plan, so what may move moves; it is recorded"
    KEEPING = "nothing moves, to show what moving costs; it is recorded"
    HOPELESS = "as SAFE, but no plan was found, and none is looked for"
    PAPER = "it follows a plan that was made for a step that nobody has seen; it is recorded"
    FOLLOWED = "it follows the plan, and is compared with it"
    DUE = "likewise, and is recorded: the last ones were not as the plan has it"
    RESTING = "it runs without hooks: nothing moves, and nothing bounds the step"


UNRECORDED = (Stage.FOLLOWED, Stage.HOPELESS, Stage.RESTING)
"""Steps that are not recorded."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What is known of the steps of a shape under one choice of regions.

    Attributes:
        once: the regions.
        plan: what these steps followed, or would; ``profile``: what it was made from.
        budget: what they might save at most.
        other_bytes: as of `Shape`; ``began_bytes``: likewise.
        measured_s: how long a step was; None where that is only predicted.
    """

    once: frozenset[int]
    plan: Plan
    profile: Profile
    budget: int | None
    other_bytes: int | None
    began_bytes: int
    measured_s: float | None = None

    @property
    def step_s(self) -> float:
        """How long a step is, as far as anybody knows."""
        return self.plan.predicted_step_s or 0.0 if self.measured_s is None else self.measured_s


class Shape:
    """Steps whose inputs have one shape.

    It has more than fifteen attributes: all that is known of these steps, which the autopilot changes.

    Attributes:
        key: the shape.
        base: a recorded step in which every checkpointed region ran again; None before there is one.
        once: the regions that run once, by their places.
        profile: the recorded step that the plan was made from.
        plan: what these steps follow; None before there is a plan.
        steps: what the steps under the plan were like.
        stage: what the next step is for; ``why``: why it is recorded, although there is a plan.
        moving: seconds that a step which moved all computed, and the bytes that it moved both ways.
        most_bytes: what these steps may save at most, beside what the options say; None where nothing bounds it.
        other_bytes: what else the device had at most in a recorded step; None before there is one.
        began_bytes: what it had as that step began; ``settled``: optimizer states and gradients were there by then.
        rest: how many steps are left that run without hooks; ``signature``: of the model's forward in these.
        may_rest: whether any step may run without hooks.
        unsettled: how many steps began without, in which only such were waited for.
        recorded_at: the step that the plan was made from, by its number.
        predicted_s: the step as it was predicted when the plan was made.
        tried: what is known of steps under other choices, and under this one.
    """

    def __init__(self, key: InputShapes) -> None:
        self.key = key
        self.base: Profile | None = None
        self.once: frozenset[int] = frozenset()
        self.profile: Profile | None = None
        self.plan: Plan | None = None
        self.steps = StepsUnderPlan()
        self.stage, self.why = Stage.SAFE, ""
        self.moving = 0.0, 0
        self.most_bytes: int | None = None
        self.other_bytes: int | None = None
        self.began_bytes = 0
        self.settled = False
        self.unsettled = 0
        self.rest, self.may_rest = 0, True
        self.signature: Hashable = None
        self.recorded_at = 0
        self.predicted_s: float | None = None
        self.tried: list[Tried] = []

    def have_recorded(self, why: str, *, on_paper: bool = False) -> None:
        """Have the next step under the plan recorded; ``on_paper``: nobody has seen one yet."""
        self.stage, self.why = Stage.PAPER if on_paper else Stage.DUE, why

    @property
    def nothing_moves(self) -> bool:
        """Whether a step may run without hooks, as far as the plan is concerned."""
        return self.may_rest and not (self.plan is not None and (self.plan.offloaded_bytes or self.regions))

    def begin_rest(self, signature: Hashable) -> None:
        """Run the next steps without hooks, as long as the model's forward has this signature."""
        self.stage, self.rest, self.signature = Stage.RESTING, REST_STEPS, signature

    def rested(self, saved: int) -> None:
        """A step of a rest has ended; ``saved``: tensors that its hooks took all the same.

        If there were any, the steps of this shape are not all alike, and none of them rests again. After `REST_STEPS`
        hooks look at some steps again, because a link may be faster by then.
        """
        self.rest -= 1
        self.may_rest = self.may_rest and not saved
        if saved or self.rest <= 0:
            self.stage, self.steps = Stage.SAFE if self.plan is None else Stage.FOLLOWED, StepsUnderPlan()

    @property
    def elements(self) -> int:
        """How many numbers the inputs have."""
        return sum(map(math.prod, self.key))

    @property
    def regions(self) -> int:
        """How many checkpointed regions a forward has, as far as a recorded step has shown."""
        return 0 if self.base is None else len({region.place for region in self.base.regions})

    def at_most(self, nbytes: float) -> None:
        """Bound what these steps may save."""
        self.most_bytes = max(0, int(nbytes if self.most_bytes is None else min(nbytes, self.most_bytes)))

    def needs_beside(self, profile: Profile, other_bytes: int, began_bytes: int, *, settled: bool) -> None:
        """A step was recorded: know what it needs beside saved tensors; see the attributes.

        A region that runs once has the more beside its saved tensors, the more of these it has used: both together are
        no more than where it runs again. While any does, reading ahead leaves the room of a whole recomputation free,
        so that what was seen where all ran again is right.
        """
        if not self.once or self.other_bytes is None or not profile.recompute_bytes:
            self.other_bytes, self.began_bytes, self.settled = other_bytes, began_bytes, settled

    @property
    def probe(self) -> int | None:
        """The place of the storage that moves now and then where the plan moves none: what is not used is not measured.

        It is the first that a link brings back in `PROBE_SHARE` of a step, else the smallest.
        """
        plan, profile = self.plan, self.profile
        if plan is None or profile is None or plan.offloaded_bytes:
            return None
        if profile.disk is not None and profile.disk.cost_s_per_byte > 0:
            return None  # moving costs time, which somebody bounds
        links = [link for link in (profile.disk, profile.host) if link is not None]
        most = PROBE_SHARE * profile.step_s * min((link.read_bytes_per_s for link in links), default=float("inf"))
        kept = [entry for entry in plan.entries if not entry.reason]
        found = next((entry for entry in kept if entry.nbytes <= most), None)
        smallest = min(kept, key=lambda entry: entry.nbytes, default=None) if found is None else found
        return None if smallest is None else smallest.index

    def know(self, tried: Tried) -> None:
        """Know the steps in which these regions run once. Of too many choices the longest step is forgotten."""
        self.tried = [t for t in self.tried if t.once != tried.once or t.plan.entries != tried.plan.entries]
        if len(self.tried) >= MOST_TRIED:
            self.tried.remove(max((t for t in self.tried if t.once != AGAIN), key=lambda t: t.step_s))
        self.tried.append(tried)

    def has_measured(self, plan: Plan) -> bool:
        """Whether it is known how long steps under a plan are."""
        same = (tried for tried in self.tried if tried.once == self.once and tried.plan.entries == plan.entries)
        return any(tried.measured_s is not None for tried in same)

    def facts(self, device_bytes: int) -> ShapeFacts:
        """The facts of these steps for an explanation; ``device_bytes``: the most of everything on the device."""
        again = next((tried for tried in self.tried if tried.once == AGAIN), None)
        base_s = None if again is None else again.plan.predicted_step_s
        return ShapeFacts(
            inputs=str(self),
            profile=self.profile,
            plan=self.plan,
            seen=self.steps.seen,
            regions=self.regions,
            once=len(self.once),
            base_s=base_s or (0.0 if self.base is None else self.base.step_s),
            base_bytes=0 if self.base is None else self.base.baseline_peak_bytes,
            predicted_s=self.predicted_s,
            other_bytes=self.other_bytes or 0,
            device_bytes=device_bytes,
        )

    def __str__(self) -> str:
        return ", ".join("×".join(map(str, shape)) for shape in self.key)


class Shapes:
    """The shapes that are known, the one that was longest unused first."""

    def __init__(self) -> None:
        self._known: OrderedDict[InputShapes, Shape] = OrderedDict()

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def use(self, key: InputShapes) -> Shape:
        """The shape of the step that begins; a new one takes the place of the one that was longest unused."""
        shape = self._known.setdefault(key, Shape(key))
        self._known.move_to_end(key)
        if len(self._known) > MOST_SHAPES:
            self._known.popitem(last=False)
        return shape

    def latest(self) -> Shape | None:
        """The last one that was used and has a plan."""
        return next((shape for shape in reversed(self._known.values()) if shape.plan is not None), None)
