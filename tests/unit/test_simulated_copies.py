"""When copies on the simulated accelerator are waited for, and when not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload.memory import host_pool
from actoffload.memory.host_pool import HostPool
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from tests.harness import assert_same_gradients, gradients, on_stream, pools_of, train_step, wait_until
from tests.unit.simulated_programs import RECORD_BYTES, SIZE, _is_right, _model, _offloader

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("target", ["host", "nvme"])
def test_gradients_have_the_same_bits_where_copies_go_together(
    device: SimulatedDevice, tmp_path: Path, target: str
) -> None:
    sizes = {"pending_bytes": 8 * RECORD_BYTES, "prefetch_bytes": 8 * RECORD_BYTES}
    assert all(_is_right(device, tmp_path, seed, target=target, **sizes) for seed in range(3))


def test_page_locked_memory_follows_the_need(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool gives back memory beyond the recent need, and copies under way meanwhile stay right."""
    monkeypatch.setattr(host_pool, "TRIM_STEPS", 2)
    monkeypatch.setitem(HostPool.__init__.__kwdefaults__, "slab_bytes", RECORD_BYTES)  # type: ignore[arg-type]
    model, x = _model(blocks=12)
    device.delay(2e-3, seed=1)
    with _offloader(tmp_path, target="host", host_budget="64 MiB") as offloader:
        (pool,) = pools_of(offloader)

        def steps(model: nn.Module, count: int) -> None:
            expected = train_step(model, x)
            for _ in range(count):
                assert_same_gradients(train_step(model, x, offloader), expected)

        steps(model, 3)
        most_bytes = pool.slabs.mapped_bytes
        steps(model[:1], 12)
        offloader.synchronize()
        pool.reclaim()
        assert pool.slabs.mapped_bytes <= 0.6 * most_bytes
    assert device.take_violations() == 0


def test_backward_waits_for_no_copy_out_of_a_tensor_on_the_device(device: SimulatedDevice, tmp_path: Path) -> None:
    """It reaches the last gradient while no copy can end. As it ends, the compute stream waits to release memory."""
    accelerator = SimulatedAccelerator()
    model, x = _model()
    expected = train_step(model, x)
    device.synchronize()
    last = torch.Event(NAME)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: last.record())
    options: dict[str, Any] = {"target": "host", "pending_bytes": None, "prefetch_bytes": None}
    with _offloader(tmp_path, accelerator=accelerator, **options) as offloader:
        with device.paused(accelerator.side_stream(0, "out")):
            with offloader:
                loss = model(x).square().sum()
            loss.backward()
            wait_until(last.query, "a copy is waited for")
        assert_same_gradients(gradients(model), expected)
        statistics = offloader.statistics()
    assert statistics.forwarded_bytes > 0
    assert statistics.moved_bytes >= statistics.forwarded_bytes


def test_side_streams_are_made_once_for_each_device() -> None:
    one, other = SimulatedAccelerator(), SimulatedAccelerator()
    streams = {accelerator.side_stream(index, "in") for accelerator in (one, other) for index in range(2)}
    assert len(streams) == 2


def test_memory_of_a_stream_that_was_never_seen_is_not_its_own_before_the_saving_stream_is_done(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    main, other = torch.accelerator.current_stream(), torch.Stream(torch.device(NAME, 0))
    weight = torch.ones(SIZE, SIZE, device=NAME, requires_grad=True)
    with on_stream(other, ordered=False):
        saved = torch.full((SIZE, SIZE), 7.0, device=NAME)
    main.wait_stream(other)
    device.synchronize()
    address = saved.data_ptr()
    with _offloader(tmp_path, target="host", pending_bytes=1) as offloader:
        with device.paused(main):
            with offloader:
                out = weight * saved
            del saved
            with on_stream(other, ordered=False):
                again = [torch.full((SIZE, SIZE), 9.0, device=NAME) for _ in range(3)]
            other.synchronize()
        assert address not in {tensor.data_ptr() for tensor in again}
        assert bool((out.detach().cpu() == 7.0).all())
        out.sum().backward()
        assert weight.grad is not None
        assert bool((weight.grad.cpu() == 7.0).all())


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


@pytest.mark.parametrize("pending_bytes", [None, 2 * RECORD_BYTES])
def test_a_storage_freed_by_its_owner_before_its_copy_begins_stays(
    device: SimulatedDevice, tmp_path: Path, pending_bytes: int | None
) -> None:
    """Copies may wait for earlier ones to end; when a copy begins, its source must still have memory."""
    device.lazy(SimulatedAccelerator().side_stream(0, "out"))
    x = torch.ones(SIZE, SIZE, device=NAME, requires_grad=True)
    factors = []
    options: dict[str, Any] = {"target": "host", "host_budget": "64MiB", "pending_bytes": pending_bytes}
    with _offloader(tmp_path, **options) as offloader:
        with offloader:
            y = x
            for value in range(2, 6):
                factors.append(torch.full((SIZE, SIZE), float(value), device=NAME))
                y = _Saves.apply(y, factors[-1])
                factors[-1].untyped_storage().resize_(0)
        for value, factor in enumerate(factors, start=2):
            factor.untyped_storage().resize_(factor.nbytes)
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(factor):
                factor.fill_(float(value))
        y.sum().backward()
        assert offloader.statistics().kept_bytes["resized"] > 0
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), torch.full((SIZE, SIZE), 120.0))
    device.reset()
    device.take_violations()  # of cancelled copies
