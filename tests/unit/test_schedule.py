"""Tapes, learned orders and the prefetch window, without torch and without a clock."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

import actoffload.schedule
from actoffload.schedule import FOR_EVER, GROWTH, GROWTH_LIMIT, MOST, LearnedOrders, Tape, Window, new_tape

pytestmark = pytest.mark.usefixtures("either")


@dataclass(eq=False)
class _Sized:
    nbytes: int
    name: int = 0
    data: None = None


def _tape(sizes: list[int]) -> Tape[_Sized]:
    tape: Tape[_Sized] = new_tape()
    for name, nbytes in enumerate(sizes):
        assert tape.append(_Sized(nbytes, name)) == name
    return tape


def _names(tape: Tape[_Sized], window_bytes: int, near: tuple[int, ...] = ()) -> list[int]:
    fetched: list[int] = []

    def fetch(record: _Sized, early: bool) -> int | None:
        if early and record.name not in near:
            return None
        fetched.append(record.name)
        return 0 if record.name in near else record.nbytes

    tape.fetch_ahead(window_bytes, fetch)
    return fetched


def test_a_tape_counts_what_it_holds() -> None:
    tape = _tape([10, 20, 30])
    assert (tape.live, tape.total_bytes) == (3, 60)
    tape.forget(1)
    tape.forget(1)
    assert (tape.live, tape.total_bytes) == (2, 60)
    assert [record.name for record in tape.records if record is not None] == [0, 2]


def test_it_is_known_for_how_long_there_is_nothing_to_look_for() -> None:
    tape = _tape([10, 20])
    assert not tape.idle(0), "nobody has looked yet"
    tape.idle_until(3, 40)
    assert tape.idle(3)
    assert not tape.idle(4), "a phase has begun"
    tape.append(_Sized(10))
    assert not tape.idle(3), "the forward has gone on"
    tape.idle_until(3, FOR_EVER)
    assert tape.idle(3)


def test_the_first_guess_is_the_reverse_order() -> None:
    tape = _tape([10] * 5)
    tape.advance(4, LearnedOrders())
    assert tape.in_backward
    assert _names(tape, 1000) == [3, 2, 1, 0]


def test_the_order_seen_is_learned_and_replaces_the_guess() -> None:
    orders = LearnedOrders()
    seen = [3, 0, 1, 4, 2]
    tape = _tape([10] * 5)
    assert tape.learned() is None
    for index in seen:
        tape.advance(index, orders)
        tape.advance(index, orders)  # unpacked twice: seen once
    learned = tape.learned()
    assert learned == tuple(seen)
    orders.put(tape.signature, learned)
    again = _tape([10] * 5)
    assert again.signature == tape.signature
    again.advance(3, orders)
    assert _names(again, 1000) == [0, 1, 4, 2]


@pytest.mark.parametrize("sizes", [[10] * 4, [10] * 6, [10, 10, 11, 10, 10], []])
def test_another_forward_learns_for_itself(sizes: list[int]) -> None:
    assert _tape(sizes).signature != _tape([10] * 5).signature


def test_the_window_is_full_but_not_fuller_than_one_record_more() -> None:
    tape = _tape([10] * 10)
    orders = LearnedOrders()
    tape.advance(9, orders)
    assert _names(tape, 25) == [8, 7, 6]
    assert _names(tape, 25) == []
    tape.advance(8, orders)
    assert tape.left_bytes == 80
    assert _names(tape, 25) == [5]
    assert _names(tape, 1) == []


def test_one_record_that_is_larger_than_the_window_is_still_fetched() -> None:
    tape = _tape([10, 1000, 10])
    tape.advance(2, LearnedOrders())
    assert _names(tape, 1) == [1]
    assert _names(tape, 1) == []


def test_what_is_near_is_passed_at_once_but_what_lies_behind_it_is_not_fetched_too_early() -> None:
    tape = _tape([10] * 6)
    orders = LearnedOrders()
    near = (4, 3, 2)
    tape.advance(5, orders)
    assert _names(tape, 25, near) == [4, 3, 2]
    tape.advance(4, orders)
    assert _names(tape, 25, near) == [1]
    tape.advance(3, orders)
    assert _names(tape, 25, near) == [0]
    assert tape.exhausted


def test_a_wide_window_fetches_at_once_what_lies_behind_what_is_near() -> None:
    tape = _tape([10] * 6)
    tape.advance(5, LearnedOrders())
    assert _names(tape, 45, near=(4, 3, 2)) == [4, 3, 2, 1, 0]


def test_released_records_are_passed_over_and_no_longer_counted() -> None:
    tape = _tape([10] * 6)
    tape.advance(5, LearnedOrders())
    tape.forget(3)
    assert _names(tape, 30) == [4, 2]
    tape.forget(4)
    tape.advance(4, LearnedOrders())
    assert _names(tape, 30) == [1]


def test_no_room_stops_and_the_next_time_goes_on_there() -> None:
    tape = _tape([10] * 4)
    tape.advance(3, LearnedOrders())
    asked: list[int] = []

    def refuse(record: _Sized, early: bool) -> int | None:
        asked.append(record.name)
        return None

    tape.fetch_ahead(100, refuse)
    tape.fetch_ahead(100, refuse)
    assert asked == [2, 2]
    assert _names(tape, 100) == [2, 1, 0]


def test_backward_that_jumps_ahead_moves_the_frontier() -> None:
    tape = _tape([10] * 6)
    orders = LearnedOrders()
    tape.advance(5, orders)
    tape.advance(2, orders)
    assert _names(tape, 100) == [1, 0]
    tape.advance(4, orders)  # a late one moves nothing back
    assert _names(tape, 100) == []


def test_what_the_learned_order_does_not_know_is_no_harm() -> None:
    orders = LearnedOrders()
    first = _tape([10] * 4)
    for index in (3, 1):  # a branch that never ran
        first.advance(index, orders)
    learned = first.learned()
    assert learned is not None
    orders.put(first.signature, learned)
    tape = _tape([10] * 4)
    tape.advance(2, orders)
    assert _names(tape, 100) == [3, 1]


def test_rewind_fetches_all_again() -> None:
    tape = _tape([10] * 3)
    orders = LearnedOrders()
    tape.advance(2, orders)
    assert _names(tape, 100) == [1, 0]
    tape.advance(1, orders)
    tape.advance(0, orders)
    tape.rewind()
    assert tape.left_bytes == 30
    tape.advance(2, orders)
    assert _names(tape, 100) == [1, 0]
    assert tape.learned() == (2, 1, 0)


def test_a_window_grows_when_backward_waits_up_to_a_limit() -> None:
    window = Window(100)
    sizes = []
    for _ in range(20):
        window.waited()
        sizes.append(window.nbytes)
    assert sizes[0] == int(100 * GROWTH)
    assert sizes == sorted(sizes)
    assert sizes[-1] == 100 * GROWTH_LIMIT


def test_a_window_that_the_user_fixed_stays() -> None:
    window = Window(100, fixed=True)
    window.waited()
    assert window.nbytes == 100


def test_a_window_that_a_plan_chose_stays_while_the_plan_does() -> None:
    window = Window(100)
    window.waited()
    window.follow(700)
    window.waited()
    assert window.nbytes == 700
    window.start_over()
    assert window.nbytes == 100
    window.waited()
    assert window.nbytes == int(100 * GROWTH)
    fixed = Window(100, fixed=True)
    fixed.follow(700)
    assert fixed.nbytes == 100
    fixed.start_over()
    fixed.waited()
    assert fixed.nbytes == 100


def test_a_window_that_nobody_chose_reaches_over_a_part_of_a_small_forward() -> None:
    window = Window(1000)
    assert [window.over(saved) for saved in (100_000, 4000, 400, 0)] == [1000, 1000, int(MOST * 400), 0]
    window.follow(700)
    assert window.over(400) == 700
    window.start_over()
    assert window.over(400) == int(MOST * 400)
    assert Window(1000, fixed=True).over(400) == 1000


def test_the_oldest_orders_are_forgotten() -> None:
    orders = LearnedOrders(capacity=2)
    orders.put(1, (1,))
    orders.put(2, (2,))
    orders.put(1, (1, 0))
    orders.put(3, (3,))
    assert [orders.get(signature) for signature in (1, 2, 3)] == [(1, 0), None, (3,)]


def test_the_file_imports_neither_torch_nor_a_clock() -> None:
    tree = ast.parse(Path(actoffload.schedule.__file__).read_text(encoding="utf-8"))
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {"torch", "time", "datetime"}
