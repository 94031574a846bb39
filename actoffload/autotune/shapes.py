"""Steps of different shapes, as bucketed sequence lengths cause them: a plan for each of the last few shapes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from ..planning.constants import HOOKS_S, MOST_KNOWN, MOST_REST, NO_LOSS, NOTICEABLE
from ..planning.observed import ShapeFacts
from ..planning.plan import Plan
from ..planning.profile import Profile
from ..planning.regions import with_regions
from ..planning.search import own_budget
from ..runtime.decision import InputShapes
from ..runtime.memory_beside import BLOCK_SIZE, Beside
from .observations import StepsUnderPlan, differ, link_change

AGAIN: frozenset[int] = frozenset()
"""No region runs once: all run again, as in the program."""


class Stage(Enum):
    """The purpose of a shape's next step."""

    SAFE = "there is no plan, so what may move moves; it is recorded"
    HOPELESS = "as SAFE, but no plan was found, and none is looked for"
    PAPER = "it follows a plan that was made for a step that nobody has seen; it is recorded"
    FOLLOWED = "it follows the plan, and is compared with it"
    DUE = "likewise, and is recorded: the last ones were not as the plan has it"
    RESTING = "it runs without hooks: nothing moves, and nothing bounds the step"


UNRECORDED = (Stage.FOLLOWED, Stage.HOPELESS, Stage.RESTING)
"""Steps that are not recorded."""


@dataclass(frozen=True, slots=True)
class Tried:
    """The steps of a shape with these regions run ``once``, under a plan that they followed or would follow.

    They might save ``budget`` bytes. ``measured_s`` is None while the length of a step is only predicted. ``beside`` is
    as in `NeedBeside`.
    """

    once: frozenset[int]
    plan: Plan
    profile: Profile
    budget: int | None
    beside: Beside | None
    measured_s: float | None = None

    @property
    def step_s(self) -> float:
        """The length of a step: as measured, or else as predicted."""
        return self.plan.predicted_step_s or 0.0 if self.measured_s is None else self.measured_s

    def with_other(self, other_s: float) -> Tried:
        """The same steps with another part after backward."""
        profile = self.profile.with_other(other_s)
        longer_s = profile.step_s - self.profile.step_s
        plan = replace(self.plan, predicted_step_s=(self.plan.predicted_step_s or 0.0) + longer_s)
        measured_s = None if self.measured_s is None else self.measured_s + longer_s
        return replace(self, profile=profile, plan=plan, measured_s=measured_s)


class Tries:
    """The steps of a shape under the choices of regions so far, at most `MOST_KNOWN`."""

    def __init__(self) -> None:
        self._known: list[Tried] = []

    def __iter__(self) -> Iterator[Tried]:
        return iter(self._known)

    def know(self, tried: Tried) -> None:
        """Remember steps with these regions run once. Of too many choices the one with the longest step goes."""
        for place, known in enumerate(self._known):
            if known.once == tried.once and known.plan.entries == tried.plan.entries:
                self._known[place] = tried  # in its place: the first `AGAIN` is the one to compare with
                return
        if len(self._known) >= MOST_KNOWN:
            # The first `AGAIN` never goes: every other choice has to be shorter than it.
            again = self.again
            self._known.remove(max((one for one in self._known if one is not again), key=lambda one: one.step_s))
        self._known.append(tried)

    def forget(self) -> None:
        """Forget all: the steps to come are not comparable."""
        self._known.clear()

    def take_other(self, other_s: float) -> None:
        """As `Tried.with_other`, so that all steps stay comparable."""
        self._known = [known.with_other(other_s) for known in self._known]

    @property
    def again(self) -> Tried | None:
        """The first steps in which all regions ran again."""
        return next((tried for tried in self._known if tried.once == AGAIN), None)

    @property
    def best(self) -> Tried | None:
        """The shortest steps."""
        return min(self._known, key=lambda tried: tried.step_s, default=None)

    def has_measured(self, once: frozenset[int], plan: Plan) -> bool:
        """Whether the length of steps under a plan, with these regions run once, is measured."""
        same = (tried for tried in self._known if tried.once == once and tried.plan.entries == plan.entries)
        return any(tried.measured_s is not None for tried in same)


class NeedBeside:
    """The memory that steps of a shape need beside saved tensors, as far as steps have shown it.

    Attributes:
        beside: in a recorded step, None before there is one; ``of``: the regions that ran once in it; ``settled``:
            optimizer states and gradients were part of it; ``rounding_bytes``: what an allocator may add to its saved
            tensors.
        unsettled: how many steps began unsettled while the planner waited for a settled one.
        at_peak_bytes: at the device's peak in the last step under a plan that measured it, else 0.
    """

    def __init__(self) -> None:
        self.beside: Beside | None = None
        self.of: frozenset[int] = frozenset()
        self.settled = False
        self.rounding_bytes = self.unsettled = self.at_peak_bytes = 0
        self._own: tuple[Profile | None, Beside | None, int] = None, None, 0

    def take(self, profile: Profile, beside: Beside, *, once: frozenset[int], settled: bool) -> None:
        """Take over the memory that a recorded step had beside saved tensors; see the attributes.

        Where a region runs once, a saved tensor that backward uses counts as memory beside saved tensors. Reading ahead
        leaves room for it, so the numbers of the step in which all regions ran again stay right.
        """
        if not once or self.beside is None:
            self.beside, self.of, self.settled = beside, once, settled
            sizes = [storage.nbytes for storage in profile.storages]
            sizes += [save.nbytes for region in profile.regions for save in region.saves]
            self.rounding_bytes = sum(-nbytes % BLOCK_SIZE for nbytes in sizes)

    @property
    def in_forward(self) -> dict[int, int]:
        """As `Beside.in_forward`."""
        return {} if self.beside is None else self.beside.in_forward

    @property
    def most_bytes(self) -> int:
        """The bytes at the peak. Until a step has measured them, the most that there was at any moment counts."""
        return self.at_peak_bytes or (0 if self.beside is None else self.beside.nbytes)

    def own_bytes(self, base: Profile) -> int:
        """The bytes that steps may save without a limit of the user's: what the program's checkpoints hold."""
        if self._own[0] is not base or self._own[1] is not self.beside:  # else nothing has changed since the last call
            self._own = base, self.beside, own_budget(base, self.in_forward)
        return self._own[2]


class Rest:
    """Steps of a shape that run without hooks, as long as the model's forward has the known signature.

    Attributes:
        left: how many are left; ``allowed``: whether any step may be one.
        signatures: of the model's forwards in the last step in which they were computed. A forward with another one may
            need more memory, so its hooks stay.
    """

    def __init__(self) -> None:
        self.left, self.allowed = 0, True
        self.signatures: frozenset[Hashable] = frozenset()

    def step(self, saved: int) -> bool:
        """End a step; return whether the rest is over. ``saved``: the tensors that it saved through hooks all the same.

        If there were any, the steps of this shape are not all alike, and none of them rests again. After `MOST_REST`
        some steps have hooks again, because a link may be faster by then.
        """
        self.left -= 1
        self.allowed = self.allowed and not saved
        return saved > 0 or self.left <= 0


class Codes:
    """The choice whether steps of a shape are coded. It is made once, as no plan's step is quite as long as predicted.

    Attributes:
        open: the choice is still to be made.
        used: as `Plan.coded`.
        new: no coded step was recorded yet.
        before: the plan for steps that are not coded, and their profile; None if no such plan keeps the budget.
    """

    def __init__(self) -> None:
        self.open, self.used, self.new = True, False, False
        self.before: tuple[Plan, Profile] | None = None

    def choose(self, plan: Plan | None, profile: Profile) -> tuple[tuple[Plan, Profile] | None, str]:
        """Return the plan to follow instead of this one, and its profile, and why; "" if this one is to be followed.

        Without another plan the next step is recorded. ``plan``: for steps like the profile's; None: no such plan keeps
        the budget.
        """
        if not self.used:
            if plan is not None and not profile.is_late(plan.predicted_step_s or 0.0):
                return None, ""  # and the choice stays open: a link may become slower
            self.used = self.new = True
            self.before = None if plan is None else (plan, profile)
            return None, "a step may be shorter with tensors in exact forms"
        before, self.before, self.open = self.before, None, False
        step_s = float("inf") if before is None else before[0].predicted_step_s or 0.0
        self.used = plan is not None and (plan.predicted_step_s or 0.0) < step_s
        if self.used:
            return None, ""
        why = "no plan keeps the budget" if plan is None else "a step is no shorter"
        return before, f"{why} with tensors in exact forms"


class Shape:
    """Steps whose inputs have one shape.

    Attributes:
        key: the shape.
        base: a recorded step in which every checkpointed region ran again; None before there is one.
        once: the regions that run once, by their places.
        profile: the recorded step that the plan was made from.
        plan: the plan that these steps follow; None before there is one.
        steps: the last steps under the plan.
        stage: the purpose of the next step; ``why``: why it is recorded, although there is a plan.
        most_bytes: a bound of saved bytes beside the options' own; None if there is none.
        need: the memory beside saved tensors; ``rest``: the steps without hooks.
        passed: the regions that ran once in the last step that passed ``device_memory``.
        tried: the steps under the choices of regions so far, this one among them.
        confirmed: later steps took as long as the recorded one, or it was dropped once because of a stall.
        codes: whether its steps are coded.
    """

    def __init__(self, key: InputShapes) -> None:
        self.key = key
        self.base: Profile | None = None
        self.once: frozenset[int] = frozenset()
        self.profile: Profile | None = None
        self.plan: Plan | None = None
        self.steps = StepsUnderPlan()
        self.stage, self.why = Stage.SAFE, ""
        self.most_bytes: int | None = None
        self.need, self.rest = NeedBeside(), Rest()
        self.passed: frozenset[int] | None = None
        self.tried = Tries()
        self.confirmed = False
        self.codes = Codes()

    @property
    def followed(self) -> tuple[Plan, Profile]:
        """The plan that these steps follow, and the step that it was made from."""
        assert self.plan is not None, "its steps follow one"
        assert self.profile is not None, "a plan was made from a profile"
        return self.plan, self.profile

    def take_other(self, other_s: float) -> None:
        """Have all that is known of these steps be as if the part after backward took so long."""
        self.tried.take_other(other_s)
        if self.base is not None:
            self.base = self.base.with_other(other_s)
        if self.profile is not None and self.profile.forwards == 1 and self.steps.predicted_s is not None:
            self.steps.predicted_s += other_s - self.profile.other_s

    def renew_base(self, before: Profile, profile: Profile, *, calm: bool) -> None:
        """Bring the base to the pace of the machine as it is now, and forget what was measured at another one.

        ``before``: the profile that ``profile`` replaces; ``calm``: as in `Recording`.
        """
        if not self.regions or self.base is None:
            return
        paper = with_regions(self.base, self.once)
        # An allocator that was short makes no step shorter.
        sure = calm or profile.step_s < paper.step_s
        # Also unlike the paper: the earlier recording may have been the disturbed one.
        other = sure and differ(profile, before) and differ(profile, paper)
        if other or link_change(before, profile):
            self.tried.forget()
        if not self.once:
            self.base = profile
        elif other:
            passes_s = self.base.passes_s * profile.passes_s / paper.passes_s
            self.base = self.base.lasting(passes_s + self.base.other_s)

    def have_recorded(self, why: str, *, on_paper: bool = False) -> None:
        """Have the next step under the plan recorded; ``on_paper``: no step has followed this plan yet."""
        self.stage, self.why = Stage.PAPER if on_paper else Stage.DUE, why

    @property
    def nothing_moves(self) -> bool:
        """Whether, by the plan, a step may run without hooks."""
        return self.rest.allowed and not (self.plan is not None and (self.plan.offloaded_bytes or self.regions))

    def begin_rest(self, saved: int, step_s: float) -> None:
        """Run the next steps without hooks, if nothing moves and hooks of ``saved`` tensors take too much of a step."""
        # With several forwards alive at once, only handles show where a step ends.
        alone, alike = self.profile is None or self.profile.forwards == 1, len(self.rest.signatures) == 1
        if alone and alike and self.nothing_moves and saved * HOOKS_S > NO_LOSS * step_s:
            self.stage, self.rest.left = Stage.RESTING, MOST_REST

    def rested(self, saved: int) -> None:
        """End a step of a rest; ``saved``: as in `Rest.step`."""
        if self.rest.step(saved):
            self.stage = Stage.SAFE if self.plan is None else Stage.FOLLOWED
            self.steps = StepsUnderPlan(self.steps.predicted_s, self.steps.recorded_at)

    @property
    def elements(self) -> int:
        """The number of elements of all inputs."""
        return sum(map(math.prod, self.key))

    @property
    def regions(self) -> int:
        """The number of checkpointed regions of a forward, as the base has them."""
        return 0 if self.base is None else len({region.place for region in self.base.regions})

    def at_most(self, nbytes: float) -> None:
        """Lower the bound of the bytes that these steps may save."""
        self.most_bytes = max(0, int(nbytes if self.most_bytes is None else min(nbytes, self.most_bytes)))

    @property
    def probe(self) -> int | None:
        """The place of the storage that moves now and then if the plan moves none, because an unused link has no rate.

        It is the first one that a link brings back in `NOTICEABLE` of a step, else the smallest.
        """
        plan, profile = self.plan, self.profile
        if plan is None or profile is None or plan.offloaded_bytes:
            return None
        links = [link for link in (profile.disk, profile.host) if link is not None]
        most = NOTICEABLE * profile.step_s * min((link.read_bytes_per_s for link in links), default=float("inf"))
        # A kept entry has a reason if its storage cannot move. Of equal keys `min` takes the first.
        kept = (entry for entry in plan.entries if not entry.reason)
        found = min(kept, key=lambda entry: entry.nbytes if entry.nbytes > most else 0, default=None)
        return None if found is None else found.index

    def note_peak(self, beside_bytes: int | None) -> None:
        """Note the bytes beside saved tensors at the device's peak in a step under the plan, if it was measured."""
        if beside_bytes:
            self.steps.shows_peak, self.need.at_peak_bytes = True, beside_bytes

    def facts(self, device_bytes: int) -> ShapeFacts:
        """The facts of these steps for an explanation; ``device_bytes``: `Budgets.device_bytes`."""
        again = self.tried.again
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
            predicted_s=self.steps.predicted_s,
            other_bytes=self.need.most_bytes,
            device_bytes=device_bytes,
        )

    def __str__(self) -> str:
        return ", ".join("×".join(map(str, shape)) for shape in self.key)


class Shapes:
    """The known shapes, the longest unused one first."""

    def __init__(self) -> None:
        self._known: OrderedDict[InputShapes, Shape] = OrderedDict()

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def use(self, key: InputShapes) -> Shape:
        """Return the shape of the step that begins. A new one replaces the longest unused one if there are too many."""
        shape = self._known.setdefault(key, Shape(key))
        self._known.move_to_end(key)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return shape

    def latest(self) -> Shape | None:
        """The most recently used shape that has a plan."""
        return next((shape for shape in reversed(self._known.values()) if shape.plan is not None), None)
