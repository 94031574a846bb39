"""One sample of the recompute-offload-keep curve, in a process of its own. The last line of output is one JSON object.

The options come as one JSON argument: ``case`` (the fields of `Case`), ``series``, ``device_budget`` (bytes or null),
``device``, ``threads``, ``warm_up``, ``steps``, ``target``, ``path`` and ``memory_limit`` (bytes or null).

The peak: on an accelerator what its allocator says, less what was there before the step; on the CPU what the offloader
counts, for ``keep`` and ``recompute`` in a step of their own in which it counts and moves nothing.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .. import OffloadConfig, Offloader
from ..errors import ActOffloadError, BudgetError
from ..policy import Decision, TensorFacts
from ..recompute import Recompute
from ..recompute_meter import RecomputeMeter
from ..report.rok import BACKWARD_FACTOR, Case
from ..testing.measure import peak_rss_bytes
from .rok_models import Workload, build

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
        self.series: str = spec["series"]
        self.device = torch.device(spec["device"])
        self.on_cpu = self.device.type == "cpu"
        self.case = Case(**spec["case"])
        torch.manual_seed(0)
        tokens = torch.randint(1, self.case.vocab, (self.case.batch, self.case.seq + 1))
        with self.device:
            self.workload: Workload = build(self.case)
        self.model = self.workload.model
        self.tokens = tokens.to(self.device)
        self.blocks = {name: self.model.get_submodule(name) for name in self.workload.blocks}
        self.flops = self._count_flops()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        for parameter in self.model.parameters():  # gradients are static memory
            parameter.grad = torch.zeros_like(parameter)
        self.recompute = Recompute()
        self.losses: list[str] = []
        self.offloader: Offloader | None = None

    def _count_flops(self) -> int:
        """Of one step: a forward of one sequence, times the batch, times three."""
        one = self.tokens[:1]
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.workload.loss(one)
        return int(counter.get_total_flops()) * self.case.batch * BACKWARD_FACTOR

    # -- steps --------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the series what it is."""
        if self.series == "recompute":
            self.recompute.follow(self.blocks, self.blocks)
        elif self.series in ("offload", "hybrid"):
            policy = "all" if self.series == "offload" else "auto"
            self._begin_offloading(policy=policy, device_budget=self.spec["device_budget"])

    def _begin_offloading(self, **options: Any) -> Offloader:
        common = {"target": self.spec["target"], "path": self.spec["path"]}
        self.offloader = Offloader(OffloadConfig(**common, **options)).use(self.model)
        return self.offloader

    def step(self) -> float:
        """One step; its seconds, the device's work included."""
        self.synchronize()
        begin_s = time.perf_counter()
        context: AbstractContextManager[Any] = self.offloader or nullcontext()
        with context:
            loss = self.workload.loss(self.tokens)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        value = loss.detach()
        del loss
        self.synchronize()
        step_s = time.perf_counter() - begin_s
        self.losses.append(float(value).hex())
        return step_s

    def measured_step(self) -> tuple[float, int]:
        """One step; its seconds and the peak of activation bytes, 0 where nothing counts them."""
        static = 0
        if self.on_cpu:
            self._forget_peak()
        else:
            torch.accelerator.reset_peak_memory_stats()
            static = torch.accelerator.memory_allocated()
        step_s = self.step()
        return step_s, self._counted_peak() if self.on_cpu else torch.accelerator.max_memory_allocated() - static

    def _forget_peak(self) -> None:
        if self.offloader is not None:
            with self.offloader.core.lock:
                accounts = self.offloader.core.accounts
                accounts.settle()
                accounts.resident_peak_bytes = accounts.resident_bytes

    def _counted_peak(self) -> int:
        return 0 if self.offloader is None else self.offloader.statistics().resident_peak_bytes

    def counting_step(self) -> dict[str, int]:
        """One more step in which the offloader counts and moves nothing; peaks in bytes."""
        self.recompute.undo()
        offloader = self._begin_offloading(policy=KeepAll())
        if self.series == "recompute":
            self.recompute = Recompute(RecomputeMeter(offloader.core, (), offloader.notes))
            self.recompute.follow(self.blocks, self.blocks)
        self._forget_peak()
        self.step()
        del self.losses[-1]
        peak = self._counted_peak()
        found = {"counted_peak_bytes": peak}
        return found | ({"activation_peak_bytes": peak} if self.on_cpu else {})

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.on_cpu:
            torch.accelerator.synchronize()


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """All steps of one sample. Bytes and seconds."""
    prepare_process(spec)
    run = Run(spec)
    run.prepare()
    warm_up_s = [run.step() for _ in range(spec["warm_up"])]
    steps = [run.measured_step() for _ in range(spec["steps"])]
    result: dict[str, Any] = {
        "flops": run.flops,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "warm_up_s": warm_up_s,
        "step_s": [step_s for step_s, _ in steps],
        "peak_bytes": [peak for _, peak in steps],
        "activation_peak_bytes": max(peak for _, peak in steps),
        "losses_hex": run.losses,
    }
    if run.offloader is None:
        result |= run.counting_step()
    else:
        result["counted_peak_bytes"] = run._counted_peak()
        result |= _about(run.offloader)
    result["peak_rss_bytes"] = peak_rss_bytes()
    if run.offloader is not None:
        run.offloader.close()
    return result


def prepare_process(spec: dict[str, Any]) -> None:
    """Threads, determinism and the memory limit."""
    if spec["threads"] is not None:
        torch.set_num_threads(spec["threads"])
    limit = spec["memory_limit"]
    if spec["device"] == "cpu":
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))


def _about(offloader: Offloader) -> dict[str, Any]:
    """What the offloader counted, and what was planned."""
    found: dict[str, Any] = {"statistics": offloader.statistics().as_dict()}
    pilot = offloader._autopilot
    if pilot is not None:
        plan = pilot.plan
        found["planning"] = {"history": pilot.history}
        if plan is not None:
            found["planning"] |= {
                "offloaded_bytes": plan.offloaded_bytes,
                "kept_bytes": plan.kept_bytes,
                "recompute": plan.recompute,
                "declined": plan.declined,
                "predicted_step_s": plan.predicted_step_s,
                "predicted_peak_bytes": plan.predicted_peak_bytes,
            }
    return found


def failure(error: BaseException) -> dict[str, Any]:
    """A failure as a result."""
    lines = str(error).splitlines() or [type(error).__name__]
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    memory = memory or (isinstance(error, (RuntimeError, OSError)) and any(t in str(error) for t in OUT_OF_MEMORY))
    if memory:
        return {"error": f"out of memory: {lines[0]}", "oom": True}
    return {"error": f"{type(error).__name__}: {lines[0]}", "oom": False, "below_floor": isinstance(error, BudgetError)}


def main(argument: str) -> int:
    """Measure and print; a point that cannot be measured is a result as well."""
    # Before cuBLAS starts: without a fixed workspace its results are not reproducible.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        result = measure(json.loads(argument))
    except (ActOffloadError, MemoryError, RuntimeError, OSError) as error:
        result = failure(error)
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
