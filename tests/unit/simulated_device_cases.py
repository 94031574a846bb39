"""The simulated accelerator is a PyTorch device: the library drives it as it drives CUDA; a missing edge shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice, install
from actoffload.tiers.copy_streams import CopyStreams

SIZE = 64
RECORD_BYTES = SIZE * SIZE * 4
LONGEST_DELAY_S = 0.002
SEEDS = 40
"""A seed shows a missing edge with a chance of a quarter or more: the copy that is awaited has to be slow."""


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    installed = install()
    installed.model()
    yield installed
    installed.delay(0)
    installed.limit(None)
    installed.synchronize()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).t() * x


def _model(index: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    where = torch.device(NAME, index)
    return nn.Sequential(*[_Block() for _ in range(6)]).to(where), torch.randn(SIZE, SIZE).to(where)


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
    return right


# -- the device --------------------------------------------------------------------------------------------------------


def test_kernels_run_late_and_in_order(device: SimulatedDevice) -> None:
    before = device.synchronous_kernels
    device.delay(LONGEST_DELAY_S, 1)
    model, x = _model()
    found = model(x).square().sum()
    on_cpu = model.to("cpu")(x.cpu()).square().sum()
    torch.testing.assert_close(found.cpu(), on_cpu)
    assert device.synchronous_kernels == before


def test_a_stream_sees_what_another_one_did_only_after_its_event(device: SimulatedDevice) -> None:
    x = torch.zeros(1 << 10, device=NAME)
    device.synchronize()
    main, side = torch.accelerator.current_stream(), torch.Stream(torch.device(NAME, 0))
    event, host = torch.Event(NAME), torch.ones(1 << 10).pin_memory()
    with device.paused(side):
        with _current(side):
            x.copy_(host, non_blocking=True)
            event.record(side)
        assert not event.query()
        before = x * 2
        main.synchronize()
        main.wait_event(event)
        after = x * 2
    assert bool((before.cpu() == 0).all())
    assert bool((after.cpu() == 2).all())


@contextlib.contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def test_memory_is_poisoned_when_it_has_a_new_owner(device: SimulatedDevice) -> None:
    x = torch.zeros(1 << 14, device=NAME)
    address = x.data_ptr()
    del x
    again = torch.empty(1 << 14, device=NAME)
    assert again.data_ptr() == address
    assert bool(again.cpu().isnan().all())


def test_memory_that_another_stream_uses_waits_for_it(device: SimulatedDevice) -> None:
    side = torch.Stream(torch.device(NAME, 0))
    x = torch.zeros(1 << 14, device=NAME)
    address = x.data_ptr()
    with device.paused(side):
        with _current(side):
            x.add_(1)
        x.record_stream(side)
        del x
        assert torch.empty(1 << 14, device=NAME).data_ptr() != address
    device.synchronize()
    assert address in {torch.empty(1 << 14, device=NAME).data_ptr(), torch.empty(1 << 14, device=NAME).data_ptr()}


def test_a_limit_of_memory_flushes_before_it_raises(device: SimulatedDevice) -> None:
    torch.accelerator.empty_cache()
    used = torch.accelerator.memory_reserved()
    device.limit(used + (3 << 20))
    first = torch.empty(2 << 20, dtype=torch.uint8, device=NAME)
    del first
    flushes = device.flushes
    second = torch.empty(3 << 20, dtype=torch.uint8, device=NAME)
    assert device.flushes == flushes + 1
    with pytest.raises(torch.OutOfMemoryError, match="simulated device: out of memory"):
        torch.empty(2 << 20, dtype=torch.uint8, device=NAME)
    del second


def test_virtual_time_is_that_of_the_model(device: SimulatedDevice) -> None:
    device.synchronize()
    device.model(to_device_bytes_per_s=1e9, latency_s=0)
    host, stream = torch.ones(1 << 20, dtype=torch.uint8).pin_memory(), torch.accelerator.current_stream()
    on_device = torch.empty(1 << 20, dtype=torch.uint8, device=NAME)
    begin, end = (torch.Event(NAME, enable_timing=True) for _ in range(2))
    begin.record(stream)
    on_device.copy_(host, non_blocking=True)
    end.record(stream)
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(1e3 * (1 << 20) / 1e9)


def test_a_matrix_product_takes_its_operations(device: SimulatedDevice) -> None:
    device.model(flops=1e9, memory_bytes_per_s=1e15, latency_s=0)
    layer, x = nn.Linear(64, 32).to(NAME), torch.ones(2, 8, 64, device=NAME, requires_grad=True)
    for what, products in ((lambda: layer(x), 1), (lambda: layer(x).sum().backward(), 3)):
        device.synchronize()
        before_s = device.clock_s
        what()
        device.synchronize()
        assert device.clock_s - before_s == pytest.approx(products * 2 * 16 * 64 * 32 / 1e9, rel=1e-3)


def test_an_error_of_a_kernel_is_raised_by_the_next_synchronization(device: SimulatedDevice) -> None:
    logits, target = torch.zeros(2, 3, device=NAME), torch.tensor([0, 7], device=NAME)
    nn.functional.nll_loss(logits, target)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        device.synchronize()


# -- the library on it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["host", "nvme", "tiered"])
def test_gradients_have_the_same_bits(device: SimulatedDevice, tmp_path: Path, target: str) -> None:
    assert all(_is_right(device, tmp_path, seed, target=target) for seed in range(6))


def test_two_devices_at_once(device: SimulatedDevice, tmp_path: Path) -> None:
    models = [_model(0), _model(1)]
    expected = [_gradients(model, x, contextlib.nullcontext()) for model, x in models]
    device.delay(LONGEST_DELAY_S, 3)
    with _offloader(tmp_path, target="host") as offloader:
        for _ in range(2):
            losses = []
            with offloader:
                for model, x in models:
                    model.zero_grad()
                    losses.append(model(x).square().sum().cpu())
            (losses[0] + losses[1]).backward()
            for (model, _), right in zip(models, expected, strict=True):
                found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
                assert _equal(found, right)
        assert offloader.statistics().host_read_bytes > 0


def test_backward_on_another_stream_than_forward(device: SimulatedDevice, tmp_path: Path) -> None:
    model, x = _model()
    expected = _gradients(model, x, contextlib.nullcontext())
    device.delay(LONGEST_DELAY_S, 5)
    with _offloader(tmp_path, target="host") as offloader:
        for _ in range(3):
            side = torch.Stream(torch.device(NAME, 0))
            model.zero_grad()
            event = torch.Event(NAME)
            event.record(torch.accelerator.current_stream())
            side.wait_event(event)
            with _current(side):
                found = _gradients(model, x, offloader)
            event.record(side)
            torch.accelerator.current_stream().wait_event(event)
            assert _equal(found, expected)


EDGES: dict[str, Callable[..., None]] = {
    "_order_after_producer": lambda *_: None,
    "_order_release_after_copy": lambda *_: None,
    "_order_after_allocation": lambda *_: None,
    "_order_use_after_fill": lambda *_: None,
}


@pytest.mark.parametrize("edge", EDGES)
def test_an_edge_that_is_taken_out_gives_wrong_gradients(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: str
) -> None:
    monkeypatch.setattr(CopyStreams, edge, EDGES[edge])
    assert not all(_is_right(device, tmp_path, seed, target="host") for seed in range(SEEDS))
