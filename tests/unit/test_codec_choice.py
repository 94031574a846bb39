"""``codec="exact"`` under the planner: used where a limit makes a step longer without, if it is shorter with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import Offloader, Plan
from actoffload.errors import BudgetError
from tests import scaled_llama
from tests.harness import assert_same_bits, autopilot_of, is_locked

Make = Callable[..., Offloader]
LAUNCH_S = scaled_llama.LAUNCHES["host ahead"]
NBYTES = 1 << 20
"""Of a float32 tensor that the model below saves."""
LITTLE = 3 * NBYTES // 4
"""A budget for half of one."""
TRIED, OTHER_SIZES = "may be shorter with tensors in exact forms", "the forward saved other sizes"


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("budget", "coded", "steps"), [(None, None, 8), (0.4, True, 8), (0.72, False, 8), (0.1, False, 16)]
)
def test_the_shorter_of_both_plans_is_followed(budget: float | None, coded: bool | None, steps: int) -> None:
    """At 0.4 of the saved bytes steps without exact forms wait for a link; at 0.72 for less than products take.

    At 0.1 no plan has the room to compute products, and steps are not as predicted. Without a limit nothing waits, so
    the forms are not tried.
    """
    limit = {} if budget is None else {"device_budget": budget}
    plain, exact = (
        scaled_llama.run({"codec": codec, **limit}, LAUNCH_S, bf16=True, layers=4, steps=steps)
        for codec in ("none", "exact")
    )
    if coded:
        assert exact["step_s"] < 0.8 * plain["step_s"]
    else:
        assert exact["steps_s"][5:] == pytest.approx(plain["steps_s"][5:], rel=1e-3), "and they are not tried again"
    assert (exact["steps_s"] == pytest.approx(plain["steps_s"], rel=1e-3)) == (coded is None)
    assert exact["highest_bytes"] <= plain["highest_bytes"]


@pytest.mark.simulated
def test_with_checkpoints_only_blocks_that_run_once_are_coded() -> None:
    options: dict[str, Any] = {"bf16": True, "layers": 4, "checkpointed": True, "plain": [1, 2, 3], "steps": 8}
    auto, exact = (
        scaled_llama.run({"codec": codec, "device_budget": 0.9}, LAUNCH_S, **options) for codec in ("auto", "exact")
    )
    assert exact["steps_s"] == pytest.approx(auto["steps_s"], rel=1e-3)


@pytest.mark.simulated
def test_a_budget_without_room_to_compute_tensors_is_kept_without_them() -> None:
    """Blocks that run once keep it only if backward computes nothing again from what they save."""
    options: dict[str, Any] = {"bf16": True, "layers": 4, "checkpointed": True, "steps": 6}
    plain, coded, exact = (
        scaled_llama.run({"device_budget": 0.4, "codec": codec}, LAUNCH_S, **options)
        for codec in ("none", "auto", "exact")
    )
    assert exact["steps_s"] == pytest.approx(coded["steps_s"], rel=1e-3), "with checkpoints there is no choice to make"
    assert plain["once"] == coded["once"] == 4
    assert coded["step_s"] == pytest.approx(plain["step_s"], rel=1e-3)
    assert coded["highest_bytes"] <= plain["highest_bytes"]


class Model(nn.Module):
    """Saves float32 tensors that were cast from bfloat16, and nothing else that may move."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        self.casts = 6

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.zeros(())
        for _ in range(self.casts):
            x = x + self.weight
            loss = loss + x.float().pow(2).mean()
        return loss


def train(model: Model, offloader: Offloader, steps: int, *shares: int) -> None:
    """Train; the inputs of the steps are in turns the first of so many parts of the numbers of `NBYTES`."""
    torch.manual_seed(0)
    numbers = torch.randn(NBYTES // 4, dtype=torch.bfloat16)
    for step in range(steps):
        x = numbers[: len(numbers) // shares[step % len(shares)]] if shares else numbers
        (expected,) = torch.autograd.grad(model(x), model.weight)
        with offloader:
            loss = model(x)
        assert_same_bits(torch.autograd.grad(loss, model.weight), [expected])
        del loss


def test_a_budget_that_only_exact_forms_keep(make_offloader: Make) -> None:
    with pytest.raises(BudgetError):
        train(Model(), make_offloader(codec="none", policy="auto", device_budget=LITTLE), 8)
    offloader = make_offloader(codec="exact", policy="auto", device_budget=LITTLE)
    train(Model(), offloader, 8)
    assert offloader.statistics().halved_bytes > 0


def test_a_plan_names_the_form_of_its_steps(make_offloader: Make) -> None:
    """An offloader that follows it saves the same storages, at their places."""
    planner = make_offloader(codec="exact", policy="auto")
    train(Model(), planner, 3)
    for policy, coded in ((Plan.from_json(planner.plan.to_json()), False), ("all", True)):
        follower = make_offloader(codec="exact", policy=policy)
        train(Model(), follower, 1)
        assert (follower.statistics().halved_bytes > 0) == coded
        assert Plan.from_json(follower.plan.to_json()).coded == coded


def test_other_sizes_begin_the_choice_anew(make_offloader: Make) -> None:
    """A budget that coded steps keep may be too small for larger ones, or the other way round."""
    model, offloader = Model(), make_offloader(codec="exact", policy="auto", device_budget=LITTLE)
    train(model, offloader, 8)
    model.casts = 12
    for _ in range(40):
        train(model, offloader, 1)
        reasons = [reason for reason in offloader.plan_history if TRIED in reason or OTHER_SIZES in reason]
        if len(reasons) > 2:
            break
    assert [OTHER_SIZES in reason for reason in reasons] == [False, True, False]


def test_a_step_without_memory_begins_the_choice_anew(make_offloader: Make) -> None:
    """The next step saves less, and nothing that needs room to be computed."""
    model, offloader = Model(), make_offloader(codec="exact", policy="auto", device_budget=LITTLE)
    train(model, offloader, 8)

    def fail() -> None:
        model(torch.randn(NBYTES // 4, dtype=torch.bfloat16))
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError), offloader:
        fail()
    before = offloader.statistics().halved_bytes
    train(model, offloader, 1)
    assert offloader.statistics().halved_bytes == before > 0
    assert "the step ran out of memory" in offloader.plan_history


def test_lengths_in_turns_keep_their_plans_without_a_model(make_offloader: Make) -> None:
    """The size of the first saved tensor stands for a length, in both forms."""
    offloader = make_offloader(codec="exact", policy="auto", device_budget=LITTLE)
    train(Model(), offloader, 24, 1, 2)
    assert offloader.statistics().halved_bytes > 0
    assert not any(OTHER_SIZES in reason for reason in offloader.plan_history)


def test_a_planner_that_fails_ends_the_planning_and_not_the_training(
    make_offloader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is coded from then on, as that needs more room in backward, and no plan keeps it."""
    offloader = make_offloader(codec="exact", policy="auto", device_budget=4 * NBYTES)
    monkeypatch.setattr(autopilot_of(offloader).making, "planner", None)
    with pytest.warns(RuntimeWarning, match="could not plan"):
        train(Model(), offloader, 6)
    assert offloader.statistics().halved_bytes == 0
    assert not is_locked(offloader)
