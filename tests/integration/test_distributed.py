"""torch.distributed on two gloo processes: DDP, fully_shard, tensor and context parallel, every pipeline schedule.

Here `attach` or the context suffices, without an adapter. Each row passes the checks of `evidence`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from actoffload import OffloadConfig, Offloader
from tests.harness import same_bits
from tests.integration.evidence import assert_evidence
from tests.integration.processes import Chosen, cases, launch

ROWS = [
    *("ddp/outer", "ddp/context", "ddp_unused/inner", "ddp_accumulate/outer", "ddp_static/outer"),
    *("fsdp/outer", "fsdp/context", "fsdp_keep/outer", "fsdp_mixed/context", "fsdp_cpu_offload/outer"),
    *("fsdp_accumulate/inner", "fsdp_checkpoint/outer", "fsdp_blocks/outer", "fsdp_prefetch/outer"),
    *("fsdp_tensor/outer", "fsdp_detached/outer", "fsdp_compiled/outer", "fsdp1/outer"),
    *("tensor/outer", "sequence/outer", "context_parallel/outer"),
    *("pp_gpipe/outer", "pp_1f1b/outer", "pp_1f1b/inner", "pp_interleaved/outer", "pp_looped_bfs/context"),
    *("pp_zero_bubble/outer", "pp_zbv/context", "pp_dual_v/outer"),
]
ONCE = ["ddp_once/outer", "fsdp_once/outer", "fsdp_once/context", "fsdp1_once/outer", "pp_1f1b_once/outer"]
"""Rows with checkpoints, some of which run once: with collectives in the blocks, or several forwards in flight."""

THOROUGH = {"fsdp_keep/outer", "pp_gpipe/outer", "pp_looped_bfs/context", "pp_zbv/context"}
"""Schedules and settings that differ from other rows in PyTorch alone."""

Runs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(chosen: Chosen, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The results of each rank in each row, of which some run with ``--thorough`` alone; and with single tensors."""
    names = [row for row in ROWS if row in chosen("row") or row not in THOROUGH]
    return launch("tests.integration.workers.distributed_rows", 2, tmp_path_factory.mktemp("rows"), *names, *ONCE)


@pytest.mark.parametrize("row", cases([*ROWS, *ONCE], THOROUGH))
def test_a_row_passes_all_checks(rows: Runs, row: str) -> None:
    for found in (rank[row] for rank in rows):
        assert not isinstance(found, str), found
        plain, offloaded = found
        assert_evidence(offloaded, plain)


def test_parameters_that_were_gathered_are_kept_as_parameters(rows: Runs) -> None:
    for row in ("fsdp/outer", "fsdp_detached/outer", "fsdp_compiled/outer", "fsdp1/outer"):
        _, offloaded = rows[0][row]
        assert offloaded.statistics.kept_bytes["parameter"] > 0, row


def test_a_block_that_runs_once_moves_its_saved_tensors(rows: Runs) -> None:
    """With two of four blocks run once, more moves than with none, and less than without checkpoints."""
    for rank in rows:
        again, once, plain = (
            rank[row][1].statistics.activation_bytes
            for row in ("fsdp_checkpoint/outer", "fsdp_once/outer", "fsdp/outer")
        )
        assert 1.5 * again < once < plain


# -- single tensors, and the process ----------------------------------------------------------------------------------


KINDS = ["sharded", "transposed", "replicated", "partial", "from a local activation", "collective", "collective inside"]


@pytest.mark.parametrize("kind", KINDS)
def test_dtensors_and_collectives_come_back_as_they_were(rows: Runs, kind: str) -> None:
    for before, after, right, back, resident_bytes, written_bytes in (rank["round trips"][kind] for rank in rows):
        assert after == before
        assert same_bits(back, right)
        assert resident_bytes == 0
        assert written_bytes > 0


RAISE = ["changed_in_place", "changed_after_unpack", "gathered_weight_changed"]
GO_ON = ["stale_twin", "stale_view", "stale_view_of_data", "stale_local", "twice_differentiated"]


@pytest.mark.parametrize("program", [*RAISE, *GO_ON])
def test_changes_in_place_end_as_without_offloading(rows: Runs, program: str) -> None:
    for plain, offloaded in (rank["programs"][program] for rank in rows):
        assert plain == offloaded
        assert plain.startswith("error: one of the variables needed for gradient") == (program in RAISE)


def test_no_lock_is_held_while_a_collective_is_awaited(rows: Runs) -> None:
    assert [rank["unlocked"] for rank in rows] == [[True, True]] * 2


class Sealed(TwoTensor):
    """A wrapper subclass whose inner tensors cannot be replaced."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("a", "b") and value is None:
            raise AttributeError(f"{name} cannot be changed")
        super().__setattr__(name, value)


def test_a_wrapper_that_cannot_be_taken_apart_stays(tmp_path: Path) -> None:
    offloader = Offloader(OffloadConfig(target="nvme", path=tmp_path, min_bytes=0, policy="all"))
    gradients: list[Any] = []
    for context in (contextlib.nullcontext(), offloader):
        torch.manual_seed(0)
        x: Any = Sealed(torch.randn(64, 64), torch.randn(64, 64)).requires_grad_()
        with context:
            loss = x.exp().sum()
        loss.backward()
        gradients.append(x.grad)
    assert same_bits(*gradients)
    assert offloader.statistics().nvme_written_bytes == 0
    assert "unknown tensor subclass" in offloader.statistics().kept_bytes
    offloader.close()
