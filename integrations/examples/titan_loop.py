"""A loop in the manner of torchtitan: build, then checkpoint, compile and shard block by block, then train steps.

    python -m actoffload.integrations.examples.titan_loop --target nvme --compile inductor --recompute
    torchrun --nproc-per-node 2 -m actoffload.integrations.examples.titan_loop --target nvme

Started by torchrun it shards parameters, gradients and optimizer state with ``fully_shard``. With ``--target none`` it
prints the same losses, bit for bit. The lines that switch offloading on are marked.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import actoffload
from actoffload.testing.gpt import GPT, GPTConfig


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="auto", choices=("none", "host", "nvme", "tiered", "auto"))
    parser.add_argument("--path", help="directory of the spool; the ranks share it")
    parser.add_argument("--min-bytes", help='smaller tensors stay, for example "64KiB"')
    parser.add_argument("--device-budget", help='most bytes of saved activations on the device, for example "2GiB"')
    parser.add_argument("--compile", metavar="BACKEND", help="compile block by block, for example with inductor")
    parser.add_argument("--recompute", action="store_true", help="checkpoint every block")
    sizes = {"steps": 10, "microbatches": 2, "batch": 4, "layers": 4, "width": 256, "seq": 256}
    for flag, default in sizes.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    return parser.parse_args(arguments)


def build(args: argparse.Namespace, device: torch.device) -> GPT:
    """The model: checkpointed inside, then compiled, then sharded, each block by itself."""
    torch.manual_seed(0)
    sizes = GPTConfig(layers=args.layers, width=args.width, seq=args.seq, recompute=args.recompute)
    model = GPT(sizes).to(device)
    for block in model.stack.blocks:
        if args.compile:  # never the whole model: in one graph every saved tensor is there until its end
            block.compile(backend=args.compile, fullgraph=True)
        if dist.is_initialized():
            fully_shard(block)
    if dist.is_initialized():
        fully_shard(model)
    return model


def batch(step: int, args: argparse.Namespace, device: torch.device) -> Tensor:
    """Random pieces of this file for this rank: (batch, seq + 1) int64, the same ones at each run."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    seed = step * 1000 + (dist.get_rank() if dist.is_initialized() else 0)
    starts = torch.randint(len(text) - args.seq - 1, (args.batch,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[start : start + args.seq + 1] for start in starts.tolist()]).to(device)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, context: Any, tokens: Sequence[Tensor]) -> Tensor:
    """Forward and backward of every micro-batch, one optimizer step; the mean loss over micro-batches and ranks."""
    total = torch.zeros((), device=tokens[0].device)
    for piece in tokens:
        with context:  # <- offloading: around forward and loss; here backward is inside as well
            predicted = model(piece[:, :-1])
            loss = F.cross_entropy(predicted.flatten(0, 1), piece[:, 1:].flatten()) / len(tokens)
            del predicted
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Train."""
    args = parse(arguments)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if "WORLD_SIZE" in os.environ:
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(dist.get_default_backend_for_device(device))
    model = build(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_context: Any = nullcontext()
    if args.target != "none":
        # <- offloading: one context for the whole training; the ranks of a machine divide disk and memory by themselves
        train_context = actoffload.offload_activations(
            target=args.target,
            path=args.path,
            min_bytes=args.min_bytes,
            device_budget=args.device_budget,
            model=model,
            announce="first",
        )
    first = not dist.is_initialized() or dist.get_rank() == 0
    for step in range(args.steps):
        tokens = [batch(step * args.microbatches + i, args, device) for i in range(args.microbatches)]
        loss = float(train_step(model, optimizer, train_context, tokens))
        if first:
            print(f"step {step}: loss {loss:.4f} = {loss.hex()}", flush=True)
    if args.target != "none" and first:
        print(train_context.offloader.report())  # <- offloading: what it did and why
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
