"""What stays without a record is counted by notes: in their order, from any thread, and without piling up."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from actoffload import keep, no_offload
from actoffload.accounts import Accounts
from actoffload.staying import MANY, Staying
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
    staying = Staying(accounts)
    staying.notes += [("a", 10, True), ("b", 5, False), 10, ("a", 8, True), ("a", 4, True), 4]
    staying.settle()
    assert not staying.notes
    assert accounts.packed_tensors == 4
    assert accounts.packed_bytes == 27
    assert accounts.kept_bytes == {"a": 22, "b": 5}
    assert (accounts.baseline_bytes, accounts.resident_bytes) == (108, 78)
    assert (accounts.baseline_peak_bytes, accounts.resident_peak_bytes, accounts.step_peak_bytes) == (112, 82, 82)


def test_a_peak_that_was_higher_before_stays() -> None:
    accounts = Accounts()
    accounts.came(500)
    accounts.left(500)
    staying = Staying(accounts)
    staying.notes.append(("a", 10, True))
    staying.settle()
    assert (accounts.baseline_peak_bytes, accounts.resident_peak_bytes, accounts.resident_bytes) == (10, 500, 10)


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
        out = _sines(MANY + MANY // 2)
        assert len(offloader._staying.notes) <= MANY
        assert offloader.core.accounts.packed_tensors >= MANY
    out.sum().backward()
    assert offloader.statistics().packed_tensors == MANY + MANY // 2


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
