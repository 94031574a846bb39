"""Programs that train with transformers, TRL, Accelerate and DeepSpeed: alone, and offloaded in three ways.

``env``: the program is not changed, and ``ACTOFFLOAD`` is set; ``flag``: by the framework's command line or
configuration; ``code``: by `attach`. Each takes two steps of two micro-batches, with an evaluation between them. One
process runs all of them, with ``ACTOFFLOAD`` set: for all but ``env``, the functions that it patches are put back.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
from collections.abc import Callable
from itertools import count
from typing import Any

import accelerate
import actoffload.integrations.deepspeed
import actoffload.integrations.hf
import datasets
import deepspeed
import torch
import transformers
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
from torch import nn
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import actoffload
from tests.integration.evidence import noting_offloaders, unpatched
from tests.integration.hf_models import QUIET, llama, sentence, texts, tokenizer
from tests.integration.processes import main, scratch

STEPS = QUIET | {"gradient_accumulation_steps": 2, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
Found = dict[str, Any]
_sizes = count(1024)
"""A ``min_bytes`` for each program, so that each has an offloader of its own, which announces itself."""


def options() -> dict[str, Any]:
    """The values of ``ACTOFFLOAD`` and its variables, as options for the ways ``flag`` and ``code``."""
    return {"target": "nvme", "path": str(scratch()), "min_bytes": next(_sizes), "policy": "greedy"}


class Collector(transformers.TrainerCallback):
    """Stands for a reporter such as TensorBoard's."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(trainer: Any, way: str) -> Found:
    collector = Collector()
    trainer.add_callback(collector)
    if way == "code":
        actoffload.integrations.hf.attach(trainer, **options())
    elif way == "flag":
        words = [word for name, value in options().items() for word in (f"--actoffload_{name}", str(value))]
        parser = transformers.HfArgumentParser(actoffload.integrations.hf.OffloadArguments)
        parser.parse_args_into_dataclasses(words)[0].attach(trainer)
    trainer.train()
    losses = [log[name] for log in collector.logs for name in ("loss", "eval_loss") if name in log]
    ours = [{name: value for name, value in log.items() if name.startswith("actoffload/")} for log in collector.logs]
    found = {"losses": losses, "weights": digest(trainer.model), "logs": [log for log in ours if log]}
    if way in ("code", "flag"):
        trainer.actoffload.detach()
    left = {"attached": hasattr(trainer, "actoffload"), "checkpointing": trainer.args.activation_checkpointing_kwargs}
    return {**found, "left": left}


def trainer(checkpointed: bool, way: str) -> Found:
    """transformers' Trainer, with its own flag for offloading, which is taken over, and two reporters."""
    chosen: dict[str, Any] = {}
    if checkpointed:
        offload = {"offload": "nvme"} if way == "env" else {}
        chosen = {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": False, **offload},
        }
    elif way == "env":
        os.environ |= {"TENSORBOARD_LOGGING_DIR": f"{scratch()}/tensorboard", "TRACKIO_DIR": f"{scratch()}/trackio"}
        chosen = {"report_to": ["tensorboard", "trackio"], "project": "test", "trackio_static_space_id": False}
    arguments = transformers.TrainingArguments(str(scratch()), **{**STEPS, **chosen})
    data = texts()
    return train(transformers.Trainer(llama(), args=arguments, train_dataset=data, eval_dataset=data[:4]), way)


def sft(checkpointed: bool, way: str) -> Found:
    """TRL's trainer, with its own flag for offloading, which names a target and is taken over."""
    flag: Any = "nvme" if way == "env" else False
    data = datasets.Dataset.from_dict({"text": [sentence(seed) for seed in range(16)]})
    config = SFTConfig(
        str(scratch()), max_length=32, activation_offloading=flag, gradient_checkpointing=checkpointed, **STEPS
    )
    return train(
        SFTTrainer(llama(), args=config, train_dataset=data, eval_dataset=data, processing_class=tokenizer()), way
    )


def batches(number: int) -> list[dict[str, Any]]:
    return [{name: value[None].expand(4, -1) for name, value in row.items()} for row in texts(number)]


def evaluated(model: Any) -> float:
    model.eval()
    with torch.no_grad():
        loss: float = model(**batches(1)[0]).loss.item()
    model.train()
    return loss


def loop(checkpointed: bool, way: str) -> Found:
    model: Any = llama()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if way == "code":
        actoffload.attach(model, **options())
    losses = []
    for number, batch in enumerate(batches(4)):
        if number == 2:
            losses.append(evaluated(model))
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "weights": digest(accelerator.unwrap_model(model))}


def engine(checkpointed: bool, way: str) -> Found:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo suffices; this op takes a minute to compile
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    initialize: Any = deepspeed.initialize
    if way == "flag":
        config["actoffload"], initialize = options(), actoffload.integrations.deepspeed.initialize
    model: Any = llama()
    if checkpointed:
        for layer in model.model.layers:
            layer.forward = functools.partial(checkpointed_forward, layer.forward)
    made, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
    if way == "code":
        actoffload.attach(made, **options())
    losses = []
    for number, batch in enumerate(batches(4)):
        if number == 2:
            losses.append(evaluated(made))
        loss = made(**batch).loss
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    found = {"losses": losses, "weights": digest(made.module)}
    made.destroy()
    return found


def checkpointed_forward(forward: Any, hidden: torch.Tensor, **named: Any) -> Any:
    """A layer in DeepSpeed's own checkpoint, which takes no keyword arguments."""
    return (
        checkpoint(functools.partial(forward, **named), hidden) if torch.is_grad_enabled() else forward(hidden, **named)
    )


PROGRAMS: dict[str, Callable[[bool, str], Found]] = {"trainer": trainer, "sft": sft, "loop": loop, "engine": engine}


def run(program: Callable[[bool, str], Found], checkpointed: bool, way: str) -> Found:
    """The results of a program, its announcements, and the bytes that it moved."""
    if way == "env":
        os.environ["ACTOFFLOAD_MIN_BYTES"] = str(next(_sizes))
    with (
        contextlib.nullcontext() if way == "env" else unpatched(),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        noting_offloaders() as made,
    ):
        found = program(checkpointed, way)
    printed = [line for line in (out.getvalue() + err.getvalue()).splitlines() if "actoffload: target" in line]
    statistics = [offloader.statistics() for offloader in made]
    for offloader in made:
        offloader.close()
    moved, regions = [each.moved_bytes for each in statistics], [each.regions for each in statistics]
    return {**found, "printed": printed, "moved": moved, "regions": regions}


def work() -> dict[tuple[str, bool, str], Found]:
    found = {}
    for way in ("none", "env", "code", "flag"):
        for name, program in PROGRAMS.items():
            for checkpointed in (False, True):
                if not (name == "loop" and way == "flag"):  # Accelerate has no flag for offloading
                    found[name, checkpointed, way] = run(program, checkpointed, way)
    return found


if __name__ == "__main__":
    main(work)
