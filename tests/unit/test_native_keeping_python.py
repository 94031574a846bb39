"""Where C keeps what a plan keeps, and where something is out of the ordinary and Python has to."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actoffload import OffloadConfig, Offloader, Plan
from actoffload.errors import SavedTensorModifiedError
from actoffload.policy import Decision, TensorFacts
from actoffload.testing.fakedevice import FakeDevice
from tests.harness import WAIT_S, MakeOffloader, assert_empty, same_bits
from tests.unit.keeping import (
    BYTES,
    ELEMENTS,
    KEPT_IN_C,
    activation,
    after_the_first,
    kept_in_c,
    leave_a_note,
    plan_of,
    record,
)

pytestmark = KEPT_IN_C


class KeepsAll:
    def decide(self, facts: TensorFacts) -> Decision:
        return Decision.KEEP


class AlsoAPlan(Plan):
    """Its own `decide` has a say."""


@pytest.mark.parametrize(
    "options",
    [
        {"policy": KeepsAll()},
        {"policy": AlsoAPlan(entries=plan_of([True] * 3).entries)},
        {"device_budget": "1GiB"},
        {"trace": lambda event: None},
        {"exclude": ["never"]},
    ],
    ids=["policy", "subclass", "budget", "trace", "patterns"],
)
def test_python_keeps_where_more_has_to_be_done(options: dict[str, Any], make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(**{"policy": plan_of([True] * 3), "min_bytes": 1, "engine": "memory", **options})
    model = torch.nn.Linear(1, 1)
    if "exclude" in options:
        offloader.use(model)
    with offloader:
        first, second = after_the_first(offloader)
        assert not kept_in_c(second)
    assert offloader.statistics().kept_bytes == {"policy": 2 * BYTES}
    del first, second
    assert_empty(offloader)


@pytest.mark.parametrize(
    "before",
    [
        record,
        leave_a_note,
        lambda offloader: offloader._placement.follow(None),
        lambda offloader: offloader._placement.follow(plan_of([True, False])),
        lambda offloader: offloader._placement.follow(plan_of([True])),
        lambda offloader: offloader._placement.follow(plan_of([True, True], nbytes=2 * BYTES)),
        lambda offloader: offloader._lane.close(),
        lambda offloader: setattr(offloader._stack()[-1].tape, "in_backward", True),
    ],
    ids=["recording", "a note", "no plan", "moves", "too short", "another size", "closed", "backward has begun"],
)
def test_python_is_asked_where_something_is_out_of_the_ordinary(
    before: Callable[[Offloader], Any], make_offloader: MakeOffloader
) -> None:
    offloader = make_offloader(policy=plan_of([True] * 3), min_bytes=1, engine="memory")
    with offloader:
        first, second = after_the_first(offloader, before)
        assert not kept_in_c(second)
    offloader.recorder.active = False
    del first, second
    assert_empty(offloader)


def test_what_is_captured_into_a_graph_is_python_s() -> None:
    device = FakeDevice("eager", seed=0)
    config = OffloadConfig(target="host", min_bytes=0, policy=plan_of([True] * 4), debug=True)
    offloader = Offloader(config, accelerator=device)
    try:
        with device:
            saved = [activation(number) for number in range(3)]
            with offloader:
                pack = offloader._stack()[-1].hooks.pack_hook
                first, second = pack(saved[0]), pack(saved[1])
                device.capturing = True
                third = pack(saved[2])
                device.capturing = False
        assert [kept_in_c(handle) for handle in (first, second)] == [False, True]
        assert offloader.statistics().kept_bytes == {"policy": 2 * BYTES, "graph capture": BYTES}
        del first, second, third
        assert offloader.statistics().live_records == 0
    finally:
        offloader.close()


def test_what_is_on_its_way_is_looked_at_on_every_occasion(make_offloader: MakeOffloader) -> None:
    """Else a storage that its owner frees while it is written, and fills again, would not be noticed."""
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    (mover,) = offloader._movers.values()
    with offloader:
        first, second = after_the_first(offloader)
        for occasion in (lambda: offloader._stack()[-1].hooks.pack_hook(activation(2)), first.unpack, second.unpack):
            mover._in_place.append(first.record)  # goes when it is seen not to be on its way
            held = occasion()
            assert not mover._in_place
    assert kept_in_c(second)
    del first, second, held, occasion
    assert_empty(offloader)


def test_while_somebody_else_is_inside_python_waits_for_the_lock(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 9), min_bytes=1, engine="memory")
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with offloader.core.lock:
            inside.set()
            assert leave.wait(WAIT_S)

    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        first = pack(activation(0))
        for step in ("save", "unpack", "drop"):
            if step != "save":
                held = pack(activation(1))
                assert kept_in_c(held)
            thread = threading.Thread(target=hold)
            inside.clear()
            leave.clear()
            thread.start()
            assert inside.wait(WAIT_S)
            if step == "drop":  # never waits: it is noted, and worked off as the lock is given back
                before = offloader._identities.entries.copy()
                del held
                assert offloader._identities.entries == before
                assert len(offloader._dropped) == 1
            else:
                threading.Timer(0.1, leave.set).start()
                back = pack(activation(1)) if step == "save" else held.unpack()
                assert leave.is_set(), "it did not wait"
                del back
                if step == "unpack":
                    offloader._stack()[-1].tape.in_backward = False
            leave.set()
            thread.join(WAIT_S)
            if step == "unpack":
                del held
            offloader.synchronize()
            assert len(offloader._identities) == 1
    del first
    assert_empty(offloader)


def test_another_thread_has_a_tape_of_its_own(make_offloader: MakeOffloader) -> None:
    """Hooks that PyTorch carries to one of its threads: what C keeps there would lie on the wrong tape."""
    offloader = make_offloader(policy=plan_of([True] * 3), min_bytes=1, engine="memory")
    found: list[Any] = []
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        first = pack(activation(0))
        thread = threading.Thread(target=lambda: found.append(pack(activation(1))))
        thread.start()
        thread.join(WAIT_S)
        assert not kept_in_c(found[0])
        assert found[0].record.tape is not first.record.tape
    found.clear()
    del first
    assert_empty(offloader)


@pytest.mark.parametrize("begun", [False, True])
def test_a_view_that_may_be_inside_of_a_dtensor_is_python_s(
    begun: bool, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", sys.modules.get("torch.distributed.tensor", sys))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: begun)
    with torch.no_grad():
        local = torch.ones(ELEMENTS).view(2, -1)  # as `to_local` gives it: a view without a history
    with offloader:
        first, second = after_the_first(offloader)
        view = offloader._stack()[-1].hooks.pack_hook(local)
        assert kept_in_c(second)
        assert kept_in_c(view) == (not begun)
    del first, second, view
    assert_empty(offloader)


def test_a_view_of_less_does_not_stand_for_the_whole(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    offloader._placement.keep_all = True
    with offloader:
        first, second = after_the_first(offloader)
        pack = offloader._stack()[-1].hooks.pack_hook
        saved = activation(2, 4 * ELEMENTS)
        low, high = pack(saved[:ELEMENTS]), pack(saved[3 * ELEMENTS :])
        piece = pack(saved[130:140])
        whole = pack(saved)
    assert [kept_in_c(handle) for handle in (low, high, piece)] == [True, False, False], "the second one is Python's"
    assert low.record is not high.record
    assert piece.record is low.record
    assert whole.record.nbytes == 4 * BYTES
    for handle, expected in ((low, saved[:ELEMENTS]), (high, saved[3 * ELEMENTS :]), (whole, saved)):
        assert same_bits(handle.unpack(), expected.detach())
    assert offloader.statistics().kept_bytes == {"plan": (2 + 1 + 1 + 4) * BYTES}
    del first, second, low, high, piece, whole, handle
    assert_empty(offloader)


def test_a_storage_that_was_freed_and_filled_again_elsewhere_is_another(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    saved = activation(1)
    storage = saved.untyped_storage()
    with offloader:
        first, second = after_the_first(offloader)
        pack = offloader._stack()[-1].hooks.pack_hook
        third, address = pack(saved), storage.data_ptr()
        blocks = []
        while storage.data_ptr() == address:
            storage.resize_(0)
            blocks.append(torch.empty(ELEMENTS))  # takes the place, where it is given away at once
            storage.resize_(BYTES)
        fourth = pack(saved)
    assert kept_in_c(third)
    assert fourth.record is not third.record
    del first, second, third, fourth
    assert_empty(offloader)


def test_another_thread_s_tensor_shares_no_record(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 4), min_bytes=1, engine="memory")
    saved = activation(1)
    found: list[Any] = []
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        first, second = pack(activation(0)), pack(saved)
        assert kept_in_c(second)

        def work() -> None:
            with offloader:
                hook = offloader._stack()[-1].hooks.pack_hook
                found.append(hook(activation(3)))
                found.append(hook(saved))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(WAIT_S)
    assert found[1].record is not second.record
    assert len(offloader._identities) == 4
    found.clear()
    del first, second
    assert_empty(offloader)


def test_the_module_is_named(make_offloader: MakeOffloader) -> None:
    model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid())
    entries = json.dumps({"version": 1, "entries": [{"index": i, "nbytes": BYTES, "action": "keep"} for i in range(3)]})
    offloader = make_offloader(policy=Plan.from_json(entries), min_bytes=1, engine="memory")
    offloader.use(model)
    with offloader:
        first = offloader._stack()[-1].hooks.pack_hook(activation(0))
        out = model(activation(1))
    assert [entry.module for entry in offloader.plan.entries] == [None, "0", "1"]
    out.sum().backward()
    del first, out
    assert_empty(offloader)


def test_an_in_place_change_names_module_shape_and_versions(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=plan_of([True] * 3), min_bytes=1, engine="memory")
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        with torch.no_grad():
            first, saved = pack(activation(0)), activation(1)
        second = pack(saved)
    assert kept_in_c(second)
    with torch.no_grad():
        saved.add_(1)
    with pytest.raises(SavedTensorModifiedError, match=rf"tensor \[{ELEMENTS}\].*version 1; expected version 0"):
        second.unpack()
    del first, second
    assert_empty(offloader)
