"""What the tests on the simulated device train, and how they look at it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice

SIZE = 64
RECORD_BYTES = SIZE * SIZE * 4
LONGEST_DELAY_S = 0.002


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).t() * x


def _model(index: int = 0, blocks: int = 6) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    where = torch.device(NAME, index)
    return nn.Sequential(*[_Block() for _ in range(blocks)]).to(where), torch.randn(SIZE, SIZE).to(where)


def _gradients(model: nn.Module, x: Tensor, context: Any) -> list[Tensor]:
    model.zero_grad()
    with context:
        loss = model(x).square().sum()
    loss.backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@contextlib.contextmanager
def _offloader(path: Path, *, accelerator: Any = None, **options: Any) -> Iterator[Offloader]:
    """Moves all that it can; so little may be on its way that copies, kernels and memory come close to each other."""
    fields: dict[str, Any] = {
        "policy": "all", "min_bytes": 1, "keep_last_bytes": 0, "path": str(path), "engine": "memory", "debug": True,
        "announce": "none", "pending_bytes": RECORD_BYTES, "prefetch_bytes": 2 * RECORD_BYTES, "host_budget": "1MiB",
    }  # fmt: skip
    offloader = Offloader(OffloadConfig(**(fields | options)), accelerator=accelerator or SimulatedAccelerator())
    try:
        yield offloader
    finally:
        offloader.abort()


def _equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _is_right(device: SimulatedDevice, path: Path, seed: int, **options: Any) -> bool:
    """Whether the gradients of three steps are right, under the delays of a seed."""
    device.delay(0)
    model, x = _model()
    expected = _gradients(model, x, contextlib.nullcontext())
    device.delay(LONGEST_DELAY_S, seed)
    with _offloader(path, **options) as offloader:
        right = all(_equal(_gradients(model, x, offloader), expected) for _ in range(3))
        assert offloader.statistics().host_read_bytes > 0
        device.reset()
    return device.take_violations() == 0 and right
