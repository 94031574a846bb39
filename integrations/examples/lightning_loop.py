"""Lightning's trainer: one call of `attach` on the LightningModule, and its whole training step is offloaded.

    python -m actoffload.integrations.examples.lightning_loop --target nvme --path /mnt/nvme0
    python -m actoffload.integrations.examples.lightning_loop --target none

Both print the same losses, bit for bit. The lines that switch offloading on are marked.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import actoffload
from actoffload.testing.gpt import GPT, GPTConfig


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="auto", choices=("none", "host", "nvme", "tiered", "auto"))
    parser.add_argument("--path", help="directory of the spool")
    parser.add_argument("--min-bytes", help='smaller tensors stay, for example "64KiB"')
    parser.add_argument("--device-budget", help='most bytes of saved activations on the device, for example "2GiB"')
    parser.add_argument("--accelerator", default="auto", help="as for Lightning's Trainer")
    for flag, default in (("steps", 10), ("accumulate", 2), ("batch", 8), ("layers", 4), ("width", 256), ("seq", 256)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    return parser.parse_args(arguments)


class Pieces(Dataset[Tensor]):
    """Pieces of this file, a byte a token: (seq + 1,) int64."""

    def __init__(self, seq: int, count: int) -> None:
        self.text = torch.tensor(list(Path(__file__).read_bytes()))
        self.seq = seq
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        start = index * 977 % (len(self.text) - self.seq - 1)
        return self.text[start : start + self.seq + 1]


class Language(pl.LightningModule):
    """A small GPT that predicts the next byte."""

    def __init__(self, sizes: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(sizes)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """The loss of one micro-batch: (batch, seq + 1) int64 to a scalar in nats."""
        loss: Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
        print(f"micro-batch {index}: loss {loss.item():.4f} = {float(loss).hex()}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train."""
    args = parse(arguments)
    torch.manual_seed(0)
    task = Language(GPTConfig(layers=args.layers, width=args.width, seq=args.seq, dropout=0.1))

    attachment = None
    if args.target != "none":
        # <- offloading: every training step from now on, the loss included; validation saves nothing
        attachment = actoffload.attach(
            task,
            target=args.target,
            path=args.path,
            min_bytes=args.min_bytes,
            device_budget=args.device_budget,
            announce="first",
        )

    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=1,
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DataLoader(Pieces(args.seq, args.steps * args.accumulate * args.batch), batch_size=args.batch))

    if attachment is not None:
        print(attachment.offloader.report())  # <- offloading: what it did and why
        attachment.detach()


if __name__ == "__main__":
    main()
