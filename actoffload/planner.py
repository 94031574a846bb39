"""`Plan`: what is to become of each saved storage of a forward, as plain data. No torch, no clock."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from .errors import ConfigError
from .policy import Decision, TensorFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """One saved storage: its place in the forward, its size in bytes, what is done with it and why."""

    index: int
    nbytes: int
    action: str
    reason: str = ""
    module: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The storages of one forward, in the order in which autograd saved them.

    A plan is also a policy: an offloader that is given one follows it by place and size, and offloads what it does not
    know.
    """

    entries: tuple[PlanEntry, ...]

    def decide(self, facts: TensorFacts) -> Decision:
        """What the plan says of the storage at this place, if it has the size that was planned for."""
        if facts.index < len(self.entries):
            entry = self.entries[facts.index]
            if entry.nbytes == facts.nbytes and entry.action == Decision.KEEP.value:
                return Decision.KEEP
        return Decision.OFFLOAD

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(e.nbytes for e in self.entries if e.action == Decision.OFFLOAD.value)

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay."""
        return sum(e.nbytes for e in self.entries if e.action == Decision.KEEP.value)

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        return json.dumps({"version": 1, "entries": [asdict(entry) for entry in self.entries]})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from `to_json`'s text.

        Raises:
            ConfigError: the text is no plan; names ``policy``.
        """
        try:
            data = json.loads(text)
            entries = tuple(PlanEntry(**entry) for entry in data["entries"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError("policy", text[:80], f"not a plan ({error}); give the text of Plan.to_json()") from error
        choices = {d.value for d in Decision}
        if data.get("version") != 1 or any(entry.action not in choices for entry in entries):
            raise ConfigError("policy", text[:80], "not a plan of version 1 with actions 'offload' and 'keep'")
        return cls(entries)

    def difference(self, other: Plan) -> tuple[int, ...]:
        """The places at which two plans say different things (or only one says anything)."""
        longest = max(len(self.entries), len(other.entries))
        mine = self.entries + (None,) * (longest - len(self.entries))
        theirs = other.entries + (None,) * (longest - len(other.entries))
        return tuple(
            place
            for place, (a, b) in enumerate(zip(mine, theirs, strict=True))
            if a is None or b is None or (a.action, a.nbytes) != (b.action, b.nbytes)
        )
