"""A simulated accelerator: streams that run when the test says so, on a manual clock, over poisoned memory.

It stands in for a real device behind the `Accelerator` interface and drives ordinary CPU tensors as if they lay on it:

* Work given to a stream is queued. A copy reads its source *when it runs*, by address, as a device does.
* Memory that nobody holds any more is overwritten with 0xFF as soon as the stream that owns it has passed the point at
  which it was freed: the next owner of that memory may write there from then on. New memory is overwritten likewise
  when the stream reaches its allocation: the earlier owner may write there until then.
* Inside ``with device:`` every PyTorch operation is a kernel of the current stream: the stream first runs what it was
  given, which makes other streams run exactly as far as its waits demand (``"lazy"``), or as far as they can
  (``"eager"``), or something between by chance (``"random"``).

So a missing edge shows as NaN in a gradient, and a copy that touches freed memory is listed in ``violations``.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..tiers.accelerator import Accelerator

Adversary = Literal["lazy", "eager", "random"]


@dataclass(eq=False)
class FakeStream:
    """A queue of work, run in order."""

    name: str
    queue: deque[_Work] = field(default_factory=deque)
    free_at_s: float = 0.0


@dataclass(eq=False)
class FakeEvent:
    """A point in a stream's work."""

    stream: FakeStream
    done: bool = False
    at_s: float = 0.0


@dataclass(eq=False)
class _Work:
    run: Callable[[], None]
    waits_for: FakeEvent | None = None
    duration_s: float = 0.0


class _Block:
    """Device memory that is watched: who owns it, and what becomes of its bytes when it is freed."""

    def __init__(self, alias: Tensor, owner: FakeStream) -> None:
        self.alias: Tensor | None = alias
        self.owner = owner
        self.also_used_on: list[FakeStream] = []
        self.address = alias.data_ptr()
        self.nbytes = alias.numel()
        self.reused = False
        self._shadow: Tensor | None = None

    def free(self) -> None:
        """Let the real memory go; copies that are still queued find the bytes in a shadow of it."""
        assert self.alias is not None, "freed once"
        self._shadow = self.alias.clone()
        self.address = self._shadow.data_ptr()
        self.alias = None

    def poison(self) -> None:
        """Another owner writes to it."""
        ctypes.memset(self.address, 0xFF, self.nbytes)

    def reuse(self) -> None:
        """The next owner writes to it: from now on no copy may touch it."""
        self.reused = True
        self.poison()


class FakeDevice(Accelerator):
    """A device of one index whose streams are simulated.

    It has more than fifteen attributes: its state, and what tests read of what happened on it.

    Args:
        adversary: how far side streams run by themselves.
        bytes_per_s: bandwidth of each side stream on the manual clock.
        seed: for ``"random"``.

    Attributes:
        now_s: the manual clock.
        stall_s: time for which the compute stream waited for copies.
        violations: what touched memory that was no longer its own.
        pins: ``(address, nbytes)`` of each call of `pin`.
        locked: bytes that are page-locked now, by address.
    """

    type = "cpu"

    def __init__(self, adversary: Adversary = "lazy", *, bytes_per_s: float = 1e9, seed: int = 0) -> None:
        self.adversary: Adversary = adversary
        self.bytes_per_s = bytes_per_s
        self.now_s = 0.0
        self.stall_s = 0.0
        self.violations: list[str] = []
        self.pins: list[tuple[int, int]] = []
        self.locked: dict[int, int] = {}
        self.capturing = False
        self.compute = FakeStream("compute")
        self._current = self.compute
        self._sides: dict[str, FakeStream] = {}
        self._reuse: list[FakeStream] = []
        self._blocks: dict[int, _Block] = {}
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._mode = _Kernels(self)

    # -- what a test does ---------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeDevice:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self._mode.__exit__(*exc)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Make ``stream`` the current stream."""
        previous, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = previous

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queue a kernel on the current stream; it runs when the stream gets there."""

        def run() -> None:
            with _disable_current_modes():
                kernel()

        with self._lock:
            self._current.queue.append(_Work(run))

    def advance(self, seconds: float) -> None:
        """Let time pass: side streams run what they can finish by then."""
        with self._lock:
            self.now_s += seconds
            for stream in self._sides.values():
                while stream.queue and self._runnable(stream.queue[0]):
                    if max(stream.free_at_s, self.now_s - seconds) + stream.queue[0].duration_s > self.now_s:
                        break
                    self._run_head(stream)
            self._tick()

    def finish(self) -> None:
        """Run everything that was queued."""
        with self._lock:
            for stream in [self.compute, self._current, *self._sides.values()]:
                self._drain(stream)
            self._tick()

    # -- Accelerator --------------------------------------------------------------------------------------------------

    def current_index(self) -> int:
        return 0

    def current_stream(self, index: int) -> FakeStream:
        return self._current

    def side_stream(self, index: int, role: str) -> FakeStream:
        return self._sides.setdefault(role, FakeStream(role))

    def record(self, stream: FakeStream, again: FakeEvent | None = None) -> FakeEvent:
        with self._lock:
            event = self._mark(stream)
            self._tick()
            return event

    timestamp = record

    def seconds_between(self, begin: FakeEvent, end: FakeEvent) -> float:
        return end.at_s - begin.at_s

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            stream.queue.append(_Work(_nothing, waits_for=event))

    def done(self, event: FakeEvent) -> bool:
        return event.done

    def synchronize(self, event: FakeEvent) -> None:
        with self._lock:
            self._run_until(event)

    def copy(self, copies: Iterable[tuple[Tensor, Tensor]], stream: FakeStream) -> None:
        for destination, source in copies:
            self._copy(destination, source, stream)

    def _copy(self, destination: Tensor, source: Tensor, stream: FakeStream) -> None:
        to, from_, nbytes = destination.data_ptr(), source.data_ptr(), source.numel()
        with self._lock:
            outward = stream is self._sides.get("out")
            block = self._watch(source if outward else destination)
            begin = (from_ if outward else to) - block.address

            def run() -> None:
                if block.reused:
                    self.violations.append(f"a copy on side stream {stream.name!r} uses memory that has a new owner")
                device = block.address + begin
                ctypes.memmove(to if outward else device, device if outward else from_, nbytes)

            stream.queue.append(_Work(run, duration_s=nbytes / self.bytes_per_s))
            self._tick()

    def empty(self, nbytes: int, index: int, stream: FakeStream) -> Tensor:
        with self._lock, _disable_current_modes():
            tensor = torch.empty(nbytes, dtype=torch.uint8)
            stream.queue.append(_Work(self._watch(tensor, stream).poison))
            return tensor

    def same_stream(self, one: FakeStream, other: FakeStream) -> bool:
        return one is other

    def used_on(self, tensor: Tensor, stream: FakeStream) -> None:
        with self._lock:
            self._watch(tensor).also_used_on.append(stream)

    def is_capturing(self) -> bool:
        return self.capturing

    def pin(self, address: int, nbytes: int) -> bool:
        with self._lock:
            self.pins.append((address, nbytes))
            for other, length in self.locked.items():
                if address < other + length and other < address + nbytes:
                    self.violations.append(f"{length} bytes at {other:#x} were unmapped while they were page-locked")
            self.locked[address] = nbytes
        return True

    def unpin(self, address: int) -> bool:
        with self._lock:
            self.locked.pop(address, None)
        return True

    # -- the machine --------------------------------------------------------------------------------------------------

    def before_kernel(self) -> None:
        """The host launches an operation: the current stream runs up to it."""
        with self._lock:
            self._tick()
            self._drain(self._current)
            self._tick()

    def _mark(self, stream: FakeStream) -> FakeEvent:
        """An event that is done once the stream has run what it was given so far."""
        event = FakeEvent(stream)

        def happen() -> None:
            event.done = True
            event.at_s = max(self.now_s, stream.free_at_s)

        stream.queue.append(_Work(happen))
        return event

    def _drain(self, stream: FakeStream) -> None:
        while stream.queue:
            work = stream.queue[0]
            if work.waits_for is not None and not work.waits_for.done:
                before_s = self.now_s
                self._run_until(work.waits_for)
                self.stall_s += self.now_s - before_s
            self._run_head(stream)

    def _run_until(self, event: FakeEvent) -> None:
        while not event.done:
            work = event.stream.queue[0]
            if work.waits_for is not None:
                self._run_until(work.waits_for)
            self._run_head(event.stream)
            self.now_s = max(self.now_s, event.stream.free_at_s)

    def _run_head(self, stream: FakeStream) -> None:
        work = stream.queue.popleft()
        if work.duration_s:
            stream.free_at_s = max(stream.free_at_s, self.now_s) + work.duration_s
        work.run()

    def _runnable(self, work: _Work) -> bool:
        return work.waits_for is None or work.waits_for.done

    def _tick(self) -> None:
        self._find_freed()
        for stream in [*self._sides.values()]:
            while stream.queue and self._runnable(stream.queue[0]) and self._wants_to_run():
                self._run_head(stream)
        for stream in list(self._reuse):
            while stream.queue and self._runnable(stream.queue[0]):
                self._run_head(stream)
            if not stream.queue:
                self._reuse.remove(stream)

    def _wants_to_run(self) -> bool:
        if self.adversary == "random":
            return self._random.random() < 0.3
        return self.adversary == "eager"

    def _watch(self, tensor: Tensor, owner: FakeStream | None = None) -> _Block:
        """Keep the storage of a tensor mapped, and know when nobody else holds it any more."""
        with _disable_current_modes():
            storage = tensor.untyped_storage()
            block = self._blocks.get(storage._cdata)
            if block is None:
                alias = torch.empty(0, dtype=torch.uint8)
                alias.set_(storage)
                block = self._blocks[storage._cdata] = _Block(alias, owner or self._current)
            return block

    def _find_freed(self) -> None:
        with _disable_current_modes():  # once for all of them: it costs more than the look itself
            for cdata, block in list(self._blocks.items()):
                if block.alias is not None and _holders(block.alias) == _NOBODY_ELSE:
                    del self._blocks[cdata]
                    block.free()
                    self._reuse_after_free(block)

    def _reuse_after_free(self, block: _Block) -> None:
        """The next owner writes to the block once its stream, and those it was lent to, are past this point."""
        reuse = FakeStream("reuse")
        for stream in (block.owner, *block.also_used_on):
            reuse.queue.append(_Work(_nothing, waits_for=self._mark(stream)))
        reuse.queue.append(_Work(block.reuse))
        self._reuse.append(reuse)


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes every PyTorch operation a kernel of the simulated device's current stream."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._device.before_kernel()
        return func(*args, **(kwargs or {}))


def _nothing() -> None:
    """Work that only waits."""


def _holders(alias: Tensor) -> tuple[int, int]:
    """How many tensors, and how many Python names, hold the storage of ``alias``; call it without dispatch modes."""
    storage = alias.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _holders_when_alone() -> tuple[int, int]:
    """What `_holders` says when nobody but the alias is left; it differs between PyTorch versions."""
    tensor, alias = torch.empty(1, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    alias.set_(tensor.untyped_storage())
    del tensor
    return _holders(alias)


_NOBODY_ELSE = _holders_when_alone()
