"""Ranks whose blocks communicate follow one plan after `agree`: if one recomputed and the other did not, this hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.processes import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What the two ranks saw."""
    folder: Path = tmp_path_factory.mktemp("agreement")
    return launch("tests.integration.workers.agreement", 2, folder)


def test_gradients_are_those_without_offloading_before_and_after(ranks: list[dict[str, object]]) -> None:
    assert all(rank["equal"] for rank in ranks)
    assert [rank["live"] for rank in ranks] == [0, 0]


def test_nothing_is_recomputed_before_the_ranks_agree(ranks: list[dict[str, object]]) -> None:
    assert [rank["alone"] for rank in ranks] == [(), ()]


def test_the_plan_of_the_rank_with_the_slow_disk_is_followed_by_both(ranks: list[dict[str, object]]) -> None:
    assert [rank["agreed"] for rank in ranks] == [True, True]
    assert [rank["recompute"] for rank in ranks] == [tuple(f"layers.{n}" for n in range(4))] * 2
    assert [rank["last"] for rank in ranks] == ["agreed among 2 ranks"] * 2  # and it stays


def test_they_do_not_agree_before_each_has_a_plan(ranks: list[dict[str, object]]) -> None:
    assert [rank["too_early"] for rank in ranks] == [False, False]


def test_in_the_middle_of_a_step_of_one_all_are_told(ranks: list[dict[str, object]]) -> None:
    for rank in ranks:
        assert "agree(): rank 1 of the group: what a forward saved is still alive" in str(rank["in_a_step"])


def test_ranks_that_save_different_tensors_go_on_without(ranks: list[dict[str, object]]) -> None:
    for rank in ranks:
        assert rank["unequal"] is False
        assert "save different tensors" in str(rank["told"])
        assert rank["unequal_recompute"] == ()


def test_a_plan_that_fits_no_more_ends_on_all_ranks_at_the_next_call(ranks: list[dict[str, object]]) -> None:
    every = tuple(f"layers.{n}" for n in range(4))
    assert [rank["later"] for rank in ranks] == [(True, every, False, ())] * 2


def test_a_rank_that_cannot_agree_takes_part_and_all_are_told(ranks: list[dict[str, object]]) -> None:
    for rank in ranks:
        assert rank["problems"] == [
            "agree(): rank 1 of the group: its policy is not 'auto'",
            "agree(): rank 1 of the group: it was closed",
        ]


def test_where_one_rank_may_not_recompute_none_does(ranks: list[dict[str, object]]) -> None:
    assert [rank["unwilling"] for rank in ranks] == [(False, ())] * 2
