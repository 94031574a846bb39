"""The default policy, as a user meets it: it plans by itself, keeps its bounds, and gradients never change."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import OffloadConfig, Offloader, Profile
from actoffload.testing.faults import SlowEngine
from actoffload.testing.gpt import GPT, GPTConfig
from tests.harness import MakeOffloader, assert_empty, assert_same_gradients, gradients

STEPS = 14
"""The second is recorded, the first plan is looked at after five more, and there is time for another one."""


def _tokens(step: int, seq: int = 64) -> Tensor:
    return torch.randint(0, 256, (2, seq + 1), generator=torch.Generator().manual_seed(step))


def _step(model: GPT, step: int, offloader: Offloader | None = None, seq: int = 64) -> dict[str, Tensor]:
    torch.manual_seed(step)  # dropout
    tokens = _tokens(step, seq)
    with offloader or contextlib.nullcontext():
        loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.autograd.backward(loss)
    return gradients(model)


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=4, width=64, seq=64, dropout=0.1))


def _run(offloader: Offloader, model: GPT) -> list[int]:
    """Train, compare every gradient, and return the peak of each step."""
    peaks = []
    accounts = offloader.core.accounts
    for step in range(STEPS):
        accounts.resident_peak_bytes = accounts.resident_bytes
        found = _step(model, step, offloader)
        peaks.append(accounts.resident_peak_bytes)
        assert_same_gradients(found, _step(model, step))
    assert_empty(offloader)
    return peaks


@pytest.mark.parametrize(
    "options",
    [{}, {"max_slowdown": 0.05}, {"max_slowdown": 5.0}, {"device_budget": "1GiB"}, {"target": "tiered"}],
    ids=str,
)
def test_every_bound_leaves_gradients_as_they_are(make_offloader: MakeOffloader, options: dict[str, Any]) -> None:
    model = _model()
    offloader = make_offloader(policy="auto", keep_last_bytes=None, **options).use(model)
    _run(offloader, model)
    assert offloader.profile is not None
    assert offloader.profile.saved_bytes > 0
    assert "first plan" in offloader.explain()


@pytest.mark.parametrize("bandwidth", [None, 2e6, 2e7, 2e8])
def test_a_budget_is_kept_from_the_first_planned_step_on(
    make_offloader: MakeOffloader, bandwidth: float | None
) -> None:
    """Whatever the disk: what it cannot carry is recomputed."""
    model = _model()
    keep = make_offloader(policy="greedy", min_bytes="1GiB").use(model)
    baseline = max(_run(keep, model))
    budget = baseline // 2
    engine = "auto" if bandwidth is None else partial(SlowEngine, bandwidth_bytes_per_s=bandwidth)
    offloader = make_offloader(policy="auto", device_budget=budget, engine=engine).use(model)
    peaks = _run(offloader, model)
    assert max(peaks[2:]) <= budget


def test_other_lengths_are_planned_anew(make_offloader: MakeOffloader) -> None:
    model = _model()
    offloader = make_offloader(policy="auto").use(model)
    for step, seq in enumerate([64] * 4 + [32] * 4 + [48, 16, 64, 24]):
        assert_same_gradients(_step(model, step, offloader, seq), _step(model, step, seq=seq))
    assert "the forward saved other sizes than the plan was made for" in offloader.explain()
    assert_empty(offloader)


def test_the_default_is_to_plan() -> None:
    assert OffloadConfig().policy == "auto"


def test_a_profile_is_there_after_the_recorded_steps_and_only_with_a_planner(make_offloader: MakeOffloader) -> None:
    model = _model()
    offloader, greedy = make_offloader(policy="auto"), make_offloader(policy="greedy")
    assert offloader.profile is None
    for step in range(3):
        _step(model, step, offloader)
        _step(model, step, greedy)
    assert isinstance(offloader.profile, Profile)
    assert greedy.profile is None
