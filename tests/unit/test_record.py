"""The life of a record: one transition table, and nothing beside it."""

from __future__ import annotations

import itertools

import pytest
import torch

from actoffload.errors import StateError
from actoffload.tiers.record import TRANSITIONS, Record, State


def _record(state: State = State.RESIDENT) -> Record:
    storage = torch.arange(16, dtype=torch.uint8).untyped_storage()
    record = Record(storage, storage.data_ptr(), 4, 12, torch.device("cpu"))
    record.state = state
    return record


def _legal(before: State, after: State) -> bool:
    if after is State.RELEASED:
        return before is not State.RELEASED
    return after in TRANSITIONS[before]


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)), ids=lambda state: state.value)
def test_every_transition_is_legal_or_raises_and_changes_nothing(before: State, after: State) -> None:
    record = _record(before)
    if _legal(before, after):
        record.to(after)
        assert record.state is after
    else:
        with pytest.raises(StateError, match=f"record {record.number}: {before.value} -> {after.value} is not a legal"):
            record.to(after)
        assert record.state is before


def test_the_table_has_every_state_and_never_loses_bytes() -> None:
    """No transition skips a copy: a record goes from disk to host memory, and from there to the device."""
    assert set(TRANSITIONS) == set(State)
    for before, afters in TRANSITIONS.items():
        assert before not in afters, "a transition to the same state hides a bug"
        assert State.RELEASED not in afters, "the way to RELEASED is not in the table"
    assert not {State.RELOADING, State.HOSTED} & set(TRANSITIONS[State.SPILLED])
    assert State.SPILLED not in TRANSITIONS[State.STAGING]


def test_flat_is_the_span_and_shares_memory() -> None:
    record = _record()
    assert record.on_device
    assert record.nbytes == 8
    assert record.flat().tolist() == list(range(4, 12))
    record.data, record.data_begin = torch.arange(4, 12, dtype=torch.uint8).untyped_storage(), 4
    assert record.flat().tolist() == list(range(4, 12))
    record.data = None
    assert not record.on_device
