"""One sample: a few training steps of one model in one mode. The last line of output is one JSON object.

A timed step is taken for every line that is read, and said; see `benchmarks.harness.take_rounds`. The options come as
one JSON argument: those of `benchmarks.workloads.build`, and ``device``, ``mode`` (of `benchmarks.modes`), ``warm_up``
(steps before those that are timed), ``path``, ``threads``, ``optimizer`` (bool) and ``options`` (more of them for
`offload_activations`).
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import actoffload
from actoffload.testing import simulated_device
from actoffload.tools.environment import peak_rss_bytes, rss_bytes
from actoffload.tools.workers import say
from benchmarks.modes import MODES, Library, open_peer
from benchmarks.peers import Peer
from benchmarks.workloads import build, checkpoint_blocks

CHECK_CHUNK = 1 << 24
"""Elements that are checksummed at once: bounds the temporary memory."""


class Run:
    """A model, its input and the mode it runs in."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        if spec["device"] == simulated_device.NAME:
            simulated_device.install()
        self.device = torch.device(spec["device"])
        self.on_device = self.device.type != "cpu"
        self.losses: list[str] = []
        self.static_bytes = 0
        if spec.get("threads"):
            torch.set_num_threads(spec["threads"])
        torch.manual_seed(0)
        with self.device:
            self.work = build(spec)
        self.model: nn.Module = self.work.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4) if spec.get("optimizer") else None
        self.peer: Peer | None = None
        self._mode = ExitStack()

    @property
    def offloader(self) -> actoffload.Offloader | None:
        """The library's, once a step was run in a mode of its own."""
        return self.peer.offloader if isinstance(self.peer, Library) else None

    def open(self, name: str | None = None, options: Mapping[str, Any] | None = None) -> Peer:
        """Begin a mode, by default the sample's own; the one before it ends.

        Raises:
            Unavailable: a peer cannot run here.
        """
        self.close()
        mode = MODES[name or self.spec["mode"]]
        more = {**(self.spec.get("options") or {}), **(options or {})}
        self.peer = open_peer(mode, self.work, self.device, self.spec.get("path"), more)
        self._mode.callback(self.peer.close)
        if mode.recompute:
            self._mode.callback(checkpoint_blocks(self.model, self.work.blocks, mode.saved))
        return self.peer

    def close(self) -> None:
        """End the mode: leave the model as it was and give everything back. Idempotent."""
        self.peer = None
        self._mode.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> float:
        """Forward, backward and the optimizer; seconds, the device's work included."""
        return self.seconds(self._step)

    def _step(self) -> None:
        peer = self.peer or self.open()
        with peer.context():
            loss = self.work.forward()
            if peer.backward_inside:
                loss.backward()
        if not peer.backward_inside:
            loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.losses.append(float(loss.detach()).hex())

    def seconds(self, work: Callable[[], object]) -> float:
        """How long some work takes, the device's part of it included."""
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

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
        say({"turn": 0})
        for _ in sys.stdin:
            times_s += self.timed(1)
            say({"turn": len(times_s)})
        return times_s

    def measure(self, take_steps: Callable[[], list[float]]) -> dict[str, Any]:
        """What the timed steps took, what the mode counted meanwhile, and the peak of the device's memory."""
        if self.on_device:
            torch.accelerator.reset_peak_memory_stats()
        before = self.counts()
        times_s = take_steps()
        result: dict[str, Any] = {"step_s": times_s, "median_step_s": median(times_s)}
        if self.on_device:
            peak = int(torch.accelerator.max_memory_allocated())
            result |= {"peak_device_bytes": peak, "activation_peak_bytes": peak - self.static_bytes}
        return result | per_step(before, self.counts(), len(times_s))

    def counts(self) -> dict[str, Any]:
        """What the mode counted so far."""
        return {} if self.peer is None else self.peer.facts()

    def make_static(self) -> None:
        """Allocate all that outlives a step, gradients and the optimizer's state, and note how much memory that is."""
        self.clear_gradients()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.on_device:
            self.static_bytes = int(torch.accelerator.memory_allocated())
        else:
            trim_heap()
            self.static_bytes = rss_bytes()

    def clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def synchronize(self) -> None:
        if self.on_device:
            torch.accelerator.synchronize()


def gradients_checksum(model: nn.Module) -> str:
    """128 bits of all gradients' bits: equal gradients have equal checksums, whatever the order of summation."""
    return checksum(parameter.grad.detach() for parameter in model.parameters() if parameter.grad is not None)


def checksum(tensors: Iterable[Tensor]) -> str:
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


def per_step(before: Mapping[str, Any], after: Mapping[str, Any], steps: int) -> dict[str, float]:
    """How much of each count fell into one of the timed steps."""
    return {f"{name}_per_step": (count - before.get(name, 0)) / steps for name, count in after.items()}


def kernel_counts() -> dict[str, float]:
    """What the kernel has done for this process, its threads included: seconds, and faults that needed no disk."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"system_s": used.ru_stime, "cpu_s": used.ru_utime + used.ru_stime, "page_faults": used.ru_minflt}


def trim_heap() -> None:
    """Give what the C library's heap keeps back to the system, where it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """All steps of one sample on the CPU. Bytes and seconds."""
    run = Run(spec)
    result: dict[str, Any] = {name: spec.get(name) for name in ("mode", "options")}
    run.open()  # a peer's library is static memory, too
    run.make_static()
    result["static_rss_bytes"] = run.static_bytes
    result["first_gradients"] = run.first_step()
    if spec["mode"] == "keep":
        result["reproducible"] = run.first_step() == result["first_gradients"]
        run.losses.pop()
    run.timed(spec["warm_up"])
    used = kernel_counts()
    result |= run.measure(run.timed_in_turns)
    result |= per_step(used, kernel_counts(), len(result["step_s"]))
    result["peak_rss_bytes"] = peak_rss_bytes()
    result["losses"] = run.losses
    result["last_parameters"] = checksum(parameter.detach() for parameter in run.model.parameters())
    if run.offloader is not None:
        result |= {"statistics": run.offloader.statistics().as_dict(), "report": run.offloader.report()}
    run.close()
    return result


if __name__ == "__main__":
    say(measure(json.loads(sys.argv[1])))
