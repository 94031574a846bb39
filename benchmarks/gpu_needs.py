"""What each case of the GPU suite needs of a device, counted on meta tensors: ``python -m benchmarks.gpu_needs``.

Weights, gradients and the states of AdamW are there all the time; to these comes what `actoffload.tools.saved_bytes`
counts in a forward (with checkpoints: every block's input, one block and the rest), and twice the largest saved tensor,
which is what a loss makes in backward; or else what AdamW makes on its way, twice the gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from actoffload.tools.models import unpacked_sequences
from actoffload.tools.on_paper import RESERVED_BYTES
from actoffload.tools.saved_bytes import WatchedStep
from benchmarks.gpu_cases import GpuCase, cases
from benchmarks.harness import Row, number, table_of, yes
from benchmarks.workloads import build

GIB = 1 << 30
DEVICE_BYTES = 78 * GIB
"""Of an H100 with 80 GB."""
SPARE = 0.05
"""Share of it that an allocator cannot use for want of one piece."""
FITS_BYTES = int((1 - SPARE) * DEVICE_BYTES) - RESERVED_BYTES


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes of the reference's step, which needs the most."""

    weights: int
    gradients: int
    states: int
    saved: int
    largest: int

    @property
    def peak(self) -> int:
        """The most at once, in backward or in the optimizer, which has states."""
        in_optimizer = 2 * self.gradients if self.states else 0
        between_steps = self.weights + self.gradients + self.states
        return between_steps + max(self.saved + 2 * self.largest, in_optimizer)


def needs(case: GpuCase) -> Needs:
    """Count what the reference of a case needs. It is run on meta tensors, which have shapes and no values."""
    with torch.device("meta"):
        work = build(case.spec)
        step = WatchedStep(work.model, {name: work.model.get_submodule(name) for name in work.blocks}, ())
        with unpacked_sequences(), step.forward():  # by now Transformers is imported, if it is used
            work.forward()
    of_blocks: Counter[int | None] = Counter()
    for one in step.saved.values():
        of_blocks[one.block] += one.nbytes
    saved = of_blocks.total()
    if case.reference == "recompute":
        inputs = sum(block.input_bytes for block in step.blocks)
        saved = inputs + of_blocks.pop(None, 0) + max(of_blocks.values())
    gradients = sum(parameter.nbytes for parameter in work.model.parameters() if parameter.requires_grad)
    return Needs(
        weights=sum(parameter.nbytes for parameter in work.model.parameters()),
        gradients=gradients,
        states=2 * gradients if case.optimizer else 0,
        saved=saved,
        largest=max(one.nbytes for one in step.saved.values()),
    )


def main() -> int:
    """Print them; 1 where a case does not fit."""
    rows: dict[str, Row] = {}
    for case in cases(tiny=False):
        need = needs(case)
        rows[case.name] = vars(need) | {"peak": need.peak, "fits": need.peak <= FITS_BYTES}
    sizes = {"weights": "weights", "gradients": "gradients", "AdamW": "states"}
    sizes |= {"saved": "saved", "largest": "largest", "peak": "peak"}
    columns = {title: number(name, GIB, 1) for title, name in sizes.items()}
    columns[f"≤ {FITS_BYTES / GIB:.0f}"] = lambda row: yes(row["fits"])
    print(table_of("case, GiB", rows, columns), end="")
    return 0 if all(row["fits"] for row in rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
