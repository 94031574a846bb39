"""Lightning's trainer: one call of `attach` on the LightningModule, and its whole training step is offloaded.

    python -m actoffload.integrations.examples.lightning_loop --target nvme --path /mnt/nvme0
    python -m actoffload.integrations.examples.lightning_loop --target none

Both print the same losses, bit for bit. Comments mark the lines that switch offloading on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import actoffload
from actoffload.testing.gpt import GPT, GPTConfig

from .common import batch, make_parser, options


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
    parser = make_parser(__doc__, steps=10, accumulate=2, batch=8, layers=4, width=256, seq=256)
    parser.add_argument("--accelerator", default="auto", help="as for Lightning's Trainer")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    task = Language(GPTConfig(layers=args.layers, width=args.width, seq=args.seq, dropout=0.1))

    attachment = None
    if args.target != "none":
        # <- offloading: every training step from now on, the loss included; validation saves nothing
        attachment = actoffload.attach(task, **options(args), announce="first")

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
    pieces: Any = batch(0, args.steps * args.accumulate * args.batch, args.seq, torch.device("cpu"))
    trainer.fit(task, DataLoader(pieces, batch_size=args.batch))

    if attachment is not None:
        print(attachment.offloader.report())  # <- offloading: bytes moved, and the reasons
        attachment.detach()


if __name__ == "__main__":
    main()
