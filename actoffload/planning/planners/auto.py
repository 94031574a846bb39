"""A name that `autotune` still imports; `planning.search` is the planner."""

from __future__ import annotations

from .. import search
from ..plan import Plan
from ..profile import Profile
from .base import Limits


class Auto:
    """`planning.search.plan` as an object."""

    name = "auto"

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        """Plan a recorded step."""
        return search.plan(profile, limits)
