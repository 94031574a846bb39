"""A profile in which other regions run once, against rules that hold for every choice of regions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actoffload.errors import ConfigError
from actoffload.planning.profile import DERIVED, RECOMPUTED, Profile
from actoffload.planning.regions import choosable, with_regions
from tests.profiles import checkpointed, random_profile, regions_once, slow_profile

TAPES = 2


def twice(base: Profile) -> Profile:
    """Two micro-batches, one after the other."""
    later = base.step_s

    def moved(part: object, *names: str) -> dict[str, float | None]:
        times = {name: getattr(part, name) for name in names}
        return {name: None if time_s is None else time_s + later for name, time_s in times.items()}

    storages = [replace(s, tape=1, **moved(s, "birth_s", "need_s", "last_need_s")) for s in base.storages]  # type: ignore[arg-type]
    regions = [
        replace(r, tape=1, **moved(r, "begin_s", "end_s", "again_s", "backward_end_s"))  # type: ignore[arg-type]
        for r in base.regions
    ]
    longer = {name: 2 * getattr(base, name) for name in ("forward_s", "backward_s", "other_s")}
    return replace(base, storages=(*base.storages, *storages), regions=(*base.regions, *regions), **longer)


@st.composite
def bases(draw: st.DrawFn) -> Profile:
    """A step of a checkpointed model, all regions run again, of one micro-batch or two."""
    seed, storages, blocks = draw(st.integers(0, 1 << 40)), draw(st.integers(2, 40)), draw(st.integers(1, 6))
    base = checkpointed(random_profile(seed, storages=storages, blocks=blocks))
    return twice(base) if draw(st.booleans()) else base


LATE = twice(checkpointed(random_profile(417, storages=40, blocks=6)))
"""Its last recomputation begins after ``forward_s + backward_s``, as there is time between its micro-batches."""


@settings(max_examples=150, deadline=None)
@given(base=bases(), mask=st.integers(0, 63))
@example(base=LATE, mask=63)
def test_rules_for_every_choice_of_regions(base: Profile, mask: int) -> None:
    once = frozenset(place for place in choosable(base) if mask >> place & 1)
    other = with_regions(base, once)
    chosen = [region for region in base.regions if region.place in once]
    # Bytes: tensors that a region held are saved, and no others come or go.
    assert other.saved_bytes == base.saved_bytes
    held = Counter(s.nbytes for s in base.storages if s.kept == RECOMPUTED)
    held.subtract(s.nbytes for s in other.storages if s.kept == RECOMPUTED)
    assert held.total() == len(chosen)
    saved = Counter((s.tape, s.region, s.nbytes, s.kept) for s in other.storages if s.region is not None)
    assert saved == Counter((r.tape, r.place, save.nbytes, save.kept) for r in chosen for save in r.saves)
    # Times: a step is shorter by the recomputation that it omits, and everything keeps its order.
    less_s = sum(region.recompute_s for region in chosen)
    assert other.step_s == pytest.approx(base.step_s - less_s)
    outside = [s for s in base.storages if s.kept != RECOMPUTED]
    same = [s for s in other.storages if s.kept != RECOMPUTED and s.region is None]
    assert [s.nbytes for s in same] == [s.nbytes for s in outside]
    assert all(new.last_need_s <= old.last_need_s * (1 + 1e-9) for new, old in zip(same, outside, strict=True))
    indexed = [s for s in other.storages if s.index is not None]
    for tape in range(TAPES):  # in the order of saving
        births = [s.birth_s for s in indexed if s.tape == tape]
        assert all(after >= before - 1e-9 for before, after in pairwise(births))
    # A region's saved tensors live from its forward until backward has left it, the last saved needed first.
    for region in (r for r in other.regions if r.place in once):
        own = [s for s in other.storages if (s.tape, s.region) == (region.tape, region.place)]
        assert region.again_s is None
        assert region.backward_end_s is not None
        for s in own:
            assert region.begin_s * (1 - 1e-9) <= s.birth_s <= region.end_s * (1 + 1e-9)
            assert s.need_s is not None
            assert s.last_need_s <= region.backward_end_s * (1 + 1e-9)
            assert s.movable == (not s.kept and s.nbytes > 0)
        # A computation from a storage ends as the next one is saved, so backward needs it when that one is done.
        assert [a.need_s for a in own[:-1]] == pytest.approx([b.last_need_s for b in own[1:]])
    assert other.once == tuple(sorted(once))
    assert Profile.from_json(other.to_json()) == other
    # No region once is the recorded step, and all once is the shortest one.
    assert with_regions(base, ()) == base
    everything = with_regions(base, choosable(base))
    assert everything.step_s <= min(other.step_s, base.step_s) * (1 + 1e-9)
    assert all(not region.saves for region in everything.regions)


@pytest.mark.parametrize("seed", range(12))
def test_all_run_once_is_the_model_without_checkpoints(seed: int) -> None:
    plain, _ = regions_once(random_profile(seed, storages=30, blocks=4))
    base = checkpointed(random_profile(seed, storages=30, blocks=4))
    once = with_regions(base, choosable(base))
    assert once.step_s == pytest.approx(plain.step_s)
    reached = {None, *choosable(base)}  # a region that backward never reaches is neither recomputed nor held
    saved = [s for s in plain.storages if s.region in reached]
    assert sorted(s.nbytes for s in once.storages) == sorted(s.nbytes for s in saved)
    assert [s.birth_s for s in once.storages] == pytest.approx([s.birth_s for s in saved])
    # As tall or taller: a storage counts as needed from the end of its operator's time on.
    assert once.baseline_peak_bytes >= 0.99 * plain.baseline_peak_bytes


def test_a_place_without_a_known_recomputation_is_refused() -> None:
    base = checkpointed(slow_profile())
    unknown = replace(base, regions=(replace(base.regions[0], again_s=None), *base.regions[1:]))
    for profile, place in ((base, 99), (unknown, 0)):
        with pytest.raises(ConfigError) as caught:
            with_regions(profile, {place})
        assert (caught.value.field, caught.value.value) == ("once", [place])


@pytest.mark.parametrize(("kept", "count"), [("", 1), (DERIVED, 2)])
def test_a_tensor_from_outside_is_saved_once_and_derived_in_each_region(kept: str, count: int) -> None:
    base = checkpointed(random_profile(3, storages=30, blocks=4))
    once = sorted(place for place in choosable(base) if base.regions[place].saves)[:2]
    regions = list(base.regions)
    for place in once:
        first, *others = regions[place].saves
        regions[place] = replace(regions[place], saves=(replace(first, nbytes=12345, kept=kept, outside=0), *others))
    each = [with_regions(replace(base, regions=tuple(regions)), [place]) for place in once]
    found = [s for s in with_regions(replace(base, regions=tuple(regions)), once).storages if s.nbytes == 12345]
    assert len(once) == 2
    assert len(found) == count
    if not kept:  # it is there until the first region's backward has left it
        assert found[0].region == once[0]
        needs = [s.need_s for profile in each for s in profile.storages if s.nbytes == 12345]
        assert found[0].need_s is not None
        assert found[0].need_s <= min(need for need in needs if need is not None)
