"""All modes of one case in one process: prints one JSON object for each mode when it is measured.

The model is made once. Every mode stands between two blocks of steps in the reference mode (A B A C A), so that a drift
of the machine falls on both sides of each ratio. The gradients of its first step, and of one after those that are
timed, are compared with the reference's. A mode that fails in a way that may spoil the process ends it; the rest is the
next process's. Steps are timed without an optimizer; where ``optimizer`` says so, one more step is taken with AdamW at
a rate of 0, which changes no weight: what is held as backward ends, and the peak until the optimizer is done.

The options come as one JSON argument: those of `benchmarks.worker`, and ``modes``, ``reference``, ``untimed`` (steps of
each mode before those that are timed), ``baseline_bytes`` (what all saved tensors take, if that was counted before),
``peaks`` (of the modes that were measured before, in bytes) and ``limit_s``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from statistics import median
from typing import Any

import psutil
import torch

from actoffload.errors import ActOffloadError, BudgetError
from actoffload.tools.environment import rss_bytes
from actoffload.tools.workers import failure, say
from benchmarks.modes import MODES
from benchmarks.peers import Unavailable
from benchmarks.worker import Run

WITHOUT_PLANS = 4
"""Untimed steps of a mode that plans nothing: the allocators have what they need by then."""
SPARE_S, SPARE_ON_DEVICE_S = 10.0, 30.0
"""Left for a mode beyond its steps: on a device tens of gigabytes of host memory are page-locked, and let go of."""
LINK_BYTES = 1 << 26
"""How much is copied to see what the link takes."""
MOST_TIMED = 3
"""How often the timed steps are taken at most, until no plan is made among them."""
COST = 3.0
"""How many times the reference's a mode's step is reckoned to take before it is known."""


class Series:
    """The modes of one case, one after the other."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.deadline_s = time.monotonic() + spec["limit_s"]
        self.run = Run(spec | {"mode": spec["reference"], "optimizer": False})
        if self.run.device.type == "cuda":
            # Its backward is not deterministic, so that the steps whose bits are compared would run other kernels, and
            # save other tensors, than those that are timed. In every mode alike.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.optimizer = self._make_optimizer() if spec.get("optimizer") else None
        self.run.make_static()
        self.static_rss_bytes = rss_bytes()
        self.available_bytes = psutil.virtual_memory().available
        self.reference_s: list[float] = []
        self.gradients = ""
        self.baseline_bytes: int = spec.get("baseline_bytes", 0)
        self.peaks: dict[str, int] = dict(spec.get("peaks", {}))

    def reference(self) -> dict[str, Any]:
        """The reference itself, with its deterministic step three times; what it measures."""
        result = self._measured(self.spec["reference"])
        self.gradients = result["first_gradients"]
        self.run.open(self.spec["reference"])
        result["reproducible"] = {self.run.first_step(), result["last_gradients"]} <= {self.gradients, None}
        if self.run.on_device:
            result |= self._hiding()
        self._close()
        self.reference_s = result["step_s"]
        return result

    def _hiding(self) -> dict[str, float]:
        """How long a forward takes, what the link takes, and so how many bytes can leave while a forward runs."""
        run = self.run
        forward_s = run.seconds(run.work.forward)
        source = torch.empty(LINK_BYTES, dtype=torch.uint8, device=run.device)
        target = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        copy_s = min(run.seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(3))
        link = LINK_BYTES / copy_s
        return {"forward_s": forward_s, "link_bytes_per_s": link, "hides_bytes": link * forward_s}

    def mode(self, name: str) -> dict[str, Any]:
        """One mode, and a block of the reference after it."""
        steps = self.spec["steps"] + self.spec["untimed"] + 2
        spare_s = SPARE_ON_DEVICE_S if self.run.on_device else SPARE_S
        if self.deadline_s - time.monotonic() < spare_s + COST * steps * median(self.reference_s):
            return {"mode": name, "left_out": "no time was left"}
        before_s = self.reference_s
        try:
            result = self._measured(name)
        except (Unavailable, BudgetError) as error:
            return {"mode": name, "unavailable": str(error)}
        except (torch.OutOfMemoryError, ActOffloadError) as error:
            return {"mode": name} | failure(error)
        finally:
            self._close()
        self.run.open(self.spec["reference"])
        self.run.timed(1)
        self.reference_s = self.run.timed(self.spec["steps"])
        self._close()
        result["reference_step_s"] = [*before_s, *self.reference_s]
        result["ratio"] = result["median_step_s"] / median(result["reference_step_s"])
        result["identical"] = {result["first_gradients"], result["last_gradients"]} <= {self.gradients, None}
        return result

    def _measured(self, name: str) -> dict[str, Any]:
        run = self.run
        result: dict[str, Any] = {"mode": name}
        run.open(name, self._budget(name))
        result["first_gradients"] = run.first_step()
        run.optimizer = self.optimizer if "device_memory" in MODES[name].options else None  # which waits for its states
        run.timed(self.spec["untimed"] if MODES[name].ours else min(WITHOUT_PLANS, self.spec["untimed"]))
        run.optimizer = None
        result |= self._timed()
        if run.on_device:
            self.peaks[name] = result["activation_peak_bytes"]
            if self.optimizer is not None:
                result |= self._with_optimizer(self.optimizer)
        result["host_rss_bytes"] = max(0, rss_bytes() - self.static_rss_bytes)
        # What a driver pins for a process is not always in its resident memory.
        result["host_taken_bytes"] = max(0, self.available_bytes - psutil.virtual_memory().available)
        offloader = run.offloader
        if offloader is not None:
            counted = offloader.statistics()
            self.baseline_bytes = counted.baseline_peak_bytes
            report = offloader.report()
            result |= {"statistics": counted.as_dict(), "report": report}
            plan = None if offloader.autopilot is None else offloader.autopilot.plan
            if plan is not None:
                result |= {"predicted_step_s": plan.predicted_step_s, "predicted_peak_bytes": plan.predicted_peak_bytes}
            result["page_locked"] = "could not be page-locked" not in report
            if not run.on_device:
                result["activation_peak_bytes"] = counted.resident_peak_bytes
        try:
            result["last_gradients"] = run.first_step()  # by now there is a plan, and memory that is used again
        except torch.OutOfMemoryError:  # deterministic kernels take more of it: what was timed stands
            result["last_gradients"] = None
        return result

    def _timed(self) -> dict[str, Any]:
        """The timed steps; again where a plan was made among them, as it is one plan that is timed."""
        for _ in range(MOST_TIMED):
            before = self._plans()
            result = self.run.measure(lambda: self.run.timed(self.spec["steps"]))
            result |= {"plans": before, "plans_while_timed": self._plans() - before}
            if not result["plans_while_timed"]:
                break
        return result

    def _make_optimizer(self) -> torch.optim.AdamW:
        self.run.clear_gradients()
        trained = [parameter for parameter in self.run.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
        optimizer.step()
        return optimizer

    def _with_optimizer(self, optimizer: torch.optim.AdamW) -> dict[str, int]:
        """One step with the optimizer: what is held as it begins, and the peak from there on, above static memory."""
        run, held = self.run, []

        def begins(*_: Any) -> None:
            held.append(int(torch.accelerator.memory_allocated()))
            torch.accelerator.reset_peak_memory_stats()

        hook = optimizer.register_step_pre_hook(begins)
        run.optimizer = optimizer
        try:
            run.timed(1)
        except torch.OutOfMemoryError:  # the optimizer's own: what was timed stands
            return {}
        finally:
            run.optimizer = None
            hook.remove()
        peak = int(torch.accelerator.max_memory_allocated())
        return {"held_bytes": held[0] - run.static_bytes, "optimizer_peak_bytes": peak - run.static_bytes}

    def _plans(self) -> int:
        """How many plans the library has made in this mode."""
        pilot = None if self.run.offloader is None else self.run.offloader.autopilot
        return 0 if pilot is None else len(pilot.history)

    def _budget(self, name: str) -> dict[str, Any]:
        memory, share = (MODES[name].options.get(option) for option in ("device_memory", "device_budget"))
        if memory is not None:
            if memory not in self.peaks:
                raise Unavailable(f"the peak of {memory} is not known: it was not measured before")
            return {"device_memory": self.run.static_bytes + self.peaks[memory]}
        if share is None:
            return {}
        if not self.baseline_bytes:
            raise Unavailable("what is saved in all is not known: no earlier mode of the library has counted it")
        if not isinstance(share, str):
            return {"device_budget": int(share * self.baseline_bytes)}
        if not {share, self.spec["reference"]} <= self.peaks.keys():
            raise Unavailable(f"the peak of {share} is not known: it was not measured before")
        # A budget is for what is saved; what a step needs beside that has its room in the peak as well.
        beside = max(0, self.peaks[self.spec["reference"]] - self.baseline_bytes)
        if self.peaks[share] <= beside:
            raise Unavailable(f"the peak of {share} has no room for anything that is saved")
        return {"device_budget": self.peaks[share] - beside}

    def _close(self) -> None:
        """End the mode, with all the memory that it or torch's allocators still keep for it."""
        self.run.close()
        gc.collect()
        if self.run.on_device:
            torch.accelerator.empty_cache()
        if self.run.device.type == "cuda":
            torch._C._host_emptyCache()


def main(argument: str) -> int:
    # Before torch starts cuBLAS: without a fixed workspace its results are not reproducible.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    spec = json.loads(argument)
    try:
        series = Series(spec)
        say(series.reference())
    except torch.OutOfMemoryError as error:
        say({"mode": spec["reference"]} | failure(error))
        return 0
    for name in spec["modes"]:
        try:
            say(series.mode(name))
        except Exception as error:  # a peer's bug, and whatever else: the next process begins afresh
            say({"mode": name} | failure(error))
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
