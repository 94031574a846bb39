"""How ranks come to one plan: the talk through a store, and what they join."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore

from actoffload.agreement import Agreement, joined, structure
from actoffload.profile import Block, Link, Profile, Storage


def _talks(store: Any, world: int) -> list[Agreement]:
    talks = [Agreement(store, rank, world) for rank in range(world)]
    for talk in talks:
        talk._name = talks[0]._name  # in one process every member would begin the next talk
    return talks


@pytest.fixture(params=["hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The stores that need no server."""
    return HashStore() if request.param == "hash" else FileStore(str(tmp_path / "store"), 3)


def test_every_member_hears_all_in_the_order_of_ranks(store: Any) -> None:
    talks = _talks(store, 3)
    for rank in (1, 2, 0):
        talks[rank].say(f"from {rank}")
    assert [talk.outcome() for talk in talks] == [["from 0", "from 1", "from 2"]] * 3


def test_who_finds_that_one_has_not_spoken_ends_the_talk_for_all(store: Any) -> None:
    """The one that speaks too late, and has heard everybody, must not go on alone."""
    talks = _talks(store, 3)
    talks[0].say("early")
    talks[1].say("early")
    assert talks[0].outcome() is None
    talks[2].say("late")
    assert [talk.outcome() for talk in talks] == [None] * 3


def test_talks_of_one_store_are_told_apart(store: Any) -> None:
    for word in ("one", "two"):
        talk = Agreement(store, 0, 1)
        talk.say(word)
        assert talk.outcome() == [word]


def test_without_a_group_there_is_nobody_to_talk_to() -> None:
    assert Agreement.of_the_default_group() is None


# -- what is joined ---------------------------------------------------------------------------------------------------


def _profile(step_s: float = 1.0, write: float = 2e9, name: str = "layers.0", nbytes: int = 100) -> Profile:
    storages = tuple(
        Storage(index=n, nbytes=nbytes, birth_s=0.1 * step_s, need_s=0.6 * step_s, last_need_s=0.7 * step_s, block=0)
        for n in range(2)
    )
    block = Block(name=name, forward_s=0.2, backward_s=0.4, recompute_s=0.2, input_bytes=nbytes)
    return Profile(
        storages=storages,
        blocks=(block,),
        disk=Link(write_bytes_per_s=write, read_bytes_per_s=3e9 - write / 2),
        forward_s=0.3 * step_s,
        backward_s=0.7 * step_s,
    )


def test_alike_ranks_plan_for_the_slowest_step_and_the_slowest_links() -> None:
    profiles = [_profile(1.0, 2e9), _profile(1.5, 1e9)]
    plans = [joined(profiles, [2] * len(profiles), rank) for rank in range(2)]
    assert plans[0] == plans[1]
    assert plans[0] is not None
    assert plans[0].step_s == profiles[1].step_s
    assert plans[0].disk == Link(write_bytes_per_s=1e9, read_bytes_per_s=2e9)


def test_a_rank_with_the_same_blocks_and_another_structure_ends_it_for_both() -> None:
    profiles = [_profile(), _profile(nbytes=50)]
    assert [joined(profiles, [2] * len(profiles), rank) for rank in range(2)] == [None, None]


def test_ranks_that_count_their_steps_differently_do_not_agree() -> None:
    """They would begin to recompute at different steps."""
    profiles = [_profile(), _profile()]
    assert [joined(profiles, [2, 3], rank) for rank in range(2)] == [None, None]


def test_stages_with_blocks_of_their_own_plan_for_themselves() -> None:
    profiles = [_profile(), _profile(1.2), _profile(5.0, 1e8, name="layers.1")]
    found = [joined(profiles, [2] * len(profiles), rank) for rank in range(3)]
    assert found[0] == found[1] != found[2]
    assert found[2] == profiles[2]


def test_structures_survive_the_text_in_which_they_are_sent() -> None:
    profile = _profile()
    assert structure(Profile.from_json(json.loads(json.dumps(profile.to_json())))) == structure(profile)
    assert structure(replace(profile, disk=None)) != structure(profile)
