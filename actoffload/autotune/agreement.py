"""One plan for all ranks of a group, so that blocks that communicate can be recomputed: on all ranks or on none.

It is asked for, never done by itself: only the caller knows a moment that all ranks share. In a pipeline one rank may
wait for the other in the middle of a step, and a rank may skip steps that others take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import StateError
from ..planning.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank brings.

    Attributes:
        plan: the plan that it would follow, as JSON; empty while it has none.
        fits: what the plan was made for: sizes of the storages, names of the blocks, limits. Plans of ranks where it
            is equal fit both.
        step_s: the step that the rank expects under its plan.
        problem: why this rank cannot agree on anything now.
    """

    plan: str = ""
    fits: tuple[Any, ...] = ()
    step_s: float = 0.0
    problem: str = ""


def choose(proposals: Sequence[Proposal]) -> tuple[Plan | None, str]:
    """The plan that all ranks follow, or None and why; the same on every rank that has the same proposals.

    Of plans that fit everywhere it is the one of the rank that expects the longest step: its links are the slowest.

    Raises:
        StateError: a rank cannot agree on anything now.
    """
    for rank, proposal in enumerate(proposals):
        if proposal.problem:
            raise StateError(f"agree(): rank {rank} of the group: {proposal.problem}")
    if not all(proposal.plan for proposal in proposals):
        return None, ""
    if len({proposal.fits for proposal in proposals}) > 1:
        return None, (
            "agree(): the ranks save different tensors or have other limits: each plans for itself, without recomputing"
        )
    slowest = max(range(len(proposals)), key=lambda rank: (proposals[rank].step_s, -rank))
    return Plan.from_json(proposals[slowest].plan), f"agreed among {len(proposals)} ranks"


def several_ranks(group: Any = None) -> bool:
    """Whether there is more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def exchange(mine: T, group: Any = None) -> list[T]:
    """What every rank brings, by rank; a collective of the group."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found
