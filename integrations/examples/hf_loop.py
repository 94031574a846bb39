"""transformers' Trainer: one call of `attach` on it, before it trains a small Llama.

python -m actoffload.integrations.examples.hf_loop --target nvme --path /mnt/nvme0
python -m actoffload.integrations.examples.hf_loop --target none
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from actoffload.integrations import hf

from .common import batch, make_parser, options


class Printing(Trainer):
    """Prints the loss of each micro-batch."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, in nats."""
        loss: Any = super().compute_loss(*args, **kwargs)
        print(f"loss {loss.item():.4f} = {loss.item().hex()}", flush=True)
        return loss


def main(arguments: Sequence[str] | None = None) -> None:
    """Train."""
    args = make_parser(__doc__, steps=10, batch=8, layers=4, width=256, seq=256).parse_args(arguments)
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_hidden_layers": args.layers}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    tokens = batch(0, args.steps * args.batch, args.seq, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as directory:
        training = TrainingArguments(
            directory,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            report_to="none",
            save_strategy="no",
        )
        trainer = Printing(model, training, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
        attachment = None
        if args.target != "none":
            # <- offloading: the forward and the loss of each training step
            attachment = hf.attach(trainer, **options(args))
        trainer.train()
    if attachment is not None:
        print(attachment.offloader.report())  # bytes moved, and the reasons


if __name__ == "__main__":
    main()
