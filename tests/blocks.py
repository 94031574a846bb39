"""Blocks of the models of several tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """For `layer_major`: eager, checkpointed, with adapters ("lora"), or with its input changed ("in place")."""

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


class MLP(nn.Module):
    """Norm, two linears, dropout and a residual."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return found
