"""`Plan`: which saved storages of a forward move, and where to, as plain data. No torch, no clock."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace

from ..errors import ConfigError
from ..json_input import parse
from ..policy import Decision, KeepReason, TensorFacts
from ..sizes import format_size
from .regions import in_part, split

VERSION = 2
TIERS = ("", "host", "nvme")
"""Where a planned storage may go; with an empty text the offloader chooses."""

_REMEDY = "not a plan of version 2 with actions 'offload' and 'keep' and tiers 'host' and 'nvme'"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """One saved storage: its place in the forward, its size in bytes, its action and the reason.

    ``index`` counts the storages as the planned forward saves them, with its regions run as planned. ``tier`` is one of
    `TIERS`. ``release_after`` is the moment, in stream order, at which the device memory is released: this many events
    after the storage's own save. An event is the save of a storage with a place on its tape, or the first use of such a
    storage in backward. By then the copy to host memory is predicted to have ended. None: the plan sets no moment.
    """

    index: int
    nbytes: int
    action: str
    reason: str = ""
    module: str | None = None
    tier: str = ""
    release_after: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The storages of one forward, in the order in which autograd saved them.

    A plan is also a policy: an offloader with this policy runs its regions once and applies its entries by place and
    size. The first forward must save what the plan lists. In later forwards, of other shapes, storages that the plan
    does not list are offloaded. A plan without entries moves all storages.

    Attributes:
        entries: the storages.
        planner: the name of the planner that made the plan.
        once: the checkpointed regions that run once, by their places in the forward. Regions in neither list run again.
        in_part: the regions that run again in part, likewise: with the results of expensive operators cached.
        regions: how many checkpointed regions a forward had when the plan was made.
        declined: why the planner moves nothing; empty when it moves something.
        prefetch_bytes: how far ahead of backward to read; None for the offloader's own choice.
        pending_bytes: the most bytes that the plan expects on their way out at once; None if it expects no number.
        predicted_step_s: a step under this plan.
        predicted_peak_bytes: the most activation bytes on the device under this plan.
        baseline_peak_bytes: the peak with nothing moved.
    """

    entries: tuple[PlanEntry, ...]
    _: KW_ONLY
    planner: str = ""
    once: tuple[int, ...] = ()
    in_part: tuple[int, ...] = ()
    regions: int = 0
    declined: str = ""
    prefetch_bytes: int | None = None
    pending_bytes: int | None = None
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    baseline_peak_bytes: int | None = None

    def decide(self, facts: TensorFacts) -> Decision:
        """Return the decision for the storage at this place: OFFLOAD if the plan has no entry of its size there."""
        entry = self.entry(facts.index, facts.nbytes)
        return Decision.KEEP if entry is not None and entry.action == Decision.KEEP.value else Decision.OFFLOAD

    def entry(self, index: int, nbytes: int) -> PlanEntry | None:
        """Return the entry for a place; None if the plan has no entry there, or one of another size."""
        # A place alone does not identify a storage: a forward of another shape saves another one at the same place.
        if 0 <= index < len(self.entries) and self.entries[index].nbytes == nbytes:
            return self.entries[index]
        return None

    def tier(self, facts: TensorFacts) -> str:
        """Where the plan sends the storage at this place, one of `TIERS`."""
        entry = self.entry(facts.index, facts.nbytes)
        return entry.tier if entry is not None else ""

    @property
    def chosen(self) -> frozenset[int]:
        """The plan's choice of regions, as `with_regions` takes it."""
        return frozenset(self.once).union(map(in_part, self.in_part))

    def with_choice(self, chosen: Iterable[int], regions: int) -> Plan:
        """The plan with this choice, for a forward with so many regions."""
        once, partly = split(chosen)
        return replace(self, once=once, in_part=partly, regions=regions)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(e.nbytes for e in self.entries if e.action == Decision.OFFLOAD.value)

    def summary(self) -> str:
        """The plan in a few words."""
        saved = self.offloaded_bytes + self.kept_bytes
        told = f"plan: moves {format_size(self.offloaded_bytes)} of {format_size(saved)}"
        return told + (f"; {regions_in_words(self.regions, len(self.once), len(self.in_part))}" if self.regions else "")

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay."""
        return sum(e.nbytes for e in self.entries if e.action == Decision.KEEP.value)

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "entries"}
        return json.dumps({"version": VERSION, **data, "entries": [asdict(entry) for entry in self.entries]})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from `to_json`'s text.

        Raises:
            ConfigError: the text is no plan; names ``policy``.
        """
        try:
            plan = parse(text, cls, version=VERSION)
        except ValueError as error:
            raise ConfigError(
                "policy", text[:80], f"not a plan of version {VERSION} ({error}); give the text of Plan.to_json()"
            ) from error
        # `parse` checks types only, and an unknown action would count as a decision to move.
        choices = {d.value for d in Decision}
        legal = all(entry.action in choices and entry.tier in TIERS for entry in plan.entries)
        if not legal:
            raise ConfigError("policy", text[:80], _REMEDY)
        chosen = [*plan.once, *plan.in_part]
        if len(set(chosen)) != len(chosen) or (plan.regions and max(chosen, default=0) >= plan.regions):
            remedy = "not a plan: 'once' and 'in_part' name a region twice, or one that there is not"
            raise ConfigError("policy", text[:80], remedy)
        return plan

    def difference(self, other: Plan) -> tuple[int, ...]:
        """Return the places at which two plans differ, or which only one of them has."""
        longest = max(len(self.entries), len(other.entries))
        mine = self.entries + (None,) * (longest - len(self.entries))
        theirs = other.entries + (None,) * (longest - len(other.entries))
        return tuple(place for place, (a, b) in enumerate(zip(mine, theirs, strict=True)) if _differ(a, b))


def regions_in_words(count: int, once: int, in_part: int = 0) -> str:
    """How regions run: ``"24 checkpointed regions: 15 run once, 3 run again in part, 6 run again"``."""
    partly = f"{in_part} run again in part, " if in_part else ""
    return (
        f"{count} checkpointed region{'s' * (count != 1)}: {once} run once, {partly}{count - once - in_part} run again"
    )


def choice_in_words(chosen: Iterable[int]) -> str:
    """A choice of regions: ``"15 regions run once"``, or ``"15 regions run once and 3 again in part"``."""
    once, partly = split(chosen)
    return f"{len(once)} regions run once" + (f" and {len(partly)} again in part" if partly else "")


def _differ(a: PlanEntry | None, b: PlanEntry | None) -> bool:
    if a is None or b is None or (a.action, a.nbytes) != (b.action, b.nbytes):
        return True
    # An empty tier leaves the choice to the offloader, so it agrees with any tier.
    return bool(a.tier and b.tier and a.tier != b.tier)


def decided(decisions: Iterable[tuple[int, KeepReason | None, str | None]]) -> Plan:
    """Return one forward's decisions as a plan: bytes, the reason to stay (None: it moves) and the module, in order."""
    return Plan(
        tuple(
            PlanEntry(
                index=index,
                nbytes=nbytes,
                action=(Decision.OFFLOAD if reason is None else Decision.KEEP).value,
                reason=reason.value if reason is not None else "",
                module=module,
            )
            for index, (nbytes, reason, module) in enumerate(decisions)
        )
    )
