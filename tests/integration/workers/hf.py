"""One rank of a data-parallel training: trainers on DDP, and Accelerate's plain loop."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from tests.integration.evidence import Run
from tests.integration.hf_models import accelerate_loop, checkpointing, compare, make_trainer, spool
from tests.integration.processes import main, scratch


def work() -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found: dict[str, Any] = {"trainer": trained()}
    lines = printed.getvalue().splitlines()
    found["checkpointing"] = trained(**checkpointing(reentrant=False))
    options = spool(scratch(), device_budget="48KiB")
    found["accelerate"] = accelerate_loop("after prepare", "no", options), accelerate_loop(None, "no", options)
    return found | {"printed": lines}


def trained(**options: Any) -> tuple[Run, Run]:
    return compare(lambda: make_trainer(scratch(), max_steps=2, **options), scratch(), device_budget="48KiB")


if __name__ == "__main__":
    main(work)
