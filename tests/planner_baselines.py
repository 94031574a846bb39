"""The planner's baseline, SSDTrain's cut: the first storages leave, the last stay, by volume against time.

Published: going through the modules, stop at the first one for which writing all before it, writing it and reading it
back takes more than the time until backward is back at it, with backward taken as twice forward. Here on storages that
are counted once, with the read bandwidth beside the write bandwidth, with backward as it was measured, and for every
earlier storage as well, whose reads queue behind.
"""

from __future__ import annotations

from actoffload.planning.profile import Profile
from actoffload.planning.search import Limits, Search
from actoffload.planning.simulator import Prediction


def predict_cut(profile: Profile, limits: Limits) -> Prediction:
    """The step under the published cut; moved towards the end as far as a budget demands, or all of it."""
    search = Search(profile, limits)
    order = search.movable()
    choice = search.offload(order[: (least := _before_the_cut(search, order))])
    while limits.device_budget is not None and not search.fits(choice) and least < len(order):
        least += 1
        choice = search.offload(order[:least])
    return search.predict(choice)


def _before_the_cut(search: Search, order: list[int]) -> int:
    """How many items of ``order`` leave by the inequality."""
    if not order:
        return 0
    items, profile = search.workload.items, search.workload.profile
    links = [profile.host] if search.to_host else [profile.disk]
    write_s = max(1 / link.write_bytes_per_s for link in links if link is not None)
    read_s = max(1 / link.read_bytes_per_s for link in links if link is not None)
    begin_s = items[order[0]].birth_s
    volume = 0
    deadline_s = float("inf")
    for count, number in enumerate(order):
        item = items[number]
        deadline_s = min(deadline_s, item.need_s + volume * read_s)
        volume += item.nbytes
        if begin_s + volume * (write_s + read_s) > deadline_s:
            return count
    return len(order)
