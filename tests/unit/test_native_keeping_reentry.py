"""What runs while C keeps a tensor (the collector, a mode, a signal) may change all that it was looking at."""

from __future__ import annotations

import gc
import signal
import time
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from actoffload import Offloader
from tests.harness import MakeOffloader, assert_empty, same_bits
from tests.unit.keeping import ELEMENTS, KEPT_IN_C, activation, kept_in_c, plan_of

pytestmark = KEPT_IN_C


class Cycle:
    """Garbage, for the collector alone, that holds a handle."""

    def __init__(self, handle: Any) -> None:
        self.itself = self
        self.handle = handle


@pytest.mark.parametrize("more", range(12))
def test_the_collector_lets_go_of_the_record_that_is_looked_at(more: int, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=1, engine="memory")
    saved = [activation(number) for number in range(2)]
    thresholds = gc.get_threshold()
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        first = pack(saved[0])
        gc.collect()
        gc.disable()
        try:
            cycle = Cycle(pack(saved[1]))
            assert kept_in_c(cycle.handle)
            record = cycle.handle.record
            wears_out_the_free_lists = [(number,) for number in range(3000)]
            del cycle
            gc.set_threshold(gc.get_count()[0] + more, 10**9, 10**9)
            gc.enable()
            again = pack(saved[1])
        finally:
            gc.enable()
            gc.set_threshold(*thresholds)
    assert same_bits(again.unpack(), saved[1].detach())
    del first, again, record, wears_out_the_free_lists
    gc.collect()
    assert_empty(offloader)


def test_a_mode_saves_and_drops_while_a_tensor_is_kept(make_offloader: MakeOffloader) -> None:
    """The tape that C had looked at is gone, and another one has begun."""
    offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=1, engine="memory")
    saved = [activation(number) for number in range(4)]
    held: list[Any] = []

    class Mode(TorchFunctionMode):
        done = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.detach and not self.done:
                self.done = True
                held.clear()
                held.append(pack(saved[3]))
            return func(*args, **(kwargs or {}))

    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        held += [pack(saved[0]), pack(saved[1])]
        with Mode():
            handle = pack(saved[2])
        assert handle.record.tape is held[0].record.tape is offloader._stack()[-1].tape
    assert same_bits(handle.unpack(), saved[2].detach())
    del handle
    held.clear()
    assert_empty(offloader)


def test_what_is_lent_and_emptied_is_no_loss_to_others(make_offloader: MakeOffloader) -> None:
    """A handle of Python's on a record of C's finds its bytes, whatever the borrower has made of the alias."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, z: Tensor, empties: bool) -> Tensor:
            ctx.save_for_backward(z)
            ctx.empties = empties
            return (x * z).real

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (z,) = ctx.saved_tensors
            result = grads[0] * z.real
            if ctx.empties:
                z.data = torch.zeros(0, dtype=z.dtype)
            return result, None, None

    size = 16
    with torch.no_grad():
        z = torch.randn(size, size, dtype=torch.complex64) * 1.0
    x = torch.rand(size, size, requires_grad=True)
    (expected,) = torch.autograd.grad(Product.apply(x, z.conj().mT, False).sum(), x)
    offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=1, engine="memory")
    offloader._placement.keep_all = True
    with offloader:
        other = Product.apply((x * 1.0).sin(), z, True)
        out = Product.apply(x, z.conj().mT, False)
        (record,) = (r for r in offloader._stack()[-1].tape.records if r is not None and r.handles == 2)
        assert kept_in_c(record)
    del record, z
    other.sum().backward()
    reuses = [torch.full((size, size), 7.0, dtype=torch.complex64) for _ in range(8)]
    (found,) = torch.autograd.grad(out.sum(), x)
    assert same_bits(found, expected)
    del other, out, reuses
    assert_empty(offloader)


def test_an_interrupt_in_a_finalizer_leaves_the_lock_free(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=1, engine="memory")
    saved = activation(0)

    class Interrupt(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    ends = time.monotonic() + 1
    interrupts = 0
    try:
        while time.monotonic() < ends:
            offloader._dropped.clear()
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
                for _ in range(20):
                    offloader._dropped.append((Taken(), 0))  # type: ignore[arg-type]
                    offloader._drain_if_free()
                time.sleep(0.001)
            except Interrupt:
                interrupts += 1
            assert not offloader.core.lock.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    offloader._dropped.clear()
    assert interrupts
    with offloader:
        held = offloader._stack()[-1].hooks.pack_hook(saved)
    del held
    assert_empty(offloader)


class Taken:
    """Stands for a record that has other handles."""

    handles, round, waiting, kind = 5, 0, 5, "cpu"


def test_there_is_one_lane_before_any_thread_enters(make_offloader: MakeOffloader) -> None:
    """Made at the first entry, two threads that enter at once would have two, and one would never be closed."""
    offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=1, engine="memory")
    lane = offloader._lane
    assert lane is not None
    with offloader:
        assert offloader._lane is lane


def test_where_no_note_can_be_taken_nothing_is_left(native: Any, make_offloader: MakeOffloader) -> None:
    class Full(deque[Any]):
        def append(self, note: Any) -> None:
            raise MemoryError("full")

    offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=1, engine="memory")
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        first = pack(activation(0))
        tape, known = offloader._stack()[-1].tape, dict(offloader._identities.entries)
        notes, offloader.core.accounts.notes = offloader.core.accounts.notes, Full()
        offloader._make_lane(native)
        pack = offloader._hooks()[0]
        pack.tape = tape  # type: ignore[attr-defined]
        with pytest.raises(MemoryError, match="full"):
            pack(activation(1))
        offloader.core.accounts.notes = notes
    assert offloader._identities.entries == known
    assert (tape.live, tape.records[1:], len(tape.decisions)) == (1, [None], 1)
    del first
    assert_empty(offloader)


def test_what_is_closed_before_it_was_entered_keeps_nothing_in_c(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=1, engine="memory")
    offloader.after_fork_in_child()
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        held = [pack(activation(number)) for number in range(3)]
    assert not any(map(kept_in_c, held))
    assert offloader.statistics().kept_bytes == {"forked process": 3 * 4 * ELEMENTS}


def test_the_plan_is_of_the_forward_that_saved_last(make_offloader: MakeOffloader, either: str) -> None:
    offloader: Offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=1, engine="memory")
    assert offloader.plan.entries == ()
    with offloader:
        outer = [offloader._stack()[-1].hooks.pack_hook(activation(number)) for number in range(3)]
        with offloader:
            inner = [offloader._stack()[-1].hooks.pack_hook(activation(number)) for number in range(2)]
            assert len(offloader.plan.entries) == 2
        outer.append(offloader._stack()[-1].hooks.pack_hook(activation(5)))
    assert len(offloader.plan.entries) == 4
    del outer, inner
    assert_empty(offloader)
