"""The default policy, as a user meets it: it plans by itself, keeps its bounds, and gradients never change."""

from __future__ import annotations

import contextlib
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader
from actoffload.testing.faults import SlowEngine
from actoffload.testing.gpt import GPT, GPTConfig
from tests.harness import (
    MakeOffloader,
    accounts_of,
    assert_empty,
    assert_same_gradients,
    gradients,
)

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
    return GPT(GPTConfig(layers=2, width=64, seq=64, dropout=0.1))


@cache
def _expected(step: int) -> dict[str, Tensor]:
    """The gradients of a step of this model, which no optimizer changes."""
    return _step(_model(), step)


def _run(offloader: Offloader, model: GPT, steps: int = STEPS) -> list[int]:
    """Train, compare every gradient, and return the peak of each step."""
    peaks = []
    accounts = accounts_of(offloader)
    for step in range(steps):
        accounts.resident_peak_bytes = accounts.resident_bytes
        found = _step(model, step, offloader)
        peaks.append(accounts.resident_peak_bytes)
        assert_same_gradients(found, _expected(step))
    assert_empty(offloader)
    return peaks


@pytest.mark.parametrize("options", [{}, {"target": "tiered", "device_budget": "1GiB"}], ids=str)
def test_every_bound_leaves_gradients_as_they_are(make_offloader: MakeOffloader, options: dict[str, Any]) -> None:
    model = _model()
    offloader = make_offloader(policy="auto", keep_last_bytes=None, **options).use(model)
    _run(offloader, model)
    assert offloader.profile is not None
    assert offloader.profile.saved_bytes > 0
    assert offloader.plan_history[0].startswith("first plan")


@pytest.mark.parametrize("bandwidth", [None, 1e7])
def test_a_budget_is_kept_from_the_first_planned_step_on(
    make_offloader: MakeOffloader, bandwidth: float | None
) -> None:
    """On any disk: tensors that it cannot carry are recomputed."""
    model = _model()
    keep = make_offloader(policy="greedy", min_bytes="1GiB").use(model)
    baseline = max(_run(keep, model, 2))
    assert keep.profile is None, "nothing plans"
    budget = baseline // 2
    engine = "auto" if bandwidth is None else partial(SlowEngine, bandwidth_bytes_per_s=bandwidth)
    offloader = make_offloader(policy="auto", device_budget=budget, engine=engine).use(model)
    peaks = _run(offloader, model)
    assert max(peaks[2:]) <= budget


def test_other_lengths_have_plans_of_their_own(make_offloader: MakeOffloader) -> None:
    model = _model()
    offloader = make_offloader(policy="auto").use(model)
    for step, seq in enumerate([64] * 4 + [32] * 4 + [48, 16, 64, 24]):
        assert_same_gradients(_step(model, step, offloader, seq), _step(model, step, seq=seq))
    assert "inputs 2×32, 2×32: " in offloader.explain()
    assert_empty(offloader)
