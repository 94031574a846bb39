"""Tiny models, tokenizers and trainers with random weights, made here: nothing is downloaded."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from actoffload.integrations.hf import attach
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from actoffload import Offloader
from actoffload import attach as attach_module
from tests.integration.evidence import Run, counting_owners

# Accelerate and Transformers read files of metadata again and again, which takes a tenth of a training.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
importlib.metadata.version = functools.cache(importlib.metadata.version)

WORDS = 64
LENGTH = 32


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words ``w4`` … ``w63``."""
    vocabulary = {name: number for number, name in enumerate(("<pad>", "<eos>", "<bos>", "<unk>"))}
    vocabulary |= {f"w{number}": number for number in range(4, WORDS)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)


def sentence(seed: int, words: int = LENGTH) -> str:
    """Words that `tokenizer` knows."""
    numbers = torch.randint(4, WORDS, (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in numbers.tolist())


def llama(*, tied: bool = False, dropout: float = 0.0) -> LlamaForCausalLM:
    """A decoder of two layers."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    special: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = LlamaConfig(**sizes, **heads, **special, tie_word_embeddings=tied, attention_dropout=dropout)
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    """A decoder with a tied head and dropout."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=2, n_head=2))


def t5() -> T5ForConditionalGeneration:
    """An encoder and a decoder with dropout."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32)
    return ViTForImageClassification(config)


def texts(count: int = 16) -> list[dict[str, Tensor]]:
    ids = torch.randint(4, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def images(count: int = 16) -> list[dict[str, Any]]:
    pixels = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": image, "labels": number % 2} for number, image in enumerate(pixels)]


QUIET: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 7}
QUIET |= {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
QUIET |= {"dataloader_pin_memory": False}
"""Arguments of every trainer here."""


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(directory), **{**QUIET, **options})


class Recorder(TrainerCallback):
    """Records the loss of every training step, and the gradients before each optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self.run = Run()
        self._trainer = trainer
        training_step = trainer.training_step

        def recording(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = training_step(*args, **kwargs)
            self.run.losses.append(loss.detach().clone())
            return loss

        trainer.training_step = recording
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, parameter in self._trainer.model.named_parameters():
            if parameter.grad is not None:
                self.run.tensors[f"gradient {name} at {state.global_step}"] = parameter.grad.clone()

    def finish(self) -> Run:
        """The recorded run, with the weights of this moment."""
        for name, tensor in self._trainer.model.state_dict().items():
            self.run.tensors[f"weight {name}"] = tensor.detach().clone()
        return self.run


def train(trainer: Any, *, resume: str | None = None, **options: Any) -> Run:
    """Train; with options, attached to an offloader, which is closed afterwards."""
    recorder = Recorder(trainer)
    if not options:
        trainer.train(resume_from_checkpoint=resume)
        return recorder.finish()
    with attached(trainer, **options) as offloader:
        with counting_owners(lambda: trainer.model.parameters()) as meter:
            trainer.train(resume_from_checkpoint=resume)
        offloader.synchronize()
        run = recorder.finish()
        run.statistics = offloader.statistics()
        run.moved_parameter_bytes = meter.parameter_bytes
        assert meter.other_bytes > 0
    return run


@contextmanager
def attached(trainer: Any, **options: Any) -> Iterator[Offloader]:
    """Attach a trainer inside the block; yields its offloader, which is closed afterwards."""
    attachment = attach(trainer, **options)
    try:
        yield attachment.offloader
    finally:
        attachment.detach()
        attachment.offloader.close()


def checkpointing(*, reentrant: bool) -> dict[str, Any]:
    """Training arguments that switch activation checkpointing on."""
    options = {"use_reentrant": reentrant}
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": options}


def make_trainer(directory: Path, kind: type[Trainer] = Trainer, **options: Any) -> Any:
    examples: Any = texts()
    return kind(llama(), arguments(directory / "out", **options), train_dataset=examples, eval_dataset=examples[:4])


def compare(make: Callable[[], Any], path: Path, **options: Any) -> tuple[Run, Run]:
    """The same training with its activations on disk, and without."""
    return train(make(), **spool(path, **options)), train(make())


def spool(path: Path, **options: Any) -> dict[str, Any]:
    """Options without a plan: these tests check that everything moves."""
    usual = {"target": "nvme", "path": path, "min_bytes": 1024, "device_budget": "128KiB", "policy": "greedy"}
    return usual | options


def accelerate_loop(when: str | None, precision: str, options: dict[str, Any]) -> Run:
    """Three updates of two micro-batches each, as Accelerate's guide writes them."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model: Any = llama()
    attachment = attach_module(model, **options) if when == "before prepare" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(texts(24), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if when == "after prepare":
        attachment = attach_module(model, **options)
    run = Run()
    with counting_owners(lambda: model.parameters()) if attachment else nullcontext() as meter:
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                run.losses.append(loss.detach().clone())
                for name, parameter in model.named_parameters():
                    run.tensors[f"gradient {name} at {number}"] = parameter.grad.clone()
                optimizer.step()
                optimizer.zero_grad()
            del loss
    run.tensors |= {f"weight {name}": tensor.clone() for name, tensor in model.state_dict().items()}
    if attachment is not None and meter is not None:
        attachment.offloader.synchronize()
        run.statistics = attachment.offloader.statistics()
        run.moved_parameter_bytes = meter.parameter_bytes
        attachment.detach()
        attachment.offloader.close()
    return run
