"""What the tests of selective checkpointing share: regions, policies, a model of checkpointed blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from actoffload import create_selective_checkpoint_contexts
from tests.harness import (
    same_bits,
)

ATEN = torch.ops.aten
MATMULS = [ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default]
MUTATED = "cached during selective activation checkpoint has been mutated"
AGAIN = "backward an extra time"

Function = Callable[..., Any]


def save_all(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Everything but what is changed in place afterwards (and what changes it): PyTorch refuses that."""
    spared = op is ATEN.empty_like.default or (hasattr(op, "_schema") and op._schema.is_mutable)
    return CheckpointPolicy.PREFER_RECOMPUTE if spared else CheckpointPolicy.PREFER_SAVE


def save_some(*ops: Any) -> Any:
    """A policy function for these operations, that answers with bools."""
    return lambda context, op, *args, **kwargs: op in ops


def region(function: Function, *args: Any, policy: Any = MATMULS, make: Any = None, **options: Any) -> Tensor:
    """Run a function under a selective checkpoint: with our contexts, or with those that ``make`` makes."""
    contexts = partial(make or create_selective_checkpoint_contexts, policy, **options)
    out: Tensor = checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    return out


class Blocks(nn.Module):
    """Linear layers, each checkpointed with the contexts that ``make`` makes."""

    def __init__(self, policy: Any = MATMULS, width: int = 64, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.policy, self.dropout = policy, dropout
        self.make: Any = create_selective_checkpoint_contexts

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        h = torch.tanh(layer(nn.functional.dropout(x, self.dropout)))
        return h * torch.sigmoid(x) + torch.cat(h.split(h.shape[-1] // 2, -1)[::-1], -1)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        for layer in self.layers:
            x = region(partial(self.block, layer), x, policy=self.policy, make=self.make)
        return x


def matrix(rows: int = 64, columns: int = 64, seed: int = 0) -> Tensor:
    """A leaf that wants a gradient."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients_of(function: Function, *leaves: Tensor, context: Any = None) -> list[Tensor]:
    """The gradients of the sum of what a function returns."""
    with context if context is not None else contextlib.nullcontext():
        out = function(*leaves).sum()
    return list(torch.autograd.grad(out, leaves))


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [same_bits(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@contextlib.contextmanager
def scoped_op(namespace: str, schema: str) -> Iterator[tuple[Any, Any]]:
    """A library and the operation that it defines, for as long as the test runs."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    try:
        yield library, getattr(getattr(torch.ops, namespace), schema.partition("(")[0]).default
    finally:
        library._destroy()
