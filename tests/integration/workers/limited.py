"""Trains, and prints the memory before the first step and a checksum: ``python -m ... LIBRARY KEEPS``.

``LIBRARY`` is ``device_memory`` of `attach`, or empty for plain PyTorch; ``KEEPS`` is 1 if nothing is checkpointed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload.tools.environment import rss_bytes

WIDTH, ROWS, BLOCKS, LAYERS, STEPS = 32, 16384, 8, 6, 4


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


def main(memory: str, keeps: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, digest = _Net(keeps == "1"), hashlib.sha256()
    options: dict[str, Any] = {"target": "nvme", "device_memory": memory, "announce": "none"}
    attachment = actoffload.attach(model, **options) if memory else None
    before = rss_bytes()
    for step in range(STEPS):
        loss = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        digest.update(b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None))
        with torch.no_grad():  # an optimizer of PyTorch's would import its compiler, which takes longer than the rest
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                parameter.grad = None
    moved = 0 if attachment is None else attachment.offloader.statistics().moved_bytes
    print(json.dumps({"before": before, "bits": digest.hexdigest(), "moved": moved}))


if __name__ == "__main__":
    main(*sys.argv[1:])
