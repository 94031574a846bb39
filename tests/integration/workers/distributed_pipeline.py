"""The settings of torch.distributed.pipelining: every schedule, on two ranks of one or two stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from actoffload import Plan
from tests.blocks import MLP
from tests.integration.workers.distributed_models import WIDTH
from tests.integration.workers.distributed_runs import Setting

MICROBATCHES = 4
ROWS_OF_MICROBATCH = 256
OPTIONS = {"device_budget": "512KiB"}


def pipeline(schedule_class: Any, stages_per_rank: int, *, v_shaped: bool = False) -> Setting:
    """A model of ``2 * stages_per_rank`` stages with two blocks each, split over two ranks.

    Args:
        schedule_class: a schedule of torch.distributed.pipelining.
        stages_per_rank: 1, or 2 for a schedule with virtual stages.
        v_shaped: the first rank has the first and the last stage.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    count = world * stages_per_rank
    chunks = [nn.Sequential(MLP(WIDTH), MLP(WIDTH)) for _ in range(count)]
    mine = [rank, count - 1 - rank] if v_shaped else list(range(rank, count, world))
    stages = [PipelineStage(chunks[index], index, count, torch.device("cpu")) for index in mine]
    first: Any = stages if stages_per_rank > 1 else stages[0]
    schedule = schedule_class(first, MICROBATCHES, loss_fn=F.mse_loss)

    def step(index: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(index)
        rows = MICROBATCHES * ROWS_OF_MICROBATCH
        data, target = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
        losses: list[Tensor] = []
        inputs = (data,) if 0 in mine else ()
        answers: dict[str, Any] = {"target": target, "losses": losses} if count - 1 in mine else {}
        schedule.step(*inputs, **answers)
        return losses or [torch.zeros(())]

    return Setting(
        nn.ModuleList(chunks[index] for index in mine),
        step,
        inner=chunks[mine[0]][1],
        attached=[chunks[index] for index in mine],
        options=OPTIONS,
    )


def checkpointed(setting: Setting) -> Setting:
    """Both blocks of a stage are checkpointed, and the second runs once, with several forwards in flight."""
    for chunk in setting.attached:
        apply_activation_checkpointing(chunk, check_fn=lambda module: isinstance(module, MLP))
    setting.options = {"policy": Plan((), once=(1,), regions=2), "device_budget": "256KiB"}
    return setting


ROWS: dict[str, Callable[[], Setting]] = {
    "pp_gpipe": lambda: pipeline(ScheduleGPipe, 1),
    "pp_1f1b": lambda: pipeline(Schedule1F1B, 1),
    "pp_1f1b_once": lambda: checkpointed(pipeline(Schedule1F1B, 1)),
    "pp_interleaved": lambda: pipeline(ScheduleInterleaved1F1B, 2),
    "pp_looped_bfs": lambda: pipeline(ScheduleLoopedBFS, 2),
    "pp_zero_bubble": lambda: pipeline(ScheduleInterleavedZeroBubble, 2),
    "pp_zbv": lambda: pipeline(ScheduleZBVZeroBubble, 2, v_shaped=True),
    "pp_dual_v": lambda: pipeline(ScheduleDualPipeV, 2, v_shaped=True),
}
