"""A plan explained: each block's treatment and reason, the peak and its parts, and the gain of more memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from actoffload.errors import BudgetError
from actoffload.planning.observed import Observed
from actoffload.planning.plan import Plan, PlanEntry
from actoffload.planning.profile import Link, Profile, Storage
from actoffload.planning.search import Limits, best
from actoffload.planning.search import plan as make
from actoffload.planning.simulator import simulate
from actoffload.policy import OUTSIDE, part_of
from actoffload.sizes import format_size
from actoffload.tell.parts import Row, analyse, budget_table
from actoffload.tell.plans import MOST_ROWS, render_budgets, render_plan
from tests.profiles import Accelerator, checkpointed, link, random_profile, transformer_profile

GIB = 1 << 30


def transformer(layers: int = 6, write_gb_s: float = 5.0) -> Profile:
    accelerator = Accelerator(name="paper", flops=300e12, host=None, disk=link(write_gb_s, 6))
    return transformer_profile(4096, layers, 4, accelerator=accelerator)


def small() -> Profile:
    """Two parts of 1000 bytes each, 10 bytes/s out and back, and one storage that stays outside of them."""
    storages = (
        Storage(index=0, nbytes=1000, birth_s=0.0, need_s=900.0, last_need_s=1000.0, module="a.0.norm"),
        Storage(index=1, nbytes=1000, birth_s=100.0, need_s=200.0, last_need_s=300.0, module="a.1.norm"),
        Storage(index=None, nbytes=5, birth_s=100.0, need_s=None, last_need_s=900.0, kept="keep()"),
    )
    disk = Link(write_bytes_per_s=10.0, read_bytes_per_s=10.0)
    return Profile(storages=storages, disk=disk, forward_s=200.0, backward_s=800.0)


def rows_of(profile: Profile, plan: Plan, limits: Limits | None = None) -> dict[str, Row]:
    return {row.name: row for row in analyse(profile, plan, limits).rows}


def test_a_part_is_a_module_up_to_its_first_number() -> None:
    names = {"model.layers.3.mlp.up": "model.layers.3", "head": "head", "h.0": "h.0", "": OUTSIDE, None: OUTSIDE}
    assert {module: part_of(module) for module in names} == names


@pytest.mark.parametrize("share", [None, 0.4, 0.7])
@pytest.mark.parametrize("seed", range(6))
def test_the_rows_add_up_to_the_step(seed: int, share: float | None) -> None:
    profile = checkpointed(random_profile(seed)) if seed % 2 else random_profile(seed)
    budget = None if share is None else int(share * profile.baseline_peak_bytes)
    limits = Limits(device_budget=budget)
    try:
        step, plan = best(profile, limits)
    except BudgetError as error:
        limits = Limits(device_budget=error.floor_bytes)
        step, plan = best(profile, limits)
    analysis = analyse(step, plan, limits)
    rows, seen = analysis.rows, analysis.prediction
    assert seen == simulate(step, plan, limits)
    assert sum(row.saved_bytes + row.held_bytes for row in rows) == step.saved_bytes
    assert sum(row.peak_bytes for row in rows) == seen.peak_bytes
    assert sum(row.recompute_s for row in rows) == pytest.approx(analysis.recompute_s)
    assert sum(row.wait_s for row in rows) == pytest.approx(sum(s for _, s in seen.waits))
    assert sum(row.disk_bytes + row.host_bytes for row in rows) >= plan.offloaded_bytes - sum(
        step.storages[p].nbytes for p in seen.pressed
    )
    assert all(row.why for row in rows)
    render_plan(step, plan, limits, analysis=analysis)


def test_each_part_has_its_treatment_and_reason() -> None:
    profile, limits = small(), Limits(device_budget=1500)
    rows = rows_of(profile, make(profile, limits), limits)
    assert (rows["a.0"].what, rows["a.0"].why) == ("offload", "idle 900 s, moved in 200 s")
    assert (rows["a.1"].what, rows["a.1"].why) == ("keep", "needed again before it could be back")
    assert (rows[OUTSIDE].what, rows[OUTSIDE].why) == ("keep", "must stay: keep()")


def test_regions_that_run_again_have_their_gain() -> None:
    base = checkpointed(transformer()).with_links(disk=link(50))
    limits = Limits(device_budget=base.baseline_peak_bytes)
    step, plan = best(base, limits)
    again = plan.regions - len(plan.once)
    assert 0 < again < plan.regions == 6
    text = render_plan(step, plan, limits)
    assert f"6 checkpointed regions: {len(plan.once)} run once, {again} run again" in text
    rows = rows_of(step, plan, limits)
    held = [row for row in rows.values() if row.what == "recompute"]
    assert len(held) == again
    assert all(row.held_bytes == 480 << 20 for row in held)
    assert "for 480.0 MiB, which moves in 20.1 ms" in held[0].why
    recomputing = next(line.split() for line in text.splitlines() if line.startswith("  recomputing"))
    assert recomputing[1] == recomputing[-2] != "-"


def test_the_text_names_everything() -> None:
    profile, limits = transformer(), Limits(device_budget=GIB)
    plan = make(profile, limits)
    seen = Observed(step_s=0.15, forward_wait_s=0.002, backward_wait_s=0.0, peak_bytes=GIB - 5)
    text = render_plan(profile, plan, limits, seen=seen)
    for part in (
        "plan of auto on cuda, device budget 1.0 GiB; disk 5 GB/s out, 6 back",
        "predicted",
        "nothing moved",
        "layers.5",
        "the peak, ",
        "most of it: ",
    ):
        assert part in text, part
    step = next(line.split() for line in text.splitlines() if line.startswith("  step"))
    assert step[3:] == ["150", "ms", "118", "ms"], "seen, and nothing moved"
    assert "region" not in text
    assert "recomputing" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert "seen" not in render_plan(profile, plan, limits), "no step was observed"


def test_a_declined_plan_has_its_reason() -> None:
    profile = transformer(write_gb_s=0.05)
    text = render_plan(profile, make(profile, Limits()))
    assert "declined: moving lowers the peak by less than " in text
    assert "  layers.0 … loss: the plan declines to move" in text, "equal reasons share a line"
    assert "no budget" in text


def test_blocks_of_many_sizes_share_rows_too() -> None:
    """Neighbours with one treatment have different sizes: alone, they would take more rows than a screen has."""
    profile = transformer()
    plan = make(profile, Limits())
    analysis = analyse(profile, plan)
    block = analysis.rows[0]
    rows = tuple(replace(block, name=f"layers.{n}", saved_bytes=(n + 1) << 20) for n in range(MOST_ROWS + 1))
    text = render_plan(profile, plan, analysis=replace(analysis, rows=rows))
    total = format_size(sum(row.saved_bytes for row in rows))
    assert re.search(rf"layers\.0 … layers\.{MOST_ROWS} +{block.what} +{total}", text)


@pytest.mark.parametrize("layers", [6, 60])
def test_equal_blocks_share_a_row_with_the_bytes_of_each(layers: int) -> None:
    profile = transformer(layers)
    limits = Limits(device_budget=profile.baseline_peak_bytes // 2)
    plan = make(profile, limits)
    rows = analyse(profile, plan, limits).rows
    text = render_plan(profile, plan, limits)
    table = text[text.index("  part ") : text.index("\nwhy\n")].splitlines()[1:-1]
    assert len(table) < min(len(rows), MOST_ROWS + 1)
    first = rows[0]
    equal = [row for row in rows if (row.what, row.saved_bytes) == (first.what, first.saved_bytes)]
    assert re.search(rf"{first.name} … \S+ +{first.what} +\d+ × {format_size(first.saved_bytes)}", table[0]), table[0]
    assert f"{len(equal)} × " in table[0]


def test_a_step_that_saves_nothing() -> None:
    empty = Profile(storages=(), forward_s=1.0)
    text = render_plan(empty, make(empty, Limits()))
    assert "nothing is saved" in text
    assert "no link was measured" in text


def test_a_range_of_times_has_one_unit() -> None:
    short = small()
    second = replace(short.storages[1], birth_s=100.0, need_s=100.5, module="a.0.mlp")
    disk = Link(write_bytes_per_s=1e6, read_bytes_per_s=1e6)
    profile = replace(short, storages=(short.storages[0], second, short.storages[2]), disk=disk)
    both = Plan(tuple(PlanEntry(index=n, nbytes=1000, action="offload") for n in (0, 1)))
    assert "idle 500 ms to 900 s" in render_plan(profile, both)


def test_the_table_of_budgets_has_the_steps_time_and_peak() -> None:
    profile = checkpointed(transformer()).with_links(disk=link(50))
    rows = budget_table(profile, Limits(device_budget=2 * profile.baseline_peak_bytes))
    budgets = [row.device_budget for row in rows]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == 2 * profile.baseline_peak_bytes
    for row in rows:
        if row.step_s is None:
            continue
        _, plan = best(profile, Limits(device_budget=row.device_budget))
        assert (row.step_s, row.peak_bytes) == (plan.predicted_step_s, plan.predicted_peak_bytes)
        assert row.peak_bytes is not None
        assert row.peak_bytes <= row.device_budget
        assert row.once == len(plan.once)
    assert rows[0].once > rows[1].once > 0
    assert (rows[0].step_s or 0.0) < (rows[1].step_s or 0.0)
    assert "regions run once" in render_budgets(rows)


def test_a_budget_that_no_plan_keeps_is_in_the_table() -> None:
    rows = budget_table(small(), Limits(device_budget=1))
    assert rows[-1].step_s is rows[-1].peak_bytes is None
    assert "no plan keeps it" in render_budgets(rows)
