"""A plain PyTorch loop: a small GPT learns a text, a byte a token.

    python -m actoffload.integrations.examples.plain_loop --target nvme --path /mnt/nvme0
    python -m actoffload.integrations.examples.plain_loop --target none

Both print the same losses, bit for bit (the hexadecimal number is the exact one). Comments mark the lines that switch
offloading on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

import actoffload
from actoffload.testing.gpt import GPT, GPTConfig

from .common import batch, make_parser, options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train."""
    args = make_parser(__doc__, steps=10, batch=8, layers=4, width=256, seq=256).parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=args.layers, width=args.width, seq=args.seq, dropout=0.1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    offloading: Any = nullcontext()
    if args.target != "none":
        # <- offloading: tensors that autograd saves inside this context leave the device until backward
        offloading = actoffload.offload_activations(**options(args), model=model, announce="first")

    for step in range(args.steps):
        tokens = batch(step, args.batch, args.seq, device)
        with offloading:  # <- offloading: around forward and loss; backward may be inside or outside
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f} = {loss.item().hex()}", flush=True)

    if args.target != "none":
        print(offloading.offloader.report())  # <- offloading: bytes moved, and the reasons


if __name__ == "__main__":
    main()
