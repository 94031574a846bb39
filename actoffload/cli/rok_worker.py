"""One sample of the recompute-offload-keep curve, in a process of its own. The last line of output is one JSON object.

The options come as one JSON argument: ``case`` (the fields of `Case`), ``series``, ``device_budget`` (bytes or null),
``device``, ``threads``, ``warm_up``, ``steps``, ``target``, ``path`` and ``memory_limit`` (bytes or null).

The peak: on an accelerator what its allocator says, less what was there before the step; on the CPU what the offloader
counts, for ``keep`` and ``recompute`` in a step of their own in which it counts and moves nothing.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .. import OffloadConfig, Offloader
from ..analysis.process_usage import peak_rss_bytes
from ..analysis.rok import BACKWARD_FACTOR, Case
from ..autotune.recompute import Recompute, RecomputeMeter
from ..errors import ActOffloadError, BudgetError
from ..policy import Decision, TensorFacts
from .rok_models import build
from .training import prepare_process, say, train_step

LEARNING_RATE = 1e-3
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")


class KeepAll:
    """A policy that moves nothing: the offloader only counts."""

    def decide(self, facts: TensorFacts) -> Decision:
        """Keep it."""
        return Decision.KEEP


class Run:
    """A model, its batch and the series it runs as."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.device = torch.device(spec["device"])
        self.on_cpu = self.device.type == "cpu"
        self.case = Case(**spec["case"])
        tokens = torch.randint(1, self.case.vocab, (self.case.batch, self.case.seq + 1))
        with self.device:
            self.workload = build(self.case)
        self.model = self.workload.model
        self.tokens = tokens.to(self.device)
        self.flops = self._count_flops()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        for parameter in self.model.parameters():  # gradients are static memory
            parameter.grad = torch.zeros_like(parameter)
        self.blocks = {name: self.model.get_submodule(name) for name in self.workload.blocks}
        self.recompute = Recompute()
        self.losses: list[str] = []
        self.offloader: Offloader | None = None
        if spec["series"] == "recompute":
            self.recompute.follow(self.blocks, self.blocks)
        elif spec["series"] in ("offload", "hybrid"):
            policy = "all" if spec["series"] == "offload" else "auto"
            self._begin_offloading(policy=policy, device_budget=spec["device_budget"])

    def _count_flops(self) -> int:
        """Count those of one step: a forward of one sequence, times the batch, times three."""
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.workload.loss(self.tokens[:1])
        return int(counter.get_total_flops()) * self.case.batch * BACKWARD_FACTOR

    def _begin_offloading(self, **options: Any) -> Offloader:
        config = OffloadConfig(target=self.spec["target"], path=self.spec["path"], **options)
        self.offloader = Offloader(config).use(self.model)
        return self.offloader

    def step(self) -> float:
        """Run one step; return its seconds, the device's work included."""
        loss, step_s = train_step(
            self.offloader or nullcontext(),
            lambda: self.workload.loss(self.tokens),
            self.optimizer,
            self.device.type,
            keep_gradients=True,
        )
        self.losses.append(loss.hex())
        return step_s

    def measured_step(self) -> tuple[float, int]:
        """Run one step; return its seconds and the peak of activation bytes, 0 where nothing counts them."""
        if self.on_cpu:
            self._forget_peak()
            return self.step(), self.counted_peak()
        torch.accelerator.reset_peak_memory_stats()
        static = torch.accelerator.memory_allocated()
        return self.step(), torch.accelerator.max_memory_allocated() - static

    def _forget_peak(self) -> None:
        if self.offloader is not None:
            with self.offloader.store.shared.lock:
                accounts = self.offloader.store.shared.accounts
                accounts.count_deferred()
                accounts.resident_peak_bytes = accounts.resident_bytes

    def counted_peak(self) -> int:
        """Return the peak that the offloader counted, in bytes; 0 without one."""
        return 0 if self.offloader is None else self.offloader.statistics().resident_peak_bytes

    def counting_step(self) -> dict[str, int]:
        """Run one more step in which the offloader counts and moves nothing; return the peaks in bytes."""
        self.recompute.undo()
        offloader = self._begin_offloading(policy=KeepAll())
        if self.spec["series"] == "recompute":
            self.recompute = Recompute(RecomputeMeter(offloader.store.shared, (), offloader.exclusions.static))
            self.recompute.follow(self.blocks, self.blocks)
        self._forget_peak()
        self.step()
        del self.losses[-1]
        peak = self.counted_peak()
        return {"counted_peak_bytes": peak} | ({"activation_peak_bytes": peak} if self.on_cpu else {})


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run all steps of one sample. Bytes and seconds."""
    prepare_process(spec["device"], spec["threads"], seed=0)
    if spec["memory_limit"] is not None:
        limit_memory(spec["device"], spec["memory_limit"])
    run = Run(spec)
    warm_up_s = [run.step() for _ in range(spec["warm_up"])]
    steps = [run.measured_step() for _ in range(spec["steps"])]
    peaks = [peak for _, peak in steps]
    result: dict[str, Any] = {
        "flops": run.flops,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "warm_up_s": warm_up_s,
        "step_s": [step_s for step_s, _ in steps],
        "peak_bytes": peaks,
        "activation_peak_bytes": max(peaks),
        "losses_hex": run.losses,
    }
    if run.offloader is None:
        result |= run.counting_step()
    else:
        result |= {"counted_peak_bytes": run.counted_peak()} | _about(run.offloader)
    result["peak_rss_bytes"] = peak_rss_bytes()
    if run.offloader is not None:
        run.offloader.close()
    return result


def limit_memory(device: str, nbytes: int) -> None:
    """Bound the memory of this process (CPU) or what it takes of its device."""
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
    else:
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / torch.cuda.mem_get_info()[1]))


def _about(offloader: Offloader) -> dict[str, Any]:
    """Return what the offloader counted, and what was planned."""
    found: dict[str, Any] = {"statistics": offloader.statistics().as_dict()}
    pilot = offloader.autopilot
    if pilot is not None:
        names = ("offloaded_bytes", "kept_bytes", "recompute", "declined", "predicted_step_s", "predicted_peak_bytes")
        planned = {} if pilot.plan is None else {name: getattr(pilot.plan, name) for name in names}
        found["planning"] = {"history": pilot.history} | planned
    return found


def failure(error: BaseException) -> dict[str, Any]:
    """Return a failure as a result."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    said = isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in OUT_OF_MEMORY)
    if said or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return {"error": f"out of memory: {line}", "oom": True}
    return {"error": f"{type(error).__name__}: {line}", "oom": False, "below_floor": isinstance(error, BudgetError)}


def main(argument: str) -> int:
    """Measure and print; a point that cannot be measured is a result as well."""
    try:
        result = measure(json.loads(argument))
    except (ActOffloadError, MemoryError, RuntimeError, OSError) as error:
        result = failure(error)
    say(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
