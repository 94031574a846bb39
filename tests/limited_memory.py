"""Small models on the simulated device with less memory than keeping everything takes, in virtual time.

Blocks like those of GPT, BERT, Llama and a convolutional network, each under ``torch.utils.checkpoint``, are trained
with AdamW, four micro-batches a step and two shapes in turns. `limited` gives the device a part of the memory that
keeping everything takes, and the library that number. Sizes are divided as in `tests.scaled_llama`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload.errors import BudgetError
from actoffload.testing.simulated_device import NAME, SimulatedDevice, install
from tests.host_bound import charge, highest_allocated, use_virtual_time
from tests.scaled_llama import BYTES, GPU, LAUNCHES, scale

BLOCKS = {"gpt": 8, "bert": 8, "llama": 8, "conv": 16}
WIDTH, HEADS, CHANNELS, PIXELS = 64, 2, 16, 32
SHAPES = (8, 6)
"""Sequences, or images, of a micro-batch: one step has the first, the next one the second."""
LENGTH = 128
SLOWER = 4
"""Times fewer operations a second: so narrow a model would have hardly any for each byte that it saves."""
ACCUMULATION = 4


class _Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.inner, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-1, -2)
        if self.causal:
            scores = scores + torch.full((LENGTH, LENGTH), -1e4, device=x.device).triu(1)
        mixed: Tensor = self.out((scores.softmax(-1) @ parts[2]).transpose(1, 2).flatten(2))
        return mixed


class _Transformer(nn.Module):
    """A block of GPT; with ``after`` of BERT, with norms behind each part and dropout."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.after = after
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = _Attention(causal=not after)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1 if after else 0.0)

    def forward(self, x: Tensor) -> Any:
        for norm, part in zip(self.norms, (self.attention, self.mlp), strict=True):
            x = norm(x + self.drop(part(x))) if self.after else x + part(norm(x))
        return x


class _Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = _Attention(causal=True)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 192), nn.Linear(WIDTH, 192), nn.Linear(192, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class _Convolution(nn.Module):
    """Two convolutions with a shortcut; ``smaller`` halves the image."""

    def __init__(self, smaller: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2 if smaller else 1, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).relu()
        return x + self.second(x).relu()


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": lambda number: _Transformer(after=False),
    "bert": lambda number: _Transformer(after=True),
    "llama": lambda number: _Llama(),
    "conv": lambda number: _Convolution(smaller=number in (9, 13)),
}


class _Net(nn.Module):
    """The blocks, under checkpoints but for those in ``plain``."""

    def __init__(self, name: str, plain: Iterable[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(MODELS[name](number) for number in range(BLOCKS[name]))
        self.plain = frozenset(plain)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) if number in self.plain else checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


class Training:
    """A model on the simulated device, and the time and peak of each of its steps.

    Args:
        device: the simulated device.
        name: of `MODELS`.
        plain: the blocks without a checkpoint.
        link: bytes per second to the host and to the device, of the full sizes.
    """

    def __init__(self, device: SimulatedDevice, name: str, plain: Iterable[int], link: tuple[float, float]) -> None:
        rates = {"to_host_bytes_per_s": link[0] / BYTES, "to_device_bytes_per_s": link[1] / BYTES}
        device.model(launch_s=LAUNCHES["host ahead"], **GPU | rates | {"flops": GPU["flops"] / SLOWER})
        self._device = device
        self.model = _Net(name, plain).to(NAME)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        shape = (CHANNELS, PIXELS, PIXELS) if name == "conv" else (LENGTH, WIDTH)
        self._inputs = [torch.randn(count, *shape).to(NAME) for count in SHAPES]
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        """The allocator's, with all that is on the device."""

    def step(self, number: int) -> None:
        """Take one step; the number chooses the shape.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        self._device.synchronize()
        began_s = self._device.clock_s
        with highest_allocated() as peaks:
            for _ in range(ACCUMULATION):
                self.model(self._inputs[number % len(SHAPES)]).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._device.synchronize()
        self.seconds.append(self._device.clock_s - began_s)
        self.peaks.append(max(peaks))

    def bits(self) -> str:
        """A checksum of the parameters: equal gradients in every step leave it equal."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(parameter.detach().cpu().numpy().tobytes())
        return found.hexdigest()


@contextmanager
def virtual_time() -> Iterator[None]:
    """Have the library's clock, its hooks' time and its sizes be those of the simulated device, and of small models."""
    with pytest.MonkeyPatch.context() as patch:
        device = install()
        use_virtual_time(device, patch)
        scale(patch)
        charge(device, patch)
        yield


def run(name: str, link: tuple[float, float], steps: int, plain: Iterable[int] = (), **options: Any) -> dict[str, Any]:
    """Train with ``options`` for `attach`, or without the library if there are none; a failure is a result."""
    device = install()
    limit = options.pop("limit", None)
    training = Training(device, name, plain, link)
    attachment = None
    if options:
        attachment = actoffload.attach(training.model, host_budget=1 << 30, announce="none", **options)
    found: dict[str, Any] = {}
    if limit is not None:
        torch.accelerator.empty_cache()  # else the cache of an earlier run serves this one, beyond the limit
        device.limit(limit)
    predicted: list[float | None] = []
    try:
        for number in range(steps):
            training.step(number)
            predicted.append(_predicted(attachment, training.peaks[-1]))
    except (torch.OutOfMemoryError, BudgetError) as error:
        found["failed"] = f"step {len(training.peaks)}: {type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        if attachment is not None:
            plan = _plan(attachment)
            found["once"] = [] if plan is None else list(plan.once)
            attachment.detach()
            attachment.offloader.abort()
        device.limit(None)
        device.synchronize()
    found["bits"] = training.bits()
    return found | {"seconds": training.seconds, "peaks": training.peaks, "predicted": predicted}


def _plan(attachment: Any) -> Any:
    """The plan that is followed; None without one."""
    pilot = None if attachment is None else attachment.offloader.autopilot
    return None if pilot is None else pilot.plan


def _predicted(attachment: Any, peak_bytes: int) -> float | None:
    """The device's peak as the first line and the report name it, times the allocator's of this step."""
    plan = _plan(attachment)
    if plan is None or not plan.predicted_peak_bytes:
        return None
    shape = attachment.offloader.autopilot.facts().shape
    return float((plan.predicted_peak_bytes + shape.other_bytes) / peak_bytes)


@functools.cache
def _kept_bytes(name: str, to_host: float, to_device: float) -> int:
    return int(max(run(name, (to_host, to_device), 2 * len(SHAPES), range(BLOCKS[name]))["peaks"]))


def limited(name: str, link: tuple[float, float], share: float, steps: int, **options: Any) -> dict[str, Any]:
    """Train in ``share`` of the memory that keeping all takes; with ``recompute`` the program has no checkpoints."""
    limit = int(share * _kept_bytes(name, *link))
    plain = range(BLOCKS[name]) if options.get("recompute") else ()
    return run(name, link, steps, plain, limit=limit, device_memory=limit, **options) | {"limit_bytes": limit}
