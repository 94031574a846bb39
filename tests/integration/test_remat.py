"""torch_remat's checkpoints while their kept tensors move: the same gradients, or an error."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from actoffload import Statistics, attach
from actoffload.errors import ConfigError

remat = pytest.importorskip("torch_remat")
WIDTH = 64


class Block(nn.Module):
    """A transformer block; ``save`` selects the regions of its two that do not run again."""

    def __init__(self, save: tuple[bool, bool]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.save = save
        self.pair: Any = None
        """Hooks around the attention."""
        self.changes = False
        """Whether the attention's output is changed in place after its use."""

    def attention(self, x: Tensor) -> Tensor:
        attended: Tensor = self.out(scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))
        return attended

    def mlp(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(gelu(self.up(x)))
        return changed

    def forward(self, x: Tensor) -> Tensor:
        with nullcontext() if self.pair is None else remat.saved_tensors_hooks(*self.pair):
            attended = remat.region(self.attention, "attention", recompute=not self.save[0])(self.norms[0](x))
        remat.recompute_needs_tensor(attended)
        y: Tensor = x + attended
        moved: Tensor = remat.region(self.mlp, "mlp", recompute=not self.save[1])(self.norms[1](y))
        remat.recompute_needs_tensor(moved)
        if self.changes:
            attended.detach().zero_()
        return y + moved


class Model(nn.Module):
    """Three blocks, each in a checkpoint with these options."""

    def __init__(self, save: tuple[bool, bool] = (True, False), options: dict[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks: Any = nn.ModuleList(Block(save) for _ in range(3))
        self.options = {} if options is None else options

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = remat.checkpoint(**self.options)(block)(x)
        return x.square().mean()


def gradients(model: Callable[..., Tensor], twice: bool = False) -> list[Tensor]:
    x = torch.randn(8, 32, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = model(x)
    if twice:
        loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad is not None
    return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[attr-defined]


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Attach for the length of the test."""
    from actoffload.integrations import remat as adapter

    attachments = []

    def make(module: nn.Module, **options: Any) -> Any:
        known = {"target": "nvme", "path": tmp_path, "min_bytes": "1KiB", "policy": "all", "verify": True}
        attachments.append(adapter.attach(module, **{**known, **options, "announce": "none"}))
        return attachments[-1].offloader

    yield make
    for attachment in attachments:
        attachment.offloader.close()
        attachment.detach()


def trained(attached: Callable[..., Any], model: Model, twice: bool = False, **options: Any) -> Statistics:
    """The statistics of two steps; fails unless their gradients have the bits of the model without offloading."""
    expected = gradients(Model(model.blocks[0].save), twice)
    offloader = attached(model, **options)
    for _ in range(2):
        model.zero_grad()
        assert all(map(torch.equal, gradients(model, twice), expected))
    statistics: Statistics = offloader.statistics()
    assert statistics.live_records == 0
    return statistics


def movable(statistics: Statistics) -> int:
    """Bytes of saved tensors without a reason to stay."""
    return statistics.packed_bytes - statistics.deduplicated_bytes - sum(statistics.kept_bytes.values())


@pytest.mark.parametrize("twice", [False, True], ids=["", "retain_graph"])
@pytest.mark.parametrize("save", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_the_same_gradients_and_kept_tensors_move(
    attached: Callable[..., Any], save: tuple[bool, bool], twice: bool
) -> None:
    budget = "640KiB" if any(save) else "128KiB"  # less than is kept, so that bytes are written
    statistics = trained(attached, Model(save), twice, device_budget=budget)
    assert statistics.nvme_written_bytes > 0
    assert statistics.nvme_read_bytes > 0
    if any(save):
        inputs_alone = trained(attached, Model((False, False)), twice, device_budget="128KiB")
        assert movable(statistics) > movable(inputs_alone), "the tensors of regions that do not run again move, too"


def test_boundaries_only_moves_the_inputs_of_the_checkpoints(attached: Callable[..., Any]) -> None:
    everything, only = (trained(attached, Model(), boundaries=which) for which in ("all", "only"))
    inputs = 2 * 2 * 8 * 32 * WIDTH * 4  # of two checkpoints in two steps; the first one's input is the model's own
    assert movable(only) == inputs < movable(everything)


def test_a_budget_holds_and_nothing_is_run_again_by_the_planner(attached: Callable[..., Any]) -> None:
    model = Model((True, True))
    offloader = attached(model, policy="auto", device_budget="1MiB")
    expected = gradients(Model((True, True)))
    for _ in range(5):
        model.zero_grad()
        assert all(map(torch.equal, gradients(model), expected))
    assert offloader.statistics().resident_peak_bytes <= 1 << 20
    assert not offloader.plan.once


def test_a_plan_runs_no_checkpoint_of_torch_remat_once(attached: Callable[..., Any]) -> None:
    """They call PyTorch's checkpoint, but must run again, because a second run reads the records of the first."""
    model = Model((True, False))
    offloader = attached(model)
    offloader.store.regions.follow(frozenset(range(4)))
    assert all(map(torch.equal, gradients(model), gradients(Model((True, False)))))
    assert offloader.statistics().regions == 0


def test_a_kept_output_that_was_changed_in_place_is_an_error(attached: Callable[..., Any]) -> None:
    model = Model()
    attached(model)
    model.blocks[1].changes = True
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        gradients(model)


def pair() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Hooks of another library."""
    return Tensor.clone, Tensor.clone


def test_hooks_of_its_own_are_refused(attached: Callable[..., Any]) -> None:
    on_checkpoint, in_body = Model(options={"saved_tensors_hooks": pair()}), Model()
    in_body.blocks[1].pair = pair()
    for model in (on_checkpoint, in_body):
        gradients(model)  # without offloading this works
        attached(model)
        with pytest.raises(ConfigError, match="saved_tensors_hooks"):
            gradients(model)


def test_hooks_around_ours_are_shadowed_as_those_of_pytorch_are(attached: Callable[..., Any]) -> None:
    def fail(tensor: Tensor) -> Tensor:
        raise AssertionError("the outer hooks were called")

    model = Model()
    attached(model)
    with remat.saved_tensors_hooks(fail, fail):
        loss = model(torch.ones(8, 32, WIDTH))
    loss.backward()


def test_inside_a_checkpoint_is_refused(attached: Callable[..., Any]) -> None:
    model = Model()
    attached(model.blocks[1])
    with pytest.raises(ConfigError, match=r"runs in a remat\.checkpoint"):
        gradients(model)


def test_attach_refuses_recompute_and_another_attachment(attached: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="recompute"):
        attached(Model(), recompute=True)
    model = Model()
    attachment = attach(model, target="host", announce="none")
    with pytest.raises(ConfigError, match="attached already"):
        attached(model)
    attachment.detach()


def test_a_missing_torch_remat_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_remat", None)
    monkeypatch.delitem(sys.modules, "actoffload.integrations.remat", raising=False)
    with pytest.raises(ImportError, match=r"pip install actoffload\[remat\]"):
        importlib.import_module("actoffload.integrations.remat")
