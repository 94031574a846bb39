"""For tests of tensors of which something else is saved: what backward finds, models in it, streams and captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import Offloader, Statistics
from actoffload.errors import StateError
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from tests.harness import Adversary, assert_same_bits, hinder, on_stream, simulated

ANY = nn.Identity()
"""A model for `Offloader.use`, which holds it weakly: the pattern "*" covers what no module saves."""
ON_EACH_FORM = pytest.mark.parametrize("form", [{"codec": "exact"}, {"codec": "none", "fp8": "*"}], ids=["half", "fp8"])


class Save(torch.autograd.Function):
    """Saves tensors, and notes what backward finds."""

    found: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Save.found = tuple(tensor.clone() for tensor in ctx.saved_tensors)
        return tuple(None for _ in ctx.saved_tensors)


class Trained(nn.Module):
    """A model that returns its loss, and its input `x`."""

    x: Tensor

    def gradients(self, offloader: Offloader | None, *, times: int = 1) -> list[Tensor | None]:
        """Of one step with so many backwards, before each of which all saved tensors are away."""
        self.zero_grad()
        self.x.grad = None
        with offloader or nullcontext():
            loss = self(self.x)
        for left in reversed(range(times)):
            if offloader is not None:
                offloader.synchronize()
            loss.backward(retain_graph=left > 0)
        return [self.x.grad, *(parameter.grad for parameter in self.parameters())]


def assert_survives(
    device: SimulatedDevice,
    adversary: Adversary,
    gradients: Callable[[AbstractContextManager[Any]], Sequence[Tensor | None]],
    **options: Any,
) -> Statistics:
    """No late kernel or copy changes a bit of the gradients of a step in the context; returns the counts."""

    def on_cpu(found: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if one is None else one.cpu() for one in found]

    expected = on_cpu(gradients(nullcontext()))
    accelerator = SimulatedAccelerator()
    with simulated(accelerator, debug=True, **options) as offloader:
        for seed in range(4):
            device.synchronize()
            hinder(device, accelerator, adversary, seed)
            found = gradients(offloader.use(ANY))
            device.reset()
            assert_same_bits(on_cpu(found), expected)
        return offloader.statistics()


def assert_streams_read_their_own(device: SimulatedDevice, node: Any, expected: Tensor) -> None:
    """Two streams read the tensor that a node saves as ``self``: neither uses memory that the other one will fill."""
    here, other = torch.accelerator.current_stream(), torch.Stream(torch.device(NAME, 0))
    assert node._saved_self.shape == expected.shape  # waits for the flag, so that no later read does
    other.wait_stream(here)
    other.synchronize()
    with device.paused(here):
        held = node._saved_self  # its kernel has not begun
        with on_stream(other, ordered=False):
            there = node._saved_self * 1.0
        other.synchronize()
    device.synchronize()
    assert_same_bits([held.cpu(), there.cpu()], [expected] * 2)


def gradient_after_a_capture(loss: Tensor, x: Tensor, patch: pytest.MonkeyPatch) -> Tensor:
    """The gradient of a loss, after a backward that was refused because a graph is captured."""
    with patch.context() as capture:
        capture.setattr(SimulatedAccelerator, "is_capturing", lambda accelerator, index: True)
        with pytest.raises(StateError, match="captured graph"):
            torch.autograd.grad(loss, x, retain_graph=True)
    (found,) = torch.autograd.grad(loss, x)
    return found
