"""What moves is saved, handed out and let go of in C as in Python: the same bits, counts, order and errors."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actoffload import OffloadConfig, Offloader
from actoffload.engines.base import IoKind
from actoffload.identity import StorageRef
from actoffload.record import State
from actoffload.testing.faults import FailingEngine, GateEngine
from tests.harness import WAIT_S, MakeOffloader, assert_empty, only_engine, same_bits
from tests.unit.keeping import KEPT_IN_C, activation, moved_in_c, plan_of
from tests.unit.parity import both, commands

pytestmark = KEPT_IN_C

KIB = 1 << 10
SIZES = [KIB, 64 * KIB, 64 * KIB + 24, 256 * KIB, 512 * KIB]
"""Bytes: copied first, the smallest of a row, at no aligned length, a quarter of a row, alone."""
COUNT = 8

programs = st.tuples(
    st.sampled_from(["all", "greedy", "plan", "most"]),
    st.sampled_from([None, "256KiB", "3MiB"]),
    st.lists(st.sampled_from(SIZES), min_size=3, max_size=3),
    st.lists(commands, max_size=40),
)
Program = tuple[str, str | None, list[int], list[tuple[Any, ...]]]


def once(*commands: tuple[Any, ...], nbytes: int = 256 * KIB, policy: str = "all") -> Program:
    """A program that saves something else first, as the first of a forward is Python's."""
    return policy, None, [nbytes] * 3, [("save", 2, "whole"), *commands]


TWO = ("save", 0, "whole"), ("save", 1, "whole")
SIX = (*TWO, ("renew", 0), ("renew", 1), *TWO, ("renew", 0), ("renew", 1), *TWO)


def options(policy: str, pending: str | None, sizes: list[int]) -> OffloadConfig:
    keeps = [policy == "most" and index % 4 == 2 for index in range(COUNT)]
    planned = policy in ("plan", "most")
    return OffloadConfig(
        target="nvme",
        engine="memory",
        path="/tmp",
        devices="cpu",
        min_bytes=1,
        pending_bytes=pending,
        policy=plan_of(keeps, nbytes=sizes[0]) if planned else policy,
    )


@settings(max_examples=250)
@given(program=programs)
@example(program=once(*TWO, ("change", 0), ("save", 0, "whole"), ("unpack", 1), ("unpack", 3), ("unpack", 0)))
@example(program=once(*TWO, ("save", 0, "shaped"), ("unpack", 3), ("unpack", 1), ("drop", 1), ("unpack", 0)))
@example(program=once(*TWO, ("save", 0, "half"), ("save", 0, "piece"), ("unpack", 3), ("unpack", 4), ("drop", 1)))
@example(program=once(*TWO, ("save", 0, "other counter"), ("save", 0, "turned"), ("unpack", 3), ("unpack", 4)))
@example(program=once(*TWO, ("change", 0), ("save", 0, "other counter"), ("unpack", 3), ("unpack", 1)))
@example(program=once(*TWO, ("save", 0, "conjugate"), ("save", 0, "negative"), ("unpack", 3), ("unpack", 4)))
@example(program=once(*TWO, ("unpack", 2), ("unpack", 2), ("unpack", 1), ("unpack", 2), ("unpack", 0), ("drop", 2)))
@example(program=once(*TWO, ("save", 0, "shaped"), ("unpack", 1), ("unpack", 1), ("unpack", 3), ("drop", 3)))
@example(program=once(*TWO, ("change", 0), ("save", 0, "whole"), ("drop", 1), ("save", 0, "shaped"), ("unpack", 3)))
@example(program=once(*SIX, *((("unpack", place)) for place in reversed(range(7)))))
@example(program=once(*SIX, *((("unpack", place)) for place in reversed(range(7))), policy="most"))
@example(program=once(*SIX, ("drop", 1), ("drop", 1), ("unpack", 4), ("unpack", 1), ("next", 0), *SIX))
@example(program=once(*SIX, ("change", 1), ("unpack", 6), ("unpack", 5), policy="plan"))
@example(program=once(*TWO, *((("unpack", place)) for place in reversed(range(3))), nbytes=KIB))
@example(program=once(*TWO, *((("unpack", place)) for place in reversed(range(3))), nbytes=512 * KIB))
def test_both_do_the_same(program: Program) -> None:
    policy, pending, sizes, commands = program
    config = options(policy, pending, sizes)
    in_c, in_its_own = both(lambda: Offloader(config), [size // 4 for size in sizes], commands)
    assert in_c == in_its_own


@pytest.mark.parametrize("policy", ["all", "greedy", "plan"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_the_programs_of_the_last_test_run_in_c(policy: str, nbytes: int) -> None:
    """Else it would compare Python with itself."""
    offloader = Offloader(options(policy, None, [nbytes]))
    saved = [activation(number, nbytes // 4) for number in range(4)]
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        handles = [pack(tensor) for tensor in saved]
        again = pack(saved[1])
    assert list(map(moved_in_c, handles)) == [False, True, True, True], "the first one begins the phase"
    assert moved_in_c(again)
    assert again.record is handles[1].record
    offloader.synchronize()
    assert {handle.record.state for handle in handles} == {State.SPILLED}
    for handle, tensor in zip(reversed(handles), reversed(saved), strict=True):
        assert same_bits(handle.unpack(), tensor.detach())
    assert offloader.statistics().nvme_read_bytes > 0
    del handle, handles, again
    assert_empty(offloader)
    offloader.close()


def test_what_python_made_is_not_what_c_made(make_offloader: MakeOffloader) -> None:
    """What only one of them may have is the class of the handle, and of its weak reference."""
    offloader = make_offloader(engine="memory", policy="all", min_bytes=1)
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        first, second = pack(activation(0, 16 * KIB)), pack(activation(1, 16 * KIB))
    names = [name for name in type(first.record).__slots__ if not callable(getattr(first.record, name))]
    differ = {name for name in names if type(getattr(first.record, name)) is not type(getattr(second.record, name))}
    assert type(first.record) is type(second.record)
    assert differ == {"identity"}
    assert {type(getattr(second.record, name)) for name in ("counted", "wanted", "stays", "on_disk")} == {bool}
    del first, second
    assert_empty(offloader)


def test_another_thread_has_a_record_of_its_own(make_offloader: MakeOffloader) -> None:
    """What it would be told apart by is set for a moment, which another thread must not see."""
    offloader = make_offloader(engine="memory", policy="all", min_bytes=1)
    saved = [activation(number, 16 * KIB) for number in range(2)]
    theirs: list[Any] = []

    def save() -> None:
        with offloader:
            pack = offloader._stack()[-1].hooks.pack_hook
            theirs.extend([pack(activation(2, 16 * KIB)), pack(saved[1])])

    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        ours = [pack(saved[0]), pack(saved[1])]
    thread = threading.Thread(target=save)
    thread.start()
    thread.join(WAIT_S)
    assert moved_in_c(theirs[1])
    assert theirs[1].record is not ours[1].record
    assert offloader.statistics().deduplicated_bytes == 0
    assert same_bits(theirs[1].unpack(), ours[1].unpack())
    ours.clear()
    theirs.clear()
    assert_empty(offloader)


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_there_is_no_room_for_stays(nbytes: int, either: str, make_offloader: MakeOffloader) -> None:
    """`pending_bytes` is the room of three."""
    offloader = make_offloader(engine=GateEngine, policy="all", min_bytes=1, pending_bytes=3 * nbytes)
    saved = [activation(number, nbytes // 4) for number in range(6)]
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        handles = [pack(tensor) for tensor in saved]
        again = pack(saved[5])
    assert offloader.statistics().kept_bytes == {"pressure": 3 * nbytes}
    assert [entry.action for entry in offloader.plan.entries] == ["offload"] * 3 + ["keep"] * 3
    assert offloader.core.accounts.moved_bytes == offloader.core.pending_bytes == 3 * nbytes
    only_engine(offloader).open()
    for handle, tensor in zip([*handles, again], [*saved, saved[5]], strict=True):
        assert same_bits(handle.unpack(), tensor.detach())
    del handle, handles, again
    assert_empty(offloader)


def test_what_has_left_is_not_held(either: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory", policy="all", min_bytes=1)
    saved = [activation(number, 64 * KIB) for number in range(3)]
    memory = [StorageRef(tensor.untyped_storage()) for tensor in saved]
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        handles = [pack(tensor) for tensor in saved]
    del saved
    offloader.synchronize()
    assert [one.gone() for one in memory] == [True] * 3
    assert offloader.core.accounts.resident_bytes == 0
    del handles
    assert_empty(offloader)


def test_backward_begins_with_what_could_not_leave(either: str, make_offloader: MakeOffloader) -> None:
    """It is in memory, and its phase has to be known all the same."""
    offloader = make_offloader(engine=partial(FailingEngine, kind=IoKind.WRITE, count=9), policy="all", min_bytes=1)
    saved = [activation(number, 64 * KIB) for number in range(3)]
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        handles = [pack(tensor) for tensor in saved]
    with pytest.warns(RuntimeWarning, match="write failed"):
        offloader.synchronize()
    assert [handle.record.state for handle in handles] == [State.RESIDENT] * 3
    for handle in reversed(handles):
        handle.unpack()
    assert [phase.direction for phase in offloader._prefetch.phases._now] == ["forward", "backward"]
    assert list(handles[0].record.tape.learned()) == [2, 1, 0]
    del handle, handles
    assert_empty(offloader)


def test_the_order_of_a_forward_is_learned_though_its_row_is_another_s_too(
    either: str, make_offloader: MakeOffloader
) -> None:
    offloader = make_offloader(engine="memory", policy="all", min_bytes=1)
    handles = []
    for forward in range(2):
        with offloader:
            pack = offloader._stack()[-1].hooks.pack_hook
            handles.append([pack(activation(2 * forward + number, 64 * KIB)) for number in range(2)])
    offloader.synchronize()
    (extent,) = {handle.record.extent for of_one in handles for handle in of_one}
    assert extent.users == 4
    for handle in reversed(handles[0]):
        handle.unpack()
    del handle
    while handles[0]:
        del handles[0][0]  # the last one is not Python's
    assert extent.users == 2
    assert list(offloader._prefetch.orders._orders.values()) == [(1, 0)]
    handles.clear()
    assert_empty(offloader)
