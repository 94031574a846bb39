"""What each case of the GPU suite needs of a device, counted on meta tensors: ``python -m benchmarks.gpu_needs``.

Weights, gradients and the states of AdamW are there all the time; to these comes what `actoffload.tools.saved_bytes`
counts in a forward (with checkpoints: every block's input, one block and the rest), and twice the largest saved tensor,
which is what a loss makes in backward; or else what AdamW makes on its way, twice the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actoffload.tools.models import unpacked_sequences
from actoffload.tools.on_paper import RESERVED_BYTES
from actoffload.tools.saved_bytes import WatchedStep
from benchmarks.gpu_cases import GpuCase, cases
from benchmarks.harness import markdown_table
from benchmarks.workloads import build

GIB = 1 << 30
DEVICE_BYTES = 78 * GIB
"""Of an H100 with 80 GB."""
SPARE = 0.05
"""Share of it that an allocator cannot use for want of one piece."""
FITS_BYTES = int((1 - SPARE) * DEVICE_BYTES) - RESERVED_BYTES


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes of the reference's step, which needs the most; ``flops`` of its forward."""

    weights: int
    gradients: int
    states: int
    saved: int
    largest: int
    flops: int

    @property
    def static(self) -> int:
        """What is there between steps."""
        return self.weights + self.gradients + self.states

    @property
    def peak(self) -> int:
        """The most at once, in backward or in the optimizer."""
        return self.static + max(self.saved + 2 * self.largest, 2 * self.gradients if self.states else 0)


def needs(case: GpuCase) -> Needs:
    """Count what the reference of a case needs. It is run on meta tensors, which have shapes and no values."""
    with torch.device("meta"):
        work = build(case.spec)
        step = WatchedStep(work.model, {name: work.model.get_submodule(name) for name in work.blocks}, ())
        with unpacked_sequences(), step.flops, step.forward():  # by now Transformers is imported, if it is used
            work.forward()
    of_blocks: dict[int | None, int] = {}
    for one in step.saved.values():
        of_blocks[one.block] = of_blocks.get(one.block, 0) + one.nbytes
    saved = sum(of_blocks.values())
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
        flops=step.now(),
    )


def main() -> int:
    """Print them; 1 where a case does not fit."""
    found = {case.name: needs(case) for case in cases(tiny=False)}
    rows = []
    for name, need in found.items():
        sizes = (need.weights, need.gradients, need.states, need.saved, need.largest, need.peak)
        fits = "yes" if need.peak <= FITS_BYTES else "NO"
        rows.append((name, *(f"{size / GIB:.1f}" for size in sizes), fits))
    columns = ("case, GiB", "weights", "gradients", "AdamW", "saved", "largest", "peak", f"≤ {FITS_BYTES / GIB:.0f}")
    print(markdown_table(columns, rows), end="")
    return 0 if all(need.peak <= FITS_BYTES for need in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
