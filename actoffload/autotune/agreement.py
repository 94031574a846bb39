"""Lets all ranks run the same checkpointed regions once: a region in which ranks communicate has to run alike on all.

Only the program calls this, because only the program knows a moment that all ranks share. In a pipeline one rank may
wait for another in the middle of a step, and a rank may skip steps that the rest take.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import StateError
from ..runtime.ranks import several_ranks
from .autopilot import Autopilot
from .making import Brought

UNEQUAL = "agree(): the ranks save different tensors: each plans for itself, and regions that communicate run again"


def agree(pilot: Autopilot | None, group: Any, problem: str) -> bool:
    """`Offloader.agree`: every rank takes part in the collective, even if it cannot agree now.

    Raises:
        StateError: on all ranks, if one has a problem or does not plan.
    """
    if not several_ranks(group):
        return pilot is not None and pilot.plan is not None
    # A problem travels through the collective: a rank that raised before it would leave the other ranks waiting.
    problem = problem or ("its policy is not 'auto'" if pilot is None else "")
    mine = Brought(problem=problem) if pilot is None or problem else pilot.brings()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    for rank, each in enumerate(found):
        if each.problem:
            raise StateError(f"agree(): rank {rank} of the group: {each.problem}")
    assert pilot is not None, "a rank without a planner has a problem, which raises on all ranks"
    ready = all(each.once is not None for each in found)
    # The first rank decides: ranks measure different times, and may choose different regions for the same step.
    equal = len({each.fits for each in found}) == 1
    once = frozenset(found[0].once) if ready and equal else None
    pilot.agreed(once, UNEQUAL if ready and not equal else "")
    return once is not None
