"""The order in which one process of a Megatron pipeline runs its forwards and backwards. Pure: no torch, no Megatron.

Follows ``megatron.core.pipeline_parallel.schedules``: no pipelining, 1F1B, and interleaved 1F1B.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Literal

Direction = Literal["forward", "backward"]
MicroBatch = tuple[int, int]
"""(model chunk, micro-batch), both from 0; the chunk is the virtual pipeline stage of this process."""
Phase = tuple[MicroBatch, Direction]


def phases(rank: int, size: int, microbatches: int, *, chunks: int = 1, group: int | None = None) -> list[Phase]:
    """What one process does in one training step, in order.

    Args:
        rank: its pipeline rank, from 0.
        size: processes in the pipeline.
        microbatches: micro-batches of the step.
        chunks: model chunks of each process; above 1 the schedule is interleaved.
        group: micro-batches that go through a chunk in a row, ``microbatch_group_size_per_vp_stage``; None: ``size``.

    >>> phases(0, 2, 2)
    [((0, 0), 'forward'), ((0, 1), 'forward'), ((0, 0), 'backward'), ((0, 1), 'backward')]
    """
    group = group or size
    order = [
        (chunk, microbatch)
        for first in range(0, microbatches, group if chunks > 1 else max(1, microbatches))
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches) if chunks > 1 else microbatches)
    ]
    ahead = size - rank - 1 if chunks == 1 else 2 * (size - rank - 1) + (chunks - 1) * group
    ahead = min(ahead, len(order)) if size > 1 else 0
    forwards: list[Phase] = [(key, "forward") for key in order]
    backwards: list[Phase] = [((chunks - 1 - chunk, microbatch), "backward") for chunk, microbatch in order]
    steady = [phase for pair in zip(forwards[ahead:], backwards, strict=False) for phase in pair]
    return [*forwards[:ahead], *steady, *backwards[len(order) - ahead :]]


@lru_cache(maxsize=64)
def following(rank: int, size: int, microbatches: int, chunks: int, group: int | None) -> dict[Phase, Phase]:
    """What comes after each phase of `phases`; the last one has nothing after it."""
    order = phases(rank, size, microbatches, chunks=chunks, group=group)
    return dict(pairwise(order))
