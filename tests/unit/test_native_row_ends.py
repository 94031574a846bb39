"""The beginning and the end of a row's transfer for each of its records: in C as in Python, and what C fails to do."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actoffload import OffloadConfig, Offloader
from actoffload.accounts import Accounts
from actoffload.cpu_tier import Layout
from actoffload.native_known import hooks_in_c
from actoffload.record import Record, State
from actoffload.row_tier import ROW_BYTES
from actoffload.rows import Joint, Row
from tests.harness import MakeOffloader, assert_empty, save_in_python
from tests.unit.rows import ALIGNMENT, NBYTES, Saved, activations, mover_of, records_of, row_of

ANOTHERS = OSError("of another's read")


@pytest.fixture(scope="module")
def native() -> Any:
    module = hooks_in_c()
    assert module is not None
    return module


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
    joint, records = Joint(), row_of([facts[:4] for facts in some]).records
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
