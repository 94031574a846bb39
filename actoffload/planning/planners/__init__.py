"""Planners: pure functions from a `Profile` and `Limits` to a `Plan`.

from actoffload.planning.planners import Limits, make_planner

plan = make_planner("auto").plan(profile, Limits(device_budget=8 << 30))
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ConfigError
from .auto import Auto
from .base import Limits, Planner
from .joint import Joint
from .ssdtrain import SSDTrain

PLANNERS: dict[str, Callable[[], Planner]] = {"auto": Auto, "joint": Joint, "ssdtrain": SSDTrain}
"""Every planner by its name."""


def make_planner(name: str = "auto") -> Planner:
    """The planner of a name.

    Raises:
        ConfigError: there is none of this name; names ``planner``.
    """
    if name not in PLANNERS:
        raise ConfigError("planner", name, f"choose one of {', '.join(map(repr, PLANNERS))}")
    return PLANNERS[name]()


__all__ = [
    "PLANNERS", "Auto", "Joint", "Limits", "Planner", "SSDTrain", "make_planner",
]  # fmt: skip
