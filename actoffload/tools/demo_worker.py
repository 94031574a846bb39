"""One mode of the demo, in a process of its own so that its peak memory is its own: a `TurnWorker`."""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import OffloadConfig, Offloader, errors
from ..testing.gpt import GPT, GPTConfig
from .environment import find_device
from .process import block_io, peak_rss_bytes, prepare_process, say, synchronize

TEXT_BYTES = 4 << 20
"""How much of the standard library's text is read: enough that a short run sees no byte twice."""


def stdlib_text() -> bytes:
    """Return the beginning of the standard library's source text, its files in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(file.read_bytes() for file in sorted(root.glob("*.py")))[:TEXT_BYTES]


def train(spec: dict[str, Any]) -> None:
    """Take a training step for every line of standard input; print a line for each, and at the end the result."""
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

    before = block_io()
    losses: list[float] = []
    step_s: list[float] = []
    say({"turn": 0})
    for _ in sys.stdin:
        synchronize(device)
        begin_s = time.perf_counter()
        with offloader or nullcontext():
            loss = forward()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        del loss
        synchronize(device)
        step_s.append(time.perf_counter() - begin_s)
        say({"turn": len(losses), "loss": losses[-1]})
    end: dict[str, Any] = {
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_device_bytes": None if device == "cpu" else int(torch.accelerator.max_memory_allocated()),
    }
    if offloader is not None:
        end |= {"statistics": offloader.statistics().as_dict(), "report": offloader.report()}
        if spec["profile"] is not None:
            if offloader.profile is None:
                raise errors.ConfigError("steps", len(losses), "give 3 or more: the first two are recorded")
            offloader.profile.save(spec["profile"])
        offloader.close()
    after = block_io()
    if before is not None and after is not None:
        end["kernel_written_bytes"] = after.write_bytes - before.write_bytes
        end["kernel_read_bytes"] = after.read_bytes - before.read_bytes
    say({"device": device, "losses": losses, "step_s": step_s, "end": end})


def main(argument: str) -> int:
    """Run the mode that ``argument`` describes; 0, or 2 for an option that cannot work, or 1."""
    try:
        train(json.loads(argument))
    except Exception as error:
        wrong = isinstance(error, (errors.ConfigError, errors.SpoolPathError, errors.EngineUnavailableError))
        say({"error": str(error) if wrong else f"{type(error).__name__}: {error}", "kind": "option" if wrong else ""})
        return 2 if wrong else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
