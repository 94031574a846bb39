"""What a forward step is not told: which micro-batch it is called for, how many there are, and what comes after."""

from __future__ import annotations

import functools
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from actoffload.errors import ConfigError

from .schedule import MicroBatch, Phase, following


@functools.cache
def core() -> SimpleNamespace:
    """What is needed of megatron-core.

    Raises:
        ConfigError: the version that is installed lacks it.
    """
    try:
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.parallel_state import get_pipeline_model_parallel_rank
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
    except ImportError as error:
        try:
            version = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            version = "not installed"
        remedy = f"lacks what actoffload needs ({error}); install 0.16, which is tested"
        raise ConfigError("megatron-core", version, remedy) from error
    return SimpleNamespace(
        microbatches=get_num_microbatches, rank=get_pipeline_model_parallel_rank, discarding=CheckpointWithoutOutput
    )


class MicroBatches:
    """Which micro-batch of the step a call is for, and how many there are: Megatron does not tell a forward step."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._seen = 0
        self._learned: int | None = None

    def key(self, model: Any) -> MicroBatch:
        """The model chunk and micro-batch of this call."""
        chunk = int(getattr(model, "vp_stage", None) or 0)
        layers = getattr(getattr(model, "decoder", None), "layers", None) or [None]
        microbatch = getattr(layers[0], "current_microbatch", None)
        if microbatch is None:  # no layers that Megatron's schedule could tell: count
            microbatch = self._counts.get(chunk, 0) % (self.total() or 1 << 62)
            self._counts[chunk] = microbatch + 1
        if (chunk, microbatch) == (0, 0):
            self._learned, self._seen = self._seen or None, 0
        self._seen = max(self._seen, microbatch + 1)
        return chunk, int(microbatch)

    def total(self) -> int | None:
        """Micro-batches of this step: as Megatron's calculator says, else as many as the step before had."""
        try:
            return int(core().microbatches())
        except AttributeError:  # nobody made a calculator
            return self._learned

    def following(self, model: Any, key: MicroBatch) -> dict[Phase, Phase]:
        """What this process does after each phase of the step; empty where that is not known (yet)."""
        config, total = model.config, self.total()
        size = config.pipeline_model_parallel_size
        if total is None and size == 1:
            total = key[1] + 2
        if total is None:
            return {}
        rank = core().rank() if size > 1 else 0
        chunks = config.virtual_pipeline_model_parallel_size or 1
        return following(rank, size, total, chunks, config.microbatch_group_size_per_vp_stage)
