"""One rank of a data-parallel training: trainers on DDP and on ZeRO-3, and Accelerate's plain loop."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import deepspeed

from tests.integration.evidence import Run
from tests.integration.hf_models import accelerate_loop, checkpointing, compare, make_trainer, spool
from tests.integration.processes import main, scratch

ZERO3: dict[str, Any] = {
    "deepspeed": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
}


def work() -> dict[str, Any]:
    """Every row with its activations on disk and without, and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found: dict[str, Any] = {"trainer": trained()}
    lines = printed.getvalue().splitlines()
    found["checkpointing"] = trained(**checkpointing(reentrant=False))
    options = spool(scratch(), device_budget="48KiB")
    found["accelerate"] = accelerate_loop("after prepare", "no", options), accelerate_loop(None, "no", options)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does; this would be compiled for a minute
    found["zero3"] = trained(**ZERO3)
    return found | {"printed": lines}


def trained(**options: Any) -> tuple[Run, Run]:
    """One row: a trainer of two steps."""

    def make() -> Any:
        trainer = make_trainer(scratch(), max_steps=2, **options)
        assert trainer.is_deepspeed_enabled == ("deepspeed" in options)
        return trainer

    runs = compare(make, scratch(), device_budget="48KiB")
    for run in runs:
        assert all(tensor.numel() for tensor in run.tensors.values())
    return runs


if __name__ == "__main__":
    main(work)
