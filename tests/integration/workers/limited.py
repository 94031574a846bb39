"""Trains, and prints a checksum of the gradients: ``python -m ... LIBRARY KEEPS [FILE]``.

``LIBRARY`` is ``device_memory`` of `attach`, or empty for plain PyTorch; ``KEEPS`` is 1 if nothing is checkpointed.
``FILE`` holds the limit of the process's cgroup. The process lowers it to what it has before its first step, and room
for half of the bytes that its forward saves.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload.tools.environment import rss_bytes

WIDTH, ROWS, BLOCKS, LAYERS, STEPS = 32, 16384, 8, 6, 4
ROOM_BYTES = 96 << 20


class _Net(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.blocks = nn.ModuleList(
            nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU()) for _ in range(LAYERS)])
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.keeps else checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def main(memory: str, keeps: str, limit: str = "") -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, digest = _Net(keeps == "1"), hashlib.sha256()
    if limit:
        Path(limit).write_text(str(rss_bytes() + ROOM_BYTES))
    options: dict[str, Any] = {"target": "nvme", "device_memory": memory, "announce": "none"}
    attachment = actoffload.attach(model, **options) if memory else None
    for step in range(STEPS):
        loss = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        digest.update(b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None))
        with torch.no_grad():  # an optimizer of PyTorch's would import its compiler, which takes longer than the rest
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                parameter.grad = None
    moved = 0 if attachment is None else attachment.offloader.statistics().moved_bytes
    print(json.dumps({"bits": digest.hexdigest(), "moved": moved}))


if __name__ == "__main__":
    main(*sys.argv[1:])
