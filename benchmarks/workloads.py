"""What the benchmarks train: the built-in GPT, and models of Transformers and diffusers with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from actoffload.testing.gpt import GPTConfig
from actoffload.tools import models
from actoffload.tools.on_paper import Case

CAUSAL_MODELS = {"llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer"}
LANGUAGE_MODELS = {"gpt2": "gpt", "bert": "bert", "t5": "t5"}
THREADS = 2
"""Of whole steps on the CPU."""


def gpt(layers: int, width: int, sequence: int, *, batch: int = 8) -> dict[str, Any]:
    """The built-in GPT, for `build`."""
    return {"model": "gpt", "batch": batch, "gpt": {"layers": layers, "width": width, "seq": sequence}}


TINY = gpt(2, 64, 64, batch=2)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its forward.

    Attributes:
        model: the model.
        forward: one forward, which returns the loss.
        blocks: names of the layers, which full recompute checkpoints one by one.
    """

    model: nn.Module
    forward: Callable[[], Tensor]
    blocks: tuple[str, ...]


def build(spec: dict[str, Any]) -> Workload:
    """The workload that ``spec`` names, on torch's default device; weights and inputs by torch's seed.

    Args:
        spec: ``model`` ("gpt", "gpt2", "bert", "t5", "vit", "unet", "llama" or "qwen2"), ``dtype``,
            ``batch`` (sequences or images) and sizes: ``gpt`` (fields of `GPTConfig`) for the first, else ``sizes``.
            ``checkpointing``: the model's own gradient checkpointing is on, as its framework switches it on.

    Raises:
        ValueError: there is no such model.
    """
    work = _build(spec)
    model: Any = work.model
    if spec.get("checkpointing"):
        if hasattr(model, "gradient_checkpointing_enable"):  # Transformers
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:  # diffusers
            model.enable_gradient_checkpointing()
    return work


def _build(spec: dict[str, Any]) -> Workload:
    name = spec["model"]
    if name in LANGUAGE_MODELS:
        return _language(spec)
    makers = {"gpt": _gpt, "vit": _vit, "unet": _unet, **dict.fromkeys(CAUSAL_MODELS, _causal)}
    if name not in makers:
        raise ValueError(f"model={name!r}: choose one of {[*LANGUAGE_MODELS, *makers]}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, spec["dtype"]))
    try:
        return makers[name](spec)
    finally:
        torch.set_default_dtype(before)


def _gpt(spec: dict[str, Any]) -> Workload:
    sizes, device = GPTConfig(**spec["gpt"]), torch.get_default_device()
    return _made(models.build_gpt(sizes, dtype=torch.get_default_dtype(), device=device), spec)


def _made(made: models.Trainee, spec: dict[str, Any]) -> Workload:
    batch = made.batch(spec["batch"])
    return Workload(model=made.model, forward=lambda: made.loss(batch), blocks=made.blocks)


def _language(spec: dict[str, Any]) -> Workload:
    """GPT-2, BERT or T5; the sizes are the fields of `Case`."""
    model = LANGUAGE_MODELS[spec["model"]]
    return _made(models.build(Case(model=model, batch=spec["batch"], dtype=spec["dtype"], **spec["sizes"])), spec)


def _vit(spec: dict[str, Any]) -> Workload:
    """Sizes: ``hidden``, ``layers``, ``image`` and ``patch`` (pixels), ``classes``."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = spec["sizes"]
    shape: dict[str, Any] = {f"{name}_size": sizes[name] for name in ("hidden", "image", "patch")}
    shape |= {"num_hidden_layers": sizes["layers"], "num_attention_heads": max(1, sizes["hidden"] // 64)}
    shape |= {"intermediate_size": 4 * sizes["hidden"], "num_labels": sizes["classes"]}
    model: Any = ViTForImageClassification(ViTConfig(**shape)).train()
    images = torch.randn(spec["batch"], 3, sizes["image"], sizes["image"])
    labels = torch.randint(0, sizes["classes"], (spec["batch"],))
    blocks = _modules_of(model, "ViTLayer")
    return Workload(model=model, forward=lambda: model(pixel_values=images, labels=labels).loss, blocks=blocks)


def _unet(spec: dict[str, Any]) -> Workload:
    """Sizes: ``channels`` (of the first level; twice as many in the second), ``image`` (pixels), ``text`` (tokens)."""
    from diffusers import UNet2DConditionModel

    sizes = spec["sizes"]
    channels, width = sizes["channels"], 2 * sizes["channels"]
    model: Any = UNet2DConditionModel(
        sample_size=sizes["image"],
        block_out_channels=(channels, 2 * channels),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=width,
        attention_head_dim=max(1, channels // 64),
    ).train()
    noisy, noise = torch.randn(2, spec["batch"], 4, sizes["image"], sizes["image"]).unbind()
    text = torch.randn(spec["batch"], sizes["text"], width)
    times = torch.randint(0, 1000, (spec["batch"],))
    blocks = _modules_of(model, "ResnetBlock2D") + _modules_of(model, "Transformer2DModel")
    loss = nn.functional.mse_loss
    return Workload(model=model, forward=lambda: loss(model(noisy, times, text).sample, noise), blocks=blocks)


def _causal(spec: dict[str, Any]) -> Workload:
    """Sizes: ``hidden``, ``layers``, ``inner``, ``heads``, ``kv_heads``, ``vocab``, ``seq``, ``lora`` (its rank)."""
    sizes = spec["sizes"]
    config = models.configuration(
        spec["model"],
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=sizes["seq"],
    )
    made: Any = models.build_transformers(
        config, sequence=sizes["seq"], dtype=torch.get_default_dtype(), device=torch.get_default_device()
    )
    if "lora" in sizes:
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(made.model, LoraConfig(r=sizes["lora"], target_modules="all-linear"))
        made = replace(made, model=adapted)
    return _made(replace(made, blocks=_modules_of(made.model, CAUSAL_MODELS[spec["model"]])), spec)


def _modules_of(model: nn.Module, kind: str) -> tuple[str, ...]:
    return tuple(name for name, module in model.named_modules() if type(module).__name__ == kind)


def checkpoint_blocks(model: nn.Module, blocks: tuple[str, ...], saved: Sequence[Any] = ()) -> Callable[[], None]:
    """Run every block under ``torch.utils.checkpoint`` (non-reentrant), which saves what these operations return.

    Returns:
        What takes that back.
    """
    contexts = partial(create_selective_checkpoint_contexts, list(saved)) if saved else noop_context_fn
    modules = [model.get_submodule(name) for name in blocks]
    for module in modules:
        # An attribute of the instance goes before the class's method.
        forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)
        object.__setattr__(module, "forward", forward)

    def undo() -> None:
        for module in modules:
            object.__delattr__(module, "forward")

    return undo
