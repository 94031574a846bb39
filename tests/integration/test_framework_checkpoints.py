"""Gradient checkpointing as each framework switches it on: any choice of regions that run once has the same bits.

The models are not changed. Each framework calls PyTorch's checkpoint, in which the plan chooses.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import actoffload
from actoffload import Plan
from tests import pages
from tests.blocks import MLP
from tests.harness import assert_same_gradients
from tests.integration.evidence import assert_same_run
from tests.programs import run_program

for _package in ("accelerate", "diffusers", "lightning", "peft", "transformers"):
    pytest.importorskip(_package)

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    apply_activation_checkpointing,
)
from transformers import TrainerCallback  # noqa: E402

from tests.integration import hf_models  # noqa: E402

STEPS = 4
WIDTH = 32
ROWS = 64


@dataclass
class Case:
    """A model with checkpoints, a function that runs its forward to a loss, and its number of regions."""

    model: nn.Module
    forward: Callable[[], Tensor]
    regions: int


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def of(model: nn.Module, regions: int) -> Case:
    """A case for a model of blocks that has checkpoints already."""
    return Case(model, lambda: model(rows()).square().mean(), regions)


def blocks(checkpointed: Callable[[nn.Sequential], object] = lambda model: None, count: int = 4) -> Case:
    """A sequence of blocks, into which a framework's function puts its checkpoints."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(MLP(WIDTH) for _ in range(count)))
    checkpointed(model)
    return of(model, count)


def language(model: Any, regions: int, **options: Any) -> Case:
    """A model of Transformers, as ``gradient_checkpointing=True`` leaves it."""
    model.train()
    model.activation_checkpointing_enable(**options)

    def forward() -> Tensor:
        ids = torch.randint(4, hf_models.WORDS, (2, hf_models.LENGTH))
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    return Case(model, forward, regions)


def lora() -> Case:
    """Adapters on frozen weights: a region has inputs that need no gradient."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights="gaussian")
    return language(get_peft_model(hf_models.llama(), adapters), 2)


def unet() -> Case:
    """Diffusers: blocks of convolutions with attention, each with two inputs."""
    from diffusers import UNet2DModel

    model: Any = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        dropout=0.1,
    )
    model.train()
    model.enable_gradient_checkpointing()
    return Case(model, lambda: model(torch.randn(2, 3, 8, 8), 1).sample.square().mean(), 7)


class InSegments(nn.Module):
    """PyTorch's ``checkpoint_sequential``, which does not checkpoint the last segment."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MLP(WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint_sequential(self.blocks, 4, x, use_reentrant=False)
        return found


class Nested(nn.Module):
    """Checkpoints inside two outer ones, which are the regions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP(WIDTH) for _ in range(4))

    def pair(self, first: int, x: Tensor) -> Tensor:
        for block in self.blocks[first : first + 2]:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def forward(self, x: Tensor) -> Tensor:
        for first in (0, 2):
            x = checkpoint(self.pair, first, x, use_reentrant=False)
        return x


def composable(model: nn.Sequential) -> None:
    """``torch.distributed._composable.checkpoint``. It imports PyTorch's generator by name, here after actoffload."""
    from torch.distributed import _composable

    put: Any = vars(_composable)["checkpoint"]
    for block in list(model.children())[1:]:
        put(block)


def wrapped(model: nn.Sequential) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, MLP))


def of_lightning(model: nn.Sequential) -> None:
    """The function that ``FSDPStrategy(activation_checkpointing_policy={MLP})`` calls."""
    from lightning.fabric.strategies import fsdp

    fsdp._setup_activation_checkpointing(model, {"check_fn": lambda module: isinstance(module, MLP)})


def of_accelerate(model: nn.Sequential) -> None:
    """The function that ``activation_checkpointing=True`` of the FSDP plugin calls. It keeps no random states."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    for block in model.modules():
        if isinstance(block, nn.Dropout):
            block.p = 0.0
    plugin: Any = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["MLP"],
    )
    plugin.set_auto_wrap_policy(model)
    fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)


def of_torchtitan(kind: str) -> Case:
    """``activation-checkpoint:full`` and ``selective``: blocks in ``layers``, without early stop."""
    pytest.importorskip("torchtitan")
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())  # needs Triton
    from torchtitan.distributed import activation_checkpoint

    model = nn.Module()
    model.layers = nn.ModuleDict({str(number): MLP(WIDTH) for number in range(4)})
    chosen = getattr(activation_checkpoint, kind)
    chosen(chosen.Config()).apply(model)
    return of(nn.Sequential(*model.layers.values()), 4)


def of_timm() -> Case:
    model: Any = pytest.importorskip("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=3)
    model.train()
    model.set_grad_checkpointing()
    return Case(model, lambda: model(torch.randn(2, 3, 32, 32)).square().mean(), 3)


CASES: dict[str, Callable[[], Case]] = {
    "Transformers, decoder": lambda: language(hf_models.llama(dropout=0.1), 2),
    "Transformers, decoder with dropout and a tied head": lambda: language(hf_models.gpt2(), 2),
    "Transformers, encoder and decoder": lambda: language(hf_models.t5(), 4),
    "Transformers, every second layer": lambda: language(hf_models.llama(), 1, every_n_layers=2),
    "PEFT": lora,
    "diffusers": unet,
    "timm": of_timm,
    "CheckpointWrapper": lambda: blocks(wrapped),
    "composable": lambda: blocks(composable),
    "checkpoint_sequential": lambda: of(InSegments(), 3),
    "nested": lambda: of(Nested(), 2),
    "Lightning": lambda: blocks(of_lightning),
    "Accelerate": lambda: blocks(of_accelerate),
    "torchtitan, full": lambda: of_torchtitan("FullAC"),
    "torchtitan, selective": lambda: of_torchtitan("SelectiveAC"),
}


def choices(regions: int, seed: str) -> Iterator[frozenset[int]]:
    """Which regions run once: none, all, then any."""
    yield frozenset()
    yield frozenset(range(regions))
    draw = random.Random(seed)
    while True:
        yield frozenset(place for place in range(regions) if draw.random() < 0.5)


def train(case: Case, attachment: actoffload.Attachment | None = None, seed: str = "") -> dict[str, Tensor]:
    """Losses and gradients of some steps, and the weights after them."""
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD((p for p in case.model.parameters() if p.requires_grad), lr=1e-2)
    chosen = choices(case.regions, seed)
    for step in range(STEPS):
        torch.manual_seed(step)
        once = next(chosen)
        if attachment is not None:
            attachment.offloader.store.regions.follow(once)
        loss = case.forward()
        if attachment is not None:
            seen = attachment.offloader.statistics()
            assert (seen.regions, seen.regions_once) == (case.regions, len(once))
            attachment.offloader.synchronize()  # so that even in a short step the disk is written
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        gradients = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
        found |= {f"gradient {step} of {name}": gradient.clone() for name, gradient in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: parameter.detach().clone() for name, parameter in case.model.named_parameters()}


def parts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """A copy of the attributes of each module, hooks and functions included."""
    found = {}
    for name, module in model.named_modules():
        own = dict(vars(module))
        found[name] = {key: dict(value) if isinstance(value, dict) else value for key, value in own.items()}
        found[name]["type"] = type(module)
    return found


@pytest.mark.parametrize("name", CASES)
def test_whichever_regions_run_once_the_training_is_that_of_the_checkpoints(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone = train(CASES[name]())
    torch.manual_seed(0)
    case = CASES[name]()
    before = parts(case.model)
    everything = tuple(range(case.regions))
    plan = Plan((), once=everything, regions=case.regions)
    options: dict[str, Any] = {"target": "nvme", "path": tmp_path, "min_bytes": 0, "announce": "none"}
    attachment = actoffload.attach(case.model, policy=plan, **options)
    with contextlib.closing(attachment.offloader):
        assert attachment.offloader.store.regions.once == set(everything), "the plan's choice"
        ours = train(case, attachment, seed=name)
        assert attachment.offloader.statistics().nvme_written_bytes > 0
        assert attachment.offloader.statistics().live_records == 0
        attachment.detach()
    assert parts(case.model) == before
    assert_same_gradients(ours, alone)


NEWER = """
import torch.utils.checkpoint as plain

older = plain._checkpoint_without_reentrant_generator

def impl(fn, args, kwargs, *, preserve_rng_state=True, context_fn=plain.noop_context_fn):
    yield from older(fn, preserve_rng_state, context_fn, "default", False, True, *args, **kwargs)

def shim(fn, preserve_rng_state=True, context_fn=plain.noop_context_fn, *rest, **kwargs):
    return plain._checkpoint_without_reentrant_generator_impl(fn, rest[3:], kwargs, context_fn=context_fn)

def checkpoint(function, *args, use_reentrant):
    body = plain._checkpoint_without_reentrant_generator_impl(function, args, {}, preserve_rng_state=True)
    next(body)
    result = function(*args)
    next(body, None)
    return result

plain._checkpoint_without_reentrant_generator_impl, plain.checkpoint = impl, checkpoint
plain._checkpoint_without_reentrant_generator = shim
"""
"""Makes PyTorch like 2.14 and later: `checkpoint` calls another generator function, with other arguments."""
PROGRAM = """
import sys
import torch
import actoffload
from actoffload import Plan

layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)) for _ in range(3)]
found = []
for context in (None, actoffload.offload_activations(path=sys.argv[1], policy=Plan((), once=(1,), regions=3))):
    torch.manual_seed(0)
    x = y = torch.ones(64, 64, requires_grad=True)
    with context or torch.enable_grad():
        for layer in layers:
            y = actoffload.checkpoint(layer, y)
    y.sum().backward()
    found.append(x.grad)
seen = context.offloader.statistics()
print(torch.equal(*found), seen.regions, seen.regions_once)
"""


def test_the_form_that_newer_releases_of_pytorch_have(tmp_path: Path) -> None:
    newer = hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl")  # no patch is needed
    done = run_program(("" if newer else NEWER) + PROGRAM, str(tmp_path), errors=("Warning",))
    assert (done.stdout, done.returncode) == ("True 3 1\n", 0), done.stderr


# -- trainers ---------------------------------------------------------------------------------------------------------


class Choosing(TrainerCallback):
    """Chooses other regions to run once in each step."""

    def __init__(self, trainer: Any, regions: int) -> None:
        self._trainer, self._chosen = trainer, choices(regions, "trainer")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.actoffload.offloader.store.regions.follow(next(self._chosen))


def trainer_of_transformers(place: Path) -> Any:
    return hf_models.make_trainer(place, gradient_accumulation_steps=2, **hf_models.checkpointing(reentrant=False))


def trainer_of_trl(place: Path) -> Any:
    """SFT, where checkpointing is on by default."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    data = datasets.Dataset.from_dict({"text": [hf_models.sentence(seed) for seed in range(16)]})
    args = trl.SFTConfig(str(place), max_length=hf_models.LENGTH, **hf_models.QUIET)
    return trl.SFTTrainer(
        hf_models.llama(dropout=0.1), args=args, train_dataset=data, processing_class=hf_models.tokenizer()
    )


@pytest.mark.parametrize("make", [trainer_of_transformers, trainer_of_trl])
def test_whichever_regions_run_once_a_trainer_trains_alike(make: Callable[[Path], Any], tmp_path: Path) -> None:
    alone = hf_models.train(make(tmp_path))
    trainer = make(tmp_path)
    trainer.add_callback(Choosing(trainer, 2))
    plan = Plan((), once=(0,), regions=2)
    ours = hf_models.train(trainer, policy=plan, target="nvme", path=tmp_path, min_bytes=0, announce="none")
    assert ours.statistics is not None
    assert ours.statistics.regions == 2
    assert_same_run(ours, alone)
    checkpointed = [module for module in trainer.model.modules() if getattr(module, "gradient_checkpointing", False)]
    functions = {module._gradient_checkpointing_func.func for module in checkpointed}
    assert functions == {torch.utils.checkpoint.checkpoint}


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (text for name, text in pages.BLOCKS.items() if name.startswith("docs/checkpointing.md"))
    names: dict[str, Any] = {"__name__": "page"}
    exec(block.replace("range(10)", "range(4)"), names)  # the same calls
    names["attachment"].offloader.close()
    assert capsys.readouterr().out.startswith("8\n")
