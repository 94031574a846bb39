"""Profiles that the tests of the planners share."""

from __future__ import annotations

from actoffload.profile import Profile
from actoffload.testing.profiles import Accelerator, link, transformer_profile


def slow_profile() -> Profile:
    """A transformer on a machine whose disk and compute are both slow."""
    accelerator = Accelerator(name="slow", flops=1e12, host=None, disk=link(1.0, 2.0))
    return transformer_profile(1024, 6, 4, sequence=512, accelerator=accelerator, element_bytes=4)
