"""What is done for each record of a row: in C as in Python."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actoffload import OffloadConfig, Offloader, rows
from actoffload.accounts import Accounts
from actoffload.cpu_tier import MIN_ALIGNMENT, Layout
from actoffload.engines.base import IoKind
from actoffload.hostpool import HostPool
from actoffload.native_known import hooks_in_c
from actoffload.record import Record, State
from actoffload.row_tier import LARGE_ROW_BYTES, OF_WHAT_IS_SAVED, ROW_BYTES
from actoffload.rows import Joint, Row
from tests.harness import MakeOffloader, assert_empty, save_in_python
from tests.unit.rows import NBYTES, CountingEngine, Saved, activations, mover_of, records_of

CPU = torch.device("cpu")
ALIGNMENT = 512
ANOTHERS = OSError("of another's read")

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


def _row(given_records: list[tuple[int, int, State, int]], apart: bool = False) -> Row:
    records = []
    for begin, nbytes, state, waiting in given_records:
        storage = torch.zeros(begin + nbytes, dtype=torch.uint8).untyped_storage()
        record = Record(storage, storage.data_ptr(), begin, begin + nbytes, CPU)
        record.io = Layout.around(record.address + begin, nbytes, ALIGNMENT)
        record.state, record.waiting = state, waiting
        records.append(record)
    row = Row(records)
    row.apart = apart
    return row


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
    row = _row(some)
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
    row = _row(some, apart)
    record = row.records[which % len(some)]
    found = rows.wanted(row, record)
    assert found == native.wanted(row, record)
    assert row.records.index(record) in found
    if apart:
        assert len(found) == 1


@given(some_records, st.sets(st.integers(0, 5), min_size=1))
def test_what_is_read_lies_where_python_puts_it(some: list[Any], which: set[int]) -> None:
    native = hooks_in_c()
    row = _row(some)
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
    row = _row([(0, ALIGNMENT, State.SPILLED, 1)] * 3)
    rows.lay_out(row, MIN_ALIGNMENT)
    with pytest.raises(error):
        call(native, row)


def test_a_record_without_a_layout_is_refused(native: Any) -> None:
    row = _row([(0, ALIGNMENT, State.SPILLED, 1)] * 2)
    row.records[1].io = None
    with pytest.raises(TypeError, match="Layout"):
        native.lay_out(row, MIN_ALIGNMENT)
    with pytest.raises(TypeError, match="Layout"):
        native.board(row)
    assert (row.users, row.records[0].extent) == (0, None)
    row.records[1] = None  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="Record"):
        native.board(row)


# -- the end of a transfer ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offloader(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = str(tmp_path_factory.mktemp("spool"))
    with_records_of_tests = Offloader(OffloadConfig(target="nvme", engine="memory", path=path, policy="all"))
    yield with_records_of_tests
    with_records_of_tests.abort()


FACTS = ("state", "on_disk", "counted", "was_resized", "waiting", "wanted", "data_begin", "error", "transfer", "stays")


def _shown(offloader: Offloader, joint: Joint, records: list[Record]) -> Any:
    accounts, core = offloader.core.accounts, offloader.core
    accounts.settle()
    return (
        [[getattr(record, name) for name in FACTS] for record in records],
        [None if record.data is None else bytes(record.data) for record in records],
        (len(joint.records), joint.nbytes, joint.places),
        (core.pending_bytes, {name: getattr(accounts, name) for name in Accounts.__slots__}),
    )


def _in_a_joint(some: list[Any], state: State) -> tuple[Joint, list[Record]]:
    joint, records = Joint(), _row([facts[:4] for facts in some]).records
    for record, (_, _, _, _, wanted, counted, inside) in zip(records, some, strict=True):
        record.state, record.wanted, record.counted = state, wanted, counted
        record.error = ANOTHERS
        if inside:
            joint.add(record)
    return joint, records


moving_records = st.lists(
    st.tuples(
        st.integers(0, 3000),
        st.integers(ALIGNMENT, 5000),
        st.just(State.SPILLING),
        st.integers(0, 1),
        st.booleans(),  # wanted
        st.booleans(),  # counted as resident
        st.booleans(),  # still in the transfer
    ),
    min_size=1,
    max_size=5,
)


def _in_c_and_in_python(offloader: Offloader, end: Any) -> list[Any]:
    mover, core = mover_of(offloader), offloader.core
    native, accounts, pending_bytes = mover._native, core.accounts, core.pending_bytes
    found = []
    try:
        for module in (native, None):
            mover._native = module
            core.accounts, core.pending_bytes = type(accounts)(), 1 << 20
            core.accounts.came(1 << 20)
            core.accounts.notes.append(("policy", 4096, 1))  # it was there when the transfer ended, whoever counts it
            found.append(end(mover))
    finally:
        mover._native, core.accounts, core.pending_bytes = native, accounts, pending_bytes
    return found


@given(some=moving_records, resized=st.sets(st.integers(0, 4)), known=st.booleans())
def test_a_write_ends_alike(offloader: Offloader, some: list[Any], resized: set[int], known: bool) -> None:
    def end(mover: Any) -> Any:
        joint, records = _in_a_joint(some, State.SPILLING)
        torch.manual_seed(0)
        for place, record in enumerate(records):
            assert record.data is not None
            torch.empty(0, dtype=torch.uint8).set_(record.data).random_()
            if place in resized and known:
                record.was_resized = True
            elif place in resized:
                record.address += 1  # where it lay when it was saved
        mover._row_written(joint, 0.0, SimpleNamespace(error=None, cancelled=False))
        return _shown(offloader, joint, records)

    in_c, in_python = _in_c_and_in_python(offloader, end)
    assert in_c == in_python


@given(some=moving_records, apart=st.booleans())
def test_a_read_ends_alike(offloader: Offloader, some: list[Any], apart: bool) -> None:
    def end(mover: Any) -> Any:
        joint, records = _in_a_joint(some, State.FETCHING)
        row, places = Row(records), []
        row.apart = apart
        for record in records:
            assert record.data is not None
            torch.empty(0, dtype=torch.uint8).set_(record.data).fill_(7)
            record.io = Layout.around(record.address + record.begin, record.nbytes, ALIGNMENT)
            read = torch.zeros(record.nbytes, dtype=torch.uint8)
            read[record.io.io_begin : record.io.io_begin + record.io.io_bytes] = 7
            places.append((read.untyped_storage(), read.data_ptr()))
            record.data = None
        mover._row_fetched(row, joint, records, places, 0.0, SimpleNamespace(error=None))
        assert places == []
        return _shown(offloader, joint, records)

    in_c, in_python = _in_c_and_in_python(offloader, end)
    assert in_c == in_python
    assert in_c[1] == [bytes([7]) * nbytes if inside else None for _, nbytes, *_, inside in some]


@given(some=moving_records)
def test_a_read_begins_alike(offloader: Offloader, some: list[Any]) -> None:
    def begin(mover: Any) -> Any:
        _, records = _in_a_joint(some, State.SPILLED)
        joint = Joint()
        mover._fetching(joint, records)
        assert all(record.transfer is joint for record in records)
        for record in records:
            record.transfer = None
        return _shown(offloader, joint, records)

    in_c, in_python = _in_c_and_in_python(offloader, begin)
    assert in_c == in_python


def test_a_write_in_c_ends_for_no_record_of_another_state(offloader: Offloader, native: Any) -> None:
    joint, records = _in_a_joint([(0, ALIGNMENT, State.SPILLING, 0, False, False, True)] * 2, State.SPILLING)
    records[0].state = State.RESIDENT
    pending_bytes, dropped = offloader.core.pending_bytes, []  # type: ignore[var-annotated]
    native.written(joint, offloader.core, offloader.core.accounts, dropped)
    assert list(joint.records) == [records[0]]
    assert (records[0].on_disk, records[1].on_disk, len(dropped)) == (False, True, 1)
    assert offloader.core.pending_bytes == pending_bytes - ALIGNMENT
    offloader.core.pending_bytes = pending_bytes


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda native, core, joint: native.written(None, core, core.accounts, []), TypeError),
        (lambda native, core, joint: native.written(joint, core, None, []), TypeError),
        (lambda native, core, joint: native.written(joint, core, core.accounts, None), TypeError),
        (lambda native, core, joint: native.fetched(None, [], [], False), TypeError),
        (lambda native, core, joint: native.fetched(joint, [None], [None], False), TypeError),
        (lambda native, core, joint: native.fetched(joint, list(joint.records), [], False), ValueError),
        (lambda native, core, joint: native.fetched(joint, list(joint.records), [None], False), TypeError),
    ],
)
def test_what_is_no_transfer_of_records_is_refused(
    offloader: Offloader, native: Any, call: Any, error: type[Exception]
) -> None:
    joint, records = _in_a_joint([(0, ALIGNMENT, State.FETCHING, 0, False, True, True)], State.FETCHING)
    with pytest.raises(error):
        call(native, offloader.core, joint)
    assert (records[0].state, list(joint.records)) == (State.FETCHING, records)


def test_edges_that_do_not_fit_are_refused(native: Any) -> None:
    joint, records = _in_a_joint([(0, 2 * ALIGNMENT, State.FETCHING, 0, False, True, True)], State.FETCHING)
    records[0].io = records[0].io._replace(head=b"x" * (3 * ALIGNMENT))
    storage = torch.zeros(2 * ALIGNMENT, dtype=torch.uint8).untyped_storage()
    with pytest.raises(TypeError, match="edges"):
        native.fetched(joint, records, [(storage, storage.data_ptr())], False)
    assert bytes(storage) == bytes(2 * ALIGNMENT)


class _Broken:
    """The module in C, whose functions of some names fail when they have done nothing."""

    def __init__(self, native: Any, *names: str) -> None:
        self._native, self._names = native, names

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            return getattr(self._native, name)

        def fail(*_: Any) -> None:
            raise MemoryError(name)

        return fail


@pytest.mark.parametrize("name", ["written", "fetched"])
def test_what_c_fails_to_end_is_ended_in_python(
    name: str, native: Any, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    offloader = make_offloader(engine="memory")
    mover_of(offloader)._native = _Broken(native, name)
    saved = Saved(offloader, activations(ROW_BYTES // NBYTES))
    offloader.synchronize()
    assert {record.state for record in records_of(offloader)} == {State.SPILLED}
    for index in reversed(range(ROW_BYTES // NBYTES)):
        saved.check(index)
    assert told
    assert {args.exc_type for args in told} == {MemoryError}
    told.clear()
    assert_empty(offloader)


def test_an_interrupt_as_a_record_settles_leaves_it_to_be_read(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(engine="memory")
    save_in_python(offloader)
    saved = Saved(offloader, activations(2))
    offloader.synchronize()
    left = Accounts.left
    due = [KeyboardInterrupt]

    def interrupted(self: Accounts, nbytes: int) -> None:
        if due:
            raise due.pop()
        left(self, nbytes)

    monkeypatch.setattr(Accounts, "left", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved.check(0, again=True)
    assert not due
    saved.check(0)
    saved.check(1)
    assert_empty(offloader)


# -- all of it ---------------------------------------------------------------------------------------------------------


def test_rows_are_larger_where_more_is_saved(either: str, make_offloader: MakeOffloader) -> None:
    made: list[CountingEngine] = []

    def engine(file: Any) -> CountingEngine:
        made.append(CountingEngine(file))
        return made[-1]

    offloader = make_offloader(engine=engine, pending_bytes="64GiB")
    count = 2 * LARGE_ROW_BYTES * OF_WHAT_IS_SAVED // NBYTES // 4
    saved = Saved(offloader, activations(count))
    offloader.synchronize()
    sizes = [length for kind, length in made[0].requests if kind is IoKind.WRITE]
    assert sizes[0] <= ROW_BYTES + NBYTES
    assert max(sizes) > ROW_BYTES + NBYTES
    assert max(sizes) <= count * NBYTES // OF_WHAT_IS_SAVED + NBYTES
    for index in reversed(range(count)):
        saved.check(index)
    assert_empty(offloader)


@pytest.mark.parametrize("options", [{"prefetch_bytes": "3MiB"}, {"pending_bytes": "3MiB"}])
def test_a_row_is_no_larger_than_half_of_what_the_user_allows(
    options: dict[str, str], make_offloader: MakeOffloader
) -> None:
    offloader = make_offloader(engine="memory", **options)
    mover = mover_of(offloader)
    offloader.core.accounts.baseline_peak_bytes = 1 << 40
    saved = Saved(offloader, activations(ROW_BYTES // NBYTES))
    assert mover._full_bytes == 3 * ROW_BYTES // 2
    for index in reversed(range(ROW_BYTES // NBYTES)):
        saved.check(index)
    assert_empty(offloader)


def test_room_goes_with_the_last_of_a_row_whatever_the_order(either: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    count = ROW_BYTES // NBYTES
    saved = Saved(offloader, [*activations(count), *activations(1)])
    offloader.synchronize()
    spool = offloader.tiers.spool
    assert spool is not None
    row = records_of(offloader)[0].extent
    before = spool.statistics().busy_extents, offloader._lane is not None
    for index in (2, 0, 1, 3):
        assert not row.extent._freed
        saved.check(index)
    assert (row.users, row.records, row.extent._freed) == (0, [], True)
    assert before[0] == 0
    saved.check(count)
    assert_empty(offloader)


@pytest.mark.parametrize("sizes", [[5], [1, 4096, 0, 70_000], []])
def test_copies(native: Any, sizes: list[int]) -> None:
    sources = [bytes(range(256)) * (size // 256 + 1) for size in sizes]
    targets = [bytearray(size) for size in sizes]
    native.copy([(to, source[: len(to)]) for to, source in zip(targets, sources, strict=True)])
    assert targets == [source[: len(to)] for to, source in zip(targets, sources, strict=True)]
    for to in targets:
        to.append(0)  # nothing holds it any more


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        (1, TypeError),
        ([1], TypeError),
        ([(bytearray(2), b"xy", 2)], TypeError),
        ([(b"no", b"xy")], BufferError),
        ([(bytearray(2), None)], TypeError),
        ([(bytearray(3), b"xy")], ValueError),
    ],
)
def test_copies_of_what_does_not_fit_are_refused(native: Any, parts: Any, error: type[Exception]) -> None:
    first = bytearray(2)
    with pytest.raises(error):
        native.copy(parts if parts == 1 else [(first, b"ab"), *parts])
    first.append(0)
    assert first == bytes(3)
