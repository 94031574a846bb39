"""All choices that there are for a small profile, to compare the search with. For tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product

from actoffload.planning.profile import Profile
from actoffload.planning.regions import choosable, with_regions
from actoffload.planning.search import Limits, Search
from actoffload.planning.workload import HOST, KEEP, NVME, Choice


def every_choice(search: Search, at_most: int) -> Iterator[Choice] | None:
    """Every tier for every storage, or None when there are more than ``at_most`` choices."""
    tiers = [KEEP] + [HOST] * search.to_host + [NVME] * search.to_disk
    numbers = search.movable()
    return None if len(tiers) ** len(numbers) > at_most else _every(search, tiers, numbers)


def _every(search: Search, tiers: list[int], numbers: list[int]) -> Iterator[Choice]:
    for assigned in product(tiers, repeat=len(numbers)):
        whole = [KEEP] * len(search.workload.items)
        for number, tier in zip(numbers, assigned, strict=True):
            whole[number] = tier
        yield tuple(whole)


def best_cut(search: Search) -> Choice:
    """The best of all cuts, the first or the smallest first, under all windows; its window is the search's then."""
    order = search.movable()
    small = sorted(order, key=lambda number: search.workload.items[number].nbytes)
    found = []
    for window in search.windows():
        search.window = window
        for numbers in (order, small):
            for count in range(len(order) + 1):
                choice = search.offload(numbers[:count])
                found.append((search.score(choice), window, choice))
    _, search.window, tiers = min(found)
    return tiers


def every_mix(base: Profile, limits: Limits) -> float:
    """The shortest step in a budget over all sets of regions, each with every cut under every window; inf for none."""
    places = choosable(base)
    shortest = float("inf")
    for once in chain.from_iterable(combinations(places, count) for count in range(len(places) + 1)):
        search = Search(with_regions(base, once), limits)
        order = search.movable()
        for window in search.windows():
            search.window = window
            scores = (search.score(search.offload(order[:count])) for count in range(len(order) + 1))
            shortest = min([shortest, *(step_s for over, step_s, _ in scores if not over)])
    return shortest
