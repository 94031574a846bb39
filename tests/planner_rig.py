"""A training step in virtual time: the real offloader, compute that only passes time, and a disk of any speed.

Nothing here waits and nothing is copied, so a step of seconds takes milliseconds and every run is the same.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.errors import OffloaderClosedError
from actoffload.storage.engines.base import EngineCapabilities, IoKind, IoRequest, SpoolFile, StorageEngine
from tests.harness import use_clock

MIB = 1 << 20
TOKENS = 1000
"""Numbers in the model's input, which has their share of all sizes."""
NOBODY: Mapping[str, float] = {}
"""No other program uses the disk."""


class Clock:
    """Virtual seconds. They pass in `sleep`, and while the training thread waits for a transfer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.speed = 1.0
        """How fast compute is: twice as much makes it half as long."""
        self.disks: list[Disk] = []

    def now(self) -> float:
        """The time, in place of `actoffload.events.now`."""
        return self.now_s

    def compute(self, seconds: float) -> None:
        """Pass the time of a computation, ``seconds`` at speed 1, and end the transfers that end meanwhile."""
        until_s = self.now_s + seconds / self.speed
        while (end_s := self._next_end_s()) <= until_s:
            self._end_next(end_s)
        self.now_s = until_s

    def wait(self, timeout: float | None = None) -> bool:
        """Pass the time until the next transfer ends, in place of `threading.Condition.wait`."""
        end_s = self._next_end_s()
        assert end_s < float("inf"), "the training thread waits for ever"
        self._end_next(end_s)
        return True

    def _next_end_s(self) -> float:
        return min((disk.next_end_s for disk in self.disks), default=float("inf"))

    def _end_next(self, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)
        next(disk for disk in self.disks if disk.next_end_s == end_s).end_next()


class Disk(StorageEngine):
    """A disk that serves one read and one write at a time, each at its speed. It moves no bytes."""

    def __init__(self, file: SpoolFile, *, clock: Clock, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._queues: dict[IoKind, deque[IoRequest]] = {kind: deque() for kind in IoKind}
        self._running: dict[IoKind, tuple[float, IoRequest]] = {}
        self.written_bytes = self.read_bytes = 0
        self.other_bytes = 0
        """Bytes of another program that the disk serves before each of these transfers."""
        self.others = 0.0
        """The share of the disk's time that another program takes now."""
        self._closed = False
        clock.disks.append(self)

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("virtual", direct=True, alignment=4096, needs_file=False, vectored=True)

    @property
    def next_end_s(self) -> float:
        """When the first of the running transfers ends."""
        return min((end_s for end_s, _ in self._running.values()), default=float("inf"))

    def submit(self, request: IoRequest) -> None:
        if self._closed:
            raise OffloaderClosedError("the engine is closed")
        self._queues[request.kind].append(request)
        self._start(request.kind)

    def promote(self, request: IoRequest) -> None:
        queue = self._queues[request.kind]
        if request in queue:
            queue.remove(request)
            queue.appendleft(request)

    def end_next(self) -> None:
        """End the first of the running transfers, and start the one behind it."""
        kind = min(self._running, key=lambda kind: self._running[kind][0])
        _, request = self._running.pop(kind)
        if kind is IoKind.WRITE:
            self.written_bytes += request.length
        else:
            self.read_bytes += request.length
        request.finish(None)
        self._start(kind)

    def _start(self, kind: IoKind) -> None:
        queue = self._queues[kind]
        while queue and kind not in self._running:
            request = queue.popleft()
            if request.try_start():
                if request.before is not None:
                    request.before()
                seconds = (self.other_bytes + request.length) / (self.bytes_per_s * (1 - self.others))
                self._running[kind] = self._clock.now_s + seconds, request

    def close(self) -> None:
        self._closed = True
        while self._running:
            self.end_next()

    def abort(self) -> None:
        for request in itertools.chain(*self._queues.values()):
            request.cancel()
        self.close()


class _Work(torch.autograd.Function):
    """Takes time, saves its input, and makes an output of some size that is never read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _Layer, nbytes: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        layer.compute(layer.forward_s)
        return torch.empty(nbytes // 4)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.layer.compute(2 * ctx.layer.forward_s)
        return torch.empty_like(x), torch.zeros(1), None, None


class _Layer(nn.Module):
    """A block: several operators, of which the last makes the input of the next block."""

    def __init__(self, clock: Clock, forward_s: float, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.compute, self.sizes = clock.compute, tuple(sizes)  # a block that held the clock would hold the rig
        self.forward_s = forward_s / len(self.sizes)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        for nbytes in self.sizes:
            x = _Work.apply(x, self.weight, self, int(nbytes * scale))
        return x


class Model(nn.Module):
    """Blocks that take their time.

    Args:
        clock: passes the time.
        blocks: for each block, the bytes of each operator's output, which the next one saves; the last is the next
            block's input.
        forward_s: of one block; backward takes twice as long.
    """

    def __init__(self, clock: Clock, blocks: Sequence[Sequence[int]], forward_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(clock, forward_s, sizes) for sizes in blocks)
        self.first_bytes = blocks[0][-1]

    def forward(self, tokens: Tensor) -> Tensor:
        scale = len(tokens) / TOKENS
        x = torch.empty(int(self.first_bytes * scale) // 4)
        for layer in self.layers:
            x = layer(x, scale)
        return x


class Rig:
    """One offloader and one model, stepped in virtual time.

    Attributes:
        seconds: of each step so far.
        peaks: the most activation bytes of each step.
        moved: bytes that went to disk in each step.
    """

    def __init__(self, offloader: Offloader, clock: Clock, model: Model) -> None:
        self.offloader, self.clock, self.model = offloader, clock, model
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.moved: list[int] = []

    @property
    def disk(self) -> Disk:
        (disk,) = self.clock.disks
        return disk

    def step(self, scale: float = 1.0, others: Mapping[str, float] = NOBODY) -> None:
        """Train one step.

        Args:
            scale: of all sizes, as another sequence length has it.
            others: another program's share of the disk's time in ``"backward"`` and in ``"optimizer"``. The
                optimizer takes a tenth of the compute.
        """
        began_s, moved = self.clock.now_s, self.disk.written_bytes
        with self.offloader:
            out = self.model(torch.empty(int(TOKENS * scale)))
        self.disk.others = others.get("backward", 0.0)
        out.backward(torch.empty_like(out))
        if others:
            self.disk.others = others.get("optimizer", 0.0)
            self.clock.compute((self.clock.now_s - began_s) / 10)
        self.disk.others = 0.0
        accounts = self.offloader.store.shared.accounts
        self.seconds.append(self.clock.now_s - began_s)
        self.peaks.append(accounts.step_peak_bytes)
        self.moved.append(self.disk.written_bytes - moved)

    def steps(self, count: int, scale: float = 1.0, others: Mapping[str, float] = NOBODY) -> float:
        """Train ``count`` steps; the seconds of the last one."""
        for _ in range(count):
            self.step(scale, others)
        return self.seconds[-1]

    @property
    def plans(self) -> int:
        pilot = self.offloader.autopilot
        return 0 if pilot is None else len(pilot.history)


MakeRig = Callable[..., Rig]


@contextmanager
def rigs(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    """Make rigs of a disk, a model and options of an offloader; they end with the block.

    ``sizes`` describes ``blocks`` equal blocks, or has one sequence for each block.
    """
    made: list[Rig] = []

    def make(
        *,
        bytes_per_s: float,
        blocks: int = 8,
        forward_s: float = 0.1,
        sizes: Sequence[Any] = (2 * MIB,) * 4,
        **options: Any,
    ) -> Rig:
        clock = Clock()
        use_clock(clock.now, monkeypatch)
        config: dict[str, Any] = {"target": "nvme", "path": str(path), "policy": "auto", "min_bytes": MIB}

        def engine(file: SpoolFile, *, threads: int | None = None) -> Disk:
            return Disk(file, clock=clock, bytes_per_s=bytes_per_s)

        offloader = Offloader(OffloadConfig(**(config | {"tune_malloc": False, "engine": engine} | options)))
        monkeypatch.setattr(offloader.store.shared.changed, "wait", clock.wait)
        model = Model(clock, [sizes] * blocks if isinstance(sizes[0], int) else sizes, forward_s)
        made.append(Rig(offloader.use(model), clock, model))
        return made[-1]

    yield make
    for rig in made:
        rig.offloader.abort()
