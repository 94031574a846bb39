"""A case of `rok` in a process of its own; prints one JSON object.

The options come as one JSON argument: ``case`` and ``variants`` (the fields of `Case` and `Variant`), ``device``,
``threads``, ``warm_up``, ``steps`` and ``path``; ``within_s``: no further turn begins after this time.

All variants take their steps in turns in this one process, so that the load of the machine, the allocator and the place
of memory are the same for all. Each has modules of its own that share the parameters. The learning rate is 0: every
step starts from the same weights and seed and must give the same bits.

The peak: on an accelerator its allocator's, less the bytes that were there before the step; on the CPU the offloader's
count, for ``keep`` and ``recompute`` in a step of their own in which it counts and moves nothing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from .. import OffloadConfig, Offloader
from ..errors import ActOffloadError
from ..memory import cpu_allocator
from .environment import clock_s, prepare_process
from .estimate import NO_BLOCKS, OFFLOAD_READS_AHEAD
from .models import Trainee, build
from .on_paper import Case, is_own
from .rok import Variant, budget_of
from .saved_bytes import BACKWARD_FACTOR
from .workers import FAILURES, failure, serve

SEED = 0
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of as many bytes as a gradient's elements."""


@dataclass
class Mode:
    """One variant: how its steps run, and their results."""

    variant: Variant
    workload: Trainee
    offloader: Offloader | None = None
    device_budget: int | None = None
    counted_peak_bytes: int | None = None
    step_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    identical: bool | None = None
    failure: dict[str, Any] = field(default_factory=dict)

    def sample(self) -> dict[str, Any]:
        """Return its entry in a results file."""
        names = ("device_budget", "counted_peak_bytes", "step_s", "peak_bytes", "ratios", "identical")
        found = {name: getattr(self, name) for name in names}
        found["moved_bytes"] = self.offloader.statistics().moved_bytes if self.offloader is not None else 0
        return {"series": self.variant.series, "level": self.variant.level} | found | self.failure

    def attempt(self, action: Callable[[Mode], Any]) -> Any:
        """Do something with a mode that has not failed; a failure is its result."""
        if self.failure:
            return None
        try:
            return action(self)
        except FAILURES as error:
            self.failure = failure(error)
            return None


class Round:
    """A model, its batch and its modes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.device = torch.device(spec["device"])
        case = Case(**spec["case"])
        self.workload = build(case, self.device)
        self.inputs = self.workload.batch(case.batch)
        counted = case.batch if is_own(case.model) else 1  # a user's own may need several samples, as batch norm does
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.workload.loss(self.workload.batch(counted))
        self.flops = int(counter.get_total_flops()) * (case.batch // counted) * BACKWARD_FACTOR
        self.parameters = [parameter for parameter in self.workload.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.0)
        for parameter in self.parameters:  # gradients are static memory
            parameter.grad = torch.zeros_like(parameter)
        self.modes: dict[Variant, Mode] = {}
        self.expected: tuple[Any, ...] | None = None

    def run(self) -> list[dict[str, Any]]:
        """Warm every mode up, let them take their turns, and return their samples."""
        began_s = time.monotonic()
        for variant in (Variant(**one) for one in self.spec["variants"]):
            mode = self.modes[variant] = Mode(variant, self.workload.twin())
            mode.attempt(self._begin)
            for _ in range(self.spec["warm_up"]):
                mode.attempt(self._step)
        order = [*self.modes.values(), self.modes[Variant(series="keep")]]
        for turn in range(self.spec["steps"]):
            if turn and time.monotonic() - began_s > self.spec.get("within_s", math.inf):
                break
            self._take_turn(order)
            order.reverse()
        return [mode.sample() | {"flops": self.flops} for mode in self.modes.values()]

    def _begin(self, mode: Mode) -> None:
        """Make a mode ready: count its peak, checkpoint its blocks or give it an offloader."""
        series = mode.variant.series
        if series in ("keep", "recompute"):
            self._count(mode)
        if series == "recompute":
            if not mode.workload.blocks:
                raise ActOffloadError(NO_BLOCKS)
            self._checkpoint(mode.workload)
        elif series == "offload":
            mode.offloader = self._offloader(mode, policy="all", prefetch_bytes=OFFLOAD_READS_AHEAD)
        elif series == "hybrid":
            peaks = {v.series: known.counted_peak_bytes for v, known in self.modes.items() if not v.level}
            whole = peaks["keep"]
            if whole is None and (moved := self.modes.get(Variant(series="offload"))) and moved.offloader:
                whole = moved.offloader.statistics().baseline_peak_bytes or None  # keep ran out of memory
            budget = mode.device_budget = budget_of(mode.variant.level, whole, peaks)
            blocks = budget is not None and mode.workload.blocks  # without a budget nothing is to run again
            mode.offloader = self._offloader(mode, policy="auto", device_budget=budget, recompute=blocks)

    @staticmethod
    def _checkpoint(workload: Trainee) -> None:
        """Run every block under PyTorch's checkpoint."""
        for name in workload.blocks:
            block = workload.model.get_submodule(name)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def _offloader(self, mode: Mode, **options: Any) -> Offloader:
        return Offloader(OffloadConfig(path=self.spec["path"], **options)).use(mode.workload.model)

    def _take_turn(self, order: list[Mode]) -> None:
        """Let each take a step; its ratio is to keep's two, the first and the last of the turn.

        Keep's own ratios compare its two steps both ways round, so that the A/A noise lies evenly around 1.
        """
        taken = [mode.attempt(self._timed_step) for mode in order]
        first, *others, last = taken
        if first is None or last is None:
            return
        order[0].ratios += [last / first, first / last]
        for mode, step_s in zip(order[1:-1], others, strict=True):
            if step_s is not None:
                mode.ratios.append(2 * step_s / (first + last))

    def _step(self, mode: Mode, context: AbstractContextManager[Any] | None = None) -> float:
        """Run one step and compare its bits; return its seconds, the device's work included."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        torch.manual_seed(SEED)  # the same dropout in every step
        begin_s = clock_s(self.device.type)
        with context or mode.offloader or nullcontext():
            loss = mode.workload.loss(self.inputs)
        torch.autograd.backward(loss)
        self.optimizer.step()
        step_s = clock_s(self.device.type) - begin_s
        gradients = (parameter.grad for parameter in self.parameters if parameter.grad is not None)
        # A sum of integers has no rounding, so one bit that differs shows.
        bits = float(loss.detach()).hex(), *(int(g.view(INTEGERS[g.element_size()]).sum()) for g in gradients)
        # The first step of all sets the bits: it is keep's, in which nothing moves.
        self.expected = self.expected or bits
        mode.identical = bits == self.expected and mode.identical is not False
        return step_s

    def _timed_step(self, mode: Mode) -> float:
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            static = torch.accelerator.memory_allocated()
            step_s = self._step(mode)
            peak = torch.accelerator.max_memory_allocated() - static
        elif mode.offloader is not None:
            step_s = self._step(mode)
            counts = mode.offloader.statistics()  # counts the notes of finalizers
            # A step that runs without hooks, as nothing moves in it, counts nothing.
            peak = mode.offloader.store.shared.accounts.step_peak_bytes or counts.baseline_peak_bytes
            mode.counted_peak_bytes = peak
        else:
            step_s, peak = self._step(mode), mode.counted_peak_bytes or 0
        mode.step_s.append(step_s)
        mode.peak_bytes.append(peak)
        return step_s

    def _count(self, mode: Mode) -> None:
        """Run a step of keep or recompute in which an offloader counts and moves nothing."""
        workload = self.workload.twin()
        counter = Offloader(OffloadConfig(path=self.spec["path"], policy="keep")).use(workload.model)
        if mode.variant.series == "recompute":
            self._checkpoint(workload)
        self._step(Mode(mode.variant, workload), counter)
        mode.counted_peak_bytes = counter.statistics().resident_peak_bytes
        counter.close()


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure a case; ``samples``: one for each variant. Bytes and seconds."""
    prepare_process(spec["device"], spec["threads"], SEED)
    cpu_allocator.install()
    use = cpu_allocator.Use()
    samples = Round(spec).run()
    use.end()
    return {"samples": samples}


if __name__ == "__main__":
    serve(measure, sys.argv[1])
