"""Tiny models of many architectures: loss and gradients have the same bits with everything that is saved on disk."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import Offloader
from tests.harness import assert_same_bits

from .architectures import ARCHITECTURES, Architecture
from .compare import settle
from .places import PLACES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # warnings of models

OFFLOADER_OPTIONS = {"verify": True}
"""Of the fixture ``offloader``."""

STATIC = {"parameter", "buffer", "other device"}


def step(
    model: nn.Module, batch: dict[str, Tensor], offloader: Offloader | None, *, inside: bool, settled: bool = False
) -> list[Tensor | None]:
    """The loss and every gradient of one step; ``settled``: all that moves is on disk before backward begins."""
    model.zero_grad()
    torch.manual_seed(2)
    with offloader or nullcontext():
        loss: Tensor = model(**batch).loss
        if inside:
            settle(offloader if settled else None)
            loss.backward()
    if not inside:
        settle(offloader if settled else None)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def check(model: nn.Module, batch: dict[str, Tensor], offloader: Offloader, *, inside: bool) -> None:
    reference = step(model, batch, None, inside=False)
    assert sum(gradient is not None for gradient in reference) > 3
    before = offloader.statistics()
    mine = step(model, batch, offloader, inside=inside, settled=True)
    after = offloader.statistics()
    assert_same_bits(mine, reference)
    assert after.nvme_written_bytes > before.nvme_written_bytes
    assert after.nvme_read_bytes > before.nvme_read_bytes
    assert after.forwarded_bytes == before.forwarded_bytes
    assert after.live_records == 0
    again = step(model, batch, offloader, inside=inside)  # while writes are under way
    assert_same_bits(again, reference)
    after = offloader.statistics()
    assert after.live_records == 0
    assert after.degraded == {}
    kept = {reason for reason, nbytes in after.kept_bytes.items() if nbytes > before.kept_bytes.get(reason, 0)}
    # The program of these tests holds the batch and the model's output.
    assert kept <= STATIC | {"held elsewhere"} | ({"saved during backward"} if inside else set())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_architecture(architecture: Architecture, offloader: Offloader) -> None:
    check(architecture.build(), architecture.batch(), offloader, inside=False)


def test_float32_that_was_cast_from_bfloat16(tmp_path: Path) -> None:
    """Some architectures that save such tensors, in half of the bytes."""
    offloader, known = PLACES[0].make(tmp_path, {"codec": "exact", "debug": True}), {a.name: a for a in ARCHITECTURES}
    names = "llama gemma3_text mamba xlstm t5 qwen3_moe switch_transformers jamba"
    for architecture in map(known.__getitem__, names.split()):
        before = offloader.statistics().halved_bytes
        batch = {name: t.bfloat16() if t.is_floating_point() else t for name, t in architecture.batch().items()}
        check(architecture.build().bfloat16(), batch, offloader, inside=False)
        assert offloader.statistics().halved_bytes > before, architecture.name
    offloader.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("index", range(len(ARCHITECTURES)), ids=[a.name for a in ARCHITECTURES])
def test_architecture_with_checkpointing(index: int, offloader: Offloader) -> None:
    """Reentrant and non-reentrant in turn; backward outside and inside the context in turn."""
    architecture = ARCHITECTURES[index]
    model: Any = architecture.build()
    if not model.supports_gradient_checkpointing:
        pytest.skip("has no checkpointing")
    enable_checkpointing(model, use_reentrant=index % 2 == 0)
    check(model, architecture.batch(), offloader, inside=index // 2 % 2 == 0)


def enable_checkpointing(model: Any, *, use_reentrant: bool) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    (name, *_) = inspect.signature(enable).parameters
    enable(**{name: {"use_reentrant": use_reentrant}})
