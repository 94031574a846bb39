"""SSDTrain's cut: the first storages leave, the last stay, by one inequality of volume against time.

Published: going through the modules, stop at the first one for which writing all before it, writing it and reading it
back takes more than the time until backward is back at it, with backward taken as twice forward. Here on storages that
are counted once, with the read bandwidth beside the write bandwidth, with backward as it was measured, and for every
earlier storage as well, whose reads queue behind.
"""

from __future__ import annotations

from ..plan import Plan
from ..profile import Link, Profile
from .base import Bench, Limits


class SSDTrain:
    """Offload the first, keep the last."""

    name = "ssdtrain"

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        """The published cut; moved towards the end as far as a budget demands."""
        bench = Bench(profile, limits)
        order = bench.movable()
        choice = bench.offload(order[: cut(bench, order)])
        if limits.device_budget is not None and not bench.fits(choice):
            choice = bench.search_cut(order)
        return bench.finish(choice, self.name, lambda _: "before the cut")


def cut(bench: Bench, order: list[int]) -> int:
    """How many items of ``order`` leave by the inequality."""
    if not order:
        return 0
    items = bench.workload.items
    profile = bench.workload.profile
    first, second = profile.host, profile.disk if bench.to_disk and not bench.to_host else None
    write_s, read_s = _seconds_per_byte(first, second)
    extra_s = (bench.limits.max_slowdown or 0.0) * profile.step_s
    begin_s = items[order[0]].birth_s
    volume = 0
    deadline_s = float("inf")
    for count, number in enumerate(order):
        item = items[number]
        deadline_s = min(deadline_s, item.need_s + extra_s + volume * read_s)
        volume += item.nbytes
        if begin_s + volume * (write_s + read_s) > deadline_s:
            return count
    return len(order)


def _seconds_per_byte(host: Link | None, disk: Link | None) -> tuple[float, float]:
    """Write and read time of a byte over the slower of the links that it takes."""
    links = [link for link in (host, disk) if link is not None]
    return max(1 / link.write_bytes_per_s for link in links), max(1 / link.read_bytes_per_s for link in links)
