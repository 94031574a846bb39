"""The simulated accelerator is a PyTorch device: its streams, events, memory and clocks behave like a real device's.

The library's behaviour on it is in test_ordering.py, and in each test with the fixture ``device``.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers import accelerator as accelerators
from tests.harness import WAIT_S, on_stream, wait_until

pytestmark = pytest.mark.simulated


def test_kernels_run_late_and_in_order(device: SimulatedDevice) -> None:
    before = device.synchronous_kernels
    device.delay(0.002, 1)
    model, x = nn.Sequential(*[nn.Linear(64, 64), nn.Tanh()] * 3).to(NAME), torch.ones(64, 64, device=NAME)
    found = model(x).square().sum()
    on_cpu = model.to("cpu")(x.cpu()).square().sum()
    torch.testing.assert_close(found.cpu(), on_cpu)
    assert device.synchronous_kernels == before


def test_an_access_to_memory_with_another_owner_is_counted(device: SimulatedDevice) -> None:
    side = torch.Stream(torch.device(NAME, 0))
    x = torch.zeros(1 << 10, device=NAME)
    device.synchronize()
    device.lazy(side)
    with on_stream(side, ordered=False):
        x.add_(1)
    del x
    again = torch.zeros(1 << 10, device=NAME)
    torch.accelerator.current_stream().synchronize()
    assert device.take_violations() == 0
    side.synchronize()
    assert device.take_violations() > 0
    assert bool(again.cpu().any())


def test_memory_is_poisoned_when_it_has_a_new_owner(device: SimulatedDevice) -> None:
    x = torch.zeros(1 << 14, device=NAME)
    address = x.data_ptr()
    del x
    again = torch.empty(1 << 14, device=NAME)
    assert again.data_ptr() == address
    assert bool(again.cpu().isnan().all())


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


def test_a_wait_for_the_device_ends_though_another_thread_gives_it_work(device: SimulatedDevice) -> None:
    """CUDA also waits for the device when it unregisters memory: for the work that is enqueued by then."""
    stream, accelerator = torch.accelerator.current_stream(), SimulatedAccelerator()
    x = torch.zeros(8, device=NAME)
    device.synchronize()
    device.lazy(stream)
    device.sleep(0.2)
    before = device.calls(0)
    waiter = threading.Thread(target=accelerator.unpin, args=[0], daemon=True)
    waiter.start()
    wait_until(lambda: device.calls(0) > before)
    x.add_(1)  # without a wait a lazy stream does not run it
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    assert not stream.query()


def test_an_error_of_a_kernel_is_raised_by_the_next_synchronization(device: SimulatedDevice) -> None:
    logits, target = torch.zeros(2, 3, device=NAME), torch.tensor([0, 7], device=NAME)
    nn.functional.nll_loss(logits, target)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        device.synchronize()


def test_a_seed_counts_whatever_the_default_device_is(device: SimulatedDevice) -> None:
    def draw(default: str) -> list[float]:
        with torch.device(default):
            torch.manual_seed(1234)
        torch.accelerator.current_stream().synchronize()
        found: list[float] = torch.randn(3, device=NAME).cpu().tolist()
        return found

    expected = draw("cpu")
    device.lazy(torch.accelerator.current_stream())  # no kernel runs before a wait for it, so none fills a seed either
    assert draw(NAME) == expected
    with torch.device(NAME):
        state = torch.sim.get_rng_state()  # type: ignore[attr-defined]
    assert state.device.type == "cpu"
    drawn = torch.randn(3, device=NAME).cpu()
    torch.sim.set_rng_state(state.to(NAME))  # type: ignore[attr-defined]
    assert torch.equal(torch.randn(3, device=NAME).cpu(), drawn)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_a_strided_nested_tensor_is_an_error_and_not_the_end_of_the_process(device: SimulatedDevice) -> None:
    parts = [torch.randn(rows, 4, device=NAME, requires_grad=True) for rows in (3, 2)]
    nested = torch.nested.as_nested_tensor(parts)
    assert nested.is_nested
    assert nested.device.type == NAME
    with pytest.raises(NotImplementedError, match="NestedTensor"):
        nested * 2


def test_the_functions_of_c_come_from_the_installed_pytorch(device: SimulatedDevice) -> None:
    """Without them the library calls `torch.accelerator`'s own, which take the same arguments, and more time."""
    assert accelerators._current_index is torch._C._accelerator_getDeviceIndex
    assert accelerators._current_stream is torch._C._accelerator_getStream
    assert accelerators._set_stream is torch._C._accelerator_setStream
    driver, other = SimulatedAccelerator(), torch.Stream(torch.device(NAME, 1))
    with torch.accelerator.device_index(1), on_stream(other):
        assert driver.current_index() == torch.accelerator.current_device_index() == 1
        assert driver.current_stream(1) == torch.accelerator.current_stream(1) == other
        assert driver.current_stream(0) == torch.accelerator.current_stream(0) != other
        driver.synchronize(driver.record(driver.current_stream(0)))
        assert driver.current_index() == 1, "the device of an event is current for that call alone"
