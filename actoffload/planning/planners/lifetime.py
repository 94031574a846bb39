"""Benefit and cost on lifetimes, as G10 and TERAIO choose: what relieves memory most for the I/O time that it takes.

The benefit of moving a storage is the integral over time of the over-full memory that it removes while it is away; the
cost is the time of its transfers. The largest ratio is taken again and again. Transfers are booked on the links, each
at the earliest (writes) or the latest (reads) moment that is free, so that what is booked delays what comes later; a
storage whose write would end after its read has to begin is passed over, unless the budget cannot be met without it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..plan import Plan
from ..profile import Link, Profile
from ..workload import Choice
from .base import Bench, Limits

BINS = 512
MARGIN = 0.05
"""A window between write and read has to be longer than the transfers by this share."""

ROUND = 16
"""Each round of the ranking takes this part of what is left."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Lifetime:
    """Move what relieves memory most per second of I/O."""

    name = "lifetime"

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        """Benefit/cost until the budget is met; without a budget, all that can be hidden."""
        bench = Bench(profile, limits)
        return bench.finish(lifetime(bench), self.name, lambda _: "relieves memory most for its I/O time")


def lifetime(bench: Bench, recompute: frozenset[int] = frozenset()) -> Choice:
    """The choice by benefit and cost; with a budget, as many more as the simulator says are needed."""
    hidden, rest = Table(bench, bench.movable(recompute)).rank()
    choice = bench.offload(hidden, recompute)
    if bench.limits.device_budget is None or bench.fits(choice):
        return choice
    everything = hidden + rest
    few, many = len(hidden), len(everything)
    while many - few > 1:
        middle = (few + many) // 2
        if bench.fits(bench.offload(everything[:middle], recompute)):
            many = middle
        else:
            few = middle
    return bench.offload(everything[:many], recompute)


class Channel:
    """One direction of a link over the step, in bins of time: how many seconds of each are free."""

    def __init__(self, bin_s: float, bytes_per_s: float, latency_s: float) -> None:
        self.free: Floats = np.full(BINS, bin_s)
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s

    def seconds(self, nbytes: Floats) -> Floats:
        """How long transfers take."""
        return nbytes / self._bytes_per_s + self._latency_s

    def free_before(self) -> Floats:
        """The free seconds before each bin, and before the step's end."""
        return np.concatenate(([0.0], np.cumsum(self.free)))

    def book(self, first: int, last: int, seconds: float, *, latest: bool) -> None:
        """Take ``seconds`` out of the bins from ``first`` to ``last``, the earliest or the latest first."""
        span = self.free[first : last + 1]
        ordered = span[::-1] if latest else span
        before = np.concatenate(([0.0], np.cumsum(ordered)[:-1]))
        ordered -= np.clip(seconds - before, 0.0, ordered)


class Table:
    """Memory pressure and booked transfers over the step, and the ranking that comes of them."""

    def __init__(self, bench: Bench, numbers: list[int]) -> None:
        profile = bench.workload.profile
        items = bench.workload.items
        self._numbers = numbers
        self._bin_s = max(profile.step_s, 1e-9) / BINS
        self._write, self._read = self._channels(profile.host, None if bench.to_host else profile.disk)
        self._nbytes: Floats = np.array([items[n].nbytes for n in numbers], dtype=np.float64)
        self._birth = self._bins([items[n].birth_s for n in numbers])
        self._need = self._bins([items[n].need_s for n in numbers])
        self._write_s = self._write.seconds(self._nbytes)
        self._read_s = self._read.seconds(self._nbytes)
        self._over: Floats = np.maximum(0.0, self._pressure(profile) - (bench.limits.device_budget or 0))

    def _channels(self, host: Link | None, disk: Link | None) -> tuple[Channel, Channel]:
        links = [link for link in (host, disk) if link is not None]
        write = min((link.write_bytes_per_s for link in links), default=1.0)
        read = min((link.read_bytes_per_s for link in links), default=1.0)
        latency = sum(link.latency_s for link in links)
        return Channel(self._bin_s, write, latency), Channel(self._bin_s, read, latency)

    def _bins(self, times: list[float]) -> Ints:
        return np.clip((np.array(times) / self._bin_s).astype(np.int64), 0, BINS - 1)

    def _pressure(self, profile: Profile) -> Floats:
        """The most that is resident in each bin with nothing moved."""
        pressure: Floats = np.zeros(BINS)
        first = self._bins([storage.birth_s for storage in profile.storages])
        last = self._bins([storage.last_need_s for storage in profile.storages])
        for storage, begin, end in zip(profile.storages, first, last, strict=True):
            pressure[begin : end + 1] += storage.nbytes
        return pressure

    def rank(self) -> tuple[list[int], list[int]]:
        """The items whose transfers can be hidden, in the order in which they are taken, and then the others.

        Ratios are worked out anew after each sixteenth of what is left, as what is booked lowers them.
        """
        left = np.arange(len(self._numbers))
        taken: list[int] = []
        while len(left) and self._over.max() > 0:
            first, last = self._windows(left)
            full = np.concatenate(([0.0], np.cumsum(self._over > 0)))
            hidden = first < last
            seconds = np.where(hidden, full[np.maximum(first, last)] - full[first], 0.0) * self._bin_s
            ratio = seconds * self._nbytes[left] / (self._write_s[left] + self._read_s[left])
            best = np.argsort(-ratio, kind="stable")[: max(1, len(left) // ROUND)]
            best = best[ratio[best] > 0]
            if not len(best):
                break
            done = [place for place in best if self._take(int(left[place]))]
            taken += [self._numbers[int(left[place])] for place in done]
            left = np.delete(left, done if done else best)
        return taken, self._forced(set(taken))

    def _windows(self, chosen: Ints) -> tuple[Ints, Ints]:
        """The first bin after each write, and the bin in which each read begins."""
        write, read = self._write.free_before(), self._read.free_before()
        ends = write[self._birth[chosen]] + self._write_s[chosen] * (1 + MARGIN)
        begins = read[self._need[chosen]] - self._read_s[chosen] * (1 + MARGIN)
        first = np.minimum(np.searchsorted(write, ends), BINS)
        last = np.searchsorted(read, begins, side="right") - 1
        return first, np.maximum(last, -1)

    def _take(self, place: int) -> bool:
        """Book the transfers of an item, if they still can be hidden."""
        first, last = (int(bins[0]) for bins in self._windows(np.array([place])))
        if first >= last:
            return False
        self._over[first:last] = np.maximum(0.0, self._over[first:last] - self._nbytes[place])
        self._write.book(int(self._birth[place]), first - 1, float(self._write_s[place]), latest=False)
        self._read.book(last, int(self._need[place]) - 1, float(self._read_s[place]), latest=True)
        return True

    def _forced(self, taken: set[int]) -> list[int]:
        """What was not taken, in the order in which it is if it must: the least time exposed for each byte first."""
        idle = (self._need - self._birth) * self._bin_s
        exposed = np.maximum(0.0, self._write_s + self._read_s - idle) / np.maximum(self._nbytes, 1.0)
        order = np.lexsort((-idle, exposed))
        return [self._numbers[int(place)] for place in order if self._numbers[int(place)] not in taken]
