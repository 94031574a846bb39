"""Layer-major steps on two gloo processes: parameters are gathered twice and gradients reduced once, to the bit."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from actoffload.schedules import UNREACHED
from tests.harness import assert_same_bits
from tests.integration.processes import launch
from tests.integration.workers.schedule_rows import BLOCKS, MODULES

pytestmark = pytest.mark.slow
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of each rank with FSDP2; and with ZeRO-3, where DeepSpeed is installed."""
    worker = "schedule_zero_rows" if find_spec("deepspeed") else "schedule_rows"
    return launch(f"tests.integration.workers.{worker}", 2, tmp_path_factory.mktemp("schedules"))


COUNTED = ["1 micro-batches", "4 micro-batches", "checkpointed", "compiled", "lora"]


@pytest.mark.parametrize("row", COUNTED)
def test_two_gathers_and_one_reduction_for_each_module(found: Found, row: str) -> None:
    for rank in found:
        assert rank[row]["counts"] == (2 * MODULES, MODULES)


@pytest.mark.parametrize("row", [*COUNTED, "offloaded", "boundaries"])
def test_gradients_are_those_of_a_loop_with_one_reduction(found: Found, row: str) -> None:
    for rank in found:
        assert_same_bits(rank[row]["gradients"], rank[row]["expected"])
        assert any(gradient is not None for gradient in rank[row]["expected"])
        assert rank[row]["settings after"] == rank[row]["settings"]


def test_activations_move_and_gathered_parameters_stay(found: Found) -> None:
    for rank in found:
        assert rank["offloaded"]["share"] > 0.9
        assert rank["offloaded"]["kept parameters"] > 0
        assert 0 < rank["boundaries"]["moved"] < 0.5 * rank["offloaded"]["moved"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_modules_sharded_and_setters_as_they_were(found: Found, where: str) -> None:
    for rank in found:
        row = rank[f"fails in {where}"]
        assert row["error"] == f"in {where}"
        assert row["settings after"] == row["settings"]
        assert all(row["settings after"][-1]), "every module is sharded again"
        assert_same_bits(row["gradients"], row["expected"])


def test_settings_of_the_program_hold(found: Found) -> None:
    for rank in found:
        kept, later = rank["chosen"]
        assert kept == (2 * MODULES - 1, MODULES), "one module keeps its parameters for backward"
        assert later == (2 * MODULES - 1, 0), "gradients are reduced by a later step"


def test_a_backward_without_the_last_micro_batch_is_an_error(found: Found) -> None:
    for rank in found:
        error, before, after = rank["partial"]
        assert error == UNREACHED
        assert after == before


def test_inputs_may_need_no_gradient(found: Found) -> None:
    for rank in found:
        row = rank["unneeded inputs"]
        assert row["counts"] == (2 * (BLOCKS + 1), BLOCKS + 1)
        assert_same_bits(row["gradients"], row["expected"])


@pytest.fixture
def zero(found: Found) -> Found:
    if "zero" not in found[0]:
        pytest.skip("deepspeed is not installed")
    return [rank["zero"] for rank in found]


@pytest.mark.parametrize("count", [1, 4])
def test_zero3_gathers_and_reduces_as_with_one_micro_batch(zero: Found, count: int) -> None:
    for rank in zero:
        one, row = rank["1"]["layer major"][0], rank[str(count)]
        gathers, others = row["layer major"][0]
        assert one[0] <= gathers <= one[0] + 1, "at most one block is released and gathered again"
        assert others == one[1]
        assert row["loop"][0][0] == count * one[0]
        for name, weight in row["one backward"][1].items():
            assert_same_bits([row["layer major"][1][name]], [weight], name)


def test_zero3_and_offloading(zero: Found) -> None:
    for rank in zero:
        assert rank["moved bytes"] > 0
        assert rank["offloaded"].keys() == rank["4"]["layer major"][1].keys()
        for name, weight in rank["4"]["layer major"][1].items():
            assert_same_bits([rank["offloaded"][name]], [weight], name)
