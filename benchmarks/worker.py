"""One sample: a few training steps of one model in one mode. The last line of output is one JSON object.

The options come as one JSON argument: ``model`` ("gpt" or "stack"), ``gpt`` (sizes), ``batch``, ``device``, ``dtype``,
``mode``, ``steps``, ``path``, ``threads``, ``optimizer`` (bool) and ``options`` (for `offload_activations`).
Modes: ``keep``, ``recompute``, ``save_on_cpu`` (PyTorch's own), and the targets of `offload_activations`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import actoffload
from actoffload.testing.gpt import GPT, GPTConfig, Stack
from actoffload.testing.measure import BlockIO, block_io, peak_rss_bytes

CHECK_CHUNK = 1 << 24
"""Elements that are checksummed at once: bounds the temporary memory."""


class Run:
    """A model, its input and the mode it runs in."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.device = torch.device(spec["device"])
        self.offloader: Any = None
        self.facts: dict[str, Any] = {"mode": spec["mode"]}
        sizes = GPTConfig(**spec["gpt"], recompute=spec["mode"] == "recompute")
        dtype = getattr(torch, spec["dtype"])
        torch.manual_seed(0)
        with self.device:
            model: nn.Module = (GPT if spec["model"] == "gpt" else Stack)(sizes)
            self.model = model.to(dtype)
            self.forward = self._language(sizes) if spec["model"] == "gpt" else self._blocks(sizes, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4) if spec.get("optimizer") else None

    def _language(self, sizes: GPTConfig) -> Callable[[], Callable[[], None]]:
        tokens = torch.randint(0, sizes.vocab, (self.spec["batch"], sizes.seq + 1))

        def forward() -> Callable[[], None]:
            loss: Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
            return loss.backward

        return forward

    def _blocks(self, sizes: GPTConfig, dtype: torch.dtype) -> Callable[[], Callable[[], None]]:
        shape = (self.spec["batch"], sizes.seq, sizes.width)
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        direction = torch.randn(shape, dtype=dtype)

        def forward() -> Callable[[], None]:
            x.grad = None
            out: Tensor = self.model(x)
            return lambda: out.backward(direction)

        return forward

    def context(self) -> AbstractContextManager[Any]:
        """What the forward runs in."""
        mode = self.spec["mode"]
        if mode in ("keep", "recompute"):
            return nullcontext()
        if mode == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type != "cpu")
        options = self.spec.get("options") or {}
        context: AbstractContextManager[Any] = actoffload.offload_activations(
            target=mode, path=self.spec.get("path"), model=self.model, **options
        )
        return context

    def step(self) -> float:
        """Forward, backward and the optimizer; seconds, the device's work included."""
        self.synchronize()
        begin = time.perf_counter()
        with self.context() as offloader:
            backward = self.forward()
        self.offloader = offloader
        backward()
        del backward
        if self.optimizer is not None:
            self.optimizer.step()
        self.synchronize()
        return time.perf_counter() - begin

    def first_step(self) -> str:
        """One step with deterministic algorithms; a checksum of all gradients."""
        # Gradients stay allocated from here on, so that they count as static memory.
        self.clear_gradients()
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        optimizer, self.optimizer = self.optimizer, None
        self.note_memory("static_bytes", "memory_allocated")
        self.step()
        self.note_memory("first_peak_device_bytes", "max_memory_allocated")
        self.optimizer = optimizer
        torch.use_deterministic_algorithms(False)
        return gradients_checksum(self.model)

    def clear_gradients(self) -> None:
        """Zero every gradient in place."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def note_memory(self, name: str, query: str) -> None:
        """Keep the first answer of the device's allocator to ``query``."""
        if self.device.type != "cpu":
            self.facts.setdefault(name, int(getattr(torch.accelerator, query)()))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def gradients_checksum(model: nn.Module) -> str:
    """128 bits of all gradients' bits: equal gradients have equal checksums, whatever the order of summation."""
    plain = weighted = 0
    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is None:
            continue
        words = parameter.grad.detach().reshape(-1).view(torch.uint8)
        words = words[: words.numel() // 2 * 2].view(torch.int16)
        for begin in range(0, words.numel(), CHECK_CHUNK):
            chunk = words[begin : begin + CHECK_CHUNK].long()
            place = torch.arange(begin + index, begin + index + chunk.numel(), device=chunk.device)
            plain += int(chunk.sum())
            weighted += int((chunk * (place * 2654435761 + 1)).sum())
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """All steps of one sample. Bytes and seconds."""
    if spec.get("threads"):
        torch.set_num_threads(spec["threads"])
    run = Run(spec)
    on_device = run.device.type != "cpu"
    io_before = block_io()
    result = run.facts
    result["first_gradients"] = run.first_step()
    if spec["mode"] == "keep":
        run.clear_gradients()
        result["reproducible"] = run.first_step() == result["first_gradients"]
    if on_device:
        torch.accelerator.reset_peak_memory_stats()
    result["step_s"] = []
    for _ in range(spec["steps"]):
        run.clear_gradients()
        result["step_s"].append(run.step())
    result["median_step_s"] = median(result["step_s"])
    result["peak_rss_bytes"] = peak_rss_bytes()
    run.note_memory("peak_device_bytes", "max_memory_allocated")
    if on_device:
        result["activation_peak_bytes"] = result["peak_device_bytes"] - result["static_bytes"]
    return result | _finish(run, io_before)


def _finish(run: Run, io_before: BlockIO | None) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if isinstance(run.offloader, actoffload.Offloader):
        facts["statistics"] = run.offloader.statistics().as_dict()
        facts["report"] = run.offloader.report()
        run.offloader.close()
    io_after = block_io()
    if io_before is not None and io_after is not None:
        moved = io_after - io_before
        facts |= {"kernel_written_bytes": moved.written_bytes, "kernel_read_bytes": moved.read_bytes}
    return facts


def main(argument: str) -> int:
    """Measure and print; running out of memory is a result, not a failure."""
    # Before torch starts cuBLAS: without a fixed workspace its results are not reproducible.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    spec = json.loads(argument)
    try:
        result = measure(spec)
    except torch.OutOfMemoryError as error:
        result = {"mode": spec["mode"], "error": f"out of memory: {str(error).splitlines()[0]}", "oom": True}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
