"""One mode of the demo, in a process of its own so that its peak memory is its own.

The parent gives the options as one JSON argument; each line of standard output is one JSON event.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import Offloader, errors, offload_activations
from ..testing.gpt import GPT, GPTConfig
from ..testing.measure import BlockIO, block_io, peak_rss_bytes, rss_bytes

TEXT_BYTES = 4 << 20
"""How much of the standard library's text is read: enough that a short run sees no byte twice."""


def stdlib_text(nbytes: int = TEXT_BYTES) -> bytes:
    """The first ``nbytes`` of the standard library's source files, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for file in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if {"test", "tests", "site-packages", "__pycache__"} & set(file.relative_to(root).parts):
            continue
        parts.append(file.read_bytes())
        size += len(parts[-1])
        if size >= nbytes:
            break
    return b"".join(parts)[:nbytes]


class _Training:
    """The model, its text and its offloader, if any."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.device = _prepare(spec)
        self.text = torch.frombuffer(bytearray(stdlib_text()), dtype=torch.uint8)
        self.model = GPT(GPTConfig(**spec["gpt"])).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = torch.Generator().manual_seed(spec["seed"])
        self.offloader: Offloader | None = None

    def events(self) -> Iterator[dict[str, Any]]:
        """Begin, every step, done."""
        io_before, rss_before = block_io(), rss_bytes()
        yield {
            "event": "begin",
            "device": self.device,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "text_sha256": hashlib.sha256(self.text.numpy().tobytes()).hexdigest(),
        }
        for step in range(self.spec["steps"]):
            begin = time.perf_counter()
            loss = self.step()
            step_s = time.perf_counter() - begin
            yield {"event": "step", "step": step, "loss": loss, "loss_hex": loss.hex(), "step_s": step_s}
        on_cpu = self.device == "cpu"
        yield {
            "event": "done",
            "rss_before_bytes": rss_before,
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": None if on_cpu else int(torch.accelerator.max_memory_allocated()),
            **self.finish(io_before),
        }

    def step(self) -> float:
        """One step, the device's work included; its loss."""
        with self.context() as offloader:
            tokens = self.batch().to(self.device)
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
        self.offloader = offloader
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = float(loss.detach())
        if self.device != "cpu":
            torch.accelerator.synchronize()
        return value

    def context(self) -> AbstractContextManager[Offloader | None]:
        """What the forward runs in."""
        if self.spec["mode"] == "keep":
            return nullcontext()
        return offload_activations(target=self.spec["mode"], path=self.spec["paths"], model=self.model)

    def batch(self) -> Tensor:
        """Random windows of the text: (batch, seq + 1) int64."""
        length = self.spec["gpt"]["seq"] + 1
        starts = torch.randint(0, len(self.text) - length, (self.spec["batch"],), generator=self.batches)
        return torch.stack([self.text[start : start + length] for start in starts.tolist()]).long()

    def finish(self, io_before: BlockIO | None) -> dict[str, Any]:
        """Close the offloader; what it and the kernel counted."""
        facts: dict[str, Any] = {}
        if self.offloader is not None:
            facts = {"statistics": self.offloader.statistics().as_dict(), "report": self.offloader.report()}
            self.offloader.close()
        io_after = block_io()
        if io_before is not None and io_after is not None:
            moved = io_after - io_before
            facts |= {"kernel_written_bytes": moved.written_bytes, "kernel_read_bytes": moved.read_bytes}
        return facts


def _prepare(spec: dict[str, Any]) -> str:
    """Threads, seed and determinism; the device's type."""
    if spec["threads"] is not None:
        torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "cpu"
    torch.use_deterministic_algorithms(True)
    return accelerator.type


def main(argument: str) -> int:
    """Run the mode that ``argument`` describes; 0, or 2 for an option that cannot work, or 1."""
    # Before cuBLAS starts: without a fixed workspace its results are not reproducible.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        for event in _Training(json.loads(argument)).events():
            print(json.dumps(event), flush=True)
    except (errors.ConfigError, errors.SpoolPathError, errors.EngineUnavailableError) as error:
        print(json.dumps({"event": "error", "kind": "option", "message": str(error)}), flush=True)
        return 2
    except Exception as error:
        print(json.dumps({"event": "error", "kind": type(error).__name__, "message": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
