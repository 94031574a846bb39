"""One round of a case of the recompute-offload-keep curve, in a process of its own; prints one JSON object.

The options come as one JSON argument: ``case`` (the fields of `Case`), ``variants`` (the fields of `Variant`),
``device``, ``threads``, ``warm_up``, ``steps`` and ``path``.

All variants live in this one process and take their steps in turns, so that what the machine does meanwhile, the
allocator and where memory lies are the same for all. Each has modules of its own that share the parameters. The
optimizer's learning rate is 0: every step starts from the same weights and seed and must give the same bits.

The peak: on an accelerator what its allocator says, less what was there before the step; on the CPU what the offloader
counts, for ``keep`` and ``recompute`` in a step of their own in which it counts and moves nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from .. import OffloadConfig, Offloader
from ..errors import ActOffloadError, BudgetError
from ..memory import cpu_allocator
from ..testing import simulated_device
from ..tiers.accelerator import Accelerator
from .models import Workload, build
from .process import peak_rss_bytes, prepare_process, say, synchronize
from .rok_points import BACKWARD_FACTOR, SERIES, SIMULATED, Case, Variant

OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")
NO_BLOCKS = "there are no blocks to recompute: layers of one class in a ModuleList or Sequential"
SEED = 0
FAILURES = (ActOffloadError, MemoryError, RuntimeError, OSError)
SIMULATED_GPU = {
    "flops": 250e12 / 96,
    "memory_bytes_per_s": 1.5e12,
    "to_device_bytes_per_s": 25e9,
    "to_host_bytes_per_s": 25e9,
    "latency_s": 2e-6,
}
"""An A100 on PCIe 4 (80 % of its FLOP/s in bfloat16) that computes 96 times as slowly: a model of width 256 in float32
has so many fewer FLOPs for each byte that it saves than one of width 12288 in bfloat16, as SSDTrain measured."""
OFFLOAD_READS_AHEAD = 1 << 20
"""Bytes that the series ``offload`` reads ahead; the library makes that twice the largest tensor (SSDTrain reads one
module ahead). Its default, a quarter of what a forward saves, is a whole block of four, which is recompute's peak."""


@dataclass
class Mode:
    """One variant: how its steps run, and what they gave."""

    variant: Variant
    workload: Workload
    offloader: Offloader | None = None
    device_budget: int | None = None
    counted_peak_bytes: int | None = None
    process_peak_bytes: int | None = None
    step_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    identical: bool | None = None
    failure: dict[str, Any] = field(default_factory=dict)

    def sample(self) -> dict[str, Any]:
        """Return what a results file holds of it."""
        names = ("device_budget", "counted_peak_bytes", "process_peak_bytes", "step_s", "peak_bytes", "ratios")
        found = {name: getattr(self, name) for name in (*names, "identical")}
        return {"series": self.variant.series, "level": self.variant.level} | found | self.failure


class Round:
    """A model, its batch and its modes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        if spec["device"] == SIMULATED:
            simulated_device.install()  # PyTorch knows its name from now on
        self.device = torch.device(spec["device"])
        self.on_cpu = self.device.type == "cpu"
        self.accelerator: Accelerator | None = None
        self.now: Callable[[], float] = time.perf_counter
        if self.device.type == SIMULATED:
            self.accelerator, self.now = simulated_device.SimulatedAccelerator(), self._simulate()
        case = Case(**spec["case"])
        self.workload = build(case, self.device)
        self.inputs = self.workload.batch(case.batch)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.workload.loss(self.workload.batch(1))
        self.flops = int(counter.get_total_flops()) * case.batch * BACKWARD_FACTOR
        self.parameters = [parameter for parameter in self.workload.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.0)
        for parameter in self.parameters:  # gradients are static memory
            parameter.grad = torch.zeros_like(parameter)
        self.modes: dict[Variant, Mode] = {}
        self.expected: tuple[Any, ...] | None = None

    def _simulate(self) -> Callable[[], float]:
        """Make the simulated device a small A100; return its clock."""
        simulated = simulated_device.install()
        simulated.model(**SIMULATED_GPU)
        return lambda: simulated.clock_s

    def run(self) -> list[dict[str, Any]]:
        """Warm every mode up, let them take their turns, and return their samples."""
        for variant in self.spec["variants"]:
            self._begin(Variant(**variant))
        order = [*self.modes.values(), self.modes[Variant(series="keep")]]
        for _ in range(self.spec["steps"]):
            self._take_turn(order)
            order.reverse()
        for mode in self.modes.values():
            self._attempt(mode, self._measure_process)
        return [mode.sample() | {"flops": self.flops} for mode in self.modes.values()]

    def _begin(self, variant: Variant) -> None:
        mode = self.modes[variant] = Mode(variant, self.workload.twin())
        if variant.series in ("keep", "recompute"):
            self._attempt(mode, self._count)
        if variant.series == "recompute":
            if not mode.workload.blocks:
                mode.failure = {"error": NO_BLOCKS, "oom": False}
                return
            self._checkpoint(mode.workload)
        elif variant.series == "offload":
            mode.offloader = self._offloader(mode, policy="all", prefetch_bytes=OFFLOAD_READS_AHEAD)
        elif variant.series == "hybrid":
            if variant.level:
                mode.device_budget = self._budget(variant.level)
                if mode.device_budget is None:
                    mode.failure = {"error": f"no budget: the peak for {variant.level} is not known", "oom": False}
                    return
            budget = mode.device_budget  # without one nothing is to run again
            blocks = budget is not None and mode.workload.blocks
            mode.offloader = self._offloader(mode, policy="auto", device_budget=budget, recompute=blocks)
        for _ in range(self.spec["warm_up"]):
            self._attempt(mode, self._step)

    @staticmethod
    def _checkpoint(workload: Workload) -> None:
        """Run every block under PyTorch's checkpoint."""
        for name in workload.blocks:
            block = workload.model.get_submodule(name)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def _offloader(self, mode: Mode, **options: Any) -> Offloader:
        config = OffloadConfig(path=self.spec["path"], **options)
        return Offloader(config, accelerator=self.accelerator).use(mode.workload.model)

    def _budget(self, level: str) -> int | None:
        """Return the bytes of a level: saved bytes, as counted."""
        if level in SERIES:
            return self.modes[Variant(series=level)].counted_peak_bytes
        whole = self.modes[Variant(series="keep")].counted_peak_bytes
        offloader = self.modes[Variant(series="offload")].offloader
        if whole is None and offloader is not None:  # keep ran out of memory
            whole = offloader.statistics().baseline_peak_bytes or None
        return None if whole is None else int(float(level) * whole)

    def _attempt(self, mode: Mode, what: Any) -> Any:
        """Do it with a mode that has not failed; a failure is its result."""
        if mode.failure:
            return None
        try:
            return what(mode)
        except FAILURES as error:
            mode.failure = failure(error)
            return None

    def _take_turn(self, order: list[Mode]) -> None:
        """Let each take a step; its ratio is to keep's two, the first and the last of the turn.

        Keep's own ratios are those of its two steps both ways round: the A/A noise lies evenly around 1.
        """
        taken = [self._attempt(mode, self._timed_step) for mode in order]
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
        synchronize(self.device.type)
        begin_s = self.now()
        with context or mode.offloader or nullcontext():
            loss = mode.workload.loss(self.inputs)
        torch.autograd.backward(loss)
        self.optimizer.step()
        synchronize(self.device.type)
        step_s = self.now() - begin_s
        bits = (
            float(loss.detach()).hex(),
            *(_sum_of_bits(parameter.grad) for parameter in self.parameters),
        )
        self.expected = self.expected or bits
        mode.identical = bits == self.expected and mode.identical is not False
        return step_s

    def _timed_step(self, mode: Mode) -> float:
        if not self.on_cpu:
            torch.accelerator.reset_peak_memory_stats()
            static = torch.accelerator.memory_allocated()
            step_s = self._step(mode)
            peak = torch.accelerator.max_memory_allocated() - static
        elif mode.offloader is not None:
            step_s = self._step(mode)
            mode.offloader.statistics()  # counts what finalizers have noted
            peak = mode.counted_peak_bytes = mode.offloader.store.shared.accounts.step_peak_bytes
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

    def _measure_process(self, mode: Mode) -> None:
        """Run a step whose peak of resident memory is this mode's; nothing on an accelerator or where none is told."""
        if not self.on_cpu:
            return
        cpu_allocator.give_back()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
        except OSError:
            return
        self._step(mode)
        mode.process_peak_bytes = peak_rss_bytes()


def _sum_of_bits(gradient: torch.Tensor | None) -> int:
    """Return the sum of a gradient's elements, each read as a whole number of its size."""
    if gradient is None:
        return 0
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(gradient.view(kinds[gradient.element_size()]).sum())


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one round; ``samples``: one for each variant. Bytes and seconds."""
    prepare_process(spec["device"], spec["threads"], SEED)
    cpu_allocator.install()
    use = cpu_allocator.Use()
    samples = Round(spec).run()
    use.end()
    return {"samples": samples}


def failure(error: BaseException) -> dict[str, Any]:
    """Return a failure as a result."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    said = isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in OUT_OF_MEMORY)
    if said or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return {"error": f"out of memory: {line}", "oom": True}
    return {"error": f"{type(error).__name__}: {line}", "oom": False, "below_floor": isinstance(error, BudgetError)}


def main(argument: str) -> int:
    """Measure and print; what cannot be measured is a result as well."""
    try:
        result = measure(json.loads(argument))
    except FAILURES as error:
        result = failure(error)
    say(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
