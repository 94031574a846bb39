"""Each attachment, and each model in a context, has its own plan, peak and counts; disk and host memory are shared."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from actoffload import OffloadConfig, Offloader, attach, offload_activations
from actoffload.errors import ConfigError, OffloaderClosedError
from tests.harness import (
    Chain,
    assert_empty,
    assert_same_gradients,
    batch,
    files_in,
    gradients,
    pools_of,
    spool_of,
    spool_statistics,
    train_step,
)

MIB = 1 << 20
ROWS = 2048


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "policy": "all", "announce": "none"}


def test_a_second_model_has_its_own_peak_plan_and_counts(options: dict[str, Any]) -> None:
    """A sweep in one process: the first model is large, is detached and may be alive still."""
    options |= {"policy": "auto", "device_budget": "40%"}
    found = []
    for rows in (1024, 64):
        model = Chain()
        attachment = attach(model, **options)
        for _ in range(4):
            train_step(model, batch(rows))
        found.append((attachment, attachment.offloader.statistics(), attachment.offloader.plan))
        attachment.detach()
    (_, large, large_plan), (_, small, small_plan) = found
    assert small.steps == large.steps == 4
    assert small.baseline_peak_bytes < large.baseline_peak_bytes / 8
    assert small_plan.offloaded_bytes + small_plan.kept_bytes < large_plan.offloaded_bytes
    assert small.nvme_written_bytes < large.nvme_written_bytes
    assert small.nvme_peak_bytes < large.nvme_peak_bytes


def test_a_context_finds_the_offloader_of_its_model_again(options: dict[str, Any]) -> None:
    one, other = Chain(), Chain()

    def step(model: nn.Module | None) -> Offloader:
        with offload_activations(model=model, **options) as offloader:
            (model or one)(batch()).sum().backward()
        return offloader

    first, second, third = step(one), step(other), step(None)
    assert len({first, second, third}) == 3
    assert [step(one), step(other), step(None)] == [first, second, third]
    assert [offloader.statistics().steps for offloader in (first, second, third)] == [2, 2, 2]


def test_an_offloader_dies_with_its_model(options: dict[str, Any]) -> None:
    model = Chain()
    with offload_activations(model=model, **options) as offloader:
        loss = model(batch()).sum()
    loss.backward()
    reference = weakref.ref(offloader)
    del model, offloader, loss
    gc.collect()
    assert reference() is None


def test_all_share_one_disk_that_the_last_one_closes(options: dict[str, Any], tmp_path: Path) -> None:
    models = [Chain() for _ in range(3)]
    attachments = [attach(model, device_budget=f"{1 + n}MiB", **options) for n, model in enumerate(models)]
    assert len({spool_of(attachment.offloader).files for attachment in attachments}) == 1
    for attachment in attachments:
        assert files_in(tmp_path) == 1
        attachment.offloader.close()
    assert files_in(tmp_path) == 0


@pytest.mark.filterwarnings("ignore:actoffload. no room on disk")
def test_the_disk_budget_holds_for_the_sum(options: dict[str, Any]) -> None:
    budget = 8 * MIB
    models = [Chain(), Chain()]
    expected = [train_step(model, batch(ROWS)) for model in models]
    attachments = [attach(model, nvme_budget=budget, **options) for model in models]
    losses = [model(batch(ROWS)).square().sum() for model in models]
    taken = [spool_statistics(attachment.offloader).allocated_bytes for attachment in attachments]
    assert spool_statistics(attachments[0].offloader).arena_bytes <= budget
    assert 0 < sum(taken) <= budget
    assert attachments[1].offloader.statistics().degraded, "the first attachment holds most of it"
    for model, loss, gradient in zip(models, losses, expected, strict=True):
        loss.backward()
        assert_same_gradients(gradients(model), gradient)


def test_the_host_budget_holds_for_the_sum_and_idle_memory_goes_to_another(options: dict[str, Any]) -> None:
    budget = 4 * MIB
    models = [Chain(), Chain()]
    expected = [train_step(model, batch(ROWS)) for model in models]
    attachments = [attach(model, host_budget=budget, **options) for model in models]
    (one,), (other,) = (pools_of(attachment.offloader) for attachment in attachments)
    for _ in range(3):
        for model, attachment, gradient in zip(models, attachments, expected, strict=True):
            assert_same_gradients(train_step(model, batch(ROWS), between=attachment.offloader.synchronize), gradient)
    for holder, asker in ((one, other), (other, one)):
        held = holder.acquire(budget)
        assert held is not None, "the other offloader's idle memory was released"
        assert asker.acquire(budget // 2) is None
        assert one.slabs.mapped_bytes + other.slabs.mapped_bytes <= budget
        del held


@pytest.mark.parametrize("end", ["close", "abort", "drop"])
def test_the_end_of_one_leaves_the_other_alone_and_gives_it_all_of_the_disk(end: str, options: dict[str, Any]) -> None:
    models: list[nn.Module] = [Chain(), Chain()]
    expected = [train_step(model, batch()) for model in models]
    one, other = (attach(model, nvme_budget="8MiB", **options) for model in models)
    kept = models[0](batch()).square().sum() if end == "abort" else None
    loss = models[1](batch()).square().sum()
    for attached in (one, other):
        attached.offloader.synchronize()
    assert (spool_statistics(one.offloader).allocated_bytes > 0) == (end == "abort")
    taken = spool_statistics(other.offloader).allocated_bytes
    if end == "drop":
        models[0] = nn.Identity()
        del one
        gc.collect()
    else:
        getattr(one.offloader, end)()
    assert spool_statistics(other.offloader).allocated_bytes == taken > 0
    loss.backward()
    assert_same_gradients(gradients(models[1]), expected[1])
    assert_same_gradients(train_step(models[1], batch(), between=other.offloader.synchronize), expected[1])
    assert_empty(other.offloader)
    spool_of(other.offloader).free(spool_of(other.offloader).allocate(8 * MIB))
    if kept is not None:
        with pytest.raises(OffloaderClosedError):
            kept.backward()
    del kept


def test_an_interrupt_in_one_restarts_the_other(options: dict[str, Any], monkeypatch: Any) -> None:
    """The interrupt may leave the disk's allocators half changed, so all offloaders on it get new ones."""
    models = [Chain(), Chain()]
    expected = train_step(models[1], batch())
    one, other = (attach(model, **options) for model in models)
    loss = models[1](batch()).square().sum()
    other.offloader.synchronize()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spool_of(one.offloader).disk, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models[0](batch())
    with pytest.raises(OffloaderClosedError):
        loss.backward()
    models[1].zero_grad()
    for _ in range(2):
        assert_same_gradients(train_step(models[1], batch(), between=other.offloader.synchronize), expected)
    assert other.offloader.statistics().nvme_read_bytes > 0
    assert_empty(other.offloader)


def test_several_modules_with_one_offloader(options: dict[str, Any], tmp_path: Path) -> None:
    shared = Offloader(OffloadConfig(**options))
    parts = [Chain(), Chain()]
    attachments = [attach(part, offloader=shared) for part in parts]
    assert attach(parts[0], offloader=shared) is attachments[0]
    parts[1](parts[0](batch())).sum().backward()
    assert shared.statistics().steps == 2
    with pytest.raises(ConfigError, match="no others"):
        attach(Chain(), offloader=shared, policy="all")
    with pytest.raises(ConfigError, match="another one"):
        attach(parts[0], offloader=Offloader(OffloadConfig(**options)))
    shared.close()
