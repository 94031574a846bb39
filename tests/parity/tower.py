"""A small GPT that can be compiled block by block and checkpointed in every way, with a branch that no loss uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from actoffload.testing.gpt import Block, GPTConfig

VOCABULARY, WIDTH, LAYERS, BATCH, SEQ = 64, 32, 3, 2, 16
CHECKPOINTS = ("none", "reentrant", "nonreentrant", "selective")

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(block: Callable[[Tensor], Tensor], kind: str, eager: bool = False) -> Callable[[Tensor], Tensor]:
    """A block as it is run under a kind of checkpoint."""
    if kind == "none":
        return block
    options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, save_matmuls)
        if eager and "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:  # from PyTorch 2.14 on
            options["respect_saved_tensors_hooks"] = True
    return partial(checkpoint, block, **options)


class Tower(nn.Module):
    """Embedding, blocks, a tied head and a side branch."""

    def __init__(self, kind: str = "none", backend: str | None = None) -> None:
        super().__init__()
        config = GPTConfig(layers=LAYERS, width=WIDTH, seq=SEQ, head_width=8, vocab=VOCABULARY, dropout=0.1)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(config) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.side = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self._runs = [self._run(block, kind, backend) for block in self.blocks]

    @staticmethod
    def _run(block: nn.Module, kind: str, backend: str | None) -> Callable[[Tensor], Tensor]:
        if backend is None:
            return checkpointed(block, kind, eager=True)
        if kind == "selective":  # its policy has to be seen by the compiler
            compiled: Callable[[Tensor], Tensor] = torch.compile(
                checkpointed(block, kind), backend=backend, fullgraph=True
            )
            return compiled
        return checkpointed(torch.compile(block, backend=backend, fullgraph=True), kind)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of predicting each token from the tokens before it, and the output of the side branch."""
        x = self.tokens(tokens[:, :-1])
        for run in self._runs:
            x = run(x)
        x = self.norm(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        return loss, self.side(x)


@cache
def tower(kind: str = "none", backend: str | None = None, device: str = "cpu") -> Tower:
    """The same model each time: compiling takes seconds."""
    torch.manual_seed(0)
    return Tower(kind, backend).to(device)


def tokens(seed: int, device: str = "cpu") -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(seed)).to(device)
