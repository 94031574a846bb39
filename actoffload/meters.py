"""How fast a link is while it is kept busy. Pure: times are given."""

from __future__ import annotations

ENOUGH_BYTES = 32 << 20
"""A rate is believed once so many bytes went through a full link."""


class RateMeter:
    """Bytes per second of one direction of a link, seen from the transfers that begin and end on it.

    What matters is the rate with the link full: ``depth`` transfers or more under way. Until enough was seen of that,
    the rate while anything was under way stands for it, which can only be too low.

    Args:
        depth: how many transfers fill the link.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._count = 0
        self._since_s = 0.0
        self._bytes = [0, 0]
        self._seconds = [0.0, 0.0]

    def began(self, time_s: float) -> None:
        """A transfer began."""
        self._pass(time_s)
        self._count += 1

    def ended(self, nbytes: int, time_s: float) -> None:
        """A transfer of ``nbytes`` ended; 0 when it failed or was cancelled."""
        self._pass(time_s)
        self._bytes[self._full] += nbytes
        self._count -= 1

    @property
    def full_bytes_per_s(self) -> float | None:
        """The rate of the full link, or None where not enough was seen of that."""
        nbytes, seconds = self._bytes[1], self._seconds[1]
        return nbytes / seconds if nbytes >= ENOUGH_BYTES and seconds > 0 else None

    @property
    def bytes_per_s(self) -> float | None:
        """The best that is known of the rate, or None before anything has ended."""
        full = self.full_bytes_per_s
        if full is not None:
            return full
        nbytes, seconds = sum(self._bytes), sum(self._seconds)
        return nbytes / seconds if nbytes and seconds > 0 else None

    def restart(self) -> None:
        """Forget what was seen; what is under way stays under way."""
        self._bytes, self._seconds = [0, 0], [0.0, 0.0]

    @property
    def _full(self) -> bool:
        return self._count >= self._depth

    def _pass(self, time_s: float) -> None:
        if self._count:
            self._seconds[self._full] += max(0.0, time_s - self._since_s)
        self._since_s = time_s
