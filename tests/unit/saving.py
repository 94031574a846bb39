"""Tensors that are saved one after the other, each in a graph of its own; and engines that record their requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actoffload import Offloader
from actoffload.storage.engines.base import IoKind, SpoolFile
from actoffload.storage.engines.posix import PosixEngine
from actoffload.testing.faults import GateEngine
from tests.harness import WAIT_S, assert_empty, same_bits

KIB = 1 << 10
NBYTES = 256 * KIB
"""Of one tensor of most tests: four fill a batch of 1 MiB."""
FULL = 4


class Save(torch.autograd.Function):
    """Saves one tensor; its backward reads it and passes it to `seen`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor, seen: Callable[[Tensor], None]) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.seen(ctx.saved_tensors[0])
        return grads[0], None, None


class Saved:
    """Tensors that were saved one after the other, and copies of their contents."""

    def __init__(self, offloader: Offloader, tensors: list[Tensor]) -> None:
        self.offloader = offloader
        self.expected: list[Tensor | None] = [t.clone() for t in tensors]
        self.graphs: list[Tensor | None] = []
        self.handed_out: list[Any] = []
        with offloader:
            for tensor in tensors:
                x = torch.ones(1, requires_grad=True)
                self.graphs.append(Save.apply(x, tensor, self.handed_out.append))

    def check(self, index: int, *, again: bool = False) -> Tensor:
        """Unpack one; it has the bits that it had."""
        graph = self.graphs[index]
        assert graph is not None
        graph.backward(retain_graph=again)
        found: Tensor = self.handed_out.pop()
        expected = self.expected[index]
        assert expected is not None
        assert same_bits(found, expected), f"tensor {index}"
        if not again:
            self.drop(index)
        return found

    def check_rest(self) -> None:
        """Unpack all that have not been yet, the last one first."""
        for index in reversed(range(len(self.graphs))):
            if self.graphs[index] is not None:
                self.check(index)

    def end(self) -> None:
        """Unpack all that have not been yet; then the offloader holds nothing."""
        self.check_rest()
        assert_empty(self.offloader)

    def drop(self, index: int) -> None:
        """Drop a graph whose tensor was never unpacked."""
        self.graphs[index] = self.expected[index] = None


@contextmanager
def freed(tensor: Tensor) -> Iterator[None]:
    """A storage has no memory in here, and its contents again afterwards, as in FSDP and Megatron's recomputation."""
    storage, contents, nbytes = tensor.untyped_storage(), tensor.clone(), tensor.nbytes
    storage.resize_(0)
    yield
    storage.resize_(nbytes)
    tensor.data.copy_(contents)


class ReadsTwice(torch.autograd.Function):
    """A linear layer that in backward reads ``ctx.saved_tensors`` once for each tensor in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.saved_tensors[1], gradient.t() @ ctx.saved_tensors[0]


class Doubled(torch.autograd.Function):
    """A custom function whose backward is differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y: Tensor = x * x
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        gradient: Tensor = 2 * x * gradients[0]
        return gradient


def weight(rows: int = 64) -> Tensor:
    """A leaf of ``rows`` rows of 64."""
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def take_gradient(tensor: Tensor) -> Tensor:
    """The gradient of a leaf, which is cleared."""
    assert tensor.grad is not None
    found, tensor.grad = tensor.grad, None
    return found


def activations(count: int, nbytes: int = NBYTES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(nbytes // 4, generator=generator) for _ in range(count)]


class CountingEngine(PosixEngine):
    """Notes the bytes of each request."""

    def __init__(self, file: SpoolFile) -> None:
        self.written: list[int] = []
        self.read: list[int] = []
        super().__init__(file)

    def submit(self, request: Any) -> None:
        (self.written if request.kind is IoKind.WRITE else self.read).append(request.length)
        super().submit(request)


class HoldEngine(GateEngine):
    """Holds the calls of one kind in the middle until ``leave`` is set; ``skip`` of them pass."""

    def __init__(self, file: Any, *, threads: int | None = None, kind: IoKind = IoKind.WRITE) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.skip = 0
        self._held_kind = kind
        super().__init__(file, threads=threads)
        self.open()

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        if kind is self._held_kind:
            if self.skip:
                self.skip -= 1
            else:
                self.entered.set()
                assert self.leave.wait(WAIT_S)
        return super()._transfer_once(kind, views, offset)


class BufferedGateEngine(GateEngine):
    """Its system calls go through the page cache, so memory can be checked before it is read."""

    calls = 0

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, direct=False)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        self.calls += 1
        return super()._transfer_once(kind, views, offset)
