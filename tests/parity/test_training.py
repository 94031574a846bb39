"""After several steps of a training loop the weights have the same bits, with every option and every entry point."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import actoffload
from actoffload import Offloader, Policy, Statistics
from actoffload.policy import Decision, TensorFacts
from actoffload.storage.engines.base import SpoolFile, StorageEngine
from actoffload.testing.faults import ShortEngine
from tests.harness import assert_same_bits

from .compare import assert_parity, settle
from .places import Maker
from .tower import Tower, tokens

STEPS = 4


def train(offloader: Offloader | None, *, kind: str = "none", inside: bool = False) -> list[Tensor | None]:
    """Losses and weights after some steps, the batches of different lengths.

    In every second step tensors that move have left before backward, even if the disk is slow. The other steps overlap
    with their writes.
    """
    torch.manual_seed(0)
    model = Tower(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Tensor | None] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = tokens(step)[:, : 9 if step == 2 else None]
        with offloader or nullcontext():
            loss, side = model(batch)
            total = loss + side.square().mean()
            if inside:
                settle(offloader if step % 2 else None)
                total.backward()
        if not inside:
            settle(offloader if step % 2 else None)
            total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


class Odd(Policy):
    """Every second storage moves."""

    def decide(self, facts: TensorFacts) -> Decision:
        return Decision.OFFLOAD if facts.index % 2 else Decision.KEEP


def short(file: SpoolFile) -> StorageEngine:
    return ShortEngine(file, most_bytes=512)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults but for the size": {"keep_last_bytes": None},
    "everything": {"policy": "all"},
    "verify and debug": {"verify": True, "debug": True},
    "narrow prefetch": {"prefetch_bytes": 1},
    "wide prefetch": {"prefetch_bytes": "1GiB"},
    "pressure": {"pending_bytes": 4096},
    "small budget": {"device_budget": "32KiB"},
    "tiny budget": {"device_budget": 1024},
    "one io thread": {"io_threads": 1},
    "only the larger": {"min_bytes": 4096},
    "own policy": {"policy": Odd()},
    "keep the last": {"keep_last_bytes": "16KiB"},
    "posix": {"engine": "posix"},
    "aiofiles": {"engine": "aiofiles"},
    "memory": {"engine": "memory"},
    "short transfers": {"engine": short},
}


@cache
def reference(kind: str = "none") -> list[Tensor | None]:
    """The losses and weights without offloading."""
    return train(None, kind=kind)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, make_offloader: Maker) -> None:
    if name == "aiofiles":
        pytest.importorskip("aiofiles")
    offloader = make_offloader(**OPTIONS[name])
    assert_same_bits(train(offloader), reference())
    offloader.synchronize()
    statistics = offloader.statistics()
    assert statistics.steps == STEPS
    assert statistics.moved_bytes > 0
    assert statistics.degraded == {}
    assert statistics.live_records == 0
    check_effect_of_option(name, statistics)


def check_effect_of_option(name: str, statistics: Statistics) -> None:
    if name == "pressure":
        assert statistics.kept_bytes["pressure"] > 0
    if name == "small budget":
        # Backward always gets the record it needs at once: one record may stand above the budget.
        assert statistics.resident_peak_bytes <= 2 * (32 << 10) < statistics.baseline_peak_bytes
        assert "pressure" not in statistics.kept_bytes
    if name == "keep the last":
        assert statistics.kept_bytes["last saved layer"] > 0


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("kind", ["none", "reentrant", "nonreentrant", "selective"])
def test_loop(kind: str, inside: bool, make_offloader: Maker) -> None:
    offloader = make_offloader(verify=True)
    assert_same_bits(train(offloader, kind=kind, inside=inside), reference(kind))
    assert offloader.statistics().moved_bytes > 0
    assert offloader.statistics().live_records == 0


def test_several_paths(make_offloader: Maker, tmp_path: Path) -> None:
    """Each path carries its share."""
    paths = [tmp_path / "one", tmp_path / "other", tmp_path / "third"]
    for path in paths:
        path.mkdir()
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)).requires_grad_()
    offloader = make_offloader(path=paths, verify=True, engine="posix")
    spool, moved = offloader.store.tiers.spool, Counter[tuple[int, str]]()
    if spool is not None:  # else the host only
        spool.on_moved = lambda it: moved.update({(it.extent.arena.file.fd, it.kind.value): it.moved_bytes})
    assert_parity(make_offloader, lambda: (x * 1).sin().exp().tanh().cos().sum(), [x], offloader)
    assert len(moved) == (0 if spool is None else 2 * len(paths))
    assert all(nbytes > x.nbytes // 2 for nbytes in moved.values())


def test_decorator(tmp_path: Path) -> None:
    x = torch.linspace(0, 1, 5000).requires_grad_()

    def forward() -> Tensor:
        return (x * 1).sin().exp().sum()

    context = actoffload.offload_activations("nvme", path=tmp_path, min_bytes=0, allow_any_filesystem=True)
    loss = context(forward)()
    context.offloader.synchronize()
    assert_same_bits(torch.autograd.grad(loss, x), torch.autograd.grad(forward(), x))
    assert context.offloader.statistics().nvme_written_bytes > 0
    assert context.offloader.statistics().nvme_read_bytes > 0
    context.offloader.close()


def test_a_step_in_a_step(make_offloader: Maker) -> None:
    """A second model's whole step between the forward and the backward of the first."""

    def run(offloader: Offloader | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        one, other = Tower(), Tower()
        with offloader or nullcontext():
            first, _ = one(tokens(0))
        with offloader or nullcontext():
            second, _ = other(tokens(1))
            settle(offloader)
            second.backward()
        first.backward()
        return [parameter.grad for parameter in [*one.parameters(), *other.parameters()]]

    offloader = make_offloader(debug=True)
    reference = run(None)
    for _ in range(2):
        assert_same_bits(run(offloader), reference)
    offloader.synchronize()
    assert offloader.statistics().live_records == 0
    assert offloader.statistics().moved_bytes > 0
