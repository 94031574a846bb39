"""A loop that runs a small Llama of transformers block by block: all micro-batches of a step, then the next block.

python -m actoffload.integrations.examples.layer_major_loop --target nvme --path /mnt/nvme0
python -m actoffload.integrations.examples.layer_major_loop --target none
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import actoffload

from .common import batch, make_parser, options

MICROBATCHES = 4


class LayerMajor(nn.Module):
    """A Llama whose forward takes the micro-batches of a step, and returns one loss for each."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama

    def before(self, tokens: Tensor) -> tuple[Any, ...]:
        """Embed tokens; the others are the arguments of transformers' decoder layers, in their order."""
        inner = self.llama.model
        x = inner.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        # No mask, no cache: attention is causal.
        return x, None, positions, None, False, inner.rotary_emb(x, positions)

    def after(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The loss, in nats."""
        logits = self.llama.lm_head(self.llama.model.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def forward(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """One loss for each micro-batch."""
        return actoffload.schedules.layer_major(
            self.llama.model.layers,
            [(one, one) for one in tokens],  # the second one is for `after`
            before=lambda tokens, labels: self.before(tokens),
            after=self.after,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train."""
    args = make_parser(__doc__, steps=10, batch=8, layers=4, width=256, seq=256).parse_args(arguments)
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_hidden_layers": args.layers}
    torch.manual_seed(0)
    model = LayerMajor(LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attachment = None if args.target == "none" else actoffload.attach(model, **options(args))  # <- offloading
    for step in range(args.steps):
        tokens = batch(step, MICROBATCHES * args.batch, args.seq, torch.device("cpu")).chunk(MICROBATCHES)
        losses = model(tokens)
        loss: Any = sum(losses) / MICROBATCHES
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f} = {loss.item().hex()}", flush=True)
    if attachment is not None:
        print(attachment.offloader.report())  # bytes moved, and the reasons
        attachment.detach()


if __name__ == "__main__":
    main()
