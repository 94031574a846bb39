"""The Megatron adapter under megatron-core's own schedules, models, optimizer and recomputing, on CPU and gloo."""

from __future__ import annotations

import re
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core.package_info")

from actoffload.integrations.megatron import microbatches, phases

from tests.integration.evidence import assert_evidence
from tests.integration.megatron_found import Found
from tests.integration.processes import Chosen, cases, launch
from tests.integration.workers.twice import SECOND

pytestmark = [
    # At import, Megatron warns of missing packages.
    pytest.mark.filterwarnings("ignore:(Transformer Engine and )?Apex.*not installed:UserWarning"),
    pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning"),
]

WORLD = 2
ROWS = [
    *("no pipeline", "1f1b", "1f1b, no calculator", "1f1b, bf16", "interleaved", "interleaved, groups"),
    *("sequence parallel", "selective recompute", "selective recompute, discarded outputs"),
    *("full recompute", "full recompute, distributed", "partial checkpoints"),
    *("distributed optimizer", "experts"),
]
THOROUGH = {"1f1b, bf16", "interleaved, groups", "sequence parallel", "selective recompute", "distributed optimizer"}
"""To the adapter these are as other rows; `test_phases_of_deeper_pipelines` has groups."""
SHOWN = {
    "no pipeline": pytest.mark.proves("Megatron-core", checkpointing=False, way="flag"),
    "full recompute": pytest.mark.proves("Megatron-core", checkpointing=True, way="flag"),
}
PIPELINES = {
    "no pipeline": {"size": 1, "microbatches": 2},
    "1f1b": {"size": 2, "microbatches": 4},
    "1f1b, no calculator": {"size": 2, "microbatches": 3},
    "1f1b, bf16": {"size": 2, "microbatches": 3},
    "interleaved": {"size": 2, "microbatches": 4, "chunks": 2},
    "interleaved, groups": {"size": 2, "microbatches": 5, "chunks": 2, "group": 3},
    "partial checkpoints": {"size": 2, "microbatches": 4},
}


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(chosen: Chosen) -> list[str]:
    """The rows of which some test is chosen, or those of CI."""
    return [row for row in ROWS if row in chosen("row") or row not in THOROUGH]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def found(rows: list[str], directory: Path) -> list[dict[str, Found]]:
    return launch("tests.integration.workers.megatron", WORLD, directory, *rows)


@pytest.mark.slow
@pytest.mark.parametrize("row", cases(ROWS, THOROUGH, SHOWN))
def test_same_bits(found: list[dict[str, Found]], row: str) -> None:
    for it in (rank[row] for rank in found):
        assert_evidence(it.offloaded, it.plain)
        assert it.evaluated_packed == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("row", cases(PIPELINES, THOROUGH, SHOWN))
def test_hints_follow_the_schedule(found: list[dict[str, Found]], row: str, rank: int) -> None:
    shape: Any = PIPELINES[row]
    order = phases(rank if shape["size"] > 1 else 0, **shape)
    hints = found[rank][row].hints
    steps = [hints[first : first + len(order)] for first in range(0, len(hints), len(order))]
    if row == "1f1b, no calculator":  # the number of micro-batches is known after one step
        assert steps.pop(0) == [(key, direction, None) for key, direction in order]
    expected = [(key, direction, after) for (key, direction), after in zip(order, [*order[1:], None], strict=True)]
    assert steps
    assert steps == [expected] * len(steps)


@pytest.mark.slow
def test_only_a_tail_that_is_wanted_at_once_stays(found: list[dict[str, Found]]) -> None:
    assert "last saved layer" not in found[0]["1f1b"].kept_bytes
    assert found[1]["1f1b"].kept_bytes["last saved layer"] > 0
    assert "last saved layer" not in found[0]["interleaved"].kept_bytes
    assert found[1]["interleaved"].kept_bytes["last saved layer"] > 0


LAYER, EXPERT = r"decoder\.layers\.\d+\.", r"mlp\.experts(\.local_experts\.\d+)?"
SAVED_IN = {
    ("layer_input", ""): LAYER + "input_layernorm",
    ("attn_norm", ""): LAYER + "input_layernorm",
    ("qkv_linear", ""): LAYER + r"self_attention\.linear_qkv",
    ("core_attn", ""): LAYER + r"self_attention\.core_attention",
    ("core_attn attn_proj", ""): LAYER + r"self_attention\.(core_attention|linear_proj)",
    ("mlp_norm", ""): LAYER + "pre_mlp_layernorm",
    ("mlp_act", ""): LAYER + "mlp",
    ("layer_input", "--recompute full"): "decoder",
    ("expert_fc1", "--ep 2"): LAYER + EXPERT + r"\.linear_fc1",
    ("moe_act", "--ep 2"): LAYER + EXPERT,
    ("expert_fc1 moe_act", "--ep 2"): LAYER + EXPERT + r"(\.linear_fc1)?",
}
"""For each choice of names, the modules that save the tensors which it moves."""


@pytest.mark.slow
def test_names_choose_the_tensors_of_megatrons_own_offloading(found: list[dict[str, Any]]) -> None:
    """The modules are named without Megatron's wrappers."""
    for rank in found:
        assert rank["named"].keys() == SAVED_IN.keys()
        for names, entries in rank["named"].items():
            moved = [module for module, action, _ in entries if action == "offload"]
            left_out = [module for module, _, reason in entries if reason == "module excluded"]
            assert moved, (names, entries)
            assert all(re.fullmatch(SAVED_IN[names], module) for module in moved), (names, moved)
            assert not any(re.fullmatch(SAVED_IN[names], module) for module in left_out), (names, left_out)


@pytest.mark.slow
def test_outputs_that_megatron_discards_stay(found: list[dict[str, Found]]) -> None:
    assert found[0]["selective recompute, discarded outputs"].kept_bytes["keep()"] > 0


@pytest.mark.slow
def test_only_the_first_rank_announces(rows: list[str], found: list[dict[str, Found]]) -> None:
    for row in rows:
        lines = [line for line in found[0][row].printed.splitlines() if line.startswith("actoffload:")]
        assert len(lines) == 1, found[0][row].printed
        assert "target nvme" in lines[0]
        assert "actoffload:" not in found[1][row].printed


# -- the schedule -----------------------------------------------------------------------------------------------------

SCHEDULES = {
    (1, 4, 6, 1, None): "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.4 B0.2 F0.5 B0.3 B0.4 B0.5",
    (0, 2, 5, 2, 3): "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 F0.3 B1.1 F0.4 B1.2 F1.3 B0.0 F1.4 B0.1 "
    "B0.2 B1.3 B1.4 B0.3 B0.4",
    (2, 3, 3, 3, None): "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 B1.0 B1.1 B1.2 B0.0 B0.1 B0.2",
}
"""Orders of Megatron 0.16 in pipelines that no row has, by (rank, size, micro-batches, chunks, group)."""


@pytest.mark.parametrize("shape", SCHEDULES, ids=str)
def test_phases_of_deeper_pipelines(shape: Any) -> None:
    rank, size, total, chunks, group = shape
    order = phases(rank, size, total, chunks=chunks, group=group)
    assert " ".join(f"{direction[0].upper()}{c}.{m}" for (c, m), direction in order) == SCHEDULES[shape]
    assert microbatches.following(*shape) == dict(pairwise(order))


def test_micro_batches_are_counted_where_megatron_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches, "core", lambda: types.SimpleNamespace(microbatches=lambda: 3))
    counted, first, second = microbatches.MicroBatches(), types.SimpleNamespace(), types.SimpleNamespace(vp_stage=1)
    for _ in range(2):
        assert [counted.key(first) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
        assert [counted.key(second) for _ in range(3)] == [(1, 0), (1, 1), (1, 2)]


# -- the example ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example(found: list[dict[str, Found]], directory: Path) -> list[str]:
    """The output and the errors of a process that ran the example without offloading and with it."""
    assert found
    return [(directory / f"log_{name}.txt").read_text(encoding="utf-8") for name in ("out", "err")]


@pytest.mark.slow
def test_fused_gradients_find_the_weights_attributes(example: list[str]) -> None:
    """Megatron's Linear sets an attribute on the weight from ``ctx.saved_tensors``, and its DDP reads the attribute."""
    plain, offloaded, _ = (re.findall("step .*", printed) for printed in example[0].split(SECOND))
    assert plain == offloaded
    losses = [float(line.split()[-1]) for line in plain]
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_the_example_runs_and_is_summed_up(example: list[str]) -> None:
    assert example[1].count("actoffload: target nvme") == 1
    assert len(re.findall(r"micro-batches\): activations' peak .* to NVMe; details: ", example[1])) == 1
