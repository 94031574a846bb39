"""Which checkpointed regions of a forward run once, and which run again in backward."""

from __future__ import annotations


class Regions:
    """The choice that a plan makes of the checkpointed regions. A region is known by its place in its forward.

    Attributes:
        once: the places of the regions that run once. Every other region runs again in backward, as its program says.
    """

    def __init__(self) -> None:
        self.once: frozenset[int] = frozenset()

    def follow(self, once: frozenset[int]) -> None:
        """Run these regions once from the next forward on."""
        self.once = once
