"""Runs the blocks of Python about frameworks: each of docs/upstream beside a program without it, the rest once."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn, randn

import actoffload
from tests import pages
from tests.integration.processes import ROOT, main, scratch

Result = tuple[list[float], Any]
"""Losses, and the offloader or None."""


def python_of(note: str) -> str:
    """The block of Python in a note."""
    [block] = re.findall(r"^```python\n(.*?)^```$", (ROOT / f"docs/upstream/{note}.md").read_text(), re.M | re.S)
    return str(block)


def names_of(note: str) -> dict[str, Any]:
    """The names that the block of Python in a note defines."""
    names: dict[str, Any] = {"__name__": note}
    exec(compile(python_of(note), f"{note}.md", "exec"), names)
    return names


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def transformers(shim: dict[str, Any] | None) -> Result:
    from transformers import Trainer, TrainingArguments

    from tests.integration.hf_models import QUIET, llama, texts

    kind: Any = shim["OffloadingTrainer"] if shim else Trainer
    losses = losses_of(kind(llama(), TrainingArguments(str(scratch()), **QUIET), train_dataset=texts()))
    return losses, kind.offloading.offloader if shim else None


def trl(shim: dict[str, Any] | None) -> Result:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from tests.integration.hf_models import QUIET, llama, sentence, tokenizer

    data = Dataset.from_dict({"text": [sentence(seed) for seed in range(16)]})
    config = SFTConfig(str(scratch()), max_length=32, **QUIET)
    trainer = SFTTrainer(llama(), args=config, train_dataset=data, processing_class=tokenizer())
    offloader = shim["attach"](trainer) if shim else None
    return losses_of(trainer), offloader


def deepspeed(shim: dict[str, Any] | None) -> Result:
    import deepspeed

    from tests.integration.hf_models import llama, texts

    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    model = llama()
    initialize = shim["initialize"] if shim else deepspeed.initialize
    engine, offloader, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
    losses = []
    for row in texts(3):
        loss = engine(**{name: value[None].expand(4, -1) for name, value in row.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, offloader


PROGRAMS: dict[str, Callable[[dict[str, Any] | None], Result]] = {
    "deepspeed": deepspeed,
    "transformers": transformers,
    "trl": trl,
}


def layers() -> Any:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))


def step(model: Any) -> None:
    getattr(model, "backward", Tensor.backward)(model(randn(4, 16)).square().mean())


def passed() -> dict[str, dict[str, Any]]:
    """For each block, by page and heading: the names that it uses without defining them."""
    import torch_remat
    from torch.distributed.fsdp import fully_shard

    from tests.integration.hf_models import make_trainer

    compiled, checkpointed = layers(), layers()
    compiled.blocks = list(compiled)
    setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="aot_eager"))  # noqa: B010
    for layer in checkpointed:
        layer.forward = torch_remat.checkpoint()(layer.forward)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    lightning = {"task": layers(), "trainer": SimpleNamespace(fit=step)}
    tuning = {"SFTTrainer": lambda *_, **__: make_trainer(scratch()), "model": None, "args": None, "data": None}
    return {
        "docs/frameworks/deepspeed.md, DeepSpeed": {"model": layers(), "config": config},
        "docs/frameworks/transformers.md, Transformers, TRL and PEFT": tuning,
        "docs/frameworks/distributed.md, FSDP, DDP, tensor and pipeline parallel": {
            "model": layers(),
            "fully_shard": fully_shard,
        },
        "docs/frameworks/compile.md, torch.compile": {"model": compiled},
        "docs/frameworks/lightning.md, Lightning": lightning,
        "docs/frameworks/loops.md, diffusers, and your own loop": {"model": layers()},
        "docs/remat.md, torch_remat": {"model": checkpointed},
    }


def saved_bytes() -> int:
    return sum(each.statistics().packed_bytes for each in gc.get_objects() if type(each) is actoffload.Offloader)


def run_block(name: str, names: dict[str, Any]) -> int:
    """The bytes that offloaders packed in a block, and in a step after it."""
    before, names["actoffload"] = saved_bytes(), actoffload
    exec(compile(pages.BLOCKS[name].replace("/mnt/nvme0", str(scratch())), name, "exec"), names)
    if model := names.get("engine", names.get("model")):
        step(model)
    return saved_bytes() - before


def work() -> dict[str, Any]:
    """For each note, the losses with and without its shim and the moved bytes; for any other block, packed bytes."""
    import deepspeed

    # gloo suffices; this op takes a minute to compile, in the first block about DeepSpeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found: dict[str, Any] = {name: run_block(name, names) for name, names in passed().items()}
    for note, program in PROGRAMS.items():
        losses, offloader = program(names_of(note))
        plain, _ = program(None)
        found[note] = {"losses": losses, "plain": plain, "moved": offloader.statistics().moved_bytes}
    return found


if __name__ == "__main__":
    main(work)
