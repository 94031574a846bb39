"""The block of the models that `layer_major` runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Adds a tensor of its input's shape to it, in one of these forms: eager, checkpointed, lora, in place."""

    def __init__(self, width: int, form: str = "eager") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.low = nn.Linear(width, width, bias=False) if form == "lora" else None
        self.form = form
        if self.low is not None:
            self.up.requires_grad_(False)
            self.down.requires_grad_(False)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        if self.form == "checkpointed":
            again: Tensor = checkpoint(self.inner, x, *rest, use_reentrant=False)
            return again
        return self.inner(x, *rest)

    def inner(self, x: Tensor, *rest: Tensor) -> Tensor:
        for one in rest:
            x = x * one
        if self.form == "in place":
            x.add_(1)
        more = 0 if self.low is None else self.low(x)
        found: Tensor = x + self.down(torch.tanh(self.up(x))) + more
        return found
