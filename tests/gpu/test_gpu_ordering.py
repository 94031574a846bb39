"""On a real accelerator: the order of copies holds when the side streams are late, and its absence would be seen.

Every copy is preceded by a sleep on its stream, so that whatever does not wait for it runs first. Memory never holds
the right bytes by luck: freed device memory is overwritten with NaN on the compute stream at once, memory that a copy
will fill holds NaN until then, and freed host memory is poisoned by ``debug=True``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import actoffload
from actoffload.tiers.accelerator import CudaAccelerator
from actoffload.tiers.copy_streams import CopyStreams
from tests.harness import MakeOffloader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="the delays are CUDA's")]

ELEMENTS = 1 << 20
LAYERS = 12
SLEEP_CYCLES = 10_000_000
"""About 5 ms on the device: far longer than a layer of the chain computes."""


@pytest.fixture
def _late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    delay_copies(monkeypatch, SLEEP_CYCLES)
    yield
    torch.cuda.synchronize()


def delay_copies(monkeypatch: pytest.MonkeyPatch, cycles: int) -> None:
    """Every copy is late by ``cycles``, and what it fills on the device holds NaN before."""
    copy, empty = CudaAccelerator.copy, CudaAccelerator.empty

    def late(self: CudaAccelerator, copies: Any, stream: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        copy(self, copies, stream)

    def poisoned(self: CudaAccelerator, nbytes: int, index: int, stream: Any) -> Tensor:
        memory = empty(self, nbytes, index, stream)
        with torch.cuda.stream(stream):
            return memory.fill_(255)

    monkeypatch.setattr(CudaAccelerator, "copy", late)
    monkeypatch.setattr(CudaAccelerator, "empty", poisoned)


def litter(tensors: int = 3) -> None:
    """Overwrite device memory that was freed: what still needs it reads NaN."""
    junk = [torch.full((ELEMENTS,), float("nan"), device="cuda") for _ in range(tensors)]
    del junk


def chain(x: Tensor, *, late_compute: bool = False) -> Tensor:
    """Tiny compute on large tensors, each saved by the next operation."""
    for _ in range(LAYERS):
        if late_compute:
            torch.cuda._sleep(4 * SLEEP_CYCLES)
        x = x.sin()
        litter()
    return x


def gradient(offloader: actoffload.Offloader | None, *, late_compute: bool = False, settled: bool = False) -> Tensor:
    """Gradient of the chain at its input; NaN everywhere else in device memory."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ELEMENTS, device="cuda", generator=generator).requires_grad_()
    if offloader is None:
        out = chain(x, late_compute=late_compute)
    else:
        with offloader:
            out = chain(x, late_compute=late_compute)
        if settled:
            offloader.synchronize()
    litter()
    (grad,) = torch.autograd.grad(out.sum(), [x])
    torch.cuda.synchronize()
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
    """The stress above can fail: without this edge, the gradient is wrong."""
    reference = gradient(None)
    offloader = make_offloader(target="host", device_budget=4 * 4 * ELEMENTS)
    monkeypatch.setattr(CopyStreams, edge, ignore)
    if edge == "_order_use_after_fill":
        delay_copies(monkeypatch, 20 * SLEEP_CYCLES)  # by far more than the whole backward takes
    litter(8 * LAYERS)  # else the free memory still holds the reference's values, which are the right ones
    torch.cuda.synchronize()
    wrong = gradient(offloader, late_compute=edge == "_order_after_producer")
    assert not torch.equal(wrong, reference)


def ignore(transfers: CopyStreams, *arguments: Any) -> None:
    """Instead of an edge: nothing waits."""
