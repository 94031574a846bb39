"""A plan in numbers and text: what each block does and why, what sets the peak, what more memory would buy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actoffload.errors import BudgetError, ConfigError
from actoffload.plan_analysis import OUTSIDE, Alternative, analyse, conditions_of, milliseconds, one_more
from actoffload.plan_report import MOST_ROWS, block_cells, merged_rows, render_plan, why_lines
from actoffload.planner import Plan
from actoffload.planners import Limits, Observed, make_planner
from actoffload.profile import Block, Link, Profile, Storage
from actoffload.simulator import simulate
from actoffload.testing.profiles import Accelerator, link, random_profile, transformer_profile

GIB = 1 << 30


def transformer(layers: int = 6, write_gb_s: float = 5.0) -> Profile:
    accelerator = Accelerator(name="paper", flops=300e12, host=None, disk=link(write_gb_s, 6))
    return transformer_profile(4096, layers, 4, accelerator=accelerator)


def small(**changes: object) -> Profile:
    """Two blocks of 1000 bytes each, 10 bytes/s out and back, and a parameter-like storage outside."""
    storages = (
        Storage(index=0, nbytes=1000, birth_s=0.0, need_s=900.0, last_need_s=1000.0, block=0, module="a"),
        Storage(index=1, nbytes=1000, birth_s=100.0, need_s=200.0, last_need_s=300.0, block=1, module="b"),
        Storage(index=None, nbytes=5, birth_s=100.0, need_s=None, last_need_s=900.0, kept="keep()"),
    )
    blocks = tuple(
        Block(name=name, forward_s=100.0, backward_s=400.0, recompute_s=50.0, input_bytes=10) for name in ("a", "b")
    )
    disk = Link(write_bytes_per_s=10.0, read_bytes_per_s=10.0)
    values = {"storages": storages, "blocks": blocks, "disk": disk, "forward_s": 200.0, "backward_s": 800.0}
    return Profile(**(values | changes))  # type: ignore[arg-type]


def make(profile: Profile, limits: Limits, planner: str = "auto") -> Plan:
    return make_planner(planner).plan(profile, limits)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("share", [None, 0.4, 0.7])
def test_the_rows_add_up_to_the_step(seed: int, share: float | None) -> None:
    profile = random_profile(seed)
    budget = None if share is None else int(share * profile.baseline_peak_bytes)
    limits = Limits(device_budget=budget)
    try:
        plan = make(profile, limits)
    except BudgetError as error:
        limits = Limits(device_budget=error.floor_bytes)
        plan = make(profile, limits)
    analysis = analyse(profile, plan, limits)
    rows, seen = analysis.rows, analysis.prediction
    assert seen == simulate(profile, plan, conditions_of(limits))
    assert sum(row.saved_bytes for row in rows) == profile.saved_bytes
    assert sum(row.peak_bytes for row in rows) == seen.peak_bytes
    assert sum(row.recompute_s for row in rows) == pytest.approx(seen.recompute_s)
    assert sum(row.wait_s for row in rows) == pytest.approx(sum(s for _, s in seen.waits))
    assert sum(row.disk_bytes + row.host_bytes for row in rows) >= plan.offloaded_bytes - seen.pressed_bytes
    assert {row.name for row in rows} <= {block.name for block in profile.blocks} | {OUTSIDE}
    assert all(row.why for row in rows)
    render_plan(profile, plan, seen, limits=limits)


def test_blocks_say_what_and_why() -> None:
    profile = small()
    plan = make(profile, Limits(device_budget=1500))
    keep, recompute = (analyse(profile, plan, Limits(device_budget=1500)).rows[n] for n in (1, 0))
    assert (recompute.name, keep.name) == ("a", "b")
    assert (keep.what, keep.why) == ("keep", "needed again before it could be back")
    assert recompute.what in ("recompute", "offload")
    outside = analyse(profile, plan).rows[2]
    assert (outside.name, outside.what, outside.why) == (OUTSIDE, "keep", "must stay: keep()")


def test_what_is_recomputed_is_compared_with_moving_it() -> None:
    profile = small()
    plan = make(profile, Limits())
    forced = replace(plan, entries=(), recompute=("b",), declined="")
    rows = {row.name: row for row in analyse(profile, forced).rows}
    assert rows["b"].what == "recompute"
    assert rows["b"].why == "50 s frees 1000 B, moving takes 200 s; its input leaves"
    assert (rows["b"].recomputed_bytes, rows["b"].recompute_s, rows["b"].disk_bytes) == (1000, 50.0, 10)
    assert rows["a"].what == "offload"
    assert rows["a"].why == "idle 900 s, moved in 200 s"


def test_blocks_show_how_long_they_really_took() -> None:
    profile = small()
    plan = make(profile, Limits())
    looked = Observed(step_s=1.0, blocks=(("a", 0.25), ("nobody", 7.0)))
    text = render_plan(profile, plan, seen=looked)
    table = text[: text.index("\nwhy\n")]
    rows = {line.split()[0]: line for line in table.splitlines() if line.startswith("  ")}
    head = rows["block"]
    column = slice(head.index("added") + len("added"), head.index("seen") + len("seen"))
    assert rows["a"][column].strip() == "250 ms"
    assert rows["b"][column].strip() == "-"
    assert "7 s" not in text
    assert "250 ms" not in render_plan(profile, plan, seen=replace(looked, blocks=()))


def test_the_text_names_everything() -> None:
    profile = transformer()
    limits = Limits(device_budget=GIB)
    planner = make_planner("auto")
    plan = planner.plan(profile, limits)
    seen = Observed(step_s=0.15, forward_wait_s=0.002, backward_wait_s=0.0, peak_bytes=GIB - 5)
    more = one_more(profile, plan, limits, planner)
    text = render_plan(profile, plan, simulate(profile, plan, conditions_of(limits)), seen, limits=limits, more=more)
    for part in (
        "plan of auto on cuda, device budget 1.0 GiB; disk 5 GB/s out, 6 back",
        "blocks recomputed",
        "predicted        seen  nothing moved",
        "150 ms         118 ms",
        "layers.5",
        "(outside blocks)",
        "frees 480.0 MiB, moving takes 185 ms",
        "the peak, ",
        "most of it: ",
        "1.0 GiB more of budget would buy ",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 120


def test_a_declined_plan_says_so() -> None:
    profile = transformer(write_gb_s=0.05)
    text = render_plan(profile, make(profile, Limits()), limits=Limits())
    assert "declined: moving lowers the peak by less than 1%" in text
    assert "the plan declines to move" in text
    assert "more of budget" not in text
    assert "no budget" in text


def test_more_memory_is_priced() -> None:
    profile = transformer()
    planner = make_planner("auto")
    limits = Limits(device_budget=GIB)
    plan = planner.plan(profile, limits)
    more = one_more(profile, plan, limits, planner)
    assert more is not None
    assert more.device_budget == 2 * GIB
    assert more.step_s is not None
    assert plan.predicted_step_s is not None
    assert more.step_s < plan.predicted_step_s
    assert one_more(profile, plan, Limits(), planner) is None
    huge = Limits(device_budget=100 * GIB)
    same = one_more(profile, planner.plan(profile, huge), huge, planner)
    text = render_plan(profile, planner.plan(profile, huge), limits=huge, more=same)
    assert "1.0 GiB more of budget would buy no time" in text
    none = Alternative(device_budget=2 * GIB, step_s=None, peak_bytes=None)
    assert "still no plan keeps it" in render_plan(profile, plan, limits=limits, more=none)
    tight = Limits(device_budget=1)
    assert one_more(profile, plan, tight, planner, 1) == Alternative(device_budget=2, step_s=None, peak_bytes=None)


def test_many_blocks_share_lines_and_lose_nothing() -> None:
    profile = transformer(layers=60)
    plan = make(profile, Limits(device_budget=profile.baseline_peak_bytes // 2))
    rows = analyse(profile, plan).rows
    merged = merged_rows(rows)
    assert len(rows) == 61
    assert len(merged) <= MOST_ROWS
    assert sum(row.saved_bytes for row in merged) == profile.saved_bytes
    assert sum(row.recompute_s for row in merged) == pytest.approx(sum(row.recompute_s for row in rows))
    assert " … layers." in merged[0].name
    assert merged[-1].name == OUTSIDE
    assert merged_rows(rows[:5]) == list(rows[:5])


def test_equal_reasons_share_a_line() -> None:
    profile = transformer(write_gb_s=0.05)
    rows = analyse(profile, make(profile, Limits())).rows
    assert why_lines(rows) == ["layers.0 … (outside blocks): the plan declines to move"]
    assert why_lines(rows[:1]) == ["layers.0: the plan declines to move"]
    assert block_cells(rows[0])[:3] == ("layers.0", "keep", "512.0 MiB")


def test_a_step_that_saves_nothing() -> None:
    profile = Profile(storages=(), forward_s=1.0)
    text = render_plan(profile, make(profile, Limits()), limits=Limits())
    assert "nothing is saved" in text
    assert "no link was measured" in text


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="these blocks cannot be recomputed"):
        render_plan(small(), Plan((), recompute=("c",)))


def test_times() -> None:
    assert [milliseconds(s) for s in (0.0, 0.0123456, 0.9999, 1.0, 12.3456)] == [
        "0 s",
        "12.3 ms",
        "1 s",
        "1 s",
        "12.3 s",
    ]
