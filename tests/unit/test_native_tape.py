"""The tape in C does what the one in Python does, whatever is asked of it in whatever order."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actoffload.bursts import Bursts
from actoffload.native_known import hooks_in_c
from actoffload.schedule import LearnedOrders, Tape


@dataclass(eq=False)
class Sized:
    nbytes: int
    data: object = None


indices = st.integers(0, 11)
commands = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 50)),
    st.tuples(st.just("append"), st.just(10)),
    st.tuples(st.just("forget"), indices),
    st.tuples(st.just("advance"), indices),
    st.tuples(st.just("fetch"), st.integers(0, 120), st.integers(0, 3)),
    st.tuples(st.just("idle_until"), st.integers(0, 2), st.integers(0, 300)),
    st.tuples(st.just("idle"), st.integers(0, 2)),
    st.tuples(st.just("saved"), st.integers(0, 1), st.integers(1, 50)),
    st.tuples(st.sampled_from(["rewind", "prepare", "learn", "new"])),
)


def follow(make: Any, program: list[tuple[Any, ...]]) -> list[Any]:
    """All that can be seen of a tape while it is used."""
    orders = LearnedOrders()
    tape, bursts = make(), Bursts()
    if make is not Tape:
        bursts = tape.bursts
    signatures: dict[int, int] = {}
    seen: list[Any] = []
    for name, *arguments in program:
        said: Any = None
        if name == "append":
            said = tape.append(Sized(*arguments))
        elif name in ("forget", "advance") and arguments[0] < len(tape):
            said = tape.forget(*arguments) if name == "forget" else tape.advance(arguments[0], orders)
        elif name == "fetch":
            said = fetch(tape, *arguments)
        elif name in ("idle_until", "idle"):
            said = getattr(tape, name)(*arguments)
        elif name == "saved":
            said = bursts.saved(*arguments)
        elif name == "rewind":
            tape.rewind()
        elif name == "prepare":
            tape.prepare(orders)
        elif name == "learn" and (order := tape.learned()) is not None:
            orders.put(tape.signature, order)
            said = order
        elif name == "new":
            tape, bursts = make(), Bursts()
            if make is not Tape:
                bursts = tape.bursts
        signature = signatures.setdefault(tape.signature, len(signatures))  # only equal or not counts
        counts = (len(tape), tape.live, tape.total_bytes, tape.in_backward, tape.exhausted, tape.left_bytes, tape.order)
        burst = (bursts.node_bytes, bursts.largest_bytes, bursts.largest_count)
        records = [None if record is None else record.nbytes for record in tape.records]
        seen.append((name, said, signature, counts, burst, records))
    return seen


def fetch(tape: Any, window_bytes: int, refuses: int) -> list[tuple[int, bool]]:
    """What is fetched, until there is no room for one more."""
    asked: list[tuple[int, bool]] = []

    def bring(record: Sized, early: bool) -> int | None:
        asked.append((record.nbytes, early))
        if early or len(asked) == refuses:
            return None
        return 0 if record.nbytes % 5 == 0 else record.nbytes

    tape.fetch_ahead(window_bytes, bring)
    return asked


@given(program=st.lists(commands, max_size=40))
def test_both_do_the_same(program: list[tuple[Any, ...]]) -> None:
    native = hooks_in_c()
    if native is None:
        pytest.skip("the tape in C cannot be had")
    assert follow(native.Tape, program) == follow(Tape, program)


def test_a_record_is_held_until_it_is_forgotten_or_the_tape_goes(native: Any) -> None:
    tape = native.Tape()
    first, second = Sized(1), Sized(2)
    gone = [weakref.ref(first), weakref.ref(second)]
    tape.append(first)
    tape.append(second)
    del first, second
    tape.forget(0)
    tape.forget(0)
    assert gone[0]() is None
    assert gone[1]() is not None
    del tape
    assert gone[1]() is None


def test_a_record_and_its_tape_are_collected_together(native: Any) -> None:
    tape, record = native.Tape(), Sized(1)
    record.data = tape
    tape.append(record)
    gone = weakref.ref(record)
    del tape, record
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (lambda tape: tape.append(7), AttributeError),
        (lambda tape: tape.forget(2), IndexError),
        (lambda tape: tape.forget(-1), IndexError),
        (lambda tape: tape.forget("first"), TypeError),
        (lambda tape: tape.advance(0), TypeError),
        (lambda tape: tape.advance(2, LearnedOrders()), IndexError),
        (lambda tape: tape.advance(0, 7), AttributeError),
        (lambda tape: tape.fetch_ahead(10), TypeError),
        (lambda tape: tape.fetch_ahead("far", print), TypeError),
        (lambda tape: tape.idle_until(1), TypeError),
        (lambda tape: tape.idle_until("now", 1), TypeError),
        (lambda tape: tape.idle("now"), TypeError),
        (lambda tape: tape.saved(1), TypeError),
        (lambda tape: tape.saved(1, "many"), TypeError),
        (lambda tape: type(tape)(7), TypeError),
    ],
)  # fmt: skip
def test_what_a_tape_cannot_do_is_an_error(what: Any, error: type[Exception], native: Any) -> None:
    tape = native.Tape()
    tape.append(Sized(10))
    with pytest.raises(error):
        what(tape)
    assert (len(tape), tape.live, tape.total_bytes) == (1, 1, 10)


def test_an_error_while_fetching_is_handed_on_and_nothing_is_passed_over(native: Any) -> None:
    tape = native.Tape()
    for _ in range(3):
        tape.append(Sized(10))
    tape.prepare(LearnedOrders())
    asked: list[int] = []

    def fail(record: Sized, early: bool) -> int:
        asked.append(record.nbytes)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            tape.fetch_ahead(100, fail)
    assert len(asked) == 2
    assert fetch(tape, 100, 0) == [(10, False)] * 3


@pytest.mark.parametrize("order", [(0, 1, 2), (-1,), ("first",), 7])
def test_an_order_that_is_none_is_an_error(order: Any, native: Any) -> None:
    class Orders:
        def get(self, signature: int) -> Any:
            return order

    tape = native.Tape()
    tape.append(Sized(10))
    with pytest.raises((IndexError, TypeError)):
        tape.prepare(Orders())
    assert tape.order == ()
    tape.prepare(LearnedOrders())
    assert tape.order == (0,)
