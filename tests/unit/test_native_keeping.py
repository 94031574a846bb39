"""What a plan keeps is kept in C as it is in Python: the same decisions, counts, order and errors."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from actoffload import OffloadConfig, Offloader, Plan
from actoffload.planner import PlanEntry
from tests.harness import MakeOffloader, assert_empty
from tests.unit.keeping import BYTES, COUNT, ELEMENTS, KEPT_IN_C, activation, kept_in_c, plan_of
from tests.unit.parity import both, commands

pytestmark = KEPT_IN_C

programs = st.tuples(
    st.sampled_from([None, 0, BYTES, 2 * BYTES, 100 * BYTES]),
    st.lists(st.sampled_from([True, True, True, False]), min_size=COUNT, max_size=COUNT),
    st.lists(st.sampled_from([ELEMENTS, ELEMENTS, ELEMENTS, 2 * ELEMENTS]), min_size=3, max_size=3),
    st.lists(commands, max_size=30),
)


Program = tuple[int | None, list[bool], list[int], list[tuple[Any, ...]]]


def once(*commands: tuple[Any, ...], moves: int | None = None) -> Program:
    """A program that saves something else first, as the first of a forward is Python's."""
    return BYTES, [number != moves for number in range(COUNT)], [ELEMENTS] * 3, [("save", 2, "whole"), *commands]


TWO = ("save", 0, "whole"), ("save", 1, "whole")
MORE = ("renew", 1), ("save", 1, "whole")


@settings(max_examples=200)
@given(program=programs)
@example(program=once(("save", 0, "whole"), ("change", 0), ("save", 0, "whole"), ("unpack", 1), ("unpack", 2)))
@example(program=once(("save", 0, "piece"), ("save", 0, "whole"), ("save", 0, "half"), ("drop", 1), ("unpack", 1)))
@example(program=once(("save", 0, "whole"), ("save", 0, "other counter"), ("save", 0, "shaped"), ("unpack", 3)))
@example(program=once(("save", 0, "whole"), ("change", 0), ("save", 0, "other counter"), ("unpack", 2), ("unpack", 1)))
@example(program=once(("save", 0, "whole"), ("unpack", 1), ("unpack", 1), ("unpack", 0), ("unpack", 1), ("drop", 0)))
@example(program=once(("save", 0, "whole"), ("save", 1, "whole"), ("unpack", 2), ("save", 0, "whole"), ("unpack", 3)))
@example(program=once(*TWO, ("unpack", 1), ("unpack", 2), ("unpack", 2), ("unpack", 1), ("unpack", 2), ("drop", 1)))
@example(program=once(*TWO, ("save", 0, "shaped"), ("unpack", 2), ("unpack", 1), ("drop", 1), ("unpack", 2)))
@example(program=once(*TWO, ("renew", 1), ("save", 1, "whole"), ("unpack", 3), ("unpack", 2), ("unpack", 1), moves=1))
@example(program=once(*TWO, *MORE, *MORE, ("unpack", 4), ("unpack", 3), ("unpack", 2), ("unpack", 1), moves=1))
def test_both_do_the_same(program: Program) -> None:
    window, keeps, elements, commands = program
    config = OffloadConfig(
        target="nvme",
        engine="memory",
        path="/tmp",
        devices="cpu",
        min_bytes=1,
        policy=plan_of(keeps, prefetch_bytes=window),
    )
    in_c, in_its_own = both(lambda: Offloader(config), elements, commands)
    assert in_c == in_its_own


def test_the_program_of_the_last_test_is_kept_in_c(make_offloader: MakeOffloader) -> None:
    """Else it would compare Python with itself."""
    offloader = make_offloader(policy=plan_of([True] * COUNT), min_bytes=1, engine="memory")
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        handles = [pack(activation(number)) for number in range(COUNT)]
        assert list(map(kept_in_c, handles)) == [False] + [True] * (COUNT - 1), "the first one begins the phase"
        again = pack(handles[1].alias.view(2, -1))
        assert kept_in_c(again)
        assert again.record is handles[1].record
    assert offloader.statistics().deduplicated_bytes == BYTES
    del handles, again
    assert_empty(offloader)


def test_deaths_of_several_sizes_are_counted_each(native: Any, make_offloader: MakeOffloader) -> None:
    sizes = [ELEMENTS, 2 * ELEMENTS] * 3
    entries = tuple(PlanEntry(index=index, nbytes=4 * size, action="keep") for index, size in enumerate(sizes))
    offloader = make_offloader(min_bytes=0, policy=Plan(entries=entries))
    with offloader:
        pack = offloader._stack()[-1].hooks.pack_hook
        handles = [pack(activation(number, size)) for number, size in enumerate(sizes)]
    assert sum(map(kept_in_c, handles)) == len(sizes) - 1
    expected = 4 * sum(sizes)
    for size in reversed(sizes):
        offloader.statistics()
        assert offloader.core.accounts.resident_bytes == expected
        handles.pop()
        expected -= 4 * size
    offloader.statistics()
    assert offloader.core.accounts.resident_bytes == 0
