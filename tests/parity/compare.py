"""One forward and backward, plain and offloaded, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from actoffload import Offloader
from tests.harness import assert_same_bits

from .places import Maker


def settle(offloader: Offloader | None) -> None:
    """Wait until every tensor that moves has left; nothing to do without offloading."""
    if offloader is not None:
        offloader.synchronize()


def gradients(
    forward: Callable[[], Tensor],
    leaves: list[Tensor],
    offloader: Offloader | None = None,
    *,
    settled: bool = False,
) -> list[Tensor | None]:
    """The loss and the gradients of the leaves, with the same random numbers each time.

    ``settled``: all that moves has left before backward begins, so that backward has to bring it back.
    """
    torch.manual_seed(7)
    with offloader or nullcontext():
        loss = forward()
    if settled:
        settle(offloader)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def assert_parity(
    maker: Maker, forward: Callable[[], Tensor], leaves: Iterable[Tensor], offloader: Offloader | None = None
) -> Offloader:
    """Compare the bits with all copies ended, and with copies under way; returns the offloader."""
    wanted = list(leaves)
    offloader = offloader or maker(debug=True)
    before = offloader.statistics()
    reference = gradients(forward, wanted)
    assert any(gradient is not None for gradient in reference[1:])
    assert_same_bits(gradients(forward, wanted, offloader, settled=True), reference)
    maker.assert_moved(offloader, before)
    assert_same_bits(gradients(forward, wanted, offloader), reference)
    assert offloader.statistics().live_records == 0
    return offloader
