"""A plan explained: what each block does and why, what sets the peak, what more memory would buy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actoffload.errors import BudgetError, ConfigError
from actoffload.planning.constants import MOST_ROWS
from actoffload.planning.explain import (
    OUTSIDE,
    BlockRow,
    BudgetRow,
    analyse,
    budget_table,
    one_more,
    render_budgets,
    render_plan,
)
from actoffload.planning.observed import Observed
from actoffload.planning.plan import Plan, PlanEntry
from actoffload.planning.planners import Limits, make_planner
from actoffload.planning.profile import Block, Link, Profile, Storage
from actoffload.planning.simulator import simulate
from tests.profiles import Accelerator, link, random_profile, transformer_profile

GIB = 1 << 30


def transformer(layers: int = 6, write_gb_s: float = 5.0) -> Profile:
    accelerator = Accelerator(name="paper", flops=300e12, host=None, disk=link(write_gb_s, 6))
    return transformer_profile(4096, layers, 4, accelerator=accelerator)


def small() -> Profile:
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
    return Profile(storages=storages, blocks=blocks, disk=disk, forward_s=200.0, backward_s=800.0)


def make(profile: Profile, limits: Limits) -> Plan:
    return make_planner("auto").plan(profile, limits)


def rows_of(profile: Profile, plan: Plan, limits: Limits | None = None) -> dict[str, BlockRow]:
    return {row.name: row for row in analyse(profile, plan, limits).rows}


@pytest.mark.parametrize("share", [None, 0.4, 0.7])
@pytest.mark.parametrize("seed", range(6))
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
    assert seen == simulate(profile, plan, limits)
    assert sum(row.saved_bytes for row in rows) == profile.saved_bytes
    assert sum(row.peak_bytes for row in rows) == seen.peak_bytes
    assert sum(row.recompute_s for row in rows) == pytest.approx(seen.recompute_s)
    assert sum(row.wait_s for row in rows) == pytest.approx(sum(s for _, s in seen.waits))
    assert sum(row.disk_bytes + row.host_bytes for row in rows) >= plan.offloaded_bytes - sum(
        profile.storages[p].nbytes for p in seen.pressed
    )
    assert {row.name for row in rows} <= {block.name for block in profile.blocks} | {OUTSIDE}
    assert all(row.why for row in rows)
    render_plan(profile, plan, limits, analysis=analysis)


def test_blocks_say_what_and_why() -> None:
    profile, limits = small(), Limits(device_budget=1500)
    rows = rows_of(profile, make(profile, limits), limits)
    assert rows["a"].what in ("recompute", "offload")
    assert (rows["b"].what, rows["b"].why) == ("keep", "needed again before it could be back")
    assert (rows[OUTSIDE].what, rows[OUTSIDE].why) == ("keep", "must stay: keep()")
    forced = rows_of(profile, replace(make(profile, Limits()), entries=(), recompute=("b",), declined=""))
    assert rows.keys() == forced.keys()
    assert forced["b"].what == "recompute"
    assert forced["b"].why == "50 s frees 1000 B, moving takes 200 s; its input leaves"
    assert (forced["b"].recomputed_bytes, forced["b"].recompute_s, forced["b"].disk_bytes) == (1000, 50.0, 10)
    assert (forced["a"].what, forced["a"].why) == ("offload", "idle 900 s, moved in 200 s")


def test_the_text_names_everything() -> None:
    profile, limits, planner = transformer(), Limits(device_budget=GIB), make_planner("auto")
    plan = planner.plan(profile, limits)
    blocks = (("layers.5", 0.77), ("nobody", 7.0))
    seen = Observed(step_s=0.15, forward_wait_s=0.002, backward_wait_s=0.0, peak_bytes=GIB - 5, blocks=blocks)
    analysis = analyse(profile, plan, limits, more=one_more(profile, plan, limits, planner))
    text = render_plan(profile, plan, limits, analysis=analysis, seen=seen)
    for part in (
        "plan of auto on cuda, device budget 1.0 GiB; disk 5 GB/s out, 6 back",
        "blocks recomputed",
        "predicted",
        "nothing moved",
        "layers.5",
        "(outside blocks)",
        "frees 480.0 MiB, moving takes 185 ms",
        "the peak, ",
        "most of it: ",
        "1.0 GiB more of budget would buy ",
    ):
        assert part in text, part
    step = next(line.split() for line in text.splitlines() if line.startswith("  step"))
    assert step[3:] == ["150", "ms", "118", "ms"], "seen, and nothing moved"
    assert " 770 ms " in next(line for line in text.splitlines() if line.startswith("  layers.5"))
    assert "7 s" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert "seen" not in render_plan(profile, plan, limits), "nobody has looked"


def test_a_declined_plan_says_so() -> None:
    profile = transformer(write_gb_s=0.05)
    text = render_plan(profile, make(profile, Limits()))
    assert "declined: moving lowers the peak by less than " in text
    assert "  layers.0 … (outside blocks): the plan declines to move" in text, "equal reasons share a line"
    assert "more of budget" not in text
    assert "no budget" in text


def test_more_memory_is_priced() -> None:
    profile, limits, planner = transformer(), Limits(device_budget=GIB), make_planner("auto")
    plan = planner.plan(profile, limits)
    more = one_more(profile, plan, limits, planner)
    assert more is not None
    assert more.device_budget == 2 * GIB
    assert (more.step_s or 0.0) < (plan.predicted_step_s or 0.0)
    assert one_more(profile, plan, Limits(), planner) is None
    huge = Limits(device_budget=100 * GIB)
    fits = planner.plan(profile, huge)
    same = analyse(profile, fits, huge, more=one_more(profile, fits, huge, planner))
    assert "1.0 GiB more of budget would buy no time" in render_plan(profile, fits, huge, analysis=same)
    none = BudgetRow(device_budget=2 * GIB, step_s=None, peak_bytes=None)
    text = render_plan(profile, plan, limits, analysis=analyse(profile, plan, limits, more=none))
    assert "still no plan keeps it" in text
    tight = Limits(device_budget=1)
    assert one_more(profile, plan, tight, planner, 1) == BudgetRow(device_budget=2, step_s=None, peak_bytes=None)


def test_many_blocks_share_lines() -> None:
    profile = transformer(layers=60)
    plan = make(profile, Limits(device_budget=profile.baseline_peak_bytes // 2))
    text = render_plan(profile, plan)
    table = text[text.index("  block ") : text.index("\nwhy\n")].splitlines()[1:-1]
    assert len(table) <= MOST_ROWS
    assert " … layers." in table[0]
    assert table[-1].startswith(f"  {OUTSIDE}")


def test_a_step_that_saves_nothing_and_a_plan_for_another_model() -> None:
    empty = Profile(storages=(), forward_s=1.0)
    text = render_plan(empty, make(empty, Limits()))
    assert "nothing is saved" in text
    assert "no link was measured" in text
    with pytest.raises(ConfigError, match="these blocks cannot be recomputed"):
        render_plan(small(), Plan((), recompute=("c",)))


def test_a_range_of_times_has_one_unit() -> None:
    short = small()
    storages = (short.storages[0], replace(short.storages[1], birth_s=100.0, need_s=100.5), short.storages[2])
    together = tuple(replace(storage, block=0 if storage.block == 1 else storage.block) for storage in storages)
    disk = Link(write_bytes_per_s=1e6, read_bytes_per_s=1e6)
    profile = replace(short, storages=together, blocks=short.blocks[:1], disk=disk)
    both = Plan(tuple(PlanEntry(index=n, nbytes=1000, action="offload") for n in (0, 1)))
    assert "idle 0.5 to 900 s" in render_plan(profile, both)


def one_large_block() -> Profile:
    """Eight blocks of 1 MiB whose disk is too slow to help, so that only recomputing does."""
    size, count = 1 << 20, 8
    storages = tuple(
        Storage(
            index=n, nbytes=size // 4, birth_s=b + n % 4 / 4, need_s=24.0 - 2 * b, last_need_s=25.5 - 2 * b, block=b
        )
        for b in range(count)
        for n in range(4 * b, 4 * b + 4)
    )
    blocks = tuple(
        Block(name=f"h.{b}", forward_s=1.0, backward_s=2.0, recompute_s=1.0, input_bytes=1024) for b in range(count)
    )
    disk = Link(write_bytes_per_s=0.15 * size, read_bytes_per_s=0.15 * size)
    return Profile(storages=storages, blocks=blocks, disk=disk, forward_s=8.0, backward_s=18.0)


def test_the_table_of_budgets_has_the_steps_time_and_peak() -> None:
    profile = one_large_block()
    rows = budget_table(profile, Limits(), make_planner("auto"))
    budgets = [row.device_budget for row in rows]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == profile.baseline_peak_bytes
    assert rows[0].step_s == pytest.approx(profile.step_s)
    for row in rows:
        plan = make(profile, Limits(device_budget=row.device_budget))
        assert (row.step_s, row.peak_bytes) == (plan.predicted_step_s, plan.predicted_peak_bytes)
        assert row.peak_bytes is not None
        assert row.peak_bytes <= row.device_budget


def test_the_table_says_when_a_budget_lies_just_below_a_block_and_what_one_above_it_gives() -> None:
    profile, planner = one_large_block(), make_planner("auto")
    limits = Limits(device_budget=int(0.95 * (1 << 20)))
    rows = {row.device_budget: row for row in budget_table(profile, limits, planner)}
    below = rows[limits.device_budget or 0]
    assert below.note == "just below one block (1.0 MiB), which cannot be recomputed"
    above = min((row for budget, row in rows.items() if budget > 1 << 20), key=lambda row: row.device_budget)
    assert above.recomputed
    assert above.step_s is not None
    assert below.step_s is None or above.step_s < below.step_s
    assert not any(row.note for row in budget_table(profile, replace(limits, recompute=False), planner))
    text = render_budgets(list(rows.values()))
    assert text.startswith("other budgets\n")
    assert "just below one block" in text


def test_a_budget_that_no_plan_keeps_is_in_the_table() -> None:
    rows = budget_table(small(), Limits(device_budget=1), make_planner("auto"))
    assert rows[-1].step_s is rows[-1].peak_bytes is None
    assert "no plan keeps it" in render_budgets(rows)
