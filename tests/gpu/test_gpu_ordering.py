"""On an accelerator: the order of copies holds when the side streams are late, and without it gradients are wrong.

Every copy is preceded by a sleep on its stream, so that work without an edge to it runs first. Memory never holds the
right bytes by luck: freed device memory is overwritten with NaN on the compute stream at once, memory that a copy will
fill holds NaN until then, and freed host memory is poisoned by ``debug=True``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import actoffload
from actoffload.testing.simulated_device import install
from actoffload.tiers.accelerator import Accelerator
from actoffload.tiers.copy_streams import CopyStreams
from tests.harness import MakeOffloader, on_stream

pytestmark = pytest.mark.gpu

ON_CUDA = torch.cuda.is_available()
ELEMENTS = 1 << (20 if ON_CUDA else 14)
LAYERS = 12
LATE_S = 0.005 if ON_CUDA else 0.001
"""Far longer than a layer of the chain computes."""


@pytest.fixture
def _late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    delay_copies(monkeypatch, LATE_S)
    yield
    torch.accelerator.synchronize()


def sleep(seconds: float) -> None:
    """Have the current stream do nothing for about ``seconds``."""
    if ON_CUDA:
        torch.cuda._sleep(int(seconds * 2e9))
    else:
        install().sleep(seconds)


def delay_copies(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every copy is late by ``seconds``; the device memory that it fills holds NaN before."""
    copy, empty = Accelerator.copy, Accelerator.empty

    def late(self: Accelerator, copies: Any, stream: Any) -> None:
        with on_stream(stream, ordered=False):
            sleep(seconds)
        copy(self, copies, stream)

    def poisoned(self: Accelerator, nbytes: int, index: int) -> Tensor:
        return empty(self, nbytes, index).fill_(255)

    monkeypatch.setattr(Accelerator, "copy", late)
    monkeypatch.setattr(Accelerator, "empty", poisoned)


def accelerator() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device


def litter(tensors: int = 3) -> None:
    """Overwrite freed device memory: a kernel that still needs it reads NaN."""
    junk = [torch.full((ELEMENTS,), float("nan"), device=accelerator()) for _ in range(tensors)]
    del junk


def chain(x: Tensor, *, late_compute: bool = False) -> Tensor:
    """Tiny compute on large tensors, each saved by the next operation."""
    for _ in range(LAYERS):
        if late_compute:
            sleep(4 * LATE_S)
        x = x.sin()
        litter()
    return x


def gradient(offloader: actoffload.Offloader | None, *, late_compute: bool = False, settled: bool = False) -> Tensor:
    """Gradient of the chain at its input; NaN everywhere else in device memory."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ELEMENTS, generator=generator).to(accelerator()).requires_grad_()
    with offloader or nullcontext():
        out = chain(x, late_compute=late_compute)
    if settled and offloader is not None:
        offloader.synchronize()
    litter()
    (grad,) = torch.autograd.grad(out.sum(), [x])
    torch.accelerator.synchronize()
    return grad


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "budget": {"device_budget": 8 * 4 * ELEMENTS},
    "little-prefetch": {"prefetch_bytes": 1},
    "small-window": {"pending_bytes": 4 * ELEMENTS},
}


@pytest.mark.usefixtures("_late_copies")
@pytest.mark.parametrize("target", ["host", "nvme", "tiered"])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_late_copies_change_nothing(target: str, options: dict[str, Any], make_offloader: MakeOffloader) -> None:
    reference = gradient(None)
    assert reference.isfinite().all()
    offloader = make_offloader(target=target, **options)
    for step in range(4):  # the first step has no learned order and no prefetch behind it
        settled = step == 3  # so that something moves, however late the copies
        assert torch.equal(gradient(offloader, settled=settled), reference), f"step {step}"
    assert offloader.statistics().moved_bytes > 0


@pytest.mark.usefixtures("_late_copies")
def test_late_compute_changes_nothing(make_offloader: MakeOffloader) -> None:
    reference = gradient(None, late_compute=True)
    offloader = make_offloader(target="host")
    for _ in range(2):
        assert torch.equal(gradient(offloader, late_compute=True), reference)


@pytest.mark.parametrize("edge", ["_order_after_producer", "_order_use_after_fill"])
def test_a_missing_edge_would_be_seen(
    edge: str, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this edge the gradient is wrong, so the stress above can fail."""
    reference = gradient(None)
    offloader = make_offloader(target="host", device_budget=4 * 4 * ELEMENTS)
    monkeypatch.setattr(CopyStreams, edge, ignore)
    if edge == "_order_use_after_fill":
        delay_copies(monkeypatch, 20 * LATE_S)  # by far more than the whole backward takes
    litter(8 * LAYERS)  # else the free memory still holds the reference's values, which are right
    torch.accelerator.synchronize()
    wrong = gradient(offloader, late_compute=edge == "_order_after_producer")
    assert not torch.equal(wrong, reference)
    if not ON_CUDA:
        install().reset()
        install().take_violations()


def ignore(transfers: CopyStreams, *arguments: Any) -> None:
    """Instead of an edge: nothing waits."""
