"""`Plan`: which saved storages of a forward move, and where to, as plain data. No torch, no clock."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import KW_ONLY, asdict, dataclass, fields

from ..errors import ConfigError
from ..policy import Decision, KeepReason, TensorFacts
from ..sizes import format_size
from .json_input import parse

VERSION = 2
TIERS = ("", "host", "nvme")
"""Where a planned storage may go; with an empty text the offloader chooses."""


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
        once: the checkpointed regions that run once, by their places in the forward; all others run again in backward.
        regions: how many checkpointed regions a forward had when the plan was made.
        coded: whether ``codec="exact"``, if it is set, applies to tensors outside of regions that run once, too.
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
    regions: int = 0
    coded: bool = True
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

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(e.nbytes for e in self.entries if e.action == Decision.OFFLOAD.value)

    def summary(self) -> str:
        """The plan in a few words."""
        saved = self.offloaded_bytes + self.kept_bytes
        told = f"plan: moves {format_size(self.offloaded_bytes)} of {format_size(saved)}"
        return told + (f"; {regions_in_words(self.regions, len(self.once))}" if self.regions else "")

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
            # `parse` checks types only, and an unknown action would count as a decision to move.
            choices = {d.value for d in Decision}
            if not all(entry.action in choices and entry.tier in TIERS for entry in plan.entries):
                raise ValueError("actions are 'offload' and 'keep', tiers 'host' and 'nvme'")
        except ValueError as error:
            raise ConfigError(
                "policy", text[:80], f"not a plan of version {VERSION} ({error}); give the text of Plan.to_json()"
            ) from error
        return plan


def regions_in_words(count: int, once: int) -> str:
    """How regions run: ``"24 checkpointed regions: 15 run once, 9 run again"``."""
    return f"{count} checkpointed region{'s' * (count != 1)}: {once} run once, {count - once} run again"


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
