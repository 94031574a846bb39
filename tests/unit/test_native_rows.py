"""What is done for each record of a row before its transfer: in C as in Python."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actoffload import rows
from actoffload.cpu_tier import MIN_ALIGNMENT
from actoffload.hostpool import HostPool
from actoffload.native_known import hooks_in_c
from actoffload.record import State
from actoffload.rows import Row
from tests.unit.rows import ALIGNMENT, row_of

one_record = st.tuples(
    st.integers(0, 3000),  # bytes between a storage's first and the record's
    st.integers(ALIGNMENT, 5000),  # the record's bytes
    st.sampled_from([State.SPILLED, State.RESIDENT, State.FETCHING]),
    st.integers(0, 1),  # who waits for it
)
some_records = st.lists(one_record, min_size=1, max_size=6)


@pytest.fixture(scope="module")
def native() -> Any:
    module = hooks_in_c()
    assert module is not None
    return module


def _twin(row: Row) -> Row:
    """Another row of the same records."""
    twin = Row(list(row.records))
    twin.apart = row.apart
    return twin


def _laid_out(row: Row) -> Any:
    return row.starts, row.offsets, row.io_bytes


@given(some_records)
def test_records_are_laid_out_and_boarded_alike(some: list[Any]) -> None:
    native = hooks_in_c()
    row = row_of(some)
    twin = _twin(row)
    rows.lay_out(row, MIN_ALIGNMENT)
    native.lay_out(twin, MIN_ALIGNMENT)
    assert _laid_out(row) == _laid_out(twin)
    for record, start in zip(row.records, row.starts, strict=True):
        assert (start - record.address - record.begin) % MIN_ALIGNMENT == 0
    places, memory = rows.board(row)
    assert (row.users, {record.extent for record in row.records}) == (len(some), {row})
    twin_places, twin_memory = native.board(twin)
    assert (twin.users, {record.extent for record in row.records}) == (len(some), {twin})
    assert memory == twin_memory
    assert [(storage.data_ptr(), address) for storage, address in places] == [
        (storage.data_ptr(), address) for storage, address in twin_places
    ]


@given(some_records, st.integers(0, 5), st.booleans())
def test_what_comes_along_is_the_same(some: list[Any], which: int, apart: bool) -> None:
    native = hooks_in_c()
    row = row_of(some, apart)
    record = row.records[which % len(some)]
    found = rows.wanted(row, record)
    assert found == native.wanted(row, record)
    assert row.records.index(record) in found
    if apart:
        assert len(found) == 1


@given(some_records, st.sets(st.integers(0, 5), min_size=1))
def test_what_is_read_lies_where_python_puts_it(some: list[Any], which: set[int]) -> None:
    native = hooks_in_c()
    row = row_of(some)
    rows.lay_out(row, MIN_ALIGNMENT)
    wanted = sorted({place % len(some) for place in which})
    pool = HostPool(1 << 20)
    slot = pool.acquire(row.starts[-1] + some[-1][1] + ALIGNMENT)
    assert slot is not None
    origin = row.starts[wanted[0]] - row.records[wanted[0]].io.pad
    memory, records, places = native.coming(row, wanted, slot, slot.address - origin)
    expected_memory, expected_places = [], []
    for place in range(wanted[0], wanted[-1] + 1):
        record, start = row.records[place], slot.address - origin + row.starts[place]
        expected_memory.append((start + record.io.io_begin, record.io.io_bytes))
        if place in wanted:
            expected_places.append((start, record.nbytes))
    assert memory == expected_memory
    assert records == [row.records[place] for place in wanted]
    assert [start for _, start in places] == [start for start, _ in expected_places]
    assert [(storage.data_ptr(), storage.nbytes()) for storage, _ in places] == expected_places
    del slot
    pool.settle()
    assert pool.allocated_bytes > 0  # the storages keep it
    places.clear()
    pool.settle()
    assert pool.allocated_bytes == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda native, row: native.lay_out(row, 0), ValueError),
        (lambda native, row: native.lay_out([row], 1), TypeError),
        (lambda native, row: native.board(row.records), TypeError),
        (lambda native, row: native.wanted(row.records, row.records[0]), TypeError),
        (lambda native, row: native.coming(row, [], None, 0), ValueError),
        (lambda native, row: native.coming(row, [3], None, 0), IndexError),
        (lambda native, row: native.coming(row, [-1], None, 0), IndexError),
        (lambda native, row: native.coming(row, [1, 0], None, 0), ValueError),
        (lambda native, row: native.coming(row, ["first"], None, 0), TypeError),
    ],
)
def test_what_is_no_row_is_refused(native: Any, call: Any, error: type[Exception]) -> None:
    row = row_of([(0, ALIGNMENT, State.SPILLED, 1)] * 3)
    rows.lay_out(row, MIN_ALIGNMENT)
    with pytest.raises(error):
        call(native, row)


def test_a_record_without_a_layout_is_refused(native: Any) -> None:
    row = row_of([(0, ALIGNMENT, State.SPILLED, 1)] * 2)
    row.records[1].io = None
    with pytest.raises(TypeError, match="Layout"):
        native.lay_out(row, MIN_ALIGNMENT)
    with pytest.raises(TypeError, match="Layout"):
        native.board(row)
    assert (row.users, row.records[0].extent) == (0, None)
    row.records[1] = None  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="Record"):
        native.board(row)
