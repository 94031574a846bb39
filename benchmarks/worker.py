"""One sample: a few training steps of one model in one mode. The last line of output is one JSON object.

The options come as one JSON argument: those of `benchmarks.workloads.build`, and ``device``, ``mode`` (of
`benchmarks.modes`), ``steps`` (timed), ``warm_up`` (steps before them), ``path``, ``threads``, ``optimizer`` (bool),
``options`` (more of them for `offload_activations`) and ``in_turns`` (bool): then a timed step is taken for every line
that is read, and said; see `benchmarks.turns`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import actoffload
from actoffload.testing.measure import BlockIO, block_io, peak_rss_bytes, rss_bytes
from benchmarks import modes, workloads
from benchmarks.peers import Unavailable

CHECK_CHUNK = 1 << 24
"""Elements that are checksummed at once: bounds the temporary memory."""


class Run:
    """A model, its input and the mode it runs in."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.device = torch.device(spec["device"])
        self.facts: dict[str, Any] = {"mode": spec["mode"]}
        self.losses: list[str] = []
        torch.manual_seed(0)
        with self.device:
            self.work = workloads.build(spec)
        self.model: nn.Module = self.work.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4) if spec.get("optimizer") else None
        self.opened: modes.Opened | None = None

    @property
    def offloader(self) -> actoffload.Offloader | None:
        """The library's, once a step was run in a mode of its own."""
        return None if self.opened is None else self.opened.offloader

    def open(self, name: str | None = None, options: Mapping[str, Any] | None = None) -> modes.Opened:
        """Begin a mode, by default the sample's own; the one before it ends.

        Raises:
            Unavailable: a peer cannot run here.
        """
        self.close()
        mode = modes.MODES[name or self.spec["mode"]]
        more = {**(self.spec.get("options") or {}), **(options or {})} if mode.ours else {}
        self.opened = modes.Opened(mode, self.work, self.device, self.spec.get("path"), more)
        return self.opened

    def close(self) -> None:
        """End the mode."""
        if self.opened is not None:
            self.opened.close()
            self.opened = None

    def step(self) -> float:
        """Forward, backward and the optimizer; seconds, the device's work included."""
        opened = self.opened or self.open()
        self.synchronize()
        begin = time.perf_counter()
        with opened.peer.context():
            result, direction = self.work.forward()
            if opened.peer.backward_inside:
                torch.autograd.backward(result, direction)
        if not opened.peer.backward_inside:
            torch.autograd.backward(result, direction)
        if self.optimizer is not None:
            self.optimizer.step()
        self.synchronize()
        seconds = time.perf_counter() - begin
        if direction is None:
            self.losses.append(float(result.detach()).hex())
        return seconds

    def first_step(self) -> str:
        """One step with deterministic algorithms and no optimizer; a checksum of all gradients."""
        # Gradients stay allocated from here on, so that they count as static memory.
        self.clear_gradients()
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        optimizer, self.optimizer = self.optimizer, None
        try:
            self.step()
        finally:
            self.optimizer = optimizer
            torch.use_deterministic_algorithms(False)
        return gradients_checksum(self.model)

    def make_static(self) -> None:
        """Allocate all that outlives a step, gradients and the optimizer's state, and note how much memory that is."""
        self.clear_gradients()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.device.type == "cpu":
            trim_heap()
            self.facts["static_rss_bytes"] = rss_bytes()
        else:
            self.facts["static_bytes"] = int(torch.accelerator.memory_allocated())

    def clear_gradients(self) -> None:
        """Zero every gradient in place."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def timed(self, steps: int) -> list[float]:
        """Seconds of so many steps."""
        times_s = []
        for _ in range(steps):
            self.clear_gradients()
            times_s.append(self.step())
        return times_s

    def timed_in_turns(self) -> list[float]:
        """Seconds of a step for every line that is read."""
        times_s: list[float] = []
        _say({"turn": 0})
        for _ in sys.stdin:
            times_s += self.timed(1)
            _say({"turn": len(times_s)})
        return times_s

    def counts(self) -> dict[str, Any]:
        """What the mode counted so far."""
        return {} if self.opened is None else self.opened.peer.facts()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def _say(something: dict[str, Any]) -> None:
    print(json.dumps(something), flush=True)


def gradients_checksum(model: nn.Module) -> str:
    """128 bits of all gradients' bits: equal gradients have equal checksums, whatever the order of summation."""
    return checksum(parameter.grad.detach() for parameter in model.parameters() if parameter.grad is not None)


def checksum(tensors: Any) -> str:
    """128 bits of all tensors' bits."""
    plain = weighted = 0
    for index, tensor in enumerate(tensors):
        words: Tensor = tensor.reshape(-1).view(torch.uint8)
        words = words[: words.numel() // 2 * 2].view(torch.int16)
        for begin in range(0, words.numel(), CHECK_CHUNK):
            chunk = words[begin : begin + CHECK_CHUNK].long()
            place = torch.arange(begin + index, begin + index + chunk.numel(), device=chunk.device)
            plain += int(chunk.sum())
            weighted += int((chunk * (place * 2654435761 + 1)).sum())
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"


def per_step(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, float]:
    """How much of each count fell into one of the timed steps."""
    names = ("written_bytes", "read_bytes", "wait_s")
    return {f"{name}_per_step": (after[name] - before.get(name, 0)) / steps for name in names if name in after}


@dataclass(frozen=True)
class Usage:
    """What the kernel has done for this process, its threads included, to give it memory and for anything else.

    Attributes:
        system_s: seconds in the kernel.
        page_faults: those that needed no disk.
    """

    system_s: float
    page_faults: int

    @classmethod
    def now(cls) -> Usage:
        """Since the process began."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_stime, used.ru_minflt)

    def per_step(self, before: Usage, steps: int) -> dict[str, float]:
        """How much more than ``before``, for each of so many steps."""
        system_s, page_faults = self.system_s - before.system_s, self.page_faults - before.page_faults
        return {"system_s_per_step": system_s / steps, "page_faults_per_step": page_faults / steps}


def trim_heap() -> None:
    """Give what the C library's heap keeps back to the system, where it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak_rss() -> bool:
    """Let the peak of this process's resident memory begin anew; False where the system does not offer that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """All steps of one sample. Bytes and seconds."""
    if spec.get("threads"):
        torch.set_num_threads(spec["threads"])
    run = Run(spec)
    on_device = run.device.type != "cpu"
    result = run.facts
    run.open()  # a peer's library is static memory, too
    run.make_static()
    io_before = block_io()
    result["first_gradients"] = run.first_step()
    if spec["mode"] == "keep":
        result["reproducible"] = run.first_step() == result["first_gradients"]
        run.losses.pop()
    run.timed(spec.get("warm_up", 1))
    result["peak_rss_bytes"] = peak_rss_bytes()
    if on_device:
        torch.accelerator.reset_peak_memory_stats()
    fresh = reset_peak_rss()
    before, used = run.counts(), Usage.now()
    result["step_s"] = run.timed_in_turns() if spec.get("in_turns") else run.timed(spec["steps"])
    result |= Usage.now().per_step(used, len(result["step_s"]))
    result["median_step_s"] = median(result["step_s"])
    result["steady_peak_rss_bytes"] = peak_rss_bytes() if fresh else None
    result["peak_rss_bytes"] = max(result["peak_rss_bytes"], peak_rss_bytes())
    result |= per_step(before, run.counts(), len(result["step_s"]))
    if on_device:
        peak = int(torch.accelerator.max_memory_allocated())
        result |= {"peak_device_bytes": peak, "activation_peak_bytes": peak - result["static_bytes"]}
    result["losses"] = run.losses
    result["last_parameters"] = checksum(parameter.detach() for parameter in run.model.parameters())
    return result | finish(run, io_before)


def finish(run: Run, io_before: BlockIO | None) -> dict[str, Any]:
    """Close the mode; what it and the kernel counted."""
    facts: dict[str, Any] = {}
    if run.offloader is not None:
        facts["statistics"] = run.offloader.statistics().as_dict()
        facts["report"] = run.offloader.report()
    run.close()
    io_after = block_io()
    if io_before is not None and io_after is not None:
        moved = io_after - io_before
        facts |= {"kernel_written_bytes": moved.written_bytes, "kernel_read_bytes": moved.read_bytes}
    return facts


def main(argument: str) -> int:
    """Measure and print; running out of memory is a result, and so is a peer that is not to be had."""
    # Before torch starts cuBLAS: without a fixed workspace its results are not reproducible.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    spec = json.loads(argument)
    try:
        result = measure(spec)
    except Unavailable as error:
        result = {"mode": spec["mode"], "unavailable": str(error)}
    except torch.OutOfMemoryError as error:
        result = {"mode": spec["mode"], "error": f"out of memory: {str(error).splitlines()[0]}", "oom": True}
    _say(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
