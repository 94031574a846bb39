"""An unchanged program that trains with transformers, TRL, Accelerate and DeepSpeed: with and without ``ACTOFFLOAD``.

``OFFLOAD_FLAG`` is the value of the frameworks' own flags for offloading.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import accelerate
import datasets
import deepspeed
import torch
import transformers
from torch import nn
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from tests.integration.hf_models import QUIET, llama, sentence, texts, tokenizer
from tests.integration.processes import main, scratch


class Collector(transformers.TrainerCallback):
    """Stands for what reports logs: W&B, TensorBoard, MLflow."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep what is logged."""
        self.logs.append(dict(logs))


def digest(model: nn.Module) -> str:
    """A hash of all weights."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def finish(trainer: Any) -> dict[str, Any]:
    """Train, and tell."""
    collector = Collector()
    trainer.add_callback(collector)
    trainer.train()
    trainer.evaluate()
    losses = [log["loss"] for log in collector.logs if "loss" in log]
    losses += [log["eval_loss"] for log in collector.logs if "eval_loss" in log]
    ours = [{name: value for name, value in log.items() if name.startswith("actoffload/")} for log in collector.logs]
    kwargs = trainer.args.activation_checkpointing_kwargs
    left = {"attached": hasattr(trainer, "actoffload"), "checkpointing": kwargs}
    return {"losses": losses, "weights": digest(trainer.model), "logs": ours, "left": left}


def trainer(directory: str, **options: Any) -> dict[str, Any]:
    """transformers' Trainer, four steps of two micro-batches, evaluation in between."""
    known = {**QUIET, "gradient_accumulation_steps": 2, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    arguments = transformers.TrainingArguments(directory, **{**known, **options})
    data = texts()
    return finish(transformers.Trainer(llama(), args=arguments, train_dataset=data, eval_dataset=data[:4]))


def checkpointed(directory: str) -> dict[str, Any]:
    """The same with transformers' own flag for offloading."""
    kwargs = {"use_reentrant": False, "offload": os.environ.get("OFFLOAD_FLAG", False)}
    return trainer(directory, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)


def sft(directory: str) -> dict[str, Any]:
    """TRL's trainer with TRL's own flag for offloading."""
    data = datasets.Dataset.from_dict({"text": [sentence(seed) for seed in range(16)]})
    flag = "OFFLOAD_FLAG" in os.environ
    config = SFTConfig(directory, max_length=32, activation_offloading=flag, **QUIET)
    return finish(SFTTrainer(llama(), args=config, train_dataset=data, eval_dataset=data, processing_class=tokenizer()))


def loop(directory: str) -> dict[str, Any]:
    """A loop of Accelerate's."""
    model = llama()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for row in texts(8):
        with accelerator.accumulate(model):
            batch = {name: value[None].expand(4, -1) for name, value in row.items()}
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "weights": digest(accelerator.unwrap_model(model))}


def engine(directory: str) -> dict[str, Any]:
    """A loop of DeepSpeed's, with a device for its checkpoints in the configuration."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does; this would be compiled for a minute
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "activation_checkpointing": {"device": "nvme", "nvme_path": directory} if "OFFLOAD_FLAG" in os.environ else {},
    }
    model = llama()
    made, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    losses = []
    for row in texts(4):
        loss = made(**{name: value[None].expand(4, -1) for name, value in row.items()}).loss
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": digest(made.module), "on": getattr(made, "actoffload", None) is not None}


PROGRAMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "trainer": trainer,
    "checkpointed": checkpointed,
    "sft": sft,
    "loop": loop,
    "engine": engine,
}


def work() -> dict[str, Any]:
    """What came of each program, and what was moved."""
    found: dict[str, Any] = {name: program(str(scratch())) for name, program in PROGRAMS.items()}
    api = sys.modules["actoffload.api"]
    return {**found, "moved": [each.statistics().moved_bytes for each in api._offloaders.values()]}


if __name__ == "__main__":
    main(work)
