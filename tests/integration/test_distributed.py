"""torch.distributed on two gloo processes: DDP, fully_shard, tensor and context parallel, every pipeline schedule.

Nothing here needs an adapter: `attach` and the context do, and each row shows what the issue asks of it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.testing._internal.two_tensor import TwoTensor

from actoffload import OffloadConfig, Offloader
from actoffload.storage.engines.base import IoKind
from actoffload.testing.fakedevice import FakeDevice
from actoffload.testing.faults import GateEngine
from tests.harness import assert_empty, only_engine, same_bits
from tests.integration.evidence import Run, assert_evidence
from tests.integration.processes import launch

ROWS = [
    "ddp/outer",
    "ddp/inner",
    "ddp/context",
    "ddp_bucket_view/outer",
    "ddp_unused/inner",
    "ddp_accumulate/outer",
    "ddp_static/outer",
    "fsdp/outer",
    "fsdp/inner",
    "fsdp/context",
    "fsdp_keep/outer",
    "fsdp_mixed/context",
    "fsdp_cpu_offload/outer",
    "fsdp_accumulate/inner",
    "fsdp_checkpoint/outer",
    "fsdp_blocks/outer",
    "fsdp_prefetch/outer",
    "fsdp_tensor/outer",
    "fsdp_detached/outer",
    "fsdp_detached/context",
    "fsdp_compiled/outer",
    "fsdp1/outer",
    "fsdp1_original/context",
    "tensor/outer",
    "tensor/context",
    "sequence/outer",
    "sequence/inner",
    "context_parallel/outer",
    "pp_gpipe/outer",
    "pp_1f1b/outer",
    "pp_1f1b/inner",
    "pp_1f1b/context",
    "pp_interleaved/outer",
    "pp_looped_bfs/context",
    "pp_zero_bubble/outer",
    "pp_zbv/context",
    "pp_dual_v/outer",
]

Runs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What each rank found in each row."""
    return launch("tests.integration.workers.distributed_rows", 2, tmp_path_factory.mktemp("rows"), *ROWS)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("row", ROWS)
def test_a_row_shows_all_that_is_promised(rows: Runs, row: str, rank: int) -> None:
    found = rows[rank][row]
    assert not isinstance(found, str), found
    plain, offloaded = found
    assert isinstance(plain, Run)
    assert_evidence(offloaded, plain)


def test_parameters_that_were_gathered_are_kept_as_parameters(rows: Runs) -> None:
    for row in ("fsdp/outer", "fsdp_detached/outer", "fsdp_compiled/outer", "fsdp1/outer"):
        _, offloaded = rows[0][row]
        assert offloaded.statistics.kept_bytes["parameter"] > 0, row


# -- single tensors, and the process ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, list[str]]:
    """What each rank found of single tensors, and what it printed."""
    directory = tmp_path_factory.mktemp("tensors")
    runs = launch("tests.integration.workers.distributed_tensors", 2, directory)
    return runs, [(directory / f"log{rank}.txt").read_text() for rank in range(2)]


KINDS = ["sharded", "transposed", "replicated", "partial", "from a local activation", "collective", "collective inside"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_dtensors_and_collectives_come_back_as_they_were(found: tuple[Runs, list[str]], kind: str, rank: int) -> None:
    before, after, right, back, resident_bytes, written_bytes = found[0][rank]["round trips"][kind]
    assert after == before
    assert same_bits(back, right)
    assert resident_bytes == 0
    assert written_bytes > 0


@pytest.mark.parametrize(
    ("program", "raises"),
    [
        ("changed_in_place", True),
        ("stale_twin", False),
        ("stale_view", False),
        ("stale_view_of_data", False),
        ("stale_local", False),
        ("twice_differentiated", False),
        ("changed_after_unpack", True),
        ("gathered_weight_changed", True),
    ],
)
def test_changes_in_place_end_as_without_offloading(found: tuple[Runs, list[str]], program: str, raises: bool) -> None:
    for rank in range(2):
        plain, offloaded = found[0][rank]["programs"][program]
        assert plain == offloaded
        assert plain.startswith("error: one of the variables needed for gradient") == raises


def test_context_parallel_with_the_cpu_s_own_kernel_is_pytorch_s_error(found: tuple[Runs, list[str]]) -> None:
    for rank in range(2):
        plain, offloaded = found[0][rank]["programs"]["cpu_attention"]
        assert plain == offloaded
        assert "aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy" in plain


def test_no_lock_is_held_while_a_collective_is_awaited(found: tuple[Runs, list[str]]) -> None:
    for rank in range(2):
        assert found[0][rank]["unlocked"] == [True, True]


def test_the_line_is_said_by_the_first_rank_or_by_each(found: tuple[Runs, list[str]]) -> None:
    runs, logs = found
    for rank in range(2):
        _, none, first, every, function = [part.split("actoffload: ") for part in logs[rank].split("announce ")]
        assert [len(part) - 1 for part in (none, first, every, function)] == [0, int(rank == 0), 1, 0]
        (said,) = runs[rank]["announcements"]["said"]
        assert f"rank {rank} of 2" in said


@pytest.mark.parametrize("told", ["launcher", "group"])
def test_two_ranks_take_half_each_of_memory_and_disk(found: tuple[Runs, list[str]], told: str) -> None:
    for rank in range(2):
        taken = found[0][rank]["shares"]
        assert taken[told]["processes"] == 2
        for name in ("host", "disk"):
            assert 0.3 < taken[told][name] / taken["alone"][name] < 0.6, (told, name, taken)


# -- memory that its owner frees and fills again, as sharding and output-discarding recomputation do -------------------


class JunkEngine(GateEngine):
    """Writes what another tensor would have left in memory that was freed meanwhile."""

    def _transfer_once(self, kind: IoKind, views: Any, offset: int) -> int:
        if kind is IoKind.WRITE:
            nbytes = sum(map(len, views))
            junk = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
            junk[:] = b"\x7f" * len(junk)
            views = [memoryview(junk)[:nbytes]]
        return super()._transfer_once(kind, views, offset)


def _freed_and_filled(context: Any, meanwhile: Callable[[], None]) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(256, 256, requires_grad=True)
    with context:
        result = (x * 2).exp()
    bytes_ = result.detach().clone()
    storage = result.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    meanwhile()
    storage.resize_(nbytes)
    with torch.no_grad(), _unsafe_preserve_version_counter(result):
        result.copy_(bytes_)
    result.sum().backward(retain_graph=True)
    result.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("resized", [True, False])
def test_memory_that_is_freed_while_it_is_written_is_taken_as_its_owner_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resized: bool
) -> None:
    if not resized:  # without the check: what this test is there for
        monkeypatch.setattr("actoffload.tiers.tier.Tier.resized", lambda self, record: False)
        monkeypatch.setattr("actoffload.tiers.cpu_tier.CpuTier.resized", lambda self, records: [])
    config = OffloadConfig(target="nvme", path=tmp_path, engine=JunkEngine, min_bytes=0, policy="all")
    offloader = Offloader(config)

    def write() -> None:
        only_engine(offloader).open()
        offloader.synchronize()

    expected = _freed_and_filled(contextlib.nullcontext(), lambda: None)
    gradient = _freed_and_filled(offloader, write)
    assert same_bits(gradient, expected) == resized
    if resized:
        assert offloader.statistics().kept_bytes == {"resized": 256 * 256 * 4}
    assert_empty(offloader)
    offloader.close()


def test_memory_that_is_freed_while_it_is_copied_to_the_host_is_taken_as_its_owner_left_it(tmp_path: Path) -> None:
    device = FakeDevice("lazy")
    config = OffloadConfig(target="host", min_bytes=0, policy="all")
    offloader = Offloader(config, accelerator=device)
    expected = _freed_and_filled(contextlib.nullcontext(), lambda: None)
    gradient = _freed_and_filled(offloader, offloader.synchronize)
    assert same_bits(gradient, expected)
    assert offloader.statistics().kept_bytes == {"resized": 256 * 256 * 4}
    offloader.close()


class Sealed(TwoTensor):
    """A wrapper whose inner tensors cannot be taken out."""

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
    assert same_bits(gradients[0].a, gradients[1].a)
    assert same_bits(gradients[0].b, gradients[1].b)
    assert offloader.statistics().nvme_written_bytes == 0
    assert "unknown tensor subclass" in offloader.statistics().kept_bytes
    offloader.close()
