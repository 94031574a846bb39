"""Statistics: their counts, how these are counted, and the report."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import FrameType
from typing import Any

import pytest
import torch

from actoffload import OffloadConfig
from actoffload.config import make_config
from actoffload.planning.observed import Observed
from actoffload.policy import KeepReason
from actoffload.runtime import run_so_far
from actoffload.tell.facts import Facts
from actoffload.tell.report import closing_line, render_report
from actoffload.tiers.accounts import Accounts
from actoffload.tiers.statistics import Statistics
from tests.harness import Chain, MakeOffloader, batch, train_step

MIB = 1 << 20
FIELDS = (
    "steps packed_tensors packed_bytes deduplicated_bytes halved_bytes fp8_bytes derived_bytes kept_bytes "
    "host_written_bytes host_read_bytes nvme_written_bytes nvme_read_bytes forwarded_bytes cancelled_bytes "
    "resident_peak_bytes baseline_peak_bytes host_peak_bytes nvme_peak_bytes pack_wait_s unpack_wait_s live_records "
    "degraded unhooked microbatches optimizer_steps plan_peak_bytes regions regions_once recompute_peak_bytes "
    "process_peak_bytes process_before_bytes device_peak_bytes"
)


def _statistics(**changes: Any) -> Statistics:
    values: dict[str, Any] = {
        "steps": 7,
        "microbatches": 6,
        "optimizer_steps": 3,
        "packed_tensors": 30,
        "packed_bytes": 120 * MIB,
        "deduplicated_bytes": 20 * MIB,
        "kept_bytes": {"below min_bytes": 2 * MIB, "parameter": 8 * MIB, "pressure": 0},
        "nvme_written_bytes": 90 * MIB,
        "nvme_read_bytes": 80 * MIB,
        "forwarded_bytes": 10 * MIB,
        "resident_peak_bytes": 10 * MIB,
        "baseline_peak_bytes": 40 * MIB,
        "nvme_peak_bytes": 30 * MIB,
        "pack_wait_s": 0.25,
        "unpack_wait_s": 1.0,
    }
    return Statistics(**(values | changes))


def test_derived_numbers() -> None:
    statistics = _statistics()
    assert statistics.saved_bytes == 100 * MIB
    assert statistics.moved_bytes == 90 * MIB
    assert statistics.activation_bytes == 92 * MIB
    assert statistics.moved_share == 90 / 92
    assert statistics.resident_share == 0.25
    assert statistics.wait_s == 1.25
    assert (Statistics().moved_share, Statistics().resident_share) == (0.0, 0.0)
    assert _statistics(nvme_written_bytes=101 * MIB).moved_share == 1.0, "alignment counts no more"
    assert _statistics(host_written_bytes=95 * MIB).moved_bytes == 95 * MIB, "through host memory to disk counts once"


def test_the_fields_are_the_contract_and_as_dict_is_json_with_the_derived_ones() -> None:
    assert [field.name for field in dataclasses.fields(Statistics)] == FIELDS.split()
    values = json.loads(json.dumps(_statistics().as_dict()))
    derived = {"saved_bytes", "activation_bytes", "moved_bytes", "moved_share", "resident_share", "wait_s"}
    assert set(values) == {*FIELDS.split(), *derived}
    assert values["kept_bytes"]["parameter"] == 8 * MIB


def test_frozen_statistics_do_not_follow_the_counts() -> None:
    accounts = Accounts()
    accounts.add_record(10)
    accounts.kept_bytes["policy"] += 10
    accounts.degraded["write failed"] += 1
    frozen = accounts.freeze(nvme_written_bytes=4096, host_peak_bytes=1)
    accounts.add_record(10)
    accounts.kept_bytes["policy"] += 10
    accounts.degraded["write failed"] += 1
    assert (frozen.live_records, frozen.kept_bytes, frozen.degraded) == (1, {"policy": 10}, {"write failed": 1})
    assert (frozen.nvme_written_bytes, frozen.host_peak_bytes, frozen.host_read_bytes) == (4096, 1, 0)


def test_deferred_counts_are_taken_in_the_order_in_which_they_came() -> None:
    accounts = Accounts()
    accounts.add_record(100)
    accounts.add_resident(70)
    accounts.deferred += [("a", 10, True), ("b", 5, False), 10, ("a", 8, True), ("a", 4, True), 4]
    accounts.count_deferred()
    assert not accounts.deferred
    assert (accounts.packed_tensors, accounts.packed_bytes) == (4, 27)
    assert accounts.kept_bytes == {"a": 22, "b": 5}
    assert (accounts.baseline_bytes, accounts.resident_bytes) == (108, 78)
    assert (accounts.baseline_peak_bytes, accounts.resident_peak_bytes, accounts.step_peak_bytes) == (112, 82, 82)


@pytest.mark.parametrize("change", ["remove_resident", "add_resident", "add_record", "remove_record"])
def test_a_change_by_another_thread_hides_no_peak(change: str) -> None:
    accounts = Accounts()
    accounts.add_record(100)
    accounts.add_resident(100)
    accounts.deferred.append(("a", 50, True))
    getattr(accounts, change)(80)
    assert not accounts.deferred
    assert accounts.resident_peak_bytes == (230 if change == "add_resident" else 150)
    assert accounts.baseline_peak_bytes == (230 if change == "add_record" else 150)


def test_micro_batches_and_optimizer_steps_are_counted_apart(make_offloader: MakeOffloader) -> None:
    offloader, model = make_offloader(), Chain()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers]
    for _ in range(2):
        for _ in range(3):
            with offloader:
                loss = model(batch()).sum()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad(), offloader:
        model(batch())
    optimizers[0].step()  # no training since the last one
    found = offloader.statistics()
    assert (found.steps, found.microbatches, found.optimizer_steps) == (7, 6, 2)
    assert "2 steps (6 micro-batches): activations' peak" in offloader.report()
    assert offloader.explain().startswith("2 steps (6 micro-batches): ")


def test_the_run_in_one_line_has_steps_peaks_waits_and_bytes() -> None:
    step = Observed(step_s=2.0, forward_wait_s=0.25, backward_wait_s=0.5)
    host = {"nvme_written_bytes": 0, "host_written_bytes": 1 << 30, "plan_peak_bytes": 8 * MIB}
    nothing = {"nvme_written_bytes": 0, "forwarded_bytes": 0, "resident_peak_bytes": 40 * MIB, "optimizer_steps": 0}
    for changes, line in (
        ({}, "3 steps (6 micro-batches): activations' peak 40.0 → 10.0 MiB, 37.5% waited, 90.0 MiB to NVMe"),
        (host, "3 steps (6 micro-batches): activations' peak 40.0 → 8.0 MiB, 37.5% waited, 1.0 GiB to host memory"),
        (nothing, "7 forward passes: activations' peak 40.0 MiB, 37.5% waited, nothing moved"),
    ):
        facts = Facts(config=OffloadConfig(target="nvme"), counts=_statistics(**changes), step=step)
        assert facts.summary == line
        assert render_report(facts).startswith(f"actoffload (target nvme): {line}\n")
        assert closing_line(facts) == f"actoffload: {line}; details: actoffload trace -- PROGRAM"


def test_the_report_has_the_plans_peak_beside_the_runs_peak(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="auto", min_bytes="16KiB", device_budget="40%")
    model = Chain(depth=8)
    for _ in range(6):
        train_step(model, batch(256), offloader)
    found = offloader.statistics()
    assert 0 < found.plan_peak_bytes <= 0.4 * found.baseline_peak_bytes
    if found.plan_peak_bytes < found.resident_peak_bytes:
        assert "under the plan that is followed now" in offloader.report()


def test_the_report_has_the_peak_of_the_process_beside_that_of_activations(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    train_step(Chain(), batch(), offloader)
    found = offloader.statistics()
    assert found.process_peak_bytes >= found.process_before_bytes > 0
    assert found.device_peak_bytes == 0
    assert "  whole process      peak " in offloader.report()


# -- the report --------------------------------------------------------------------------------------------------------


def written(config: OffloadConfig, statistics: Statistics, **known: Any) -> str:
    return render_report(Facts(config=config, counts=statistics, **known))


def test_the_report_begins_with_the_result_and_omits_unused_parts() -> None:
    report = written(make_config({"target": "nvme"}), _statistics())
    lines = report.splitlines()
    assert lines[:2] == [
        "actoffload (target nvme): 3 steps (6 micro-batches): activations' peak 40.0 → 10.0 MiB, 90.0 MiB to NVMe",
        "  moved              90.0 MiB of 92.0 MiB saved activations (98%); "
        "waited 1.25 s (forward 0.25, backward 1.00)",
    ]
    assert lines[2] == "  saved activations  peak 10.0 MiB of 40.0 MiB with nothing moved (25%)"
    kept = lines[lines.index("kept where they were:") + 1 :]
    assert [line.split()[:3] for line in kept] == [["8.0", "MiB", "parameter"], ["2.0", "MiB", "below"]]
    assert "  nvme  written   90.0 MiB   read   80.0 MiB   peak   30.0 MiB" in report
    assert "forwarded 10.0 MiB" in report
    assert "  host  " not in report
    assert "degraded" not in report
    assert "saved nothing" in written(make_config({}), Statistics())


@pytest.mark.parametrize("reason", KeepReason, ids=lambda reason: reason.name)
def test_every_reason_to_keep_has_a_meaning_and_is_found_by_its_text(reason: KeepReason) -> None:
    assert reason.meaning
    assert KeepReason(reason.value) is reason
    report = written(make_config({}), _statistics(kept_bytes={reason.value: MIB, "of another release": MIB}))
    assert f"{reason.value:<24} {reason.meaning}" in report


def test_the_report_has_failures_notes_and_the_wear_of_the_drives() -> None:
    two_drives = make_config({"drive_tbw": "600TB", "path": ["/one", "/two"]})
    statistics = _statistics(nvme_written_bytes=10**12, degraded={"disk full": 2})
    report = written(two_drives, statistics, elapsed_s=3600, notes=["engine posix: direct I/O works"])
    assert "50.0 days of writing" in report
    assert "degraded" in report
    assert "     2 × disk full" in report
    assert report.endswith("note: engine posix: direct I/O works")


def test_metrics_have_changes_of_counts_and_present_peaks() -> None:
    before = _statistics()
    now = _statistics(nvme_written_bytes=100 * MIB, unpack_wait_s=1.5, resident_peak_bytes=11 * MIB)
    assert now.metrics(since=before) == {
        "actoffload/moved_bytes": 10 * MIB,
        "actoffload/wait_s": 0.5,
        "actoffload/host_written_bytes": 0,
        "actoffload/nvme_written_bytes": 10 * MIB,
        "actoffload/resident_peak_bytes": 11 * MIB,
        "actoffload/baseline_peak_bytes": 40 * MIB,
    }
    assert before.metrics()["actoffload/moved_bytes"] == 90 * MIB


# -- optimizers' steps are counted -------------------------------------------------------------------------------------


class _Run:
    def __init__(self) -> None:
        self.steps = 0

    def optimizer_stepped(self) -> None:
        self.steps += 1


def test_another_threads_run_may_begin_at_any_moment_of_an_optimizers_step() -> None:
    run_so_far.optimizer_steps()
    runs = [_Run(), _Run()]
    run_so_far.watchers.update(dict.fromkeys(runs))
    added: list[_Run] = []

    def begin_another(frame: FrameType, event: str, argument: object) -> Any:
        added.append(_Run())
        run_so_far.watchers[added[-1]] = None
        return begin_another

    before = sys.gettrace()
    sys.settrace(begin_another)  # before each line, as another thread may
    try:
        run_so_far._stepped()
    finally:
        sys.settrace(before)
    assert [run.steps for run in runs] == [1, 1]
    assert len(added) > 5
