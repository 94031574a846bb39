"""Rows of torch.distributed, each trained without and with offloading: data, tensor, context and pipeline parallel.

After them come the single tensors of ``distributed_tensors``.

``python -m tests.integration.workers.distributed_rows ROW ...`` in each rank; a row is ``name/where``. ``where``
is the place of the offloading: ``outer`` (`attach` to the wrapped module), ``inner`` (to a module inside it) or
``context`` (around the step).
"""

from __future__ import annotations

import sys
from typing import Any

from tests.integration.processes import main
from tests.integration.workers import distributed_models, distributed_pipeline, distributed_tensors
from tests.integration.workers.distributed_runs import compare

ROWS = {**distributed_models.ROWS, **distributed_pipeline.ROWS}
ALIKE = dict.fromkeys(("ddp_static", "ddp_once"), "ddp")
ALIKE |= dict.fromkeys(("fsdp_blocks", "fsdp_prefetch", "fsdp_checkpoint", "fsdp_once"), "fsdp")
"""Settings that have the bits of another one, without offloading."""


def work() -> dict[str, Any]:
    """The two runs of each row, and the results with single tensors."""
    rows = [(row, *row.split("/")) for row in sys.argv[1:]]
    found = {row: compare(ROWS[ALIKE.get(name, name)], ROWS[name], where) for row, name, where in rows}
    return found | distributed_tensors.work()


if __name__ == "__main__":
    main(work)
