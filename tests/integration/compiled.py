"""A small model that is compiled in every way, and trained with and without offloading."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload import Offloader
from tests.blocks import MLP
from tests.harness import gradients
from tests.integration.evidence import Run, assert_evidence, counting_owners

STEPS = 3
WIDTH = 32

Call = Callable[[Tensor], Tensor]


class Tower(nn.Module):
    """Embedding, blocks and a loss: small, as tracing takes most of these tests' time."""

    def __init__(self, layers: int, checkpoints: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(MLP(WIDTH, dropout=0.0) for _ in range(layers))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            if self.checkpoints is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpoints == "reentrant")
        loss: Tensor = hidden.square().mean()
        return loss


def tokens(step: int, seq: int = 64) -> Tensor:
    return torch.randint(0, 64, (4, seq), generator=torch.Generator().manual_seed(step))


def tower(how: str, backend: str = "aot_eager", layers: int = 2, **options: Any) -> Tower:
    """A tower that is not compiled ("eager"), block by block, or as a whole (without or with checkpoints inside)."""
    model = Tower(layers, how if how.endswith("reentrant") else None)
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend=backend, **options)
    elif how != "eager":
        model.compile(backend=backend, **options)
    return model


def train(
    model: nn.Module,
    context: Any = None,
    *,
    call: Any = None,
    attached: Offloader | None = None,
    lengths: tuple[int, ...] = (64,) * STEPS,
) -> Run:
    """A few optimizer steps; the loss is computed inside the context, backward runs outside.

    An offloader, whether it is the context or attached, has moved everything before backward begins, so that all of
    it is read back.
    """
    run = Run()
    offloader = context if isinstance(context, Offloader) else attached
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with counting_owners(model.parameters) as meter:
        for step, seq in enumerate(lengths):
            inputs = tokens(step, seq)
            with context if context is not None else contextlib.nullcontext():
                loss = (model if call is None else call)(inputs)
            if offloader is not None:
                offloader.synchronize()
            loss.backward()
            run.losses.append(loss.detach())
            del loss
            optimizer.step()
            run.tensors |= {f"{step} {name}": gradient for name, gradient in gradients(model).items()}
    run.tensors |= {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run.moved_parameter_bytes = meter.parameter_bytes
    return run


def check(make: Callable[[], nn.Module], offloader: Offloader, **options: Any) -> Run:
    """Fails unless training has the same bits with the offloader, and everything moved to disk and back.

    The peak of a single graph cannot fall (see `test_the_peak_of_one_graph_does_not_fall`).
    """
    plain = train(make(), **options)
    offloaded = train(make(), offloader, **options)
    offloaded.statistics = offloader.statistics()
    assert_evidence(offloaded, plain, peak_falls=None)
    return offloaded


def gradients_of(model: Tower, call: Call, x: Tensor, offloader: Offloader | None = None) -> dict[str, Tensor]:
    """The loss and the gradients of one call; everything that moves has left before backward."""
    loss = call(x)
    if offloader is not None:
        offloader.synchronize()
    loss.backward()
    return gradients(model) | {"loss": loss.detach()}
