"""Derives the micro-batch of each forward step, and the process's next phase in Megatron's pipeline schedule.

Follows ``megatron.core.pipeline_parallel.schedules``: no pipelining, 1F1B, and interleaved 1F1B.
"""

from __future__ import annotations

import functools
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal

from actoffload.errors import ConfigError

MicroBatch = tuple[int, int]
"""(model chunk, micro-batch), both from 0; the chunk is the virtual pipeline stage of this process."""
Phase = tuple[MicroBatch, Literal["forward", "backward"]]


def phases(rank: int, size: int, microbatches: int, *, chunks: int = 1, group: int | None = None) -> list[Phase]:
    """The forwards and backwards of one process in one training step, in order.

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
    # Megatron's warm-up: a rank runs the forwards that later ranks need before its own first backward can begin.
    ahead = size - rank - 1 if chunks == 1 else 2 * (size - rank - 1) + (chunks - 1) * group
    ahead = min(ahead, len(order)) if size > 1 else 0
    forwards: list[Phase] = [(key, "forward") for key in order]
    backwards: list[Phase] = [((chunks - 1 - chunk, microbatch), "backward") for chunk, microbatch in order]
    steady = [phase for pair in zip(forwards[ahead:], backwards, strict=False) for phase in pair]
    return [*forwards[:ahead], *steady, *backwards[len(order) - ahead :]]


@functools.lru_cache(maxsize=64)
def following(rank: int, size: int, microbatches: int, chunks: int, group: int | None) -> dict[Phase, Phase]:
    """The successor of each phase of `phases`; the last phase has none."""
    return dict(pairwise(phases(rank, size, microbatches, chunks=chunks, group=group)))


@functools.cache
def core() -> SimpleNamespace:
    """The parts of megatron-core that the adapter uses.

    Raises:
        ConfigError: the installed version lacks one of them.
    """
    try:
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.parallel_state import get_pipeline_model_parallel_rank
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
    except ImportError as error:
        version = getattr(sys.modules.get("megatron.core"), "__version__", "not installed")
        remedy = f"lacks what actoffload needs ({error}); install 0.16, which is tested"
        raise ConfigError("megatron-core", version, remedy) from error
    return SimpleNamespace(
        microbatches=get_num_microbatches, rank=get_pipeline_model_parallel_rank, discarding=CheckpointWithoutOutput
    )


class MicroBatches:
    """Derives the micro-batch of each call, because Megatron does not pass it to a forward step."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._seen = 0
        self._learned: int | None = None

    def key(self, model: Any) -> MicroBatch:
        """The model chunk and micro-batch of this call."""
        chunk = int(getattr(model, "vp_stage", None) or 0)
        layers = getattr(getattr(model, "decoder", None), "layers", None) or [None]
        microbatch = getattr(layers[0], "current_microbatch", None)
        if microbatch is None:  # Megatron's schedule notifies only transformer layers; without them, count the calls
            microbatch = self._counts.get(chunk, 0) % (self._total() or 1 << 62)
            self._counts[chunk] = microbatch + 1
        # The first micro-batch of the first chunk begins a step, in every schedule. The number of the step before is
        # the only one known until then.
        if (chunk, microbatch) == (0, 0):
            self._learned, self._seen = self._seen or None, 0
        self._seen = max(self._seen, microbatch + 1)
        return chunk, int(microbatch)

    def following(self, model: Any, key: MicroBatch) -> dict[Phase, Phase]:
        """The successor of each phase of the step in this process; empty while that is unknown."""
        config, total = model.config, self._total()
        size = config.pipeline_model_parallel_size
        if total is None and size == 1:
            total = key[1] + 2  # without pipelining only the next phase matters, and another micro-batch may follow
        if total is None:
            return {}
        rank = core().rank() if size > 1 else 0
        chunks = config.virtual_pipeline_model_parallel_size or 1
        return following(rank, size, total, chunks, config.microbatch_group_size_per_vp_stage)

    def _total(self) -> int | None:
        """Micro-batches of this step: the number of Megatron's calculator, else that of the step before."""
        try:
            return int(core().microbatches())
        except AttributeError:  # the program made no calculator
            return self._learned
