"""A small GPT in plain PyTorch, for the demo, the benchmarks and the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT. ``vocab`` is 256 for bytes; ``seq`` is the longest sequence in tokens."""

    layers: int = 4
    width: int = 384
    seq: int = 256
    head_width: int = 64
    vocab: int = 256
    dropout: float = 0.0
    recompute: bool = False
    """Checkpoint every block (non-reentrant)."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "seq", "head_width", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be 1 or more")
        if self.width > self.head_width and self.width % self.head_width:
            raise ConfigError("width", self.width, f"must be a multiple of head_width={self.head_width}")

    @property
    def heads(self) -> int:
        """Attention heads; one if the model is narrower than a head."""
        return max(1, self.width // self.head_width)


class Block(nn.Module):
    """Pre-norm attention and MLP. Input and output: (batch, seq, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on ``x`` (batch, seq, width)."""
        x = x + self._drop(self._attend(self.norm1(x)))
        return x + self._drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Stack(nn.Module):
    """Blocks one after the other, without embedding or head. Input and output: (batch, seq, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks on ``x`` (batch, seq, width)."""
        for block in self.blocks:  # an evaluation has no backward that could run a block again
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return x


class GPT(nn.Module):
    """A language model over ``config.vocab`` tokens with learned positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.stack = Stack(config)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy in nats with ``targets``, else logits (batch, seq, vocab).

        Args:
            tokens: (batch, seq) int64.
            targets: (batch, seq) int64, or None.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.stack(self.tokens(tokens) + self.positions(positions))
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
