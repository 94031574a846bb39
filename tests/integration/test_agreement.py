"""After `agree`, ranks that communicate in checkpointed blocks run the same blocks once; otherwise they hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.processes import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder: Path = tmp_path_factory.mktemp("agreement")
    return launch("tests.integration.workers.agreement", 2, folder)


def test_gradients_are_those_without_offloading_before_and_after(ranks: list[dict[str, object]]) -> None:
    """The worker has compared them."""
    assert [rank["live"] for rank in ranks] == [0, 0]


def test_regions_that_communicate_run_again_before_the_ranks_agree(ranks: list[dict[str, object]]) -> None:
    assert [rank["alone"] for rank in ranks] == [[], []]


def test_the_first_ranks_regions_run_once_on_both(ranks: list[dict[str, object]]) -> None:
    assert [rank["agreed"] for rank in ranks] == [True, True]
    assert [rank["once"] for rank in ranks] == [[0, 2]] * 2
    for rank in ranks:
        history = rank["history"]
        assert isinstance(history, list)
        assert "the ranks have agreed" in history
        assert history[-1].startswith("first plan"), "each rank plans its own storages"


def test_they_do_not_agree_before_each_has_a_plan(ranks: list[dict[str, object]]) -> None:
    assert [rank["too_early"] for rank in ranks] == [False, False]


def test_agree_in_the_middle_of_one_ranks_step_raises_on_all(ranks: list[dict[str, object]]) -> None:
    for rank in ranks:
        assert "agree(): rank 1 of the group: what a forward saved is still alive" in str(rank["in_a_step"])


def test_ranks_that_save_different_tensors_go_on_without(ranks: list[dict[str, object]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["unequal"] is False
        assert "save different tensors" in str(rank["reported"])
        assert rank["unequal_once"] == [[0, 2], [1]][number], "no region communicates: each rank chooses its own"


def test_forwards_of_another_shape_run_the_same_regions_once(ranks: list[dict[str, object]]) -> None:
    assert [rank["later"] for rank in ranks] == [(True, [0, 2])] * 2


def test_a_rank_that_cannot_agree_takes_part_and_all_ranks_raise(ranks: list[dict[str, object]]) -> None:
    for rank in ranks:
        assert rank["problems"] == [
            "agree(): rank 1 of the group: its policy is not 'auto'",
            "agree(): rank 1 of the group: it was closed",
        ]


def test_where_one_rank_leaves_checkpoints_alone_no_region_runs_once(ranks: list[dict[str, object]]) -> None:
    assert [rank["unwilling"] for rank in ranks] == [(False, [])] * 2
