"""For tests on the simulated device: models to train, and checks of their gradients."""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actoffload import Offloader
from actoffload.storage.engines.base import IoKind, SpoolFile
from actoffload.storage.engines.memory import MemoryEngine
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from tests.harness import same_bits, simulated, train_step

SIZE = 64
RECORD_BYTES = SIZE * SIZE * 4
LONGEST_DELAY_S = 0.002


class LateEngine(MemoryEngine):
    """Takes addresses of the simulated device's memory, and reads them late."""

    def __init__(self, file: SpoolFile) -> None:
        super().__init__(file, threads=2)
        self._capabilities = replace(self._capabilities, device_memory=True)
        self._random = random.Random(0)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        time.sleep(LONGEST_DELAY_S * self._random.random())
        return super()._transfer_once(kind, views, offset)


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


def leaf() -> Tensor:
    """A tensor that needs a gradient, as large as a record."""
    return torch.linspace(-1, 1, SIZE * SIZE).to(NAME).requires_grad_()


def _offloader(path: Path, *, accelerator: Any = None, **options: Any) -> AbstractContextManager[Offloader]:
    """Moves all that it can; few bytes may be under way, so that copies, kernels and memory come close together."""
    fields: dict[str, Any] = {
        "path": str(path), "engine": "memory", "debug": True, "announce": "none", "pending_bytes": RECORD_BYTES,
        "prefetch_bytes": 2 * RECORD_BYTES, "host_budget": "1MiB",
    }  # fmt: skip
    return simulated(accelerator, **(fields | options))


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(same_bits(found[name], expected[name]) for name in expected)


def _is_right(device: SimulatedDevice, path: Path, seed: int, **options: Any) -> bool:
    """Whether the gradients of three steps are right, under the delays of a seed."""
    device.delay(0)
    model, x = _model()
    expected = train_step(model, x)
    device.delay(LONGEST_DELAY_S, seed)
    with _offloader(path, **options) as offloader:
        right = all(_equal(train_step(model, x, offloader), expected) for _ in range(3))
        assert offloader.statistics().host_read_bytes > 0
        device.reset()
    return device.take_violations() == 0 and right
