"""Records that a plan keeps: handed out as they lie, checked and counted like all others, and passed by prefetch."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import OffloadConfig, Offloader, Plan
from actoffload.errors import SavedTensorModifiedError
from actoffload.handles import Handle, Stayed
from actoffload.identity import StorageRef
from actoffload.planner import PlanEntry
from actoffload.record import State
from actoffload.testing.fakedevice import Adversary, FakeDevice
from tests.harness import MakeOffloader, assert_empty, no_garbage_collection, same_bits

COUNT = 8
ELEMENTS = 4096
BYTES = 4 * ELEMENTS


def _plan(*moving: int, count: int = COUNT, prefetch_bytes: int | None = None) -> Plan:
    """All of ``count`` storages stay but those of these numbers."""
    entries = [
        PlanEntry(index=index, nbytes=BYTES, action="offload" if index in moving else "keep") for index in range(count)
    ]
    return Plan(entries=tuple(entries), prefetch_bytes=prefetch_bytes)


def _input() -> Tensor:
    return torch.linspace(0, 1, ELEMENTS, requires_grad=True)


def _sines(x: Tensor, seen: Any = None) -> Tensor:
    """A chain that saves ``COUNT`` storages; ``seen`` is called as backward comes to each."""
    h = x * 1.0
    for number in range(COUNT):
        h = h.sin()
        if seen is not None and h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda grads, number=number: seen(number))
    return h


def _gradient(offloader: Offloader, x: Tensor, between: Any = None) -> Tensor:
    with offloader:
        out = _sines(x)
    if between is not None:
        between()
    return torch.autograd.grad(out.sum(), x)[0]


def test_what_stays_is_handed_out_as_it_lies(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=_plan())
    x = _input()
    with offloader:
        h = x * 1.0
        out = h.sin()
    assert out.grad_fn._saved_self.data_ptr() == h.data_ptr()  # type: ignore[union-attr]
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert same_bits(gradient, torch.cos(x.detach()))
    assert offloader.statistics().kept_bytes == {"policy": BYTES}
    assert offloader.statistics().live_records == 0


def test_only_what_stays_for_good_is_handed_out_that_way(make_offloader: MakeOffloader) -> None:
    """Also where it was saved as a view, or twice; never what moves, nor what a lazy conjugation would turn."""
    offloader = make_offloader(policy=_plan(1, count=3), engine="memory")
    with offloader:
        x = _input()
        first, second = x * 1.0, x * 2.0
        stays = [offloader._pack(first), offloader._pack(first.view(2, -1))]
        moves = offloader._pack(second)
        turned = offloader._pack(torch.zeros(ELEMENTS // 2, dtype=torch.complex64).conj())
    assert [type(handle) for handle in (*stays, moves, turned)] == [Stayed, Stayed, Handle, Handle]
    assert stays[1].unpack().shape == (2, ELEMENTS // 2)
    assert stays[0].unpack().data_ptr() == first.data_ptr()
    assert turned.unpack().is_conj()
    del stays, moves, turned, first, second
    gc.collect()
    assert_empty(offloader)


@pytest.mark.parametrize("first_out", [0, 1])
def test_its_memory_goes_with_the_last_handle(first_out: int, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=_plan(count=1))
    with offloader, no_garbage_collection():
        saved = _input() * 1.0
        handles = [offloader._pack(saved), offloader._pack(saved)]
        memory = StorageRef(saved.untyped_storage())
        del saved
        del handles[first_out]
        assert not memory.gone()
        assert handles[0].unpack().shape == (ELEMENTS,)
        handles.clear()
        assert memory.gone()
    assert_empty(offloader)


def test_who_empties_what_was_handed_out_may_ask_again(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=_plan(count=1))
    with offloader:
        saved = _input() * 1.0
        handle = offloader._pack(saved)
    handle.unpack().data = torch.empty(0)
    assert same_bits(handle.unpack(), saved)
    handle.unpack().mul_(2)
    with pytest.raises(SavedTensorModifiedError):
        handle.unpack()


def test_a_change_in_place_is_an_error(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=_plan())
    x = _input()
    with offloader:
        h = x * 1.0
        out = h.sin()
    h.mul_(2)
    with pytest.raises(
        SavedTensorModifiedError, match=r"float32 tensor \[4096\].* is at version 1; expected version 0"
    ):
        torch.autograd.grad(out.sum(), x)
    del out
    assert offloader.statistics().live_records == 0


@pytest.mark.parametrize("budget", [None, (COUNT + 2) * BYTES], ids=["no budget", "budget"])
@pytest.mark.parametrize("moving", [(), (0,), (0, 3, 4), tuple(range(COUNT))])
def test_backward_twice(moving: tuple[int, ...], budget: int | None, make_offloader: MakeOffloader) -> None:
    x = _input()
    (expected,) = torch.autograd.grad(_sines(x).sum(), x)
    plan = _plan(*moving, prefetch_bytes=2 * BYTES)
    offloader = make_offloader(policy=plan, engine="memory", device_budget=budget)
    for _ in range(2):
        with offloader:
            out = _sines(x)
        offloader.synchronize()
        for retain in (True, False):
            (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=retain)
            assert same_bits(gradient, expected)
        del out
        assert_empty(offloader)
    assert (offloader.statistics().nvme_read_bytes > 0) == bool(moving)


def test_what_moved_is_fetched_while_backward_passes_what_stayed(make_offloader: MakeOffloader) -> None:
    """The first storage is on its way when backward is three before it, though nothing else had to be brought."""
    offloader = make_offloader(policy=_plan(0, prefetch_bytes=3 * BYTES), engine="memory")
    states: dict[int, State] = {}
    x = _input()
    with offloader:
        tape = offloader._stack()[-1].tape

        def seen(number: int) -> None:
            record = tape.records[0]
            assert record is not None
            states[number] = record.state

        out = _sines(x, seen)
    offloader.synchronize()
    torch.autograd.grad(out.sum(), x)
    away = [number for number, state in states.items() if state is State.SPILLED]
    assert away, "it was away as backward began"
    assert min(away) >= 2, f"nobody looked ahead: still away at {sorted(away)}"


@pytest.mark.parametrize("adversary", ["lazy", "eager", "random"])
def test_staying_and_moving_side_by_side_on_a_device(adversary: Adversary) -> None:
    """No copy touches what stays, nor memory that has a new owner."""
    x = _input()
    (expected,) = torch.autograd.grad(_sines(x).sum(), x)
    device = FakeDevice(adversary, seed=0)
    config = OffloadConfig(target="host", min_bytes=0, policy=_plan(0, 2, 5), debug=True)
    offloader = Offloader(config, accelerator=device)
    try:
        for _ in range(3):
            with device:
                with offloader:
                    out = _sines(x)
                (gradient,) = torch.autograd.grad(out.sum(), x)
            del out
            assert same_bits(gradient, expected)
        device.finish()
        assert not device.violations
        statistics = offloader.statistics()
        assert statistics.kept_bytes == {"policy": 3 * 5 * BYTES}
        assert statistics.host_written_bytes > 0
        assert statistics.live_records == 0
    finally:
        offloader.close()


def test_the_order_is_learned_of_what_stays_as_well(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=_plan(2, 5), engine="memory")
    x = _input()
    _gradient(offloader, x, offloader.synchronize)
    (order,) = offloader._prefetch.orders._orders.values()
    assert order == tuple(reversed(range(COUNT)))
