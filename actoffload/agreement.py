"""How ranks come to one plan: they tell each other what they measured, through the store of their process group.

No rank ever waits for another one: in a pipeline the other may be waiting for this one. Each says what it has to say
after some step of its own, and looks at the outcome a fixed number of its steps later; the first who then finds that
somebody has not spoken ends the talk for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from .profile import Link, Profile

_KEY = "actoffload/plan/"
_GO, _NO = b"go", b"no"
_talks = itertools.count()


class Agreement:
    """Talks among the members of a group. Every member makes its own, in the same order as the others.

    Args:
        store: that of the group: ``set``, ``get``, ``add``, ``check`` and ``compare_set``.
        rank: this member.
        world: how many there are.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._name = f"{_KEY}{next(_talks)}"

    @classmethod
    def of_the_default_group(cls) -> Agreement | None:
        """Among the ranks of the job; None where there is only one, or no store to talk through."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return None
        try:
            store = dist.distributed_c10d._get_default_store()
        except Exception:  # a group without one
            return None
        return cls(store, dist.get_rank(), dist.get_world_size())

    def say(self, text: str) -> None:
        """This member's word; once."""
        self._store.set(f"{self._name}/{self._rank}", text)
        if self._store.add(f"{self._name}/count", 1) == self._world:
            self._store.compare_set(f"{self._name}/end", "", _GO.decode())

    def outcome(self) -> list[str] | None:
        """What every member said, by rank; or None, for every member that ever asks, where one has not spoken yet."""
        end = self._store.compare_set(f"{self._name}/end", "", _NO.decode())
        if end != _GO:  # whoever came first has decided for all
            return None
        return [self._store.get(f"{self._name}/{rank}").decode() for rank in range(self._world)]


def structure(profile: Profile) -> tuple[Any, ...]:
    """What two ranks' profiles have in common where one plan does for both."""
    storages = tuple((s.index, s.nbytes, s.block, s.tape, s.kept) for s in profile.storages)
    return (
        storages,
        tuple((b.name, b.input, b.tape) for b in profile.blocks),
        profile.host is None,
        profile.disk is None,
    )


def joined(profiles: Sequence[Profile], steps: Sequence[int], rank: int) -> Profile | None:
    """One profile for a rank and those of its structure: the slowest step over the slowest links, the same for each.

    None where another rank has blocks of the same names and another structure: if those communicate, they would be
    recomputed here and not there. The other rank finds that as well.

    Args:
        profiles: of all ranks.
        steps: the step of each rank after which it spoke: what is agreed begins so many later, so it belongs to the
            structure.
        rank: the one that asks.
    """
    structures = [(step, *structure(profile)) for step, profile in zip(steps, profiles, strict=True)]
    names = [{block.name for block in profile.blocks} for profile in profiles]
    if any(other != structures[rank] and names[n] & names[rank] for n, other in enumerate(structures)):
        return None
    alike = [profile for profile, other in zip(profiles, structures, strict=True) if other == structures[rank]]
    return replace(
        max(alike, key=lambda profile: profile.step_s),
        host=_slowest([profile.host for profile in alike]),
        disk=_slowest([profile.disk for profile in alike]),
        prefetch_bytes=alike[0].prefetch_bytes,
    )


def _slowest(links: Sequence[Link | None]) -> Link | None:
    known = [link for link in links if link is not None]
    if not known:
        return None
    return replace(
        known[0],
        write_bytes_per_s=min(link.write_bytes_per_s for link in known),
        read_bytes_per_s=min(link.read_bytes_per_s for link in known),
    )
