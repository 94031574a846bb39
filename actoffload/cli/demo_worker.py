"""One mode of the demo, in a process of its own so that its peak memory is its own.

The parent gives the options as one JSON argument; each line of standard output is one JSON event.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import OffloadConfig, Offloader, errors
from ..analysis.environment import find_device
from ..analysis.process_usage import block_io, peak_rss_bytes
from ..testing.gpt import GPT, GPTConfig
from .training import prepare_process, say, train_step

TEXT_BYTES = 4 << 20
"""How much of the standard library's text is read: enough that a short run sees no byte twice."""


def stdlib_text(nbytes: int = TEXT_BYTES) -> bytes:
    """Return the first ``nbytes`` of the standard library's source files, in the order of their names."""
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


def events(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train, and yield an event at the beginning, for every step and at the end."""
    device = find_device()
    prepare_process(device, spec["threads"], spec["seed"])
    text = torch.frombuffer(bytearray(stdlib_text()), dtype=torch.uint8)
    model = GPT(GPTConfig(layers=spec["layers"], width=spec["width"], seq=spec["seq"])).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    choice = torch.Generator().manual_seed(spec["seed"])
    length = spec["seq"] + 1
    offloader = None
    if spec["mode"] != "keep":
        offloader = Offloader(OffloadConfig(target=spec["mode"], path=spec["paths"])).use(model)

    def forward() -> Tensor:
        starts = torch.randint(0, len(text) - length, (spec["batch"],), generator=choice)
        tokens = torch.stack([text[start : start + length] for start in starts.tolist()]).long().to(device)
        loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        return loss

    io_before = block_io()
    yield {"event": "begin", "device": device}
    for _ in range(spec["steps"]):
        loss, step_s = train_step(offloader or nullcontext(), forward, optimizer, device)
        yield {"event": "step", "loss": loss, "step_s": step_s}
    end: dict[str, Any] = {
        "event": "done",
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_device_bytes": None if device == "cpu" else int(torch.accelerator.max_memory_allocated()),
    }
    if offloader is not None:
        end |= {"statistics": offloader.statistics().as_dict(), "report": offloader.report()}
        offloader.close()
    io_after = block_io()
    if io_before is not None and io_after is not None:
        moved = io_after - io_before
        end |= {"kernel_written_bytes": moved.written_bytes, "kernel_read_bytes": moved.read_bytes}
    yield end


def main(argument: str) -> int:
    """Run the mode that ``argument`` describes; 0, or 2 for an option that cannot work, or 1."""
    try:
        for event in events(json.loads(argument)):
            say(event)
    except Exception as error:
        wrong = isinstance(error, (errors.ConfigError, errors.SpoolPathError, errors.EngineUnavailableError))
        say({"event": "error", "kind": "option" if wrong else type(error).__name__, "message": str(error)})
        return 2 if wrong else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
