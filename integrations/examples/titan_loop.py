"""A loop in the manner of torchtitan: build, then checkpoint, compile and shard block by block, then train steps.

    python -m actoffload.integrations.examples.titan_loop --target nvme --compile inductor --recompute
    torchrun --nproc-per-node 2 -m actoffload.integrations.examples.titan_loop --target nvme

Started by torchrun it shards parameters, gradients and optimizer state with ``fully_shard``. With ``--target none`` it
prints the same losses, bit for bit. Comments mark the lines that switch offloading on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import actoffload
from actoffload.testing.gpt import GPT, GPTConfig

from .common import batch, make_parser, options


def build(args: argparse.Namespace, device: torch.device) -> GPT:
    """The model: checkpointed inside, then compiled, then sharded, each block by itself."""
    torch.manual_seed(0)
    sizes = GPTConfig(layers=args.layers, width=args.width, seq=args.seq, recompute=args.recompute)
    model = GPT(sizes).to(device)
    # Checkpoint, then compile, then shard: FSDP gathers a block's parameters before its compiled forward runs.
    for block in model.stack.blocks:
        if args.compile:  # never the whole model: one graph keeps every saved tensor until its end
            block.compile(backend=args.compile, fullgraph=True)
        if dist.is_initialized():
            fully_shard(block)
    if dist.is_initialized():
        fully_shard(model)
    return model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, context: Any, tokens: Sequence[Tensor]) -> Tensor:
    """Forward and backward of every micro-batch, one optimizer step; the mean loss over micro-batches and ranks."""
    total = torch.zeros((), device=tokens[0].device)
    for piece in tokens:
        with context:  # <- offloading: around forward and loss; here backward is inside as well
            predicted = model(piece[:, :-1])
            loss = F.cross_entropy(predicted.flatten(0, 1), piece[:, 1:].flatten()) / len(tokens)
            del predicted  # else the loop holds it until backward, and a tensor that the program holds stays
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
    parser = make_parser(__doc__, steps=10, microbatches=2, batch=4, layers=4, width=256, seq=256)
    parser.add_argument("--compile", metavar="BACKEND", help="compile block by block, for example with inductor")
    parser.add_argument("--recompute", action="store_true", help="checkpoint every block")
    args = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if "WORLD_SIZE" in os.environ:
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(dist.get_default_backend_for_device(device))
    model = build(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_context: Any = nullcontext()
    if args.target != "none":
        # <- offloading: one context for the whole training; the ranks of a machine divide disk and memory by themselves
        train_context = actoffload.offload_activations(**options(args), model=model, announce="first")
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(args.steps):
        seeds = [(step * args.microbatches + i) * 1000 + rank for i in range(args.microbatches)]
        tokens = [batch(seed, args.batch, args.seq, device) for seed in seeds]
        loss = float(train_step(model, optimizer, train_context, tokens))
        if rank == 0:
            print(f"step {step}: loss {loss:.4f} = {loss.hex()}", flush=True)
    if args.target != "none" and rank == 0:
        print(train_context.offloader.report())  # <- offloading: bytes moved, and the reasons
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
