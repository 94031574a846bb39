"""The rows of FSDP2, and layer-major steps with DeepSpeed's ZeRO-3: counts of collectives, weights beside a loop's."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader, schedules
from tests.blocks import Block
from tests.integration.processes import main, scratch
from tests.integration.workers import schedule_rows
from tests.integration.workers.schedule_rows import WIDTH, WORDS, Head, batches, counted

COUNTS = (1, 4)


BLOCK = sum(parameter.numel() for parameter in Block(WIDTH).parameters())
ZERO3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    # As in a large model: one block stays gathered while all micro-batches pass through it.
    "stage3_max_live_parameters": 2 * BLOCK,
    "stage3_max_reuse_distance": BLOCK,
}


class Model(nn.Module):
    """A model whose forward takes a list of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), Head()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, inputs: list[Tensor], layer_major: bool) -> Any:
        if layer_major:
            return sum(schedules.layer_major(self.blocks, inputs, before=self.embed, after=self.head))
        losses: Any = 0
        for x in reversed(inputs):  # so that one backward sums gradients in ascending order
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            losses = losses + self.head(x)
        return losses


def step(count: int, how: str, offloader: Offloader | None = None) -> tuple[tuple[int, int], dict[str, Tensor]]:
    """The counts of a second step, and the weights after it.

    Args:
        count: number of micro-batches.
        how: ``"layer major"``; ``"loop"`` with a backward for each micro-batch, or ``"one backward"`` for all.
        offloader: the forward runs in its context.
    """
    model = Model()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": ZERO3, "zero_allow_untested_optimizer": True}
    config["gradient_accumulation_steps"] = count if how == "loop" else 1
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    inputs = batches(count)

    def take() -> None:
        for some in [[one] for one in inputs] if how == "loop" else [inputs]:
            with offloader or contextlib.nullcontext():
                loss = engine(some, how == "layer major")
            engine.backward(loss)
            engine.step()

    take()
    counts = counted(take)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.destroy()
    return counts, weights


def zero() -> dict[str, Any]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo suffices; this op takes a minute to compile
    deepspeed.init_distributed(dist_backend="gloo")
    found: dict[str, Any] = {}
    for count in COUNTS:
        found[f"{count}"] = {how: step(count, how) for how in ("loop", "one backward", "layer major")}
    config = OffloadConfig(target="nvme", path=scratch(), min_bytes=0, announce="none", policy="all", keep_last_bytes=0)
    offloader = Offloader(config)
    found["offloaded"] = step(4, "layer major", offloader)[1]
    found["moved bytes"] = offloader.statistics().moved_bytes
    offloader.close()
    return found


def work() -> dict[str, Any]:
    return schedule_rows.work() | {"zero": zero()}


if __name__ == "__main__":
    main(work)
