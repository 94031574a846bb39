"""Backward passes what C keeps: what moves is fetched meanwhile, nothing is held too long, and nothing is left."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import OffloadConfig, Offloader
from actoffload.testing.fakedevice import FakeDevice
from tests.harness import WAIT_S, MakeOffloader, assert_empty, same_bits
from tests.unit.keeping import (
    BYTES,
    ELEMENTS,
    KEPT_IN_C,
    activation,
    after_the_first,
    chain,
    kept_in_c,
    leave_a_note,
    plan_of,
    record,
)

pytestmark = KEPT_IN_C


@pytest.mark.parametrize("moving", [(), (0,), (3,), (2, 3, 7), (0, 1, 2, 3)])
@pytest.mark.parametrize("window", [0, 2 * BYTES, 100 * BYTES])
def test_what_moves_among_what_stays_is_fetched_as_in_python(
    moving: tuple[int, ...], window: int, make_offloader: MakeOffloader, either: str
) -> None:
    length = 10
    keeps = [index not in moving for index in range(length)]
    x = torch.linspace(0, 1, ELEMENTS).requires_grad_()
    (expected,) = torch.autograd.grad(chain(x * 1.0, length).sum(), x)
    offloader = make_offloader(policy=plan_of(keeps, prefetch_bytes=window), min_bytes=1, engine="memory")
    asked: list[tuple[int, bool]] = []
    bring = offloader._prefetch._bring

    def note(record: Any, early: bool) -> int | None:
        if not record.stays:
            asked.append((record.index, early and record.data is None))
        return bring(record, early)

    offloader._prefetch._bring = note  # type: ignore[method-assign]
    for _ in range(3):
        with offloader:
            out = chain(x * 1.0, length)
        offloader.synchronize()
        (found,) = torch.autograd.grad(out.sum(), x)
        assert same_bits(found, expected)
        del out
        assert_empty(offloader)
    fetched = [index for index, early in asked if not early]
    assert fetched == sorted(moving, reverse=True) * 3, "each was fetched once, in backward's order"


def test_a_backward_that_comes_next_is_begun_while_a_forward_that_stays_ends(
    make_offloader: MakeOffloader, either: str
) -> None:
    """Two forwards, then two backwards: what the first one wants is fetched before the second forward has ended."""
    x = torch.linspace(0, 1, ELEMENTS).requires_grad_()
    plan = plan_of([True] * 6 + [False] + [True], prefetch_bytes=2 * BYTES)
    offloader = make_offloader(policy=plan, min_bytes=1, engine="memory")
    tapes: list[Any] = []
    begun: list[tuple[int, int]] = []
    fetch = offloader._prefetch._fetch

    def note(tape: Any, nbytes: int) -> None:
        begun.append((tapes.index(tape), tapes[-1].total_bytes // BYTES))
        fetch(tape, nbytes)

    offloader._prefetch._fetch = note  # type: ignore[method-assign]
    for step in range(3):
        outs = []
        for _ in range(2):
            with offloader:
                tapes.append(offloader._stack()[-1].tape)
                outs.append(chain(x * 1.0, 8))
                if len(outs) == 2 and step:
                    assert begun, "nothing was begun while the forward ran"
            offloader.synchronize()
        if step:
            assert {index for index, _ in begun} == {0}, "it is the first one's backward that comes next"
            assert min(saved for _, saved in begun) == 6, "when the window reaches to the end of this forward"
        for out in outs:
            torch.autograd.grad(out.sum(), x)
        outs.clear()
        tapes.clear()
        begun.clear()
        del out
        assert_empty(offloader)


def test_after_one_backward_the_next_one_is_begun_where_all_of_it_stays(
    make_offloader: MakeOffloader, either: str
) -> None:
    x = torch.linspace(0, 1, ELEMENTS).requires_grad_()
    plan = plan_of([True] * 5 + [False] + [True] * 2, prefetch_bytes=100 * BYTES)
    offloader = make_offloader(policy=plan, min_bytes=1, engine="memory")
    begun: list[int] = []
    fetch = offloader._prefetch._fetch

    def note(tape: Any, nbytes: int) -> None:
        begun.append(len(tape))
        fetch(tape, nbytes)

    offloader._prefetch._fetch = note  # type: ignore[method-assign]
    for step in range(3):
        outs = []
        for length in (8, 5):  # the second one has nothing that moves
            with offloader:
                outs.append(chain(x * 1.0, length))
            offloader.synchronize()
        long, short = outs
        begun.clear()
        torch.autograd.grad(short.sum(), x)
        assert begun == ([] if step == 0 else [8] * 5), "the other one's is fetched as this one goes on"
        torch.autograd.grad(long.sum(), x)
        del outs, long, short
        assert_empty(offloader)


def test_it_stays_on_a_device_as_well() -> None:
    x = torch.linspace(0, 1, ELEMENTS).requires_grad_()
    (expected,) = torch.autograd.grad(chain(x * 1.0, 8).sum(), x)
    device = FakeDevice("eager", seed=0)
    plan = plan_of([True] * 3 + [False] * 2 + [True] * 3)
    config = OffloadConfig(target="host", min_bytes=0, policy=plan, debug=True)
    offloader = Offloader(config, accelerator=device)
    try:
        for _ in range(3):
            with device:
                with offloader:
                    out = chain(x * 1.0, 8)
                    stays = [record for record in offloader._stack()[-1].tape.records if record and record.stays]
                    assert sum(map(kept_in_c, stays)) >= 3
                    del stays
                (found,) = torch.autograd.grad(out.sum(), x)
            del out
            assert same_bits(found, expected)
        device.finish()
        assert not device.violations
        assert offloader.statistics().live_records == 0
    finally:
        offloader.close()


def test_a_burst_is_counted(make_offloader: MakeOffloader, either: str) -> None:
    class Many(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(*(x * number for number in range(12)))
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            assert len(ctx.saved_tensors) == 12
            return grads[0]

    offloader = make_offloader(policy=plan_of([True] * 12), min_bytes=1, engine="memory")
    with offloader:
        out = Many.apply(activation(0))
        bursts = offloader._stack()[-1].tape.bursts
        assert (bursts.node_bytes, bursts.largest_count) == (12 * BYTES, 12)
    out.sum().backward()
    del out
    assert_empty(offloader)


def note_calls(offloader: Offloader, name: str) -> list[Any]:
    """What a method of the offloader is called with from now on."""
    calls: list[Any] = []
    real = getattr(offloader, name)

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    setattr(offloader, name, call)
    return calls


@pytest.mark.parametrize(
    "before",
    [
        record,
        leave_a_note,
        lambda offloader: offloader._lane.close(),
        lambda offloader: offloader.core.to_warn.append("something is wrong"),
        lambda offloader: offloader.core.accounts.recomputed(1),
        lambda offloader: None,
    ],
    ids=["recording", "a note", "closed", "a warning", "a recomputed block", "nothing"],
)
def test_python_passes_where_something_is_out_of_the_ordinary(
    before: Callable[[Offloader], Any], request: pytest.FixtureRequest, make_offloader: MakeOffloader
) -> None:
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    with offloader:
        first, second = after_the_first(offloader)
        third = offloader._stack()[-1].hooks.pack_hook(activation(2))
    third.unpack()  # backward has begun
    calls = note_calls(offloader, "passed")
    before(offloader)
    if offloader.core.to_warn:
        with pytest.raises(RuntimeWarning, match="something is wrong"):
            second.unpack()
    else:
        assert same_bits(second.unpack(), activation(1).detach())
    assert bool(calls) == ("nothing" not in request.node.name)
    offloader.recorder.active = False
    del first, second, third
    calls.clear()
    assert_empty(offloader)


@pytest.mark.parametrize("why", ["recording", "somebody waits", "it is the last one", "nothing"])
def test_python_counts_out_where_something_is_out_of_the_ordinary(why: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    with offloader:
        first, second = after_the_first(offloader)
    calls = note_calls(offloader, "drop")
    woken: list[bool] = []
    if why == "recording":
        record(offloader)
    elif why == "it is the last one":
        del first
        calls.clear()
    elif why == "somebody waits":
        waits = threading.Event()

        def wait() -> None:
            with offloader.core.changed:
                waits.set()
                woken.append(offloader.core.changed.wait(WAIT_S))

        thread = threading.Thread(target=wait)
        thread.start()
        assert waits.wait(WAIT_S)
        with offloader.core.changed:  # it waits: it has let go of the lock
            pass
    del second
    if why == "somebody waits":
        thread.join(WAIT_S)
        assert woken == [True]
    assert bool(calls) == (why != "nothing")
    offloader.recorder.active = False
    calls.clear()
    first = None
    assert_empty(offloader)


def test_backward_waits_while_somebody_else_is_inside(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    with offloader:
        first, second = after_the_first(offloader)
        third = offloader._stack()[-1].hooks.pack_hook(activation(2))
    third.unpack()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with offloader.core.lock:
            inside.set()
            assert leave.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(WAIT_S)
    threading.Timer(0.1, leave.set).start()
    second.unpack()
    assert leave.is_set(), "it did not wait"
    thread.join(WAIT_S)
    del first, second, third
    assert_empty(offloader)


def test_nothing_is_held_or_given_away_twice(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 200), min_bytes=1, engine="memory")
    saved = [activation(number) for number in range(100)]
    shared = [None, True, False, offloader, offloader._lane, saved[3], offloader.core.accounts]
    for turn in range(4):
        if turn == 2:
            before = [sys.getrefcount(one) for one in shared]
        with offloader:
            pack = offloader._stack()[-1].hooks.pack_hook
            handles = [pack(tensor) for tensor in saved]
            handles += [pack(tensor.view(2, -1)) for tensor in saved]
            assert sum(map(kept_in_c, handles)) >= 198
        for handle in handles:
            assert handle.unpack() is not None
        handles.clear()
        del handle
        offloader.statistics()
        assert_empty(offloader)
    assert [sys.getrefcount(one) for one in shared] == pytest.approx(before, abs=8)


def test_a_handle_that_outlives_the_offloader_s_end_is_counted_out(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    with offloader:
        first, second = after_the_first(offloader)
        third = offloader._stack()[-1].hooks.pack_hook(activation(2))
    assert kept_in_c(third)
    offloader.close()
    assert same_bits(second.unpack(), activation(1).detach())
    assert offloader.statistics().live_records == 3
    del first, second
    assert offloader.statistics().live_records == 1
    del third
    assert offloader.statistics().live_records == 0
    assert offloader.core.inert, "the last one has shut it"


def test_the_offloader_goes_when_nothing_holds_it(make_offloader: MakeOffloader) -> None:
    plan = plan_of([True] * 4)
    config = OffloadConfig(target="nvme", engine="memory", path="/tmp", devices="cpu", min_bytes=1, policy=plan)
    offloader = Offloader(config)
    with offloader:
        held = after_the_first(offloader)
    gone = weakref.ref(offloader)
    del offloader
    gc.collect()
    assert gone() is not None, "its handles need it"
    del held
    gc.collect()
    assert gone() is None


def seen_by_the_collector() -> int:
    """Objects; the storage that PyTorch makes for whoever asks for it, and keeps, is no handle's."""
    gc.collect()
    return sum(type(one) is not torch.UntypedStorage for one in gc.get_objects())


def test_the_collector_passes_by_what_stays(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 1000), min_bytes=1, engine="memory")
    saved = [activation(number, 16) for number in range(1000)]
    offloader._placement.follow(plan_of([True] * 1000, nbytes=64))
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        before = seen_by_the_collector()
        held = [pack(tensor) for tensor in saved]
        assert seen_by_the_collector() < before + 100
    assert sum(map(kept_in_c, held)) == 999
    alias = held[5].alias
    assert gc.is_tracked(alias)
    del held, alias, pack
    assert_empty(offloader)


def test_what_python_may_not_do_with_a_record_that_stays_is_an_error(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    with offloader:
        first, second = after_the_first(offloader)
    found = second.record
    for name in ("extent", "transfer", "slot", "outgoing", "incoming", "io", "error", "weak_data"):
        setattr(found, name, None)
        assert getattr(found, name) is None
        with pytest.raises(AttributeError, match="no copy elsewhere"):
            setattr(found, name, 1)
    with pytest.raises(AttributeError, match="never brought"):
        found.data = torch.empty(0).untyped_storage()
    with pytest.raises(RuntimeError, match="no other state"):
        found.to("spilled")
    assert found.stays
    assert found.near
    assert found.state.value == "resident"
    assert found.data.data_ptr() == second.alias.data_ptr()
    assert found.device == torch.device("cpu")
    del second
    assert found.data is None, "its memory goes with the last handle, whoever looks at the record"
    assert found.state.value == "released"
    with pytest.raises(TypeError):
        type(found)()
    del first, found
    assert_empty(offloader)
