"""The rate of a link while it is kept busy. Pure: times are arguments."""

from __future__ import annotations

ENOUGH_BYTES = 32 << 20
"""A rate counts once this many bytes went through a full link."""

LinkShare = tuple[float, float]
"""Seconds of an even share of the link: while it was not full, and while it was."""


class RateMeter:
    """Bytes per second of one direction of a link, seen from the transfers that begin and end on it.

    The rate is that of a full link: ``depth`` transfers or more under way. A transfer that was under way both with a
    full link and without counts for each in proportion, as if concurrent transfers shared the link
    evenly; where the link serves them one after the other, the rate of bursts of two or three is up to a third too
    high. Until enough was seen of a full link, the rate while anything was under way stands for it, which can only be
    too low.

    Args:
        depth: How many transfers fill the link.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._count = 0
        self._since_s = 0.0
        self._share = [0.0, 0.0]  # the `LinkShare` of a transfer that is under way all the time
        self._bytes = [0.0, 0.0]
        self._seconds = [0.0, 0.0]

    def began(self, time_s: float) -> LinkShare:
        """Count a transfer that begins; return an argument for `ended`."""
        self._pass(time_s)
        self._count += 1
        return self._share[0], self._share[1]

    def ended(self, nbytes: int, time_s: float, before: LinkShare) -> None:
        """Count the end of a transfer, also of a cancelled one: the bytes it moved; ``before`` is from `began`."""
        self._pass(time_s)
        alone, full = self._share[0] - before[0], self._share[1] - before[1]
        part = full / (alone + full) if alone + full > 0 else float(self._full)
        self._bytes[1] += nbytes * part
        self._bytes[0] += nbytes * (1 - part)
        self._count -= 1

    @property
    def full_bytes_per_s(self) -> float | None:
        """Rate of the full link, or None where not enough was seen of that."""
        nbytes, seconds = self._bytes[1], self._seconds[1]
        return nbytes / seconds if nbytes >= ENOUGH_BYTES and seconds > 0 else None

    @property
    def bytes_per_s(self) -> float | None:
        """The best estimate of the rate, or None before any transfer has ended."""
        full = self.full_bytes_per_s
        if full is not None:
            return full
        nbytes, seconds = sum(self._bytes), sum(self._seconds)
        return nbytes / seconds if nbytes and seconds > 0 else None

    def restart(self) -> None:
        """Forget the transfers that have ended; running ones stay counted."""
        self._bytes, self._seconds = [0.0, 0.0], [0.0, 0.0]

    @property
    def _full(self) -> bool:
        return self._count >= self._depth

    def _pass(self, time_s: float) -> None:
        if self._count:
            seconds = max(0.0, time_s - self._since_s)
            self._seconds[self._full] += seconds
            self._share[self._full] += seconds / self._count
        self._since_s = time_s
