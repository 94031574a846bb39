"""A plain PyTorch loop: a small GPT learns this file, a byte a token.

    python -m actoffload.integrations.examples.plain_loop --target nvme --path /mnt/nvme0
    python -m actoffload.integrations.examples.plain_loop --target none

Both print the same losses, bit for bit (the hexadecimal number is the exact one). The lines that switch offloading on
are marked.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import actoffload
from actoffload.testing.gpt import GPT, GPTConfig


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="auto", choices=("none", "host", "nvme", "tiered", "auto"))
    parser.add_argument("--path", help="directory of the spool")
    parser.add_argument("--min-bytes", help='smaller tensors stay, for example "64KiB"')
    parser.add_argument("--device-budget", help='most bytes of saved activations on the device, for example "2GiB"')
    for flag, default in (("steps", 10), ("batch", 8), ("layers", 4), ("width", 256), ("seq", 256)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    return parser.parse_args(arguments)


def batch(step: int, rows: int, seq: int, device: torch.device) -> Tensor:
    """Random pieces of this file: (rows, seq + 1) int64, the same ones at each run."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts = torch.randint(len(text) - seq - 1, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + seq + 1] for start in starts.tolist()]).to(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train."""
    args = parse(arguments)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=args.layers, width=args.width, seq=args.seq, dropout=0.1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    offloading: Any = nullcontext()
    if args.target != "none":
        # <- offloading: what autograd saves inside this context leaves the device until backward
        offloading = actoffload.offload_activations(
            target=args.target,
            path=args.path,
            min_bytes=args.min_bytes,
            device_budget=args.device_budget,
            model=model,
            announce="first",
        )

    for step in range(args.steps):
        tokens = batch(step, args.batch, args.seq, device)
        with offloading:  # <- offloading: around forward and loss; backward may be inside or outside
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f} = {loss.item().hex()}", flush=True)

    if args.target != "none":
        print(offloading.offloader.report())  # <- offloading: what it did and why


if __name__ == "__main__":
    main()
