"""One rank of a data-parallel training: trainers on DDP, and Accelerate's plain loop."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from tests.integration.hf_models import accelerate_loop, checkpointing, make_trainer, spool, train
from tests.integration.processes import main, scratch


def work() -> dict[str, Any]:
    options = spool(scratch(), device_budget="48KiB")
    plain = train(trainer())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found: dict[str, Any] = {"trainer": (train(trainer(), **options), plain)}
    lines = printed.getvalue().splitlines()
    found["checkpointing"] = train(trainer(**checkpointing(reentrant=False)), **options), plain
    found["accelerate"] = accelerate_loop("after prepare", "no", options), accelerate_loop(None, "no", options)
    return found | {"printed": lines}


def trainer(**options: Any) -> Any:
    return make_trainer(scratch(), max_steps=2, **options)


if __name__ == "__main__":
    main(work)
