"""Local search: a choice is changed a stretch of places at a time, and what scores better is kept. Deterministic."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from ..constants import EXHAUSTIVE, FIRST_STRETCH
from ..workload import HOST, KEEP, NVME, Choice
from .base import Bench


def every_choice(bench: Bench, at_most: int = EXHAUSTIVE) -> Iterator[Choice] | None:
    """All choices that there are, or None when there are more than ``at_most``."""
    tiers = _tiers(bench)
    groups = sorted(bench.all_groups)
    if 2 ** len(groups) > at_most:
        return None
    sets = [frozenset(chosen) for count in range(len(groups) + 1) for chosen in combinations(groups, count)]
    if sum(len(tiers) ** len(bench.movable(recompute)) for recompute in sets) > at_most:
        return None
    return _every(bench, tiers, sets)


def _every(bench: Bench, tiers: list[int], sets: list[frozenset[int]]) -> Iterator[Choice]:
    for recompute in sets:
        numbers = bench.movable(recompute)
        for assigned in product(tiers, repeat=len(numbers)):
            whole = [KEEP] * len(bench.workload.items)
            for number, tier in zip(numbers, assigned, strict=True):
                whole[number] = tier
            yield Choice(tuple(whole), recompute)


def refine(bench: Bench, choice: Choice, spend: int) -> Choice:
    """The best choice reached from ``choice`` while fewer than ``spend`` items are simulated."""
    until = bench.spent + spend
    score = bench.score(choice)
    length = max(1, len(bench.movable(choice.recompute)) // FIRST_STRETCH)
    while True:
        improved = False
        for other in neighbours(bench, choice, length):
            if bench.spent >= until:
                return choice
            if bench.score(other) < score:
                choice, score, improved = other, bench.score(other), True
                break
        if not improved:
            if length == 1:
                return choice
            length //= 2


def neighbours(bench: Bench, choice: Choice, length: int) -> Iterator[Choice]:
    """Choices that differ in one stretch of ``length`` places, in one block, or (single places) in two places."""
    numbers = bench.movable(choice.recompute)
    away = bench.lowest_tier()
    for first in range(0, len(numbers), length):
        stretch = numbers[first : first + length]
        for tier in _tiers(bench):
            other = with_tiers(choice, stretch, tier)
            if other != choice:
                yield other
    for group in sorted(bench.all_groups):
        yield toggled(bench, choice, group)
    if length == 1:
        kept = [n for n in numbers if choice.tiers[n] == KEEP]
        for leaving in kept:
            for staying in numbers:
                if choice.tiers[staying] != KEEP:
                    yield with_tiers(with_tiers(choice, [staying], KEEP), [leaving], away)
        for first, second in combinations(kept, 2):
            yield with_tiers(choice, [first, second], away)


def with_tiers(choice: Choice, numbers: list[int], tier: int) -> Choice:
    """The choice with another tier for these items."""
    tiers = list(choice.tiers)
    for number in numbers:
        tiers[number] = tier
    return Choice(tuple(tiers), choice.recompute)


def toggled(bench: Bench, choice: Choice, group: int) -> Choice:
    """The choice with one group recomputed that was not, or the other way round; what is new is kept."""
    recompute = choice.recompute ^ {group}
    there = set(bench.workload.layout(recompute))
    tiers = tuple(tier if number in there else KEEP for number, tier in enumerate(choice.tiers))
    return Choice(tiers, recompute)


def _tiers(bench: Bench) -> list[int]:
    return [KEEP] + [HOST] * bench.to_host + [NVME] * bench.to_disk
