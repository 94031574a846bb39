"""Names that `autotune` still imports; `planning.search` is the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .. import search
from ..plan import Plan
from ..profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(search.Limits):
    """`planning.search.Limits`, and an option of before."""

    recompute: bool = False


class Planner(Protocol):
    """Plans a recorded step."""

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        """The plan."""
        ...


class Bench:
    """The floor of a profile."""

    def __init__(self, profile: Profile, limits: search.Limits) -> None:
        self._floor = search.floor(profile, limits)

    def floor(self) -> tuple[int, None]:
        """Return the lowest peak."""
        return self._floor, None
