"""Lightning through `attach`: the module's whole ``training_step`` runs inside the context."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

import actoffload
from tests.integration.evidence import Run, assert_evidence, counting_owners

pl = pytest.importorskip("lightning.pytorch")

WIDTH = 64
STEPS = 8

pytestmark = [
    # Warnings of Lightning and torchmetrics about their own code and this machine.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Task(pl.LightningModule):  # type: ignore[name-defined]
    """A small net whose ``training_step`` the trainer calls, not its forward.

    Args:
        by: how the training step runs the net: ``"forward"`` (``self(x)``), ``"part"`` (``self.net(x)``, so that no
            forward hook of the module itself runs), or ``"checkpoint"`` (each layer under PyTorch's checkpoint).
        manual: whether the step calls backward and the optimizer itself.
    """

    def __init__(self, by: str = "forward", manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by = by
        self.automatic_optimization = not manual
        self.net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.dropout = nn.Dropout(0.1)
        self.run = Run()
        self.validated: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        net = functools.partial(checkpoint_sequential, self.net, 6, use_reentrant=False)
        out: Tensor = self.dropout(net(x) if self.by == "checkpoint" else self.net(x))
        return out

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        hidden = self.dropout(self.net(x)) if self.by == "part" else self(x)
        loss: Tensor = (hidden.exp() - y).square().mean()  # saves tensors outside of every module's forward
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.on_before_optimizer_step(optimizer)
            optimizer.step()
        return loss

    # Results are collected here: a compiled step that appended to a list would be compiled anew for each length of it.
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run.losses.append(outputs["loss"].clone())

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.validated.append(outputs)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        step = len(self.run.losses)
        self.run.tensors |= {f"{step} {name}": p.grad.clone() for name, p in self.named_parameters()}

    def validation_step(self, batch: list[Tensor], index: int) -> Tensor:
        validated: Tensor = self(batch[0]).sum()
        return validated

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * 64, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.roll(1, 0)), batch_size=64)


def fit(task: Task, directory: Path, module: nn.Module | None = None, **options: Any) -> Run:
    """Train for an epoch with two validations in between."""
    torch.manual_seed(5)  # dropout
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    often = {"max_epochs": 1, "val_check_interval": 3, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    trainer = pl.Trainer(accelerator="cpu", default_root_dir=directory, **quiet, **often, **options)
    with counting_owners(task.parameters) as meter:
        trainer.fit(task if module is None else module, data(), data())
    task.run.tensors |= {name: parameter.detach().clone() for name, parameter in task.named_parameters()}
    task.run.tensors |= {f"validation {i}": value for i, value in enumerate(task.validated)}
    task.run.moved_parameter_bytes = meter.parameter_bytes
    return task.run


def options(tmp_path: Path) -> dict[str, Any]:
    usual = {"target": "nvme", "min_bytes": 0, "device_budget": "64KiB", "policy": "greedy"}
    return {"path": str(tmp_path), **usual}


ACCUMULATE = {"accumulate_grad_batches": 2}
proves = pytest.mark.proves


@pytest.mark.parametrize(
    ("by", "manual", "extra"),
    [
        ("forward", False, {}),
        ("part", False, {}),
        pytest.param("forward", False, ACCUMULATE, marks=proves("Lightning", checkpointing=False, way="code")),
        pytest.param("checkpoint", False, ACCUMULATE, marks=proves("Lightning", checkpointing=True, way="code")),
        ("part", False, {"gradient_clip_val": 0.01}),
        ("forward", False, {"precision": "bf16-mixed"}),
        ("forward", True, {}),
        ("part", True, {}),
    ],
    ids=["forward", "part", "accumulation", "checkpoint", "clipping", "bf16", "manual forward", "manual part"],
)
def test_same_bits(by: str, manual: bool, extra: dict[str, Any], tmp_path: Path) -> None:
    plain = fit(Task(by, manual), tmp_path, **extra)
    task = Task(by, manual)
    attachment = actoffload.attach(task, **options(tmp_path))
    offloaded = fit(task, tmp_path, **extra)
    offloaded.statistics = attachment.offloader.statistics()
    statistics = assert_evidence(offloaded, plain)
    assert len(plain.losses) == STEPS
    assert len(task.validated) == 3  # the sanity check and two in between
    # Including the tensors that the loss saves: `exp` its result, the square its base.
    saved_by_loss = 2 * STEPS * 64 * WIDTH * 4
    assert statistics.activation_bytes > saved_by_loss + STEPS * 6 * 64 * WIDTH * 4 * (1 if not extra else 0.4)
    attachment.offloader.close()


def test_an_error_in_a_step_leaves_the_context(tmp_path: Path) -> None:
    task = Task()
    attachment = actoffload.attach(task, **options(tmp_path))
    task.net = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        task.training_step([torch.ones(2, WIDTH)] * 2, 0)
    x = torch.ones(64, WIDTH, requires_grad=True)
    x.exp().sum().backward()
    assert attachment.offloader.statistics().packed_tensors == 0
    attachment.offloader.close()


def test_a_step_that_was_wrapped_before_runs_inside_too(tmp_path: Path) -> None:
    packed = []
    for wrapped in (False, True):
        task = Task()
        own = task.training_step
        if wrapped:
            task.training_step = lambda *passed, own=own: own(*passed)  # type: ignore[method-assign]
        attachment = actoffload.attach(task, **options(tmp_path))
        task.training_step([torch.ones(64, WIDTH)] * 2, 0)
        packed.append(attachment.offloader.statistics().packed_tensors)
        attachment.offloader.close()
    assert packed[0] == packed[1]


class Counted(Task):
    steps = 0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, index)


def test_copies_and_a_second_attach_keep_one_context_for_each_step(tmp_path: Path) -> None:
    """A copy runs its own step. Attaching twice with equal options counts a step once. A pickled module is detached."""
    task = Counted()
    first = actoffload.attach(task, **options(tmp_path))
    assert actoffload.attach(task, **options(tmp_path)) is first
    batch = [torch.ones(64, WIDTH), torch.ones(64, WIDTH)]
    twin = copy.deepcopy(task)
    twin.training_step(batch, 0)
    assert (twin.steps, task.steps) == (1, 0)
    assert first.offloader.statistics().steps == 1
    torch.save(task, tmp_path / "task.pt")
    loaded = torch.load(tmp_path / "task.pt", weights_only=False)
    loaded.training_step(batch, 0)
    assert (loaded.steps, task.steps) == (1, 0)
    assert first.offloader.statistics().steps == 1
    task.training_step(batch, 0)
    assert first.offloader.statistics().steps == 2
    first.detach()
    task.training_step(batch, 0)
    assert (task.steps, first.offloader.statistics().steps) == (2, 2)
    assert not task._forward_hooks
    first.offloader.close()


def compiled(task: Task) -> nn.Module:
    module: Any = torch.compile(task, backend="aot_eager")
    assert isinstance(module, nn.Module)
    return module


@pytest.fixture(scope="module")
def compiled_alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch._dynamo.reset()
    task = Task()
    return fit(task, tmp_path_factory.mktemp("compiled"), compiled(task))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by Dynamo
@pytest.mark.parametrize("first", ["attach", "compile"])
def test_a_compiled_lightning_module(first: str, compiled_alone: Run, tmp_path: Path) -> None:
    """Lightning compiles the steps of a module that ``torch.compile`` returned."""
    torch._dynamo.reset()
    task = Task()
    if first == "attach":
        attachment = actoffload.attach(task, **options(tmp_path))
        module = compiled(task)
    else:
        module = compiled(task)
        attachment = actoffload.attach(module, **options(tmp_path))
    offloaded = fit(task, tmp_path, module)
    offloaded.statistics = attachment.offloader.statistics()
    whole = first == "compile"  # the whole step is one graph, whose peak cannot fall
    assert_evidence(offloaded, compiled_alone, peak_falls=None if whole else True)
    assert not whole or offloaded.statistics.resident_share > 0.9
    attachment.offloader.close()
