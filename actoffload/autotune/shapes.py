"""Steps of different shapes, as buckets of lengths make them: a plan for each, and the few that are known at a time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from ..planning.constants import MOST_SHAPES, UNUSED_STEPS
from ..planning.explain import format_time
from ..planning.plan import Plan
from ..planning.planners.feedback import StepModel
from ..planning.profile import Profile
from ..runtime.decision import InputShapes
from ..sizes import format_size
from .observations import StepsUnderPlan


class Shape:
    """Steps whose inputs have one shape.

    Attributes:
        key: the shape.
        lender: the shape whose plan these steps follow, as there is no room for another one; None: they have their own.
        plan: that plan; None before there is one.
        model: the step that the plan was made from, as later steps have corrected it.
        steps: what the steps under the plan were like.
        tries_keeping: the next step moves nothing, to show what moving costs.
        moving: seconds that a step which moved all computed, and the bytes that it moved both ways.
        hopeless: no plan was found, and none is looked for.
        measured_at: in which step each part of the profile was measured last.
        last: the last of these steps, by its number.
    """

    def __init__(self, key: InputShapes, lender: Shape | None = None) -> None:
        self.key = key
        self.lender = lender
        self.plan: Plan | None = None
        self.model: StepModel | None = None
        self.steps = StepsUnderPlan()
        self.tries_keeping = self.hopeless = False
        self.moving = 0.0, 0
        self.measured_at: dict[str, int] = {}
        self.last = 0

    @property
    def profile(self) -> Profile | None:
        """The step that the plan was made from."""
        return None if self.model is None else self.model.profile

    @property
    def followed(self) -> Plan | None:
        """The plan that these steps follow."""
        return self.plan if self.lender is None else self.lender.plan

    @property
    def elements(self) -> int:
        """How many numbers the inputs have."""
        return sum(map(math.prod, self.key))

    def __str__(self) -> str:
        return ", ".join("×".join(map(str, shape)) for shape in self.key)

    def summary(self) -> str:
        """The plan in one line."""
        if self.plan is None:
            return f"{self}: no plan yet"
        parts = [f"{self}: {format_size(self.plan.offloaded_bytes)} leave, {format_size(self.plan.kept_bytes)} stay"]
        if self.plan.recompute:
            parts.append(f"{len(self.plan.recompute)} recomputed")
        if self.plan.predicted_step_s is not None:
            parts.append(f"a step is predicted to take {format_time(self.plan.predicted_step_s)}")
        if self.steps.seen is not None:
            parts.append(f"takes {format_time(self.steps.seen.step_s)}")
        return ", ".join(parts)


class Shapes:
    """The shapes that are known, the one that was longest unused first."""

    def __init__(self) -> None:
        self._known: OrderedDict[InputShapes, Shape] = OrderedDict()

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def use(self, key: InputShapes, step: int) -> Shape:
        """The shape of the step that begins; a new one follows the nearest larger one's plan where there is no room."""
        shape = self._known.get(key)
        if shape is None:
            shape = Shape(key)
            if len(self._known) >= MOST_SHAPES:
                oldest = next(iter(self))
                larger = [other for other in self if other.plan is not None and other.elements >= shape.elements]
                if larger and step - oldest.last < UNUSED_STEPS:
                    return Shape(key, lender=min(larger, key=lambda other: other.elements))
                del self._known[oldest.key]
            self._known[key] = shape
        self._known.move_to_end(key)
        shape.last = step
        return shape

    def latest(self) -> Shape | None:
        """The last one that was used and has a plan."""
        return next((shape for shape in reversed(self._known.values()) if shape.plan is not None), None)
