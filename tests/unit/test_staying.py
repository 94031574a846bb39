"""What stays without a record is counted by notes: in their order, from any thread, and without piling up."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import keep, no_offload
from actoffload.accounts import MANY_NOTES, Accounts
from actoffload.errors import NothingOffloadedError
from actoffload.native_known import unpack
from tests.harness import MakeOffloader

SMALL = 16
"""Elements of what these tests save: 64 bytes."""


def _sines(count: int, x: Tensor | None = None) -> Tensor:
    h = torch.ones(SMALL, requires_grad=True).clone() if x is None else x
    for _ in range(count):
        h = h.sin()
    return h


def test_notes_are_counted_in_the_order_in_which_they_came() -> None:
    accounts = Accounts()
    accounts.saved(100)
    accounts.came(70)
    accounts.notes += [("a", 10, True), ("b", 5, False), 10, ("a", 8, True), ("a", 4, True), 4]
    accounts.settle()
    assert not accounts.notes
    assert accounts.packed_tensors == 4
    assert accounts.packed_bytes == 27
    assert accounts.kept_bytes == {"a": 22, "b": 5}
    assert (accounts.baseline_bytes, accounts.resident_bytes) == (108, 78)
    assert (accounts.baseline_peak_bytes, accounts.resident_peak_bytes, accounts.step_peak_bytes) == (112, 82, 82)


def test_a_peak_that_was_higher_before_stays() -> None:
    accounts = Accounts()
    accounts.came(500)
    accounts.left(500)
    accounts.notes.append(("a", 10, True))
    accounts.settle()
    assert (accounts.baseline_peak_bytes, accounts.resident_peak_bytes, accounts.resident_bytes) == (10, 500, 10)


@pytest.mark.parametrize("change", ["left", "came", "saved", "died"])
def test_what_another_thread_counts_meanwhile_hides_no_peak(change: str) -> None:
    accounts = Accounts()
    accounts.saved(100)
    accounts.came(100)
    accounts.notes.append(("a", 50, True))
    getattr(accounts, change)(80)
    assert not accounts.notes
    assert accounts.resident_peak_bytes == (230 if change == "came" else 150)
    assert accounts.baseline_peak_bytes == (230 if change == "saved" else 150)


def test_an_interrupt_loses_nothing_that_was_worked_off() -> None:
    accounts = Accounts()
    broken: Any = ("not a note",)
    accounts.notes += [("a", 10, True), ("b", 5, False), broken, 10]
    with pytest.raises(ValueError, match="not enough values"):
        accounts.settle()
    assert (accounts.packed_tensors, accounts.resident_bytes, accounts.resident_peak_bytes) == (2, 10, 10)
    assert accounts.notes.popleft() is broken, "nor is anything taken off that was not counted"
    accounts.settle()
    assert accounts.resident_bytes == 0


def test_an_interrupted_save_is_counted_out_again(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(min_bytes="1KiB", device_budget="1MiB")
    drain = offloader._drain

    def interrupt() -> None:
        monkeypatch.setattr(offloader, "_drain", drain)
        raise KeyboardInterrupt

    with offloader:
        x = torch.ones(SMALL, requires_grad=True).clone()
        monkeypatch.setattr(offloader, "_drain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            x.sin()
    offloader.statistics()
    assert (offloader.core.accounts.baseline_bytes, offloader.core.accounts.resident_bytes) == (0, 0)


def test_an_inner_context_is_not_blamed_for_what_the_outer_one_saved(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes="1KiB", strict=True, policy="greedy")
    ended = False
    try:
        with offloader:
            _sines(3)
            with torch.no_grad(), offloader:  # raises only if it takes the three for its own
                _sines(2)
            ended = True
    except NothingOffloadedError:
        assert ended, "the inner context was blamed"
    else:
        raise AssertionError("the outer context moved nothing, and is strict")


def test_hooks_cost_nothing_of_the_compiler_where_nothing_is_compiled() -> None:
    assert getattr(unpack, "__name__", "") == "direct"


def test_small_tensors_are_counted_when_the_counts_are_asked_for(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes="1KiB")
    with offloader:
        out = _sines(10)
    before = offloader.statistics()
    assert before.packed_tensors == 10
    assert before.kept_bytes == {"below min_bytes": 10 * 64}
    assert before.resident_peak_bytes == before.baseline_peak_bytes == 10 * 64
    out.sum().backward()
    accounts = offloader.core.accounts
    offloader.statistics()
    assert (accounts.baseline_bytes, accounts.resident_bytes) == (0, 0)


def test_notes_do_not_pile_up_in_a_forward_that_moves_nothing(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes="1KiB")
    with offloader:
        out = _sines(MANY_NOTES + MANY_NOTES // 2)
        assert len(offloader.core.accounts.notes) <= MANY_NOTES
        assert offloader.core.accounts.packed_tensors >= MANY_NOTES
    out.sum().backward()
    assert offloader.statistics().packed_tensors == MANY_NOTES + MANY_NOTES // 2


def test_threads_that_save_at_once_lose_no_note(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes="1KiB")

    def work() -> None:
        for _ in range(10):
            with offloader:
                out = _sines(300)
            out.sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics = offloader.statistics()
    assert statistics.packed_tensors == 4 * 10 * 300
    assert statistics.kept_bytes == {"below min_bytes": 4 * 10 * 300 * 64}
    assert offloader.core.accounts.resident_bytes == 0


@pytest.mark.parametrize("count", [1, 2])
def test_marks_and_regions_nest_and_end(make_offloader: MakeOffloader, count: int) -> None:
    offloader = make_offloader(min_bytes=1)
    with offloader:
        x = torch.ones(SMALL, requires_grad=True).clone()
        with no_offload():
            for _ in range(count):
                with no_offload():
                    x = x.sin()
            x = x.sin()
        marked = keep(x)
        out = marked.sin().sin()
    kept = offloader.statistics().kept_bytes
    assert kept["no_offload()"] == 64 * (count + 1)
    assert kept["keep()"] == 64
    assert sum(kept.values()) == 64 * (count + 2), "the last sine is outside"
    out.sum().backward()
