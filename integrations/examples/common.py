"""The examples' common parts: the command line, and pieces of a text to learn from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def make_parser(description: str | None, **sizes: int) -> argparse.ArgumentParser:
    """A parser with the flags of offloading, and one flag for each size with its default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="auto", choices=("none", "host", "nvme", "tiered", "auto"))
    parser.add_argument("--path", help="directory of the spool; the ranks share it")
    parser.add_argument("--min-bytes", help='smaller tensors stay, for example "64KiB"')
    parser.add_argument("--device-budget", help='most bytes of saved activations on the device, for example "2GiB"')
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The offloading options of the command line."""
    return {name: getattr(args, name) for name in ("target", "path", "min_bytes", "device_budget")}


def batch(seed: int, rows: int, seq: int, device: torch.device) -> Tensor:
    """Random pieces of PyTorch's source, a byte a token: (rows, seq + 1) int64, the same ones for the same seed."""
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - seq - 1, (rows,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[start : start + seq + 1] for start in starts.tolist()]).to(device)
